"""Bags are read as far as they can be read; what cannot is named."""

from __future__ import annotations

import os
import sqlite3
from threading import Thread

import numpy as np
import pytest
from bag_formats import FORMATS, open_writer
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore
from thorough import thorough_but

from vla_runtime.files.typed_yaml import LARGEST_FILE
from vla_runtime.recording.bag_reader import (
    BagReader,
    BagReadError,
    find_recordings,
    is_recording,
)
from vla_runtime.recording.bag_writer import Offer
from vla_runtime.recording.recording import Recording, RecordingLimits
from vla_runtime.recording.storage_file import header_stamp_ns

TYPES = get_typestore(Stores.ROS2_JAZZY)
STRING = 'std_msgs/msg/String'
JOINTS = 'sensor_msgs/msg/JointState'


def text(words: str) -> bytes:
    message = TYPES.types[STRING](data=words)
    return bytes(TYPES.serialize_cdr(message, STRING))


def joints(stamp_ns: int) -> bytes:
    kinds = TYPES.types
    stamp = kinds['builtin_interfaces/msg/Time'](sec=stamp_ns // 10**9, nanosec=stamp_ns % 10**9)
    header = kinds['std_msgs/msg/Header'](stamp=stamp, frame_id='')
    empty = np.zeros(0)
    message = kinds[JOINTS](header, ['a'], np.array([0.25]), empty, empty)
    return bytes(TYPES.serialize_cdr(message, JOINTS))


def write(folder, form='mcap', count=30):
    """A bag as other tools write it."""
    writer = open_writer(folder, form)
    try:
        said = writer.add_connection('/said', STRING, typestore=TYPES)
        measured = writer.add_connection('/joint_states', JOINTS, typestore=TYPES)
        for number in range(count):
            writer.write(said, number, text(f'word {number}'))
            writer.write(measured, number, joints(5_000_000_000 + number))
    finally:
        writer.close()
    return folder


def words(reader) -> list[str]:
    wanted = reader.messages(lambda topic, kind: kind == STRING)
    return [message.data for raw in wanted if (message := reader.read(raw)) is not None]


def test_a_pointer_of_git_lfs_is_no_bag_and_the_message_says_what_to_do(tmp_path) -> None:
    file = tmp_path / 'bag_0.mcap'
    file.write_bytes(b'version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n')
    for path in (tmp_path, file):
        with pytest.raises(BagReadError, match=r'bag_0\.mcap: .*git lfs pull'):
            BagReader(path)


@pytest.mark.parametrize('form', FORMATS)
def test_bags_of_every_kind_are_read(tmp_path, form):
    reader = BagReader(write(tmp_path / 'bag', form))
    assert words(reader) == [f'word {number}' for number in range(30)]
    raw = list(reader.messages(lambda topic, _: topic == '/joint_states'))
    assert [header_stamp_ns(message.serialised) for message in raw] == [
        5_000_000_000 + number for number in range(30)
    ]
    assert reader.read(raw[0]).position.tolist() == [0.25]
    assert reader.problems == []


@pytest.mark.parametrize('form', ['mcap', 'sqlite'])
def test_a_bag_without_its_metadata_is_read(tmp_path, form):
    folder = write(tmp_path / 'bag', form)
    (folder / 'metadata.yaml').unlink()
    assert len(words(BagReader(folder))) == 30
    (file,) = folder.iterdir()
    assert len(words(BagReader(file))) == 30


def test_a_recording_that_was_never_closed_gives_what_was_written(tmp_path):
    recording = Recording(tmp_path / 'bag', RecordingLimits(), print)
    recording.add_topic('/said', STRING, Offer(depth=1))
    random = np.random.default_rng(0)
    for number in range(2000):
        recording.write('/said', number, text(f'word {number} {random.bytes(600).hex()}'))
    recording._bag._storage.bio.flush()
    reader = BagReader(tmp_path / 'bag')
    found = words(reader)
    assert 500 < len(found) < 2000
    assert found[-1].startswith(f'word {len(found) - 1} ')
    assert 'has no end: the recorder did not close it' in reader.problems[0]
    recording.close()
    assert len(words(BagReader(tmp_path / 'bag'))) == 2000


@pytest.mark.parametrize('form', thorough_but(['mcap', 'sqlite'], FORMATS))
def test_a_cut_off_bag_gives_what_is_before_the_cut(tmp_path, form):
    folder = write(tmp_path / 'bag', form, count=20_000)
    (file,) = (path for path in folder.iterdir() if path.suffix in ('.mcap', '.db3'))
    data = file.read_bytes()
    file.write_bytes(data[: len(data) * 2 // 3])
    reader = BagReader(folder)
    found = words(reader)
    assert found == [f'word {number}' for number in range(len(found))]
    assert len(found) < 20_000
    assert reader.problems and str(file) in reader.problems[0]
    if form.startswith('mcap'):
        assert len(found) > 5_000


def test_a_damaged_chunk_costs_its_own_messages(tmp_path):
    recording = Recording(tmp_path / 'bag', RecordingLimits(), print)
    recording.add_topic('/said', STRING, Offer(depth=1))
    random = np.random.default_rng(0)
    for number in range(4000):
        recording.write('/said', number, text(f'word {number} {random.bytes(600).hex()}'))
    recording.close()
    file = tmp_path / 'bag' / 'bag.mcap'
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)
    reader = BagReader(tmp_path / 'bag')
    found = [int(line.split()[1]) for line in words(reader)]
    assert found[0] == 0 and found[-1] == 3999
    assert 2000 < len(found) < 4000
    (problem,) = reader.problems
    assert 'a chunk cannot be unpacked' in problem and 'its messages are lost' in problem


def test_a_damaged_record_is_passed_over_by_the_index(tmp_path):
    folder = write(tmp_path / 'bag', count=40_000)
    file = folder / 'bag.mcap'
    data = bytearray(file.read_bytes())
    # A record of no kind, where the walk is between two chunks.
    first_index = _first_index(bytes(data))
    data[first_index] = 0xEE
    file.write_bytes(data)
    reader = BagReader(folder)
    assert len(words(reader)) == 40_000
    assert 'no record begins here; read on at' in reader.problems[0]


def _first_index(data: bytes) -> int:
    """Position of the first message index, behind the first chunk."""
    place = 8
    while data[place] != 0x07:
        place += 9 + int.from_bytes(data[place + 1 : place + 9], 'little')
    return place


def test_a_message_that_is_damaged_is_noted_once(tmp_path):
    writer = Writer(tmp_path / 'bag', version=9, storage_plugin=StoragePlugin.MCAP)
    with writer:
        said = writer.add_connection('/said', STRING, typestore=TYPES)
        for number in range(10):
            writer.write(said, number, text('word')[:-3] if number % 2 else text('word'))
    reader = BagReader(tmp_path / 'bag')
    assert words(reader) == ['word'] * 5
    (problem,) = reader.problems
    assert 'topic /said: a message cannot be read' in problem


def test_a_damaged_database_is_named(tmp_path):
    folder = write(tmp_path / 'bag', 'sqlite')
    with sqlite3.connect(folder / 'bag.db3') as connection:
        connection.execute('DROP TABLE topics')
    reader = BagReader(folder)
    assert words(reader) == []
    assert 'is damaged: no such table: topics' in reader.problems[0]


def test_what_is_no_bag_is_refused(tmp_path):
    (tmp_path / 'notes.txt').write_text('')
    for path, reason in (
        (tmp_path / 'nowhere', 'does not exist'),
        (tmp_path / 'notes.txt', r"is not a bag file \('.txt'\)"),
        (tmp_path, 'has no bag file'),
    ):
        assert not is_recording(path)
        with pytest.raises(BagReadError, match=reason):
            BagReader(path)
    # As rosbag2 names them; zstd itself does not know the ending.
    packed = tmp_path / 'bag_0.mcap.zstd'
    packed.write_bytes(b'')
    for path in (tmp_path, packed):
        with pytest.raises(BagReadError, match=r'/bag_0\.mcap'):
            BagReader(path)


def test_a_topic_that_is_not_cdr_is_named_and_no_damage(tmp_path):
    write(tmp_path / 'bag')
    file = tmp_path / 'bag' / 'bag.mcap'
    file.write_bytes(file.read_bytes().replace(b'\x03\x00\x00\x00cdr', b'\x03\x00\x00\x00xyz'))
    reader = BagReader(tmp_path / 'bag')
    assert words(reader) == []
    assert reader.problems == [
        f"{file}: topic {topic} is encoded as 'xyz', not as cdr"
        for topic in ('/said', '/joint_states')
    ]


def test_files_of_a_split_bag_are_read_in_order(tmp_path):
    for number in (2, 10, 1):
        write(tmp_path / f'part{number}', count=number)
        (tmp_path / f'part{number}' / f'part{number}.mcap').rename(tmp_path / f'bag_{number}.mcap')
    assert [file.name for file in BagReader(tmp_path).files] == [
        'bag_1.mcap',
        'bag_2.mcap',
        'bag_10.mcap',
    ]


@pytest.fixture
def parts(tmp_path):
    """A folder with two files, whose names sort as they were written."""
    for name in ('bag_2.mcap', 'bag_10.mcap'):
        (tmp_path / name).write_bytes(b'')
    return tmp_path


_TURNED = 'relative_file_paths: [bag_10.mcap, bag_2.mcap]'


def test_files_of_different_names_are_recordings_of_their_own(parts):
    bag = next(iter(parts.glob('*.mcap')))
    assert find_recordings([parts]) == [parts]
    for name in ('cut.mcap', 'other.mcap'):
        (parts / name).write_bytes(bag.read_bytes())
    loose = [parts / 'cut.mcap', parts / 'other.mcap']
    # The parts that a name or metadata ties together are still one.
    named = '[' + ', '.join(file.name for file in sorted(parts.glob('bag_*'))) + ']'
    (parts / 'metadata.yaml').write_text(
        f'rosbag2_bagfile_information: {{relative_file_paths: {named}}}'
    )
    assert sorted(find_recordings([parts])) == sorted([*loose, parts])
    assert set(BagReader(parts).files) == set(parts.glob('bag_*'))
    for file in (parts / 'metadata.yaml', *parts.glob('bag_*')):
        file.unlink()
    assert find_recordings([parts]) == loose
    with pytest.raises(BagReadError):
        BagReader(parts)


def test_metadata_says_which_file_comes_first(parts):
    (parts / 'metadata.yaml').write_text(f'rosbag2_bagfile_information:\n  {_TURNED}\n')
    assert [file.name for file in BagReader(parts).files] == ['bag_10.mcap', 'bag_2.mcap']


def test_a_part_that_metadata_names_and_that_is_not_there_is_a_problem(parts):
    metadata = parts / 'metadata.yaml'
    metadata.write_text(
        'rosbag2_bagfile_information:\n'
        '  relative_file_paths: [bag_2.mcap, bag_7.mcap, bag_10.mcap.zstd]\n'
    )
    (problem,) = BagReader(parts).problems
    assert problem.startswith(f'{parts}/bag_7.mcap: is missing: metadata.yaml names it')
    # Who asks for one file gets it.
    assert BagReader(parts / 'bag_2.mcap').problems == []
    # Files that were renamed are all there.
    metadata.write_text('rosbag2_bagfile_information: {relative_file_paths: [old_0.mcap]}')
    assert BagReader(parts).problems == []


def test_a_part_of_a_ring_that_is_missing_is_a_problem(tmp_path):
    record_ring(tmp_path / 'ring')
    first = min((tmp_path / 'ring').glob('0*'))
    file = next(first.glob('*.mcap'))
    names = f'[{file.name}, gone.mcap]'
    (first / 'metadata.yaml').write_text(
        f'rosbag2_bagfile_information: {{relative_file_paths: {names}}}'
    )
    assert [problem.split(':')[0] for problem in BagReader(tmp_path / 'ring').problems] == [
        f'{first}/gone.mcap'
    ]


@pytest.mark.parametrize(
    'metadata',
    [
        f'a: &a {{{_TURNED}}}\nrosbag2_bagfile_information:\n  <<: *a\n',
        f'rosbag2_bagfile_information:\n  {_TURNED}\n' + '#' * LARGEST_FILE,
        'rosbag2_bagfile_information: [1]',
        'rosbag2_bagfile_information:\n  relative_file_paths: 7\n',
        '[',
    ],
    ids=['merge key', 'too large', 'list', 'number', 'damaged'],
)
def test_metadata_that_is_not_used_costs_no_file(parts, metadata):
    (parts / 'metadata.yaml').write_text(metadata)
    assert [file.name for file in BagReader(parts).files] == ['bag_2.mcap', 'bag_10.mcap']


def test_a_fifo_in_the_place_of_metadata_is_not_waited_for(parts):
    os.mkfifo(parts / 'metadata.yaml')
    found = []
    reading = Thread(target=lambda: found.append(BagReader(parts).files), daemon=True)
    reading.start()
    reading.join(60.0)
    assert [file.name for file in found[0]] == ['bag_2.mcap', 'bag_10.mcap']


def record_ring(folder) -> None:
    """A bag every tenth of a second; the task is given at 0 and again at 0.25."""
    now = [0.0]
    recording = Recording(folder, RecordingLimits(keep_s=0.8), print, clock=lambda: now[0])
    recording.add_topic('/task', STRING, Offer(depth=1, latched=True))
    recording.add_topic('/joint_states', JOINTS, Offer(depth=1))
    for number in range(50):
        now[0] = number * 0.01
        if number in (0, 25):
            recording.write('/task', number, text('wave'))
        recording.write('/joint_states', number, joints(number))
    recording.close()


def test_what_the_bags_of_a_ring_repeat_is_read_once(tmp_path):
    record_ring(tmp_path / 'ring')
    assert len(list((tmp_path / 'ring').glob('0*'))) > 3
    reader = BagReader(tmp_path / 'ring')
    read = [(raw.topic, raw.time_ns) for raw in reader.messages(lambda topic, kind: True)]
    assert [time_ns for topic, time_ns in read if topic == '/task'] == [0, 25]
    assert [time_ns for topic, time_ns in read if topic == '/joint_states'] == list(range(50))


def test_numbered_folders_are_one_recording_only_where_a_ring_wrote_them(tmp_path):
    record_ring(tmp_path / 'ring')
    assert find_recordings([tmp_path]) == [tmp_path / 'ring']
    for name in ('000000', '000001'):
        write(tmp_path / 'numbered' / name)
    assert find_recordings([tmp_path / 'numbered']) == [
        tmp_path / 'numbered' / '000000',
        tmp_path / 'numbered' / '000001',
    ]
