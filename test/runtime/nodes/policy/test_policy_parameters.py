"""Each live parameter of the policy node reaches its setting, and comes back from a report."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import yaml
from builtin_interfaces.msg import Time
from paths import ROOT

from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.messages.diagnostics import Level, StatusItem, to_message, values_of
from vla_runtime.nodes.policy.parameters import INSTRUCTION, POLICY_PARAMETERS, limits_from
from vla_runtime.nodes.policy.settings import live_settings, read_value, settings_from
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


def test_the_config_file_has_every_parameter():
    given = yaml.safe_load((ROOT / 'config' / 'policy.yaml').read_text())['/**']['ros__parameters']
    assert set(given) == set(DEFAULTS) - {'bundle', 'server', 'robot', 'backend'}


# ---------------------------------------------------------------- from the texts of a report


def texts(**changes: object) -> dict[str, str]:
    """A report's texts of the node's defaults with changes."""
    given = {row.name: row.default for row in POLICY_PARAMETERS if not row.read_only} | changes
    item = StatusItem('report', Level.OK, '', given)
    message = to_message([item], node='/n', hardware='', stamp=Time())
    return values_of(message.status[0])


def read(said: dict[str, str]) -> PolicySettings:
    return settings_from({name: read_value(name, said[name]) for name in live_settings()})


def test_floats_come_back_to_the_last_bit() -> None:
    beta, age = 1.0 + math.pi / 7, 0.1 + 0.2
    said = texts(
        cfg_enabled=True,
        cfg_beta=beta,
        cache_mode='bounded',
        cache_max_age_s=age,
        cache_max_reuses=3,
        denoise_steps=7,
        real_time_chunking=True,
        seed=2**62 + 1,
    )
    assert read(said) == PolicySettings(
        cfg_enabled=True,
        cfg_beta=beta,
        cache=CachePolicy('bounded', age, 3),
        denoise_steps=7,
        rtc_mode='guided',
        seed=2**62 + 1,
    )


def test_every_setting_of_the_core_is_a_parameter_of_the_node() -> None:
    of_node = {row.name: row for row in POLICY_PARAMETERS}
    for name, row in live_settings().items():
        parameter = of_node[name]
        assert (parameter.default, parameter.description) == (row.default, row.description)
        assert parameter.words == row.words


@pytest.mark.parametrize(
    ('name', 'text', 'words'),
    [
        ('cfg_bta', '1.5', "'cfg_bta'"),
        ('cfg_beta', 'much', 'cfg_beta'),
        ('cfg_beta', '0.5', 'cfg_beta'),
        ('cfg_beta', 'nan', 'cfg_beta'),
        ('denoise_steps', '2.5', 'denoise_steps'),
        ('cfg_enabled', 'yes', 'cfg_enabled'),
        ('rtc_mode', 'off', 'rtc_mode'),
        ('cache_mode', 'loose', 'cache_mode'),
    ],
)
def test_what_is_no_setting_or_no_value_is_named(name: str, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_value(name, text)
