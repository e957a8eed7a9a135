"""Each live parameter of the policy node reaches the setting that it names, and no other."""

from __future__ import annotations

from dataclasses import fields

from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.nodes.policy.parameters import INSTRUCTION, POLICY_PARAMETERS, limits_from
from vla_runtime.nodes.policy.settings import settings_from
from vla_runtime.sensors.synchronizer import SyncLimits

DEFAULTS = {row.name: row.default for row in POLICY_PARAMETERS}
# Of every live parameter a value that is allowed, is not the default, and is no other's.
CHANGED = {
    'max_observation_age_s': 0.25,
    'sync_tolerance_s': 0.02,
    'seed': 11,
    'denoise_steps': 7,
    'noise_scheduler': 'ddim',
    'cfg_enabled': False,
    'cfg_beta': 2.5,
    'cfg_mode': 'serial',
    'advantage': 'negative',
    'real_time_chunking': True,
    'rtc_mode': 'hard_prefix',
    'plan_schedule': 'linear',
    'max_guidance_weight': 4.5,
    'rtc_horizon': 5,
    'pipeline': 'throughput',
    'cache_mode': 'bounded',
    'cache_max_age_s': 0.75,
    'cache_max_reuses': 6,
    'cache_max_image_change': 1.25,
    'cache_max_state_bins': 9,
}
# What they mean, written by hand.
SETTINGS = PolicySettings(
    seed=11,
    denoise_steps=7,
    noise_scheduler='ddim',
    cfg_enabled=False,
    cfg_beta=2.5,
    cfg_mode='serial',
    advantage='negative',
    rtc_mode='hard_prefix',
    plan_schedule='linear',
    max_guidance_weight=4.5,
    rtc_horizon=5,
    cache=CachePolicy(
        mode='bounded', max_age_s=0.75, max_reuses=6, max_image_change=1.25, max_state_bins=9
    ),
    pipeline='throughput',
)
LIMITS = SyncLimits(tolerance_ns=20_000_000, max_age_ns=250_000_000)


def same(one: object, other: object) -> set[str]:
    """The fields in which two of a kind are equal."""
    return {row.name for row in fields(one) if getattr(one, row.name) == getattr(other, row.name)}


def test_defaults_are_the_policys_own():
    assert settings_from(DEFAULTS) == PolicySettings()
    tied = settings_from({**DEFAULTS, 'real_time_chunking': True})
    assert tied == PolicySettings(rtc_mode='guided')


def test_every_parameter_reaches_its_setting():
    live = {row.name: row for row in POLICY_PARAMETERS if not row.read_only}
    # What to do is no setting of how it is inferred.
    assert live.keys() - {INSTRUCTION} == CHANGED.keys()
    for name, value in CHANGED.items():
        row = live[name]
        assert type(value) is type(row.default) and value != row.default, name
        assert not row.words or value in row.words, name
        assert row.minimum is None or row.minimum <= value <= row.maximum, name
    given = {**DEFAULTS, **CHANGED}
    assert settings_from(given) == SETTINGS
    assert limits_from(given) == LIMITS
    # Nothing that can be set is left as it was, so there is a parameter for it.
    assert same(SETTINGS, PolicySettings()) == same(SETTINGS.cache, CachePolicy()) == set()
    assert same(LIMITS, limits_from(DEFAULTS)) == set()


def test_no_chunk_is_tied_unless_real_time_chunking_is_on_whatever_the_mode():
    assert settings_from({**DEFAULTS, 'rtc_mode': 'jacobian'}).rtc_mode == 'off'
