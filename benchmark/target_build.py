"""Memory and time of building full-size engines for RTX cards, on a machine without one.

    ./run setup tensorrt-rtx
    ./run exec python benchmark/target_build.py pi05 --work FOLDER

A bundle with random weights and its ONNX files are written tensor by tensor. Then the engines are
planned and built as `vla_runtime build --target` does it, in a process of its own that is watched:
`anonymous` is memory that it asked for, `resident` also counts the pages of files that it had
mapped, which the system takes back when it needs them. FOLDER holds the weights three times; all of
it is removed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from export_memory import measure_families, watched, write_policy

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.export.onnx.export import write_onnx

PACKAGES = ('torch', 'onnx', 'numpy')
TARGETS = ('sm86', 'sm89', 'sm120')
# Beside the environment, where ./run puts it.
_LIBRARY = Path(sys.prefix) / 'tensorrt_rtx'
# As the command builds, which imports no PyTorch. One digest stands for all files: hashing
# gigabytes is not what is measured.
_BUILD = """
import json, sys, time
from pathlib import Path
sys.path.append(sys.argv.pop(1))
from vla_runtime.engines.tensorrt.adapter import import_rtx
from vla_runtime.export.tensorrt.build import build_engines, plan_build
bundle, rows, targets = Path(sys.argv[1]), int(sys.argv[2]), tuple(sys.argv[3:])
files = dict.fromkeys((f'onnx/{path.name}' for path in (bundle / 'onnx').iterdir()), '0')
adapter = import_rtx()
plan = plan_build(bundle, adapter, None, rows=rows, files=files, targets=targets)
start = time.monotonic()
built = build_engines(plan, adapter, None, captures=1)
engines = {
    name: {
        'bytes': entry.size,
        'weight_bytes': plan.graphs[name].weight_bytes,
        'seconds': entry.seconds,
    }
    for name, entry in built.engines.items()
}
found = {
    'seconds': round(time.monotonic() - start),
    'estimated_bytes': plan.estimate.host,
    'engines': engines,
}
bundle.with_suffix('.json').write_text(json.dumps(found))
"""


def measure(family: str, precision: str, rows: int, work: Path) -> dict[str, Any]:
    """Write, export and build one family; remove what was written."""
    bundle = work / family
    try:
        parameters = write_policy(bundle, family, 'BF16')
        write_onnx(bundle, read_bundle(bundle, verify=False).spec, precision)
        command = [sys.executable, '-c', _BUILD, str(_LIBRARY), str(bundle), str(rows), *TARGETS]
        peaks = watched(command)
        found = json.loads(bundle.with_suffix('.json').read_text())
    finally:
        shutil.rmtree(bundle, ignore_errors=True)
        bundle.with_suffix('.json').unlink(missing_ok=True)
    return {
        'parameters': parameters,
        'onnx_precision': precision,
        'rows': rows,
        'targets': list(TARGETS),
        **peaks,
        **found,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--precision', default='bfloat16', help='of the ONNX files')
    parser.add_argument('--rows', type=int, default=2, choices=(1, 2), help='most prompt rows')
    return measure_families(
        'target_build',
        PACKAGES,
        parser,
        lambda family, given: measure(family, given.precision, given.rows, given.work),
    )


if __name__ == '__main__':
    sys.exit(main())
