"""Stages of a push follow from the places of tip and block; the expert's pushes reach the edge."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest
from paths import ROOT

from vla_tabletop.sim.expert import Expert, Style
from vla_tabletop.sim.tasks import SIDE_SIGN, SIDES, Side
from vla_tabletop.sim.world import Tabletop, TabletopState

BENCHMARK = ROOT / 'benchmark'


@pytest.fixture(scope='module')
def push_stages():
    sys.path.insert(0, str(BENCHMARK))
    try:
        path = BENCHMARK / 'push_stages.py'
        spec = importlib.util.spec_from_file_location('push_stages', path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCHMARK))


def _states(tips_behind_m: list[tuple[float, float, float]], moved_m: float, sign: float):
    """Tips (behind, beside, height) of the first block, which moves at the end."""
    states = []
    for i, (behind, beside, height) in enumerate(tips_behind_m):
        block = np.array([[0.27, 0.0, 0.0175]] * 3)
        tip = block[0] + [beside, -sign * behind, 0.0]
        tip[2] = height
        block[0, 1] += sign * moved_m * (i == len(tips_behind_m) - 1)
        states.append(TabletopState(0.0, np.zeros(6), np.zeros(6), tip, block))
    return states


@pytest.mark.parametrize('side', SIDES)
@pytest.mark.parametrize(
    ('tips', 'moved_m', 'stage'),
    [
        ([(-0.05, 0.0, 0.2), (0.06, 0.05, 0.1)], 0.0, None),
        ([(-0.05, 0.0, 0.2), (0.06, 0.01, 0.1), (0.06, 0.01, 0.08)], 0.0, 'over'),
        ([(0.06, 0.01, 0.1), (0.06, 0.01, 0.03)], 0.0, 'down'),
        # Low before the block, high behind it: not down behind it.
        ([(-0.06, 0.01, 0.03), (0.06, 0.01, 0.1)], 0.0, 'over'),
        ([(0.06, 0.01, 0.03), (0.06, 0.01, 0.02)], 0.02, 'moved'),
        # Pulled back, not pushed.
        ([(0.06, 0.01, 0.03), (0.06, 0.01, 0.02)], -0.02, 'down'),
    ],
)
def test_the_last_stage_of_an_episode(
    push_stages, side: Side, tips, moved_m: float, stage: str | None
) -> None:
    sign = SIDE_SIGN[side]
    assert push_stages.stage_reached(_states(tips, moved_m, sign), 0, sign) == stage


def test_off_the_middle_counts_only_a_low_tip_at_the_block(push_stages) -> None:
    tips = [(0.06, 0.01, 0.03), (0.03, 0.011, 0.06), (0.025, 0.012, 0.02), (-0.02, 0.013, 0.02)]
    aside = push_stages.off_middle(_states(tips, 0.0, -1.0), 0, -1.0)
    assert aside == pytest.approx([0.012])


def test_the_expert_gets_to_the_edge_and_an_arm_at_rest_nowhere(push_stages) -> None:
    world, expert = Tabletop(), Expert()

    def plan(world, task):
        return expert.plan(world.joint_positions, world.state().block_m, task.goal, Style(0.2))

    def rest(world, task):
        return np.tile(world.joint_positions, (32, 1))

    seeds = range(2)
    assert push_stages.push_all(world, plan, seeds)['reached'] == dict.fromkeys(
        push_stages.STAGES, len(seeds)
    )
    still = push_stages.push_all(world, rest, seeds)
    assert still['reached']['moved'] == still['reached']['edge'] == 0
    assert still['off_middle_m'] is None
    world.close()
