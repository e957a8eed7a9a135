"""The expert: succeeds, recovers, stays within limits, and can plan for any block at any time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from thorough import thorough_but

from vla_tabletop.sim.expert import HORIZON, Expert, Style, sample_style
from vla_tabletop.sim.rollout import follow, run_episode
from vla_tabletop.sim.scene import sample_scene
from vla_tabletop.sim.tasks import (
    Goal,
    Judge,
    Task,
    make_task,
    sample_task,
)
from vla_tabletop.sim.world import Tabletop
from vla_tabletop.training.dataset import GOALS

SEEDS = range(20)


@pytest.fixture(scope='module')
def expert() -> Expert:
    return Expert()


@pytest.fixture(scope='module')
def world() -> Iterator[Tabletop]:
    tabletop = Tabletop()
    yield tabletop
    tabletop.close()


@pytest.mark.parametrize(
    ('family', 'variant', 'least'),
    thorough_but(
        [('colour', 'still', 19), ('push', 'still', 18)],
        [
            ('colour', 'still', 19),
            ('position', 'still', 19),
            ('colour', 'moving', 18),
            ('colour', 'pushed', 18),
            ('push', 'still', 18),
        ],
    ),
)
def test_the_expert_succeeds(world: Tabletop, expert: Expert, family, variant, least: int) -> None:
    def chunk(world: Tabletop, task) -> np.ndarray:
        return expert.plan(world.joint_positions, world.state().block_m, task.goal, Style(0.2))

    successes = 0
    for seed in SEEDS:
        state = world.reset(seed, variant)
        task = sample_task(np.random.default_rng(seed), state.block_m, family)
        successes += run_episode(world, task, chunk, replan_steps=8).success
    assert successes >= least, f'{successes} of {len(SEEDS)}'


@pytest.mark.parametrize('seed', range(5))
def test_every_goal_has_a_chunk_within_limits_and_speed(
    world: Tabletop, expert: Expert, seed: int
) -> None:
    state = world.reset(seed)
    style = sample_style(np.random.default_rng(seed))
    for goal in GOALS:
        chunk = expert.plan(state.joint_rad, state.block_m, goal, style)
        assert chunk.shape == (HORIZON, 6)
        assert np.all(chunk >= world.lower_rad) and np.all(chunk <= world.upper_rad)
        steps = np.diff(np.vstack([state.joint_rad, chunk]), axis=0)
        assert np.abs(steps).max() < 0.101


def test_planning_leaves_the_running_simulation_alone(world: Tabletop, expert: Expert) -> None:
    before = world.reset(2)
    expert.plan(before.joint_rad, before.block_m, Goal(1), Style())
    after = world.state()
    np.testing.assert_array_equal(after.joint_rad, before.joint_rad)
    np.testing.assert_array_equal(after.block_m, before.block_m)


def test_the_expert_recovers_from_a_disturbed_arm(world: Tabletop, expert: Expert) -> None:
    state = world.reset(3)
    task = make_task('colour', Goal(0), state.block_m)
    assert task is not None
    judge = Judge(task)
    rng = np.random.default_rng(0)
    outcome = None
    while outcome is None:
        plan = expert.plan(world.joint_positions, state.block_m, task.goal, Style())[:4]
        outcome = follow(world, plan + rng.normal(0, 0.03, size=plan.shape), judge)
    assert outcome.success


PUSHES = range(30)


@pytest.mark.thorough
@pytest.mark.parametrize('noise_rad', [0.0, 0.01])
def test_pushes_succeed_from_perturbed_starts(
    world: Tabletop, expert: Expert, noise_rad: float
) -> None:
    ends = []
    for seed in PUSHES:
        rng = np.random.default_rng([seed, 1])
        scene = sample_scene(seed)
        start = scene.start_rad + np.append(rng.normal(0, 0.1, size=5), 0.0)
        blocks = world.load(replace(scene, start_rad=start)).block_m
        task = sample_task(rng, blocks, 'push')
        style = Style(rng.uniform(0.1, 0.2), aim_m=tuple(rng.normal(0, 0.01, size=2)))

        def chunk(world: Tabletop, task: Task, rng=rng, style=style) -> np.ndarray:
            plan = expert.plan(world.joint_positions, world.state().block_m, task.goal, style)
            plan[:, :5] += rng.normal(0, noise_rad, size=5)
            return plan

        ends.append(run_episode(world, task, chunk, replan_steps=int(rng.integers(3, 9))).name)
    assert ends.count('success') >= len(PUSHES) - 1, ends


def test_aim_and_speed_are_the_styles(world: Tabletop, expert: Expert) -> None:
    state = world.reset(6)

    def way(style: Style) -> float:
        chunk = expert.plan(state.joint_rad, state.block_m, Goal(0), style)
        return float(np.linalg.norm(chunk[-1] - state.joint_rad))

    assert way(Style(speed_m_s=0.2)) > 1.5 * way(Style(speed_m_s=0.1))
    exact = expert.plan(state.joint_rad, state.block_m, Goal(0), Style())
    off = expert.plan(state.joint_rad, state.block_m, Goal(0), Style(aim_m=(0.0, 0.02)))
    assert np.abs(exact - off).max() > 0.005
