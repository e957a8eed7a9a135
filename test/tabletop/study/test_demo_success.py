"""The policy that ships with the package still does its task."""

import pytest
from paths import ROOT

from vla_tabletop.sim.success_rate import SuccessRate
from vla_tabletop.study.condition import Condition
from vla_tabletop.study.runner import episode_seeds, run_conditions

DEMO = ROOT / 'engines' / 'demo'


@pytest.mark.slow
@pytest.mark.skipif(
    not (DEMO / 'policy.yaml').exists(),
    reason='engines/demo is not there: make it with `vla_runtime train-demo --out engines/demo`',
)
def test_the_demo_policy_succeeds_in_at_least_17_of_20_unseen_scenes(tmp_path):
    condition = Condition()
    results = run_conditions([condition], DEMO, episode_seeds(0, 20), tmp_path, progress=False)
    rate = SuccessRate(sum(episode.success for episode in results[condition]), 20)
    failed = [(e.seed, e.family, e.outcome) for e in results[condition] if not e.success]
    assert rate.rate >= 0.85, f'{rate}; failed: {failed}'
