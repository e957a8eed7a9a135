"""Settings come back from the texts of a report exactly, and wrong ones are named."""

from __future__ import annotations

import math

import pytest

from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.messages.diagnostics import Level, StatusItem, to_message, values_of
from vla_runtime.nodes.policy.parameters import POLICY_PARAMETERS
from vla_runtime.nodes.policy.settings import live_settings, read_value, settings_from


def texts(**changes: object) -> dict[str, str]:
    """A report's texts of the node's defaults with changes."""
    from builtin_interfaces.msg import Time

    given = {row.name: row.default for row in POLICY_PARAMETERS if not row.read_only} | changes
    item = StatusItem('report', Level.OK, '', given)
    message = to_message([item], node='/n', hardware='', stamp=Time())
    return values_of(message.status[0])


def read(said: dict[str, str]) -> PolicySettings:
    return settings_from({name: read_value(name, said[name]) for name in live_settings()})


def test_defaults_come_back() -> None:
    assert read(texts()) == PolicySettings()


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
