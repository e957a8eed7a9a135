"""GR00T N1.6 through `Policy`: the task stands before the images, padding in front of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family_contracts.groot import folders
from groot_cases import N16
from network_cases import relative_error

from vla_convert.export.conversion import plan_export, write_export
from vla_runtime.policy import Policy

pytestmark = pytest.mark.cases


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
