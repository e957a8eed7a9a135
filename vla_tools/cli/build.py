"""Build a bundle's ONNX files into TensorRT engines.

TensorRT builds on the GPU that will run the engines; TensorRT for RTX on any machine, with
--target. An engine of the first runs only on the GPU and the TensorRT version it was built with, so
it is built where it is used, once, and again after TensorRT was updated. It goes to
BUNDLE/engines/GPU-NUMBERsm-trtVERSION: a Jetson's power mode may change the number of
multiprocessors, so build once in each mode that the robot uses. What is there already and was built
from the same files is kept; a build that was stopped goes on. One engine serves one and two prompt
rows; TensorRT 8.6 alone needs a profile for each.

examples:
  vla_runtime build engines/my_policy
  vla_runtime build engines/my_policy --dry-run              # what would be built, and its memory
  vla_runtime build engines/my_policy --rows 1               # a shorter build, serial guidance
  vla_runtime build engines/my_policy --workspace 256        # MiB that a layer may take
  vla_runtime build engines/my_policy --target sm86,sm89     # for RTX cards, on any machine

With --target nothing but TensorRT for RTX is needed: no GPU, and none of its memory. One engine
runs on all targets: sm86 (RTX 30), sm89 (RTX 40), sm120 (RTX 50), sm121 (GB10), sm80 (A100). It
goes to BUNDLE/engines/rtx-TARGETS-trtrtxVERSION. On the robot's PC the same command without
--target, with the same --precision and --rows, then compares it with the recorded cases, and
nothing loads it before. Of several folders for a GPU one built from the bundle's files is taken
first, then one that passed on this GPU, then the one built last.

The engines' precision is that of the ONNX files ('vla_runtime export --onnx-precision'): bfloat16,
unless --precision names another one. What was built is compared with what PyTorch gave for the
cases that the export recorded in the bundle; numpy is enough for that. Only engines that agree are
ever loaded. The receipt is written beside them (verification.json, with the SHA-256 of what it
speaks of). Engines beyond the bounds are removed, and rejected.json says what was found.
'vla_runtime verify BUNDLE --backend tensorrt' repeats the comparison.

exit codes: 0 built or up to date; 1 the engines' numbers are wrong, and the output says which; 2
not possible as asked; 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from vla_runtime.bundle.onnx_files import Precision
from vla_runtime.cli._numbers import at_least
from vla_runtime.engines.tensorrt.rtx import TARGETS, parse_targets
from vla_tools.cli._comparison import compare_engines

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vla_convert.export.tensorrt.build import BuildPlan
    from vla_runtime.bundle.folder import Bundle
    from vla_runtime.engines.tensorrt.callbacks import Progress
    from vla_runtime.engines.tensorrt.store import EngineFile, Metadata

_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument('bundle', type=Path, metavar='BUNDLE', help='the folder of the policy')
    parser.add_argument(
        '--precision',
        choices=get_args(Precision),
        help='that the ONNX files have; others are refused (default: bfloat16 from TensorRT 10.3 '
        'on, so that float32, float16, int8, fp8 and nvfp4 are built on demand alone)',
    )
    parser.add_argument(
        '--workspace',
        type=at_least(1),
        default=1024,
        metavar='MIB',
        help='GPU memory that a layer may take as scratch (default: %(default)s)',
    )
    parser.add_argument(
        '--rows',
        type=int,
        choices=(1, 2),
        help='most prompt rows: 2 for guidance in one pass (default: 2 where the policy has '
        'advantage tags, else 1)',
    )
    parser.add_argument(
        '--target',
        type=_targets,
        metavar='SM,...',
        default=(),
        help='compute capabilities to build for with TensorRT for RTX, on any machine: '
        f'{", ".join(TARGETS)}',
    )
    parser.add_argument(
        '--device', default='cuda', metavar='DEVICE', help='cuda or cuda:N (default: %(default)s)'
    )
    parser.add_argument(
        '--autotune',
        type=at_least(1),
        default=3,
        metavar='N',
        help='capture every CUDA graph N times at load and keep the fastest (default: %(default)s)',
    )
    parser.add_argument('--force', action='store_true', help='build again what is there')
    parser.add_argument('--dry-run', action='store_true', help='check and show, build nothing')


def _targets(text: str) -> tuple[str, ...]:
    try:
        return parse_targets(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main(arguments: argparse.Namespace) -> int:
    """Build; 1 where the engines' numbers are wrong, 2 where it is not possible."""
    from vla_runtime.engines.cuda_driver import CudaError
    from vla_runtime.engines.tensorrt.adapter import TensorRTError

    try:
        return _build(arguments)
    except (TensorRTError, CudaError, ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2


def _build(arguments: argparse.Namespace) -> int:
    from vla_convert.export.tensorrt.build import build_engines, plan_build, tie_to_device
    from vla_convert.export.tensorrt.verification import is_compared
    from vla_runtime.bundle.folder import read_bundle, verify_files
    from vla_runtime.engines.cuda_runtime import CudaRuntime, device_index
    from vla_runtime.engines.preflight import check_backend, check_graph_files
    from vla_runtime.engines.recorded_cases import check_cases
    from vla_runtime.engines.tensorrt.adapter import import_rtx, import_tensorrt
    from vla_runtime.engines.tensorrt.loading import check_one_image_size
    from vla_runtime.engines.tensorrt.store import ENGINES, graph_of, passed_on, rebuild_command

    bundle = read_bundle(arguments.bundle, verify=False)
    check_one_image_size(bundle.spec.dims)
    most = arguments.rows or (2 if bundle.spec.advantage else 1)
    check_graph_files(bundle.folder, map(graph_of, ENGINES))
    if arguments.target:
        adapter, runtime = import_rtx(), None
    else:
        check_backend('tensorrt', arguments.device)
        adapter = import_tensorrt()
        runtime = CudaRuntime(device_index(arguments.device))
    check_cases(bundle.folder)
    precision = arguments.precision or adapter.default_precision
    plan = plan_build(
        bundle.folder,
        adapter,
        runtime,
        rows=most,
        files=bundle.spec.files,
        precision=precision,
        workspace_bytes=arguments.workspace * _MIB,
        force=arguments.force,
        targets=arguments.target,
    )
    where = ', '.join(plan.targets) if runtime is None else runtime.info.name
    print(f'{where}, TensorRT {adapter.version}, {plan.precision} -> {plan.folder}')
    _show(plan, on_device=runtime is not None)
    if arguments.dry_run:
        print('\ndry run: nothing was built')
        return 0
    compare = (
        bool(plan.to_build)
        or plan.passed != passed_on(bundle.spec.files)
        or not is_compared(plan.folder, plan.done, bundle.spec.files)
    )
    if plan.to_build or compare:
        # Last, because it reads gigabytes: what is built and what it is compared with.
        verify_files(bundle)
    with _Bar(adapter.reports_progress) as bar:
        metadata = build_engines(
            plan,
            adapter,
            runtime,
            captures=arguments.autotune,
            progress=bar.progress,
            report=bar.report,
        )
    adapter.free_builder()
    if runtime is None:
        print(
            f'\nbuilt {plan.folder}\nnext, where it shall run (there it is compared, once): '
            f'{rebuild_command(bundle.folder, arguments.rows)}'
        )
        return 0
    if adapter.is_rtx and compare:
        metadata = tie_to_device(plan.folder, metadata, adapter, runtime)
    runtime.close()
    if compare and not _verified(bundle, plan.folder, metadata, arguments.device):
        return 1
    print(f'\n{"built" if plan.to_build else "up to date:"} {plan.folder}')
    return 0


def _show(plan: BuildPlan, *, on_device: bool) -> None:
    for name, graph in plan.graphs.items():
        state = 'is there' if name in plan.done else 'to build'
        print(f'  {name:12} {graph.weight_bytes / 1e6:9,.1f} MB of weights, {state}')
    for path in plan.surplus:
        print(f'  {path.stem:12} {path.stat().st_size / 1e6:9,.1f} MB, not asked for: to remove')
    if plan.to_build:
        estimate = plan.estimate
        device = f'{estimate.device / 1e9:.1f} GB of GPU memory and ' if on_device else ''
        same = ' (one and the same on a Jetson)' if on_device else ''
        print(f'  needs about {device}{estimate.host / 1e9:.1f} GB of memory{same}')


def _verified(bundle: Bundle, folder: Path, metadata: Metadata, device: str) -> bool:
    """Compare with the recorded cases, write the receipt; engines that differ are removed."""
    from vla_convert.export.tensorrt.verification import keep, reject
    from vla_runtime.engines.graphed_work import BrokenEngineError
    from vla_runtime.engines.tensorrt.store import REJECTION

    document: Mapping[str, Any] = {}
    try:
        receipt, document = compare_engines(bundle, folder, metadata, device)
        failures = receipt.failures
    except BrokenEngineError as error:
        failures = [str(error)]
    for failure in failures:
        print(f'FAILED: {failure}', file=sys.stderr)
    if failures:
        reject(folder, metadata.engines, document, failures)
        print(
            f'the engines were removed; what was found is in {folder / REJECTION}', file=sys.stderr
        )
        return False
    keep(folder, metadata, document, bundle.spec.files)
    largest = max(item.max_error for item in receipt.chunks)
    print(
        f"  compared with PyTorch's recorded chunks: they differ by {largest:.2g} at most "
        f'({receipt.notes[0]})'
    )
    return True


class _Bar:
    """Progress bar on a terminal; TensorRT 8.6 reports no progress, so one line per engine."""

    def __init__(self, reports: bool) -> None:
        self._reports = reports
        self._bar: Any = None
        self._outer = ''

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    @property
    def progress(self) -> Progress | None:
        return self._step if self._reports else None

    def report(self, name: str, entry: EngineFile) -> None:
        self._close()
        pinned = ''.join(f', {count} layers {kind}' for kind, count in entry.pinned.items())
        print(
            f'  {name:12} {entry.size / 1e6:9,.1f} MB, scratch '
            f'{entry.scratch_bytes / 1e6:,.1f} MB, {entry.seconds:.0f} s, '
            f'{entry.layers} layers{pinned}',
            flush=True,
        )

    def _step(self, phase: str, done: int, total: int) -> bool:
        """Follow the first phase that TensorRT names: it encloses the others."""
        from tqdm import tqdm

        if self._bar is None:
            self._outer = phase
            self._bar = tqdm(total=total, desc=phase, leave=False, disable=None)
        elif phase == self._outer:
            self._bar.update(done - self._bar.n)
        else:
            self._bar.set_postfix_str(phase, refresh=True)
        return True

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
