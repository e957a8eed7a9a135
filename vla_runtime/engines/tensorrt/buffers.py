"""Device buffers of the TensorRT engine: arrays, sessions, inputs of so many rows, schedules."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping

import numpy as np

from vla_runtime.bundle.onnx_files import (
    IMAGE_INPUTS,
    SCHEDULER_INPUTS,
    STEP_INPUTS,
    STEP_OUTPUTS,
    TEXT_INPUT,
)
from vla_runtime.engines.closing import close_on_error
from vla_runtime.engines.cuda_runtime import CudaRuntime
from vla_runtime.engines.graphed_work import GraphedWork
from vla_runtime.engines.onnx.shapes import GraphShapes
from vla_runtime.engines.tensorrt.adapter import TensorInfo
from vla_runtime.family.declaration import Family, PolicyDims
from vla_runtime.family.noise_schedule import UPDATE_WIDTH
from vla_runtime.files.safetensors_reader import bfloat16_to_float32, float32_to_bfloat16

# TensorRT takes addresses that are multiples of this.
_ALIGNMENT = 256


class DeviceArray:
    """An array on the device; what is written becomes `dtype`, numpy's name or `bfloat16`."""

    def __init__(self, runtime: CudaRuntime, shape: tuple[int, ...], dtype: str) -> None:
        self._runtime = runtime
        self.shape, self.dtype = shape, dtype
        self._held, self.size = _held(dtype), _bytes_of(shape, dtype)
        self.address = runtime.allocate(self.size)

    @classmethod
    def of(cls, runtime: CudaRuntime, tensor: TensorInfo) -> DeviceArray:
        return cls(runtime, tensor.shape, tensor.dtype)

    def write(self, values: np.ndarray) -> None:
        """Convert and copy to the device, in order with all work (ValueError: another size)."""
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
        """Fill with normally distributed numbers, a mask with True."""
        if self.dtype == 'bool':
            self.write(np.ones(self.shape, bool))
        else:
            self.write(random.standard_normal(self.shape, np.float32))

    def copy_from(self, source: DeviceArray) -> None:
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
        """Copy rows (count, width) float32 to the device."""
        padded = np.zeros((self._count, self._stride), np.float32)
        padded[:, : self._width] = rows.reshape(self._count, self._width)
        self._runtime.upload(self._start, padded)

    def address(self, index: int) -> int:
        return self._start + index * self._stride * 4

    def free(self) -> None:
        self._runtime.free(self._start)


def _held(dtype: str) -> np.dtype:
    """Type of numpy that holds a type of the device."""
    return np.dtype(np.uint16 if dtype == 'bfloat16' else dtype)


def _bytes_of(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * _held(dtype).itemsize


class PrefixSlot:
    """One prefix: the prefix engine's outputs, which are the expert's inputs of the same names."""

    def __init__(self, arrays: Mapping[str, DeviceArray]) -> None:
        self.arrays = arrays

    @property
    def addresses(self) -> dict[str, int]:
        return {name: array.address for name, array in self.arrays.items()}

    def copy_from(self, source: PrefixSlot) -> None:
        for name, array in self.arrays.items():
            array.copy_from(source.arrays[name])


class PrefixRows:
    """Inputs of the prefix for one number of prompt rows; every session uses them in turn.

    Args:
        prefix: inputs and outputs of its engine.
        inputs: names of the family's prefix inputs; the engine may take rows of the text table in
            place of one.

    Attributes:
        past: the engine's outputs by name, which a slot has.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        prefix: Mapping[str, TensorInfo],
        inputs: Collection[str],
    ) -> None:
        own_inputs = {*inputs, TEXT_INPUT} & set(prefix)
        self.past = {
            name: tensor
            for name, tensor in prefix.items()
            if name not in IMAGE_INPUTS and name not in own_inputs
        }
        self.prefix_inputs = {
            name: DeviceArray.of(runtime, tensor)
            for name, tensor in prefix.items()
            if name in own_inputs
        }


class RowBuffers(PrefixRows):
    """The same with those of the denoise steps, by inputs and outputs of the expert's engine."""

    def __init__(
        self,
        runtime: CudaRuntime,
        prefix: Mapping[str, TensorInfo],
        expert: Mapping[str, TensorInfo],
        inputs: Collection[str],
    ) -> None:
        super().__init__(runtime, prefix, inputs)
        own = {*self.past, *STEP_INPUTS, *SCHEDULER_INPUTS, *STEP_OUTPUTS, 'x'}
        self.head_inputs = {
            name: DeviceArray.of(runtime, tensor)
            for name, tensor in expert.items()
            if name not in own
        }
        self.row_weight = DeviceArray.of(runtime, expert['row_weight'])
        self.velocity = DeviceArray.of(runtime, expert['velocity'])


class SessionMemory:
    """Image tokens of all cameras, and prefix slots of each number of prompt rows.

    Args:
        rows: by number of prompt rows.
        slots: numbers of the slots.

    Attributes:
        slots: by number of rows and slot.

    Raises:
        CudaError: not enough memory; nothing stays allocated.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        image_tokens: TensorInfo,
        rows: Mapping[int, PrefixRows],
        slots: Collection[int],
    ) -> None:
        self._arrays: list[DeviceArray] = []

        def made(tensor: TensorInfo) -> DeviceArray:
            self._arrays.append(DeviceArray.of(runtime, tensor))
            return self._arrays[-1]

        with close_on_error(self._free):
            self.image_tokens = made(image_tokens)
            self.slots = {
                (count, slot): PrefixSlot(
                    {name: made(tensor) for name, tensor in buffers.past.items()}
                )
                for count, buffers in rows.items()
                for slot in slots
            }

    @staticmethod
    def size(image_tokens: TensorInfo, rows: Mapping[int, PrefixRows], slots: int) -> int:
        """Return the bytes that so many slots take, with the image tokens."""
        past = [tensor for buffers in rows.values() for tensor in buffers.past.values()]
        of_slot = sum(_bytes_of(tensor.shape, tensor.dtype) for tensor in past)
        return _bytes_of(image_tokens.shape, image_tokens.dtype) + slots * of_slot

    def _free(self) -> None:
        for array in self._arrays:
            array.free()


class Schedule:
    """Buffers for one number of denoise steps; `load` refills them, the graphs stay.

    With `has_updates` steps take an update and noise in place of a time and a step.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        steps: int,
        conditioning: int,
        dims: PolicyDims,
        has_updates: bool,
    ) -> None:
        self.steps = steps
        self._arrays: list[RowArrays] = []
        # A live change that does not fit into memory is tried again, and must not take more.
        with close_on_error(self._free_arrays):
            moves = ((steps, 1), (1, 1))
            if has_updates:
                moves = ((steps, UPDATE_WIDTH), (steps, dims.horizon * dims.action_dim))
            for count, width in ((steps, conditioning), (steps, dims.horizon), *moves):
                self._arrays.append(RowArrays(runtime, count, width))
        self.table, self.plan_weight, self._first, self._second = self._arrays
        self._has_updates = has_updates
        # What the buffers were filled for.
        self.key: Hashable = None
        # By number of rows and slot.
        self.denoise: dict[tuple[int, int], GraphedWork] = {}

    def load(
        self,
        key: Hashable,
        table: np.ndarray,
        times: np.ndarray,
        dt: float,
        updates: np.ndarray | None,
    ) -> None:
        """Fill with times and step size, or with updates; `key` names them."""
        self.table.write(table)
        if updates is None:
            self._first.write(np.asarray(times, np.float32))
            self._second.write(np.asarray([dt], np.float32))
        else:
            self._first.write(updates)
        self.key = key

    def write_noise(self, step_noise: np.ndarray | None) -> None:
        """Copy the noise of every step, (N, H, A), to the device; None: steps draw none."""
        if self._has_updates and step_noise is not None:
            self._second.write(step_noise)

    def moves(self, index: int) -> dict[str, int]:
        """Addresses of what says how a step moves x, by the names of the engine's inputs."""
        if self._has_updates:
            return {
                'update': self._first.address(index),
                'step_noise': self._second.address(index),
            }
        return {'t': self._first.address(index), 'dt': self._second.address(0)}

    def close(self) -> None:
        """Free graphs, then buffers."""
        for work in self.denoise.values():
            work.close()
        self._free_arrays()

    def _free_arrays(self) -> None:
        for rows in self._arrays:
            rows.free()


def check_tensors(
    family: Family,
    dims: PolicyDims,
    conditioning: int,
    engines: Mapping[str, Mapping[str, TensorInfo]],
) -> None:
    """Refuse engines whose inputs or outputs do not fit the policy's dimensions.

    `engines` has inputs and outputs of each network, by `store.network_name`.

    Raises:
        ValueError: a tensor that is missing, unknown, or of another shape or type; the message
            names engine and tensor.
    """
    for name, tensors in engines.items():
        network, _, rows = name.partition('_r')
        shapes = _shapes(family, dims, conditioning, engines, int(rows or 1), tensors)
        expected = shapes.inputs(network) | shapes.outputs(network)  # type: ignore[arg-type]
        odd = sorted(set(tensors) ^ set(expected))
        if odd:
            raise ValueError(
                f"engine '{name}': its inputs and outputs are not this policy's: {', '.join(odd)}; "
                'export the ONNX files and build again'
            )
        for tensor, (_, shape) in expected.items():
            found = tensors[tensor].shape
            # A number may be a scalar or a list of one.
            if found != shape and (shape or math.prod(found) != 1):
                raise ValueError(
                    f"engine '{name}': '{tensor}' is {found}, but this policy's dimensions in "
                    f'policy.yaml make it {shape}; export the ONNX files and build again'
                )
        _check_types(name, tensors, engines)


def _shapes(
    family: Family,
    dims: PolicyDims,
    conditioning: int,
    engines: Mapping[str, Mapping[str, TensorInfo]],
    rows: int,
    own: Mapping[str, TensorInfo],
) -> GraphShapes:
    """Shapes for one number of rows; those of image tokens, past and text rows are the engines'."""
    suffix = f'_r{rows}' if rows > 1 else ''
    prefix = engines.get(f'prefix{suffix}', {})
    inputs = family.prefix_inputs(dims)
    past = {
        name: (tensor.dtype, tensor.shape)
        for name, tensor in prefix.items()
        if name not in (*IMAGE_INPUTS, *inputs, TEXT_INPUT)
    }
    tokens = engines['vision'].get('image_tokens')
    if tokens is None:
        raise ValueError(
            "engine 'vision': its inputs and outputs are not this policy's: image_tokens; export "
            'the ONNX files and build again'
        )
    text = own.get(TEXT_INPUT)
    width = None if text is None else text.shape[-1]
    return GraphShapes(family, dims, rows, tokens.shape[1:], past, conditioning, width)


def _check_types(
    name: str, tensors: Mapping[str, TensorInfo], engines: Mapping[str, Mapping[str, TensorInfo]]
) -> None:
    """Refuse a shared buffer of two types, and schedule rows other than float32 (ValueError)."""
    steps = ('x', 'x_next', *STEP_INPUTS, *SCHEDULER_INPUTS)
    typed = dict.fromkeys((*steps, TEXT_INPUT), 'float32')
    if name.startswith('expert'):
        other = engines[name.replace('expert', 'prefix')]
        typed |= {key: tensor.dtype for key, tensor in other.items() if key in tensors}
    if name.startswith('prefix'):
        typed['image_tokens'] = engines['vision']['image_tokens'].dtype
    for key, dtype in typed.items():
        if key in tensors and tensors[key].dtype != dtype:
            raise ValueError(
                f"engine '{name}': '{key}' is {tensors[key].dtype}, its other end is {dtype}; "
                'export the ONNX files and build again'
            )
