"""Ties of a chunk to the committed plan, mode by mode, against loops written for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from guided_policies import NOISE, codec_of, load_policy, policy_on_engine, write_guided
from hypothesis import given
from hypothesis import strategies as st
from thorough import thorough_but
from tiny_policy import observation, tiny_spec, write_tiny_policy

from vla_runtime.engines.torch.engine import TorchEngine
from vla_runtime.inference.denoise import flow_times
from vla_runtime.inference.real_time_chunking import (
    clamp_weights,
    guidance_weights,
    moving_shares,
)
from vla_runtime.policy import Policy
from vla_runtime.types import CommittedPlan

STEPS = 10
ROWS = np.cumsum(np.full((6, 3), 0.1), axis=0)
MODES = ('guided', 'jacobian', 'hard_prefix')
families = pytest.mark.parametrize(
    'family', thorough_but(['pi05', 'smolvla'], ['pi05', 'pi0', 'smolvla'])
)
modes = pytest.mark.parametrize('mode', MODES)


@pytest.fixture(scope='module')
def bundles(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp('bundles')
    made = {family: write_guided(folder, family) for family in ('pi05', 'pi0', 'smolvla')}
    for family in ('pi05', 'pi0', 'smolvla'):
        spec = replace(tiny_spec(family), trained_delay_steps=3)
        made[f'trained {family}'] = write_tiny_policy(folder / f'trained {family}', spec)
    return made


def committed(delay: int, horizon: int = 6, rows: np.ndarray = ROWS) -> CommittedPlan:
    return CommittedPlan(rows, delay_steps=delay, execution_horizon=horizon)


def infer(bundle: Path, mode: str, plan: CommittedPlan | None, **settings):
    policy = load_policy(bundle, rtc_mode=mode, denoise_steps=STEPS, **settings)
    return policy.infer(observation(), plan=plan, noise=NOISE)


@given(
    steps=st.integers(1, 50),
    clamped=st.integers(0, 8),
    noise=st.floats(-4, 4),
    plan=st.floats(-4, 4),
    velocity=st.floats(-20, 20),
)
def test_clamp_weights_hold_an_action_on_its_straight_path(steps, clamped, noise, plan, velocity):
    times = flow_times(steps)
    weights = clamp_weights(times, clamped, 8)
    assert (weights[:, clamped:] == 0).all()
    x = noise
    for t, weight in zip(times, weights, strict=True):
        assert x == pytest.approx(t * noise + (1 - t) * plan, abs=1e-4)
        if clamped:
            tied = velocity - float(weight[0]) * (plan - (x - t * velocity))
            x += -1 / steps * tied
        else:
            return
    assert x == pytest.approx(plan, abs=1e-4)


@pytest.mark.parametrize('mode', ['guided', 'jacobian'])
@pytest.mark.parametrize('maximum', [0.0, 2.0, 100.0])
def test_the_tie_is_never_stronger_than_the_maximum_guidance_weight(bundles, mode, maximum):
    """At flow time 1 the paper's weight is infinite: there the maximum is all that bounds it."""
    policy = load_policy(
        bundles['pi05'], rtc_mode=mode, max_guidance_weight=maximum, denoise_steps=STEPS
    )
    request = policy._builder.build(
        observation(), policy.settings, 0, plan=committed(2), noise=NOISE
    )
    weights = request.inputs.plan_weight
    assert weights.max() == weights[0, 0] == maximum
    np.testing.assert_array_equal(
        weights[:, 0], np.float32(guidance_weights(request.times, maximum))
    )
    assert (weights[1, 0] < maximum) == (maximum == 100.0)


@pytest.mark.parametrize(
    ('bundle', 'mode', 'expected'),
    [
        ('pi05', 'guided', {(False, 0)}),
        ('pi05', 'jacobian', {(False, 0), (True, 0)}),
        ('trained pi05', 'hard_prefix', {(False, 0), (False, 3)}),
    ],
)
def test_warming_up_runs_the_expert_that_a_plan_will_call_for(
    bundles, monkeypatch, bundle, mode, expected
):
    """A graph is captured at its first run; the first tied inference is not to pay for it."""
    policy = load_policy(bundles[bundle], rtc_mode=mode, pipeline='throughput')
    real, seen = TorchEngine.load_step_inputs, set()

    def load_step_inputs(self, inputs):
        seen.add((inputs.jacobian, inputs.clean_actions))
        real(self, inputs)

    monkeypatch.setattr(TorchEngine, 'load_step_inputs', load_step_inputs)
    policy.warm_up()
    assert seen == expected
    policy.close()


@families
@pytest.mark.parametrize('delay', [1, 4, 6])
def test_a_hard_prefix_is_clamped_at_every_step(bundles, family, delay):
    """Against RePaint's loop: overwrite, run the network, move on; no weights anywhere."""
    policy, engine = policy_on_engine(bundles[family], rtc_mode='hard_prefix', denoise_steps=STEPS)
    plan = codec_of(bundles[family]).plan(committed(delay), observation())
    chunk, report = policy.infer(observation(), plan=committed(delay), noise=NOISE)
    np.testing.assert_array_equal(chunk.normalised[:delay], plan[:delay])
    assert (report.rtc_mode, report.clean_steps) == ('hard_prefix', 0)

    # The engine still holds prefix and state; without a tie its velocity is the network's.
    unconditioned = replace(policy.settings, rtc_mode='off')
    free = policy._builder.build(observation(), unconditioned, 0, noise=NOISE)
    engine.load_step_inputs(free.inputs)
    x = NOISE.copy()
    for k in range(STEPS):
        t = 1 - k / STEPS
        x[:delay] = t * NOISE[:delay] + (1 - t) * plan[:delay]
        engine.write_x(x)
        engine.step(k)
        x = x - engine.read_velocity()[0] / STEPS
    np.testing.assert_allclose(chunk.normalised[delay:], x[delay:], atol=5e-5)


@families
@pytest.mark.parametrize('delay', [1, 3])
def test_a_policy_trained_with_known_actions_sees_them_at_flow_time_zero(bundles, family, delay):
    """Against a loop over the network with a time for every action (arXiv 2512.05964)."""
    bundle = bundles[f'trained {family}']
    policy, engine = policy_on_engine(bundle, 1, rtc_mode='hard_prefix', denoise_steps=STEPS)
    codec = codec_of(bundle)
    plan = codec.plan(committed(delay), observation())
    chunk, report = policy.infer(observation(), plan=committed(delay), noise=NOISE)
    np.testing.assert_array_equal(chunk.normalised[:delay], plan[:delay])
    assert report.clean_steps == delay
    np.testing.assert_array_equal(report.noise, NOISE)

    network, slot = engine._network, engine._buffers[1].slots[0]
    rows = codec.rows(observation().instruction, codec.check(observation()), (None,))
    head = {
        name: torch.from_numpy(rows[name]) for name in network.family.head_inputs(policy.spec.dims)
    }
    x = torch.from_numpy(NOISE.copy())
    for k in range(STEPS):
        x[:delay] = torch.from_numpy(plan[:delay])
        times = torch.full((8,), 1 - k / STEPS)
        times[:delay] = 0.0
        with torch.no_grad():
            velocity = network.velocity(
                x[None],
                slot,
                torch.cat([network.time_conditioning(t[None]) for t in times])[None],
                **head,
            )
        x = x - velocity[0] / STEPS
    np.testing.assert_allclose(chunk.normalised[delay:], x[delay:].numpy(), atol=5e-5)
    untrained = replace(policy.spec, trained_delay_steps=0)
    policy._builder._spec = untrained
    other, _ = policy.infer(observation(), plan=committed(delay), noise=NOISE)
    assert np.abs(other.normalised[delay:] - chunk.normalised[delay:]).max() > 1e-3


def test_a_delay_beyond_the_trained_one_is_clamped_and_reported(bundles):
    policy = load_policy(bundles['trained pi05'], 1, rtc_mode='hard_prefix', denoise_steps=STEPS)
    chunk, report = policy.infer(observation(), plan=committed(5), noise=NOISE)
    assert report.clean_steps == 3
    plan = codec_of(bundles['trained pi05']).plan(committed(5), observation())
    np.testing.assert_array_equal(chunk.normalised[:5], plan[:5])


@modes
@families
def test_each_mode_draws_the_chunk_to_the_plan(bundles, family, mode):
    free = infer(bundles[family], mode, None)
    assert free[1].rtc_mode == 'off'
    tied, report = infer(bundles[family], mode, committed(4))
    assert report.rtc_mode == mode
    distance = np.abs(tied.actions[:4] - ROWS[:4]).mean()
    assert distance < 0.3 * np.abs(free[0].actions[:4] - ROWS[:4]).mean()


def test_only_the_hard_prefix_is_the_plan_exactly(bundles):
    """LeRobot's frozen part is not frozen; this is what the third mode is for."""
    distance = {
        mode: np.abs(infer(bundles['pi05'], mode, committed(3))[0].actions[:3] - ROWS[:3]).max()
        for mode in MODES
    }
    assert distance['hard_prefix'] < 1e-6
    assert distance['guided'] > 1e-4
    assert distance['jacobian'] > 1e-4


def test_the_modes_differ(bundles):
    chunks = [infer(bundles['pi05'], mode, committed(3))[0].actions for mode in MODES]
    for i, chunk in enumerate(chunks):
        for other in chunks[:i]:
            assert np.abs(chunk - other).max() > 1e-3


@modes
def test_a_short_plan_is_held_and_binds_nothing_beyond_its_end(bundles, mode):
    long = np.concatenate([ROWS[:3], np.full((5, 3), 7.0)])
    short, _ = infer(bundles['pi05'], mode, committed(2, 8, ROWS[:3]))
    same, _ = infer(bundles['pi05'], mode, committed(2, 3, long))
    # Through the Jacobian a difference far along the plan would show, were its weight not zero.
    np.testing.assert_array_equal(short.actions, same.actions)


def test_a_delay_longer_than_the_plan_clamps_what_there_is(bundles):
    chunk, _ = infer(bundles['pi05'], 'hard_prefix', committed(6, 6, ROWS[:2]))
    np.testing.assert_allclose(chunk.actions[:2], ROWS[:2], atol=1e-6)


@pytest.mark.parametrize('mode', ['guided', 'jacobian'])
def test_the_horizon_of_the_tie_can_be_shortened_to_the_delay_and_no_further(bundles, mode):
    whole, _ = infer(bundles['pi05'], mode, committed(2))
    shorter, _ = infer(bundles['pi05'], mode, committed(2), rtc_horizon=4)
    expected, _ = infer(bundles['pi05'], mode, committed(2, 4))
    np.testing.assert_array_equal(shorter.actions, expected.actions)
    assert not np.array_equal(shorter.actions, whole.actions)
    least, _ = infer(bundles['pi05'], mode, committed(2), rtc_horizon=1)
    np.testing.assert_array_equal(
        least.actions, infer(bundles['pi05'], mode, committed(2, 2))[0].actions
    )


@pytest.mark.parametrize('mode', ['hard_prefix', 'off'])
def test_without_a_delay_or_a_mode_the_chunk_is_free(bundles, mode):
    free, _ = infer(bundles['pi05'], mode, None)
    tied, report = infer(bundles['pi05'], mode, committed(4 if mode == 'off' else 0))
    assert report.rtc_mode == 'off', 'an executor must not take it for a chunk that continues'
    np.testing.assert_array_equal(tied.actions, free.actions)


@modes
def test_toggling_a_mode_leaves_nothing_behind(bundles, mode):
    policy = load_policy(bundles['pi05'], denoise_steps=STEPS)

    def ask(rtc_mode: str) -> np.ndarray:
        policy.settings = replace(policy.settings, rtc_mode=rtc_mode)
        return policy.infer(observation(), plan=committed(3), noise=NOISE)[0].actions

    free, tied = ask('off'), ask(mode)
    assert not np.array_equal(free, tied)
    np.testing.assert_array_equal(ask('off'), free)
    np.testing.assert_array_equal(ask(mode), tied)


@modes
@families
def test_each_mode_works_under_guidance(bundles, family, mode):
    settings = {'cfg_enabled': True, 'cfg_beta': 2.0, 'cfg_mode': 'fused'}
    tied, report = infer(bundles[family], mode, committed(3), **settings)
    assert (report.guidance, report.rtc_mode) == ('fused', mode)
    unguided, _ = infer(bundles[family], mode, committed(3))
    assert np.abs(tied.actions - unguided.actions).max() > 1e-3


# What an engine cannot do.


def lacking(bundle: Path, feature: str) -> Policy:
    policy = load_policy(bundle, 1)
    features, rows = policy._engine.features - {feature}, policy._engine.max_rows
    policy._builder._engine = SimpleNamespace(backend='tensorrt', features=features, max_rows=rows)
    return policy


@pytest.mark.parametrize(
    ('name', 'feature', 'change', 'message'),
    [
        (
            'pi05',
            'jacobian',
            {'rtc_mode': 'jacobian'},
            'rtc_mode',
        ),
        (
            'trained pi05',
            'action_time',
            {'rtc_mode': 'hard_prefix'},
            'rtc_mode',
        ),
        (
            'pi05',
            'none',
            {'rtc_mode': 'jacobian', 'cfg_beta': 1.5, 'cfg_mode': 'serial'},
            'rtc_mode',
        ),
    ],
)
def test_what_cannot_be_done_is_refused_and_the_old_settings_stay(
    bundles, name, feature, change, message
):
    policy = lacking(bundles[name], feature)
    before = policy.settings
    with pytest.raises(ValueError, match=message):
        policy.settings = replace(before, **change)
    assert policy.settings == before


def test_a_clamp_without_a_time_for_every_action_needs_nothing_of_the_engine(bundles):
    policy = lacking(bundles['pi05'], 'action_time')
    policy.settings = replace(policy.settings, rtc_mode='hard_prefix')
    chunk, _ = policy.infer(observation(), plan=committed(3))
    np.testing.assert_allclose(chunk.actions[:3], ROWS[:3], atol=1e-6)


def test_frozen_actions_stay_and_those_behind_them_are_let_go():
    shares = moving_shares(2, 5, 8)[:, 0]
    assert (shares[:2] == 0).all() and (shares[5:] == 1).all()
    assert (np.diff(shares[1:6]) > 0).all()
    assert (moving_shares(0, 0, 8) == 1).all()
    assert (moving_shares(3, 3, 8)[:, 0] == [0, 0, 0, 1, 1, 1, 1, 1]).all()


@pytest.fixture(scope='module')
def groot(tmp_path_factory) -> Path:
    return write_guided(tmp_path_factory.mktemp('groot'), 'groot_n17')


@pytest.mark.parametrize('guided', [{}, {'cfg_enabled': True, 'cfg_beta': 2.0}])
@pytest.mark.parametrize('max_rows', [1, 2])
def test_frozen_begins_at_the_plan_and_moves_by_its_shares(groot, guided, max_rows):
    """Without guidance, and with its rows together or one after the other."""
    policy = load_policy(groot, max_rows, rtc_mode='frozen', denoise_steps=STEPS, **guided)
    noise, trace = noise_of(policy), []
    tied, report = policy.infer(
        observation(),
        plan=committed(2),
        noise=noise,
        on_step=lambda k, x, velocity: trace.append((x, velocity)),
    )
    assert report.rtc_mode == 'frozen'
    plan = policy._codec.plan(committed(2), observation())
    beta = 2.0 if guided else 1.0
    x, shares = noise.copy(), moving_shares(2, 6, 8)
    x[:6] = plan[:6]
    for reached, velocity in trace:
        mixed = velocity[0] if len(velocity) == 1 else beta * velocity[0] - (beta - 1) * velocity[1]
        x = x - shares * mixed / STEPS
        np.testing.assert_allclose(reached, x, atol=2e-5)
    np.testing.assert_allclose(tied.actions[:2], ROWS[:2], atol=1e-5)


def test_frozen_ties_nothing_without_a_plan(groot):
    alone = load_policy(groot, rtc_mode='frozen', denoise_steps=STEPS)
    one = noise_of(alone)
    free, report = alone.infer(observation(), noise=one)
    assert report.rtc_mode == 'off'
    off, _ = load_policy(groot, rtc_mode='off', denoise_steps=STEPS).infer(observation(), noise=one)
    np.testing.assert_array_equal(free.normalised, off.normalised)


def noise_of(policy: Policy) -> np.ndarray:
    dims = policy.spec.dims
    shape = (dims.horizon, dims.action_dim)
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize('family', ['pi05', 'smolvla'])
def test_frozen_is_refused_where_no_training_code_does_it(bundles, family):
    with pytest.raises(ValueError, match='rtc_mode') as error:
        load_policy(bundles[family], rtc_mode='frozen')
    assert 'groot_n16' in str(error.value)
