"""`Policy` as its users see it: chunks, reports, settings, refusals, memory, repeatability."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from guided_policies import codec_of
from hypothesis import given
from hypothesis import strategies as st
from tiny_policy import CAMERAS, JOINTS, observation, pose_spec, tiny_spec, write_tiny_policy

from vla_runtime import policy as policy_module
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.types import CommittedPlan

TIED = PolicySettings(rtc_mode='guided')
PHASES = {'images', 'tokens', 'vision', 'prefix', 'denoise', 'actions', 'total'}


@pytest.fixture(scope='module')
def bundles(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp('bundles')
    specs = {
        'pi05': tiny_spec(),
        'pi0': tiny_spec('pi0'),
        'guided': tiny_spec(advantage='in_task_space'),
        'delta': tiny_spec(delta=True),
    }
    return {name: write_tiny_policy(folder / name, spec) for name, spec in specs.items()}


@pytest.fixture
def policy(bundles) -> Policy:
    return Policy.load(bundles['pi05'])


@pytest.fixture
def guided(bundles) -> Policy:
    return Policy.load(bundles['guided'])


@pytest.mark.parametrize('name', ['pi05', 'pi0', 'guided', 'delta'])
def test_an_observation_becomes_a_chunk_with_names_and_a_full_report(bundles, name):
    policy = Policy.load(bundles[name])
    chunk, report = policy.infer(observation(stamps_ns={'top': 5, 'state': 7}))
    assert chunk.actions.shape == (8, len(JOINTS))
    assert chunk.names == JOINTS
    assert chunk.kinds == ('position',) * len(JOINTS)
    assert chunk.step_time_s == 0.05
    assert np.isfinite(chunk.actions).all()
    assert set(report.milliseconds) == PHASES
    parts = sum(value for phase, value in report.milliseconds.items() if phase != 'total')
    assert parts == pytest.approx(report.milliseconds['total'])
    assert (report.number, report.seed, report.beta, report.denoise_steps) == (0, 0, 1.0, 3)
    assert report.stamps_ns == {'top': 5, 'state': 7}
    assert report.noise.shape == (8, 6)
    assert set(report.cuda_graph.values()) == {'eager'}


def test_two_runs_over_twenty_observations_are_bit_identical(bundles):
    runs = []
    for _ in range(2):
        policy = Policy.load(bundles['pi05'])
        runs.append([policy.infer(observation(i))[0].actions for i in range(20)])
    np.testing.assert_array_equal(runs[0], runs[1])
    assert len({chunk.tobytes() for chunk in runs[0]}) == 20


def test_reset_begins_the_noise_again(policy):
    first = [policy.infer(observation())[0].actions for _ in range(2)]
    assert not np.array_equal(*first), 'every inference has its own noise'
    policy.reset()
    np.testing.assert_array_equal(policy.infer(observation())[0].actions, first[0])


def test_noise_can_be_passed_in_and_is_recorded(policy):
    noise = np.random.default_rng(1).normal(size=(8, 6)).astype(np.float32)
    chunk, report = policy.infer(observation(), noise=noise)
    np.testing.assert_array_equal(report.noise, noise)
    kept = report.noise
    noise_before, noise = noise.copy(), noise
    noise[:] = 5.0
    np.testing.assert_array_equal(kept, noise_before)
    noise = noise_before
    np.testing.assert_array_equal(
        policy.infer(observation(), noise=noise)[0].actions, chunk.actions
    )


def test_the_seed_changes_the_noise_at_the_next_inference(policy):
    policy.settings = replace(policy.settings, seed=9)
    chunk, report = policy.infer(observation())
    assert report.seed == 9
    policy.reset()
    policy.settings = replace(policy.settings, seed=0)
    assert not np.array_equal(policy.infer(observation())[0].actions, chunk.actions)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'images': {'top': np.zeros((8, 8, 3), np.uint8)}}, r"missing: \['wrist'\]"),
        (
            {'images': {n: np.zeros((8, 8, 3), np.uint8) for n in (*CAMERAS, 'front')}},
            r"unknown: \['front'\]",
        ),
        ({'images': dict.fromkeys(CAMERAS)}, 'every camera is absent'),
        (
            {'images': {n: np.zeros((8, 8), np.uint8) for n in CAMERAS}},
            r'images\[top\]',
        ),
        (
            {'images': {n: np.zeros((8, 8, 3), np.float32) for n in CAMERAS}},
            r'images\[top\]',
        ),
        ({'images': {n: np.zeros((0, 8, 3), np.uint8) for n in CAMERAS}}, r'images\[top\]'),
        ({'state': np.zeros(4)}, r'3 numbers \(shoulder, elbow, gripper\), got shape \(4,\)'),
        ({'state': np.zeros((1, 3))}, r'got shape \(1, 3\)'),
        ({'state': np.array(['a', 'b', 'c'])}, r'observation\.state'),
        ({'state': np.array([0.0, np.nan, 0.0])}, r'no usable number: elbow = nan'),
        ({'state': np.array([0.0, 0.0, np.inf])}, 'gripper = inf'),
        ({'state': np.array([0.0, 1e300, 0.0])}, r'no usable number: elbow = 1e\+300'),
        ({'images': None}, r'images: expected a mapping.*NoneType'),
        ({'images': {'top': None, 3: None}}, "'wrist'"),
        (
            {'images': {n: np.zeros((1, 200, 3), np.uint8) for n in CAMERAS}},
            r'images\[top\]',
        ),
        ({'instruction': ''}, 'instruction'),
        ({'instruction': ' \n'}, 'instruction'),
        ({'instruction': 'word ' * 100}, r'tokens'),
    ],
)
def test_a_bad_observation_is_refused_and_leaves_no_trace(bundles, changes, message):
    undisturbed, policy = Policy.load(bundles['pi05']), Policy.load(bundles['pi05'])
    undisturbed.infer(observation(0))
    policy.infer(observation(0))
    with pytest.raises(ValueError, match=message):
        policy.infer(observation(1, **changes))
    expected, expected_report = undisturbed.infer(observation(2))
    chunk, report = policy.infer(observation(2))
    np.testing.assert_array_equal(chunk.actions, expected.actions)
    assert report.number == expected_report.number == 1


@pytest.mark.parametrize(
    ('noise', 'message'),
    [
        (np.zeros((8, 5)), r'\(8, 6\)'),
        (np.full((8, 6), np.nan), 'finite'),
        (np.zeros((8, 6), dtype=complex), 'complex'),
    ],
)
def test_bad_noise_is_refused(policy, noise, message):
    with pytest.raises(ValueError, match=message):
        policy.infer(observation(), noise=noise)


def test_an_absent_camera_is_masked_whatever_was_there_before(bundles):
    images = observation().images
    fresh, used = Policy.load(bundles['pi05']), Policy.load(bundles['pi05'])
    used.infer(observation())
    used.reset()
    absent = observation(images={**images, 'wrist': None})
    chunk = fresh.infer(absent)[0].actions
    np.testing.assert_array_equal(used.infer(absent)[0].actions, chunk)
    fresh.reset()
    assert not np.array_equal(fresh.infer(observation())[0].actions, chunk)


def test_every_input_matters(policy):
    noise = np.zeros((8, 6), dtype=np.float32)
    base = policy.infer(observation(), noise=noise)[0].actions
    images = dict(observation().images)
    images['wrist'] = 255 - images['wrist']
    changed = [
        observation(images=images),
        observation(state=np.array([0.5, -0.5, 0.9], dtype=np.float32)),
        observation(instruction='fold the blue cloth'),
    ]
    for other in changed:
        assert np.abs(policy.infer(other, noise=noise)[0].actions - base).max() > 1e-4


# Guidance.


def test_beta_one_equals_the_conditioned_policy_exactly(guided):
    conditioned = guided.infer(observation())[0].actions
    guided.reset()
    guided.settings = replace(guided.settings, cfg_enabled=True, cfg_beta=1.0)
    chunk, report = guided.infer(observation())
    np.testing.assert_array_equal(chunk.actions, conditioned)
    assert report.beta == 1.0


def test_guidance_follows_its_formula_at_every_step(guided):
    """The recorded trace against both rows run alone: x' = x + dt * sum(w * v)."""
    guided.settings = replace(guided.settings, cfg_enabled=True, cfg_beta=2.0)
    noise = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    trace = []
    guided.infer(
        observation(), noise=noise, on_step=lambda k, x, v: trace.append((x.copy(), v.copy()))
    )
    x = noise.astype(np.float64)
    for after, velocity in trace:
        conditioned, unconditioned = velocity.astype(np.float64)
        assert np.abs(conditioned - unconditioned).max() > 1e-5, 'the tag changes the velocity'
        x = x - (unconditioned + 2.0 * (conditioned - unconditioned)) / 3
        np.testing.assert_allclose(after, x, atol=1e-5)


def test_the_report_counts_each_rows_own_tokens(guided):
    guided.settings = replace(guided.settings, cfg_enabled=True, cfg_beta=1.5)
    _, report = guided.infer(observation())
    conditioned, unconditioned = report.tokens
    assert conditioned > unconditioned
    assert report.beta == 1.5


def test_guidance_needs_a_policy_with_advantage_tags(policy):
    with pytest.raises(ValueError, match=r'cfg_beta.*prompt\.advantage'):
        policy.settings = replace(policy.settings, cfg_enabled=True, cfg_beta=1.5)
    assert not policy.settings.guided


@pytest.mark.parametrize(
    ('field', 'value'),
    [
        ('cfg_beta', 0.5),
        ('cfg_beta', float('nan')),
        ('cfg_beta', float('inf')),
        ('cfg_mode', 'parallel'),
        ('rtc_mode', 'soft'),
        ('rtc_horizon', -1),
        ('rtc_horizon', 1.5),
        ('rtc_horizon', True),
        ('rtc_horizon', 2.0),
        ('seed', -1),
        ('denoise_steps', 0),
        ('denoise_steps', 1001),
        ('advantage', 'great'),
        ('plan_schedule', 'cubic'),
        ('max_guidance_weight', float('inf')),
        ('denoise_steps', 2.5),
        ('denoise_steps', True),
        ('cfg_enabled', 'no'),
        ('seed', 1.5),
        ('seed', 'a'),
        ('cache', 'exact'),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        PolicySettings(**{field: value})


def test_settings_that_the_policy_refuses_leave_no_engine_behind(tmp_path, monkeypatch):
    closed, real = [], policy_module.load_engine

    def load_engine(*arguments, **named):
        engine = real(*arguments, **named)
        free = engine.close
        monkeypatch.setattr(engine, 'close', lambda: (closed.append(True), free()))
        return engine

    monkeypatch.setattr(policy_module, 'load_engine', load_engine)
    bundle = write_tiny_policy(tmp_path / 'untagged', tiny_spec())
    with pytest.raises(ValueError, match='cfg_beta'):
        Policy.load(bundle, settings=PolicySettings(cfg_enabled=True, cfg_beta=1.5))
    assert closed == [True]


def test_denoise_steps_can_be_changed_between_inferences(policy):
    policy.settings = replace(policy.settings, denoise_steps=1)
    one, report = policy.infer(observation())
    assert report.denoise_steps == 1
    policy.reset()
    policy.settings = replace(policy.settings, denoise_steps=10)
    ten, report = policy.infer(observation())
    assert report.denoise_steps == 10
    assert not np.array_equal(one.actions, ten.actions)


# Plans.


@pytest.mark.parametrize('name', ['pi05', 'delta'])
def test_a_chunk_is_drawn_to_the_committed_plan(bundles, name):
    policy = Policy.load(bundles[name], settings=replace(TIED, denoise_steps=10))
    free = policy.infer(observation())[0].actions
    policy.reset()
    plan = CommittedPlan(actions=free + 0.3, delay_steps=4, execution_horizon=6)
    tied = policy.infer(observation(), plan=plan)[0].actions
    distance, before = np.abs(tied - plan.actions), np.abs(free - plan.actions)
    assert (distance[:4] < 0.5 * before[:4]).all(), 'the frozen part follows the plan'


def test_a_plan_for_a_delta_policy_is_anchored_to_the_present_state(bundles):
    plan = CommittedPlan(np.tile([0.4, -0.2, 0.1], (5, 1)), delay_steps=2, execution_horizon=5)
    here = observation(state=np.zeros(3, dtype=np.float32))
    there = observation(state=np.array([0.4, -0.2, 0.0], dtype=np.float32))
    codec = codec_of(bundles['delta'])
    std = codec._action_normalizer.normalise(np.eye(3)) - codec._action_normalizer.normalise(
        np.zeros((3, 3))
    )
    moved = codec.plan(plan, here)[0, :3] - codec.plan(plan, there)[0, :3]
    np.testing.assert_allclose(moved, [0.4 * std[0, 0], -0.2 * std[1, 1], 0.0], atol=1e-5)


def test_a_plan_shorter_than_the_horizon_is_held_and_does_not_bind_beyond_its_end(bundles):
    policy = Policy.load(bundles['pi05'], settings=TIED)
    noise = np.zeros((8, 6), dtype=np.float32)
    short = CommittedPlan(np.full((3, 3), 0.2), delay_steps=1, execution_horizon=8)
    same = CommittedPlan(np.full((8, 3), 0.2), delay_steps=1, execution_horizon=3)
    np.testing.assert_array_equal(
        policy.infer(observation(), plan=short, noise=noise)[0].actions,
        policy.infer(observation(), plan=same, noise=noise)[0].actions,
    )


@pytest.mark.parametrize(
    ('actions', 'message'),
    [
        (np.zeros((0, 3)), 'at least one row'),
        (np.zeros((4, 2)), r'3 numbers \(shoulder, elbow, gripper\)'),
        (np.full((4, 3), np.nan), 'no usable number: shoulder = nan at step 0'),
        (np.full((4, 3), 1e300), r'no usable number: shoulder = 1e\+300'),
    ],
)
def test_a_bad_plan_is_refused(policy, actions, message):
    policy.settings = TIED
    with pytest.raises(ValueError, match=message):
        policy.infer(observation(), plan=CommittedPlan(actions, 1, 2))


@pytest.mark.parametrize('field', ['delay_steps', 'execution_horizon'])
def test_steps_of_a_plan_are_whole_numbers(policy, field):
    policy.settings = TIED
    steps = {'delay_steps': 1, 'execution_horizon': 2, field: 1.5}
    with pytest.raises(ValueError, match=field):
        policy.infer(observation(), plan=CommittedPlan(np.zeros((4, 3)), **steps))


# Loading.


def test_reduced_precision_stays_near_float32_and_says_what_it_is(bundles):
    exact = Policy.load(bundles['pi05']).infer(observation())[0].normalised
    for precision, bound in (('bfloat16', 0.1), ('float16', 0.02)):
        chunk = Policy.load(bundles['pi05'], precision=precision).infer(observation())[0]
        error = np.abs(chunk.normalised - exact).max()
        assert 0 < error < bound, precision


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'backend': 'tensorflow'}, "'tensorflow'"),
        ({'device': 'cuda:77'}, 'cuda:77'),
        ({'precision': 'float8'}, 'float8.*float32'),
    ],
)
def test_what_is_not_to_be_had_is_an_error_and_no_fallback(bundles, options, message):
    with pytest.raises(ValueError, match=message):
        Policy.load(bundles['pi05'], **options)


def test_warming_up_counts_as_no_inference(guided):
    assert guided.warm_up() > 0
    _, report = guided.infer(observation())
    assert report.number == 0
    assert guided.settings == PolicySettings()


def test_a_setting_changed_while_warming_up_is_kept(guided):
    real = guided._engine.run_steps

    def change_then_run():
        guided.settings = replace(guided.settings, seed=42)
        real()

    guided._engine.run_steps = change_then_run
    guided.warm_up()
    assert guided.settings.seed == 42


@pytest.mark.parametrize('form', ['quaternion_wxyz', 'rotation_6d'])
def test_a_policy_of_pose_deltas_warms_up(tmp_path, form):
    policy = Policy.load(write_tiny_policy(tmp_path / 'pose', pose_spec(form)))
    assert policy.warm_up() > 0


def test_a_closed_policy_says_so(policy):
    policy.close()
    with pytest.raises(ValueError, match='closed'):
        policy.infer(observation())


def test_weights_that_give_no_finite_number_are_refused(tmp_path):
    policy = Policy.load(write_tiny_policy(tmp_path / 'broken', tiny_spec(), seed=1))
    policy._engine._network.action_out.bias.fill_(float('nan'))
    # At configure already, before a robot waits for it.
    for ask in (policy.warm_up, lambda: policy.infer(observation())):
        with pytest.raises(ValueError, match='not finite'):
            ask()


@given(data=st.data())
def test_any_image_size_and_state_give_a_finite_chunk(bundles, data):
    policy = _cached_policy(bundles['pi05'])
    height, width = data.draw(st.tuples(st.integers(1, 60), st.integers(1, 60)))
    if max(height, width) > 28 * min(height, width):
        return
    images = {name: np.full((height, width, 3), 128, dtype=np.uint8) for name in CAMERAS}
    state = data.draw(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3))
    chunk, _ = policy.infer(observation(images=images, state=np.array(state)))
    assert np.isfinite(chunk.actions).all()


@lru_cache
def _cached_policy(path: Path) -> Policy:
    return Policy.load(path)


def test_the_report_can_be_written_as_json(policy):
    _, report = policy.infer(observation())
    plain = {**asdict(report), 'noise': report.noise.tolist()}
    assert json.loads(json.dumps(plain))['number'] == 0


def test_settings_hold_for_the_inference_that_they_are_given_to(guided) -> None:
    seen = observation()
    plain, _ = guided.infer(seen, number=0)
    other, report = guided.infer(seen, settings=replace(guided.settings, cfg_beta=2.0), number=0)
    again, after = guided.infer(seen, number=0)
    assert (report.beta, after.beta) == (2.0, 1.0)
    assert np.array_equal(plain.normalised, again.normalised)
    assert not np.array_equal(plain.normalised, other.normalised)


def test_settings_that_a_policy_cannot_run_are_refused_with_the_inference(policy) -> None:
    with pytest.raises(ValueError, match='cfg_beta'):
        policy.infer(observation(), settings=replace(policy.settings, cfg_beta=2.0))
