"""Settings refuse by name what the networks cannot be given, before anything is computed."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.inference.settings import PolicySettings

BOUNDED = {'mode': 'bounded', 'max_age_s': 1.0, 'max_reuses': 1}


@pytest.mark.parametrize('name', ['cfg_beta', 'max_guidance_weight'])
@pytest.mark.parametrize('value', [1e39, 10**400, -1.0, float('inf'), float('nan')])
def test_a_number_outside_the_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f'^{name} is '):
        PolicySettings(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize('value', [1, 2.5, np.float32(3), np.float64(4), Fraction(5, 2)])
def test_any_kind_of_number_is_taken(value: Any) -> None:
    settings = PolicySettings(cfg_beta=value, max_guidance_weight=value)
    assert settings.cfg_beta == settings.max_guidance_weight == value


@pytest.mark.parametrize(
    ('name', 'value'),
    [
        ('max_age_s', '1'),
        ('max_age_s', True),
        ('max_age_s', None),
        ('max_age_s', 1e39),
        ('max_reuses', 1.5),
        ('max_reuses', True),
        ('max_image_change', '8'),
        ('max_image_change', True),
        ('max_state_bins', 2.0),
        ('max_state_bins', False),
    ],
)
@pytest.mark.parametrize('mode', ['exact', 'bounded'])
def test_a_limit_of_the_cache_of_another_kind_is_refused_by_its_parameter(
    mode: str, name: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=f'^cache_{name} is '):
        CachePolicy(**{**BOUNDED, 'mode': mode, name: value})


def test_limits_of_the_cache_may_be_numpy_numbers() -> None:
    limits = CachePolicy('bounded', np.float32(0.5), np.int64(3), np.float64(2), np.int32(1))
    assert (limits.max_age_s, limits.max_reuses) == (0.5, 3)
