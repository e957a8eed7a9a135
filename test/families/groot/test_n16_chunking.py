"""GR00T N1.6 ties a chunk to the first rows of what it is given, through the runtime."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from family_contracts.groot import folder, stand_in
from groot_cases import N16, load_groot_case
from groot_n17_folders import is_of_a_folder
from network_cases import network_case_paths

from vla_runtime.export.conversion import plan_export, write_export
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.types import CommittedPlan

pytestmark = pytest.mark.cases
PATHS = [path for path in network_case_paths(N16) if is_of_a_folder(path)]


@pytest.mark.parametrize('path', PATHS, ids=lambda path: path.stem)
def test_the_rows_of_the_reference_are_the_first_ones(path: Path, tmp_path: Path, monkeypatch):
    stand_in(monkeypatch)
    of, case = folder(path, tmp_path), load_groot_case(path, 0)
    (recorded,) = of.recorded
    write_export(plan_export(of.path, of.options, default_name='n16'), tmp_path / 'bundle')
    options = case.description['rtc_options']
    overlap, frozen = options['rtc_overlap_steps'], options['rtc_frozen_steps']
    given = case.tensors['rtc_previous_chunk'][0].numpy()
    with closing(Policy.load(tmp_path / 'bundle', backend='torch')) as policy:
        # The reference's own form: rows of the given chunk in place of noise, held or slowed down.
        policy.infer(recorded.seen, noise=recorded.noise)
        x = np.array(recorded.noise)
        x[:overlap] = given[:overlap]
        share = np.ones(len(x))
        share[:frozen] = 0.0
        ramp = 1 - np.exp(-options['rtc_ramp_rate'] * np.linspace(0, 1, overlap - frozen + 2))
        share[frozen:overlap] = (ramp / ramp[-1])[1:-1]
        for k in range(case.steps):
            policy._engine.write_x(x.astype(np.float32))
            policy._engine.step(k)
            x = x - share[:, None] * policy._engine.read_velocity()[0] / case.steps
        expected = case.tensors['rtc_actions'][0].numpy()
        assert np.abs(x - expected).max() <= 5e-5 * max(1.0, np.abs(expected).max())

        # The runtime's form of it, from a plan in robot units: its first rows stay.
        real = policy.spec.horizon
        plan = policy._codec.actions(given[:real], recorded.seen).actions
        tied, report = policy.infer(
            recorded.seen,
            settings=PolicySettings(rtc_mode='hard_prefix', denoise_steps=case.steps),
            plan=CommittedPlan(plan, frozen, overlap),
            noise=recorded.noise,
        )
        assert report.rtc_mode == 'hard_prefix'
        held = np.abs(tied.actions - plan).max(axis=1)
        assert held[:frozen].max() <= 1e-4 < held[frozen:].max()
