"""Sides that take turns: LeRobot in a process of its own, and our policies in this one.

Each infers from the cameras' bytes to the chunk in robot units, both in the host's memory; on a GPU
the clock starts and stops with nothing left to do there.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from parts.lerobot_worker import CAMERAS, HISTORY, JOINTS, SIZES, TASK, Options

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

_WORKER = Path(__file__).with_name('lerobot_worker.py')


class Ours(NamedTuple):
    """What runs one of our policies: the arguments of these names of `Policy.load`."""

    backend: str
    precision: str
    triton: str = 'off'


# Each name is a column of the result.
OURS = {
    'cpu': {
        'torch float32': Ours('torch', 'float32'),
        'onnxruntime float32': Ours('onnxruntime', 'float32'),
        'torch bfloat16': Ours('torch', 'bfloat16'),
        'onnxruntime int8': Ours('onnxruntime', 'int8'),
        # Of a bundle whose receipt covers bfloat16.
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
THEIRS = {
    'cpu': {
        'act': _EAGER,
        'smolvla': _EAGER,
        'pi05': {**_EAGER, 'lerobot bfloat16': ('bfloat16', '')},
        'diffusion': _EAGER,
    },
    'cuda': {
        'act': {**_EAGER, 'lerobot tf32': ('tf32', '')},
        'smolvla': {
            **_EAGER,
            'lerobot tf32': ('tf32', ''),
            'lerobot tf32 default': ('tf32', 'default'),
            'lerobot tf32 max-autotune': ('tf32', 'max-autotune'),
        },
        'pi05': {
            **_EAGER,
            'lerobot bfloat16': ('bfloat16', ''),
            'lerobot bfloat16 default': ('bfloat16', 'default'),
            'lerobot bfloat16 max-autotune': ('bfloat16', 'max-autotune'),
        },
        'diffusion': {**_EAGER, 'lerobot tf32': ('tf32', '')},
    },
}


class Turn(NamedTuple):
    """A chunk (H, A) in robot units, milliseconds of the wall and of the processor."""

    chunk: np.ndarray
    ms: float
    cpu_ms: float


class LeRobot:
    """LeRobot's policy in a process of its own, which infers when it is asked to.

    Attributes:
        facts: versions and parameters.
        graphs: graphs that PyTorch's compiler compiled in each inference so far.
        peak_memory_gib: peak memory of PyTorch on the GPU so far; None on a CPU.
    """

    def __init__(self, python: Path, options: Options) -> None:
        self._folder = Path(options.folder)
        self._process = subprocess.Popen(
            _command(python, 'serve', options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(),
        )
        self.facts = self._answer()
        self.graphs: list[int] = []
        self.peak_memory_gib: float | None = None

    def infer(self, arrays: Mapping[str, np.ndarray]) -> Turn:
        """Infer from an observation with its noise.

        Raises:
            RuntimeError: LeRobot could not; its process has ended.
        """
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
        done = subprocess.run(command, capture_output=True, text=True, env=_environment())
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
    subprocess.run(command, check=True, env=_environment())


def _command(python: Path, verb: str, options: Options) -> list[str | Path]:
    return [python, _WORKER, verb, json.dumps(asdict(options))]


def _environment() -> dict[str, str]:
    """This process's environment without what makes its own Python find its packages."""
    hidden = ('PYTHONPATH', 'PYTHONHOME', 'LD_LIBRARY_PATH', '_ROS_WHEELS_BOOTSTRAP_COMPLETE')
    return {name: value for name, value in os.environ.items() if name not in hidden}


def look(family: str, seed: int, spec: BundleSpec) -> dict[str, np.ndarray]:
    """Images and state of an observation, and noise, by LeRobot's names."""
    rng = np.random.default_rng(seed)
    high, wide = (side // 32 for side in SIZES[family])
    ends = ('', *(f'_{ago}_steps_ago' for ago in range(1, HISTORY[family])))
    # Smooth pictures: noise of single pixels is what no network was made for.
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
    """Wait for the GPU if one is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


# Of the networks at the sizes for a CPU, where no file of the folder has them.
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
        tokenizer=Path(options.tokenizer) if options.tokenizer else None,
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
    """Export what these need beside LeRobot's folder, and load them.

    Args:
        names: columns of `OURS[sides]`.
        options: options of LeRobot's folder; device and threads are ours, too.
        sides: 'cpu' or 'cuda'.
    """
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
