"""Fate of each frame of a camera, and counts of those that never came."""

from itertools import pairwise

import pytest

from vla_runtime.execution.state import OTHER_CLOCK
from vla_runtime.messages.images import ImageFacts
from vla_runtime.sensors.camera_buffer import CameraBuffer, Frame

S = 1_000_000_000
MS = 1_000_000
MAX_AGE = S // 2
TOLERANCE = 50 * MS


def a_frame(stamp_ns):
    return Frame(stamp_ns, 0, f'image {stamp_ns}')


def a_buffer(*stamps, now=None):
    buffer = CameraBuffer('top', '/top/image')
    for stamp in stamps:
        buffer.add(a_frame(stamp), stamp if now is None else now, MAX_AGE, TOLERANCE)
    return buffer


def stamps(buffer):
    return [frame.stamp_ns for frame in buffer.frames]


def test_fresh_frames_are_kept_in_order():
    buffer = a_buffer(10 * S, 10 * S + 33 * MS)
    assert stamps(buffer) == [10 * S, 10 * S + 33 * MS]
    assert buffer.counters.received == 2
    assert buffer.fault is None


@pytest.mark.parametrize(
    ('tolerance_ms', 'kept_ms', 'most', 'widest_ms'),
    [(50, 0, 30, 50), (2, 0, 120, 20), (50, 1000, 120, 50)],
)
def test_a_fast_camera_is_thinned_and_keeps_its_newest_and_its_oldest_frame(
    tolerance_ms, kept_ms, most, widest_ms
):
    buffer = CameraBuffer('top', '/top/image', kept_ns=kept_ms * MS)
    times = range(S, 3 * S, MS)
    for time in times:
        buffer.add(a_frame(time), time, MAX_AGE, tolerance_ms * MS)
        buffer.expire(time, MAX_AGE)
        assert len(buffer._kept) <= most
    kept = [frame.stamp_ns for frame in buffer._kept]
    assert kept[-1] == times[-1]
    assert kept[0] - (times[-1] - MAX_AGE - kept_ms * MS) <= widest_ms * MS
    assert max(after - before for before, after in pairwise(kept)) <= widest_ms * MS


def test_frames_of_the_last_selection_are_not_thinned():
    buffer = a_buffer(*range(S, S + 40 * MS, 2 * MS))
    selected = S + 20 * MS
    buffer.mark_selected([selected])
    for time in range(S + 40 * MS, S + 400 * MS, MS):
        buffer.add(a_frame(time), time, MAX_AGE, TOLERANCE)
    assert len(buffer.frames) == 30 and selected in stamps(buffer)
    assert stamps(buffer)[1] - S > 10 * MS


@pytest.mark.parametrize(
    ('stamp', 'counter', 'words'),
    [
        (0, 'refused', 'header.stamp is zero'),
        (12 * S, 'refused', '2.000 s in the future'),
        (10 * S - MS, 'out_of_order', 'go back in time'),
        (10 * S, 'out_of_order', 'does not advance'),
    ],
)
def test_stamp_that_cannot_be_is_dropped_counted_and_named(stamp, counter, words):
    buffer = a_buffer(10 * S)
    assert not buffer.add(a_frame(stamp), 10 * S, MAX_AGE, TOLERANCE)
    assert getattr(buffer.counters, counter) == 1
    assert words in buffer.fault
    assert stamps(buffer) == [10 * S]


@pytest.mark.parametrize('back', [60 * S, 2 * S])
def test_a_driver_whose_clock_was_set_back_is_told_what_mends_it_at_once(back):
    buffer = a_buffer(10 * S)
    for now in (10 * S + 100 * MS, 11 * S):
        assert not buffer.add(a_frame(now - back), now, MAX_AGE, TOLERANCE)
        assert 'stamp: receive' in buffer.why_empty(now, MAX_AGE)
    assert buffer.counters.out_of_order == 2
    # A pair in the wrong order says nothing of clocks.
    healthy = a_buffer(20 * S)
    healthy.add(a_frame(20 * S - MS), 20 * S, MAX_AGE, TOLERANCE)
    assert 'stamp: receive' not in healthy.fault


def test_frame_from_the_future_does_not_block_those_that_follow():
    buffer = a_buffer(10 * S)
    buffer.add(a_frame(10_000 * S), 10 * S, MAX_AGE, TOLERANCE)
    assert buffer.add(a_frame(10 * S + MS), 10 * S + MS, MAX_AGE, TOLERANCE)


def test_frames_ahead_of_the_clock_are_kept_and_said():
    buffer = a_buffer()
    assert buffer.add(a_frame(10 * S + 40 * MS), 10 * S, MAX_AGE, TOLERANCE)
    assert buffer.fault is None
    assert buffer.add(a_frame(10 * S + 200 * MS), 10 * S, MAX_AGE, TOLERANCE)
    assert '0.200 s in the future, and the executor refuses chunks' in buffer.fault


def test_frame_that_arrives_too_old_is_late():
    buffer = a_buffer()
    assert not buffer.add(a_frame(9 * S), 10 * S, MAX_AGE, TOLERANCE)
    assert buffer.counters.late == 1
    assert 'arrive 1.000 s after their stamp' in buffer.why_empty(10 * S, MAX_AGE)


@pytest.mark.parametrize(
    ('stamp', 'words'),
    [(12 * S, 'frames arrive 1763999988.000 s after'), (4_000_000_000 * S, 's in the future')],
)
def test_frames_of_another_clock_are_said_to_be(stamp, words):
    buffer = a_buffer()
    now = 1_764_000_000 * S
    assert not buffer.add(a_frame(stamp), now, MAX_AGE, TOLERANCE)
    fault = buffer.why_empty(now, MAX_AGE)
    assert words in fault and fault.endswith(f'; {OTHER_CLOCK}')


def test_frames_expire():
    buffer = a_buffer(10 * S, 10 * S + 100 * MS)
    buffer.expire(10 * S + MAX_AGE + MS, MAX_AGE)
    assert stamps(buffer) == [10 * S + 100 * MS]
    buffer.expire(11 * S, MAX_AGE)
    assert not buffer.frames
    assert buffer.why_empty(11 * S, MAX_AGE) == (
        "camera 'top' (/top/image): last frame is 0.90 s old, limit 0.5 s"
    )


def test_camera_that_never_spoke_is_named_with_its_topic():
    assert a_buffer().why_empty(S, MAX_AGE) == "camera 'top': no frame yet on /top/image"


def test_gaps_of_whole_periods_are_lost_frames():
    times = [S + i * 33 * MS for i in range(10)]
    later = times[-1] + 3 * 33 * MS
    buffer = a_buffer(*times, later, later + 33 * MS)
    assert buffer.counters.lost == 2
    assert buffer.rate_hz == pytest.approx(1000 / 33)


def test_jitter_is_not_loss():
    times, now = [], S
    for jitter in [0, 9, -8, 12, -13, 4, 0, 10, -10, 7, -7, 0, 12, -12]:
        now += 33 * MS
        times.append(now + jitter * MS)
    assert a_buffer(*times).counters.lost == 0


def test_long_gap_is_one_outage_and_no_loss():
    times = [S + i * 33 * MS for i in range(10)]
    buffer = a_buffer(*times, 60 * S)
    assert (buffer.counters.lost, buffer.counters.outages) == (0, 1)


def test_frame_that_cannot_be_decoded_is_dropped_once_it_is_known():
    buffer = a_buffer(10 * S, 10 * S + MS)
    buffer.discard(buffer.frames[-1], 'damaged')
    assert stamps(buffer) == [10 * S]
    assert (buffer.counters.refused, buffer.fault) == (1, 'damaged')


def test_clearing_forgets_stamps_but_not_counts():
    buffer = a_buffer(10 * S)
    buffer.clear()
    assert buffer.add(a_frame(S), S, MAX_AGE, TOLERANCE)
    assert buffer.counters.received == 2


def test_what_mends_a_driver_with_no_clock_or_one_of_its_own_is_said():
    buffer = CameraBuffer('top', '/top/image')
    for stamp_ns in (0, 10 * S - 4 * S, 10 * S + 4 * S, 10 * S + 100 * MS, 9_999 * S):
        buffer.add(a_frame(stamp_ns), 10 * S, MAX_AGE, TOLERANCE)
        assert "'stamp: receive'" in buffer.fault


def with_facts(stamp_ns, width=640, height=480, *, grey=False):
    return Frame(stamp_ns, 0, 'image', ImageFacts(width, height, grey))


def test_another_resolution_is_said_for_as_long_as_it_lasts():
    buffer = CameraBuffer('top', '/top/image')

    def add(number, width):
        stamp_ns = 10 * S + number * 33 * MS
        assert buffer.add(with_facts(stamp_ns, width), stamp_ns, MAX_AGE, TOLERANCE)
        return buffer.warning

    assert add(0, 640) is None
    assert 'frames are 320x480 pixels, and were 640x480' in add(1, 320)
    assert '320x480' in add(2, 320)
    assert add(3, 640) is None
    assert '320x480' in add(4, 320)
    # A new episode begins with what is there.
    buffer.clear()
    assert add(5, 320) is None


def test_grey_frames_are_said():
    buffer = CameraBuffer('top', '/top/image')
    buffer.add(with_facts(10 * S, grey=True), 10 * S, MAX_AGE, TOLERANCE)
    assert 'frames are grey' in buffer.warning
    buffer.add(with_facts(11 * S), 11 * S, MAX_AGE, TOLERANCE)
    assert buffer.warning is None


def test_a_frame_that_could_not_be_used_is_said_for_a_while():
    buffer = a_buffer(10 * S)
    buffer.discard(buffer.frames[0], 'its data is damaged')
    assert buffer.frames == [] and buffer.fault == 'its data is damaged'
    buffer.add(a_frame(11 * S), 11 * S, MAX_AGE, TOLERANCE)
    assert buffer.fault is None
    assert '1 frames could not be used' in buffer.warning
    assert 'its data is damaged' in buffer.warning
    buffer.add(a_frame(21 * S), 21 * S, MAX_AGE, TOLERANCE)
    assert buffer.warning is None
