"""Train a tabletop policy: three stages on one network, resumable and reproducible.

Batches, instructions and noise are functions of (seed, stage, step): a resumed run takes the same
steps. Checkpoints are written whole or not at all.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm import tqdm

from vla_runtime.family.step_schedule import chosen_scheduler
from vla_runtime.files.atomic_write import atomic_write
from vla_runtime.models.base.diffusion_network import advance
from vla_runtime.models.base.flow_network import FlowNetwork, build_network
from vla_runtime.models.base.token_network import TokenNetwork
from vla_tabletop.training.objectives import (
    GROUND_WEIGHT,
    GroundObjective,
    SeeObjective,
    chunk_objective,
)
from vla_tabletop.training.recipes import DEMO_FAMILY, find_recipe
from vla_tabletop.training.recipes.recipe import STAGES, Prefix, Recipe
from vla_tabletop.training.samples import frame_batches
from vla_tabletop.training.start import Start
from vla_tabletop.training.vocabulary import Answers
from vla_tabletop.training.world import Batch, TrainingSamples, TrainingWorld
from vla_tools.distillation.student import load_parts, read_checkpoint

_CHECK_EVERY = 250
_CHECK_FRAMES = 128
_CHECKPOINT_EVERY = 250
_LOG_EVERY = 10
_WARM_UP_STEPS = 100
# Denoise steps of a check with a scheduler.
_CHECK_STEPS = 10

# Fields of a checkpoint.
_FIELDS = {
    'plan': dict,
    'stage': int,
    'step': int,
    'learner': dict,
    'average': dict,
    'optimizer': dict,
    'history': list,
}

Metrics = dict[str, float]


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a training; with the data set they fix the result on one machine.

    Attributes:
        see_steps, ground_steps, act_steps: optimiser steps of the three stages.
        batch: frames a step.
        draws: (noise, time) pairs a prefix in the third stage.
        learning_rate: peak after 100 steps; a cosine then leads to a hundredth.
        average: decay of the exponential moving average that is shipped.
        data: digest of the data set's facts.
        start: SHA-256 of the initial weights; empty for none. With them the second stage
            trains only heads outside the bundle.
    """

    family: str = DEMO_FAMILY
    seed: int = 0
    see_steps: int = 500
    ground_steps: int = 1200
    act_steps: int = 4000
    batch: int = 64
    draws: int = 4
    learning_rate: float = 1e-3
    average: float = 0.999
    data: str = ''
    start: str = ''

    def steps(self, stage: str) -> int:
        return int(getattr(self, f'{stage}_steps'))


class Learner(nn.Module):
    """The network and the heads that only training needs."""

    def __init__(
        self,
        recipe: Recipe,
        world: TrainingWorld,
        vocabulary: int,
        draws: int,
        step_weight: np.ndarray,
        answers: Answers | None = None,
    ) -> None:
        super().__init__()
        dims = world.fit(recipe.dims(vocabulary))
        self.network = build_network(recipe.name, dims)
        self.see = SeeObjective(recipe.image_width, world, recipe.see)
        self.ground = GroundObjective(
            recipe.image_width, recipe.last_width(dims), world, dims.action_dim
        )
        self.act = chunk_objective(
            recipe.family, dims, draws, torch.from_numpy(step_weight), answers
        )


class Training:
    """One run, resumed from `checkpoint.pt` in `folder` if there is one.

    `number_tokens`: ids of the state bins, empty without language; `vocabulary`: rows of the text
    table, 0 without language; `start`: origin of the weights, named by `plan.start`, None: from
    scratch; `answers`: of a `tokens` head. Raises ValueError: a damaged checkpoint, or one of
    another plan.
    """

    def __init__(
        self,
        plan: TrainingSettings,
        samples: TrainingSamples,
        number_tokens: np.ndarray,
        vocabulary: int,
        folder: Path,
        device: str = 'cpu',
        start: Start | None = None,
        answers: Answers | None = None,
    ) -> None:
        self.plan, self.samples, self.device = plan, samples, torch.device(device)
        self.recipe = find_recipe(plan.family)
        self._answers = answers
        self._path = folder / 'checkpoint.pt'
        torch.manual_seed(plan.seed)
        self.learner = Learner(
            self.recipe, samples.world, vocabulary, plan.draws, samples.step_weight(), answers
        )
        if start is None:
            generator = torch.Generator().manual_seed(plan.seed)
            self.recipe.initialise(self.learner.network, number_tokens, generator)
        else:
            self.learner.network.load_state_dict(load_file(start.weights))
        self.learner.to(self.device)
        self.average = copy.deepcopy(self.learner.network)
        self.history: list[dict[str, Any]] = []
        self._stage, self._step = 0, 0
        self._optimizer = self._new_optimizer()
        held_out = samples.held_out()
        self._train_frames = np.flatnonzero(~held_out & samples.teaches())
        self._check_frames = np.flatnonzero(held_out)
        if self._path.exists():
            self._load()

    def run(self, progress: bool = True) -> None:
        """Go through the stages that are left; safe to interrupt."""
        while self._stage < len(STAGES):
            stage = STAGES[self._stage]
            self._run_stage(stage, progress)
            self._stage, self._step = self._stage + 1, 0
            self._optimizer = self._new_optimizer()
            if self._stage < len(STAGES) and STAGES[self._stage] == 'act':
                self.average.load_state_dict(self.learner.network.state_dict())
            self._save()

    def _run_stage(self, stage: str, progress: bool) -> None:
        total = self.plan.steps(stage)
        seed = self.plan.seed * len(STAGES) + self._stage
        batches = frame_batches(self._train_frames, self.plan.batch, seed, self._step)
        bar = tqdm(total=total, initial=self._step, desc=stage, unit='step', disable=not progress)
        with bar:
            while self._step < total:
                metrics = self._train_step(stage, next(batches))
                self._step += 1
                if self._step % _CHECK_EVERY == 0 or self._step == total:
                    if stage == 'act':
                        metrics |= self.check()
                    self._log(stage, metrics)
                    bar.write(
                        f'{stage} {self._step}: '
                        + ', '.join(f'{name} {value:.4f}' for name, value in metrics.items())
                    )
                elif self._step % _LOG_EVERY == 0:
                    self._log(stage, metrics)
                if self._step % _CHECKPOINT_EVERY == 0:
                    self._save()
                bar.set_postfix(loss=f'{metrics["loss"]:.4f}', refresh=False)
                bar.update()

    def _train_step(self, stage: str, frames: np.ndarray) -> Metrics:
        key = [self.plan.seed, STAGES.index(stage), self._step]
        rng = np.random.default_rng(key)
        generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
        rate = learning_rate(self.plan, self._step, self.plan.steps(stage))
        for group in self._optimizer.param_groups:
            group['lr'] = rate
        loss, metrics = self._loss(stage, frames, rng, generator)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.learner.parameters(), 1.0)
        self._optimizer.step()
        if stage == 'act':
            self._update_average()
        return {'loss': loss.item(), **{name: value.item() for name, value in metrics.items()}}

    def _loss(
        self, stage: str, frames: np.ndarray, rng: np.random.Generator, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        learner, samples = self.learner, self.samples
        if stage == 'see':
            pixel = samples.points(frames)
            return learner.see(
                learner.network, self._tensor(samples.pixels(frames)), self._tensor(pixel)
            )
        batch = samples.batch(frames, rng)
        with torch.set_grad_enabled(stage == 'act' or not self.plan.start):
            prefix = self._prefix(learner.network, batch)
        actions = self._tensor(batch.actions)
        ground, metrics = learner.ground(
            prefix,
            self._tensor(batch.pixel),
            self._tensor(batch.place),
            self._tensor(batch.state),
            actions[:, -1],
        )
        if stage == 'ground':
            return ground, metrics
        chunk = learner.act(learner.network, prefix, actions, generator)
        return chunk + GROUND_WEIGHT * ground, {'chunk': chunk.detach(), **metrics}

    def _prefix(self, network: FlowNetwork, batch: Batch) -> Prefix:
        names = self.recipe.family.prefix_inputs(network.dims)
        rows = {name: self._tensor(getattr(batch, name)) for name in names}
        return self.recipe.prefix(network, self._tensor(batch.pixels), rows)

    @torch.no_grad()
    def check(self) -> Metrics:
        """Judge chunks sampled for episodes never trained on, with the averaged weights."""
        rng = np.random.default_rng([self.plan.seed, 77])
        count = min(_CHECK_FRAMES, len(self._check_frames))
        frames = rng.choice(self._check_frames, size=count, replace=False)
        batch = self.samples.batch(frames, rng)
        network = self.average
        prefix = self._prefix(network, batch)
        if self._answers is not None:
            tokens, _ = cast(TokenNetwork, network).answer(prefix.past)
            chunks, refused = self._answers.read(tokens.cpu().numpy())
            actions = self.samples.action_normalizer.denormalise(chunks)
            return {**self.samples.errors(actions, batch), 'refused': refused / count}
        generator = torch.Generator().manual_seed(self.plan.seed)
        x = torch.randn(batch.actions.shape, generator=generator).to(self.device)
        x = _denoised(network, self.recipe, x, prefix.past)
        actions = self.samples.action_normalizer.denormalise(x.cpu().numpy())
        return self.samples.errors(actions, batch)

    @torch.no_grad()
    def _update_average(self) -> None:
        # The average follows closely at first, or it would remember the stage's start.
        memory = min(self.plan.average, (1 + self._step) / (10 + self._step))
        pairs = zip(self.average.parameters(), self.learner.network.parameters(), strict=True)
        for mean, value in pairs:
            mean.lerp_(value, 1 - memory)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        learned = (value for value in self.learner.parameters() if value.requires_grad)
        return torch.optim.AdamW(learned, lr=self.plan.learning_rate, weight_decay=0.01)

    def _log(self, stage: str, metrics: Metrics) -> None:
        self.history.append({'stage': stage, 'step': self._step, **metrics})

    def _save(self) -> None:
        state = {
            'plan': asdict(self.plan),
            'stage': self._stage,
            'step': self._step,
            'learner': self.learner.state_dict(),
            'average': self.average.state_dict(),
            'optimizer': self._optimizer.state_dict(),
            'history': self.history,
        }
        with atomic_write(self._path) as file:
            torch.save(state, file)

    def _load(self) -> None:
        state = read_checkpoint(self._path, _FIELDS, self.device)
        if state['plan'] != asdict(self.plan):
            raise ValueError(
                f'{self._path}: is a run of {state["plan"]}, asked for {asdict(self.plan)}; give '
                'the same arguments to go on with it, or another folder'
            )
        parts: dict[str, Any] = {
            'learner': self.learner,
            'average': self.average,
            'optimizer': self._optimizer,
        }
        load_parts(self._path, state, parts)
        self.history = state['history']
        self._stage, self._step = state['stage'], state['step']


def _denoised(
    network: FlowNetwork, recipe: Recipe, x: Tensor, past: Mapping[str, Tensor]
) -> Tensor:
    """Chunks (B, H, A) from noise x, with the recommended steps."""
    if recipe.family.has_scheduler:
        # Without noise of their own, whatever the scheduler of training.
        scheduler = chosen_scheduler(network.dims, 'ddim')
        ones, zero = torch.ones(1, device=x.device), torch.zeros_like(x)
        for t, update in zip(
            scheduler.timesteps(_CHECK_STEPS), scheduler.updates(_CHECK_STEPS), strict=True
        ):
            conditioning = network.time_conditioning(torch.tensor([float(t)], device=x.device))
            predicted = network.velocity(x, past, conditioning)
            numbers = torch.from_numpy(update).to(x.device)
            x = advance(x, predicted, numbers, zero, ones, zero, zero[:, :, :1])
        return x
    # A head of one pass is a flow of one step from zero, see `SinglePassNetwork`.
    x = x * (recipe.family.head == 'flow')
    times = torch.linspace(1.0, 0.0, recipe.denoise_steps + 1, device=x.device)
    for t, following in pairwise(times):
        velocity = network.velocity(x, past, network.time_conditioning(t[None]))
        x = x + (following - t) * velocity
    return x


def learning_rate(plan: TrainingSettings, step: int, total: int) -> float:
    """Linear warm-up, then a cosine down to a hundredth of the peak."""
    warm_up = min(_WARM_UP_STEPS, max(total // 5, 1))
    if step < warm_up:
        return plan.learning_rate * (step + 1) / warm_up
    done = (step - warm_up) / max(total - warm_up, 1)
    return plan.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))
