"""A live change that needs new CUDA graphs takes effect once they are there."""

from __future__ import annotations

import numpy as np
import pytest
from tensorrt_machine import Machine, linked_copy, write_exported_policy

from vla_runtime.cli.main import main
from vla_runtime.performance.bench import look
from vla_runtime.policy import Policy
from vla_runtime.ros.policy.prepared_settings import PreparedSettings
from vla_runtime.ros.policy.settings import live_settings, settings_from

DEFAULTS = {name: row.default for name, row in live_settings().items()}


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    return write_exported_policy(tmp_path_factory.mktemp('prepared') / 'policy')


@pytest.fixture
def here(monkeypatch, exported, tmp_path) -> Machine:
    machine = Machine(monkeypatch, linked_copy(exported, tmp_path / 'policy'))
    assert main(['build', str(machine.bundle), '--precision', 'float32', '--autotune', '1']) == 0
    return machine


def test_new_steps_wait_for_their_graphs_and_the_first_chunk_captures_nothing(here):
    policy = Policy.load(here.bundle, 'tensorrt', 'cuda')
    policy.warm_up()
    settings = PreparedSettings(policy)
    values = {**DEFAULTS, 'instruction': 'push'}
    assert settings.of(values) == values and settings.prepare() == 0.0
    changed = {**values, 'denoise_steps': 5, 'cfg_beta': 2.5, 'instruction': 'pull'}
    # All of the settings before, and everything that is no setting of an inference.
    assert settings.of(changed) == {**values, 'instruction': 'pull'}
    assert settings.prepare() > 0.0
    assert settings.of(changed) == changed
    policy.settings = settings_from(changed)
    here.cuda.calls = []
    images = dict.fromkeys(policy.spec.camera_names)
    images[policy.spec.camera_names[0]] = _image()
    _, report = policy.infer(look(policy.spec, images))
    assert report.denoise_steps == 5 and report.number == 0
    assert 'capture' not in here.cuda.calls and set(report.cuda_graph.values()) == {'captured'}
    policy.close()


def test_what_needs_no_graph_takes_effect_at_once(here):
    policy = Policy.load(here.bundle, 'tensorrt', 'cuda')
    policy.warm_up()
    settings = PreparedSettings(policy)
    settings.of(DEFAULTS)
    changed = {**DEFAULTS, 'cfg_enabled': True, 'cfg_beta': 2.0, 'seed': 3}
    assert settings.of(changed) == changed
    policy.close()


def test_a_change_that_is_taken_back_prepares_nothing(here):
    policy = Policy.load(here.bundle, 'tensorrt', 'cuda')
    policy.warm_up()
    settings = PreparedSettings(policy)
    settings.of(DEFAULTS)
    settings.of({**DEFAULTS, 'denoise_steps': 5})
    assert settings.of(DEFAULTS) == DEFAULTS and settings.prepare() == 0.0
    policy.close()


def test_without_graphs_every_change_takes_effect_at_once(here):
    policy = Policy.load(here.bundle, 'torch', 'cpu')
    settings = PreparedSettings(policy)
    settings.of(DEFAULTS)
    changed = {**DEFAULTS, 'denoise_steps': 5}
    assert settings.of(changed) == changed
    policy.close()


def _image() -> np.ndarray:
    return np.zeros((48, 64, 3), dtype=np.uint8)
