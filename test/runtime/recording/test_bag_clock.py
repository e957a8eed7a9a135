"""Times of a bag's messages on the clock of their stamps, however the recording's clock runs."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from vla_runtime.recording.bag_clock import BagClock, ClockError, StampLog
from vla_runtime.recording.storage_file import RawMessage
from vla_runtime.recording.topics import JOINT_STATE, STRING

SECOND = 10**9
WALL = 1_700_000_000 * SECOND
BAG = Path('some/bag')


def message(topic: str, recorded_ns: int, stamp_ns: int | None) -> RawMessage:
    if stamp_ns is None:
        return RawMessage(topic, STRING, recorded_ns, b'\0\1\0\0')
    header = struct.pack('<iI', *divmod(stamp_ns, SECOND))
    return RawMessage(topic, JOINT_STATE, recorded_ns, b'\0\1\0\0' + header)


def clock(*messages: RawMessage) -> BagClock:
    log = StampLog()
    for one in messages:
        log.note(one)
    return log.clock(BAG, dict.fromkeys(one.topic for one in messages))


def joints(recorded_s: np.ndarray, stamps_s: np.ndarray) -> list[RawMessage]:
    return [
        message('/joints', WALL + round(at * SECOND), round(stamp * SECOND))
        for at, stamp in zip(recorded_s, stamps_s, strict=True)
    ]


def test_a_time_is_put_between_the_stamps_that_were_recorded_around_it() -> None:
    # A simulation at a third of the speed that stands still from 30 to 90 s.
    recorded = np.concatenate((np.arange(0, 30, 0.1), np.arange(90, 120, 0.1)))
    stamps = np.concatenate((np.arange(0, 30, 0.1), np.arange(30, 60, 0.1))) / 3 + 5
    found = clock(*joints(recorded, stamps))
    asked = np.array([-1.0, 15.05, 60.0, 100.05])
    times = found.at(WALL + np.round(asked * SECOND).astype(np.int64)) / SECOND
    np.testing.assert_allclose(times, [4.0, 10 + 0.05 / 3, 15.0, 55.15 / 3 - 5 + 5], atol=0.04)
    assert found.time_ns(message('/joints', WALL + 15 * SECOND, 10 * SECOND)) == 10 * SECOND
    assert found.notes == []


def test_a_clock_that_is_set_back_goes_on() -> None:
    recorded, stamps = np.arange(0, 20, 0.1), np.arange(0, 20, 0.1) % 10 + 1
    found = clock(*joints(recorded, stamps))
    times = found.times('/joints')
    assert (np.diff(times) > 0).all() and np.diff(times).max() > 3600 * SECOND
    np.testing.assert_array_equal(np.diff(times[100:]), np.diff(times[:100]))
    # Measured before the reset, and recorded after it.
    late = found.time_ns(message('/joints', WALL + 10_050_000_000, round(10.85 * SECOND)))
    assert late == round(10.85 * SECOND)
    assert 'go back 1 times' in found.notes[0]


def test_a_recording_whose_own_clock_is_set_back_is_refused() -> None:
    times = np.arange(0, 20, 0.1) % 10 + 1
    with pytest.raises(ClockError):
        clock(*joints(times, times))


def test_one_damaged_stamp_or_time_is_no_reset() -> None:
    recorded, stamps = np.arange(0, 20, 0.1), np.arange(0, 20, 0.1) + 1
    recorded[50], stamps[120] = 1e9, 1e9
    found = clock(*joints(recorded, stamps))
    assert found.notes == []
    assert found.times('/joints')[120] == round((stamps[119] + 0.1) * SECOND)


@pytest.mark.parametrize(
    ('stamp_ns', 'words'),
    [
        (None, '/other have no stamps'),
        (0, '/other have no stamps'),
        (WALL, '/other are of another clock'),
    ],
)
def test_a_topic_off_the_clock_is_named_and_has_the_time_of_its_recording(
    stamp_ns: int | None, words: str
) -> None:
    steps = np.arange(0, 5, 0.1)
    other = message('/other', WALL + 2 * SECOND, stamp_ns)
    found = clock(*joints(steps, steps + 1), other)
    assert found.times('/other').tolist() == [3 * SECOND]
    assert words in found.notes[0] and 'on the clock of /joints' in found.notes[0]


def test_without_any_stamps_the_clock_is_the_recordings() -> None:
    found = clock(*(message('/said', WALL + at, None) for at in range(3)))
    assert found.times('/said').tolist() == [WALL, WALL + 1, WALL + 2]
    assert clock().at(np.array([WALL])).tolist() == [WALL]


def test_a_topic_without_stamps_that_count_has_the_times_of_its_recording() -> None:
    log = StampLog()
    messages = [
        *joints(np.arange(0, 5, 0.1), np.arange(100, 105, 0.1)),
        # A driver with a clock that is near, and wrong by 0.4 s.
        *(message('/camera', WALL + n * SECOND, (100 + n) * SECOND - 4 * 10**8) for n in range(5)),
    ]
    for one in messages:
        log.note(one)
    topics = ['/camera', '/joints']
    wrong = log.clock(BAG, topics).times('/camera')
    np.testing.assert_array_equal(wrong, np.arange(100, 105) * SECOND - 4 * 10**8)
    found = log.clock(BAG, topics, ['/camera'])
    np.testing.assert_allclose(found.times('/camera') / SECOND, np.arange(100, 105), atol=1e-6)
    assert [note.split()[0] for note in found.notes] == ['/camera']
    assert found.time_ns(messages[-1]) == found.times('/camera')[-1]
    # All of them: the clock is the recording's.
    assert log.clock(BAG, topics, topics).times('/camera').tolist() == [
        WALL + n * SECOND for n in range(5)
    ]
