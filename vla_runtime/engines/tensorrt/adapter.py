"""All that differs between TensorRT 8.6, 10 and 11, and TensorRT for RTX.

Only this module, `layer_types` and `rtx` name their API. TensorRT for RTX has that of 11, version
numbers of its own, and what `rtx` holds.

| | 8.6 (JetPack 6.0) | 10.3 and later | 11 |
|---|---|---|---|
| network | explicit batch is a flag | implied | the flag is gone |
| types | chosen by the builder: pinned here layer by layer | strongly typed | only strongly typed |
| bfloat16, int64 | no (int64 inputs become int32) | yes | yes |
| int8 | not used: a matrix before DequantizeLinear must be float32 | yes | yes |
| context without memory | a method of its own | a strategy, or that method | a strategy |
| its memory | a property, size unknown | a call with the size | likewise |
| progress | none | `IProgressMonitor` | `IProgressMonitor` |

Invariants: no callback raises into TensorRT; the precision is what the ONNX file says on every
version, and from 10 on products are added up in float32 whatever it is; float32 products are never
run in TF32; a message that TensorRT logs as an error is part of the error that is raised.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import mmap
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from vla_runtime.engines.tensorrt.callbacks import (
    Interruption,
    Progress,
    interrupts_remembered,
    logger_of,
    make_monitor,
)
from vla_runtime.engines.tensorrt.kernel_plan import Kernel, mixed_products, read_kernels
from vla_runtime.engines.tensorrt.layer_types import (
    dtype_name,
    int8_products,
    pin_types,
    sum_in_float32,
)
from vla_runtime.engines.tensorrt.rtx import (
    RTX_MODULES,
    CompiledKernels,
    configure_build,
    runtime_config,
)

logger = logging.getLogger(__name__)

_SUPPORTED = '8.6, 10.3 and later'
# The first release with 4-bit floats.
_FIRST_FP4 = (10, 8)
# How TensorRT, CUDA and the memory manager of a Jetson name what does not fit.
_OUT_OF_MEMORY = re.compile(r'out ?of ?memory|memory ?allocation|MemAlloc', re.IGNORECASE)


class TensorRTError(RuntimeError):
    """TensorRT refused or failed; the message holds what it logged."""


class TensorRTMemoryError(TensorRTError):
    """TensorRT had not enough memory; the engine may be sound."""


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of an engine; `dtype` is numpy's name or `bfloat16`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_input: bool


@dataclass
class BuildOptions:
    """Settings of one engine build.

    Attributes:
        workspace_bytes: most scratch memory of a layer; None for TensorRT's own choice.
        timing_cache: kernel times that earlier builds on this GPU and version measured.
        reduced: the ONNX file has tensors in half precision.
        int8_products: number of the ONNX file's products of two numbers in int8.
        lengths: lengths of the file's free axis, if it has one; the engine's profiles hold each.
        targets: compute capabilities that TensorRT for RTX builds for (`rtx.TARGETS`); the others
            build for the GPU at hand.
        progress: called with the build's progress, on versions that report it.
    """

    workspace_bytes: int | None = None
    timing_cache: bytes = b''
    reduced: bool = False
    int8_products: int = 0
    lengths: tuple[int, ...] = ()
    targets: tuple[str, ...] = ()
    progress: Progress | None = None


@dataclass(frozen=True)
class BuiltEngine:
    """A finished build.

    Attributes:
        plan: the serialized engine; a buffer of TensorRT's own, not copied.
        timing_cache: kernel times to hand to the next build.
        pinned: number of layers pinned to each type, on 8.6.
        kernels: what TensorRT for RTX compiled.
    """

    plan: memoryview
    timing_cache: bytes
    layers: int
    pinned: dict[str, int] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)


class Network:
    """A loaded engine with one execution context, for one length of its free axis if it has one.

    Engines that run one after the other share one block of scratch memory (`use_scratch`); networks
    of one engine share its weights.
    """

    def __init__(self, adapter: TensorRT, engine: Any, context: Any, label: str) -> None:
        self._adapter, self._engine, self._context = adapter, engine, context
        self.label = label
        self.tensors = {info.name: info for info in adapter.tensors(engine, context)}
        self.scratch_bytes = adapter.scratch_bytes(engine)

    def use_scratch(self, address: int, size: int) -> None:
        """Give the context its scratch memory, at least `scratch_bytes`."""
        self._adapter.set_scratch(self._context, address, size)

    def bind(self, addresses: dict[str, int]) -> None:
        """Set the addresses of all inputs and outputs, multiples of 256."""
        for name, address in addresses.items():
            if not self._context.set_tensor_address(name, address):
                raise TensorRTError(
                    f"{self.label}: tensor '{name}' cannot be bound. {self._adapter.complaints()}"
                )

    def enqueue(self, stream: int) -> None:
        """Run once on the bound addresses; may be captured after a first plain run."""
        if not self._context.execute_async_v3(stream):
            raise TensorRTError(f'{self.label}: could not be run. {self._adapter.complaints()}')

    def close(self) -> None:
        """Free the context, and with an engine's last network the engine."""
        self._context = None
        self._engine = None


class TensorRT:
    """One imported TensorRT: `tensorrt`, its lean runtime, or `tensorrt_rtx`.

    Raises:
        ValueError: a version that is not supported.
    """

    def __init__(self, module: ModuleType) -> None:
        self._trt: Any = module
        self.version: str = module.__version__
        self.is_rtx = getattr(module, '__name__', '') in RTX_MODULES
        numbers = re.match(r'(\d+)\.(\d+)', self.version)
        found = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
        if self.is_rtx:
            # Its own version numbers; its API is that of 11.
            found = (11, 0)
        if found < (8, 6) or (9, 0) <= found < (10, 3):
            raise ValueError(
                f"backend 'tensorrt': TensorRT {self.version} is not supported; use {_SUPPORTED}"
            )
        self.major, self._release = found[0], found
        self._logger = logger_of(module)
        self._runtime: Any = None
        self._builder: Any = None

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions of ONNX files that this version runs."""
        found: tuple[str, ...] = ('float32', 'float16')
        if self.major >= 10:
            found += ('bfloat16', 'int8', 'fp8')
        return found + (('nvfp4',) if self._release >= _FIRST_FP4 else ())

    @property
    def default_precision(self) -> str | None:
        """bfloat16 where this version runs it: float16's range is too small for some policies."""
        return 'bfloat16' if 'bfloat16' in self.precisions else None

    @property
    def reports_progress(self) -> bool:
        return hasattr(self._trt, 'IProgressMonitor')

    def complaints(self) -> str:
        """Return and clear the errors that TensorRT has logged, as one sentence."""
        errors, self._logger.errors = self._logger.errors, []
        return 'TensorRT says: ' + ' | '.join(errors) if errors else 'TensorRT gave no reason.'

    # The runtime half.

    def load(
        self,
        path: Path,
        stream: int,
        lengths: Sequence[int] = (1,),
        compiled: CompiledKernels | None = None,
    ) -> list[Network]:
        """Deserialize an engine file; return a network for each length, one of static shapes.

        Args:
            stream: CUDA stream on which profiles are selected; wait for it before a network runs.
            lengths: lengths of the free axis that get a context each.
            compiled: kernels that TensorRT for RTX compiled before, and will.

        Raises:
            TensorRTError: not an engine, or one of another version or GPU.
            TensorRTMemoryError: not enough memory for it.
        """
        self.complaints()
        with interrupts_remembered():
            return self._load(path, stream, lengths, compiled)

    def _load(
        self,
        path: Path,
        stream: int,
        lengths: Sequence[int],
        compiled: CompiledKernels | None,
    ) -> list[Network]:
        if self._runtime is None:
            self._runtime = self._trt.Runtime(self._logger)
        with path.open('rb') as file:
            try:
                data: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise TensorRTError(f'{path}: the file is empty') from None
            # Mapped, so that the file and the engine are not both in memory at once.
            engine = self._runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise self._load_error(f'{path}: is no engine for here', path)
        return [
            Network(self, engine, self._context(engine, path, shapes, stream, compiled), path.name)
            for shapes in self._shapes(engine, path, lengths)
        ]

    def _shapes(
        self, engine: Any, path: Path, lengths: Sequence[int]
    ) -> list[tuple[int, dict[str, tuple[int, ...]]]]:
        """For each length a profile that takes it, and the shapes of the inputs that vary."""
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        free = {
            name: shape
            for name in names
            if engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT
            and -1 in (shape := tuple(engine.get_tensor_shape(name)))
        }
        if not free:
            return [(0, {})]
        found = []
        for length in lengths:
            shapes = {
                name: tuple(length if size == -1 else size for size in shape)
                for name, shape in free.items()
            }
            fitting = (
                profile
                for profile in range(engine.num_optimization_profiles)
                if all(_takes(engine, name, profile, shape) for name, shape in shapes.items())
            )
            if (profile := next(fitting, None)) is None:
                raise TensorRTError(f'{path}: it was not built for {length} rows')
            found.append((profile, shapes))
        return found

    def _context(
        self,
        engine: Any,
        path: Path,
        place: tuple[int, dict[str, tuple[int, ...]]],
        stream: int,
        compiled: CompiledKernels | None,
    ) -> Any:
        profile, shapes = place
        if self.is_rtx:
            context = engine.create_execution_context(runtime_config(self._trt, engine, compiled))
        elif self.major >= 10:
            strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
            context = engine.create_execution_context(strategy)
        else:
            context = engine.create_execution_context_without_device_memory()
        # An engine's first context has its first profile already, and the others have none.
        if context is None or (
            context.active_optimization_profile != profile
            and not context.set_optimization_profile_async(profile, stream)
        ):
            raise self._load_error(f'{path}: no context could be made', path)
        for name, shape in shapes.items():
            if not context.set_input_shape(name, shape):
                raise TensorRTError(f"{path}: '{name}' takes no {shape}. {self.complaints()}")
        return context

    def _load_error(self, problem: str, path: Path) -> TensorRTError:
        complaints = self.complaints()
        if _OUT_OF_MEMORY.search(complaints):
            return TensorRTMemoryError(
                f'{path}: not enough memory to load it; end what else uses memory. {complaints}'
            )
        return TensorRTError(f'{problem}. {complaints}')

    def tensors(self, engine: Any, context: Any) -> list[TensorInfo]:
        """Inputs and outputs of an engine, in the shapes of a context."""
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        return [
            TensorInfo(
                name=name,
                shape=tuple(int(size) for size in context.get_tensor_shape(name)),
                dtype=dtype_name(engine.get_tensor_dtype(name)),
                is_input=engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT,
            )
            for name in names
        ]

    def scratch_bytes(self, engine: Any) -> int:
        return int(engine.device_memory_size_v2 if self.major >= 10 else engine.device_memory_size)

    def set_scratch(self, context: Any, address: int, size: int) -> None:
        if self.major >= 10:
            context.set_device_memory(address, size)
        else:
            context.device_memory = address

    # The builder half.

    def build(self, onnx: Path, options: BuildOptions) -> BuiltEngine:
        """Build an engine from an ONNX file; its weights are read from beside it.

        All builds have one builder, which holds memory until `free_builder`.

        Raises:
            TensorRTError: an operator it does not know, a product that was to be in int8 and is
                not, or no implementation fits.
            KeyboardInterrupt: a signal came, or `options.progress` returned False.
        """
        self.complaints()
        with interrupts_remembered(insist=True) as interruption:
            return self._build(onnx, options, interruption)

    def _build(self, onnx: Path, options: BuildOptions, interruption: Interruption) -> BuiltEngine:
        trt = self._trt
        if self._builder is None:
            try:
                self._builder = trt.Builder(self._logger)
            except TypeError as error:
                raise TensorRTError(f'no builder could be made. {self.complaints()}') from error
        builder = self._builder
        self._logger.layers.clear()
        network = builder.create_network(self._network_flags())
        parser = trt.OnnxParser(network, self._logger)
        parsed = parser.parse_from_file(str(onnx))
        if interruption.signal is not None:
            raise KeyboardInterrupt
        if not parsed:
            errors = [parser.get_error(index) for index in range(parser.num_errors)]
            problems = ' | '.join(f'node {error.node()}: {error.desc()}' for error in errors)
            raise TensorRTError(f'{onnx}: cannot be parsed: {problems or self.complaints()}')
        if (found := int8_products(trt, network)) != options.int8_products:
            raise TensorRTError(
                f'{onnx}: TensorRT {self.version} finds {found} products in int8, and the file has '
                f'{options.int8_products}; the others would run in another precision'
            )
        config = builder.create_builder_config()
        pinned = self._configure(config, network, options)
        self._add_profiles(builder, config, network, options.lengths)
        monitor = None
        if self.reports_progress:
            monitor = make_monitor(trt, options.progress, interruption)
            config.progress_monitor = monitor
        plan = builder.build_serialized_network(network, config)
        if interruption.signal is not None or (monitor is not None and monitor.interrupted):
            raise KeyboardInterrupt
        if plan is None:
            raise TensorRTError(f'{onnx}: could not be built. {self.complaints()}')
        kernels = [kernel for message in self._logger.layers for kernel in read_kernels(message)]
        if mixed := mixed_products(kernels):
            raise TensorRTError(
                f'{onnx}: TensorRT {self.version} multiplies numbers in 8 or 4 bits by others in '
                f'{", ".join(mixed)}; these would gain nothing. Export with --beside-int8 bfloat16'
            )
        cache = None if self.is_rtx else config.get_timing_cache()
        return BuiltEngine(
            plan=memoryview(plan),
            timing_cache=bytes(cache.serialize()) if cache is not None else b'',
            layers=int(network.num_layers),
            pinned=pinned,
            kernels=kernels,
        )

    def free_builder(self) -> None:
        """Free the builder and its memory, before engines are loaded to run."""
        self._builder = None

    def _network_flags(self) -> int:
        flags = self._trt.NetworkDefinitionCreationFlag
        name = 'STRONGLY_TYPED' if self.major >= 10 else 'EXPLICIT_BATCH'
        return 1 << int(getattr(flags, name))

    def _configure(self, config: Any, network: Any, options: BuildOptions) -> dict[str, int]:
        trt = self._trt
        if options.workspace_bytes is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
        # TF32 is on by default and would round the file's float32 to 10 bits.
        config.clear_flag(trt.BuilderFlag.TF32)
        if self.is_rtx:
            configure_build(trt, config, options.targets)
            return {}
        cache = config.create_timing_cache(options.timing_cache)
        if cache is None or not config.set_timing_cache(cache, False):
            logger.warning('the timing cache is of another GPU or version and is begun anew')
            config.set_timing_cache(config.create_timing_cache(b''), False)
        if self.major >= 10:
            if options.reduced:
                # TensorRT for RTX makes the same plan, byte for byte, with these casts and without.
                sum_in_float32(trt, network)
            return {}
        # Nothing of ours needs cuBLAS or cuDNN, which not every installation of 8.6 has.
        sources = config.get_tactic_sources()
        for name in ('CUBLAS', 'CUBLAS_LT', 'CUDNN'):
            sources &= ~(1 << int(getattr(trt.TacticSource, name)))
        config.set_tactic_sources(sources)
        if not options.reduced:
            return {}
        config.set_flag(trt.BuilderFlag.FP16)
        config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
        return pin_types(trt, network)

    def _add_profiles(
        self, builder: Any, config: Any, network: Any, lengths: tuple[int, ...]
    ) -> None:
        """Add a profile for each length of the free axis; none where every shape is static.

        From 10 on it is one for all lengths: with two TensorRT stores the matrices of products that
        are cut (gate and up) twice. 8.6 lets no two contexts share a profile.
        """
        inputs = [network.get_input(index) for index in range(network.num_inputs)]
        free = {port.name: tuple(port.shape) for port in inputs if -1 in tuple(port.shape)}
        if not free:
            return
        ranges = [(length, length) for length in lengths]
        if self.major >= 10:
            ranges = [(min(lengths), max(lengths))]
        for least, most in ranges:
            profile = builder.create_optimization_profile()
            for name, sizes in free.items():
                small, large = (
                    tuple(length if size == -1 else size for size in sizes)
                    for length in (least, most)
                )
                profile.set_shape(name, small, small, large)
            config.add_optimization_profile(profile)


def import_rtx() -> TensorRT:
    """Import the installed TensorRT for RTX; ValueError where that is not possible."""
    for name in RTX_MODULES:
        try:
            return TensorRT(importlib.import_module(name))
        except ModuleNotFoundError as error:
            if error.name != name:
                raise ValueError(_import_failed(error, name)) from error
        except (ImportError, OSError) as error:
            raise ValueError(_import_failed(error, name)) from error
    raise ValueError(
        "TensorRT for RTX is not installed: pip install '.[tensorrt-rtx]' (or "
        'tensorrt-rtx-cu13-bindings and tensorrt-rtx-cu13-libs)'
    )


def import_tensorrt() -> TensorRT:
    """Import the installed TensorRT, or else TensorRT for RTX.

    Raises:
        ValueError: none is installed, it cannot be imported, or its version is not supported.
    """
    try:
        return TensorRT(importlib.import_module('tensorrt'))
    except ModuleNotFoundError as error:
        if error.name != 'tensorrt':
            raise ValueError(_import_failed(error)) from error
        if any(importlib.util.find_spec(name) for name in RTX_MODULES):
            return import_rtx()
        raise ValueError(
            "backend 'tensorrt': the Python package 'tensorrt' is not installed; on a Jetson it "
            'comes with JetPack (python3-libnvinfer; a virtual environment needs '
            '--system-site-packages), elsewhere: pip install tensorrt, or for an RTX card '
            "'.[tensorrt-rtx]'. Or choose another backend"
        ) from error
    except (ImportError, OSError) as error:
        raise ValueError(_import_failed(error)) from error


def _import_failed(error: Exception, name: str = 'tensorrt') -> str:
    return (
        f"backend 'tensorrt': the Python package '{name}' cannot be imported: {error}; check "
        'that its libraries are of the same release and of this Python'
    )


def _takes(engine: Any, name: str, profile: int, shape: tuple[int, ...]) -> bool:
    """Return whether a profile of an engine takes an input of this shape."""
    least, _, most = (tuple(one) for one in engine.get_tensor_profile_shape(name, profile))
    sizes = zip(least, shape, most, strict=True)
    return all(low <= size <= high for low, size, high in sizes)
