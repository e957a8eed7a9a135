"""The rows that are executed from a seam on, per mode."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_when_switch_expect_the_new_rows_from_the_joining_index() -> None:
    new = live(2, 4, [10.0, 11.0, 12.0, 13.0])
    rows = hand_over(HandoverParameters(mode='switch'), np.full((9, 1), 5.0), [new], 6)
    assert rows[:, 0].tolist() == [12.0, 13.0]


def test_when_rtc_expect_the_new_rows_untouched() -> None:
    new = live(2, 4, [10.0, 11.0, 12.0])
    rows = hand_over(HandoverParameters(mode='rtc'), np.full((9, 1), 5.0), [new], 5)
    assert rows[:, 0].tolist() == [11.0, 12.0]


def test_when_result_is_changed_expect_the_chunk_untouched() -> None:
    new = live(2, 0, [1.0, 2.0])
    hand_over(HandoverParameters(mode='switch'), np.zeros((0, 1)), [new], 0)[:] = 9.0
    assert new.rows[:, 0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize('steps', [1, 2, 5, 9])
def test_when_blending_expect_weights_to_rise_from_old_to_new(steps: int) -> None:
    weights = blend_weights(steps)
    assert (np.diff(weights) > 0).all() and weights[0] > 0 and weights[-1] < 1
    assert weights == pytest.approx(1 - weights[::-1])


def test_when_blending_expect_old_plan_to_fade_and_new_chunk_to_remain() -> None:
    rows = blend_rows(np.zeros((8, 1)), np.ones((8, 1)), 3)
    assert rows[:3, 0] == pytest.approx(blend_weights(3))
    assert (rows[3:] == 1.0).all()


def test_when_old_plan_ends_within_the_blend_expect_it_shortened() -> None:
    rows = blend_rows(np.zeros((2, 1)), np.ones((8, 1)), 5)
    assert rows[:2, 0] == pytest.approx(blend_weights(2))
    assert (rows[2:] == 1.0).all()
    assert (blend_rows(np.zeros((0, 1)), np.ones((3, 1)), 5) == 1.0).all()


def test_when_blending_expect_columns_that_are_not_blended_to_be_new_at_once() -> None:
    rows = blend_rows(np.zeros((8, 2)), np.ones((8, 2)), 3, np.array([True, False]))
    assert rows[:3, 0] == pytest.approx(blend_weights(3))
    assert (rows[:, 1] == 1.0).all()


@pytest.mark.parametrize('order', ['oldest_first', 'newest_first'])
def test_when_ensembling_expect_exponential_weights_over_the_chunks_of_a_step(order: str) -> None:
    chunks = [
        live(1, 0, [0.0, 0.0, 0.0, 0.0]),
        live(2, 1, [1.0, 1.0, 1.0, 1.0]),
        live(3, 2, [4.0, 4.0, 4.0, 4.0]),
    ]
    rows = ensemble_rows(chunks, 2, 0.5, order)[:, 0]  # type: ignore[arg-type]
    w = np.exp(-0.5 * np.arange(3))
    values = {2: [0.0, 1.0, 4.0], 3: [0.0, 1.0, 4.0], 4: [1.0, 4.0], 5: [4.0]}
    expected = []
    for step in range(2, 6):
        said = values[step] if order == 'oldest_first' else values[step][::-1]
        weight = w[: len(said)]
        expected.append(float(np.dot(weight, said) / weight.sum()))
    assert rows == pytest.approx(expected)


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
    others: list[tuple[int, int]], newest: tuple[int, int], decay: float, order: str
) -> None:
    random = np.random.default_rng(len(others))
    chunks = [
        LiveChunk(number, first, random.normal(size=(length, 3)))
        for number, (first, length) in enumerate([*others, newest])
    ]
    rows = ensemble_rows(chunks, 12, decay, order)  # type: ignore[arg-type]
    np.testing.assert_allclose(rows, averaged(chunks, 12, decay, order), rtol=0, atol=1e-12)


def test_when_decay_is_zero_expect_the_plain_mean() -> None:
    chunks = [live(1, 0, [0.0, 0.0]), live(2, 0, [3.0, 3.0])]
    assert ensemble_rows(chunks, 0, 0.0, 'oldest_first')[:, 0] == pytest.approx([1.5, 1.5])


@pytest.mark.parametrize(
    'bad',
    [
        {'mode': 'jump'},
        {'ensemble_order': 'random'},
        {'blend_steps': 0},
        {'ensemble_decay': -0.1},
        {'ensemble_decay': float('nan')},
    ],
)
def test_when_a_parameter_makes_no_sense_expect_error(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        HandoverParameters(**bad)  # type: ignore[arg-type]
