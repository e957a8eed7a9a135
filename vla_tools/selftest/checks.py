"""The self-test of a machine: driver, packages, and every family's policy on a backend.

A failed step ends only what builds on it, and so does a device that cannot be closed; all builds
on the CUDA context. TensorRT is used after the driver has answered: without one it ends the
process.
"""

from __future__ import annotations

import platform
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from vla_runtime.engines.cuda_driver import CudaDriver, format_version, import_cuda
from vla_runtime.engines.cuda_runtime import CudaRuntime
from vla_runtime.engines.devices import parse_device
from vla_runtime.engines.preflight import (
    check_backend,
    check_cuda_device,
    driver_cuda_version,
    missing_package,
)
from vla_runtime.engines.recorded_cases import judged_as
from vla_runtime.engines.tensorrt.adapter import TensorRT, import_tensorrt
from vla_runtime.engines.tensorrt.rtx import check_gpu
from vla_runtime.family.listing import find_family
from vla_runtime.files.machine import machine, versions
from vla_runtime.policy import Policy
from vla_tools.performance.device_rates import power_mode
from vla_tools.selftest.policies import (
    infer_cases,
    largest_error,
    names_of,
    precision_of,
    read_policy,
    time_inferences,
    unpack,
)
from vla_tools.selftest.steps import StepFailedError, Steps

# --- Release and power mode of a Jetson

# First line: `# R36 (release), REVISION: 4.3, GCID: …, BOARD: generic, …`
_RELEASE = Path('/etc/nv_tegra_release')
_MODEL = Path('/proc/device-tree/model')
_REFUSALS = (
    'this release is reported to refuse large allocations although memory is free '
    '(NvMapMemAllocInternalTagged in the log): take another one of JetPack 6'
)
_JETPACKS = {'36': '6', '38': '7', '39': '7'}


def describe_jetson() -> dict[str, str]:
    """Return model, Jetson Linux release, JetPack and power mode; empty elsewhere.

    A container lacks the release's file and gives the host's kernel.
    """
    described, model, kernel = _describe_release(), _read(_MODEL).strip('\0 \n'), platform.release()
    if not described:
        # Docker hides the device tree from a container without privileges.
        if 'Jetson' not in model and not kernel.endswith('-tegra'):
            return {}
        described['kernel'] = kernel
    if model:
        described['model'] = model
    if mode := power_mode():
        described['power_mode'] = mode
    return described


def _describe_release() -> dict[str, str]:
    text = _read(_RELEASE).partition('\n')[0]
    found = re.search(r'R(\d+).*REVISION:\s*([\d.]+)', text)
    if not found:
        return {'jetson_linux': text.strip()[:80]} if text else {}
    jetpack = {'jetpack': _JETPACKS[found[1]]} if found[1] in _JETPACKS else {}
    linux = f'{found[1]}.{found[2]}'
    known = {'known_problem': _REFUSALS} if linux == '36.4.7' else {}
    return {'jetson_linux': linux, **jetpack, **known}


def _read(path: Path) -> str:
    """Return a file's text; empty where it cannot be read."""
    try:
        return path.read_text(errors='replace')
    except OSError:
        return ''


PACKAGES = (
    'vla_runtime',
    'numpy',
    'torch',
    'onnxruntime',
    'onnxruntime-gpu',
    'tensorrt',
    'tensorrt-cu12',
    'tensorrt-cu13',
    'tensorrt-rtx-cu12-bindings',
    'tensorrt-rtx-cu13-bindings',
    'cuda-bindings',
    'cuda-python',
    'opencv-python-headless',
)
_ROWS = 2
# Policies of megabytes need no more: the default is a gigabyte, which a small Jetson may not have.
_WORKSPACE = 64 << 20
# More than a runtime's pinned memory, so that it is used twice.
_COPIED = 12 << 20
# Compute capabilities of Jetsons: TX1, TX2, Xavier, Orin, Thor under CUDA 12 and from 13 on.
_TEGRA = frozenset({(5, 3), (6, 2), (7, 2), (8, 7), (10, 1), (11, 0)})
_TEGRA_AS_OTHERS = (13, 2)
_PAGE = 'docs/howto/jetson.md has the versions that go together'
_NOT_COMPARED = 'nothing was compared: the inference failed'
_NUMBERS = 'the numbers are wrong on this machine: do not use this backend here, and report it'


def describe_machine() -> dict[str, Any]:
    """Return the machine and the versions installed, for a report."""
    return {'machine': machine(), 'jetson': describe_jetson(), 'versions': versions(PACKAGES)}


def run_selftest(device: str, families: Sequence[str], steps: Steps) -> dict[str, Any]:
    """Try a device; return median milliseconds by backend and policy.

    `device`: `cpu` (PyTorch and ONNX Runtime), `cuda` or `cuda:N` (PyTorch), `tensorrt` or
    `tensorrt:N`. Raises ValueError: no such device.
    """
    kind, index = parse_device(device, 'onnxruntime')
    times: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix='vla_runtime_selftest_') as temporary:
        folder = Path(temporary)
        with suppress(StepFailedError):
            steps.run('policies: unpacked', lambda: _unpack(folder), 'free some disk space in /tmp')
            if kind == 'cpu':
                for backend in ('torch', 'onnxruntime'):
                    times[backend] = _try_on_cpu(backend, folder, families, steps)
            elif kind == 'cuda':
                times['torch'] = _try_pytorch(index, folder, families, steps)
            else:
                times['tensorrt'] = _try_tensorrt(index, folder, families, steps)
    return times


def results(steps: Steps) -> list[dict[str, Any]]:
    """Return the steps as JSON holds them."""
    return [asdict(step) for step in steps.done]


def _unpack(folder: Path) -> str:
    unpack(folder)
    return ', '.join(sorted(path.name for path in folder.iterdir() if path.is_dir()))


def _try_on_cpu(
    backend: str, folder: Path, families: Sequence[str], steps: Steps
) -> dict[str, float]:
    if missing_package(backend):
        steps.skip(f'{backend}: imported', f"the Python package '{backend}' is not installed")
        return {}
    times: dict[str, float] = {}
    with suppress(StepFailedError):
        steps.run(f'{backend}: imported', lambda: _import(backend))
        _try_families(backend, 'cpu', folder, families, steps, times)
    return times


def _import(package: str) -> str:
    return str(__import__(package).__version__)


def _try_pytorch(
    index: int, folder: Path, families: Sequence[str], steps: Steps
) -> dict[str, float]:
    times: dict[str, float] = {}
    device = f'cuda:{index}'

    def driver() -> str:
        check_cuda_device(device, index)
        return f'{device} answers'

    steps.run('driver: a device answers', driver)
    steps.run('PyTorch: imported', lambda: _import('torch'), _PAGE)
    steps.run('PyTorch: made for this GPU', lambda: _pytorch_fits(index), _PAGE)
    names = names_of(folder, families, _capability(index))
    _try_families('torch', device, folder, names, steps, times)
    return times


def _capability(index: int) -> tuple[int, int]:
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    return major, minor


def _pytorch_fits(index: int) -> str:
    """Compare PyTorch's kernels with the GPU."""
    import torch

    if torch.version.cuda is None:
        raise ValueError(f'PyTorch {torch.__version__} is a build without CUDA')
    if not torch.cuda.is_available():
        raise ValueError(
            f'PyTorch {torch.__version__}, made for CUDA {torch.version.cuda}, finds no device '
            'though the driver shows one: the driver is for another CUDA'
        )
    major, minor = _capability(index)
    made = torch.cuda.get_arch_list()
    driver = driver_cuda_version()
    if not any(_serves(architecture, major, minor, driver) for architecture in made):
        raise ValueError(
            f'PyTorch {torch.__version__} has no kernels for sm_{major}{minor} (it has '
            f'{", ".join(made)})'
        )
    name = torch.cuda.get_device_name(index)
    return f'{name}, sm_{major}{minor}, CUDA {torch.version.cuda}'


def _serves(architecture: str, major: int, minor: int, driver: tuple[int, int]) -> bool:
    """Return whether kernels of `sm_87` run on a GPU, or those of `compute_87` can be compiled."""
    found = re.fullmatch(r'(sm|compute)_(\d+)(\d)([af]?)', architecture)
    if not found:
        return False
    made = (int(found[2]), int(found[3]))
    # CUDA C++ Programming Guide, Feature Set Compiler Targets: `a` is for one architecture, of sm_
    # and compute_ alike, and `f` for those of its family.
    if found[4] == 'a':
        return made == (major, minor)
    if found[1] == 'compute' and not found[4]:
        return made <= (major, minor)
    # CUDA C++ Programming Guide, Binary Compatibility: from one minor revision to the next it holds
    # on the desktop, not on Tegra, and not between the two. A driver of CUDA 13.2 lifts that
    # (github.com/pytorch/pytorch/pull/186285).
    if driver < _TEGRA_AS_OTHERS and made != (major, minor) and {made, (major, minor)} & _TEGRA:
        return False
    return made[0] == major and made[1] <= minor


def _try_tensorrt(
    index: int, folder: Path, families: Sequence[str], steps: Steps
) -> dict[str, float]:
    times: dict[str, float] = {}
    driver: list[CudaDriver] = []
    opened: list[CudaRuntime] = []
    adapters: list[TensorRT] = []

    def bindings() -> str:
        driver.append(CudaDriver(import_cuda()))
        return f'cuda-bindings {driver[0].release}'

    def answers() -> str:
        driver[0].find_device(index)
        return f'driver for CUDA {format_version(driver[0].version)}'

    def opens() -> str:
        opened.append(CudaRuntime(index))
        info = opened[0].info
        return (
            f'{info.name}, sm_{info.capability.replace(".", "")}, {info.processors} '
            f'multiprocessors, {opened[0].free_bytes() / 1e9:.1f} of {info.total_bytes / 1e9:.1f} '
            'GB free'
        )

    def imports() -> str:
        adapter = import_tensorrt()
        if adapter.is_rtx:
            check_gpu(opened[0].info.name, opened[0].info.capability)
        adapters.append(adapter)
        name = 'for RTX, ' if adapter.is_rtx else ''
        return f'{name}{adapter.version}; precisions {", ".join(adapter.precisions)}'

    steps.run('bindings: imported, release taken', bindings)
    steps.run('driver: a device answers', answers)
    steps.run('device: opened', opens)
    runtime = opened[0]
    with _closed('device', runtime, steps):
        steps.run('device: copies, a captured graph, a timer', lambda: _use_device(runtime))
        steps.run('versions: made for the same CUDA', lambda: _same_cuda(driver[0].version), _PAGE)
        steps.run('TensorRT: imported, release taken', imports)
        adapter = adapters[0]
        major, minor = map(int, runtime.info.capability.split('.'))
        names = names_of(folder, families, (major, minor), adapter.precisions)
        build = partial(_build, folder, adapter, runtime)
        _try_families('tensorrt', f'cuda:{index}', folder, names, steps, times, build)
    return times


def _use_device(runtime: CudaRuntime) -> str:
    """Copy there and back, and replay a captured copy on data that came after the capture."""
    data = np.arange(_COPIED // 4, dtype=np.float32)
    source, target = (runtime.allocate(data.nbytes) for _ in range(2))
    runtime.upload(source, data)
    graph = runtime.capture(lambda: runtime.copy(target, source, data.nbytes))
    runtime.upload(source, data + 1)
    milliseconds = runtime.milliseconds(lambda: runtime.launch(graph))
    if not np.array_equal(runtime.download(target, np.empty_like(data)), data + 1):
        raise ValueError('a captured copy gave other numbers than were uploaded')
    runtime.destroy(graph)
    runtime.free(source)
    runtime.free(target)
    return f'{data.nbytes / milliseconds / 1e6:.1f} GB/s within the device'


def _same_cuda(driver: tuple[int, int]) -> str:
    """Compare the CUDA that TensorRT's package was made for with the driver's."""
    found = []
    for major in (11, 12, 13):
        for package in ('tensorrt-cu{}', 'tensorrt-rtx-cu{}-bindings'):
            with suppress(metadata.PackageNotFoundError):
                found.append((major, package, metadata.version(package.format(major))))
    for major, package, version in found:
        if major > driver[0]:
            raise ValueError(
                f'{package.format(major)} {version} needs a driver for CUDA {major}, and this one '
                f'is for CUDA {format_version(driver)}: update the driver, or pip install '
                f'{package.format(driver[0])}'
            )
    names = ', '.join(f'{package.format(major)} {version}' for major, package, version in found)
    return f'{names or "TensorRT of the system"}, driver for CUDA {format_version(driver)}'


def _build(folder: Path, adapter: TensorRT, runtime: CudaRuntime, name: str) -> str:
    from vla_convert.export.tensorrt.build import build_engines, plan_build, tie_to_device
    from vla_runtime.engines.tensorrt.store import TIMING_CACHE, passed_on, write_metadata

    bundle, _ = read_policy(folder, name)
    plan = plan_build(
        bundle.folder,
        adapter,
        runtime,
        rows=_ROWS,
        files=bundle.spec.files,
        workspace_bytes=_WORKSPACE,
    )
    # One for all policies, whose kernels are partly the same.
    plan = replace(plan, timing_cache=folder / TIMING_CACHE)
    built = build_engines(plan, adapter, runtime, captures=1)
    if adapter.is_rtx:
        built = tie_to_device(plan.folder, built, adapter, runtime)
    # Loaded for the comparison that follows, and for nothing else: the folder is a temporary one.
    write_metadata(plan.folder, replace(built, passed=passed_on(bundle.spec.files)))
    size = sum(engine.size for engine in built.engines.values())
    return f'{len(built.engines)} engines, {size / 1e6:.1f} MB'


def _mend_compared(error: Exception) -> str:
    """Return what a comparison that failed means: wrong numbers are a ValueError."""
    return _NUMBERS if isinstance(error, ValueError) else _NOT_COMPARED


@contextmanager
def _closed(name: str, opened: CudaRuntime | Policy, steps: Steps) -> Iterator[None]:
    """Close what was opened; an error is recorded as a failed step, and the next step runs."""
    try:
        yield
    finally:
        try:
            opened.close()
        except RuntimeError as error:
            # CUDA's, TensorRT's and PyTorch's. A context that has failed refuses to free, too.
            steps.fail(f'{name}: closed', error)


def _try_families(
    backend: str,
    device: str,
    folder: Path,
    names: Sequence[str],
    steps: Steps,
    times: dict[str, float],
    build: Callable[[str], str] | None = None,
) -> None:
    for name in names:
        if steps.context_lost:
            steps.skip(_label(backend, name), 'the CUDA context is lost')
            continue
        with suppress(StepFailedError):
            if build is not None:
                steps.run(f'{name}: engines built', partial(build, name))
            _try_policy(backend, device, folder, name, steps, times)


def _label(backend: str, name: str) -> str:
    return name if backend == 'tensorrt' else f'{backend}, {name}'


def _try_policy(
    backend: str,
    device: str,
    folder: Path,
    name: str,
    steps: Steps,
    times: dict[str, float],
) -> None:
    """Load one policy, compare its chunks on two inputs, and time it."""
    label = _label(backend, name)
    loaded: list[Policy] = []
    reference: dict[str, np.ndarray] = {}

    def load() -> str:
        check_backend(backend, device)
        bundle, chunks = read_policy(folder, name)
        reference.update(chunks)
        precision = precision_of(bundle.folder)
        loaded.append(Policy.load(bundle, backend, device, precision=precision, verify=False))
        return f'on {device} in {precision}'

    def compare() -> str:
        precision = precision_of(folder / name)
        rounds = find_family(loaded[0].spec.family).rounds_activations
        judged = judged_as(precision, rounds)
        error = largest_error(infer_cases(loaded[0]), reference, judged)
        return f'{len(reference)} chunks differ by {error:.1g} at most'

    def measure() -> str:
        milliseconds, report = time_inferences(loaded[0])
        times[name] = round(milliseconds, 3)
        graphs = dict(report.cuda_graph)
        if device != 'cpu' and set(graphs.values()) != {'captured'}:
            raise ValueError(
                'not every network runs as a CUDA graph: '
                + ', '.join(f'{network} {how}' for network, how in graphs.items())
            )
        return f'{milliseconds:.2f} ms an inference' + (', graphs' if device != 'cpu' else '')

    steps.run(f'{label}: loaded', load)
    with _closed(label, loaded[0], steps):
        steps.run(f"{label}: compared with PyTorch's chunks", compare, _mend_compared)
        steps.run(f'{label}: timed', measure)
