"""ACT and SmolVLA at their published sizes, by turns with LeRobot on the same folder.

LeRobot writes a folder of random weights; `vla_runtime export` turns that folder into a bundle.
In every round LeRobot and each of our backends infer once from the same observation (new images, so
that no cache helps) and the same noise, on as many threads, one after the other: what slows the
machine slows all of them. Each infers from the cameras' bytes to the chunk in robot units. The
chunks are compared in the same run, relative to the largest number of LeRobot's if that is above 1.

LeRobot lives in a Python of its own, and imports nothing of this package:

    python benchmark/lerobot_turns.py act --lerobot-python LEROBOT_ENV/bin/python
    python benchmark/lerobot_turns.py smolvla --lerobot-python LEROBOT_ENV/bin/python --rounds 20

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot_worker import CAMERAS, HEIGHT, JOINTS, TASK, WIDTH
from measurement import median_interval, write_result

from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.export.conversion import plan_export, write_export
from vla_runtime.export.onnx.export import write_onnx
from vla_runtime.export.options import ExportOptions
from vla_runtime.policy import Policy
from vla_runtime.types import Observation

WORKER = Path(__file__).with_name('lerobot_worker.py')
TOKENIZER = WORKER.parents[1] / 'test' / 'cases' / 'smolvla_folder' / 'tokenizer.json'
PACKAGES = ('torch', 'onnxruntime', 'numpy', 'opencv-python-headless')
# Backend and precision of ours; each name is a column of the result.
OURS = {
    'torch float32': ('torch', 'float32'),
    'onnxruntime float32': ('onnxruntime', 'float32'),
    'torch bfloat16': ('torch', 'bfloat16'),
}
TARGETS = {'float32': 0.8, 'best': 0.5}


class LeRobot:
    """LeRobot's policy in a process of its own, which infers when it is asked to."""

    def __init__(self, python: Path, family: str, folder: Path, threads: int) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [python, WORKER, 'serve', family, folder, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=lerobot_environment(),
        )
        self.facts = self._answer()

    def infer(self, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, float, float]:
        """Return the chunk (H, A), and milliseconds of the wall and of the processor."""
        inputs, chunk = (self._folder / name for name in ('inputs.npz', 'chunk.npy'))
        np.savez(inputs, **arrays)
        assert self._process.stdin is not None
        request = {'inputs': str(inputs), 'chunk': str(chunk)}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._answer()
        return np.load(chunk), answer['ms'], answer['cpu_ms']

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
        [python, WORKER, 'make', family, folder, TOKENIZER], check=True, env=lerobot_environment()
    )


def export(family: str, checkpoint: Path, bundle: Path, *, onnx: bool) -> None:
    """Make the bundle, unless it is there; the chunks are what verifies its ONNX files here."""
    if bundle.exists():
        return
    names = tuple(f'joint_{i}' for i in range(JOINTS[family]))
    options = ExportOptions(
        state_names=names,
        action_names=names,
        units=('rad',),
        rate_hz=30.0,
        deltas=(),
        tokenizer=TOKENIZER if family != 'act' else None,
    )

    def finish(folder: Path, spec: BundleSpec) -> None:
        if onnx:
            write_onnx(folder, spec, 'float32')

    write_export(
        plan_export(checkpoint, options, default_name=f'full-size {family}'), bundle, finish=finish
    )


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


def infer(policy: Policy, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, float, float]:
    """Return the chunk (H, A), and milliseconds of the wall and of the processor."""
    observation = Observation(
        images={
            name.removeprefix('images.'): array
            for name, array in arrays.items()
            if name.startswith('images.')
        },
        state=arrays['state'],
        instruction=TASK if policy.reads_instruction else None,
    )
    noise = arrays['noise'] if policy.spec.prompt is not None else None
    begin, begin_cpu = time.perf_counter(), time.process_time()
    chunk, _ = policy.infer(observation, noise=noise)
    took, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
    return chunk.actions, took * 1e3, cpu * 1e3


def measure(
    lerobot: LeRobot, ours: Mapping[str, Policy], family: str, rounds: int
) -> Iterator[dict[str, Any]]:
    """Take the turns and yield the figures so far after each; the first is not counted."""
    spec = next(iter(ours.values())).spec
    wall: dict[str, list[float]] = {name: [] for name in ('lerobot', *ours)}
    processor: dict[str, list[float]] = {name: [] for name in wall}
    differences: dict[str, list[float]] = {name: [] for name in ours}
    load = []
    for number in range(rounds + 1):
        arrays = look(family, number, spec)
        turns = {'lerobot': lerobot.infer(arrays)}
        turns |= {name: infer(policy, arrays) for name, policy in ours.items()}
        expected = turns['lerobot'][0]
        for name in ours:
            difference = np.abs(turns[name][0] - expected).max()
            differences[name].append(float(difference / max(1.0, np.abs(expected).max())))
        shown = '  '.join(f'{name} {turn[1]:.0f} ({turn[2]:.0f})' for name, turn in turns.items())
        print(
            f'round {number}, load {os.getloadavg()[0]:.1f}: {shown} ms (of processor time)',
            flush=True,
        )
        if number:
            load.append(round(os.getloadavg()[0], 1))
            for name, (_, took, cpu) in turns.items():
                wall[name].append(took)
                processor[name].append(cpu)
            yield figures_of(wall, processor, differences, load)


def figures_of(
    wall: Mapping[str, list[float]],
    processor: Mapping[str, list[float]],
    differences: Mapping[str, list[float]],
    load: list[float],
) -> dict[str, Any]:
    """Medians, and ratios to LeRobot by turns with their 95% intervals."""
    theirs, theirs_cpu = np.array(wall['lerobot']), np.array(processor['lerobot'])
    figures: dict[str, Any] = {
        'rounds': len(load),
        'load_1min': load,
        'lerobot': {'ms': float(np.median(theirs)), 'cpu_ms': float(np.median(theirs_cpu))},
    }
    for name in differences:
        mine, mine_cpu = np.array(wall[name]), np.array(processor[name])
        figures[name] = {
            'ms': float(np.median(mine)),
            'cpu_ms': float(np.median(mine_cpu)),
            'ratio_of_medians': float(np.median(mine) / np.median(theirs)),
            'ratio_by_turns': float(np.median(mine / theirs)),
            'ratio_by_turns_95': median_interval(mine / theirs),
            'cpu_ratio_by_turns': float(np.median(mine_cpu / theirs_cpu)),
            'cpu_ratio_by_turns_95': median_interval(mine_cpu / theirs_cpu),
            'largest_relative_difference': max(differences[name]),
        }
    return figures


def show(figures: Mapping[str, Any], ours: Mapping[str, Policy]) -> None:
    theirs = figures['lerobot']
    print(f'LeRobot: {theirs["ms"]:.0f} ms a chunk, {theirs["cpu_ms"]:.0f} ms of processor time')
    print('| ours | ms a chunk | of LeRobot | of its processor time | largest difference |')
    print('|---|---:|---:|---:|---:|')
    for name in ours:
        one = figures[name]
        print(
            f'| {name} | {one["ms"]:.0f} | {one["ratio_of_medians"]:.2f} '
            f'| {one["cpu_ratio_by_turns"]:.2f} | {one["largest_relative_difference"]:.1e} |'
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('family', choices=tuple(CAMERAS))
    parser.add_argument('--lerobot-python', type=Path, required=True, help='Python with LeRobot')
    parser.add_argument('--rounds', type=int, default=20, help='default: 20')
    parser.add_argument('--threads', type=int, default=2, help='of each side (default: 2)')
    parser.add_argument('--folder', type=Path, help='keep checkpoint and bundle here')
    parser.add_argument('--ours', nargs='+', choices=tuple(OURS), default=tuple(OURS))
    parser.add_argument('--json', type=Path, help='instead of benchmark/results')
    arguments = parser.parse_args()
    family, threads = arguments.family, arguments.threads
    # Before the first session: ONNX Runtime asks the environment.
    os.environ['OMP_NUM_THREADS'] = str(threads)
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.folder or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        checkpoint, bundle = work / family, work / f'{family}_bundle'
        make_folder(arguments.lerobot_python, family, checkpoint)
        onnx = any(OURS[name][0] == 'onnxruntime' for name in arguments.ours)
        export(family, checkpoint, bundle, onnx=onnx)
        gc.collect()
        lerobot = LeRobot(arguments.lerobot_python, family, checkpoint, threads)
        ours = {
            name: Policy.load(
                bundle, OURS[name][0], precision=OURS[name][1], threads=threads, verify=False
            )
            for name in arguments.ours
        }
        # The result names no folder of this machine.
        shown = {
            str(arguments.lerobot_python): 'LEROBOT_ENV/bin/python',
            str(arguments.folder): 'WORK',
        }
        sys.argv[1:] = [shown.get(word, word) for word in sys.argv[1:]]
        figures: dict[str, Any] = {
            'family': family,
            'threads': threads,
            'omp_wait_policy': os.environ.get('OMP_WAIT_POLICY', 'default'),
            'targets': TARGETS,
            'theirs': lerobot.facts,
        }
        try:
            # Written after every round: a run that is cut off leaves what it found.
            for found in measure(lerobot, ours, family, arguments.rounds):
                figures |= found
                path = write_result(f'lerobot_{family}', figures, PACKAGES, arguments.json)
        finally:
            lerobot.close()
            for policy in ours.values():
                policy.close()
    show(figures, ours)
    print(path.name)
    return 0


if __name__ == '__main__':
    sys.exit(main())
