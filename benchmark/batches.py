"""Chunks a second of requests whose denoise steps run together, and whether each keeps its bits.

Every round runs 1, 2, 4 and 8 requests in turn, each time together and one after the other, with
new images and prompts (misses) and with prefixes that are there already (hits). Weights are random,
of the families' published sizes but for pi0.5, which is reduced to 40 M parameters.

Run: python benchmark/batches.py [--families smolvla act] [--rounds 5] [--threads 2]
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from time import perf_counter
from typing import Any

import numpy as np
import torch
from parts.measurement import in_turn, median_ratio, write_result
from parts.random_policy import random_network, sized_dims
from tqdm import tqdm

from vla_runtime.engines.protocol import SLOTS, StepInputs
from vla_runtime.engines.torch.engine import TorchEngine
from vla_runtime.family.declaration import image_sizes
from vla_runtime.family.listing import find_family
from vla_runtime.inference.denoise import denoise, usual_schedule

FAMILIES = ('pi05', 'smolvla', 'diffusion', 'act')
COUNTS = (1, 2, 4, 8)
STEPS = {'act': 1}


class Robots:
    """An engine of random weights, and seeded inputs of as many robots as run together at most."""

    def __init__(self, name: str) -> None:
        family = find_family(name)
        dims: Any = sized_dims(name, 'reduced', 2) if name == 'pi05' else family.presets[name]
        network = random_network(name, dims, 'cpu', 'float32')
        for tensor_name, tensor in network.state_dict().items():
            if tensor_name.endswith('running_var'):
                tensor.abs_().add_(0.1)
        self.engine = TorchEngine(network, max_rows=1)
        self.family, self.dims = family, dims
        steps = STEPS.get(name, 10)
        self.schedule = usual_schedule(family, dims, steps)
        self.engine.set_schedule(*self.schedule)
        for _ in range(COUNTS[-1] - 1):
            self.engine.open_session()
        self.inputs = [self._inputs(seed, steps) for seed in range(COUNTS[-1])]

    def _rows(self, inputs: Any, random: np.random.Generator) -> dict[str, np.ndarray]:
        rows = {}
        for name, one in inputs.items():
            shape = (1, *one.shape)
            if one.kind == 'bool':
                rows[name] = np.arange(shape[-1])[None] < random.integers(8, shape[-1])
            elif one.kind == 'int64':
                rows[name] = random.integers(0, 256, shape)
            else:
                rows[name] = random.uniform(-1, 1, shape).astype(np.float32)
        return rows

    def _inputs(self, seed: int, steps: int) -> tuple[Any, ...]:
        random, dims = np.random.default_rng(seed), self.dims
        pixels = [
            random.uniform(-1, 1, (3, *size)).astype(np.float32) for size in image_sizes(dims)
        ]
        chunk = (dims.horizon, dims.action_dim)
        takes = self.family.takes_steps
        noise = random.standard_normal(chunk) if takes else np.zeros(chunk)
        added = np.zeros((steps, *chunk), dtype=np.float32) if self.family.has_scheduler else None
        step = StepInputs(
            x=noise.astype(np.float32),
            row_weight=np.ones(1, dtype=np.float32),
            plan=np.zeros(chunk, dtype=np.float32),
            plan_weight=np.zeros((steps, dims.horizon), dtype=np.float32),
            rows=self._rows(self.family.head_inputs(dims), random),
            step_noise=added,
        )
        return pixels, self._rows(self.family.prefix_inputs(dims), random), step

    def encode(self, robot: int) -> None:
        pixels, rows, _ = self.inputs[robot]
        for camera, image in enumerate(pixels):
            self.engine.encode_image(robot * len(pixels) + camera, image)
        seen = np.ones(len(pixels), dtype=bool)
        self.engine.encode_prefix(seen, rows, robot * SLOTS)

    def run(self, count: int, *, together: bool, miss: bool) -> tuple[list[np.ndarray], int]:
        """Chunks of the first `count` robots, and how many ran in one pass."""
        for robot in range(count) if miss else ():
            self.encode(robot)
        places = [(1, robot * SLOTS) for robot in range(count)]
        steps = [self.inputs[robot][-1] for robot in range(count)]
        if together and count > 1:
            return self.engine.denoise_together(places, steps)
        chunks = []
        for place, step in zip(places, steps, strict=True):
            self.engine.use_prefix(*place)
            chunks.append(denoise(self.engine, step))
        return chunks, 1


def measure(name: str, rounds: int) -> dict[str, Any]:
    robots = Robots(name)
    kinds = [(count, way, miss) for count in COUNTS for way in (True, False) for miss in (0, 1)]
    seconds, exact, ran = defaultdict(list), {}, {}
    for count, way, miss in kinds:
        robots.run(count, together=way, miss=bool(miss))
    for round_ in tqdm(range(rounds), desc=name):
        for label in in_turn([str(kind) for kind in kinds], round_):
            count, way, miss = kind = next(one for one in kinds if str(one) == label)
            start = perf_counter()
            chunks, together = robots.run(count, together=way, miss=bool(miss))
            seconds[kind].append(perf_counter() - start)
            if way:
                alone, _ = robots.run(count, together=False, miss=False)
                assert all(np.isfinite(chunk).all() for chunk in chunks)
                exact[count] = all(map(np.array_equal, chunks, alone))
                ran[count] = together
    figures: dict[str, Any] = {}
    for count in COUNTS:
        for miss, word in enumerate(('hit', 'miss')):
            one, other = seconds[count, True, miss], seconds[count, False, miss]
            figures[f'{count} {word}'] = {
                'chunks_per_s': count / float(np.median(one)),
                'time_of_one_after_the_other': median_ratio(one, other),
                'ran_together': ran[count],
                'bit_for_bit': exact[count],
            }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or '').split('\n')[0])
    parser.add_argument('--families', nargs='+', default=FAMILIES, choices=FAMILIES)
    parser.add_argument('--rounds', type=int, default=5, help='rounds (default: 5)')
    parser.add_argument('--threads', type=int, default=2, help='CPU threads (default: 2)')
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    figures = {name: measure(name, arguments.rounds) for name in arguments.families}
    for name, of_family in figures.items():
        for kind, found in of_family.items():
            ratio = found['time_of_one_after_the_other']['median']
            print(
                f'{name:10} {kind:7} {found["chunks_per_s"]:8.2f} chunks/s, {ratio:.2f} of one '
                f'after the other, {found["ran_together"]} together, bit for bit: '
                f'{found["bit_for_bit"]}'
            )
    print(f'wrote {write_result("batches", figures, ("numpy", "torch"))}')


if __name__ == '__main__':
    main()
