"""Build a bundle's ONNX files into TensorRT engines, on the GPU that will run them.

An engine runs only on the GPU and the TensorRT version it was built with, so it is built where it
is used, once, and again after TensorRT was updated. It goes to BUNDLE/engines/GPU-trtVERSION. What
is there already and was built from the same files is kept; a build that was stopped goes on.

examples:
  vla_runtime build engines/my_policy
  vla_runtime build engines/my_policy --dry-run              # what would be built, and its memory
  vla_runtime build engines/my_policy --rows 1               # half the memory, serial guidance
  vla_runtime build engines/my_policy --workspace 256        # MiB that a layer may take

The engines' precision is that of the ONNX files ('vla_runtime export'); --precision only makes sure
of it. Where PyTorch, onnx and onnxruntime are installed, what was built is compared with PyTorch
and the receipt written beside the engines; engines beyond the bounds are not kept.

exit codes: 0 built or up to date; 1 the engines' numbers are wrong, and the output says which; 2
not possible as asked; 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_runtime.cli._numbers import at_least

if TYPE_CHECKING:
    from vla_runtime.bundle import Bundle
    from vla_runtime.engines.tensorrt_adapter import Progress
    from vla_runtime.engines.tensorrt_store import EngineFile, Metadata
    from vla_runtime.export.tensorrt_build import BuildPlan

_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument('bundle', type=Path, metavar='BUNDLE', help='the folder of the policy')
    parser.add_argument(
        '--precision',
        choices=('float32', 'float16', 'bfloat16'),
        help='refuse ONNX files of another precision',
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
    parser.add_argument(
        '--no-verify', action='store_true', help='do not compare the engines with PyTorch'
    )


def main(arguments: argparse.Namespace) -> int:
    """Build; 1 where the engines' numbers are wrong, 2 where it is not possible."""
    from vla_runtime.bundle import read_bundle
    from vla_runtime.engines.cuda_runtime import CudaError, CudaRuntime, device_index
    from vla_runtime.engines.tensorrt_adapter import TensorRTError, import_tensorrt
    from vla_runtime.export.tensorrt_build import build_engines, plan_build

    try:
        bundle = read_bundle(arguments.bundle, verify=False)
        index = device_index(arguments.device)
        adapter = import_tensorrt()
        # Before anything is asked of TensorRT, which does not survive a machine without a driver.
        runtime = CudaRuntime(index)
        most = arguments.rows or (2 if bundle.spec.prompt.advantage else 1)
        plan = plan_build(
            bundle.folder,
            adapter,
            runtime,
            rows=range(1, most + 1),
            precision=arguments.precision,
            workspace_bytes=arguments.workspace * _MIB,
            force=arguments.force,
        )
        print(f'{runtime.info.name}, TensorRT {adapter.version}, {plan.precision} -> {plan.folder}')
        _show(plan)
        if arguments.dry_run:
            print('\ndry run: nothing was built')
            return 0
        with _Bar(adapter.reports_progress) as bar:
            metadata = build_engines(
                plan,
                adapter,
                runtime,
                captures=arguments.autotune,
                progress=bar.progress,
                report=bar.report,
            )
        runtime.close()
        if not arguments.no_verify and not _verified(plan, bundle, metadata, most, arguments):
            return 1
    except (TensorRTError, CudaError, ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    print(f'\n{"built" if plan.to_build else "up to date:"} {plan.folder}')
    return 0


def _show(plan: BuildPlan) -> None:
    for name, summary in plan.graphs.items():
        state = 'is there' if name in plan.done else 'to build'
        print(f'  {name:12} {summary.weight_bytes / 1e6:9,.1f} MB of weights, {state}')
    if plan.to_build:
        estimate = plan.estimate
        print(
            f'  needs about {estimate.device / 1e9:.1f} GB of GPU memory and '
            f'{estimate.host / 1e9:.1f} GB of memory (one and the same on a Jetson)'
        )


def _verified(
    plan: BuildPlan,
    bundle: Bundle,
    metadata: Metadata,
    rows: int,
    arguments: argparse.Namespace,
) -> bool:
    """Compare with PyTorch and write the receipt; engines that differ lose their `engine.json`."""
    from vla_runtime.engines.tensorrt_engine import TensorRTEngine
    from vla_runtime.engines.tensorrt_store import METADATA, RECEIPT, write_file

    receipt_path = plan.folder / RECEIPT
    if not plan.to_build and receipt_path.is_file():
        return True
    try:
        from vla_runtime.export.tensorrt_verification import receipt_dict, verify_engines
    except ModuleNotFoundError as error:
        print(f"not compared with PyTorch: the Python package '{error.name}' is not installed")
        receipt_path.unlink(missing_ok=True)
        return True
    engine = TensorRTEngine.load(
        bundle.folder,
        bundle.spec.family,
        bundle.spec.dims,
        device=arguments.device,
        precision=plan.precision,
        max_rows=rows,
        denoise_steps=bundle.spec.denoise_steps,
        use_cuda_graphs=True,
    )
    try:
        receipt = verify_engines(bundle.folder, bundle.spec, engine, plan.precision)
    finally:
        engine.close()
    text = json.dumps(receipt_dict(receipt, metadata), indent=1) + '\n'
    write_file(receipt_path, text.encode())
    for failure in receipt.failures:
        print(f'FAILED: {failure}', file=sys.stderr)
    if receipt.failures:
        (plan.folder / METADATA).unlink()
        return False
    largest = max(item.max_error for item in receipt.chunks)
    print(f'  compared with PyTorch: chunks differ by {largest:.2g} at most ({receipt.notes[0]})')
    return True


class _Bar:
    """A progress bar on a terminal; on TensorRT 8.6, which tells nothing, a line an engine."""

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
        """The first phase that TensorRT names encloses the others: the bar follows that one."""
        from tqdm import tqdm

        if self._bar is None:
            self._outer = phase
            # disable=None: silent where the output is not a terminal.
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
