"""Compare a bundle's ONNX files or its TensorRT engines with PyTorch, on the device at hand.

Every file runs on seeded inputs (several prompts, hidden cameras, one and two rows, guidance
scales, plans; those in int8 on observations that the export recorded), and its outputs are compared
with those of the PyTorch modules in float32, tensor by tensor, step by step and as whole chunks.
The types in ONNX files are checked too: norms, softmax, time, masks and the update in float32,
indices in integers. It is what 'vla_runtime export' does before it writes a bundle. With --backend
tensorrt the engines that 'vla_runtime build' built for this GPU are compared with what PyTorch gave
for the cases recorded at export, which needs numpy and no PyTorch. Nothing in the bundle is
changed.

examples:
  vla_runtime verify engines/pick
  vla_runtime verify engines/pick --device cuda --json receipt.json
  vla_runtime verify engines/pick --backend tensorrt

exit codes: 0 all within the bounds; 1 one is not, and the output names its tensor and file; 2 the
bundle cannot be compared (not a bundle, changed files, no ONNX files or engines, no
such device).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_runtime.cli._files import output_file
from vla_runtime.engines.devices import default_device
from vla_runtime.files.atomic_write import write_text
from vla_tools.cli._comparison import compare_engines, show_receipt

if TYPE_CHECKING:
    from vla_convert.export.receipt import Receipt

    Compared = tuple[Receipt, dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument('bundle', type=Path, metavar='BUNDLE', help='the folder to verify')
    parser.add_argument(
        '--backend',
        choices=('onnxruntime', 'tensorrt'),
        default='onnxruntime',
        help='onnxruntime: the ONNX files (default); tensorrt: the engines built from them',
    )
    parser.add_argument(
        '--device',
        help="cpu, cuda, cuda:N, or tensorrt for ONNX Runtime's TensorRT provider (default: cpu; "
        'with --backend tensorrt: cuda)',
    )
    parser.add_argument(
        '--json',
        type=output_file,
        metavar='FILE',
        help='write the receipt there too (-: standard output)',
    )


def main(arguments: argparse.Namespace) -> int:
    """Verify; 1 where files differ from the networks, 2 where they cannot be compared."""
    from vla_convert.export.receipt import VerificationError
    from vla_runtime.engines.cuda_driver import CudaError
    from vla_runtime.engines.tensorrt.adapter import TensorRTError

    try:
        verify = _verify_engines if arguments.backend == 'tensorrt' else _verify_onnx
        device = arguments.device or default_device(arguments.backend)
        receipt, document = verify(arguments.bundle, device)
    except VerificationError as error:
        print(f'FAILED: {error}', file=sys.stderr)
        return 1
    except (ValueError, OSError, CudaError, TensorRTError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    show_receipt(receipt)
    for failure in receipt.failures:
        print(f'FAILED: {failure}', file=sys.stderr)
    if arguments.json:
        try:
            write_text(arguments.json, json.dumps(document, indent=1) + '\n')
        except OSError as error:
            print(f'error: {error}', file=sys.stderr)
            return 2
    return 1 if receipt.failures else 0


def _verify_onnx(path: Path, device: str) -> Compared:
    from vla_runtime.bundle.folder import read_bundle, verify_files
    from vla_runtime.bundle.onnx_files import ROWS, engine_graphs
    from vla_runtime.engines.preflight import (
        COMPARISON_PACKAGES,
        check_backend,
        check_graph_files,
        missing_package,
    )
    from vla_runtime.family.declaration import distinct_image_sizes

    bundle = read_bundle(path, verify=False)
    if missing := missing_package(*COMPARISON_PACKAGES):
        raise ValueError(
            f"the Python package '{missing}' is not installed, so nothing can be compared: "
            'pip install torch onnx onnxruntime'
        )
    sizes = len(distinct_image_sizes(bundle.spec.dims))
    check_graph_files(bundle.folder, engine_graphs(ROWS, sizes))
    check_backend('onnxruntime', device)
    verify_files(bundle)

    # Everything is checked before PyTorch is imported.
    from tqdm import tqdm

    from vla_convert.export.onnx.verification import receipt_dict, verification_steps, verify_onnx

    with tqdm(total=verification_steps(), desc='verify', unit='file', disable=None) as bar:
        receipt = verify_onnx(bundle.folder, bundle.spec, device=device, advance=bar.update)
    return receipt, receipt_dict(receipt)


def _verify_engines(path: Path, device: str) -> Compared:
    from vla_runtime.bundle.folder import read_bundle, verify_files
    from vla_runtime.engines.cuda_runtime import CudaRuntime, device_index
    from vla_runtime.engines.preflight import check_backend
    from vla_runtime.engines.recorded_cases import check_cases
    from vla_runtime.engines.tensorrt.adapter import import_tensorrt
    from vla_runtime.engines.tensorrt.store import find_engines

    bundle = read_bundle(path, verify=False)
    check_backend('tensorrt', device)
    check_cases(bundle.folder)
    runtime = CudaRuntime(device_index(device))
    runtime.close()
    adapter = import_tensorrt()
    folder, metadata = find_engines(
        bundle.folder,
        runtime.info,
        adapter.version,
        bundle.spec.files,
        rtx=adapter.is_rtx,
        passed=False,
    )
    verify_files(bundle)
    return compare_engines(bundle, folder, metadata, device)
