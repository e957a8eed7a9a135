"""Settings refuse by name what the networks cannot be given, before anything is computed."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.inference.settings import PolicySettings

BOUNDED = {'mode': 'bounded', 'max_age_s': 1.0, 'max_reuses': 1}
LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize('name', ['cfg_beta', 'max_guidance_weight'])
@pytest.mark.parametrize('value', [1e39, 10**400, float('inf'), float('nan')])
def test_a_number_that_is_none_in_float32_is_refused_by_name(name: str, value: float) -> None:
    """In the network it would be infinite, and the chunk would be blamed on the weights."""
    with pytest.raises(ValueError, match=f'{name} is .* finite number'):
        PolicySettings(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize('value', [1, 2.5, np.float32(3), np.float64(4), Fraction(5, 2), LARGEST])
def test_any_kind_of_number_that_float32_has_is_taken(value: Any) -> None:
    settings = PolicySettings(cfg_beta=value, max_guidance_weight=value)
    assert settings.cfg_beta == settings.max_guidance_weight == value


@pytest.mark.parametrize(
    ('name', 'value', 'words'),
    [
        ('max_age_s', '1', "'1': it must be a number"),
        ('max_age_s', True, 'True: it must be a number'),
        ('max_age_s', None, 'None: it must be a number'),
        ('max_age_s', 1e39, 'finite number of at least 0'),
        ('max_reuses', 1.5, '1.5: it must be a whole number'),
        ('max_reuses', True, 'True: it must be a whole number'),
        ('max_image_change', '8', "'8': it must be a number"),
        ('max_image_change', True, 'True: it must be a number'),
        ('max_state_bins', 2.0, '2.0: it must be a whole number'),
        ('max_state_bins', False, 'False: it must be a whole number'),
    ],
)
@pytest.mark.parametrize('mode', ['exact', 'bounded'])
def test_a_limit_of_the_cache_of_another_kind_is_refused_by_its_parameter(
    mode: str, name: str, value: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=f'^cache_{name} is .*{words}'):
        CachePolicy(**{**BOUNDED, 'mode': mode, name: value})


def test_limits_of_the_cache_may_be_numpy_numbers() -> None:
    limits = CachePolicy('bounded', np.float32(0.5), np.int64(3), np.float64(2), np.int32(1))
    assert (limits.max_age_s, limits.max_reuses) == (0.5, 3)
