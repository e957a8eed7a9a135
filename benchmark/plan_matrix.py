"""Plans that TensorRT for RTX makes of every family's graphs: sizes, kernels, types of products.

    ./run setup tensorrt-rtx
    ./run exec python benchmark/plan_matrix.py

It needs no GPU: the library's real parser and builder run ahead of time. Policies are the tests'
tiny ones in every precision, and graphs those that engines are built from, for one prompt row and
for one and two. `before` is the plan with a profile for each number of rows, which stores the
matrices of a product that is cut twice. Tests hold today's plans to these figures. With --families
or --precisions the other plans of the result stay as they were.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ('test', 'benchmark')]
os.environ.setdefault('VLA_RUNTIME_TEST_SCRATCH', tempfile.mkdtemp(prefix='vla_runtime_plans_'))

from parts.measurement import RESULTS, write_result  # noqa: E402
from rtx_plans import (  # noqa: E402
    FAMILIES,
    FP8_TARGETS,
    GRAPHS,
    PRECISIONS,
    TARGETS,
    adapter,
    build,
    targets_of,
    tiny_graphs,
    unplanned,
    wrong_products,
)

from vla_runtime.engines.tensorrt.adapter import TensorRT  # noqa: E402
from vla_runtime.engines.tensorrt.kernel_plan import count_products  # noqa: E402

PACKAGES = ('onnx', 'torch', 'numpy')


class ProfileEachLength(TensorRT):
    """The adapter with a profile for each length, as TensorRT 8.6 needs them."""

    def _add_profiles(
        self, builder: Any, config: Any, network: Any, lengths: tuple[int, ...]
    ) -> None:
        for length in lengths:
            super()._add_profiles(builder, config, network, (length,))


def measure(
    families: Sequence[str], precisions: Sequence[str], targets: Sequence[tuple[str, ...]]
) -> list[dict[str, Any]]:
    """Build every graph for every target; return what each plan is."""
    found = []
    before = ProfileEachLength(adapter()._trt)
    for family in families:
        for precision in precisions:
            for name in GRAPHS:
                path = tiny_graphs(family, precision) / name
                for lengths in ((1,),) if name == 'vision.onnx' else ((1,), (1, 2)):
                    for some in targets:
                        if len(some) > 1 and some != targets_of(precision):
                            continue
                        if not {*some} <= {*targets_of(precision), 'sm121'}:
                            continue
                        start = time.monotonic()
                        built = build(path, lengths, some)
                        entry = {
                            'family': family,
                            'precision': precision,
                            'graph': name,
                            'rows': lengths[-1],
                            'targets': list(some),
                            'bytes': len(built.plan),
                            'kernels': len(built.kernels),
                            'products': count_products(built.kernels),
                            'wrong_products': wrong_products(path, built.kernels),
                            'products_without_a_kernel': sorted(unplanned(path, built.kernels)),
                            'seconds': round(time.monotonic() - start, 1),
                        }
                        if len(lengths) > 1 and some == targets_of(precision):
                            entry['bytes_before'] = len(build(path, lengths, some, before).plan)
                        found.append(entry)
            print(family, precision, flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; 1 where a product is in another type than its file says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--families', nargs='*', default=FAMILIES)
    parser.add_argument('--precisions', nargs='*', default=PRECISIONS)
    parser.add_argument('--out', type=Path)
    arguments = parser.parse_args(argv)
    targets = [*((one,) for one in (*TARGETS, 'sm121')), TARGETS, FP8_TARGETS]
    path = arguments.out or RESULTS / 'tensorrt_rtx.json'
    known = json.loads(path.read_text())['figures']['plans'] if path.is_file() else []
    plans = measure(arguments.families, arguments.precisions, targets)
    measured = {(plan['family'], plan['precision']) for plan in plans}
    plans += [plan for plan in known if (plan['family'], plan['precision']) not in measured]
    plans.sort(key=lambda plan: (FAMILIES.index(plan['family']), plan['precision'], plan['graph']))
    figures = {'tensorrt_rtx': adapter().version, 'plans': plans}
    write_result('tensorrt_rtx', figures, PACKAGES, arguments.out)
    return int(any(plan['wrong_products'] or plan['products_without_a_kernel'] for plan in plans))


if __name__ == '__main__':
    sys.exit(main())
