"""Where an inference in PyTorch spends its time on a CPU: products, attention, all else.

    python benchmark/cpu_limits.py
    python benchmark/cpu_limits.py --policies demo --rounds 30

In float32, the demo policy on one thread and the middle size on two; new images, and a hit. Times
of products and of attention are those of PyTorch's profiler; all else is what is left of the time
without it: norms, activations, copies, and the start of every operator. Each product then runs
again by itself on random numbers of its shape, in the fastest layout of its matrix and, where it is
used, in oneDNN: no inference whose products come from these libraries takes less than they do.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import mid_size
import numpy as np
import torch
from gpu import described_parser
from measurement import write_result

from vla_runtime.families.blocks import fused_product
from vla_runtime.families.blocks.layers import Linear
from vla_runtime.performance.bench import look
from vla_runtime.policy import Policy

PACKAGES = ('torch', 'numpy', 'opencv-python-headless')
POLICIES = {'demo': 1, 'mid_size': 2}
# oneDNN's product with all that follows it.
ONE_PASS = 'mkldnn::_linear_pointwise'
PRODUCTS = ('mm', 'addmm', 'bmm', 'baddbmm', 'convolution', 'linear_pointwise')
_DEMO = Path(__file__).parents[1] / 'engines' / 'demo'
_IMAGE = (480, 640, 3)
_WARM_UP, _REPEATS = 3, 30
Work = Callable[[], object]


def kind_of(operator: str) -> str:
    """Return `products`, `attention` or `rest` for a name as the profiler has it."""
    name = operator.rpartition('::')[2].lstrip('_').removeprefix('mkldnn_')
    if name in PRODUCTS:
        return 'products'
    return 'attention' if 'attention' in name else 'rest'


def split(work: Work) -> tuple[dict[str, float], dict[tuple[int, int, int], int], int]:
    """Run it under the profiler.

    Returns:
        milliseconds of products and attention; products by tokens, inputs and outputs; operators
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        work()
    times, shapes, operators = {'products': 0.0, 'attention': 0.0}, {}, 0
    for event in profiler.key_averages(group_by_input_shape=True):
        kind = kind_of(event.key)
        operators += event.count if event.key.startswith('aten::') else 0
        if kind == 'rest':
            continue
        times[kind] += event.self_cpu_time_total / 1e3
        if kind == 'products' and (shape := shape_of(event.key, event.input_shapes)):
            shapes[shape] = shapes.get(shape, 0) + event.count
    return times, shapes, operators


def shape_of(operator: str, inputs: list[list[int]]) -> tuple[int, int, int] | None:
    """Return tokens, inputs and outputs of a product by a matrix; None of another product."""
    if operator == ONE_PASS:
        *tokens, width = inputs[0]
        # A factor may come before the matrix.
        matrix = next(shape for shape in inputs[:0:-1] if shape[1:] == [width])
        return math.prod(tokens), width, matrix[0]
    matrices = [shape for shape in inputs if len(shape) == 2]
    return (*matrices[0], matrices[1][1]) if len(matrices) >= 2 else None


def alone_ms(shapes: Mapping[tuple[int, int, int], int]) -> float:
    """Least milliseconds of products one after the other, each over and over."""
    total = 0.0
    for (tokens, inputs, outputs), count in shapes.items():
        x, out = torch.randn(tokens, inputs), torch.empty(tokens, outputs)
        layouts = torch.randn(inputs, outputs), torch.randn(outputs, inputs).t()
        ways: list[Work] = [partial(torch.mm, x, matrix, out=out) for matrix in layouts]
        if fused_product.is_faster(torch.float32):
            layer = Linear(inputs, outputs, bias=False)
            ways.append(partial(fused_product.Product([layer], packed=True), x))
        times = []
        for _ in range(_REPEATS):
            for way in ways:
                begin = perf_counter()
                way()
                times.append(perf_counter() - begin)
        total += count * min(times) * 1e3
    return total


def measure(policy: Policy, rounds: int) -> dict[str, Any]:
    """Return the parts of a miss and of a hit, medians in milliseconds."""
    random = np.random.default_rng(0)
    walls: dict[str, list[float]] = {'miss': [], 'hit': []}
    parts: dict[str, list[dict[str, float]]] = {'miss': [], 'hit': []}
    found: dict[str, Any] = {}
    for turn in range(2 * rounds + _WARM_UP):
        images: dict[str, np.ndarray | None] = {
            name: random.integers(0, 256, _IMAGE, dtype=np.uint8)
            for name in policy.spec.camera_names
        }
        for case in ('miss', 'hit'):

            def work(images: Any = images, turn: int = turn) -> object:
                return policy.infer(look(policy.spec, images), number=turn)

            if turn < _WARM_UP or turn % 2:
                begin = perf_counter()
                work()
                if turn >= _WARM_UP:
                    walls[case].append((perf_counter() - begin) * 1e3)
                continue
            times, shapes, operators = split(work)
            parts[case].append(times)
            found[case] = {'operators': operators, 'shapes': shapes}
    for case, of_case in found.items():
        wall = float(np.median(walls[case]))
        kinds = ('products', 'attention')
        times = {kind: float(np.median([one[kind] for one in parts[case]])) for kind in kinds}
        rest = wall - sum(times.values())
        found[case] = {
            'ms': wall,
            **{f'{kind}_ms': milliseconds for kind, milliseconds in times.items()},
            'rest_ms': rest,
            'products_alone_ms': alone_ms(of_case['shapes']),
            'operators': of_case['operators'],
            'rest_us_an_operator': rest * 1e3 / of_case['operators'],
        }
    return found


def main() -> None:
    arguments = _arguments()
    found = {}
    with tempfile.TemporaryDirectory() as work:
        for name in arguments.policies:
            threads = POLICIES[name]
            bundle = _DEMO if name == 'demo' else mid_size.write_mid_size(Path(work) / 'bundle')
            policy = Policy.load(bundle, 'torch', precision='float32', threads=threads)
            found[name] = {'threads': threads, **measure(policy, arguments.rounds)}
            policy.close()
            for case in ('miss', 'hit'):
                print(
                    name, case, {key: round(value, 2) for key, value in found[name][case].items()}
                )
    figures = {'rounds': arguments.rounds, **found}
    print(write_result('cpu_limits', figures, PACKAGES, arguments.json))


def _arguments() -> argparse.Namespace:
    parser = described_parser(__doc__)
    parser.add_argument('--policies', nargs='+', choices=tuple(POLICIES), default=tuple(POLICIES))
    parser.add_argument('--rounds', type=int, default=15, help='with profiler, and without')
    parser.add_argument('--json', type=Path, help='instead of benchmark/results')
    return parser.parse_args()


if __name__ == '__main__':
    main()
