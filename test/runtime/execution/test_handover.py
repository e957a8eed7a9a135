"""The rows that are executed from a seam on, per mode; LeRobot's ensembler as oracle."""

import json

import numpy as np
import pytest
from execution_rig import SWITCH
from hypothesis import given
from hypothesis import strategies as st
from reference_cases import find

from vla_runtime.execution.handover import (
    HandoverParameters,
    LiveChunk,
    blend_rows,
    blend_weights,
    ensemble_rows,
    hand_over,
)


def live(number: int, first_step: int, values: list[float]) -> LiveChunk:
    return LiveChunk(number, first_step, np.array(values)[:, None])


def test_when_switch_expect_the_new_rows_from_the_joining_index():
    new = live(2, 4, [10.0, 11.0, 12.0, 13.0])
    rows = hand_over(SWITCH, np.full((9, 1), 5.0), [new], 6)
    assert rows[:, 0].tolist() == [12.0, 13.0]


def test_when_rtc_expect_the_new_rows_untouched():
    new = live(2, 4, [10.0, 11.0, 12.0])
    rows = hand_over(HandoverParameters(mode='rtc'), np.full((9, 1), 5.0), [new], 5)
    assert rows[:, 0].tolist() == [11.0, 12.0]


def test_when_result_is_changed_expect_the_chunk_untouched():
    new = live(2, 0, [1.0, 2.0])
    hand_over(SWITCH, np.zeros((0, 1)), [new], 0)[:] = 9.0
    assert new.rows[:, 0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize('steps', [1, 2, 5, 9])
def test_when_blending_expect_weights_to_rise_from_old_to_new(steps):
    weights = blend_weights(steps)
    assert (np.diff(weights) > 0).all() and weights[0] > 0 and weights[-1] < 1
    assert weights == pytest.approx(1 - weights[::-1])


def test_when_blending_expect_old_plan_to_fade_and_new_chunk_to_remain():
    rows = blend_rows(np.zeros((8, 1)), np.ones((8, 1)), 3)
    assert rows[:3, 0] == pytest.approx(blend_weights(3))
    assert (rows[3:] == 1.0).all()


def test_when_old_plan_ends_within_the_blend_expect_it_shortened():
    rows = blend_rows(np.zeros((2, 1)), np.ones((8, 1)), 5)
    assert rows[:2, 0] == pytest.approx(blend_weights(2))
    assert (rows[2:] == 1.0).all()
    assert (blend_rows(np.zeros((0, 1)), np.ones((3, 1)), 5) == 1.0).all()


def test_when_blending_expect_columns_that_are_not_blended_to_be_new_at_once():
    rows = blend_rows(np.zeros((8, 2)), np.ones((8, 2)), 3, np.array([True, False]))
    assert rows[:3, 0] == pytest.approx(blend_weights(3))
    assert (rows[:, 1] == 1.0).all()


def averaged(chunks: list[LiveChunk], join_step: int, decay: float, order: str) -> np.ndarray:
    """The mean written out: step by step, chunk by chunk."""
    newest, means = chunks[-1], []
    for step in range(join_step, newest.end_step):
        said = [
            chunk.rows[step - chunk.first_step]
            for chunk in (chunks if order == 'oldest_first' else chunks[::-1])
            if chunk.first_step <= step < chunk.end_step
        ]
        weights = np.exp(-decay * np.arange(len(said)))
        means.append(np.dot(weights, said) / weights.sum())
    return np.array(means)


@given(
    # First step and length of each chunk; the newest begins by step 12 and ends behind it.
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), max_size=8),
    st.tuples(st.integers(0, 12), st.integers(13, 30)),
    st.floats(0.0, 100.0),
    st.sampled_from(['oldest_first', 'newest_first']),
)
def test_whatever_chunks_are_live_the_ensemble_is_the_mean_written_out(
    others, newest, decay, order
):
    random = np.random.default_rng(len(others))
    chunks = [
        LiveChunk(number, first, random.normal(size=(length, 3)))
        for number, (first, length) in enumerate([*others, newest])
    ]
    rows = ensemble_rows(chunks, 12, decay, order)
    np.testing.assert_allclose(rows, averaged(chunks, 12, decay, order), rtol=0, atol=1e-12)


# --- The executor's `ensemble` weighs chunks as LeRobot's ACTTemporalEnsembler does


def lerobots(chunks: np.ndarray, coefficient: float) -> np.ndarray:
    """Actions of T steps, (T, A), from a chunk a step, (T, H, A): the sum written out."""
    actions = []
    for now in range(len(chunks)):
        oldest = max(0, now - chunks.shape[1] + 1)
        weights = [np.exp(-coefficient * i) for i in range(now - oldest + 1)]
        said = [chunks[made, now - made] for made in range(oldest, now + 1)]
        total = sum(weight * action for weight, action in zip(weights, said, strict=True))
        actions.append(total / sum(weights))
    return np.array(actions)


def executors(chunks: np.ndarray, coefficient: float) -> np.ndarray:
    """Actions of the executor that replans every step, from chunks that came without delay.

    LeRobot's negative coefficients, with which the newest chunk weighs most, are the other order.
    """
    parameters = HandoverParameters(
        mode='ensemble',
        ensemble_decay=abs(coefficient),
        ensemble_order='newest_first' if coefficient < 0 else 'oldest_first',
    )
    live: list[LiveChunk] = []
    plan, actions = np.zeros((0, chunks.shape[2])), []
    for step, rows in enumerate(chunks):
        live = [chunk for chunk in live if chunk.end_step > step]
        live.append(LiveChunk(step, step, rows))
        plan = hand_over(parameters, plan[1:], live, step)
        actions.append(plan[0])
    return np.array(actions)


@pytest.mark.parametrize('coefficient', [0.0, 0.01, 0.5, -0.2])
@pytest.mark.parametrize('steps', [3, 8, 21])
def test_every_step_equals_lerobots_formula(coefficient, steps):
    chunks = np.random.default_rng(steps).normal(size=(steps, 8, 3))
    expected = lerobots(chunks, coefficient)
    np.testing.assert_allclose(executors(chunks, coefficient), expected, rtol=0, atol=1e-12)
    if coefficient:
        plain = lerobots(chunks, 0.0)
        assert np.abs(plain - expected).max() > 1e-4, 'the weights matter'


@pytest.mark.cases
@pytest.mark.parametrize('path', find('act_*.case.safetensors'), ids=lambda path: path.stem)
def test_recorded_chunks_give_the_actions_of_lerobots_ensembler(path):
    from safetensors.numpy import load_file

    description = json.loads(
        path.with_name(path.name.replace('.case.safetensors', '.json')).read_text()
    )
    tensors, coefficient = load_file(path), description['ensemble_coefficient']
    for b in range(description['batch']):
        chunks = tensors['ensemble_chunks'][:, b].astype(np.float64)
        expected = tensors['ensemble_actions'][:, b]
        assert np.abs(lerobots(chunks, coefficient) - expected).max() <= 5e-6
        assert np.abs(executors(chunks, coefficient) - expected).max() <= 5e-6
