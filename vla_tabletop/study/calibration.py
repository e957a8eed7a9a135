"""Observations of a policy at its tasks, which int8 is calibrated on."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from vla_runtime.policy import Policy
from vla_runtime.types import ActionChunk, CommittedPlan, Observation
from vla_tabletop.sim.closed_loop import observe, policy_chunk
from vla_tabletop.sim.rollout import run_episode
from vla_tabletop.sim.scene import Variant
from vla_tabletop.sim.tasks import FAMILIES, Task, sample_task
from vla_tabletop.sim.world import Tabletop
from vla_tabletop.study import episode as study_episode
from vla_tabletop.study.chunk_sources import PolicySource
from vla_tabletop.study.condition import Condition
from vla_tabletop.study.world import World
from vla_tabletop.study.worlds import make_world

_EPISODES = 16
_REPLAN_STEPS = 8
_VARIANTS: tuple[Variant, ...] = ('still', 'moving')


def observations_of(bundle: Path, condition: Condition) -> list[Observation]:
    """Run a policy in float32 in a condition's world, and keep what it saw at every chunk."""
    if condition.world == 'tabletop':
        return demo_observations(bundle)
    condition = replace(condition, backend='torch', precision='float32')
    with closing(make_world(condition.world)) as world, closing(_Witness(bundle)) as source:
        for seed in range(_EPISODES):
            study_episode.run_episode(world, source, condition, seed, seed)
        return source.seen


class _Witness(PolicySource):
    """Keeps what the policy was shown."""

    def __init__(self, bundle: Path) -> None:
        super().__init__(bundle)
        self.seen: list[Observation] = []

    def chunk(
        self, world: World, observation: Observation, plan: CommittedPlan | None
    ) -> tuple[ActionChunk, bool]:
        self.seen.append(observation)
        return super().chunk(world, observation, plan)


def demo_observations(bundle: Path) -> list[Observation]:
    """Run a policy in float32 on scenes of its training, and keep its observations.

    No study has these scenes. Every second one moves.
    """
    world, seen = Tabletop(100.0), list[Observation]()
    with closing(Policy.load(bundle, 'torch', precision='float32', threads=1)) as policy:
        chunk = policy_chunk(policy)

        def look(world: Tabletop, task: Task) -> np.ndarray:
            seen.append(observe(world, task.instruction))
            return chunk(world, task)

        for seed in range(_EPISODES):
            state = world.reset(seed, _VARIANTS[seed % len(_VARIANTS)])
            rng = np.random.default_rng([seed, 100])
            family = FAMILIES[seed // len(_VARIANTS) % len(FAMILIES)]
            policy.reset()
            run_episode(world, sample_task(rng, state.block_m, family), look, _REPLAN_STEPS)
    return seen
