"""A policy in the tabletop's loop: its observations, its chunks, its success rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from vla_runtime.family.listing import find_family
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.processing.fast_tokens import AnswerError
from vla_runtime.types import Observation
from vla_tabletop.sim.rollout import run_episode
from vla_tabletop.sim.scene import COLOURS, Colour, Variant
from vla_tabletop.sim.tasks import Family, Outcome, Task, Wording, sample_task
from vla_tabletop.sim.world import Tabletop
from vla_tabletop.training.dataset import IMAGE_HEIGHT, IMAGE_WIDTH


def observe(world: Tabletop, instruction: str) -> Observation:
    """Return the observation of this moment.

    Images are rendered at the size to which the demo policy shrinks 320x240: the same pixels,
    cheaper.
    """
    now_ns = round(world.sim_time_s * 1e9)
    return Observation(
        images={
            camera: world.render(camera, IMAGE_WIDTH, IMAGE_HEIGHT) for camera in world.cameras
        },
        state=world.joint_positions,
        instruction=instruction,
        stamps_ns={**dict.fromkeys(world.cameras, now_ns), 'state': now_ns},
    )


def policy_chunk(
    policy: Policy, settings: PolicySettings | None = None
) -> Callable[[Tabletop, Task], np.ndarray]:
    """The policy as `run_episode` wants it: (horizon, 6) setpoints in the tabletop's order.

    Tokens that are no chunk leave the robot in place.
    """

    def chunk(world: Tabletop, task: Task) -> np.ndarray:
        try:
            actions, _ = policy.infer(observe(world, task.instruction), settings=settings)
        except AnswerError:
            return np.tile(world.joint_positions, (policy.spec.real_horizon, 1))
        return actions.actions[:, [actions.names.index(name) for name in world.joint_names]]

    return chunk


def noise_seed(policy: Policy, seed: int) -> int:
    """Return the `seed` setting of an episode: the default for a head that draws no noise."""
    draws = find_family(policy.spec.family).takes_steps
    return seed if draws else PolicySettings().seed


def run_seeds(
    world: Tabletop,
    policy: Policy,
    seeds: Iterable[int],
    family: Family,
    replan_steps: int,
    variant: Variant = 'still',
    wording: Wording = 'plain',
    colours: Sequence[Colour] = COLOURS,
) -> list[Outcome]:
    """One episode a seed; scene, task and the policy's noise are functions of the seed."""
    outcomes = []
    for seed in seeds:
        state = world.reset(seed, variant)
        rng = np.random.default_rng([seed, 100])
        task = sample_task(rng, state.block_m, family, wording, colours)
        policy.reset()
        settings = replace(policy.settings, seed=noise_seed(policy, seed))
        chunk = policy_chunk(policy, settings)
        outcomes.append(run_episode(world, task, chunk, replan_steps))
    return outcomes
