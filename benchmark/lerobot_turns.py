"""Our policies by turns with LeRobot on one folder of ACT, SmolVLA, pi0.5 or four more families.

LeRobot writes a folder of random weights, at the published sizes (Diffusion Policy: PushT's, with
10 steps of DDIM), pi0.5, X-VLA, MolmoAct2 (continuous) and VLA-JEPA at a small size; `vla_runtime
export` turns it into a bundle. In every round LeRobot and each of our backends infer once from the
same observation (new images, so that no cache helps) and the same noise, on as many threads, one
after the other: what slows the machine slows all of them. Then ours infer from the same images once
more, which is a hit of the prefix cache; LeRobot has none. Each infers from the cameras' bytes to
the chunk in robot units. The chunks are compared in the same run, relative to the largest number of
LeRobot's if that is above 1.
pi0.5, MolmoAct2 and VLA-JEPA run in LeRobot's bfloat16 too, which is how LeRobot runs the last two
unless told otherwise, and our pi0.5 in int8, calibrated on observations of other rounds.

`--device cuda` measures on a GPU, which holds all sides at once (pi0.5: about 60 GiB). pi0.5 then
has its published size, and LeRobot also runs compiled by its own `compile_model`, in PyTorch's
default mode and in LeRobot's, max-autotune; that compiles for many minutes. LeRobot computes what
it keeps in float32 as its `lerobot_eval.py` does (TF32), but in the column `lerobot`, which the
chunks are compared with. Ours replay captured graphs, with PyTorch's operators and with
the expert's layers in Triton kernels; ACT has none.

LeRobot lives in a Python of its own, and imports nothing of this package:

    python benchmark/lerobot_turns.py act --lerobot-python LEROBOT_ENV/bin/python
    python benchmark/lerobot_turns.py smolvla --lerobot-python LEROBOT_ENV/bin/python --rounds 20
    python benchmark/lerobot_turns.py pi05 --lerobot-python LEROBOT_ENV/bin/python
    python benchmark/lerobot_turns.py diffusion --lerobot-python LEROBOT_ENV/bin/python
    python benchmark/lerobot_turns.py xvla --lerobot-python LEROBOT_ENV/bin/python
    python benchmark/lerobot_turns.py molmoact2 --lerobot-python LEROBOT_ENV/bin/python
    python benchmark/lerobot_turns.py vla_jepa --lerobot-python LEROBOT_ENV/bin/python
    python benchmark/lerobot_turns.py pi05 --device cuda --lerobot-python LEROBOT_ENV/bin/python

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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from parts.gpu_run import device_facts, device_fault
from parts.lerobot_worker import BASES, CAMERAS, HISTORY, JOINTS, OWN_NOISE, SIZES, TASK, Options
from parts.measurement import Target, median_interval, write_result

from vla_convert.checkpoints.options import ExportOptions
from vla_convert.export.conversion import plan_export, write_export
from vla_convert.export.onnx.bundle import export_bundle
from vla_convert.export.onnx.export import write_onnx
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.onnx_files import Precision
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.family.listing import find_family
from vla_runtime.policy import Policy
from vla_runtime.types import Observation

_WORKER = Path(__file__).with_name('parts') / 'lerobot_worker.py'


class Ours(NamedTuple):
    """Arguments of `Policy.load` that run one of our policies."""

    backend: str
    precision: str
    triton: str = 'off'


OURS = {
    'cpu': {
        'torch float32': Ours('torch', 'float32'),
        'onnxruntime float32': Ours('onnxruntime', 'float32'),
        'torch bfloat16': Ours('torch', 'bfloat16'),
        'onnxruntime int8': Ours('onnxruntime', 'int8'),
        # The receipt covers bfloat16.
        'auto': Ours('auto', 'auto'),
    },
    # Without `auto`: of a bundle without ONNX files it is PyTorch, which has columns of its own.
    'cuda': {
        'torch float32': Ours('torch', 'float32'),
        'torch bfloat16': Ours('torch', 'bfloat16'),
        'torch bfloat16 triton': Ours('torch', 'bfloat16', 'on'),
    },
}
# Precision and compile mode of LeRobot's; the first is what all others are compared with.
_EAGER = {'lerobot': ('float32', '')}
_AND_BFLOAT16 = {**_EAGER, 'lerobot bfloat16': ('bfloat16', '')}
_AND_TF32 = {**_EAGER, 'lerobot tf32': ('tf32', '')}
THEIRS = {
    'cpu': {
        **dict.fromkeys(('act', 'smolvla', 'diffusion', 'xvla'), _EAGER),
        **dict.fromkeys(('pi05', 'molmoact2', 'vla_jepa'), _AND_BFLOAT16),
    },
    'cuda': {
        **dict.fromkeys(('act', 'diffusion', 'xvla', 'molmoact2', 'vla_jepa'), _AND_TF32),
        'smolvla': {
            **_AND_TF32,
            'lerobot tf32 default': ('tf32', 'default'),
            'lerobot tf32 max-autotune': ('tf32', 'max-autotune'),
        },
        'pi05': {
            **_AND_BFLOAT16,
            'lerobot bfloat16 default': ('bfloat16', 'default'),
            'lerobot bfloat16 max-autotune': ('bfloat16', 'max-autotune'),
        },
    },
}


class Turn(NamedTuple):
    """A chunk (H, A) in robot units, milliseconds of the wall and of the processor."""

    chunk: np.ndarray
    ms: float
    cpu_ms: float


class LeRobot:
    """LeRobot's policy in a process of its own.

    `facts`: versions and parameters; `graphs`: compiled graphs in each inference;
    `peak_memory_gib`: of PyTorch on the GPU, None on a CPU.
    """

    def __init__(self, python: Path, options: Options) -> None:
        self._folder = Path(options.folder)
        self._process = subprocess.Popen(
            _command(python, 'serve', options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=lerobot_environment(),
        )
        self.facts = self._answer()
        self.graphs: list[int] = []
        self.peak_memory_gib: float | None = None

    def infer(self, arrays: Mapping[str, np.ndarray]) -> Turn:
        """Infer from an observation with its noise; RuntimeError: failed, its process has ended."""
        inputs, chunk = (self._folder / name for name in ('inputs.npz', 'chunk.npy'))
        np.savez(inputs, **arrays)
        assert self._process.stdin is not None
        request = {'inputs': str(inputs), 'chunk': str(chunk)}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._answer()
        self.graphs.append(answer['graphs'])
        self.peak_memory_gib = answer.get('peak_memory_gib')
        return Turn(np.load(chunk), answer['ms'], answer['cpu_ms'])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError('the process of LeRobot ended; its reason is above')
        answer = dict(json.loads(line))
        if 'error' in answer:
            raise RuntimeError(answer['error'])
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def lerobot_fault(python: Path, device: str) -> str:
    """Explain why LeRobot's Python cannot run on the device; empty where it can."""
    options = Options(family='', size='', folder='', tokenizer='', device=device)
    command = _command(python, 'check', options)
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=lerobot_environment())
    except OSError as error:
        return f'--lerobot-python {python}: {error.strerror}'
    fault = done.stdout.strip() if done.returncode == 0 else done.stderr.strip().split('\n')[-1]
    return f'--lerobot-python {python}: {fault}' if fault else ''


def make_folder(python: Path, options: Options) -> None:
    """Let LeRobot write its folder, unless it is there."""
    if (Path(options.folder) / 'config.json').exists():
        return
    # Only pi0.5 has so many numbers that a GPU should draw them.
    drawn_on = options.device if options.family == 'pi05' else 'cpu'
    command = _command(python, 'make', replace(options, device=drawn_on))
    subprocess.run(command, check=True, env=lerobot_environment())


def _command(python: Path, verb: str, options: Options) -> list[str | Path]:
    return [python, _WORKER, verb, json.dumps(asdict(options))]


def lerobot_environment() -> dict[str, str]:
    """This process's environment without the variables of its own Python."""
    hidden = ('PYTHONPATH', 'PYTHONHOME', 'LD_LIBRARY_PATH', '_ROS_WHEELS_BOOTSTRAP_COMPLETE')
    return {name: value for name, value in os.environ.items() if name not in hidden}


def look(family: str, seed: int, spec: BundleSpec) -> dict[str, np.ndarray]:
    """Images, state and noise of an observation, by LeRobot's names."""
    rng = np.random.default_rng(seed)
    high, wide = (side // 32 for side in SIZES[family])
    ends = ('', *(f'_{ago}_steps_ago' for ago in range(1, HISTORY[family])))
    # Smooth pictures: no network was trained on pixel noise.
    images = {
        f'images.camera{i + 1}{end}': np.kron(
            rng.integers(0, 256, (high, wide, 3), dtype=np.uint8),
            np.ones((32, 32, 1), dtype=np.uint8),
        )
        for i in range(CAMERAS[family])
        for end in ends
    }
    states = {f'state{end}': rng.uniform(-1, 1, JOINTS[family]).astype(np.float32) for end in ends}
    noise = rng.standard_normal((spec.dims.horizon, spec.dims.action_dim), dtype=np.float32)
    return {**images, **states, 'noise': noise}


def observation(arrays: Mapping[str, np.ndarray], spec: BundleSpec) -> Observation:
    """Return the observation that our policy takes of `look`."""
    return Observation(
        images={
            name.removeprefix('images.'): array
            for name, array in arrays.items()
            if name.startswith('images.')
        },
        state=arrays['state'],
        earlier_states=tuple(
            arrays[f'state_{ago}_steps_ago'] for ago in range(1, HISTORY[spec.family])
        ),
        instruction=TASK if spec.prompt is not None else None,
    )


def infer(policy: Policy, arrays: Mapping[str, np.ndarray]) -> Turn:
    """Infer from an observation with its noise."""
    seen = observation(arrays, policy.spec)
    noise = None if find_family(policy.spec.family).head == 'single' else arrays['noise']
    _synchronize()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    chunk, _ = policy.infer(seen, noise=noise)
    _synchronize()
    took, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
    return Turn(chunk.actions, took * 1e3, cpu * 1e3)


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


# Head counts at the CPU's sizes, which no file of the folder has.
_HEADS: dict[str, dict[str, Any]] = {'mid': {'vision_heads': 6}, 'tiny': {'vision_heads': 6}}
# Observations that int8 is calibrated on; the rounds have others.
_CALIBRATION = range(1000, 1020)


def export(options: Options, bundle: Path, precision: Precision | None) -> Path:
    """Make a bundle with ONNX files in this precision, or without any, unless it is there."""
    if bundle.exists():
        return bundle
    names = tuple(f'joint_{i}' for i in range(JOINTS[options.family]))
    named = ExportOptions(
        state_names=names,
        action_names=names,
        units=('rad',),
        rate_hz=30.0,
        deltas=(),
        # A folder of the others names the one with its tokenizer.
        tokenizer=Path(options.tokenizer)
        if options.tokenizer and options.family not in BASES
        else None,
        **_HEADS.get(options.size, {}),
    )

    def finish(folder: Path, spec: BundleSpec) -> None:
        if precision is not None:
            write_onnx(folder, spec, precision)

    plan = plan_export(Path(options.folder), named, default_name=f'random {options.family}')
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


def load_ours(names: Sequence[str], options: Options, sides: str) -> dict[str, Policy]:
    """Export what these need beside LeRobot's folder, and load them; `sides`: 'cpu' or 'cuda'."""
    chosen = {name: OURS[sides][name] for name in names}
    checkpoint = Path(options.folder)
    onnx = any(one.backend in ('onnxruntime', 'auto') for one in chosen.values())
    bundle = checkpoint.with_name(f'{checkpoint.name}_bundle')
    export(options, bundle, 'float32' if onnx else None)
    folders = dict.fromkeys(('float32', 'bfloat16'), bundle)
    reduced: tuple[tuple[str, Precision], ...] = (('int8', 'int8'), ('auto', 'bfloat16'))
    for asked, precision in reduced:
        if any(one.precision == asked for one in chosen.values()):
            target = checkpoint.with_name(f'{checkpoint.name}_{precision}')
            folders[asked] = export_reduced(bundle, target, precision)
    gc.collect()
    return {
        name: Policy.load(
            folders[one.precision],
            one.backend,
            options.device,
            precision=one.precision,
            threads=options.threads,
            triton=one.triton,
            verify=False,
        )
        for name, one in chosen.items()
    }


def without_refused(
    ours: dict[str, Policy], sides: str
) -> tuple[dict[str, Policy], dict[str, str]]:
    """Close policies whose Triton kernels were refused at load; return the others, and why.

    They would run what another column runs.
    """
    left_out = {
        name: policy.why
        for name, policy in ours.items()
        if policy.triton != OURS[sides][name].triton
    }
    for name in left_out:
        ours[name].close()
    return {name: policy for name, policy in ours.items() if name not in left_out}, left_out


class Goal(NamedTuple):
    """Largest ratio of our time to LeRobot's; the fastest column of each side counts."""

    name: str
    most: float
    ours: tuple[str, ...]
    theirs: tuple[str, ...]


_FLOAT32 = ('torch float32', 'onnxruntime float32')
_ALL = (*_FLOAT32, 'torch bfloat16', 'onnxruntime int8', 'auto')
_SMALL = (
    Goal('float32', 0.8, _FLOAT32, ('lerobot',)),
    Goal('best', 0.5, _ALL, ('lerobot',)),
)
_BFLOAT16 = 'lerobot bfloat16'
# Not `auto`, which may choose float32.
_REDUCED = ('torch bfloat16', 'onnxruntime int8')
_ON_CUDA = ('torch bfloat16', 'torch bfloat16 triton')
# Those that default to a small size and to float32.
_FLOAT32_HALF = (
    Goal('float32', 1 / 2, _FLOAT32, ('lerobot',)),
    Goal('float32 hit', 1 / 5, tuple(f'{name} hit' for name in _FLOAT32), ('lerobot',)),
)
GOALS: dict[str, dict[str, tuple[Goal, ...]]] = {
    'cpu': {
        'act': _SMALL,
        'smolvla': _SMALL,
        'pi05': (
            Goal('float32', 1 / 2.5, _FLOAT32, ('lerobot',)),
            Goal('float32 hit', 1 / 11, tuple(f'{name} hit' for name in _FLOAT32), ('lerobot',)),
            Goal('16 or 8 bits, of lerobot bfloat16', 1 / 2.2, _REDUCED, (_BFLOAT16,)),
        ),
        'diffusion': (Goal('float32', 0.7, _FLOAT32, ('lerobot',)),),
        **dict.fromkeys(('xvla', 'molmoact2', 'vla_jepa'), _FLOAT32_HALF),
    },
    'cuda': {
        **dict.fromkeys(CAMERAS, ()),
        'pi05': (
            Goal('bfloat16, of LeRobot eager', 1 / 6, _ON_CUDA, (_BFLOAT16,)),
            Goal(
                "bfloat16, of LeRobot's best torch.compile",
                1 / 2,
                _ON_CUDA,
                (f'{_BFLOAT16} default', f'{_BFLOAT16} max-autotune'),
            ),
        ),
    },
}


def targets(goals: Sequence[Goal], figures: Mapping[str, Any]) -> list[Target]:
    """Return every target with its figure from `Record.figures`; None where not measured."""
    return [Target(goal.name, goal.most, _found(goal, figures)) for goal in goals]


def _found(goal: Goal, figures: Mapping[str, Any]) -> float | None:
    """Return the least part of the reference that is hardest to beat."""
    parts = []
    for reference in goal.theirs:
        ratios = [_ratio(figures.get(name, {}), reference) for name in goal.ours]
        measured = [ratio for ratio in ratios if ratio is not None]
        parts += [min(measured)] if measured else []
    return max(parts, default=None)


def _ratio(column: Mapping[str, Any], reference: str) -> float | None:
    compared = column if reference == 'lerobot' else column.get(f'of {reference}', {})
    return compared.get('ratio_by_turns')


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


def show(figures: Mapping[str, Any], ours: Sequence[str]) -> None:
    """Print the figures as a table, what was left out, and each target."""
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
    for name, reason in figures.get('left_out', {}).items():
        print(f'left out: {name}: {reason}')
    for target in figures['targets']:
        print(f'target: {Target(**target).line}')


_CASES = Path(__file__).parents[1] / 'test' / 'cases'
TOKENIZERS = {
    'act': '',
    'smolvla': str(_CASES / 'smolvla_folder' / 'tokenizer.json'),
    'pi05': str(_CASES / 'lerobot_pi05_tiny' / 'tokenizer.json'),
    'diffusion': '',
    'xvla': str(_CASES / 'xvla_folder' / 'tokenizer.json'),
    'molmoact2': str(_CASES / 'molmoact2_folder_base' / 'tokenizer.json'),
    'vla_jepa': str(_CASES / 'vla_jepa_folder_base' / 'tokenizer.json'),
}
PACKAGES = ('torch', 'onnxruntime', 'numpy', 'opencv-python-headless')
# Rounds that are not counted: PyTorch's compiler compiles twice, and its graphs are recorded later.
WARM_UP = {'cpu': 1, 'cuda': 6}


def start_lerobot(
    python: Path,
    options: Options,
    columns: Mapping[str, tuple[str, str]],
    arrays: Mapping[str, np.ndarray],
) -> tuple[dict[str, LeRobot], dict[str, str]]:
    """Start LeRobot's sides; return them, and why those that it cannot compile are left out.

    Args:
        columns: precision and compile mode of each.
        arrays: an observation, to compile with.
    """
    sides: dict[str, LeRobot] = {}
    left_out: dict[str, str] = {}
    for name, (precision, mode) in columns.items():
        side = LeRobot(python, replace(options, precision=precision, compile_mode=mode))
        if mode:
            print(f'{name}: compiling ...', flush=True)
            try:
                side.infer(arrays)
            except RuntimeError as error:
                # It needs a C compiler, and more memory: the rest is worth having.
                side.close()
                left_out[name] = str(error)
                continue
        sides[name] = side
    return sides, left_out


def measure(
    theirs: Mapping[str, LeRobot],
    ours: Mapping[str, Policy],
    family: str,
    rounds: int,
    warm_up: int,
) -> Iterator[dict[str, Any]]:
    """Take turns; yield figures after each counted round. `theirs` begins with the reference."""
    spec = next(iter(ours.values())).spec
    record = Record(tuple(theirs), tuple(ours))
    for number in range(rounds + warm_up):
        arrays = look(family, number, spec)
        turns: dict[str, Turn] = {name: lerobot.infer(arrays) for name, lerobot in theirs.items()}
        turns |= {name: infer(policy, arrays) for name, policy in ours.items()}
        if find_family(spec.family).head != 'single':
            again = {**arrays, 'noise': look(family, rounds + warm_up + number, spec)['noise']}
            turns |= {f'{name} hit': infer(policy, again) for name, policy in ours.items()}
        shown = '  '.join(
            f'{name} {turn.ms:.0f} ({turn.cpu_ms:.0f})' for name, turn in turns.items()
        )
        print(
            f'round {number}, load {os.getloadavg()[0]:.1f}: {shown} ms (of processor time)',
            flush=True,
        )
        if number >= warm_up:
            record.add(turns)
            yield record.figures()


def gpu_facts(theirs: Mapping[str, LeRobot]) -> dict[str, Any]:
    """Return the device, and the peak of PyTorch's memory there: of each LeRobot, and of ours."""
    peaks = {name: side.peak_memory_gib for name, side in theirs.items()}
    peaks['all of ours'] = torch.cuda.max_memory_allocated() / 2**30
    return {'device': device_facts('cuda'), 'peak_memory_gib': peaks}


def compiled_graphs(theirs: Mapping[str, LeRobot], rounds: int) -> dict[str, dict[str, int]]:
    """Return how many graphs each compiled side compiled, in all and in the last rounds."""
    return {
        name: {'all': sum(side.graphs), 'in_counted_rounds': sum(side.graphs[-rounds:])}
        for name, side in theirs.items()
        if any(side.graphs)
    }


def default_ours(family: str, sides: str) -> list[str]:
    """Return our columns where none are named."""
    # Random weights in 8 bits say nothing of a large policy; at middle size they show the time.
    # In float32 the published size takes the memory of two other sides.
    large = sides == 'cuda'
    if family in ('diffusion', *OWN_NOISE) and not large:
        return list(_FLOAT32)
    if family == 'pi05':
        return [name for name in OURS[sides] if not (large and 'float32' in name)]
    without = ('int8', 'triton') if family == 'act' else ('int8',)
    return [name for name in OURS[sides] if not any(word in name for word in without)]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('family', choices=tuple(CAMERAS))
    parser.add_argument('--lerobot-python', type=Path, required=True, help='Python with LeRobot')
    parser.add_argument(
        '--device', choices=tuple(OURS), default='cpu', help='of every side (default: cpu)'
    )
    parser.add_argument('--rounds', type=int, default=20, help='default: 20')
    parser.add_argument('--threads', type=int, default=2, help='of each side (default: 2)')
    parser.add_argument('--folder', type=Path, help='keep checkpoint and bundle here')
    parser.add_argument('--ours', nargs='+', metavar='COLUMN', help='default: those of the family')
    parser.add_argument(
        '--no-compile', action='store_true', help="leave LeRobot's torch.compile out"
    )
    parser.add_argument(
        '--theirs',
        nargs='+',
        metavar='COLUMN',
        help='beside `lerobot` (default: all of the family)',
    )
    parser.add_argument('--json', type=Path, help='instead of benchmark/results')
    # For a rehearsal of the GPU's sides without a GPU, with a tiny pi0.5.
    parser.add_argument('--sides', choices=tuple(OURS), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.sides = arguments.sides or arguments.device
    known = OURS[arguments.sides]
    if arguments.ours is None:
        arguments.ours = default_ours(arguments.family, arguments.sides)
    elif unknown := [name for name in arguments.ours if name not in known]:
        parser.error(f"--ours '{unknown[0]}' is none of {', '.join(known)} (--device)")
    theirs = THEIRS[arguments.sides][arguments.family]
    if unknown := [name for name in arguments.theirs or () if name not in theirs]:
        parser.error(f"--theirs '{unknown[0]}' is none of {', '.join(theirs)} (--device)")
    return arguments


def folder_options(arguments: argparse.Namespace, work: Path) -> Options:
    """Return what LeRobot's folder is, and where."""
    family = arguments.family
    size = 'small' if family in OWN_NOISE else 'published'
    if family == 'pi05' and arguments.device == 'cpu':
        size = 'mid' if arguments.sides == 'cpu' else 'tiny'
    # On a CPU it has always had the bare name.
    suffix = f'_{size}' if family == 'pi05' and size != 'mid' else ''
    return Options(
        family=family,
        size=size,
        folder=str(work / f'{family}{suffix}'),
        tokenizer=TOKENIZERS[family],
        device=arguments.device,
        threads=arguments.threads,
    )


def take_turns(arguments: argparse.Namespace, work: Path) -> None:
    """Make what is missing in the folder, measure, write the result and print it."""
    family, sides, python = arguments.family, arguments.sides, arguments.lerobot_python
    options = folder_options(arguments, work)
    make_folder(python, options)
    ours, refused = without_refused(load_ours(arguments.ours, options, sides), sides)
    columns = {
        name: one
        for name, one in THEIRS[sides][family].items()
        if name in ('lerobot', *(arguments.theirs or (name,)))
        and not (arguments.no_compile and one[1])
    }
    spec = next(iter(ours.values())).spec
    theirs, left_out = start_lerobot(python, options, columns, look(family, 0, spec))
    # The result names no folder of this machine.
    shown = {str(python): 'LEROBOT_ENV/bin/python', str(arguments.folder): 'WORK'}
    sys.argv[1:] = [shown.get(word, word) for word in sys.argv[1:]]
    figures: dict[str, Any] = {
        'family': family,
        'threads': arguments.threads,
        'omp_wait_policy': os.environ.get('OMP_WAIT_POLICY', 'default'),
        'theirs': theirs['lerobot'].facts,
    }
    if sides == 'cuda':
        figures |= {'size': options.size, 'left_out': left_out | refused}
    name = f'lerobot_{family}' if sides == 'cpu' else f'lerobot_{family}_{sides}'
    packages = PACKAGES if sides == 'cpu' else (*PACKAGES, 'triton')
    try:
        # Written after every round: a run that is cut off leaves what it found.
        for found in measure(theirs, ours, family, arguments.rounds, WARM_UP[sides]):
            figures |= found
            figures['targets'] = [one._asdict() for one in targets(GOALS[sides][family], found)]
            for column, policy in ours.items():
                # What `auto` took, or how the compiled form was tried.
                figures[column] |= {'chose': policy.why} if policy.why else {}
            if sides == 'cuda':
                figures['graphs_compiled'] = compiled_graphs(theirs, found['rounds'])
            if arguments.device == 'cuda':
                figures |= gpu_facts(theirs)
            path = write_result(name, figures, packages, arguments.json)
    finally:
        for one in (*theirs.values(), *ours.values()):
            one.close()
    show(figures, list(ours))
    print(path.name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Exit code: 0, or 2 where one of the two sides cannot run on the device."""
    arguments = parse_arguments(argv)
    device = arguments.device
    if fault := device_fault(device) or lerobot_fault(arguments.lerobot_python, device):
        print(f'error: {fault}', file=sys.stderr)
        return 2
    # Before the first session: ONNX Runtime asks the environment.
    os.environ['OMP_NUM_THREADS'] = str(arguments.threads)
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.folder or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        take_turns(arguments, work)
    return 0


if __name__ == '__main__':
    sys.exit(main())
