"""Frames and stamps wait in memory until a report names them, within a bound."""

from __future__ import annotations

from vla_runtime.recording.frame_store import FrameStore, HeldFrame
from vla_runtime.recording.stamp_book import StampBook


def frame(number: int, size: int = 10) -> HeldFrame:
    return HeldFrame(1000 + number, bytes([number]) * size)


def filled(*stamps: int, most_bytes: int = 10_000) -> FrameStore:
    store = FrameStore(most_bytes)
    for stamp in stamps:
        assert store.add('top', stamp, frame(stamp)) is None
    return store


def test_a_named_frame_is_given_once() -> None:
    store = filled(1, 2, 3)
    assert store.name('top', [2]) == [frame(2)]
    assert store.name('top', [2]) == []
    assert (store.given, store.missing) == (1, 0)


def test_older_frames_of_the_camera_go_and_those_of_others_stay() -> None:
    store = filled(1, 2, 3)
    store.add('wrist', 1, frame(9))
    store.name('top', [2])
    assert store.held_bytes == 20
    assert store.name('wrist', [1]) == [frame(9)]
    assert store.name('top', [3]) == [frame(3)]
    assert store.held_bytes == 0


def test_several_frames_of_a_camera_are_given_and_those_between_them_stay() -> None:
    store = filled(1, 2, 3, 4, 5)
    assert store.name('top', [4, 2]) == [frame(2), frame(4)]
    # The earlier frame of the next inference lies before the newest of this one.
    assert store.name('top', [5, 3]) == [frame(3), frame(5)]
    assert (store.given, store.missing, store.held_bytes) == (4, 0, 0)


def test_a_frame_that_was_named_before_it_came_is_given_when_it_comes() -> None:
    store = filled()
    assert store.name('top', [7]) == []
    assert store.missing == 1
    assert store.add('top', 7, frame(7)) == frame(7)
    assert (store.missing, store.given, store.held_bytes) == (0, 1, 0)
    assert store.name('top', [7]) == []
    assert store.missing == 0


def test_memory_is_bounded_and_what_gave_way_is_missing() -> None:
    store = filled(*range(1, 11), most_bytes=45)
    assert store.held_bytes == 40
    assert store.crowded_out == 6
    assert store.name('top', [3]) == []
    assert store.missing == 1
    assert store.name('top', [9]) == [frame(9)]


def test_the_same_frame_again_takes_the_place_of_the_first() -> None:
    store = filled(1, 1)
    assert store.held_bytes == 10


def test_keys_need_not_rise() -> None:
    store = FrameStore(10_000)
    for came, key in enumerate((70, 20, 50, 10)):
        store.add('top', key, HeldFrame(came, b'1234567890'))
    assert [one.arrived_ns for one in store.name('top', [50])] == [2]
    # What came before it is gone, what came after it is not.
    assert store.held_bytes == 10
    assert [one.arrived_ns for one in store.name('top', [10])] == [3]
    # The same picture again is in the recording once.
    store.add('top', 10, HeldFrame(4, b'1234567890'))
    assert store.name('top', [10]) == []
    assert store.missing == 0


def test_a_frame_that_one_inference_names_twice_is_given_once() -> None:
    """A camera's first frame stands for its earlier one; or two cameras share a topic."""
    for store in (filled(1, 2), filled(1)):
        assert store.name('top', [1, 1]) == [frame(1)]
        assert (store.given, store.missing) == (1, 0)
    late = filled()
    assert late.name('top', [1, 1]) == []
    assert late.add('top', 1, frame(1)) == frame(1)
    assert (late.given, late.missing, late.held_bytes) == (1, 0, 0)


def test_frames_that_inferences_share_are_given_once_beside_one_that_is_lost() -> None:
    store = FrameStore(10_000)
    given = []
    for number in range(1, 8):
        if number != 4:
            assert store.add('top', number, frame(number)) is None
        given += store.name('top', [max(1, number - 1), number])
    assert given == [frame(number) for number in (1, 2, 3, 5, 6, 7)]
    assert (store.given, store.missing, store.held_bytes) == (6, 1, 0)


def test_a_picture_that_comes_again_and_again_takes_no_memory_and_keeps_none() -> None:
    """Of a camera whose frames are known by their content, and whose scene stands still."""
    store = filled(5)
    assert store.name('top', [5]) == [frame(5)]
    for number in range(6, 100):
        store.add('top', 5, frame(5))
        store.add('top', number, frame(number))
        store.name('top', [5])
    # Only what came after the picture for the last time.
    assert (store.given, store.missing, store.held_bytes) == (1, 0, 10)


def test_a_clock_that_was_set_back_keeps_the_frames_that_come_after_it() -> None:
    store = FrameStore(10_000)
    for key, arrived_ns in ((1, 9000), (2, 9001), (3, 10), (4, 11)):
        store.add('top', key, HeldFrame(arrived_ns, b'1234567890'))
    assert [one.arrived_ns for one in store.name('top', [2])] == [9001]
    assert [one.arrived_ns for one in store.name('top', [4, 3])] == [10, 11]
    assert store.missing == 0


# ---------------------------------------------------------------- stamps


def test_what_was_used_and_did_not_come_is_missing():
    book = StampBook(10)
    book.came(1)
    book.wanted(1)
    book.wanted(2)
    assert book.missing == 1
    # A report may be heard before the message that it names.
    book.came(2)
    assert book.missing == 0


def test_what_is_remembered_is_bounded():
    book = StampBook(3)
    for stamp_ns in range(100):
        book.came(stamp_ns)
        book.wanted(1000 + stamp_ns)
    assert book.missing == 3
    book.wanted(99)
    assert book.missing == 3
