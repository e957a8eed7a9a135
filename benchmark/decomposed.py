"""Decomposed against monolithic, and cache hit against miss, in ONNX Runtime at mid size on a CPU.

The same networks as one file with all denoise steps unrolled, and as three files run one after the
other (100 M parameters, 3 cameras, 10 steps). In every round, in changing order: the monolithic
file, the three files with everything new (miss), with one new camera of three, and the expert alone
over a prefix that is there (hit). So what slows the machine slows both sides of a ratio.

Next to each ratio stands what `performance.operation_counts` makes of it, and what the roofline of
this machine does, which also knows that a short run waits for its weights. The
monolithic file has no hit: it counts as much as a miss every time. Running the prefix again at
every step, as a policy without keys and values does, is counted only.

    python benchmark/decomposed.py [--rounds 10] [--threads 1]
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from measurement import percentiles, write_result
from mid_size import DIMS, STEPS, milliseconds, parse_arguments, write_mid_size
from random_policy import ChunkInputs, denoise_chunk, random_inputs

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.engines.onnx.engine import OnnxEngine
from vla_runtime.engines.onnx.files import graph_path
from vla_runtime.engines.onnx.session import Placement, Session
from vla_runtime.export.onnx.export import write_onnx
from vla_runtime.families import read_time_table
from vla_runtime.inference.denoise import flow_times
from vla_runtime.performance.device_rates import numpy_rates
from vla_runtime.performance.operation_counts import count_operations
from vla_runtime.performance.roofline import Rates

PACKAGES = ('onnxruntime', 'onnx', 'numpy', 'torch')
# Largest difference of the two chunks, of numbers of order one.
BOUND = 1e-5
RATIOS = {
    'monolithic_over_miss': ('monolithic', 'miss'),
    'hit_over_miss': ('hit', 'miss'),
    'one_new_over_miss': ('one_new', 'miss'),
    'hit_over_monolithic': ('hit', 'monolithic'),
}


class Subject:
    """Both forms of one policy over the same inputs.

    Args:
        folder: folder of the bundle, ONNX files included.
    """

    def __init__(self, folder: Path) -> None:
        place = Placement.of('cpu')
        self._inputs = random_inputs(DIMS, rows=1, seed=0, steps=STEPS)
        self._engine = OnnxEngine(
            'pi05', DIMS, folder, device='cpu', precision='float32', max_rows=1
        )
        self._session = Session(graph_path(folder, 'monolithic'), place)
        table = read_time_table('pi05', DIMS, folder / 'weights.safetensors')(flow_times(STEPS))
        self._feed = _monolithic_feed(self._inputs, table)

    @property
    def pieces(self) -> dict[str, Callable[[], np.ndarray]]:
        """Timed variants; each returns its chunk (H, A)."""
        return {
            'monolithic': self.monolithic,
            'miss': lambda: self.decomposed(len(self._inputs.pixels)),
            'one_new': lambda: self.decomposed(1),
            'hit': lambda: denoise_chunk(self._engine, self._inputs),
        }

    def monolithic(self) -> np.ndarray:
        return self._session.run(self._feed)['x_next'][0]

    def decomposed(self, new: int) -> np.ndarray:
        """So many cameras' vision runs, prefix and denoise loop."""
        inputs = self._inputs
        for camera, pixels in enumerate(inputs.pixels[:new]):
            self._engine.encode_image(camera, pixels)
        self._engine.encode_prefix(inputs.image_mask, inputs.prefix_inputs)
        return denoise_chunk(self._engine, inputs)

    def phases(self) -> dict[str, float]:
        """Milliseconds of the three networks of a miss, each on its own."""
        inputs, engine = self._inputs, self._engine

        def vision() -> None:
            for camera, pixels in enumerate(inputs.pixels):
                engine.encode_image(camera, pixels)

        return {
            'vision': milliseconds(vision),
            'prefix': milliseconds(
                lambda: engine.encode_prefix(inputs.image_mask, inputs.prefix_inputs)
            ),
            'denoise': milliseconds(lambda: denoise_chunk(engine, inputs)),
        }


def _monolithic_feed(inputs: ChunkInputs, table: np.ndarray) -> dict[str, np.ndarray]:
    steps = inputs.step_inputs
    return {
        'pixels': inputs.pixels,
        'image_mask': inputs.image_mask,
        **inputs.prefix_inputs,
        'x': steps.x[None],
        'time_conditioning': table,
        't': flow_times(STEPS).astype(np.float32),
        'dt': np.asarray(-1.0 / STEPS, dtype=np.float32),
        'row_weight': steps.row_weight,
        'plan': steps.plan[None],
        'plan_weight': steps.plan_weight[:, None, :, None],
    }


def measure(subject: Subject, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds by round: `whole` of the pieces, `phases` of a miss."""
    pieces = subject.pieces
    # The first chunk is the decomposed miss's: the others run over what it has encoded.
    expected = pieces['miss']()
    for name, piece in pieces.items():
        error = float(np.abs(piece() - expected).max())
        if not error <= BOUND:
            raise SystemExit(f'{name}: differs from the decomposed chunk by {error:.1e}')
    found: dict[str, dict[str, list[float]]] = {'whole': {}, 'phases': {}}
    for round_ in range(rounds):
        for name in list(pieces)[:: 1 if round_ % 2 else -1]:
            found['whole'].setdefault(name, []).append(milliseconds(pieces[name]))
        for phase, spent in subject.phases().items():
            found['phases'].setdefault(phase, []).append(spent)
    return found


def counted(rates: Rates) -> dict[str, dict[str, float]]:
    """Operations (10^9) of every piece and its least time at these rates (ms)."""
    miss = count_operations('pi05', DIMS).inference(steps=STEPS)
    one = count_operations('pi05', DIMS).inference(steps=STEPS, images=1)
    hit = count_operations('pi05', DIMS).inference(steps=STEPS, images=0, prefix_runs=0)
    again = count_operations('pi05', DIMS).inference(steps=STEPS, prefix_runs=STEPS)
    # The graph runs the vision network once over all images: the same operations.
    pieces = {'monolithic': miss, 'miss': miss, 'one_new': one, 'hit': hit, 'no_cache': again}
    return {
        name: {
            'gflop': sum(work.flops for work in phases.values()) / 1e9,
            'least_ms': 1e3
            * sum(
                work.least_time_s(rates.flops_per_s, rates.bytes_per_s) for work in phases.values()
            ),
        }
        for name, phases in pieces.items()
    }


def summary(found: Mapping[str, Mapping[str, list[float]]], rates: Rates) -> dict[str, Any]:
    """Ratios within a round beside the counted ones, times, and the rate of every phase."""
    whole = {name: np.array(values) for name, values in found['whole'].items()}
    count = counted(rates)
    work = count_operations('pi05', DIMS).inference(steps=STEPS)
    fastest = {phase: min(values) for phase, values in found['phases'].items()}
    return {
        'ratios': {
            name: {
                **percentiles(whole[above] / whole[below]),
                'of_the_fastest': float(whole[above].min() / whole[below].min()),
                'by_operations': count[above]['gflop'] / count[below]['gflop'],
                'by_roofline': count[above]['least_ms'] / count[below]['least_ms'],
            }
            for name, (above, below) in RATIOS.items()
        },
        'ms': {
            name: {'min': float(values.min()), **percentiles(values)}
            for name, values in whole.items()
        },
        'counted': count,
        'phases': {
            phase: {
                'min_ms': spent,
                'gflop': work[phase].flops / 1e9,
                'gflop_per_s': work[phase].flops / spent / 1e6,
                'share_of_the_operations': work[phase].flops / sum(w.flops for w in work.values()),
                'share_of_the_time': spent / sum(fastest.values()),
            }
            for phase, spent in fastest.items()
        },
        'rates': {
            'gflop_per_s': rates.flops_per_s / 1e9,
            'gb_per_s': rates.bytes_per_s / 1e9,
            'source': rates.source,
        },
    }


def show(figures: Mapping[str, Any]) -> None:
    """A table for people."""
    print(f'{"":24s}{"median":>8s}{"of the fastest":>16s}{"by operations":>15s}{"roofline":>10s}')
    for name, ratio in figures['ratios'].items():
        print(
            f'{name:24s}{ratio["median"]:8.3f}{ratio["of_the_fastest"]:16.3f}'
            f'{ratio["by_operations"]:15.3f}{ratio["by_roofline"]:10.3f}'
        )
    for phase, of_phase in figures['phases'].items():
        print(
            f'{phase:10s}{of_phase["min_ms"]:9.1f} ms{of_phase["gflop"]:8.1f} GFLOP'
            f'{of_phase["gflop_per_s"]:8.1f} GFLOP/s'
        )


def main() -> None:
    arguments = parse_arguments(__doc__, rounds=10)
    # Before a session is made; ONNX Runtime's engine and NumPy's BLAS follow it.
    os.environ['OMP_NUM_THREADS'] = str(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        bundle = write_mid_size(Path(folder) / 'bundle')
        write_onnx(bundle, read_bundle(bundle, verify=False).spec, 'float32')
        subject = Subject(bundle)
        found = measure(subject, arguments.rounds)
    figures = summary(found, numpy_rates())
    show(figures)
    figures = {'threads': arguments.threads, 'bound': BOUND, **figures}
    print('wrote', write_result('decomposed', figures, PACKAGES, arguments.json))


if __name__ == '__main__':
    main()
