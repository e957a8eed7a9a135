"""The `tensorrt` module where there is no GPU, with the names of one release and no others.

Stands in at the edge of TensorRT, below our own adapter. An engine is built from an ONNX file by
keeping its path, and runs on ONNX Runtime over the fake device's memory, so what comes out was
computed from what lies at the bound addresses. Which names a release has is read from
`tensorrt_names.json`; asking for any other name fails as on the real module, and every name that
was asked for is kept in `used`.
"""

from __future__ import annotations

import json
from enum import IntEnum
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from weakref import ref

import numpy as np
import onnxruntime
from fake_cuda import FakeCuda

from vla_runtime.files.safetensors_reader import bfloat16_to_float32, float32_to_bfloat16

NAMES = json.loads((Path(__file__).parent / 'tensorrt_names.json').read_text())
# TensorRT for RTX, with version numbers of its own.
RTX = '1.7.1.116'
RELEASES = tuple(name for name in NAMES if name != RTX)
_TYPES = {
    'tensor(float)': ('FLOAT', np.float32),
    'tensor(float16)': ('HALF', np.float16),
    # Held as its bits, as our own buffers hold it.
    'tensor(bfloat16)': ('BF16', np.uint16),
    'tensor(int64)': ('INT64', np.int64),
    'tensor(bool)': ('BOOL', np.bool_),
}


class Named:
    """An object of a class of TensorRT: only what its release has can be read or set."""

    kind = ''

    def __init__(self, trt: FakeTensorRT) -> None:
        self.__dict__['trt'] = trt

    def __getattribute__(self, name: str):
        kind = type(self).kind
        if kind and not name.startswith('_') and name != 'trt':
            object.__getattribute__(self, 'trt').use(kind, name)
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: object) -> None:
        if type(self).kind and not name.startswith('_'):
            self.trt.use(type(self).kind, name)
        super().__setattr__(name, value)


def _choices(trt: FakeTensorRT, kind: str):
    """An enumeration with the members that this release has."""
    members = IntEnum(kind, {name: i for i, name in enumerate(NAMES[trt.__version__][kind])})

    class Choices:
        def __getattr__(self, name: str):
            trt.use(kind, name)
            return members[name]

    return Choices()


class FakeTensorRT:
    """The module.

    Args:
        release: a key of `tensorrt_names.json`.
        cuda: the device that engines run on.
    """

    def __init__(self, release: str, cuda: FakeCuda | None = None) -> None:
        self.__version__ = release
        self.__name__ = 'tensorrt_rtx' if release == RTX else 'tensorrt'
        # Whoever asks whether the package is installed looks for it.
        self.__spec__ = ModuleSpec(self.__name__, None)
        self.cuda = cuda or FakeCuda()
        self.used: set[tuple[str, str]] = set()
        self.fail_parse = self.fail_build = ''
        # Faults of engines: nothing is written, or nothing but NaN.
        self.freeze_outputs = self.poison_outputs = False
        # Another fault: an output and what is added to it.
        self.distort = ('', 0.0)
        # Memory is too short for an engine: 'always', or 'beside a builder'.
        self.short = ''
        self.layers: list[FakeLayer] = []
        self.configs: list[FakeConfig] = []
        self.steps_told = 0
        # Compiled kernels that were handed over from an earlier load.
        self.restored: list[bytes] = []
        # Every one that was made; those that were freed are dead.
        self.builders: list[ref[FakeBuilder]] = []
        for kind in (
            'BuilderFlag',
            'ComputeCapability',
            'CudaGraphStrategy',
            'DataType',
            'DynamicShapesKernelSpecializationStrategy',
            'ExecutionContextAllocationStrategy',
            'LayerType',
            'MemoryPoolType',
            'NetworkDefinitionCreationFlag',
            'ProfilingVerbosity',
            'TacticSource',
            'TensorIOMode',
        ):
            if kind in NAMES[release]:
                setattr(self, kind, _choices(self, kind))
        self.ILogger = _make_logger_base()
        if 'IProgressMonitor' in NAMES[release]:
            self.IProgressMonitor = type('IProgressMonitor', (), {})
        self.Runtime = lambda logger: FakeRuntime(self, logger)
        self.Builder = lambda logger: FakeBuilder(self, logger)
        self.OnnxParser = lambda network, logger: FakeParser(self, network, logger)

    def use(self, kind: str, name: str) -> None:
        if name not in NAMES[self.__version__][kind]:
            raise AttributeError(f'TensorRT {self.__version__}: {kind} has no {name}')
        self.used.add((kind, name))


def _make_logger_base() -> type:
    severity = IntEnum(
        'Severity', {'INTERNAL_ERROR': 0, 'ERROR': 1, 'WARNING': 2, 'INFO': 3, 'VERBOSE': 4}
    )

    class ILogger:
        Severity = severity

    return ILogger


class FakeRuntime(Named):
    kind = 'Runtime'

    def __init__(self, trt: FakeTensorRT, logger) -> None:
        super().__init__(trt)
        assert trt.cuda.devices, 'TensorRT does not survive a machine without a driver'
        self._logger = logger

    def deserialize_cuda_engine(self, data):
        try:
            plan = json.loads(bytes(memoryview(data)))
            release = plan['release']
        except (ValueError, KeyError):
            release = None
        if release != self.trt.__version__:
            severity = self._logger.Severity.ERROR
            self._logger.log(severity, 'the serialization of the plan does not fit')
            return None
        building = any(builder() is not None for builder in self.trt.builders)
        if self.trt.short == 'always' or (self.trt.short and building):
            severity = self._logger.Severity.ERROR
            self._logger.log(severity, 'IRuntime::deserialize: Error Code 2: OutOfMemory (4096 MB)')
            return None
        return FakeEngine(self.trt, Path(plan['onnx']), plan['profiles'])


@cache
def _session(onnx: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    providers = ['CPUExecutionProvider']
    if not _is_bfloat16(onnx):
        return onnxruntime.InferenceSession(onnx, options, providers=providers)
    # A CPU has no bfloat16 products: computed in float32 and rounded, as a GPU sums them.
    from vla_convert.export.onnx.variants import comparable

    folder = 'session.model_external_initializers_file_folder_path'
    options.add_session_config_entry(folder, str(onnx.parent))
    # A cast to bfloat16 and back is a rounding, and stays.
    graph, skipped = comparable(onnx, widen_bfloat16=True), ['ConstantFolding']
    return onnxruntime.InferenceSession(
        graph, options, providers=providers, disabled_optimizers=skipped
    )


@cache
def _kinds(onnx: Path) -> dict[str, str]:
    """Types of a graph's inputs and outputs, as in the file."""
    session = _session(onnx)
    kinds = {item.name: item.type for item in (*session.get_inputs(), *session.get_outputs())}
    if _is_bfloat16(onnx):
        from onnx import TensorProto, load

        graph = load(onnx, load_external_data=False).graph
        for port in (*graph.input, *graph.output):
            if port.type.tensor_type.elem_type == TensorProto.BFLOAT16:
                kinds[port.name] = 'tensor(bfloat16)'
    return kinds


def _is_bfloat16(onnx: Path) -> bool:
    return _exported_in(onnx, b'"bfloat16"')


def _exported_in(onnx: Path, precision: bytes) -> bool:
    # As export writes it beside the graphs; without the package onnx, which some tests forbid.
    facts = onnx.parent / 'graphs.json'
    return facts.is_file() and precision in facts.read_bytes()


class FakeEngine(Named):
    kind = 'ICudaEngine'

    def __init__(self, trt: FakeTensorRT, onnx: Path, profiles: list[dict]) -> None:
        super().__init__(trt)
        self._profiles, self._contexts = profiles, 0
        # Profiles that contexts have.
        self._taken: set[int] = set()
        self._session, self._kinds = _session(onnx.resolve()), _kinds(onnx.resolve())
        self._inputs = {item.name: item for item in self._session.get_inputs()}
        self._outputs = {item.name: item for item in self._session.get_outputs()}
        self._tensors = self._inputs | self._outputs

    @property
    def device_memory_size(self) -> int:
        return 1000

    @property
    def device_memory_size_v2(self) -> int:
        return 1000

    @property
    def num_io_tensors(self) -> int:
        return len(self._tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    @property
    def num_optimization_profiles(self) -> int:
        return max(1, len(self._profiles))

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        return [tuple(shape) for shape in self._profiles[profile][name]]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return _free(self._tensors[name].shape)

    def get_tensor_mode(self, name: str):
        modes = self.trt.TensorIOMode
        return modes.INPUT if name in self._inputs else modes.OUTPUT

    def get_tensor_dtype(self, name: str):
        kind = _TYPES[self._kinds[name]][0]
        # 8.6 turns the parser's int64 into int32.
        if kind == 'INT64' and 'INT64' not in NAMES[self.trt.__version__]['DataType']:
            kind = 'INT32'
        return getattr(self.trt.DataType, kind)

    def create_execution_context(self, strategy=None):
        if isinstance(strategy, FakeRuntimeConfig):
            assert strategy._settings['cuda_graph_strategy'].name == 'DISABLED'
            strategy = strategy._settings['memory']
        assert strategy is None or strategy.name == 'USER_MANAGED'
        return self._context()

    def create_runtime_config(self) -> FakeRuntimeConfig:
        return FakeRuntimeConfig(self.trt)

    def create_execution_context_without_device_memory(self):
        return self._context()

    def _context(self):
        # The first context has the first profile, the others none.
        self._contexts += 1
        if self._contexts > 1:
            return FakeContext(self, None)
        self._taken.add(0)
        return FakeContext(self, 0)

    def _run(self, addresses: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        cuda = self.trt.cuda
        arrays = {}
        for name in self._tensors:
            dtype = _TYPES[self._kinds[name]][1]
            if self.get_tensor_dtype(name).name == 'INT32':
                dtype = np.int32
            arrays[name] = cuda.array(addresses[name], shapes[name], dtype)
        feeds = {
            name: bfloat16_to_float32(arrays[name])
            if self._kinds[name] == 'tensor(bfloat16)'
            else arrays[name].astype(_TYPES[tensor.type][1])
            for name, tensor in self._inputs.items()
        }
        if self.trt.freeze_outputs:
            return
        for name, value in zip(self._outputs, self._session.run(None, feeds), strict=True):
            poisoned = self.trt.poison_outputs and value.dtype != np.bool_
            written = np.full_like(value, np.nan) if poisoned else value
            if name == self.trt.distort[0]:
                written = written + self.trt.distort[1]
            if self._kinds[name] == 'tensor(bfloat16)':
                written = float32_to_bfloat16(written)
            arrays[name][...] = written


class FakeRuntimeConfig(Named):
    """Settings of a context of TensorRT for RTX."""

    kind = 'IRuntimeConfig'

    def __init__(self, trt: FakeTensorRT) -> None:
        super().__init__(trt)
        self._settings: dict[str, object] = {}

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if not name.startswith('_'):
            self._settings[name] = value

    def set_execution_context_allocation_strategy(self, strategy) -> None:
        self._settings['memory'] = strategy

    def create_runtime_cache(self) -> FakeRuntimeCache:
        return FakeRuntimeCache(self.trt)

    def set_runtime_cache(self, cache: FakeRuntimeCache) -> bool:
        return True


class FakeRuntimeCache(Named):
    """Compiled kernels; another GPU's are refused."""

    kind = 'IRuntimeCache'

    def __init__(self, trt: FakeTensorRT) -> None:
        super().__init__(trt)
        self._data = b'compiled'

    def deserialize(self, data: bytes) -> bool:
        self.trt.restored.append(bytes(data))
        return bytes(data).startswith(b'compiled')

    def serialize(self) -> bytes:
        return self._data


class FakeContext(Named):
    kind = 'IExecutionContext'

    def __init__(self, engine: FakeEngine, profile: int | None) -> None:
        super().__init__(engine.trt)
        self._engine, self._profile = engine, profile
        self._lengths: set[int] = set()
        self._set: set[str] = set()
        self._addresses: dict[str, int] = {}
        self._scratch = 0

    @property
    def device_memory(self) -> int:
        return self._scratch

    @device_memory.setter
    def device_memory(self, address: int) -> None:
        self._scratch = address

    def set_device_memory(self, address: int, size: int) -> None:
        assert size >= 1000
        self._scratch = address

    @property
    def active_optimization_profile(self) -> int:
        return -1 if self._profile is None else self._profile

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        if profile >= self._engine.num_optimization_profiles:
            return False
        # From 10 on contexts share profiles.
        if self._engine.trt.__version__.startswith('8') and profile in self._engine._taken:
            return False
        self._engine._taken.add(profile)
        self._profile = profile
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self._profile is not None, 'a context without a profile was given a shape'
        least, _, most = self._engine.get_tensor_profile_shape(name, self._profile)
        if not all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True)):
            return False
        free = self._engine.get_tensor_shape(name)
        self._lengths |= {size for size, known in zip(shape, free, strict=True) if known == -1}
        self._set.add(name)
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        free = self._engine.get_tensor_shape(name)
        if -1 not in free:
            return free
        (length,) = self._lengths
        return tuple(length if size == -1 else size for size in free)

    def set_tensor_address(self, name: str, address: int) -> bool:
        if name not in self._engine._tensors:
            return False
        self._addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        assert self._scratch, 'a context without scratch memory was run'
        if set(self._addresses) != set(self._engine._tensors):
            return False
        engine = self._engine
        free = {name for name in engine._inputs if -1 in engine.get_tensor_shape(name)}
        assert self._set == free, 'an input of unknown shape'
        frozen = dict(self._addresses)
        shapes = {name: self.get_tensor_shape(name) for name in engine._tensors}
        self.trt.cuda.put(stream, lambda: engine._run(frozen, shapes))
        return True


class FakeLayer(Named):
    """A layer with outputs of the given types.

    Args:
        inputs: tensors that it reads, as `get_output` of other layers gives them.
    """

    kind = 'ILayer'

    def __init__(self, trt: FakeTensorRT, layer_type: str, *dtypes: str, inputs=()) -> None:
        super().__init__(trt)
        self._type = getattr(trt.LayerType, layer_type)
        self._outputs = [
            SimpleNamespace(dtype=getattr(trt.DataType, name), name=f'{id(self)}.{number}')
            for number, name in enumerate(dtypes)
        ]
        self._inputs = list(inputs)
        self._set: dict[int, object] = {}
        self._precision = None

    @property
    def type(self):
        return self._type

    @property
    def num_outputs(self) -> int:
        return len(self._outputs)

    def get_output(self, index: int):
        return self._outputs[index]

    @property
    def num_inputs(self) -> int:
        return len(self._inputs)

    def get_input(self, index: int):
        return self._inputs[index]

    def set_input(self, index: int, tensor) -> None:
        self._inputs[index] = tensor

    @property
    def precision(self):
        return self._precision

    @precision.setter
    def precision(self, dtype) -> None:
        self._precision = dtype

    def set_output_type(self, index: int, dtype) -> None:
        self._set[index] = dtype


class FakeNetwork(Named):
    kind = 'INetworkDefinition'

    def __init__(self, trt: FakeTensorRT, flags: int) -> None:
        super().__init__(trt)
        self._flags, self._onnx = flags, None

    @property
    def num_layers(self) -> int:
        return len(self.trt.layers)

    def get_layer(self, index: int) -> FakeLayer:
        return self.trt.layers[index]

    @property
    def num_inputs(self) -> int:
        return len(self._inputs())

    def get_input(self, index: int):
        port = self._inputs()[index]
        return SimpleNamespace(name=port.name, shape=_free(port.shape))

    def _inputs(self) -> list:
        return _session(Path(self._onnx).resolve()).get_inputs()

    def add_cast(self, tensor, dtype) -> FakeLayer:
        cast = FakeLayer(self.trt, 'CAST', dtype.name, inputs=[tensor])
        self.trt.layers.append(cast)
        return cast


def _free(shape) -> tuple[int, ...]:
    """A shape with -1 for an axis of any length."""
    return tuple(size if isinstance(size, int) else -1 for size in shape)


class FakeProfile:
    """Shapes of inputs: smallest, usual and largest."""

    def __init__(self) -> None:
        self.shapes: dict[str, list[tuple[int, ...]]] = {}

    def set_shape(self, name: str, smallest, usual, largest) -> None:
        self.shapes[name] = [smallest, usual, largest]


class FakeParser(Named):
    kind = 'OnnxParser'

    def __init__(self, trt: FakeTensorRT, network: FakeNetwork, logger) -> None:
        super().__init__(trt)
        self._network = network

    def parse_from_file(self, path: str) -> bool:
        self._network._onnx = path
        if _exported_in(Path(path), b'"int8"'):
            self.trt.layers = _product_layers(self.trt, Path(path))
        return not self.trt.fail_parse

    @property
    def num_errors(self) -> int:
        return 1

    def get_error(self, index: int):
        return SimpleNamespace(node=lambda: 3, desc=lambda: self.trt.fail_parse)


def _product_layers(trt: FakeTensorRT, path: Path) -> list[FakeLayer]:
    """Layers of the products of a graph in int8, as TensorRT's parser makes them.

    A matrix is reshaped to the rank of what it is multiplied with, between its DequantizeLinear
    and the product.
    """
    from onnx import TensorProto, load, shape_inference

    graph = shape_inference.infer_shapes(load(path, load_external_data=False)).graph
    values = (*graph.value_info, *graph.input, *graph.output)
    kinds = {value.name: value.type.tensor_type.elem_type for value in values}
    names = {TensorProto.FLOAT16: 'HALF', TensorProto.BFLOAT16: 'BF16', TensorProto.INT8: 'INT8'}
    types = {
        'QuantizeLinear': 'QUANTIZE',
        'DequantizeLinear': 'DEQUANTIZE',
        'MatMul': 'MATRIX_MULTIPLY',
    }
    made: dict[str, object] = {}
    layers = []
    for node in graph.node:
        if node.op_type not in types:
            continue
        inputs = [made.get(name, SimpleNamespace(name=name)) for name in node.input]
        if node.op_type == 'MatMul' and node.input[1] in made:
            layers.append(FakeLayer(trt, 'SHUFFLE', 'FLOAT', inputs=inputs[1:]))
            inputs[1] = layers[-1].get_output(0)
        kind = names.get(kinds[node.output[0]], 'FLOAT')
        layers.append(FakeLayer(trt, types[node.op_type], kind, inputs=inputs))
        made[node.output[0]] = layers[-1].get_output(0)
    return layers


class FakeCache(Named):
    kind = 'ITimingCache'

    def __init__(self, trt: FakeTensorRT, data: bytes) -> None:
        super().__init__(trt)
        self._data = data

    def serialize(self) -> bytes:
        return self._data + b'+'


class FakeConfig(Named):
    kind = 'IBuilderConfig'

    def __init__(self, trt: FakeTensorRT) -> None:
        super().__init__(trt)
        self._flags: set[str] = {'TF32'}
        self._limits: dict[str, int] = {}
        self._profiles: list[FakeProfile] = []
        self._sources, self._cache, self._monitor = 0b11111, None, None

    def set_memory_pool_limit(self, pool, size: int) -> None:
        self._limits[pool.name] = size

    def add_optimization_profile(self, profile: FakeProfile) -> int:
        self._profiles.append(profile)
        return len(self._profiles) - 1

    def set_flag(self, flag) -> None:
        self._flags.add(flag.name)

    def clear_flag(self, flag) -> None:
        self._flags.discard(flag.name)

    def set_compute_capability(self, capability, index: int) -> bool:
        assert index < self.num_compute_capabilities
        return True

    def create_timing_cache(self, data: bytes) -> FakeCache:
        return FakeCache(self.trt, bytes(data))

    def set_timing_cache(self, cache: FakeCache, ignore_mismatch: bool) -> bool:
        if cache._data.startswith(b'elsewhere'):
            return False
        self._cache = cache
        return True

    def get_timing_cache(self) -> FakeCache:
        return self._cache

    def get_tactic_sources(self) -> int:
        return self._sources

    def set_tactic_sources(self, sources: int) -> bool:
        self._sources = sources
        return True

    @property
    def progress_monitor(self):
        return self._monitor

    @progress_monitor.setter
    def progress_monitor(self, monitor) -> None:
        self._monitor = monitor


class FakeBuilder(Named):
    kind = 'Builder'

    def __init__(self, trt: FakeTensorRT, logger) -> None:
        if trt.cuda.devices is None:
            # As the real bindings say it when the library returns no builder.
            raise TypeError('factory function returned nullptr')
        super().__init__(trt)
        self._logger = logger
        trt.builders.append(ref(self))

    def create_network(self, flags: int) -> FakeNetwork:
        return FakeNetwork(self.trt, flags)

    def create_builder_config(self) -> FakeConfig:
        config = FakeConfig(self.trt)
        self.trt.configs.append(config)
        return config

    def create_optimization_profile(self) -> FakeProfile:
        return FakeProfile()

    def build_serialized_network(self, network: FakeNetwork, config: FakeConfig) -> bytes | None:
        monitor = config._monitor
        if monitor is not None:
            monitor.phase_start('Building', None, 3)
            for step in range(3):
                if not monitor.step_complete('Building', step):
                    return None
                self.trt.steps_told += 1
            monitor.phase_finish('Building')
        if self.trt.fail_build:
            self._logger.log(self._logger.Severity.ERROR, self.trt.fail_build)
            return None
        profiles = [profile.shapes for profile in config._profiles]
        if not profiles and any(-1 in _free(port.shape) for port in network._inputs()):
            severity = self._logger.Severity.ERROR
            self._logger.log(severity, 'a network with a free axis needs a profile')
            return None
        plan = {'release': self.trt.__version__, 'onnx': network._onnx, 'profiles': profiles}
        return json.dumps(plan).encode()
