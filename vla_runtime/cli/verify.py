"""Compare a bundle's ONNX files with its PyTorch networks, on the device at hand.

Two things are checked. Every graph is walked, node by node: norms, softmax, time, masks and the
update must be in float32 and indices in integers. Then every file runs on seeded inputs (several
prompts, hidden cameras, one and two rows, guidance scales, plans) and its outputs are compared with
those of the PyTorch modules in float32, tensor by tensor, step by step and as whole chunks. It is
what 'vla_runtime export' does before it writes a bundle; nothing in the bundle is changed.

examples:
  vla_runtime verify engines/pick
  vla_runtime verify engines/pick --device cuda --json receipt.json

exit codes: 0 all within the bounds; 1 something is not, and the output says which tensor of which
file; 2 the bundle cannot be compared (not a bundle, changed files, no ONNX files, no such device).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vla_runtime.bundle import Bundle
    from vla_runtime.export.onnx_verification import Receipt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument('bundle', type=Path, metavar='BUNDLE', help='the folder to verify')
    parser.add_argument(
        '--device',
        default='cpu',
        help="cpu, cuda, cuda:N, or tensorrt for ONNX Runtime's TensorRT provider (default: cpu)",
    )
    parser.add_argument('--json', type=Path, metavar='FILE', help='write the receipt there too')


def main(arguments: argparse.Namespace) -> int:
    """Verify; 1 where files differ from the networks, 2 where they cannot be compared."""
    from vla_runtime.bundle import read_bundle

    try:
        from vla_runtime.export.onnx_verification import VerificationError
    except ModuleNotFoundError as error:
        print(
            f"error: the Python package '{error.name}' is not installed, so nothing can be "
            'compared: pip install torch onnx onnxruntime',
            file=sys.stderr,
        )
        return 2
    try:
        bundle = read_bundle(arguments.bundle)
        receipt = _verify(bundle, arguments.device)
        if arguments.json:
            text = json.dumps(receipt.as_dict(), indent=1) + '\n'
            arguments.json.write_text(text, encoding='utf-8')
    except VerificationError as error:
        print(f'FAILED: {error}', file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    _show(receipt)
    for failure in receipt.failures:
        print(f'FAILED: {failure}', file=sys.stderr)
    return 1 if receipt.failures else 0


def _verify(bundle: Bundle, device: str) -> Receipt:
    from tqdm import tqdm

    from vla_runtime.export.onnx_verification import verification_steps, verify_onnx

    with tqdm(total=verification_steps(), desc='verify', unit='file', disable=None) as bar:
        return verify_onnx(bundle.folder, bundle.spec, device=device, advance=bar.update)


def _show(receipt: Receipt) -> None:
    print(f'{receipt.precision} on {receipt.device}, {len(receipt.cases)} cases')
    print(f'{"file":<20} {"tensor":<18} {"largest":>9} {"mean":>9} {"bound":>9}')
    for item in receipt.tensors:
        _line(item.file, item.tensor, item.max_error, item.mean_error, item.bound)
    for graphs in dict.fromkeys(item.graphs for item in receipt.chunks):
        chunks = [item for item in receipt.chunks if item.graphs == graphs]
        largest = max(item.max_error for item in chunks)
        mean = sum(item.mean_error for item in chunks) / len(chunks)
        bound = min(item.bound for item in chunks)
        _line(graphs.split()[-1], f'chunk ({len(chunks)} cases)', largest, mean, bound)
    for note in receipt.notes:
        print(f'note: {note}')
    if not receipt.failures:
        print('all within the bounds')


def _line(file: str, tensor: str, largest: float, mean: float, bound: float) -> None:
    print(f'{file:<20} {tensor:<18} {largest:>9.2g} {mean:>9.2g} {bound:>9.2g}')
