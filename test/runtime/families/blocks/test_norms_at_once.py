"""Norms in one operator, as on a GPU, beside their operators one by one."""

from __future__ import annotations

import pytest
import torch
from fused_networks import FUSED, prefix_of, tiny, velocity_of
from network_cases import relative_error

from vla_runtime.families.blocks import fused

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@pytest.mark.parametrize('family', FUSED)
@pytest.mark.parametrize('dtype', BOUNDS, ids=str)
def test_a_velocity_is_that_of_norms_one_by_one(family, dtype, monkeypatch):
    network = tiny(family, dtype)
    with torch.inference_mode():
        one_by_one = FUSED[family](network, True)
        expected, _ = velocity_of(one_by_one, prefix_of(one_by_one, 2))
        monkeypatch.setattr(fused, 'norms_at_once', lambda x: True)
        at_once = FUSED[family](network, True)
        found, _ = velocity_of(at_once, prefix_of(at_once, 2))
    assert relative_error(found, expected) <= BOUNDS[dtype]
