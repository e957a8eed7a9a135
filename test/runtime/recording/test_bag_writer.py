"""A bag that the disk ends is closed and holds what fitted."""

import json
import resource
import time

import numpy as np
import pytest
from full_disk import fill, small_disk
from rosbags.rosbag2 import Reader

from vla_runtime.processes.supervisor import Supervisor
from vla_runtime.recording.bag_writer import Bag, Offer, Reserve

MIB = 1 << 20
# Cannot be compressed, nor can several after each other.
_NOISE = np.random.default_rng(0).bytes(4 * MIB)


def record(bag: Bag, messages: int) -> None:
    for number in range(messages):
        begin = number * 50_000 % (3 * MIB)
        message = b'\x00\x01\x00\x00' + _NOISE[begin : begin + 50_000]
        bag.write('/front', 1_000_000_000 + number, message)


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
