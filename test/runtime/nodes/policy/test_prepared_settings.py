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
from vla_runtime.types import Observation, Reuse
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


@pytest.fixture
def here(machine) -> Machine:
    return machine(autotune=1)


def test_new_steps_wait_for_their_graphs_and_the_first_chunk_captures_nothing(here):
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


def test_settings_of_the_start_are_prepared_before_the_first_request(here):
    policy = Policy.load(here.bundle, 'tensorrt', 'cuda')
    policy.warm_up()
    values = {**DEFAULTS, 'denoise_steps': 5}
    settings = PreparedSettings(policy, values)
    here.cuda.calls = []
    assert settings.of(values) == values and settings.prepare() == 0.0
    policy.settings = settings_from(values)
    policy.infer(_observation(policy))
    assert 'capture' not in here.cuda.calls
    policy.close()


def test_settings_that_cannot_be_prepared_at_the_start_are_an_error(here):
    policy = Policy.load(here.bundle, 'tensorrt', 'cuda')
    policy.warm_up()
    here.cuda.total_bytes = here.cuda.used_bytes
    with pytest.raises(ValueError, match='denoise_steps'):
        PreparedSettings(policy, {**DEFAULTS, 'denoise_steps': 5})
    policy.close()


def test_a_request_during_a_change_waits_for_one_capture_and_gets_the_chunk_of_before(
    machine,
):
    here = machine(autotune=3)
    policy, untouched = (Policy.load(here.bundle, 'tensorrt', 'cuda') for _ in range(2))
    policy.warm_up()
    settings = PreparedSettings(policy, DEFAULTS)
    captures = []
    # Another seed needs no other graphs, and does not begin again.
    for seed in (0, 7):
        settings.of({**DEFAULTS, 'denoise_steps': 5, 'seed': seed})
        here.cuda.calls = []
        settings.prepare()
        captures.append(here.cuda.calls.count('capture'))
        between, expected = (one.infer(_observation(one))[0] for one in (policy, untouched))
        np.testing.assert_array_equal(between.actions, expected.actions)
    # Without guidance, then with it.
    assert captures == [1, 1]
    assert policy.is_prepared(settings_from({**DEFAULTS, 'denoise_steps': 5}))
    for one in (policy, untouched):
        one.close()


def test_what_needs_no_graph_takes_effect_at_once(here):
    policy = Policy.load(here.bundle, 'tensorrt', 'cuda')
    policy.warm_up()
    settings = PreparedSettings(policy, DEFAULTS)
    for change in (
        {'cfg_enabled': True, 'cfg_beta': 2.0, 'seed': 3},
        # All four places were captured at load, and the plan is one of the loop's inputs.
        {'real_time_chunking': True, 'rtc_mode': 'guided'},
        {'real_time_chunking': True, 'rtc_mode': 'hard_prefix'},
        {'cfg_mode': 'serial'},
    ):
        changed = {**DEFAULTS, **change}
        assert settings.of(changed) == changed
        assert settings.prepare() == 0.0
    policy.close()


def test_a_change_that_is_taken_back_prepares_nothing(here):
    policy = Policy.load(here.bundle, 'tensorrt', 'cuda')
    policy.warm_up()
    settings = PreparedSettings(policy, DEFAULTS)
    settings.of({**DEFAULTS, 'denoise_steps': 5})
    assert settings.of(DEFAULTS) == DEFAULTS and settings.prepare() == 0.0
    policy.close()


@pytest.mark.thorough
def test_settings_that_cannot_be_prepared_are_tried_again_once_they_change(here):
    policy = Policy.load(here.bundle, 'tensorrt', 'cuda')
    policy.warm_up()
    settings = PreparedSettings(policy, DEFAULTS)
    changed = {**DEFAULTS, 'denoise_steps': 5}
    assert settings.of(changed) == DEFAULTS
    total, here.cuda.total_bytes = here.cuda.total_bytes, here.cuda.used_bytes
    with pytest.raises(RuntimeError, match='OUT_OF_MEMORY'):
        settings.prepare()
    here.cuda.total_bytes, here.cuda.calls = total, []
    assert settings.refused == ['denoise_steps']
    assert settings.of(changed) == DEFAULTS and settings.prepare() == 0.0
    assert not here.cuda.calls
    # Black, as the image that failed.
    _, report = policy.infer(_observation(policy))
    assert {outcome.reuse for outcome in report.cache.images.values()} == {Reuse.MISS}
    again = {**changed, 'seed': 1}
    for _ in range(2):
        assert settings.of(again) == DEFAULTS and not settings.refused
        settings.prepare()
    assert settings.of(again) == again
    policy.close()


def test_a_refused_change_that_is_taken_back_is_forgotten(here):
    policy = Policy.load(here.bundle, 'tensorrt', 'cuda')
    policy.warm_up()
    settings = PreparedSettings(policy, DEFAULTS)
    changed = {**DEFAULTS, 'denoise_steps': 5}
    settings.of(changed)
    total, here.cuda.total_bytes = here.cuda.total_bytes, here.cuda.used_bytes
    with pytest.raises(RuntimeError, match='OUT_OF_MEMORY'):
        settings.prepare()
    here.cuda.total_bytes = total
    assert settings.of(DEFAULTS) == DEFAULTS and not settings.refused
    settings.of(changed)
    assert not settings.refused and settings.prepare() == 0.0
    settings.of(changed)
    assert settings.prepare() > 0.0
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


def test_without_graphs_every_change_takes_effect_at_once(here):
    policy = Policy.load(here.bundle, 'torch', 'cpu')
    settings = PreparedSettings(policy, DEFAULTS)
    changed = {**DEFAULTS, 'denoise_steps': 5}
    assert settings.of(changed) == changed
    policy.close()


def _observation(policy: Policy) -> Observation:
    images = dict.fromkeys(policy.spec.camera_names)
    images[policy.spec.camera_names[0]] = np.zeros((48, 64, 3), dtype=np.uint8)
    return look(policy.spec, images)


def test_an_error_of_any_kind_at_the_start_says_which_settings_to_set_back():
    class Failing:
        def prepare(self, settings: PolicySettings) -> bool:
            raise Exception('out of resource: shared memory')

    with pytest.raises(ValueError, match='denoise_steps'):
        PreparedSettings(Failing(), dict(DEFAULTS))
