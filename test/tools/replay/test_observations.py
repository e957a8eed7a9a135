"""Observations of a recording: those that the policy was given, evenly spread."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from recorded_bag import Turn, first_turns, record

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.recording.bag_reader import BagReader
from vla_tools.replay.recorded import ReplayError, read_run
from vla_tools.replay.rerun import recorded_observations


def test_states_and_instruction_are_those_of_the_reports(recording: Path, bundle: Path):
    found = recorded_observations(recording, read_bundle(bundle), 100)
    inferences = read_run(BagReader(recording)).inferences
    assert len(found) == len(first_turns()) == len(inferences)
    for one, recorded in zip(found, inferences, strict=True):
        np.testing.assert_array_equal(one.state, recorded.state)
        assert one.instruction == recorded.instruction
        assert set(one.images) == {'top', 'wrist'}
        assert one.images['wrist'].shape == (30, 40, 3)


def test_of_many_every_second_is_read(recording: Path, bundle: Path):
    every = recorded_observations(recording, read_bundle(bundle), 100)
    some = recorded_observations(recording, read_bundle(bundle), len(every) // 2)
    assert len(some) == len(every) // 2
    for one, same in zip(some, every[::2], strict=True):
        np.testing.assert_array_equal(one.images['top'], same.images['top'])


def test_a_recording_without_images_says_what_is_missing(
    tmp_path: Path, bundle: Path, robot_file: Path
):
    turns = [Turn(lost=('/top/image',)), Turn(lost=('/top/image',))]
    bag = record(tmp_path / 'bag', bundle, robot_file, turns)
    with pytest.raises(ReplayError):
        recorded_observations(bag, read_bundle(bundle), 10)
