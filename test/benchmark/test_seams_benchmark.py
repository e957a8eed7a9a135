"""benchmark/seams.py: chunks handed over, measured, and LeRobot's way of doing it."""

import importlib.util
import math
import sys

import numpy as np
import pytest
from paths import ROOT

from vla_runtime.execution.handover import LiveChunk

BENCHMARK = ROOT / 'benchmark'


@pytest.fixture(scope='module')
def seams():
    sys.path.insert(0, str(BENCHMARK))
    try:
        spec = importlib.util.spec_from_file_location('seams', BENCHMARK / 'seams.py')
        module = importlib.util.module_from_spec(spec)
        sys.modules['seams'] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCHMARK))


def chunk(number, first_step, values):
    return LiveChunk(number, first_step, np.array(values, dtype=float)[:, None])


def test_weighted_average_merges_the_overlap_and_keeps_nothing_beyond_the_new_chunk(seams):
    old = np.array([[10.0], [10.0], [10.0]])
    new = chunk(1, 4, [0.0, 20.0, 20.0, 20.0, 20.0])
    # Joined at step 5: row 0 is past; 3 steps are in both.
    merged = seams.weighted_average(old, [new], 5)
    np.testing.assert_allclose(merged[:, 0], [17.0, 17.0, 17.0, 20.0])
    shorter = seams.weighted_average(np.full((9, 1), 10.0), [new], 5)
    assert len(shorter) == 4


@pytest.mark.parametrize('delay', [0, 2])
def test_switching_commands_each_chunk_from_the_row_that_the_robot_has_reached(seams, delay):
    chunks = [
        chunk(number, step, 100 * number + np.arange(16))
        for number, step in enumerate((0, 8 - delay, 16 - delay))
    ]
    joined = seams.join_chunks(chunks, delay, seams.METHODS['switch'][1])
    expected = [
        *np.arange(8),
        *(100 + delay + np.arange(8)),
        *(200 + delay + np.arange(8)),
    ]
    np.testing.assert_array_equal(joined.rows[:, 0], expected)
    assert joined.seams == [8, 16]
    # At step 8 the old chunk says 8, the new one 100 + delay.
    assert joined.jumps[0] == 92 + delay
    assert joined.behind == 0.0


def test_chunks_that_agree_have_no_seams_whatever_the_method(seams):
    line = np.arange(40.0)
    chunks = [chunk(i, s, line[s : s + 16]) for i, s in enumerate((0, 6, 14))]
    for _, merge in seams.METHODS.values():
        joined = seams.join_chunks(chunks, 2, merge)
        np.testing.assert_allclose(joined.rows[:, 0], line[:24])
        measured = seams.measure(joined)
        assert measured['position_jump'] == pytest.approx(0.0, abs=1e-12)
        assert measured['jerk_seams'] == pytest.approx(0.0, abs=1e-9)


def test_blending_jumps_less_than_the_average_and_that_less_than_switching(seams):
    chunks = [chunk(i, s, np.full(16, float(i))) for i, s in enumerate((0, 6, 14))]
    measured = {
        method: seams.measure(seams.join_chunks(chunks, 2, merge))
        for method, (_, merge) in seams.METHODS.items()
    }
    switch, average, blend = (
        measured[method] for method in ('switch', 'LeRobot weighted_average', 'blend')
    )
    assert switch['position_jump'] == 1.0
    assert 0.7 <= average['position_jump'] < 1.0
    assert blend['position_jump'] < 0.2
    assert blend['jerk_seams'] < average['jerk_seams'] < switch['jerk_seams']
    assert switch['velocity_jump'] == pytest.approx(1.0 / 0.05)


def test_an_old_plan_at_its_end_has_no_jump_to_measure(seams):
    chunks = [chunk(i, s, np.arange(8.0)) for i, s in enumerate((0, 8, 16))]
    joined = seams.join_chunks(chunks, 0, seams.METHODS['switch'][1])
    assert all(math.isnan(jump) for jump in joined.jumps)
