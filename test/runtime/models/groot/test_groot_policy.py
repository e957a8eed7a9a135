"""GR00T through `Policy`: chunks tied as its training code does, and N1.6's prompts."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from family_contracts.groot import folder, folders, stand_in
from groot_cases import N16, N17, load_groot_case
from groot_n17_folders import is_of_a_folder
from network_cases import network_case_paths, relative_error
from onnx_bundles import write_onnx_once

from vla_convert.export.conversion import plan_export, write_export
from vla_runtime.inference.codec import PolicyCodec
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.types import CommittedPlan

pytestmark = pytest.mark.cases
PATHS = [path for path in network_case_paths(N16, N17) if is_of_a_folder(path)]


@pytest.mark.parametrize('backend', ['torch', 'onnxruntime'])
@pytest.mark.parametrize('path', PATHS, ids=lambda path: path.stem)
def test_frozen_chunks_are_the_references(path: Path, backend: str, tmp_path: Path, monkeypatch):
    stand_in(monkeypatch)
    of, case = folder(path, tmp_path), load_groot_case(path, 0)
    (recorded,) = of.recorded
    write_export(
        plan_export(of.path, of.options, default_name='groot'),
        tmp_path / 'bundle',
        finish=lambda target, spec: write_onnx_once(target, spec, 'float32'),
    )
    options = case.description['rtc_options']
    overlap, frozen = options['rtc_overlap_steps'], options['rtc_frozen_steps']
    previous, end = case.tensors['rtc_previous_chunk'][0].numpy(), options['action_horizon']
    # What the executor commits begins with the action that is due at the observation's time.
    given = np.zeros((case.network.dims.horizon, previous.shape[1]), np.float32)
    given[:overlap] = previous[end - overlap : end]
    settings = PolicySettings(rtc_mode='frozen', denoise_steps=case.steps)
    assert options['rtc_ramp_rate'] == 6.0
    expected = case.tensors['rtc_actions'][0].numpy()
    with closing(Policy.load(tmp_path / 'bundle', backend=backend)) as policy:
        real = policy.spec.real_horizon
        free, _ = policy.infer(recorded.seen, noise=recorded.noise)
        committed = policy._codec.actions(given[:real], recorded.seen).actions
        # The robot has fewer numbers than the padded chunk that the reference is given.
        with monkeypatch.context() as patch:
            patch.setattr(PolicyCodec, 'plan', lambda *_: given)
            plan = CommittedPlan(committed, frozen, overlap)
            tied, report = policy.infer(
                recorded.seen, settings=settings, plan=plan, noise=recorded.noise
            )
        assert report.rtc_mode == 'frozen'
        error = np.abs(tied.normalised - expected[: len(tied.normalised)]).max()
        assert error <= 5e-5 * max(1.0, np.abs(expected).max())

        # From the plan in robot units: the frozen rows are the plan's, those behind are let go.
        tied, report = policy.infer(
            recorded.seen, settings=settings, plan=plan, noise=recorded.noise
        )
        assert (report.rtc_mode, report.denoise_steps) == ('frozen', case.steps)
        moved = np.abs(tied.actions - committed).max(axis=1)
        assert moved[:frozen].max() <= 1e-4 < moved[frozen:].max()
        away = np.abs(free.actions - committed).max(axis=1)
        # Actions of random weights are clipped to their limits.
        assert (moved[:overlap] <= away[:overlap] + 1e-4).all()


@pytest.mark.parametrize('name', folders(N16))
def test_tasks_of_other_lengths_leave_the_images_in_their_places(
    name: str, tmp_path: Path, monkeypatch
):
    made = folders(N16)[name](tmp_path)
    made.prepare(monkeypatch)
    policies = []
    for length in (40, 49):
        options = replace(made.options, prompt_length=length)
        write_export(plan_export(made.path, options, default_name='n16'), tmp_path / str(length))
        policies.append(Policy.load(tmp_path / str(length)))
    (recorded,) = made.recorded
    for task in ('pick', 'pick up the red_cup now now now now'):
        seen = replace(recorded.seen, instruction=task)
        short, long = (policy.infer(seen, noise=recorded.noise)[0] for policy in policies)
        assert relative_error(short.normalised, torch.from_numpy(long.normalised)) <= 5e-5
