"""A policy that sees two frames of a camera gets the earlier one of the right age."""

from __future__ import annotations

from vla_runtime.robot.match import EarlierFrame
from vla_runtime.sensors.camera_buffer import Frame
from vla_runtime.sensors.synchronizer import MissingInput, Selection, Synchronizer, SyncLimits

S = 1_000_000_000
MS = 1_000_000
NOW = 100 * S
# Younger than the earlier frame: it must be kept beyond this age.
LIMITS = SyncLimits(tolerance_ns=20 * MS, max_age_ns=200 * MS)
EARLIER = {'before': EarlierFrame('top', 600 * MS)}


def a_synchronizer(earlier=EARLIER) -> Synchronizer:
    return Synchronizer({'before': '/top', 'top': '/top', 'wrist': '/wrist'}, [], LIMITS, earlier)


def feed(made: Synchronizer, camera: str, *times_ms: int) -> None:
    for time in times_ms:
        made.add_frame(camera, Frame(NOW + time * MS, 0, None), NOW + time * MS)


def select(made: Synchronizer, now_ms: int) -> dict[str, int] | str:
    found = made.select(NOW + now_ms * MS)
    if isinstance(found, Selection):
        return {name: (frame.stamp_ns - NOW) // MS for name, frame in found.frames.items()}
    assert all(isinstance(item, MissingInput) for item in found)
    return ' '.join(item.text for item in found)


def test_the_frame_of_its_age_is_kept_beyond_the_age_of_usable_ones():
    made = a_synchronizer()
    for time in range(-2000, 1, 33):
        feed(made, 'top', time)
        feed(made, 'wrist', time + 2)
    newest = max(range(-2000, 1, 33))
    found = select(made, 2)
    assert found['top'] == newest and found['wrist'] == newest + 2
    assert abs(found['before'] - (newest - 600)) <= 17


def test_the_earlier_frame_belongs_to_the_selected_one_not_to_the_newest():
    made = a_synchronizer()
    feed(made, 'top', -700, -650, -600, -550, -100, -50, 0)
    # The wrist lags: the frame of 50 ms ago is selected.
    feed(made, 'wrist', -45)
    assert select(made, 0) == {'top': -50, 'wrist': -45, 'before': -650}


def test_the_first_frame_stands_for_one_before_it():
    made = a_synchronizer()
    feed(made, 'top', 0)
    feed(made, 'wrist', 0)
    assert select(made, 0) == {'top': 0, 'wrist': 0, 'before': 0}
    feed(made, 'top', 100, 200)
    feed(made, 'wrist', 100, 200)
    assert select(made, 200) == {'top': 200, 'wrist': 200, 'before': 0}


def test_lost_frames_are_no_start_of_an_episode():
    made = a_synchronizer()
    feed(made, 'top', -900, -500, -400, 0)
    feed(made, 'wrist', 0)
    # -600 is wanted; -500 is the nearest and not the first.
    assert 'no frame from 0.600 s before its newest; the nearest is 0.100 s off' in select(made, 0)


def test_after_a_clock_that_went_back_nothing_of_before_is_used():
    made = a_synchronizer()
    for time in range(-1500, 1, 50):
        feed(made, 'top', time)
        feed(made, 'wrist', time)
    assert select(made, 0)['before'] == -600
    feed(made, 'top', -1200)
    feed(made, 'wrist', -1200)
    assert select(made, -1200) == {'top': -1200, 'wrist': -1200, 'before': -1200}


def test_a_frame_that_cannot_be_decoded_is_dropped_from_its_camera():
    made = a_synchronizer()
    for time in range(-1500, 1, 50):
        feed(made, 'top', time)
        feed(made, 'wrist', time)
    found = made.select(NOW)
    assert isinstance(found, Selection)
    made.discard_frame('before', found.frames['before'], 'broken')
    assert 'the nearest is 0.050 s off' in select(made, 0)


def test_memory_is_bounded():
    made = a_synchronizer()
    for time in range(0, 60_000, 20):
        feed(made, 'top', time)
    buffer = made._cameras['top']
    assert len(buffer._kept) <= (600 + 200) // 20 + 2


def test_a_frame_that_comes_too_late_to_be_the_newest_is_an_earlier_one_still():
    made = a_synchronizer()
    feed(made, 'top', -1000, -300)
    for stamp in (-600, 0):
        # Held up on their way: the first of them is too old by now.
        made.add_frame('top', Frame(NOW + stamp * MS, 0, None), NOW)
    feed(made, 'wrist', 0)
    assert 'no frame from' in select(made, 0)
    made = a_synchronizer()
    feed(made, 'top', -1000)
    for stamp in (-600, 0):
        made.add_frame('top', Frame(NOW + stamp * MS, 0, None), NOW)
    feed(made, 'wrist', 0)
    assert select(made, 0) == {'top': 0, 'wrist': 0, 'before': -600}
    late = {status.name: status.counters.late for status in made.camera_statuses(NOW)}
    assert late == {'top': 1, 'wrist': 0}


def test_a_frame_that_is_older_than_any_earlier_one_is_not_kept():
    made = a_synchronizer()
    assert not made.add_frame('top', Frame(NOW - 801 * MS, 0, None), NOW)
    assert made.add_frame('top', Frame(NOW - 800 * MS, 0, None), NOW)
    # Nothing is made of it alone.
    assert 'frames arrive' in select(made, 0)
