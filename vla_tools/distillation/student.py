"""Distil a flow policy to a few steps: the action expert alone, resumable.

The teacher's Euler steps lead from noise x at time 1 to a chunk. The student learns the velocities
u(x, t) = (x - chunk) / t at its own steps' times and points (one-step rectified flow, arXiv
2309.06380; own points as in DAgger): one step jumps to the chunk, a second corrects the first.
Vision and prefix stay the teacher's, bit for bit.

A step is a function of (seed, step), so an interrupted run ends as an uninterrupted one.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from vla_runtime.bundle.folder import Bundle
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.bundle.success import spec_identity
from vla_runtime.engines.torch.weights import load_network
from vla_runtime.family.declaration import observation_steps, real_action_dim, stages
from vla_runtime.family.listing import find_family
from vla_runtime.files.atomic_write import atomic_write
from vla_runtime.files.quotes import one_line
from vla_runtime.inference.codec import PolicyCodec
from vla_runtime.inference.denoise import flow_times
from vla_runtime.inference.runner import chunk_noise
from vla_runtime.models.base.flow_network import FlowNetwork
from vla_runtime.models.shapes.traced_shapes import repeat_prefix, trace_shapes
from vla_runtime.types import Advantage
from vla_tools.dataset.observations import StoredObservation

# --- Checkpoints


def read_checkpoint(
    path: Path, kinds: Mapping[str, type], device: torch.device | str
) -> dict[str, Any]:
    """Read the fields of a `torch.save` file.

    Raises ValueError: cut short, changed, or a field missing or of another type; OSError.
    """
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except OSError:
        raise
    # PyTorch raises errors of many kinds for a file that is cut short or changed.
    except Exception as error:
        raise _damaged(path, 'the file', error) from None
    if not isinstance(state, dict):
        raise _damaged(path, 'the file', 'is not a mapping')
    for name, kind in kinds.items():
        if not isinstance(state.get(name), kind):
            raise _damaged(path, name, f'expected a {kind.__name__}')
    return state


def load_parts(path: Path, state: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Load networks and optimisers by field name; ValueError: of another network."""
    for name, part in parts.items():
        try:
            part.load_state_dict(state[name])
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(path, name, error) from None


def _damaged(path: Path, field: str, what: object) -> ValueError:
    return ValueError(
        f'{path}: {field}: cannot be used: {one_line(str(what), 200)}; remove it to begin anew, or '
        'name another folder with --work'
    )


_CHECKPOINT_EVERY = 100
_WARM_UP = 20
_HELD_OUT = 32
# Fields of a checkpoint.
_FIELDS = {
    'settings': dict,
    'step': int,
    'network': dict,
    'student': dict,
    'optimizer': dict,
    'history': list,
}
# As in training: some prompts without a tag, the rest mostly as in serving.
_ADVANTAGES: tuple[Advantage | None, ...] = ('positive', 'positive', 'negative', None)


@dataclass(frozen=True)
class DistillationSettings:
    """Settings of a distillation; with the data they fix the result on one machine.

    `teacher` and `data` are identities (`data_identity`).

    Attributes:
        steps: Euler steps that the student learns, ascending.
        teacher_steps: Euler steps of the teacher.
        batch: observations an update.
        draws: noises an observation.
        learning_rate: peak after a short warm-up; a cosine then leads to a hundredth.
        average: decay of the exponential moving average that becomes the student.
    """

    steps: tuple[int, ...]
    teacher_steps: int
    updates: int = 800
    batch: int = 16
    draws: int = 4
    learning_rate: float = 5e-4
    average: float = 0.99
    seed: int = 0
    teacher: str = ''
    data: str = ''
    frames: int = 0


@dataclass(frozen=True)
class _Encoded:
    """Observations that were encoded: what the head reads, R rows."""

    past: dict[str, Tensor]
    rows: dict[str, Tensor]


def check_teacher(spec: BundleSpec) -> None:
    """Refuse heads without a flow, with many observations a step, or many frames (ValueError)."""
    family = find_family(spec.family)
    if family.head != 'flow':
        raise ValueError(f'{spec.family}: has no flow to distil: its head is {family.head}')
    if len(stages(spec.dims)) > 1:
        raise ValueError(
            f'{spec.family}: follows its flow with several looks a step, and a student is '
            "taught Euler's step: set dimensions.integrator to euler first"
        )
    if (observation_steps(spec.dims) or 1) > 1:
        raise ValueError(
            f'{spec.family}: sees the frames and states of several steps, and observations of '
            'a data set are drawn one by one here'
        )


class Distillation:
    """One run, resumed from `checkpoint.pt` in `folder` if there is one.

    The teacher has a `flow` head. Raises ValueError: another head, or a checkpoint of other
    settings.
    """

    def __init__(
        self,
        bundle: Bundle,
        observations: Sequence[StoredObservation],
        settings: DistillationSettings,
        folder: Path,
        device: str = 'cpu',
    ) -> None:
        spec = bundle.spec
        check_teacher(spec)
        self._family = find_family(spec.family)
        if len(observations) <= _HELD_OUT:
            raise ValueError(
                f'the data set has {len(observations)} frames, and more than {_HELD_OUT} are needed'
            )
        self.settings, self._spec, self._device = settings, spec, torch.device(device)
        self._codec = PolicyCodec(bundle)
        self._held_out, self._observations = observations[:_HELD_OUT], observations[_HELD_OUT:]
        weights = bundle.weights_path
        self.teacher = load_network(
            spec.family, spec.dims, weights, device=device, precision='float32'
        ).requires_grad_(False)
        self._axes = {n: t.row_axis for n, t in trace_shapes(self.teacher).past.items()}
        self.network = copy.deepcopy(self.teacher).requires_grad_(True)
        self.student = copy.deepcopy(self.teacher)
        self._optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=settings.learning_rate, weight_decay=0.0
        )
        self._step = 0
        self.history: list[dict[str, float]] = []
        self._path = folder / 'checkpoint.pt'
        if self._path.exists():
            self._load()

    def run(self, progress: bool = True) -> None:
        """Take the steps that are left; safe to interrupt."""
        total = self.settings.updates
        with tqdm(
            total=total, initial=self._step, desc='distil', unit='step', disable=not progress
        ) as bar:
            while self._step < total:
                loss = self._update()
                self._step += 1
                if self._step % _CHECKPOINT_EVERY == 0 or self._step == total:
                    found = {'step': float(self._step), 'loss': loss, **self.check()}
                    self.history.append(found)
                    bar.write(', '.join(f'{name} {value:.4g}' for name, value in found.items()))
                    self._save()
                bar.set_postfix(loss=f'{loss:.4f}', refresh=False)
                bar.update()

    def changed(self) -> list[str]:
        """Return the names of the parameters that distillation changed: those of the expert."""
        before = dict(self.teacher.named_parameters())
        return [
            name
            for name, value in self.student.named_parameters()
            if not torch.equal(value, before[name])
        ]

    @torch.no_grad()
    def check(self) -> dict[str, float]:
        """RMS distance from the teacher's chunks on held-out frames, `steps_N` by step count.

        In normalised units, from the same noise.
        """
        encoded = self._encode(self._held_out, np.random.default_rng(self.settings.seed))
        noise = self._noise(-1, len(self._held_out))
        wanted = self._roll(self.teacher, encoded, noise, self.settings.teacher_steps)[-1]
        return {
            f'steps_{steps}': float(
                (self._roll(self.student, encoded, noise, steps)[-1] - wanted)
                .square()
                .mean()
                .sqrt()
            )
            for steps in self.settings.steps
        }

    def _update(self) -> float:
        settings = self.settings
        rng = np.random.default_rng([settings.seed, self._step])
        chosen = rng.choice(len(self._observations), size=settings.batch, replace=False) \
            if len(self._observations) >= settings.batch \
            else rng.integers(len(self._observations), size=settings.batch)  # fmt: skip
        with torch.no_grad():
            encoded = self._encode([self._observations[i] for i in chosen], rng)
            noise = self._noise(self._step, settings.batch)
            chunk = self._roll(self.teacher, encoded, noise, settings.teacher_steps)[-1]
        for group in self._optimizer.param_groups:
            group['lr'] = self._rate()
        self._optimizer.zero_grad(set_to_none=True)
        total = 0.0
        terms = sum(settings.steps)
        for steps in settings.steps:
            x = noise
            for t in self._times(steps):
                velocity = self._velocity(self.network, encoded, x, t)
                # The chunk that a step straight to time 0 would come to.
                loss = (x - t * velocity - chunk).square().mean() / terms
                loss.backward()
                total += loss.item()
                x = (x - velocity / steps).detach()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self._optimizer.step()
        self._average()
        return total

    def _rate(self) -> float:
        settings = self.settings
        if self._step < _WARM_UP:
            return settings.learning_rate * (self._step + 1) / _WARM_UP
        done = (self._step - _WARM_UP) / max(settings.updates - _WARM_UP, 1)
        return settings.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))

    @torch.no_grad()
    def _average(self) -> None:
        # The average follows closely at first, or it would remember the teacher.
        memory = min(self.settings.average, (1 + self._step) / (10 + self._step))
        for mean, value in zip(self.student.parameters(), self.network.parameters(), strict=True):
            if value.grad is not None:
                mean.lerp_(value, 1 - memory)

    def _times(self, steps: int) -> list[float]:
        return [float(t) for t in flow_times(steps, self._spec.flow_times)]

    def _roll(
        self, network: FlowNetwork, encoded: _Encoded, noise: Tensor, steps: int
    ) -> list[Tensor]:
        """Return x after each of so many Euler steps, (R D, H, A) each."""
        found, x = [], noise
        for t in self._times(steps):
            x = x - self._velocity(network, encoded, x, t) / steps
            found.append(x)
        return found

    def _velocity(self, network: FlowNetwork, encoded: _Encoded, x: Tensor, t: float) -> Tensor:
        conditioning = network.time_conditioning(torch.tensor([t], device=x.device))
        velocity = network.velocity(x, encoded.past, conditioning, **encoded.rows)
        # Masked action dimensions stay zero.
        velocity = velocity.clone()
        velocity[..., real_action_dim(self._spec.dims) :] = 0.0
        return velocity

    def _noise(self, number: int, observations: int) -> Tensor:
        dims, settings = self._spec.dims, self.settings
        noise = np.stack(
            [
                chunk_noise(
                    settings.seed,
                    (number + 1) * settings.batch * 64 + row,
                    (dims.horizon, dims.action_dim),
                    draw,
                    self._family.noise,
                )
                for row in range(observations)
                for draw in range(settings.draws)
            ]
        )
        noise[..., real_action_dim(dims) :] = 0.0
        return torch.from_numpy(noise).to(self._device)

    @torch.no_grad()
    def _encode(
        self, observations: Sequence[StoredObservation], rng: np.random.Generator
    ) -> _Encoded:
        """Run the teacher's vision and prefix, one observation at a time, as it is served.

        Each one's rows stand there for every draw of noise.
        """
        each = [self._encode_one(observation, rng) for observation in observations]
        draws = self.settings.draws
        past = {
            name: torch.cat([one.past[name] for one in each], dim=axis)
            for name, axis in self._axes.items()
        }
        rows = {
            name: torch.cat([one.rows[name] for one in each]).repeat_interleave(draws, dim=0)
            for name in each[0].rows
        }
        return _Encoded(repeat_prefix(self.teacher, past, draws), rows)

    def _encode_one(self, stored: StoredObservation, rng: np.random.Generator) -> _Encoded:
        codec, dims = self._codec, self._spec.dims
        observation = stored.decode()
        state = codec.check(observation)
        advantage = _ADVANTAGES[rng.integers(len(_ADVANTAGES))]
        if self._spec.advantage is None:
            advantage = None
        rows = codec.rows(observation.instruction, state, (advantage,))
        images, mask = codec.camera_images.encode(observation.images)
        tokens = [
            self.teacher.vision(torch.from_numpy(np.array(pixels))[None].to(self._device))[0]
            for pixels in images
        ]
        tensors = {name: torch.from_numpy(np.array(rows[name])).to(self._device) for name in rows}
        prefix: Mapping[str, Tensor] = self.teacher.prefix(
            nn.utils.rnn.pad_sequence(tokens, batch_first=True),
            torch.from_numpy(np.array(mask)).to(self._device),
            **{name: tensors[name] for name in self._family.prefix_inputs(dims)},
        )
        return _Encoded(
            dict(prefix), {name: tensors[name] for name in self._family.head_inputs(dims)}
        )

    def _save(self) -> None:
        state = {
            'settings': _plain(self.settings),
            'step': self._step,
            'network': self.network.state_dict(),
            'student': self.student.state_dict(),
            'optimizer': self._optimizer.state_dict(),
            'history': self.history,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self._path) as file:
            torch.save(state, file)

    def _load(self) -> None:
        state = read_checkpoint(self._path, _FIELDS, self._device)
        found, asked = state['settings'], _plain(self.settings)
        if found != asked:
            others = [
                f'{name}: {found.get(name)}, asked for {value}'
                for name, value in asked.items()
                if found.get(name) != value
            ]
            raise ValueError(
                f'{self._path}: is a run of other settings: {"; ".join(others)}; give the same '
                'arguments to go on with it, or another folder with --work'
            )
        parts: dict[str, Any] = {
            'network': self.network,
            'student': self.student,
            'optimizer': self._optimizer,
        }
        load_parts(self._path, state, parts)
        self.history, self._step = state['history'], state['step']


def teacher_identity(bundle: Bundle) -> str:
    """Return the SHA-256 of all that the teacher does."""
    return spec_identity(bundle.spec)


def data_identity(folder: Path, observations: Sequence[StoredObservation]) -> str:
    """Return the data set's name and the SHA-256 of what is learned from it."""
    digest = hashlib.sha256()
    for one in observations:
        for part in (one.task.encode(), one.state.tobytes(), *one.images.values()):
            digest.update(len(part).to_bytes(8, 'little'))
            digest.update(part)
    return f'{folder.resolve().name} sha256:{digest.hexdigest()}'


def _plain(settings: DistillationSettings) -> dict[str, Any]:
    return {**asdict(settings), 'steps': list(settings.steps)}
