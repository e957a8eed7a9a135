"""What the TensorRT engine keeps on the device: arrays, rows with prefix slots, schedules."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from vla_runtime.engines.cuda_runtime import CudaRuntime
from vla_runtime.engines.graph_replay import GraphedWork
from vla_runtime.engines.tensorrt.adapter import TensorInfo
from vla_runtime.families.family import PolicyDims
from vla_runtime.files.safetensors_reader import bfloat16_to_float32, float32_to_bfloat16

# TensorRT takes addresses that are multiples of this.
_ALIGNMENT = 256


class DeviceArray:
    """An array on the device.

    Args:
        runtime: of the device.
        shape: of the array.
        dtype: numpy's name or `bfloat16`; what is written is converted to it.
    """

    def __init__(self, runtime: CudaRuntime, shape: tuple[int, ...], dtype: str) -> None:
        self._runtime = runtime
        self.shape, self.dtype = shape, dtype
        self._held = np.dtype(np.uint16 if dtype == 'bfloat16' else dtype)
        self.size = math.prod(shape) * self._held.itemsize
        self.address = runtime.allocate(self.size)

    @classmethod
    def of(cls, runtime: CudaRuntime, tensor: TensorInfo) -> DeviceArray:
        """Shaped and typed as an engine's input or output."""
        return cls(runtime, tensor.shape, tensor.dtype)

    def write(self, values: np.ndarray) -> None:
        """Convert and copy to the device, in order with all other work.

        Raises:
            ValueError: another number of values.
        """
        if values.size != math.prod(self.shape):
            raise ValueError(f'{values.shape} does not fit an engine buffer of {self.shape}')
        if self.dtype == 'bfloat16':
            values = float32_to_bfloat16(values)
        self._runtime.upload(self.address, values.astype(self._held, copy=False))

    def read(self) -> np.ndarray:
        """Wait for all work and copy back; floats as float32."""
        values = self._runtime.download(self.address, np.empty(self.shape, self._held))
        if self.dtype == 'bfloat16':
            return bfloat16_to_float32(values)
        return values.astype(np.float32) if values.dtype == np.float16 else values

    def draw(self, random: np.random.Generator) -> None:
        """Fill with numbers that a network can be tried on; a mask becomes all true."""
        if self.dtype == 'bool':
            self.write(np.ones(self.shape, bool))
        else:
            self.write(random.standard_normal(self.shape, np.float32))

    def copy_from(self, source: DeviceArray) -> None:
        """Copy within the device."""
        self._runtime.copy(self.address, source.address, self.size)

    def free(self) -> None:
        self._runtime.free(self.address)


class RowArrays:
    """Rows of an array on the device, each at an address that an engine can be bound to."""

    def __init__(self, runtime: CudaRuntime, count: int, width: int) -> None:
        self._runtime = runtime
        # Padding to the next address that TensorRT takes.
        self._stride = -(-width * 4 // _ALIGNMENT) * (_ALIGNMENT // 4)
        self._count, self._width = count, width
        self._start = runtime.allocate(count * self._stride * 4)

    def write(self, rows: np.ndarray) -> None:
        """(count, width) float32 to the device."""
        padded = np.zeros((self._count, self._stride), np.float32)
        padded[:, : self._width] = rows.reshape(self._count, self._width)
        self._runtime.upload(self._start, padded)

    def address(self, index: int) -> int:
        return self._start + index * self._stride * 4

    def free(self) -> None:
        self._runtime.free(self._start)


class PrefixSlot:
    """Keys, values and mask of one prefix: the prefix engine's outputs and the expert's inputs."""

    def __init__(self, runtime: CudaRuntime, prefix: Mapping[str, TensorInfo]) -> None:
        self.arrays = {
            name: DeviceArray.of(runtime, prefix[name])
            for name in ('past_key', 'past_value', 'prefix_mask')
        }

    @property
    def addresses(self) -> dict[str, int]:
        return {name: array.address for name, array in self.arrays.items()}


class RowBuffers:
    """The buffers of one number of prompt rows, its prefix slots included."""

    def __init__(
        self,
        runtime: CudaRuntime,
        prefix: Mapping[str, TensorInfo],
        expert: Mapping[str, TensorInfo],
        slots: int,
    ) -> None:
        self.tokens = DeviceArray.of(runtime, prefix['tokens'])
        self.token_mask = DeviceArray.of(runtime, prefix['token_mask'])
        self.slots = [PrefixSlot(runtime, prefix) for _ in range(slots)]
        self.row_weight = DeviceArray.of(runtime, expert['row_weight'])
        self.velocity = DeviceArray.of(runtime, expert['velocity'])
        self.state = DeviceArray.of(runtime, expert['state']) if 'state' in expert else None


class Schedule:
    """The buffers of one number of denoise steps; what they hold may change, the graphs stay.

    Args:
        runtime: of the device.
        steps: N.
        conditioning: C, the width of a row of the time table.
        dims: of the policy.
    """

    def __init__(
        self, runtime: CudaRuntime, steps: int, conditioning: int, dims: PolicyDims
    ) -> None:
        self.steps = steps
        self.table = RowArrays(runtime, steps, conditioning)
        self.times = RowArrays(runtime, steps, 1)
        self.plan_weight = RowArrays(runtime, steps, dims.horizon)
        self.dt = RowArrays(runtime, 1, 1)
        # What the buffers hold: times and dt.
        self.key: tuple[float, ...] = ()
        # By number of rows and slot.
        self.denoise: dict[tuple[int, int], GraphedWork] = {}

    def load(self, key: tuple[float, ...], table: np.ndarray) -> None:
        """Fill with the flow times and the step size of `key`, (t_0 … t_N-1, dt)."""
        self.table.write(table)
        self.times.write(np.asarray(key[:-1], np.float32))
        self.dt.write(np.asarray(key[-1:], np.float32))
        self.key = key

    def close(self) -> None:
        """Free graphs, then buffers."""
        for work in self.denoise.values():
            work.close()
        for rows in (self.table, self.times, self.plan_weight, self.dt):
            rows.free()


def dims_of_engines(dims: PolicyDims, rows: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes of all inputs and outputs, per network, as the design names them.

    Args:
        dims: of the policy.
        rows: R, prompt rows.
    """
    vision, language = dims.vision, dims.language
    past = (language.depth, rows, language.num_kv_heads, dims.prefix_length, language.head_dim)
    prefix = {'past_key': past, 'past_value': past, 'prefix_mask': (rows, dims.prefix_length)}
    actions = (1, dims.horizon, dims.action_dim)
    # The adaptive norms' modulations of pi0.5; the time's share of one layer of pi0.
    norms = 1 if dims.state_dim else (2 * dims.expert.depth + 1) * 3
    expert = {
        'x': actions,
        **prefix,
        'time_conditioning': (1, norms * dims.expert.width),
        't': (),
        'dt': (),
        'row_weight': (rows,),
        'plan': actions,
        'plan_weight': (1, dims.horizon, 1),
        'x_next': actions,
        'velocity': (rows, *actions[1:]),
    }
    if dims.state_dim:
        expert['state'] = (rows, dims.state_dim)
    return {
        'vision': {
            'pixels': (1, 3, vision.image_size, vision.image_size),
            'image_tokens': (1, vision.tokens, language.width),
        },
        'prefix': {
            'image_tokens': (dims.cameras, vision.tokens, language.width),
            'image_mask': (dims.cameras,),
            'tokens': (rows, dims.prompt_length),
            'token_mask': (rows, dims.prompt_length),
            **prefix,
        },
        'expert': expert,
    }


def check_tensors(dims: PolicyDims, engines: Mapping[str, Mapping[str, TensorInfo]]) -> None:
    """Check that engines take and give what the policy's dimensions say.

    Args:
        dims: of the policy.
        engines: inputs and outputs of each engine, by `tensorrt_store.engine_names`.

    Raises:
        ValueError: a tensor that is missing, unknown, or of another shape or type than its other
            end; the message names engine and tensor.
    """
    for name, tensors in engines.items():
        network, _, rows = name.partition('_r')
        expected = dims_of_engines(dims, int(rows or 1))[network]
        odd = sorted(set(tensors) ^ set(expected))
        if odd:
            raise ValueError(
                f"engine '{name}': its inputs and outputs are not this policy's: {', '.join(odd)}; "
                'export the ONNX files and build again'
            )
        for tensor, shape in expected.items():
            found = tensors[tensor].shape
            # A number may be a scalar or a list of one.
            if found != shape and (shape or math.prod(found) != 1):
                raise ValueError(
                    f"engine '{name}': '{tensor}' is {found}, but this policy's dimensions in "
                    f'policy.yaml make it {shape}; export the ONNX files and build again'
                )
        _check_types(name, tensors, engines)


def _check_types(
    name: str, tensors: Mapping[str, TensorInfo], engines: Mapping[str, Mapping[str, TensorInfo]]
) -> None:
    """Both ends of a shared buffer have one type, and rows of the schedule are float32."""
    steps = ('x', 'x_next', 'time_conditioning', 't', 'dt', 'plan_weight')
    typed = dict.fromkeys(steps, 'float32')
    if name.startswith('expert'):
        other = engines[name.replace('expert', 'prefix')]
        typed |= {key: other[key].dtype for key in ('past_key', 'past_value', 'prefix_mask')}
    if name.startswith('prefix'):
        typed['image_tokens'] = engines['vision']['image_tokens'].dtype
    for key, dtype in typed.items():
        if key in tensors and tensors[key].dtype != dtype:
            raise ValueError(
                f"engine '{name}': '{key}' is {tensors[key].dtype}, its other end is {dtype}; "
                'export the ONNX files and build again'
            )
