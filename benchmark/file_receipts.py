"""Receipts of the demo policy's ONNX files in every precision, with attention exact and fused.

    python benchmark/file_receipts.py

Each is exported as `vla_runtime export` does it, and compared with PyTorch in float32: 16 bits on
seeded inputs, 8 and 4 bits on observations that the quantiser did not see. Errors are those of the
receipt; files that exceed a bound are not written, and stand here with what was said.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measurement import write_result

from vla_runtime.bundle.folder import Bundle, read_bundle
from vla_runtime.bundle.onnx_files import QUANTISED, Attention, Precision
from vla_runtime.export.onnx.bundle import export_bundle
from vla_runtime.export.receipt import Receipt, VerificationError
from vla_runtime.types import Observation
from vla_tabletop.study.calibration import demo_observations

DEMO = Path(__file__).resolve().parents[1] / 'engines' / 'demo'
FORMS: tuple[tuple[Precision, Attention], ...] = (
    ('float32', 'exact'),
    ('bfloat16', 'exact'),
    ('bfloat16', 'fused'),
    ('float16', 'exact'),
    ('float16', 'fused'),
    ('int8', 'exact'),
    ('fp8', 'exact'),
    ('nvfp4', 'exact'),
)
PACKAGES = ('torch', 'onnx', 'onnxruntime', 'numpy')


def measure(
    source: Bundle, precision: Precision, attention: Attention, seen: Sequence[Observation]
) -> dict[str, Any]:
    """Export once; return the largest and mean errors of its receipt."""
    receipts: list[Receipt] = []
    found: dict[str, Any] = {'precision': precision, 'attention': attention, 'refused': ''}
    with tempfile.TemporaryDirectory() as folder:
        try:
            export_bundle(
                source,
                Path(folder) / 'bundle',
                precision,
                report=receipts.append,
                observations=seen if precision in QUANTISED else (),
                attention=attention,
            )
        except (VerificationError, ValueError) as error:
            return found | {'refused': str(error)}
    (receipt,) = receipts
    chunks = [chunk.mean_error for chunk in receipt.chunks]
    return found | {
        'tensor_largest': max(one.max_error for one in receipt.tensors),
        'tensor_bound': max(one.bound for one in receipt.tensors),
        'chunk_largest': max(one.max_error for one in receipt.chunks),
        'chunk_mean': float(np.mean(chunks)),
        'chunk_bound': min(one.bound for one in receipt.chunks),
        'action_largest_rad': max(one.max_error for one in receipt.actions),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--out', type=Path)
    arguments = parser.parse_args(argv)
    source, seen = read_bundle(DEMO), demo_observations(DEMO)
    figures = []
    for precision, attention in FORMS:
        figures.append(measure(source, precision, attention, seen))
        print(figures[-1], flush=True)
    print('wrote', write_result('file_receipts', {'files': figures}, PACKAGES, arguments.out).name)
    return 0


if __name__ == '__main__':
    sys.exit(main())
