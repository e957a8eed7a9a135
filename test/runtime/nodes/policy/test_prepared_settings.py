"""A live change that needs new CUDA graphs takes effect once they are there."""

from __future__ import annotations

import numpy as np
import pytest
from tensorrt_machine import Machine, linked_copy, write_exported_policy

from vla_runtime.cli.main import main
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.nodes.policy.prepared_settings import PreparedSettings
from vla_runtime.nodes.policy.settings import live_settings, settings_from
from vla_runtime.policy import Policy
from vla_runtime.types import Observation
from vla_tools.performance.bench import look

DEFAULTS = {name: row.default for name, row in live_settings().items()}


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    return write_exported_policy(tmp_path_factory.mktemp('prepared') / 'policy')


@pytest.fixture
def machine(monkeypatch, exported, tmp_path):
    def make(autotune: int) -> Machine:
        made = Machine(monkeypatch, linked_copy(exported, tmp_path / 'policy'))
        options = ('--precision', 'float32', '--autotune', str(autotune))
        assert main(['build', str(made.bundle), *options]) == 0
        return made

    return make


def test_new_steps_wait_for_their_graphs_and_the_first_chunk_captures_nothing(machine):
    here = machine(autotune=1)
    policy = Policy.load(here.bundle, 'tensorrt', 'cuda')
    policy.warm_up()
    values = {**DEFAULTS, 'instruction': 'push'}
    settings = PreparedSettings(policy, values)
    assert settings.of(values) == values and settings.prepare() == 0.0
    changed = {**values, 'denoise_steps': 5, 'cfg_beta': 2.5, 'instruction': 'pull'}
    for milliseconds_known in (False, True):
        # All of the settings before, and everything that is no setting of an inference.
        assert settings.of(changed) == {**values, 'instruction': 'pull'}
        assert settings.settings == settings_from(values)
        assert (settings.prepare() > 0.0) == milliseconds_known
    assert settings.of(changed) == changed
    assert settings.settings == settings_from(changed)
    policy.settings = settings.settings
    here.cuda.calls = []
    _, report = policy.infer(_observation(policy))
    assert report.denoise_steps == 5 and report.number == 0
    assert 'capture' not in here.cuda.calls and set(report.cuda_graph.values()) == {'captured'}
    policy.close()


@pytest.mark.thorough
def test_the_configured_number_of_steps_is_captured_at_load_as_often_as_the_build_said(machine):
    here = machine(autotune=3)
    captures = []
    for steps in (None, 5):
        here.cuda.calls = []
        configured = PolicySettings(denoise_steps=steps)
        policy = Policy.load(here.bundle, 'tensorrt', 'cuda', settings=configured)
        policy.warm_up()
        captures.append(here.cuda.calls.count('capture'))
        policy.close()
    # Vision, and prefix and denoise loop in four places.
    assert captures == [3 * (1 + 4 + 4)] * 2


def _observation(policy: Policy) -> Observation:
    images = dict.fromkeys(policy.spec.camera_names)
    images[policy.spec.camera_names[0]] = np.zeros((48, 64, 3), dtype=np.uint8)
    return look(policy.spec, images)


class Graphs:
    """In place of a policy: each number of denoise steps needs two graphs of its own."""

    def __init__(self) -> None:
        self.captured = {None: 2}
        self.fails = False

    def is_prepared(self, settings: PolicySettings) -> bool:
        return self.captured.get(settings.denoise_steps) == 2

    def prepare(self, settings: PolicySettings) -> bool:
        """Capture one of those that lack; return whether all are there."""
        if self.fails:
            raise RuntimeError('out of resource: shared memory')
        steps = settings.denoise_steps
        self.captured[steps] = min(self.captured.get(steps, 0) + 1, 2)
        return self.is_prepared(settings)


CHANGED = {**DEFAULTS, 'denoise_steps': 5}


def test_settings_of_the_start_are_prepared_or_an_error_that_says_what_to_set_back():
    policy = Graphs()
    settings = PreparedSettings(policy, CHANGED)
    assert policy.captured[5] == 2
    assert settings.of(CHANGED) == CHANGED and settings.prepare() == 0.0
    policy.fails = True
    with pytest.raises(ValueError, match='denoise_steps'):
        PreparedSettings(policy, CHANGED)


def test_graphs_are_captured_one_at_a_time_and_what_needs_none_begins_nothing_anew():
    policy = Graphs()
    settings = PreparedSettings(policy, DEFAULTS)
    for seed in (0, 7):
        assert settings.of({**CHANGED, 'seed': seed}) == {**DEFAULTS, 'denoise_steps': 0}
        assert (settings.prepare() > 0.0) == (seed == 7)
    assert policy.captured[5] == 2
    assert settings.of(CHANGED) == CHANGED
    for change in ({'cfg_enabled': True, 'cfg_beta': 2.0}, {'seed': 3}, {'denoise_steps': 0}):
        changed = {**CHANGED, **change}
        assert settings.of(changed) == changed and settings.prepare() == 0.0


def test_a_change_that_is_taken_back_prepares_nothing():
    policy = Graphs()
    settings = PreparedSettings(policy, DEFAULTS)
    settings.of(CHANGED)
    assert settings.of(DEFAULTS) == DEFAULTS and settings.prepare() == 0.0
    assert 5 not in policy.captured


@pytest.mark.parametrize('taken_back', [False, True])
def test_settings_that_cannot_be_prepared_are_tried_again_once_they_change(taken_back: bool):
    policy = Graphs()
    settings = PreparedSettings(policy, DEFAULTS)
    settings.of(CHANGED)
    policy.fails = True
    with pytest.raises(RuntimeError):
        settings.prepare()
    policy.fails = False
    assert settings.refused == ['denoise_steps']
    assert settings.of(CHANGED) == DEFAULTS and settings.prepare() == 0.0
    again = {**CHANGED, 'seed': 1}
    if taken_back:
        assert settings.of(DEFAULTS) == DEFAULTS and not settings.refused
        again = CHANGED
    for _ in range(2):
        assert settings.of(again) == DEFAULTS and not settings.refused
        settings.prepare()
    assert settings.of(again) == again
