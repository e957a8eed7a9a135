"""The policies of the families that ship still do their task, on the executor of a robot."""

import pytest
from paths import ROOT

from vla_tabletop.sim.success_rate import SuccessRate
from vla_tabletop.study.catalogue import STUDIES
from vla_tabletop.study.runner import episode_seeds, run_conditions
from vla_tabletop.training.recipes import SHIPPED

EPISODES = 20
BUNDLES = {family: ROOT / 'engines' / name for family, name in SHIPPED.items()}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all((folder / 'policy.yaml').exists() for folder in BUNDLES.values()),
        reason='engines/ lacks a bundle of a family; `vla_runtime train-demo --family` makes it',
    ),
]


def _successes(condition, tmp_path):
    seeds = episode_seeds(0, EPISODES)
    results = run_conditions([condition], BUNDLES, seeds, tmp_path, progress=False)
    rate = SuccessRate(sum(episode.success for episode in results[condition]), EPISODES)
    failed = [(e.seed, e.family, e.outcome) for e in results[condition] if not e.success]
    return rate.successes, f'{rate}; failed: {failed}'


def _conditions(study, **wanted):
    return [
        condition
        for condition in STUDIES[study].conditions
        if all(getattr(condition, name) in values for name, values in wanted.items())
    ]


@pytest.mark.parametrize(
    'condition',
    _conditions('families'),
    ids=lambda condition: f'{condition.policy_family}-{"-".join(condition.families)}',
)
def test_a_family_does_its_task_in_unseen_scenes(condition, tmp_path):
    successes, what = _successes(condition, tmp_path)
    assert successes >= 16, what


@pytest.mark.parametrize(
    'condition',
    _conditions('families_replan', replan_interval=(8, 32)),
    ids=lambda condition: f'{condition.policy_family}-{condition.replan_interval}',
)
def test_a_family_does_its_task_at_the_usual_and_the_longest_replan_interval(condition, tmp_path):
    successes, what = _successes(condition, tmp_path)
    assert successes >= 16, what
