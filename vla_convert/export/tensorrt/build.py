"""ONNX files to TensorRT engines, on the machine that will run them.

Invariants:
- nothing is built that cannot fit, that this TensorRT cannot read, or that is there already and
  came from the same ONNX files;
- each engine and its entry in `engine.json` appear complete or not at all, and the timing cache is
  written after each build, so an interrupted build goes on where it stopped;
- the receipt of the old engines is removed before the first of them is replaced;
- a finished build leaves the engines that were asked for and no others.

Imports tensorrt, cuda-bindings and numpy only: a Jetson that builds need not have PyTorch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from vla_convert.export.tensorrt.verification import forget
from vla_runtime.bundle.onnx_files import (
    GRAPHS_FILE,
    ONNX_FOLDER,
    QUANTISED,
    WEIGHTS_DATA,
    GraphFacts,
    Precision,
    read_graph_facts,
)
from vla_runtime.engines.cuda_runtime import CudaRuntime, DeviceInfo
from vla_runtime.engines.free_memory import available_host_bytes, free_swap_bytes
from vla_runtime.engines.preflight import check_graph_files
from vla_runtime.engines.tensorrt.adapter import (
    BuildOptions,
    TensorRT,
    TensorRTError,
    TensorRTMemoryError,
)
from vla_runtime.engines.tensorrt.callbacks import Progress
from vla_runtime.engines.tensorrt.rtx import (
    check_gpu,
    check_targets,
    lacking_products,
    ordered,
    target_of,
)
from vla_runtime.engines.tensorrt.store import (
    ENGINES,
    TIMING_CACHE,
    EngineFile,
    Metadata,
    find_rtx_folder,
    folder_name,
    graph_of,
    read_metadata,
    rebuild_command,
    rtx_folder_name,
    targets_of,
    write_metadata,
)
from vla_runtime.files.atomic_write import WriteError, file_sha256, write_bytes

# Beside weights and workspace: CUDA's own, the kernels that are tried, activations.
_OVERHEAD_BYTES = 1 << 30
# TensorRT's own choice is all of the GPU; what our largest product can use stays below this.
DEFAULT_WORKSPACE = 1 << 30
_ENDING = '.engine'


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory that building one engine takes, in bytes.

    The parser holds the weights on the host, the builder copies them to the device, and the
    finished engine is on the host once more.
    """

    device: int
    host: int

    @classmethod
    def of(cls, weight_bytes: int, workspace_bytes: int) -> MemoryEstimate:
        device = weight_bytes + workspace_bytes + _OVERHEAD_BYTES
        return cls(device=device, host=2 * weight_bytes + _OVERHEAD_BYTES)

    def shared_swap(self, free_bytes: int) -> int | None:
        """Return the swap (bytes) of a build in memory shared with the GPU, as on a Jetson.

        None: swap does not help, since what a GPU works on is never swapped out.
        """
        if self.device > free_bytes:
            return None
        return max(0, self.device + self.host - free_bytes)


@dataclass(frozen=True)
class BuildPlan:
    """Plan of a build.

    Attributes:
        rows: most prompt rows.
        graphs: facts of every engine's ONNX file, by engine name.
        digests: SHA-256 of each graph and its weights, by bundle file name.
        done: engines that need not be built; passed: SHA-256 of files they were compared with
            (`store.Metadata`).
        beside: precision of products that int8 leaves out; else the same.
        workspace_bytes: scratch memory of a layer.
        targets: compute capabilities that TensorRT for RTX builds for; else empty.
    """

    folder: Path
    rows: int
    graphs: dict[str, GraphFacts]
    digests: dict[str, dict[str, str]]
    done: dict[str, EngineFile]
    passed: dict[str, str]
    precision: Precision
    beside: Precision
    workspace_bytes: int
    estimate: MemoryEstimate
    timing_cache: Path
    targets: tuple[str, ...] = ()

    @property
    def to_build(self) -> list[str]:
        return [name for name in self.graphs if name not in self.done]

    @property
    def surplus(self) -> list[Path]:
        """Engine files that are there and belong to none of these engines."""
        paths = sorted(self.folder.glob(f'*{_ENDING}'))
        return [path for path in paths if path.stem not in self.graphs]


def plan_build(
    bundle: Path,
    adapter: TensorRT,
    runtime: CudaRuntime | None,
    *,
    rows: int,
    files: Mapping[str, str] | None = None,
    precision: str | None = None,
    workspace_bytes: int = DEFAULT_WORKSPACE,
    force: bool = False,
    targets: tuple[str, ...] = (),
) -> BuildPlan:
    """Check files and memory and plan the build; build nothing.

    Args:
        runtime: None to build for `targets` without a GPU.
        files: SHA-256 by name as in policy.yaml, to be compared before a build; others are
            hashed here.
        precision: that the ONNX files must have; None: theirs.
        targets: compute capabilities for TensorRT for RTX; none: those of existing engines,
            else this GPU's.

    Raises ValueError: ONNX files that are missing, of another precision, or not readable by this
    TensorRT; or a build that cannot fit into memory.
    """
    folder = bundle / ONNX_FOLDER
    files_of = {name: graph_of(name) for name in ENGINES}
    check_graph_files(bundle, (*files_of.values(), WEIGHTS_DATA, GRAPHS_FILE))
    exported = read_graph_facts(folder, files_of.values())
    graphs = {name: exported.graphs[file] for name, file in files_of.items()}
    found = exported.precision
    if precision not in (None, found):
        default = ' by default' if precision == adapter.default_precision else ''
        calibrated = ' and --calibration BAG' if precision in QUANTISED else ''
        raise ValueError(
            f'the files in {folder} are {found}, and {precision} was asked for{default}: ask for '
            f'these with --precision {found}, or export again with --onnx-precision {precision}'
            f'{calibrated}'
        )
    _check_readable(folder, graphs, found, adapter)
    weight_bytes = max(graph.weight_bytes for graph in graphs.values())
    device = None if runtime is None else runtime.info
    engines = bundle / 'engines'
    digests = _digests(bundle, graphs, files or {})
    if adapter.is_rtx:
        known = {name: digest for each in digests.values() for name, digest in each.items()}
        if targets:
            check_targets(targets, found)
            targets = ordered(targets)
            target = engines / rtx_folder_name(targets, adapter.version)
        else:
            target = _folder_here(engines, device, adapter.version, {**(files or {}), **known})
            targets = targets_of(target)
            check_targets(targets, found)
    else:
        assert device is not None, 'only TensorRT for RTX builds without a GPU'
        if lacks := lacking_products(found, device.capability):
            raise ValueError(
                f'{folder}: the files are {found}, and {device.name} ({device.capability}) '
                f'{lacks}; export them in int8'
            )
        target = engines / folder_name(device, adapter.version)
    done, passed = ({}, {}) if force else _done(bundle, target, digests, found, rows)
    if adapter.is_rtx and not _is_known(target, device, rebuild_command(bundle)):
        passed = {}
    plan = BuildPlan(
        folder=target,
        rows=rows,
        graphs=graphs,
        digests=digests,
        done=done,
        passed=passed,
        precision=found,
        beside=exported.beside,
        workspace_bytes=workspace_bytes,
        estimate=MemoryEstimate.of(weight_bytes, workspace_bytes),
        timing_cache=target / TIMING_CACHE,
        targets=targets,
    )
    if plan.to_build:
        check_fits(plan.estimate, runtime)
    return plan


def _folder_here(
    engines: Path, device: DeviceInfo | None, version: str, files: Mapping[str, str]
) -> Path:
    """Folder of engines that are there for a GPU; else the one of its own (ValueError: none)."""
    assert device is not None, 'without a GPU targets are named'
    check_gpu(device.name, device.capability)
    own = engines / rtx_folder_name((target_of(device.capability),), version)
    return find_rtx_folder(engines, device, version, files) or own


def _is_known(folder: Path, device: DeviceInfo | None, command: str) -> bool:
    """Return whether engines of TensorRT for RTX were compared on this GPU."""
    try:
        metadata = read_metadata(folder, command)
    except ValueError:
        return False
    known = (metadata.gpu, metadata.processors)
    return device is not None and known == (device.name, device.processors)


def _check_readable(
    folder: Path, graphs: Mapping[str, GraphFacts], precision: Precision, adapter: TensorRT
) -> None:
    """Refuse files that this TensorRT cannot run or read (ValueError)."""
    if precision not in adapter.precisions:
        why = ' (it takes no matrix that is in 8 bits already)' if precision in QUANTISED else ''
        if precision == 'nvfp4':
            why = ' (it reads 4-bit floats from 10.8 on)'
        raise ValueError(
            f'{folder}: the files are {precision}, which TensorRT {adapter.version} cannot run'
            f'{why}; export them in {" or ".join(adapter.precisions)}'
        )
    for name, graph in graphs.items():
        if problems := unsupported(graph, precision, adapter.version, adapter.is_rtx):
            raise ValueError(
                f'{folder / graph_of(name)}: TensorRT {adapter.version} cannot read '
                f'{", ".join(problems)}'
            )


def build_engines(
    plan: BuildPlan,
    adapter: TensorRT,
    runtime: CudaRuntime | None,
    *,
    captures: int,
    progress: Progress | None = None,
    report: Callable[[str, EngineFile], object] = lambda name, entry: None,
) -> Metadata:
    """Build the planned engines, and try to load each; keep the fastest of `captures`.

    Raises TensorRTError: a graph cannot be built; engines that were finished stay; OSError: the
    folder cannot be written.
    """
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
        if plan.to_build:
            forget(plan.folder)
    except OSError as error:
        raise WriteError(plan.folder, error) from None
    # Those of TensorRT for RTX are tied to a GPU once they were compared on it.
    tied = not adapter.is_rtx or bool(plan.passed)
    device = runtime.info if runtime is not None and tied else None
    metadata = Metadata(
        tensorrt=adapter.version,
        gpu=device.name if device else '',
        capability=device.capability if device else '',
        processors=device.processors if device else 0,
        targets=list(plan.targets),
        precision=plan.precision,
        captures=captures,
        rows=plan.rows,
        engines=dict(plan.done),
        passed={} if plan.to_build else dict(plan.passed),
    )
    for name in plan.to_build:
        entry = _build_one(name, plan, adapter, runtime, progress)
        metadata = replace(metadata, engines={**metadata.engines, name: entry})
        write_metadata(plan.folder, metadata)
        report(name, entry)
    # Again where nothing was built: the number of captures or rows may be another.
    write_metadata(plan.folder, metadata)
    for path in plan.surplus:
        path.unlink()
    return metadata


def tie_to_device(
    folder: Path, metadata: Metadata, adapter: TensorRT, runtime: CudaRuntime
) -> Metadata:
    """Return the metadata of engines built elsewhere, for this GPU; TensorRTError: unloadable."""
    engines = {
        name: replace(entry, scratch_bytes=_scratch_bytes(folder / entry.file, adapter, runtime))
        for name, entry in metadata.engines.items()
    }
    device = runtime.info
    return replace(
        metadata,
        gpu=device.name,
        capability=device.capability,
        processors=device.processors,
        engines=engines,
    )


def check_fits(estimate: MemoryEstimate, runtime: CudaRuntime | None) -> None:
    """Refuse a build that cannot fit into memory (ValueError: needs, free bytes, remedies)."""
    free_host, free_swap = available_host_bytes(), free_swap_bytes()
    if runtime is not None and runtime.info.integrated:
        if free_host is None:
            return
        swap = estimate.shared_swap(free_host)
        if swap is None:
            raise _refusal('memory that cannot be swapped out', estimate.device, free_host, None)
        if swap > free_swap:
            need = estimate.device + estimate.host
            raise _refusal('memory', need, free_host + free_swap, swap - free_swap)
        return
    if runtime is not None and estimate.device > (free_device := runtime.free_bytes()):
        raise _refusal('GPU memory', estimate.device, free_device, None)
    if free_host is not None and estimate.host > free_host + free_swap:
        free = free_host + free_swap
        raise _refusal('memory', estimate.host, free, estimate.host - free)


def _refusal(name: str, need: int, free: int, more_swap: int | None) -> ValueError:
    """Make the error of a build that does not fit; `more_swap` is None where swap cannot help."""
    counted = swap = ''
    if more_swap is not None:
        counted = ' (swap included)'
        swap = f', or add {more_swap / 1e9:.1f} GB of swap (on a disk; zram gives no memory)'
    return ValueError(
        f'building needs about {need / 1e9:.1f} GB of {name} and {free / 1e9:.1f} GB are free'
        f'{counted}: end what else runs, give a smaller --workspace, export the ONNX files in '
        f'float16 or bfloat16{swap}. Nothing was built'
    )


def _build_one(
    name: str,
    plan: BuildPlan,
    adapter: TensorRT,
    runtime: CudaRuntime | None,
    progress: Progress | None,
) -> EngineFile:
    cache = plan.timing_cache
    options = BuildOptions(
        workspace_bytes=plan.workspace_bytes,
        timing_cache=cache.read_bytes() if cache.is_file() else b'',
        reduced=plan.beside != 'float32',
        int8_products=plan.graphs[name].int8_products,
        lengths=tuple(range(1, plan.rows + 1)),
        targets=plan.targets,
        progress=progress,
    )
    start = time.monotonic()
    bundle = plan.folder.parents[1]
    built = adapter.build(bundle / ONNX_FOLDER / graph_of(name), options)
    seconds = time.monotonic() - start
    path = plan.folder / f'{name}{_ENDING}'
    write_bytes(path, built.plan)
    if built.timing_cache:
        write_bytes(cache, built.timing_cache)
    layers, pinned = built.layers, built.pinned
    # It holds the engine once more, in memory that a Jetson's GPU shares.
    del built
    # Where there is no GPU it is known from the comparison on.
    scratch = 0 if runtime is None else _scratch_bytes(path, adapter, runtime)
    return EngineFile(
        file=path.name,
        size=path.stat().st_size,
        onnx_sha256=plan.digests[name],
        seconds=round(seconds, 1),
        scratch_bytes=scratch,
        layers=layers,
        pinned=pinned,
    )


def _scratch_bytes(path: Path, adapter: TensorRT, runtime: CudaRuntime) -> int:
    """Load a built engine once to see that it loads; return the scratch memory that it needs."""
    try:
        try:
            (network,) = adapter.load(path, runtime.stream)
        except TensorRTMemoryError:
            # What the builder holds may be what is missing, and the next build makes another.
            adapter.free_builder()
            (network,) = adapter.load(path, runtime.stream)
    except TensorRTError:
        path.unlink()
        raise
    scratch = network.scratch_bytes
    network.close()
    return scratch


def _digests(
    bundle: Path, engines: Iterable[str], files: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """SHA-256 of each graph and its weights; a file that several share is read once at most."""
    known = dict(files)
    digests = {}
    for engine in engines:
        names = [f'{ONNX_FOLDER}/{file}' for file in (graph_of(engine), WEIGHTS_DATA)]
        for name in names:
            if name not in known:
                known[name] = file_sha256(bundle / name)
        digests[engine] = {name: known[name] for name in names}
    return digests


def _done(
    bundle: Path, folder: Path, digests: dict[str, dict[str, str]], precision: str, rows: int
) -> tuple[dict[str, EngineFile], dict[str, str]]:
    """Engines that are there, whole, and from these ONNX files; what they were compared with."""
    try:
        metadata = read_metadata(folder, rebuild_command(bundle))
    except ValueError:
        return {}, {}
    done = {
        name: entry
        for name, entry in metadata.engines.items()
        if digests.get(name) == entry.onnx_sha256
        and (name == 'vision' or metadata.rows == rows)
        and metadata.precision == precision
        and (folder / entry.file).is_file()
        and (folder / entry.file).stat().st_size == entry.size
    }
    return done, metadata.passed


# Operators that the ONNX parser of TensorRT 8.6 knows (its operators.md) and our graphs may use.
# Later parsers know them all.
_KNOWN_8_6 = """
    Abs Add And ArgMax Cast Clip Concat Constant ConstantOfShape Conv ConvTranspose Cos Div Equal
    Erf Exp Expand Flatten Floor Gather GatherElements Gemm Greater GreaterOrEqual Identity
    LayerNormalization Less LessOrEqual Log MatMul Max MaxPool Min Mul Neg Not Or Pow Range
    Reciprocal ReduceMax ReduceMean ReduceMin ReduceSum Relu Reshape Shape Sigmoid Sin Slice
    Softmax Softplus Split Sqrt Squeeze Sub Tanh Tile Transpose Unsqueeze Where
"""
OPERATORS_8_6 = frozenset(_KNOWN_8_6.split())
OPSET_8_6 = 17


# The first release that reads ONNX's attention.
_ATTENTION = (10, 14)


def unsupported(graph: GraphFacts, precision: Precision, version: str, rtx: bool) -> list[str]:
    """List what a TensorRT release, such as `10.3.0`, cannot read: operators, their set, types.

    `rtx`: TensorRT for RTX, which has version numbers of its own.
    """
    if rtx:
        return []
    major, minor = (int(number) for number in version.split('.')[:2])
    if major > 8:
        old = 'Attention' in graph.operators and (major, minor) < _ATTENTION
        return ['Attention (from 10.14 on; export without --attention fused)'] if old else []
    problems = sorted(set(graph.operators) - OPERATORS_8_6)
    if graph.opset > OPSET_8_6:
        problems.append(f'operator set {graph.opset} (at most {OPSET_8_6})')
    if precision == 'bfloat16':
        problems.append('bfloat16')
    return problems
