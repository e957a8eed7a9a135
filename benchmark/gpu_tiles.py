"""Microseconds of the kernels of an expert's layer in Triton, by their tiles, on a GPU.

    python benchmark/gpu_tiles.py
    python benchmark/gpu_tiles.py --jobs 8 --kernels gated down --json tiles.json

pi0.5 at its published size in bfloat16, three views, one prompt row and two. A kernel runs over the
weights of all layers in one captured graph, so that they come out of the device's memory. The first
line of each kernel is of the tiles that `triton_expert.py` has; the fastest follow. Most of the
time is compilation, which `--jobs` processes do ahead; the first run takes minutes.

Exit code: 0, or 2 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'benchmark')]

from gpu import PACKAGES, described, described_parser, device_facts, device_fault  # noqa: E402

KERNELS = ('project', 'attend', 'out', 'gated', 'down')
VIEWS, REPLAYS, SHOWN = 3, 10, 5
Tiles = dict[str, Any]


class Candidate(NamedTuple):
    """A kernel with prompt rows and constants of `triton_expert` that replace its own."""

    kernel: str
    rows: int
    tiles: Tiles


def candidates(kernels: Sequence[str]) -> list[Candidate]:
    """Return the tiles to be tried, for each kernel and number of rows its own first."""
    found = []
    for kernel, rows in product(kernels, (1, 2)):
        found.append(Candidate(kernel, rows, {}))
        found += [Candidate(kernel, rows, tiles) for tiles in _tiles_of(kernel)]
    return found


def _tiles_of(kernel: str) -> Iterator[Tiles]:
    if kernel == 'attend':
        for queries, keys, part, warps in product((16, 64), (32, 64), (64, 128), (4, 8)):
            options = {'num_warps': warps, 'num_stages': 2}
            yield {'QUERIES': queries, 'KEYS': keys, 'PART': part, 'ATTENDED': options}
        return
    columns = {'project': 'HEAD_PAIRS', 'gated': 'GATE_PAIRS'}.get(kernel, 'OUTPUTS')
    parts = (512, 1024) if columns == 'OUTPUTS' else (512,)
    for wide, inner, stages, part in product((16, 32), (64, 128), (4, 6), parts):
        options = {'num_warps': 4, 'num_stages': stages}
        yield {columns: wide, 'INNER': inner, 'PART_INPUTS': part, 'MULTIPLIED': options}


class Expert:
    """Layers of the published pi0.5's expert with random weights, and a random prefix.

    Args:
        device: device that they run on.
        size: size of `random_policy`.
    """

    def __init__(self, device: str, size: str) -> None:
        from random_policy import random_network, sized_dims

        from vla_runtime.families.blocks.fused import FusedBlock

        dims = sized_dims('pi05', size, VIEWS)
        # The expert alone is of interest.
        dims = replace(
            dims,
            vision=replace(dims.vision, depth=1),
            language=replace(dims.language, width=64, mlp_dim=64),
            vocabulary=400,
        )
        # Triton's interpreter multiplies no bfloat16.
        precision = 'float32' if device == 'cpu' else 'bfloat16'
        network = random_network('pi05', dims, device, precision)
        self.device, self.dims, self.dtype = device, dims, network.expert.layers[0].mlp.gate.dtype
        self.blocks = [FusedBlock(block, packed=True) for block in network.expert.layers]
        self.sight = network.suffix_mask(self.blocks[0].qkv.weight.device)

    def launches(self, candidate: Candidate) -> Callable[[], None]:
        """Return one launch of a kernel for each layer."""
        import torch

        from vla_runtime.families.blocks import triton_expert

        heads, rows = self.dims.expert, candidate.rows
        # Without any of its own nothing would be patched.
        tiles = {'ROWS': triton_expert.ROWS, **candidate.tiles}
        with mock.patch.multiple(triton_expert, **tiles):
            expert = triton_expert.TritonExpert(self.blocks, self.sight)
            shape = (heads.num_kv_heads, self.dims.prefix_length, heads.head_dim)
            past = torch.randn(
                2, len(self.blocks), rows, *shape, device=self.device, dtype=self.dtype
            )
            mask = torch.ones(rows, self.dims.prefix_length, dtype=torch.bool, device=self.device)
            expert.load(mask, tuple(past))
        for buffer in (expert._normed, expert._hidden, expert._own.query, expert._own.attended):
            buffer.normal_()
        works = [self._one(candidate.kernel, expert, layer) for layer in range(len(self.blocks))]

        def run() -> None:
            with mock.patch.multiple(triton_expert, **tiles):
                for work in works:
                    work()

        return run

    def _one(self, kernel: str, expert: Any, layer: int) -> Callable[[], Any]:
        qkv, out, gated, down = expert._matrices[layer]
        own = expert._own
        if kernel == 'attend':
            return lambda: own.attend(layer, expert._precision)
        if kernel == 'project':
            return lambda: expert._project(layer, qkv)
        if kernel == 'gated':
            return lambda: expert._gate(self.blocks[layer], gated)
        operand, matrix = (own.attended, out) if kernel == 'out' else (expert._hidden, down)
        return lambda: expert._multiply(operand, matrix)


def microseconds(expert: Expert, candidate: Candidate) -> float:
    """Time of a launch; on a CPU, where it is for tests, 0."""
    import torch

    run = expert.launches(candidate)
    run()
    if expert.device == 'cpu':
        return 0.0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / REPLAYS / len(expert.blocks)


def compile_ahead(device: str, size: str, some: Sequence[Candidate]) -> None:
    """Run candidates once, which leaves what was compiled in Triton's cache."""
    expert = Expert(device, size)
    for candidate in some:
        try:
            expert.launches(candidate)()
        except Exception:
            # Said when its turn comes.
            continue


def measure(expert: Expert, some: Sequence[Candidate]) -> tuple[list[Tiles], dict[str, str]]:
    """Return the time of each candidate that runs, and why others do not."""
    found: list[Tiles] = []
    left_out: dict[str, str] = {}
    for candidate in some:
        try:
            taken = microseconds(expert, candidate)
        except Exception as error:
            # Tiles that share too much memory.
            left_out[str(candidate)] = described(error)
            continue
        found.append({**candidate._asdict(), 'us': taken})
    return found, left_out


def show(found: Sequence[Mapping[str, Any]]) -> None:
    """Print each kernel with its own tiles, and the fastest."""
    for kernel, rows in dict.fromkeys((one['kernel'], one['rows']) for one in found):
        mine = [one for one in found if (one['kernel'], one['rows']) == (kernel, rows)]
        print(f'{kernel}, {rows} row(s)')
        own = [one for one in mine if not one['tiles']]
        for one in own + sorted(mine, key=lambda one: one['us'])[:SHOWN]:
            print(f'  {one["us"]:8.2f} us  {one["tiles"] or "as it is"}')


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; see the module for the exit code."""
    arguments = _arguments(argv)
    if reason := device_fault(arguments.device):
        print(f'error: {reason}', file=sys.stderr)
        return 2
    from measurement import write_result

    from vla_runtime.processes.workers import workers

    some, of_size = candidates(arguments.kernels), (arguments.device, arguments.size)
    if arguments.jobs:
        with workers(arguments.jobs) as submit:
            ahead = [
                submit(compile_ahead, *of_size, some[first :: arguments.jobs])
                for first in range(arguments.jobs)
            ]
            for one in ahead:
                one.result()
    found, left_out = measure(Expert(*of_size), some)
    show(found)
    figures = {'device': device_facts(arguments.device), 'tiles': found, 'left_out': left_out}
    print(write_result('gpu_tiles', figures, PACKAGES, arguments.json))
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = described_parser(__doc__)
    parser.add_argument('--kernels', nargs='+', choices=KERNELS, default=KERNELS)
    parser.add_argument('--jobs', type=int, default=4, help='compile ahead (default: 4; 0: none)')
    parser.add_argument('--json', type=Path, help='instead of benchmark/results')
    # For the tests of this script, which have no GPU.
    parser.add_argument('--device', choices=['cuda', 'cpu'], default='cuda', help=argparse.SUPPRESS)
    parser.add_argument('--size', choices=['full', 'tiny'], default='full', help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == '__main__':
    sys.exit(main())
