"""From a GR00T N1.6 folder of NVIDIA's through `vla_runtime export` to the reference's actions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from groot_cases import N16, load_groot_case
from groot_n17_folders import (
    is_of_a_folder,
    joints_of,
    noise_of,
    observation_of,
    write_backbone,
    write_nvidia_folder,
)
from network_cases import network_case_paths, relative_error

from vla_runtime.cli.main import main
from vla_runtime.families.groot import n16_checkpoint
from vla_runtime.family.listing import find_family
from vla_runtime.policy import Policy
from vla_runtime.processing.prompt_layout import PromptLayout
from vla_runtime.types import CommittedPlan

pytestmark = pytest.mark.cases

# The cases' prompts are a stand-in: NVIDIA's has a system message and numbers the images.
STAND_IN = PromptLayout(
    '<|im_start|>user\n{task}{images}<|im_end|>\n',
    image='<img>{tokens}</img>',
    bos=False,
    special=('<|im_start|>', '<|im_end|>', '<img>', '</img>'),
)
LENGTH = 40


CASES = [path for path in network_case_paths(N16) if is_of_a_folder(path)]


def arguments(path: Path, tokenizer: Path) -> list[str]:
    d = json.loads(path.read_text())
    kinds = [kind for _, width, _, kind in d['groups'] for _ in range(width)]
    absolute = [
        name
        for name, kind in zip(joints_of(path, 'action'), kinds, strict=True)
        if kind == 'absolute'
    ]
    return [
        # Their ranges are random numbers, so no look at them can say that these are targets.
        *(('--target', ','.join(absolute)) if absolute else ()),
        *('--state-names', ','.join(joints_of(path))),
        *('--action-names', ','.join(joints_of(path, 'action'))),
        *('--units', 'deg', '--rate-hz', '30', '--prompt-length', str(LENGTH)),
        *('--image-size', f'{d["raw_height"]}x{d["raw_width"]}'),
        *('--tokenizer', str(tokenizer), '--heads', f'dit={d["dit_heads"]}'),
    ]


@pytest.fixture(scope='module', autouse=True)
def _stand_in_prompt():
    with pytest.MonkeyPatch.context() as patch:
        model = replace(n16_checkpoint._MODEL, prompt=STAND_IN)
        patch.setattr(n16_checkpoint, '_MODEL', model)
        patch.setitem(find_family(N16).templates, 'chat', STAND_IN)
        yield


@pytest.fixture(scope='module', params=CASES, ids=lambda path: path.stem)
def bundle(request, tmp_path_factory, _stand_in_prompt):
    path = request.param
    folder = write_nvidia_folder(tmp_path_factory.mktemp('n16') / 'policy', path)
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
    assert relative_error(chunk.normalised, case.tensors['actions'][0]) <= 5e-5
    expected = case.tensors['actions_robot_units'][0]
    assert chunk.actions.shape == expected.shape
    assert relative_error(chunk.actions, expected.double()) <= 5e-5


def test_tasks_of_other_lengths_leave_the_images_in_their_places(bundle, policy):
    """Padding in front changes nothing: a policy with longer prompts gives the same."""
    path, target = bundle
    long = target.parent / 'long'
    if not long.is_dir():
        folder, tokenizer = target.parent / 'policy', target.parent / 'backbone' / 'tokenizer.json'
        options = arguments(path, tokenizer)
        options[options.index(str(LENGTH))] = str(LENGTH + 9)
        assert main(['export', str(folder), '--out', str(long), *options]) == 0
    for task in ('pick', 'pick up the red_cup now now now now'):
        seen = replace(observation_of(path), instruction=task)
        chunks = [one.infer(seen, noise=noise_of(path))[0] for one in (policy, Policy.load(long))]
        assert relative_error(chunks[0].normalised, torch.from_numpy(chunks[1].normalised)) <= 5e-5


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
    assert np.isfinite(tied.actions).all()
