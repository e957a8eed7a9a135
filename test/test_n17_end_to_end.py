"""From a GR00T N1.7 folder through `vla_runtime export` to the reference's actions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from groot_cases import N17, load_groot_case
from groot_n17_folders import (
    is_of_a_folder,
    joints_of,
    noise_of,
    observation_of,
    write_backbone,
    write_lerobot_folder,
)
from network_cases import network_case_paths, relative_error

from vla_runtime.cli.main import main
from vla_runtime.policy import Policy
from vla_runtime.types import CommittedPlan

pytestmark = pytest.mark.cases


CASES = [path for path in network_case_paths(N17) if is_of_a_folder(path)]


def arguments(path: Path, tokenizer: Path) -> list[str]:
    d = json.loads(path.read_text())
    heads = f'dit={d["dit_heads"]}'
    if d['vlsa_layers']:
        heads += f',context={d["vlsa_heads"]}'
    return [
        *('--state-names', ','.join(joints_of(path))),
        *('--action-names', ','.join(joints_of(path, 'action'))),
        *('--units', 'deg', '--rate-hz', '30', '--prompt-length', '40'),
        *('--tokenizer', str(tokenizer), '--heads', heads),
    ]


@pytest.fixture(scope='module', params=CASES, ids=lambda path: path.stem)
def bundle(request, tmp_path_factory):
    path = request.param
    folder = write_lerobot_folder(tmp_path_factory.mktemp('n17') / 'policy', path)
    tokenizer = write_backbone(folder.parent / 'backbone', path)
    target = folder.parent / 'bundle'
    assert main(['export', str(folder), '--out', str(target), *arguments(path, tokenizer)]) == 0
    return path, target


@pytest.fixture(scope='module', params=['torch', 'onnxruntime'])
def policy(request, bundle):
    return Policy.load(bundle[1], backend=request.param)


def test_an_observation_gives_the_reference_s_actions(bundle, policy):
    path, _ = bundle
    case = load_groot_case(path, 0)
    chunk, report = policy.infer(observation_of(path), noise=noise_of(path))
    assert report.tokens == (len(case.rows()['tokens'][0]),)
    assert relative_error(chunk.normalised, case.tensors['actions'][0]) <= 1e-4
    expected = case.tensors['actions_robot_units'][0]
    assert chunk.actions.shape == expected.shape
    assert relative_error(chunk.actions, expected.double()) <= 1e-4


def test_a_cache_hit_changes_nothing_and_the_state_is_not_in_its_key(bundle, policy):
    seen = observation_of(bundle[0])
    moved = replace(seen, state=seen.state + 0.25)
    policy.reset()
    policy.infer(seen)
    kept, report = policy.infer(moved, noise=noise_of(bundle[0]))
    assert (report.runs['vision'], report.runs['prefix']) == (0, 0)
    policy.reset()
    anew, report = policy.infer(moved, noise=noise_of(bundle[0]))
    assert report.runs['prefix'] == 1
    np.testing.assert_array_equal(kept.normalised, anew.normalised)


def test_guidance_is_refused_without_tags(bundle, policy):
    fresh = policy.settings
    with pytest.raises(ValueError, match='trained without advantage tags'):
        policy.settings = replace(fresh, cfg_enabled=True, cfg_beta=1.5)
        policy.infer(observation_of(bundle[0]))
    policy.settings = fresh


def test_real_time_chunking_ties_a_chunk_to_the_plan(bundle, policy):
    seen, drawn = observation_of(bundle[0]), noise_of(bundle[0])
    free, _ = policy.infer(seen, noise=drawn)
    plan = CommittedPlan(actions=free.actions[2:] + 0.5, delay_steps=2, execution_horizon=4)
    fresh = policy.settings
    policy.settings = replace(fresh, rtc_mode='guided')
    tied, report = policy.infer(seen, noise=drawn, plan=plan)
    policy.settings = fresh
    assert report.rtc_mode == 'guided'
    wanted = plan.actions[:2]
    assert np.abs(tied.actions[:2] - wanted).mean() < np.abs(free.actions[:2] - wanted).mean()
    assert torch.isfinite(torch.from_numpy(tied.actions)).all()
