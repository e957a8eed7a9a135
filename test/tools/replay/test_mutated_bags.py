"""Damaged bags end in our own errors or in a partial replay, and never in a crash."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from bag_formats import FORMATS, open_writer
from recorded_bag import Turn, record
from rosbags.rosbag2 import Reader
from thorough import thorough_but

from vla_runtime.recording.bag_reader import BagReader
from vla_tools.replay.recorded import SkippedInference, read_run
from vla_tools.replay.rerun import Replay
from vla_tools.replay.setup import Changes
from vla_tools.replay.summary import ReplaySummary

TURNS = [Turn(), Turn({'real_time_chunking': True}), Turn({'cache_mode': 'off'}, episode=2)]
_FEW = 48


@pytest.fixture(scope='module')
def originals(tmp_path_factory, bundle, robot_file) -> list[Path]:
    """One recording in three forms: as ours, without compression, and in SQLite."""
    folder = tmp_path_factory.mktemp('originals')
    ours = record(folder / 'ours', bundle, robot_file, TURNS)
    plain = [
        rewrite(ours, folder / name, form) for name, form in (('plain', 'mcap'), ('db3', 'sqlite'))
    ]
    return [ours, *plain]


def rewrite(source: Path, target: Path, form: str, without: str = '') -> Path:
    """The same messages in another format, those of one topic left out."""
    with Reader(source) as reader, closing(open_writer(target, form)) as writer:
        known = {}
        for connection, stamp, data in reader.messages():
            if connection.topic == without:
                continue
            if connection.topic not in known:
                known[connection.topic] = writer.add_connection(
                    connection.topic,
                    connection.msgtype,
                    msgdef=connection.msgdef.data,
                    rihs01=connection.digest or 'RIHS01_0',
                    offered_qos_profiles=connection.ext.offered_qos_profiles,
                )
            writer.write(known[connection.topic], stamp, data)
    return target


def mutate(source: Path, target: Path, seed: int) -> Path:
    """Cut the file, flip bytes of it, or write over a part of it."""
    random = np.random.default_rng(seed)
    (file,) = (path for path in source.iterdir() if path.suffix in ('.mcap', '.db3'))
    data = bytearray(file.read_bytes())
    kind = seed % 4
    if kind == 0:
        del data[int(random.integers(0, len(data))) :]
    elif kind == 1:
        for place in random.integers(0, len(data), int(random.integers(1, 40))):
            data[place] ^= 1 << int(random.integers(0, 8))
    elif kind == 2:
        begin = int(random.integers(0, len(data)))
        length = int(random.integers(1, 2000))
        data[begin : begin + length] = random.bytes(len(data[begin : begin + length]))
    else:
        # Where the words and numbers are, rather than the pixels.
        places = [place for place in range(len(data)) if 0x20 <= data[place] < 0x7F]
        for place in random.choice(places, int(random.integers(1, 60))):
            data[place] = int(random.integers(0x20, 0x7F))
    target.mkdir()
    (target / file.name).write_bytes(data)
    return target


def replayed(folder: Path) -> tuple[int, str]:
    """Number of inferences that were run again, and why there are no more."""
    try:
        run = read_run(BagReader(folder))
        replay = Replay(run, Changes())
        summary = ReplaySummary(str(folder), run.node)
        for found in replay.inferences():
            summary.add(found)
        summary.finish(run, tuple(replay.differences), 0.0)
        assert summary.lines() and summary.as_json()
        return summary.replayed, '; '.join([*summary.problems, *summary.skipped])
    # What a person can mend says all in its text. Anything else is a crash.
    except ValueError as error:
        assert type(error).__module__.startswith('vla_') or str(error)
        assert not isinstance(error, UnicodeError)
        return 0, str(error)


def check(originals: list[Path], folder: Path, seeds: range) -> list[int]:
    counts = []
    for seed in seeds:
        damaged = mutate(originals[seed % 3], folder / str(seed), seed // 3)
        count, reason = replayed(damaged)
        assert count == len(TURNS) or reason, seed
        counts.append(count)
    return counts


@pytest.mark.parametrize('form', thorough_but(['mcap', 'sqlite'], FORMATS))
def test_a_recording_replays_from_every_format_of_rosbag2(originals, tmp_path, form):
    bag = rewrite(originals[0], tmp_path / 'bag', form)
    found = list(Replay(read_run(BagReader(bag)), Changes()).inferences())
    assert [one.error.identical for one in found] == [True] * len(TURNS)


def test_damaged_bags_end_in_our_errors_or_a_partial_replay(originals, tmp_path):
    counts = check(originals, tmp_path, range(_FEW))
    # Some of each: nothing, a part, everything.
    assert {0, len(TURNS)} < set(counts)


@pytest.mark.slow
def test_a_thousand_damaged_bags(originals, tmp_path):
    counts = check(originals, tmp_path, range(_FEW, _FEW + 1000))
    assert {0, 1, 2, len(TURNS)} == set(counts)


@pytest.mark.parametrize(
    ('topic', 'reason'),
    [
        (
            '/vla_policy/description',
            '…/vla_policy/description, which says what policy ran, was not',
        ),
        ('/vla_policy/report', ''),
        ('/committed_plan', 'its committed_plan is not in the recording'),
        ('/top/image', 'camera top: its frame of /top/image is not in the recording'),
    ],
)
def test_a_topic_that_is_missing_is_named(originals, tmp_path, topic, reason):
    folder = rewrite(originals[0], tmp_path / 'bag', 'mcap', without=topic)
    count, said = replayed(folder)
    assert count == 0
    assert reason in said


def test_found_frames_of_a_damaged_bag_are_the_recorded_ones(originals, tmp_path):
    """A chunk that is replayed from a damaged file is identical, or its damage is seen."""
    for seed in range(12):
        folder = mutate(originals[0], tmp_path / str(seed), 4 * seed + 1)
        try:
            run = read_run(BagReader(folder))
            found = list(Replay(run, Changes()).inferences())
        except ValueError:
            continue
        complete = [one for one in found if not isinstance(one, SkippedInference)]
        assert all(one.error.identical for one in complete if one.error is not None)
