"""Sources of an episode's chunks: the policy of a bundle, or the scripted expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from vla_runtime.inference.prefix_cache import CacheMode, CachePolicy
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.types import ActionChunk, CommittedPlan, Observation
from vla_tabletop.sim.closed_loop import noise_seed
from vla_tabletop.sim.episode import find_task
from vla_tabletop.sim.expert import HORIZON, STEP_TIME_S, Expert, Style
from vla_tabletop.sim.world import Tabletop
from vla_tabletop.study.condition import Condition
from vla_tabletop.study.smoothness import CacheUse, cache_use_of
from vla_tabletop.study.world import World


class ChunkSource(Protocol):
    """Makes a chunk of an observation."""

    # Rendering is most of a tick's cost.
    needs_images: bool
    action_names: tuple[str, ...]
    horizon: int
    # Of the episode so far; zeros without a cache.
    cache_use: CacheUse

    def begin(self, condition: Condition, seed: int) -> None:
        """Begin an episode."""

    def chunk(
        self, world: World, observation: Observation, plan: CommittedPlan | None
    ) -> tuple[ActionChunk, bool]:
        """The chunk for an observation, and whether it is conditioned on the plan."""


class PolicySource:
    """A policy bundle; settings are a condition's, noise is the seed's."""

    needs_images = True

    def __init__(
        self, bundle: str | Path, precision: str = 'float32', backend: str = 'torch'
    ) -> None:
        self._policy = Policy.load(bundle, backend, precision=precision, threads=1)
        self._policy.warm_up()
        self.action_names = tuple(action.name for action in self._policy.spec.actions)
        self.horizon = self._policy.spec.real_horizon
        self.cache_use = CacheUse()
        self._image_blind = False
        self._first_images: Mapping[str, np.ndarray | None] | None = None
        self.settings = self._policy.settings

    def close(self) -> None:
        self._policy.close()

    def begin(self, condition: Condition, seed: int) -> None:
        self._policy.reset()
        self.cache_use = CacheUse()
        self._image_blind, self._first_images = condition.cache == 'image_blind', None
        self.settings = replace(settings_of(condition), seed=noise_seed(self._policy, seed))

    def chunk(
        self, world: World, observation: Observation, plan: CommittedPlan | None
    ) -> tuple[ActionChunk, bool]:
        if self._image_blind:
            # Image tokens are a function of the pixels: to see the first images again is to find
            # their tokens.
            self._first_images = self._first_images or observation.images
            observation = replace(observation, images=self._first_images)
        chunk, report = self._policy.infer(observation, settings=self.settings, plan=plan)
        self.cache_use += cache_use_of(report.cache)
        return chunk, report.rtc_mode != 'off'


def settings_of(condition: Condition) -> PolicySettings:
    """Return a condition's settings of the policy."""
    settings = PolicySettings(
        denoise_steps=condition.denoise_steps,
        noise_scheduler=condition.noise_scheduler,
        advantage=condition.advantage,
        cfg_mode=condition.cfg_mode,
        rtc_mode=condition.rtc_mode,
        rtc_horizon=condition.rtc_horizon,
        cache=_cache_policy(condition),
    )
    return settings if condition.beta is None else replace(settings, cfg_beta=condition.beta)


def _cache_policy(condition: Condition) -> CachePolicy:
    if condition.cache == 'bounded':
        change, bins = condition.cache_max_image_change, condition.cache_max_state_bins
        # Missing limits are set beyond any real value.
        return CachePolicy(
            mode='bounded',
            max_age_s=10.0,
            max_reuses=condition.cache_max_reuses,
            max_image_change=255.0 if change is None else change,
            max_state_bins=256 if bins is None else bins,
        )
    mode: CacheMode = 'off' if condition.cache == 'off' else 'exact'
    return CachePolicy(mode=mode)


class ExpertSource:
    """The expert at its best, with the same instruction; it sees the simulator's state."""

    needs_images = False

    def __init__(self) -> None:
        self._expert = Expert()
        self.action_names: tuple[str, ...] = Tabletop.joint_names
        self.horizon = HORIZON
        self.cache_use = CacheUse()

    def begin(self, condition: Condition, seed: int) -> None:
        pass

    def chunk(
        self, world: World, observation: Observation, plan: CommittedPlan | None
    ) -> tuple[ActionChunk, bool]:
        assert isinstance(world, Tabletop)
        block_m = world.state().block_m
        task = find_task(observation.instruction, block_m)
        if task is None:
            raise ValueError(f"expert: '{observation.instruction}' is no task of the tabletop")
        rows = self._expert.plan(np.asarray(observation.state), block_m, task.goal, Style())
        names = self.action_names
        kinds = ('position',) * len(names)
        return ActionChunk(rows, names, kinds, STEP_TIME_S, rows.astype(np.float32)), False
