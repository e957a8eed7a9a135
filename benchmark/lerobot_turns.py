"""Our policies by turns with LeRobot on the same folder: ACT, SmolVLA, and pi0.5 of middle size.

LeRobot writes a folder of random weights, ACT and SmolVLA at their published sizes, pi0.5 at that
of `mid_size.py`; `vla_runtime export` turns it into a bundle. In every round LeRobot and each of
our backends infer once from the same observation (new images, so that no cache helps) and the same
noise, on as many threads, one after the other: what slows the machine slows all of them. Then ours
infer from the same images once more, which is a hit of the prefix cache; LeRobot has none. Each
infers from the cameras' bytes to the chunk in robot units. The chunks are compared in the same run,
relative to the largest number of LeRobot's if that is above 1. pi0.5 runs in LeRobot's bfloat16
too, and ours in int8, calibrated on observations of other rounds.

LeRobot lives in a Python of its own, and imports nothing of this package:

    python benchmark/lerobot_turns.py act --lerobot-python LEROBOT_ENV/bin/python
    python benchmark/lerobot_turns.py smolvla --lerobot-python LEROBOT_ENV/bin/python --rounds 20
    python benchmark/lerobot_turns.py pi05 --lerobot-python LEROBOT_ENV/bin/python

Beside the time of the wall the processor time is given: other work on the machine stretches the
first far more than the second. PyTorch's threads wait for each other busily, which uses up both
where they do not get their cores at once: on a busy machine set OMP_WAIT_POLICY=passive, which
holds for LeRobot's process too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lerobot_worker import CAMERAS, HEIGHT, JOINTS, TASK, WIDTH
from measurement import median_interval, write_result

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.engines.onnx.files import Precision
from vla_runtime.export.conversion import plan_export, write_export
from vla_runtime.export.onnx.bundle import export_bundle
from vla_runtime.export.onnx.export import write_onnx
from vla_runtime.export.options import ExportOptions
from vla_runtime.families import find_family
from vla_runtime.policy import Policy
from vla_runtime.types import Observation

WORKER = Path(__file__).with_name('lerobot_worker.py')
_CASES = WORKER.parents[1] / 'test' / 'cases'
TOKENIZERS = {
    'act': None,
    'smolvla': _CASES / 'smolvla_folder' / 'tokenizer.json',
    'pi05': _CASES / 'lerobot_pi05_tiny' / 'tokenizer.json',
}
PACKAGES = ('torch', 'onnxruntime', 'numpy', 'opencv-python-headless')
# Backend and precision of ours; each name is a column of the result.
OURS = {
    'torch float32': ('torch', 'float32'),
    'onnxruntime float32': ('onnxruntime', 'float32'),
    'torch bfloat16': ('torch', 'bfloat16'),
    'onnxruntime int8': ('onnxruntime', 'int8'),
    # Of a bundle whose receipt vouches for bfloat16.
    'auto': ('auto', 'auto'),
}
# Precisions of LeRobot's; the first is what all others are compared with.
THEIRS = {
    'act': {'lerobot': 'float32'},
    'smolvla': {'lerobot': 'float32'},
    'pi05': {'lerobot': 'float32', 'lerobot bfloat16': 'bfloat16'},
}
# Of the networks, where no file of the folder has them.
HEADS: dict[str, dict[str, Any]] = {'pi05': {'vision_heads': 6}}
# Most that ours may take of LeRobot's time.
TARGETS = {
    'act': {'float32': 0.8, 'best': 0.5},
    'smolvla': {'float32': 0.8, 'best': 0.5},
    'pi05': {'float32': 1 / 2.5, 'float32 hit': 1 / 11, 'best of lerobot bfloat16': 1 / 2.2},
}
# Observations that int8 is calibrated on; the rounds have others.
_CALIBRATION = range(1000, 1020)


class Turn(NamedTuple):
    """A chunk (H, A) in robot units, milliseconds of the wall and of the processor."""

    chunk: np.ndarray
    ms: float
    cpu_ms: float


class LeRobot:
    """LeRobot's policy in a process of its own, which infers when it is asked to."""

    def __init__(self, python: Path, family: str, folder: Path, threads: int, dtype: str) -> None:
        self._folder = folder
        tokenizer = str(TOKENIZERS[family])
        self._process = subprocess.Popen(
            [python, WORKER, 'serve', family, folder, tokenizer, str(threads), dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=lerobot_environment(),
        )
        self.facts = self._answer()

    def infer(self, arrays: Mapping[str, np.ndarray]) -> Turn:
        """Infer from an observation with its noise."""
        inputs, chunk = (self._folder / name for name in ('inputs.npz', 'chunk.npy'))
        np.savez(inputs, **arrays)
        assert self._process.stdin is not None
        request = {'inputs': str(inputs), 'chunk': str(chunk)}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._answer()
        return Turn(np.load(chunk), answer['ms'], answer['cpu_ms'])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError('the process of LeRobot ended; its reason is above')
        return dict(json.loads(line))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def lerobot_environment() -> dict[str, str]:
    """This process's environment without what makes its own Python find its packages."""
    hidden = ('PYTHONPATH', 'PYTHONHOME', 'LD_LIBRARY_PATH', '_ROS_WHEELS_BOOTSTRAP_COMPLETE')
    return {name: value for name, value in os.environ.items() if name not in hidden}


def make_folder(python: Path, family: str, folder: Path) -> None:
    """Let LeRobot write its folder, unless it is there."""
    if (folder / 'config.json').exists():
        return
    subprocess.run(
        [python, WORKER, 'make', family, folder, str(TOKENIZERS[family])],
        check=True,
        env=lerobot_environment(),
    )


def export(family: str, checkpoint: Path, bundle: Path, precision: Precision | None) -> Path:
    """Make a bundle with ONNX files in this precision, or without any, unless it is there."""
    if bundle.exists():
        return bundle
    names = tuple(f'joint_{i}' for i in range(JOINTS[family]))
    options = ExportOptions(
        state_names=names,
        action_names=names,
        units=('rad',),
        rate_hz=30.0,
        deltas=(),
        tokenizer=TOKENIZERS[family],
        **HEADS.get(family, {}),
    )

    def finish(folder: Path, spec: BundleSpec) -> None:
        if precision is not None:
            write_onnx(folder, spec, precision)

    plan = plan_export(checkpoint, options, default_name=f'random {family}')
    write_export(plan, bundle, finish=finish)
    return bundle


def export_reduced(bundle: Path, target: Path, precision: Precision) -> Path:
    """Make the bundle's files in bfloat16 or int8 with their receipt, unless they are there."""
    if target.exists():
        return target
    read, observations = read_bundle(bundle), None
    if precision == 'int8':
        looks = (look(read.spec.family, seed, read.spec) for seed in _CALIBRATION)
        observations = [observation(arrays, read.spec) for arrays in looks]
    return export_bundle(read, target, precision, observations=observations)


def look(family: str, seed: int, spec: BundleSpec) -> dict[str, np.ndarray]:
    """Images and state of an observation, and noise, by LeRobot's names."""
    rng = np.random.default_rng(seed)
    # Smooth pictures: noise of single pixels is what no network was made for.
    images = {
        f'images.camera{i + 1}': np.kron(
            rng.integers(0, 256, (HEIGHT // 32, WIDTH // 32, 3), dtype=np.uint8),
            np.ones((32, 32, 1), dtype=np.uint8),
        )
        for i in range(CAMERAS[family])
    }
    return {
        **images,
        'state': rng.uniform(-1, 1, JOINTS[family]).astype(np.float32),
        'noise': rng.standard_normal((spec.dims.horizon, spec.dims.action_dim), dtype=np.float32),
    }


def observation(arrays: Mapping[str, np.ndarray], spec: BundleSpec) -> Observation:
    """What our policy takes of `look`."""
    return Observation(
        images={
            name.removeprefix('images.'): array
            for name, array in arrays.items()
            if name.startswith('images.')
        },
        state=arrays['state'],
        instruction=TASK if spec.prompt is not None else None,
    )


def infer(policy: Policy, arrays: Mapping[str, np.ndarray]) -> Turn:
    """Infer from an observation with its noise."""
    seen = observation(arrays, policy.spec)
    noise = arrays['noise'] if policy.spec.prompt is not None else None
    begin, begin_cpu = time.perf_counter(), time.process_time()
    chunk, _ = policy.infer(seen, noise=noise)
    took, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
    return Turn(chunk.actions, took * 1e3, cpu * 1e3)


class Record:
    """Turns of every side, and the figures of them."""

    def __init__(self, theirs: Sequence[str], ours: Sequence[str]) -> None:
        self._theirs, self._ours = tuple(theirs), tuple(ours)
        self._turns: dict[str, list[Turn]] = {}
        self._load: list[float] = []

    def add(self, turns: Mapping[str, Turn]) -> None:
        """Take the turns of one round; a hit of ours is called `NAME hit`."""
        for name, turn in turns.items():
            self._turns.setdefault(name, []).append(turn)
        self._load.append(round(os.getloadavg()[0], 1))

    def figures(self) -> dict[str, Any]:
        """Medians, and ratios to LeRobot by turns with their 95% intervals."""
        found: dict[str, Any] = {'rounds': len(self._load), 'load_1min': self._load}
        for name in self._turns:
            found[name] = {'ms': self._median(name, 'ms'), 'cpu_ms': self._median(name, 'cpu_ms')}
        for name in self._ours:
            found[name] |= self._compared(name, self._theirs[0])
            found[name]['largest_relative_difference'] = self._difference(name)
            if f'{name} hit' in found:
                found[f'{name} hit'] |= self._compared(f'{name} hit', self._theirs[0])
            for other in self._theirs[1:]:
                found[name][f'of {other}'] = self._compared(name, other)
        for other in self._theirs[1:]:
            found[other] |= self._compared(other, self._theirs[0])
            found[other]['largest_relative_difference'] = self._difference(other)
        return found

    def _values(self, name: str, clock: str) -> np.ndarray:
        return np.array([getattr(turn, clock) for turn in self._turns[name]])

    def _median(self, name: str, clock: str) -> float:
        return float(np.median(self._values(name, clock)))

    def _compared(self, name: str, reference: str) -> dict[str, Any]:
        ratio, cpu_ratio = (
            self._values(name, clock) / self._values(reference, clock) for clock in ('ms', 'cpu_ms')
        )
        return {
            'ratio_of_medians': self._median(name, 'ms') / self._median(reference, 'ms'),
            'ratio_by_turns': float(np.median(ratio)),
            'ratio_by_turns_95': median_interval(ratio),
            'cpu_ratio_by_turns': float(np.median(cpu_ratio)),
            'cpu_ratio_by_turns_95': median_interval(cpu_ratio),
        }

    def _difference(self, name: str) -> float:
        return max(
            float(
                np.abs(mine.chunk - expected.chunk).max() / max(1.0, np.abs(expected.chunk).max())
            )
            for mine, expected in zip(self._turns[name], self._turns[self._theirs[0]], strict=True)
        )


def measure(
    theirs: Mapping[str, LeRobot], ours: Mapping[str, Policy], family: str, rounds: int
) -> Iterator[dict[str, Any]]:
    """Take the turns and yield the figures so far after each round; the first is not counted."""
    spec = next(iter(ours.values())).spec
    record = Record(tuple(theirs), tuple(ours))
    for number in range(rounds + 1):
        arrays = look(family, number, spec)
        turns = {name: lerobot.infer(arrays) for name, lerobot in theirs.items()}
        turns |= {name: infer(policy, arrays) for name, policy in ours.items()}
        if find_family(spec.family).head == 'flow':
            again = {**arrays, 'noise': look(family, rounds + 1 + number, spec)['noise']}
            turns |= {f'{name} hit': infer(policy, again) for name, policy in ours.items()}
        shown = '  '.join(
            f'{name} {turn.ms:.0f} ({turn.cpu_ms:.0f})' for name, turn in turns.items()
        )
        print(
            f'round {number}, load {os.getloadavg()[0]:.1f}: {shown} ms (of processor time)',
            flush=True,
        )
        if number:
            record.add(turns)
            yield record.figures()


def show(figures: Mapping[str, Any], ours: Sequence[str]) -> None:
    """Print the figures as a table."""
    theirs = figures['lerobot']
    print(f'LeRobot: {theirs["ms"]:.0f} ms a chunk, {theirs["cpu_ms"]:.0f} ms of processor time')
    print('| | ms a chunk | of LeRobot | of its processor time | largest difference |')
    print('|---|---:|---:|---:|---:|')
    for name, one in figures.items():
        if isinstance(one, dict) and 'ratio_by_turns' in one:
            difference = one.get('largest_relative_difference')
            print(
                f'| {name} | {one["ms"]:.0f} | {one["ratio_by_turns"]:.3f} '
                f'| {one["cpu_ratio_by_turns"]:.3f} '
                f'| {"" if difference is None else f"{difference:.1e}"} |'
            )
    for name in ours:
        for key, one in figures[name].items():
            if key.startswith('of '):
                print(f'{name} {key}: {one["ratio_by_turns"]:.3f} {one["ratio_by_turns_95"]}')


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('family', choices=tuple(CAMERAS))
    parser.add_argument('--lerobot-python', type=Path, required=True, help='Python with LeRobot')
    parser.add_argument('--rounds', type=int, default=20, help='default: 20')
    parser.add_argument('--threads', type=int, default=2, help='of each side (default: 2)')
    parser.add_argument('--folder', type=Path, help='keep checkpoint and bundle here')
    parser.add_argument(
        '--ours', nargs='+', choices=tuple(OURS), help='default: those of the family'
    )
    parser.add_argument('--json', type=Path, help='instead of benchmark/results')
    arguments = parser.parse_args()
    if arguments.ours is None:
        # Random weights in 8 bits say nothing of a large policy; at middle size they show the time.
        arguments.ours = [name for name in OURS if 'int8' not in name or arguments.family == 'pi05']
    return arguments


def load_ours(
    names: Sequence[str], family: str, checkpoint: Path, work: Path, threads: int
) -> dict[str, Policy]:
    """Export what these need, and load them."""
    onnx = any(OURS[name][0] != 'torch' for name in names)
    bundle = export(family, checkpoint, work / f'{family}_bundle', 'float32' if onnx else None)
    folders = dict.fromkeys(('float32', 'bfloat16'), bundle)
    reduced: tuple[tuple[str, Precision], ...] = (('int8', 'int8'), ('auto', 'bfloat16'))
    for asked, precision in reduced:
        if any(OURS[name][1] == asked for name in names):
            target = work / f'{family}_{precision}'
            folders[asked] = export_reduced(bundle, target, precision)
    gc.collect()
    return {
        name: Policy.load(
            folders[precision], backend, precision=precision, threads=threads, verify=False
        )
        for name, (backend, precision) in ((name, OURS[name]) for name in names)
    }


def main() -> int:
    arguments = parse_arguments()
    family, threads, python = arguments.family, arguments.threads, arguments.lerobot_python
    # Before the first session: ONNX Runtime asks the environment.
    os.environ['OMP_NUM_THREADS'] = str(threads)
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.folder or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        checkpoint = work / family
        make_folder(python, family, checkpoint)
        ours = load_ours(arguments.ours, family, checkpoint, work, threads)
        theirs = {
            name: LeRobot(python, family, checkpoint, threads, dtype)
            for name, dtype in THEIRS[family].items()
        }
        # The result names no folder of this machine.
        shown = {str(python): 'LEROBOT_ENV/bin/python', str(arguments.folder): 'WORK'}
        sys.argv[1:] = [shown.get(word, word) for word in sys.argv[1:]]
        figures: dict[str, Any] = {
            'family': family,
            'threads': threads,
            'omp_wait_policy': os.environ.get('OMP_WAIT_POLICY', 'default'),
            'targets': TARGETS[family],
            'theirs': theirs['lerobot'].facts,
        }
        try:
            # Written after every round: a run that is cut off leaves what it found.
            for found in measure(theirs, ours, family, arguments.rounds):
                figures |= found
                if 'auto' in ours:
                    figures['auto']['chose'] = ours['auto'].why
                path = write_result(f'lerobot_{family}', figures, PACKAGES, arguments.json)
        finally:
            for one in (*theirs.values(), *ours.values()):
                one.close()
    show(figures, arguments.ours)
    print(path.name)
    return 0


if __name__ == '__main__':
    sys.exit(main())
