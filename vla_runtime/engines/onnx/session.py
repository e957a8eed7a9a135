"""ONNX Runtime sessions on the requested provider, and buffers on its device.

A provider that is missing, or whose libraries do not load, is an error: ONNX Runtime alone would
go on with the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime

from vla_runtime.bundle.onnx_files import PRECISION_KEY, WEIGHTS_DATA
from vla_runtime.engines.devices import cpu_threads, parse_device
from vla_runtime.files.input_files import regular_file

if TYPE_CHECKING:
    import onnx

# --- Graphs whose weights file is a symbolic link, as in a Hugging Face cache


def follow_weights(path: Path, model: bytes | None) -> tuple[Path, bytes | None]:
    """Resolve a linked weights file, and make the graph name the link's target.

    Args:
        model: the graph's bytes; None for those of the file.

    Returns:
        The folder that holds the weights, and the graph's bytes; None for those of the file.

    Raises:
        ValueError: the link leads to no regular file, the graph is no ONNX file, or `onnx` is not
            installed.
        OSError: the graph file cannot be read.
    """
    folder, weights = path.parent, path.parent / WEIGHTS_DATA
    if not weights.is_symlink():
        return folder, model
    try:
        target = regular_file(weights)
    except ValueError as error:
        raise ValueError(f'{weights}: {error}') from None
    graph = read_graph(path, model, f'{WEIGHTS_DATA} is a link', 'copy the bundle without links')
    for tensor in graph.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == 'location':
                entry.value = target.name
    return target.parent, graph.SerializeToString()


def read_graph(path: Path, model: bytes | None, why: str, else_: str) -> onnx.ModelProto:
    """Parse a graph without its weights.

    Args:
        model: the graph's bytes; None for those of the file.
        why: what needs it, for a machine without `onnx`; else_: what does without.

    Raises:
        ValueError: no ONNX file, or `onnx` is not installed.
        OSError: the file cannot be read.
    """
    try:
        import onnx
    except ImportError:
        raise ValueError(
            f"{path}: {why}, which needs the Python package 'onnx': pip install onnx, or {else_}"
        ) from None
    data = path.read_bytes() if model is None else model
    try:
        return onnx.load_model_from_string(data)
    except Exception as error:  # protobuf's own error, which is not re-exported
        raise ValueError(f'{path}: is not a whole ONNX file ({error})') from None


# --------------------------------------------------------------------------------------------------

# ONNX's numbers of the types, which ONNX Runtime takes where numpy has no type (bfloat16).
_ONNX_TYPE = {
    'tensor(float)': 1,
    'tensor(int64)': 7,
    'tensor(bool)': 9,
    'tensor(float16)': 10,
    'tensor(bfloat16)': 16,
}
# ONNX Runtime's names of the kinds of numbers.
KIND_OF = {
    'tensor(float)': 'float32',
    'tensor(float16)': 'float16',
    'tensor(bfloat16)': 'bfloat16',
    'tensor(int64)': 'int64',
    'tensor(bool)': 'bool',
}
_PROVIDERS = {
    'cpu': 'CPUExecutionProvider',
    'cuda': 'CUDAExecutionProvider',
    'tensorrt': 'TensorrtExecutionProvider',
}
_LOG_ERRORS = 3
# Rewrites of the graph that a precision does without. In int8 a product and its bias would become a
# float32 Gemm first, five times slower; in fp8 a product in integers, which is refused; in nvfp4
# the scales.
SKIPPED_REWRITES = {
    'int8': ('MatMulAddFusion',),
    'fp8': ('QDQSelectorActionTransformer',),
    'nvfp4': ('QDQSelectorActionTransformer',),
}
_WEIGHTS_FOLDER = 'session.model_external_initializers_file_folder_path'


@dataclass(frozen=True)
class Placement:
    """Device and execution provider that networks run on.

    Attributes:
        device: requested name of the device.
        provider: ONNX Runtime's name of the execution provider.
        memory: ONNX Runtime's name of the memory: `cpu` or `cuda`.
        index: number of the device, counted from 0.
    """

    device: str
    provider: str
    memory: str
    index: int

    @classmethod
    def of(cls, device: str) -> Placement:
        """Parse a device string; `tensorrt`, `tensorrt:N` are ONNX Runtime's own TensorRT provider.

        Raises:
            ValueError: an unknown name, or a provider that this ONNX Runtime does not have.
        """
        kind, index = parse_device(device, 'onnxruntime')
        provider = _PROVIDERS[kind]
        available = onnxruntime.get_available_providers()
        if provider not in available:
            raise ValueError(
                f"device '{device}': this ONNX Runtime {onnxruntime.__version__} has no {provider} "
                f'(it has {", ".join(available)}); install onnxruntime-gpu in place of '
                'onnxruntime, or use device cpu'
            )
        return cls(device, provider, 'cpu' if kind == 'cpu' else 'cuda', index)

    def options(self) -> dict[str, str]:
        if self.memory == 'cpu':
            return {}
        index = {'device_id': str(self.index)}
        # TF32 off: it would keep 10 bits of a float32's 23.
        return index | ({'use_tf32': '0'} if self.provider == _PROVIDERS['cuda'] else {})


class Buffer:
    """A tensor of a static shape that lives as long as its engine, in the device's memory.

    `kind` is ONNX Runtime's name of the type, `tensor(float)`; `size` is in bytes.
    """

    def __init__(self, placement: Placement, shape: Sequence[int], kind: str) -> None:
        self.shape = list(shape)
        self.kind = _ONNX_TYPE[kind]
        self.value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
            self.shape, self.kind, placement.memory, placement.index
        )
        self.size = int(self.value.tensor_size_in_bytes())
        self._row_bytes = self.size // (self.shape[0] if shape else 1)

    def write(self, array: np.ndarray) -> None:
        """Overwrite the whole buffer; the array's shape may differ in axes of length one."""
        self.value.update_inplace(np.ascontiguousarray(array).reshape(self.shape))

    def read(self) -> np.ndarray:
        return self.value.numpy().copy()

    def row_address(self, index: int) -> int:
        """Return the address of one entry of the first axis."""
        return int(self.value.data_ptr()) + index * self._row_bytes


class Session:
    """One graph file on a provider.

    Args:
        options: ONNX Runtime's session options; `session_options()` unless given.
        model: the graph's bytes; None for those of the file. Weights are found beside the file.
        **more: further arguments of ONNX Runtime's InferenceSession.

    Raises:
        ValueError: the file cannot be loaded there, or the provider was dropped.
    """

    def __init__(
        self,
        path: Path,
        placement: Placement,
        options: onnxruntime.SessionOptions | None = None,
        model: bytes | None = None,
        **more: Any,
    ) -> None:
        self.path = path
        self.placement = placement
        options = options or session_options()
        folder, model = follow_weights(path, model)
        options.add_session_config_entry(_WEIGHTS_FOLDER, str(folder))
        try:
            self._session = onnxruntime.InferenceSession(
                model or str(path),
                sess_options=options,
                providers=[(placement.provider, placement.options())],
                **more,
            )
        except Exception as error:  # ONNX Runtime's errors share no base class
            raise ValueError(_load_error(path, placement, error)) from error
        self._session.disable_fallback()
        if placement.provider not in self._session.get_providers():
            raise ValueError(
                f"device '{placement.device}': ONNX Runtime could not start {placement.provider} "
                f'for {path.name} (its reason is in the log above) and would run on '
                f'{", ".join(self._session.get_providers())}; mend the CUDA libraries, or use cpu'
            )
        stated = self._session.get_modelmeta().custom_metadata_map
        # As the file's metadata say; '' where they do not.
        self.precision: str = stated.get(PRECISION_KEY, '')
        self.inputs = {item.name: item for item in self._session.get_inputs()}
        self.outputs = {item.name: item for item in self._session.get_outputs()}

    def buffer(self, name: str) -> Buffer:
        item = {**self.inputs, **self.outputs}[name]
        return Buffer(self.placement, item.shape, item.type)

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run once on host arrays; return all outputs by name, in new arrays."""
        return dict(zip(self.outputs, self._session.run(None, dict(inputs)), strict=True))

    def binding(self) -> Binding:
        return Binding(self._session, self.placement)


class Binding:
    """The buffers that one session reads and writes."""

    def __init__(self, session: onnxruntime.InferenceSession, placement: Placement) -> None:
        self._session = session
        self._placement = placement
        self._binding = session.io_binding()

    def input(self, name: str, buffer: Buffer) -> None:
        self._binding.bind_ortvalue_input(name, buffer.value)

    def output(self, name: str, buffer: Buffer) -> None:
        self._binding.bind_ortvalue_output(name, buffer.value)

    def input_row(self, name: str, shape: Sequence[int], buffer: Buffer, row: int) -> None:
        """Bind one entry of a buffer's first axis to an input of this shape."""
        place = (self._placement.memory, self._placement.index, buffer.kind, list(shape))
        self._binding.bind_input(name, *place, buffer.row_address(row))

    def output_row(self, name: str, shape: Sequence[int], buffer: Buffer, row: int) -> None:
        place = (self._placement.memory, self._placement.index, buffer.kind, list(shape))
        self._binding.bind_output(name, *place, buffer.row_address(row))

    def run(self) -> None:
        self._session.run_with_iobinding(self._binding)

    def wait(self) -> None:
        self._binding.synchronize_outputs()


def session_options(threads: int | None = None) -> onnxruntime.SessionOptions:
    """Options of every session: deterministic results, and no thread that spins while it waits."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _LOG_ERRORS
    options.use_deterministic_compute = True
    options.intra_op_num_threads = cpu_threads(threads)
    options.add_session_config_entry('session.intra_op.allow_spinning', '0')
    return options


def _load_error(path: Path, placement: Placement, error: Exception) -> str:
    text = str(error)
    if 'NOT_IMPLEMENTED' in text and placement.memory == 'cpu':
        return (
            f'{path}: ONNX Runtime cannot run this file on the CPU, which has no bfloat16 matrix '
            f'products; use device cuda, or export with --onnx-precision float32. {text}'
        )
    return f"{path}: ONNX Runtime cannot load it on '{placement.device}': {text}"
