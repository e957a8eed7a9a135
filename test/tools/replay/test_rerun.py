"""Recorded inferences run again: the same to the last bit, or skipped and named."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from paths import ROOT
from recorded_bag import Turn, first_turns, record
from thorough import thorough_but
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.bundle.folder import Bundle, read_bundle
from vla_runtime.family.listing import find_family
from vla_runtime.files.machine import machine
from vla_runtime.messages import trajectories
from vla_runtime.messages.trajectories import chunk_to_message, message_to_chunk
from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.recording.topics import CHUNK_TYPES, PLAN_TYPES, TRAJECTORY
from vla_runtime.types import ActionChunk, ChunkHeader
from vla_tools.replay.recorded import ReplayError, SkippedInference, read_run
from vla_tools.replay.rerun import Replay, compare_chunks, recorded_observations
from vla_tools.replay.setup import Changes, _other_machine, fit_recording
from vla_tools.replay.summary import ReplaySummary

BOUNDED = {
    'cache_mode': 'bounded',
    'cache_max_age_s': 5.0,
    'cache_max_reuses': 100,
    'cache_max_image_change': 255.0,
    'cache_max_state_bins': 256,
}


def replay(folder, changes=None):
    """Everything that a replay found, and the replay."""
    made = Replay(read_run(BagReader(folder)), changes or Changes())
    return list(made.inferences()), made


def identical(found) -> list[bool]:
    for one in found:
        assert not isinstance(one, SkippedInference), one.reason
    return [one.error is not None and one.error.identical for one in found]


def test_every_chunk_is_the_recorded_one_bit_for_bit(recording):
    found, made = replay(recording)
    assert len(found) == len(first_turns())
    assert identical(found) == [True] * len(found)
    assert list(made.differences) == []
    assert [one.report.number for one in found] == [0, 1, 2, 3, 4, 0, 1, 2]
    assert [one.report.rtc_mode for one in found][2:4] == ['guided', 'guided']
    assert max(one.report.beta for one in found) == 1.0 + np.pi / 7


def test_a_recording_of_trajectories_with_tags_replays_bit_for_bit(
    tmp_path, robot_file, monkeypatch
):
    made = write_tiny_policy(tmp_path / 'tiny', tiny_spec('pi0'))
    with monkeypatch.context() as earlier:
        earlier.setattr(trajectories, 'typed_messages', lambda: None)
        folder = record(tmp_path / 'bag', made, robot_file, [Turn(), Turn(still=True)])
    kinds = {raw.type_name for raw in BagReader(folder).messages(lambda topic, kind: True)}
    assert TRAJECTORY in kinds and not kinds & {CHUNK_TYPES[0], PLAN_TYPES[0]}
    found, _ = replay(folder)
    assert identical(found) == [True, True]


# What else a head can be asked for.
_OF_HEAD = {'flow': {'real_time_chunking': True}, 'tokens': {'pipeline': 'packed'}}


@pytest.mark.parametrize(
    'family', thorough_but(['smolvla', 'openvla'], ['pi0', 'smolvla', 'bitvla', 'openvla'])
)
def test_every_family_replays(tmp_path, robot_file, family):
    made = write_tiny_policy(tmp_path / family, tiny_spec(family))
    head = find_family(family).head
    more = [Turn(_OF_HEAD[head])] if head in _OF_HEAD else []
    turns = [Turn(), *more, Turn(still=True)]
    found, _ = replay(record(tmp_path / 'bag', made, robot_file, turns))
    assert identical(found) == [True] * len(turns)


def test_a_setting_changed_is_a_what_if(recording):
    found, made = replay(recording, Changes(settings={'denoise_steps': 2}))
    assert identical(found) == [False] * len(found)
    assert all(one.report.denoise_steps == 2 for one in found)
    assert list(made.differences) == ['setting denoise_steps = 2']
    assert all(0 < one.error.absolute.max() < 1000 for one in found)


def test_another_bundle_is_a_what_if_in_the_same_joints(recording, tmp_path):
    other = write_tiny_policy(
        tmp_path / 'other', tiny_spec('pi0', advantage='task_newline'), seed=5
    )
    found, made = replay(recording, Changes(bundle=other))
    assert identical(found) == [False] * len(found)
    assert found[0].error.joints == ('shoulder', 'elbow', 'gripper')
    (difference,) = made.differences
    assert difference.startswith('bundle ')


def test_a_bundle_of_other_units_sees_the_same_state(tmp_path, robot_file):
    spec = tiny_spec()
    moved = write_tiny_policy(tmp_path / 'tiny', spec)
    folder = record(tmp_path / 'bag', moved, robot_file, [Turn()])
    # The bundle that was recorded is not needed for it.
    moved.rename(tmp_path / 'elsewhere')
    elbow = replace(spec.state[1], unit='deg')
    turned = replace(spec, state=(spec.state[2], elbow, spec.state[0]))
    description = read_run(BagReader(folder)).inferences[0].description
    other = Bundle(tmp_path / 'other', turned, {})
    _, _, state = fit_recording(description, other)
    shoulder, elbow, gripper = 0.25, 0.5, 0.75
    recorded = np.array([shoulder, elbow, gripper])
    np.testing.assert_allclose(state(recorded), [gripper, np.degrees(elbow), shoulder], rtol=1e-12)


def test_the_first_chunk_that_differs_is_named(recording):
    summary = ReplaySummary('bag', '/vla_policy', units={'elbow': 'rad'})
    for number, one in enumerate(replay(recording)[0]):
        absolute = np.zeros_like(one.error.absolute)
        if number >= 3:
            absolute[2, 1] = 0.125
        error = replace(one.error, absolute=absolute, identical=number < 3)
        summary.add(replace(one, error=error))
    stamp_ns = replay(recording)[0][3].recorded.stamp_ns
    assert summary.as_json()['first_difference'] == {
        'episode': 1,
        'inference': 3,
        'stamp_ns': stamp_ns,
        'step': 2,
        'joint': 'elbow',
        'error': 0.125,
    }
    assert (
        f'  first that differs: inference 3 of episode 1 (stamp {stamp_ns} ns), most at step 2 of '
        'elbow: 0.125 rad'
    ) in summary.lines()


@pytest.mark.parametrize('joints', [('a', 'b', 'c'), ('a', 'left_arm/shoulder_pan_joint.pos', 'c')])
def test_the_table_of_joints_stays_in_line_whatever_their_names(recording, joints):
    summary = ReplaySummary('bag', '/vla_policy')
    for one in replay(recording)[0]:
        error = replace(one.error, joints=joints, absolute=one.error.absolute + 1.0)
        summary.add(replace(one, error=replace(error, identical=False)))
    lines = summary.lines()
    header = next(index for index, line in enumerate(lines) if 'mean error' in line)
    rows = lines[header : header + 1 + len(joints)]
    assert [row.split()[0] for row in rows[1:]] == list(joints)
    assert len({len(row) for row in rows}) == 1


def test_a_frame_that_is_missing_skips_its_inference_alone(tmp_path, bundle, robot_file):
    turns = [Turn(), Turn(lost=['/wrist/image']), Turn(), Turn(lost=['/committed_plan'])]
    found, _ = replay(record(tmp_path / 'bag', bundle, robot_file, turns))
    assert [isinstance(one, SkippedInference) for one in found] == [False, True, False, True]
    assert found[1].reason == 'camera wrist: its frame of /wrist/image is not in the recording'
    assert found[3].reason == 'its committed_plan is not in the recording'
    assert identical(found[::2]) == [True, True]


def test_a_chunk_that_is_missing_is_noted(tmp_path, bundle, robot_file):
    turns = [Turn(), Turn(lost=['/action_chunk'])]
    found, _ = replay(record(tmp_path / 'bag', bundle, robot_file, turns))
    assert found[1].error is None
    assert found[1].note == 'its action_chunk is not in the recording'


def test_an_inference_whose_instruction_changed_meanwhile_is_not_taken_for_a_lost_report(
    tmp_path, bundle, robot_file
):
    turns = [Turn(), Turn(discarded=True), Turn(), Turn(lost=['/vla_policy/report']), Turn()]
    recording = record(tmp_path / 'bag', bundle, robot_file, turns)
    run = read_run(BagReader(recording))
    assert [one.number for one in run.inferences] == [0, 2, 4]
    # One report was lost, and one inference has none.
    assert [problem for problem in run.problems if 'at least 1 inferences' in problem]
    found, _ = replay(recording)
    assert identical(found) == [True, True, True]


def test_an_uncertain_chunk_that_is_identical_makes_up_for_no_certain_one_that_differs(recording):
    summary = ReplaySummary('bag', '/vla_policy')
    for number, one in enumerate(replay(recording)[0]):
        error = replace(one.error, identical=number > 0)
        summary.add(replace(one, error=error, note='uncertain' if number > 3 else ''))
    assert summary.is_broken


def test_chunks_of_another_policys_joints_are_noted_and_not_added_up(recording):
    first, *others = replay(recording)[0]
    summary = ReplaySummary('bag', '/vla_policy')
    summary.add(first)
    for one in others:
        joints = tuple(f'other_{name}' for name in one.error.joints)
        summary.add(replace(one, error=replace(one.error, joints=joints, identical=False)))
    assert (summary.error.chunks, summary.error.joints) == (1, first.error.joints)
    assert sum(summary.notes.values()) == len(others)
    assert not summary.is_broken
    assert any('another policy ran then' in line for line in summary.lines())


def test_bounded_reuse_is_followed_in_order(tmp_path, bundle, robot_file):
    turns = [*[Turn(BOUNDED)] * 4, *[Turn(BOUNDED, episode=2)] * 2]
    found, _ = replay(record(tmp_path / 'bag', bundle, robot_file, turns))
    assert identical(found) == [True] * 6
    assert [one.report.runs['vision'] for one in found] == [2, 0, 0, 0, 2, 0]
    assert not any(one.note for one in found)


def test_bounded_reuse_after_a_gap_is_uncertain(tmp_path, bundle, robot_file):
    turns = [
        Turn(BOUNDED, lost=['/wrist/image']),
        Turn(BOUNDED),
        Turn(BOUNDED, episode=2),
    ]
    found, _ = replay(record(tmp_path / 'bag', bundle, robot_file, turns))
    assert isinstance(found[0], SkippedInference)
    assert 'uncertain' in found[1].note
    assert identical(found[1:]) == [False, True]
    assert not found[2].note


def test_a_ring_is_one_recording(tmp_path, bundle, robot_file):
    from vla_runtime.recording.recording import RecordingLimits

    limits = RecordingLimits(most_bytes=400_000)
    folder = record(tmp_path / 'ring', bundle, robot_file, [Turn()] * 72, limits=limits)
    assert len(list(folder.iterdir())) > 2
    found, _ = replay(folder)
    complete = [one for one in found if not isinstance(one, SkippedInference)]
    assert len(complete) > 8
    assert identical(complete) == [True] * len(complete)


def test_a_bundle_that_is_gone_is_said(tmp_path, bundle, robot_file):
    moved = write_tiny_policy(tmp_path / 'tiny', tiny_spec())
    folder = record(tmp_path / 'bag', moved, robot_file, [Turn()])
    moved.rename(tmp_path / 'elsewhere')
    with pytest.raises(ValueError, match='bundle'):
        replay(folder)
    found, made = replay(folder, Changes(bundle=tmp_path / 'elsewhere'))
    assert identical(found) == [True]
    assert list(made.differences) == []


def test_a_cpu_of_the_same_name_with_other_instructions_is_another_machine():
    def differences(**other: Any) -> list[str]:
        facts = {'cpu': machine()['cpu'], **other}
        return _other_machine(SimpleNamespace(versions={}, machine=facts))

    here = machine()['cpu_instructions']
    assert differences(cpu_instructions='amx_bf16') == [
        f'cpu_instructions {here} (recorded: amx_bf16)'
    ]
    # Older recordings lack them.
    assert differences() == differences(cpu_instructions=here) == []


def test_a_replay_imports_no_ros_2():
    code = (
        'import sys\n'
        'import vla_tools.replay.rerun, vla_tools.replay.summary\n'
        'roots = {name.split(".")[0] for name in sys.modules}\n'
        'print([r for r in roots if r.startswith("rcl") or r.endswith(("_msgs", "_interfaces"))])'
    )
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == '[]'


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


RATES_HZ = range(1, 121)
HEADER = ChunkHeader(observation_ns=1, episode=1, number=0)


def _chunk(step_time_s: float) -> ActionChunk:
    rows = np.random.default_rng(0).normal(size=(50, 1))
    return ActionChunk(rows, ('a',), ('position',), step_time_s, rows.astype(np.float32))


def test_a_chunk_is_identical_to_itself_after_its_message_at_every_rate():
    for rate_hz in RATES_HZ:
        chunk = _chunk(1 / rate_hz)
        recorded, _ = message_to_chunk(chunk_to_message(chunk, HEADER))
        assert compare_chunks(recorded, chunk).identical, rate_hz


def test_another_rate_cannot_be_compared():
    for rate_hz in RATES_HZ:
        with pytest.raises(ValueError, match='cannot be compared'):
            compare_chunks(_chunk(1 / rate_hz), _chunk(1 / (rate_hz + 1)))
