"""`ros2 param describe` shows one parameter: its text says by itself what it works on, and when."""

from __future__ import annotations

import pytest
import yaml
from paths import ROOT

from vla_runtime.nodes.node_parameters import NODE_PARAMETERS
from vla_runtime.nodes.policy.parameters import POLICY_PARAMETERS
from vla_tabletop.nodes.parameters import TABLETOP_PARAMETERS

DESCRIPTIONS = {row.name: row.description for row in POLICY_PARAMETERS}
CONFIG = ROOT / 'config' / 'policy.yaml'


@pytest.mark.parametrize(
    ('name', 'words'),
    [
        ('cfg_beta', ['guidance', 'advantage']),
        ('cfg_mode', ['guidance', 'cfg_beta', 'fused', 'serial', 'auto']),
        ('advantage', ['prompt', 'advantage tags']),
        ('real_time_chunking', ['committed plan', 'rtc_mode']),
        (
            'rtc_mode',
            ['real_time_chunking', 'committed plan', 'guided', 'jacobian', 'hard_prefix'],
        ),
        ('plan_schedule', ['committed plan', 'real_time_chunking']),
        ('max_guidance_weight', ['committed plan', 'real_time_chunking', 'guided and jacobian']),
        ('rtc_horizon', ['committed plan', 'real_time_chunking']),
        # What it needs, what it does not do, and what it costs.
        (
            'pipeline',
            [
                *('replan_interval', 'vla_executor', 'two requests', 'older observation'),
                *('CPU', 'torch_threads', 'packed', 'tokens', 'backend torch'),
            ],
        ),
        ('torch_threads', ['each network', 'pipeline', 'throughput']),
        ('cache_mode', ['image tokens', 'exact', 'bounded', 'off']),
        ('cache_max_age_s', ['cache_mode bounded']),
        ('cache_max_reuses', ['cache_mode bounded']),
        ('cache_max_image_change', ['cache_mode bounded']),
        ('cache_max_state_bins', ['cache_mode bounded']),
    ],
)
def test_a_description_names_what_its_parameter_works_with(name: str, words: list[str]) -> None:
    assert [word for word in words if word not in DESCRIPTIONS[name]] == []


def test_no_description_leans_on_the_one_before_it() -> None:
    leaning = ('that tie', 'how:', 'of the ', 'bounded:')
    assert [name for name, text in DESCRIPTIONS.items() if text.startswith(leaning)] == []
    assert [name for name, text in DESCRIPTIONS.items() if 'that tie' in text] == []


def test_the_config_file_says_what_throughput_needs_and_has_every_parameter() -> None:
    text = CONFIG.read_text()
    given = yaml.safe_load(text)['/**']['ros__parameters']
    assert set(given) == set(DESCRIPTIONS) - {'bundle', 'robot', 'backend'}
    comment = text[: text.index('    pipeline:')].rpartition('rtc_horizon:')[2]
    for word in ('overlap', 'vla_executor', 'torch_threads'):
        assert word in comment


def test_the_names_of_the_simulated_robots_parameters_are_those_of_its_table() -> None:
    assert NODE_PARAMETERS['tabletop'] == tuple(row.name for row in TABLETOP_PARAMETERS)
