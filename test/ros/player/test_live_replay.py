"""A recording played through the real policy node gives the chunks of the offline replay."""

from __future__ import annotations

import json
import shutil

import pytest
from forked import Fork
from graph import Process
from recorded_bag import ROBOT, Turn, first_turns, record
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.cli._live import LiveResult, _compare
from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.replay.frames import SkippedInference
from vla_runtime.replay.live_steps import live_steps
from vla_runtime.replay.recorded import read_run

pytestmark = pytest.mark.graph


@pytest.fixture(scope='module')
def bundle(tmp_path_factory):
    spec = tiny_spec(advantage='task_newline')
    return write_tiny_policy(tmp_path_factory.mktemp('bundle') / 'tiny', spec)


@pytest.fixture(scope='module')
def robot_file(tmp_path_factory):
    path = tmp_path_factory.mktemp('robot') / 'tiny.yaml'
    path.write_text(ROBOT)
    return path


def replay(folder, tmp_path, *words: str) -> tuple[int, dict, str]:
    """Run the command in a process of its own, as it takes a ROS domain of its own.

    It is a fork that saves the imports; the policy node that it starts is none.
    """
    result = tmp_path / 'result.json'
    command = ['replay', str(folder), '--live', '--json', str(result), *words]
    process = Process(Fork('vla_runtime', command), 'replay')
    code = process.wait()
    (found,) = json.loads(result.read_text())['recordings'] if result.exists() else ({},)
    return code, found, process.text()


def test_live_offline_and_recorded_chunks_are_the_same(tmp_path, bundle, robot_file):
    folder = record(tmp_path / 'bag', bundle, robot_file, first_turns())
    code, found, said = replay(folder, tmp_path)
    assert code == 0, said
    count = len(first_turns())
    live = found['live']
    assert (live['played'], live['answered'], live['skipped']) == (count, count, {}), said
    assert (live['as_offline'], live['as_recorded'], live['agrees']) == (count, count, True)
    assert f'live: played {count} in' in said


@pytest.mark.thorough
def test_a_what_if_agrees_live_and_offline(tmp_path, bundle, robot_file):
    turns = [Turn(), Turn(), Turn(episode=2)]
    folder = record(tmp_path / 'bag', bundle, robot_file, turns)
    code, found, said = replay(folder, tmp_path, '--set', 'denoise_steps=2', '--rate', '8')
    assert code == 0, said
    live = found['live']
    assert (live['played'], live['as_offline'], live['as_recorded']) == (3, 3, 0)
    # Eight times as fast as it was recorded, and no faster.
    assert live['seconds'] >= found['recorded_s'] / 8


def test_a_chunk_whose_joint_state_is_not_there_is_noted(tmp_path, bundle, robot_file):
    turns = [Turn(), Turn(lost=['/joint_states']), Turn()]
    folder = record(tmp_path / 'bag', bundle, robot_file, turns)
    found = list(live_steps(read_run(BagReader(folder)), {}))
    assert [note for _, _, note in found] == [
        '',
        'the joint state that it used is not in the recording',
        '',
    ]


def test_the_first_live_chunk_that_differs_is_named():
    result, stamp_ns = LiveResult(), 17
    _compare(result, None, None, (3, 0, 5), 'a state is missing')
    assert result.agrees
    assert any('noted 1: a state is missing' in line for line in result.lines())
    _compare(result, None, None, (3, 1, stamp_ns), '')
    _compare(result, None, None, (3, 2, 18), '')
    assert not result.agrees
    words = f'first that differs from offline: inference 1 of episode 3 (stamp {stamp_ns} ns)'
    assert any(words in line for line in result.lines())


@pytest.mark.parametrize('place', [0, 1])
def test_a_lost_frame_costs_its_own_inference_alone(tmp_path, bundle, robot_file, place):
    turns = [Turn(lost=['/top/image'] if place == index else []) for index in range(3)]
    folder = record(tmp_path / 'bag', bundle, robot_file, turns)
    _, found, said = replay(folder, tmp_path)
    live = found['live']
    assert (live['played'], live['as_offline'], live['as_recorded']) == (2, 2, 2), said
    assert sum(live['skipped'].values()) == 1
    assert live['agrees']


def test_an_episode_is_played_up_to_its_first_gap(tmp_path, bundle, robot_file):
    turns = [Turn(), Turn(lost=['/committed_plan']), Turn(), Turn(episode=2)]
    folder = record(tmp_path / 'bag', bundle, robot_file, turns)
    found = list(live_steps(read_run(BagReader(folder)), {}))
    reasons = [one.reason if isinstance(one, SkippedInference) else '' for one in found]
    assert [bool(reason) for reason in reasons] == [False, True, True, False]
    assert 'inferences of its episode before it are missing' in reasons[2]
    assert [one[1].begins_episode for one in found if isinstance(one, tuple)] == [True, True]
    assert [one[1].parameters['instruction'] for one in found if isinstance(one, tuple)] == [
        'pick up the red cup'
    ] * 2


def test_what_cannot_be_played_is_refused(tmp_path, bundle, robot_file, capsys):
    from vla_runtime.cli import main as program

    folder = str(record(tmp_path / 'bag', bundle, robot_file, [Turn()]))
    again = str(shutil.copytree(folder, tmp_path / 'again'))
    assert program.main(['replay', folder, again, '--live']) == 2
    assert '--live plays one recording' in capsys.readouterr().err
    assert program.main(['replay', folder, '--live', '--rate', '-1']) == 2
    assert '--rate -1: expected more than 0' in capsys.readouterr().err
