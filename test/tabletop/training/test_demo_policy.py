"""The shipped demo policy still does its task, and follows the instruction that it is given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from paths import ROOT

from vla_runtime.policy import Policy
from vla_tabletop.sim.closed_loop import policy_chunk, run_seeds
from vla_tabletop.sim.rollout import run_episode
from vla_tabletop.sim.scene import FIRST_UNSEEN_SEED
from vla_tabletop.sim.tasks import Goal, make_task
from vla_tabletop.sim.world import Tabletop
from vla_tabletop.training.demo_bundle import EVALUATION_REPLAN_STEPS

BUNDLE = ROOT / 'engines' / 'demo'
# Apart from those of the bundle's own check.
SEEDS = range(FIRST_UNSEEN_SEED + 10_000, FIRST_UNSEEN_SEED + 10_010)

pytestmark = pytest.mark.skipif(
    not (BUNDLE / 'policy.yaml').exists(),
    reason='engines/demo is not there; vla_runtime train-demo makes it',
)


@pytest.fixture(scope='module')
def world() -> Iterator[Tabletop]:
    tabletop = Tabletop()
    yield tabletop
    tabletop.close()


@pytest.fixture(scope='module')
def policy() -> Iterator[Policy]:
    loaded = Policy.load(BUNDLE)
    yield loaded
    loaded.close()


def test_twenty_unseen_scenes_are_done_at_least_seventeen_times(
    world: Tabletop, policy: Policy
) -> None:
    outcomes = [
        outcome
        for family in ('colour', 'position')
        for outcome in run_seeds(world, policy, SEEDS, family, EVALUATION_REPLAN_STEPS)
    ]
    successes = sum(outcome.success for outcome in outcomes)
    assert successes >= 17, [outcome.name for outcome in outcomes]


@pytest.mark.thorough
def test_in_one_scene_every_block_is_touched_when_it_is_named(
    world: Tabletop, policy: Policy
) -> None:
    named = 0
    for seed in SEEDS[:5]:
        for block in range(3):
            state = world.reset(seed)
            policy.reset()
            task = make_task('colour', Goal(block), state.block_m)
            assert task is not None
            outcome = run_episode(world, task, policy_chunk(policy), EVALUATION_REPLAN_STEPS)
            named += outcome.block == block
    assert named >= 13, f'{named} of 15 instructions touched the block that they name'


def test_the_same_seed_is_the_same_episode(world: Tabletop, policy: Policy) -> None:
    first, again = (
        run_seeds(world, policy, SEEDS[:1], 'colour', EVALUATION_REPLAN_STEPS) for _ in range(2)
    )
    assert first == again
