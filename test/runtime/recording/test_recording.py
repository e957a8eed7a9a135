"""A recording keeps within its budget and its disk; every bag of a ring is complete in itself."""

from __future__ import annotations

import json
import resource
import time

import numpy as np
import pytest
from full_disk import fill, small_disk
from rosbags.rosbag2 import Reader

from vla_runtime.processes.supervisor import Supervisor
from vla_runtime.recording.bag_writer import Bag, BagError, Offer, Reserve
from vla_runtime.recording.recording import Recording, RecordingLimits

MIB = 1 << 20
_NOISE = np.random.default_rng(0).bytes(4 * MIB)


def noise(number: int) -> bytes:
    """A message that cannot be compressed, nor can several after each other."""
    begin = number * 50_000 % (3 * MIB)
    return b'\x00\x01\x00\x00' + _NOISE[begin : begin + 50_000]


def open_recording(folder, limits=None, clock=lambda: 0.0):
    said = []
    recording = Recording(folder, limits or RecordingLimits(), said.append, clock=clock)
    recording.add_topic('/description', 'std_msgs/msg/String', Offer(depth=1, latched=True))
    recording.add_topic('/front', 'sensor_msgs/msg/Image', Offer(depth=1))
    recording.write('/description', 1, b'\x00\x01\x00\x00described')
    return recording, said


def messages(folder) -> list[tuple[str, int, bytes]]:
    with Reader(folder) as reader:
        return [(c.topic, stamp, data) for c, stamp, data in reader.messages()]


def size_of(folder) -> int:
    return sum(path.stat().st_size for path in folder.rglob('*') if path.is_file())


def test_without_limits_it_is_one_bag(tmp_path):
    recording, said = open_recording(tmp_path / 'deep' / 'bag')
    recording.write('/front', 5, noise(5))
    recording.close()
    assert messages(tmp_path / 'deep' / 'bag') == [
        ('/description', 1, b'\x00\x01\x00\x00described'),
        ('/front', 5, noise(5)),
    ]
    assert not said


def test_what_is_there_is_never_overwritten(tmp_path):
    for limits in (RecordingLimits(), RecordingLimits(keep_s=1.0)):
        with pytest.raises(BagError, match='exists already'):
            Recording(tmp_path, limits, print)


def test_a_ring_stays_within_its_bytes_and_every_bag_is_complete(tmp_path):
    folder = tmp_path / 'ring'
    recording, said = open_recording(folder, RecordingLimits(most_bytes=20 * MIB))
    for number in range(1000):  # 50 MB
        recording.write('/front', 10 + number, noise(number))
        if number % 50 == 0:
            assert size_of(folder) <= 20 * MIB
    recording.close()
    assert not said
    assert 10 * MIB < size_of(folder) <= 20 * MIB
    bags = sorted(folder.glob('0*'))
    kept = [messages(bag) for bag in bags]
    assert all(bag[0][0] == '/description' for bag in kept)
    stamps = [stamp for bag in kept for topic, stamp, _ in bag if topic == '/front']
    assert stamps == list(range(stamps[0], 1010))
    assert stamps[0] > 10


def test_a_ring_of_what_compresses_well_is_used_but_for_the_chunk_in_memory(tmp_path):
    folder = tmp_path / 'ring'
    recording, said = open_recording(folder, RecordingLimits(most_bytes=8 * MIB))
    for number in range(2400):
        # A tenth of it stays: 12 MB.
        recording.write('/front', 10 + number, noise(number)[:5_000] + bytes(45_000))
        if number % 50 == 0:
            assert size_of(folder) <= 8 * MIB
    recording.close()
    assert not said
    assert 5.5 * MIB < size_of(folder) <= 8 * MIB
    sizes = [size_of(bag) for bag in sorted(folder.glob('0*'))]
    assert all(size > 0.9 * MIB for size in sizes[:-1])


def test_a_ring_keeps_the_last_minutes(tmp_path):
    now = [0.0]
    folder = tmp_path / 'ring'
    recording, said = open_recording(folder, RecordingLimits(keep_s=60.0), lambda: now[0])
    for second in range(200):
        now[0] = float(second)
        recording.write('/front', second, b'\x00\x01\x00\x00x')
    recording.close()
    bags = sorted(folder.glob('0*'))
    stamps = [s for bag in bags for topic, s, _ in messages(bag) if topic == '/front']
    assert stamps == list(range(stamps[0], 200))
    assert 120 <= stamps[0] <= 140
    assert not said


def test_a_full_disk_ends_a_ring_and_keeps_the_closed_bags(tmp_path):
    with small_disk(tmp_path / 'disk', 24 * 1024) as disk:
        limits = RecordingLimits(most_bytes=100 * MIB)
        recording, said = open_recording(disk / 'ring', limits)
        for number in range(800):
            recording.write('/front', 10 + number, noise(number))
        assert recording.ended
        recording.close()
        stamps = [
            stamp
            for bag in sorted((disk / 'ring').glob('0*'))
            for topic, stamp, _ in messages(bag)
            if topic == '/front'
        ]
    assert stamps == list(range(10, 10 + len(stamps)))
    assert len(stamps) > 200
    (text,) = said
    assert 'recording has ended: No space left on device' in text


# ---------------------------------------------------------------- one bag, and a disk that ends it


def record(bag: Bag, messages: int) -> None:
    for number in range(messages):
        bag.write('/front', 1_000_000_000 + number, noise(number))


def open_bag(folder, said) -> Bag:
    bag = Bag(folder, said.append)
    bag.add_topic('/front', 'sensor_msgs/msg/CompressedImage', Offer(depth=1))
    return bag


def stamps(folder) -> list[int]:
    """Stamps of all messages that a reader finds; asserts that the bag counts as many."""
    with Reader(folder) as reader:
        found = [stamp for _, stamp, _ in reader.messages()]
        assert len(found) == reader.message_count
    return found


def test_a_disk_that_fills_up_leaves_a_closed_bag_of_what_fitted(tmp_path):
    said = []
    with small_disk(tmp_path / 'disk', 10 * 1024) as disk:
        bag = open_bag(disk / 'bag', said)
        record(bag, 400)  # 20 MB
        bag.close()
        found = stamps(disk / 'bag')
    # Nothing is missing in between, and most of the room was used.
    assert found == list(range(1_000_000_000, 1_000_000_000 + len(found)))
    assert 5 * MIB < len(found) * 50_000 < 10 * MIB
    assert said == [
        f'{disk}/bag/bag.mcap: recording has ended: No space left on device; it is closed, with '
        'what fitted'
    ]


def test_a_disk_that_somebody_else_fills_costs_nothing_that_was_recorded(tmp_path):
    said = []
    with small_disk(tmp_path / 'disk', 10 * 1024) as disk:
        bag = open_bag(disk / 'bag', said)
        record(bag, 10)  # still in memory
        fill(disk)
        bag.close()
        assert len(stamps(disk / 'bag')) == 10
    assert not said


def test_a_bag_that_cannot_be_closed_is_said_and_ends_nobody(tmp_path):
    said = []
    bag = open_bag(tmp_path / 'bag', said)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, before[1]))
    try:
        record(bag, 100)
        bag.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (text,) = said
    assert 'bag.mcap: recording has ended: File too large; it cannot be closed' in text


def test_without_room_for_its_end_a_bag_is_not_begun(tmp_path):
    with (
        small_disk(tmp_path / 'disk', 1024) as disk,
        pytest.raises(OSError, match='MiB') as raised,
    ):
        Bag(disk / 'bag', print)
    assert raised.value.filename == str(disk)
    assert not (disk / 'bag').exists()


def test_a_reserve_is_room_that_nobody_else_gets(tmp_path):
    with small_disk(tmp_path / 'disk', 4096) as disk:
        with Reserve(disk, 2 * MIB, 'a test'):
            assert list(disk.iterdir()) == []
            filler = fill(disk)
            assert filler.stat().st_size <= 2 * MIB
        (disk / 'more').write_bytes(bytes(MIB))


def test_a_child_whose_log_is_full_never_waits_for_a_reader(tmp_path):
    """A pipe takes 64 KiB; the child writes a hundred times as much."""
    said = []
    numbers = tmp_path / 'numbers.json'
    numbers.write_text(json.dumps(list(range(600_000))))
    with small_disk(tmp_path / 'disk', 256) as disk, Supervisor(disk, said.append) as supervisor:
        child = supervisor.start('chatty', 'json.tool', [str(numbers)])
        end_s = time.monotonic() + 60.0
        while child.running:
            assert time.monotonic() < end_s, 'the child waits for a reader'
            time.sleep(0.01)
        child.stop()
        assert child.last_output().endswith('599999\n]')
    assert said == [
        f'{disk}/chatty.log: cannot be written: No space left on device; the log ends here'
    ]
