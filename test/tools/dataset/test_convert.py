"""Bags become data sets: which episodes, which frames, which numbers, which files."""

from __future__ import annotations

import io
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from thorough import thorough_after, thorough_but

pytest.importorskip('pyarrow', reason='data sets need pyarrow')
pytest.importorskip('rosbags', reason='bags need rosbags')

import pyarrow.parquet as pq
import recorded_bag
from dataset_bag import MS, START_NS, Story, command, jpeg, pixels, position, write_bag
from rosbags.rosbag2 import StoragePlugin, Writer
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.recording.storage_file import message_types
from vla_runtime.recording.topics import MissingTopicError
from vla_runtime.robot.file import load_robot
from vla_tools.dataset import bag_frames
from vla_tools.dataset.bag_contents import read_contents
from vla_tools.dataset.bag_facts import read_facts
from vla_tools.dataset.convert import DatasetOptions, Result, convert
from vla_tools.dataset.layout import DatasetError
from vla_tools.dataset.writer import dataset_folder


class Made:
    """A data set that was made of one story."""

    def __init__(self, folder: Path, result: Result) -> None:
        self.folder, self.result = folder, result
        self.frames = pq.read_table(folder / 'data/chunk-000/file-000.parquet')
        self.episodes = pq.read_table(folder / 'meta/episodes/chunk-000/file-000.parquet')
        self.info = json.loads((folder / 'meta/info.json').read_text())
        self.statistics = json.loads((folder / 'meta/stats.json').read_text())

    def column(self, name: str) -> np.ndarray:
        return np.array(self.frames[name].to_pylist())

    def image(self, camera: str, index: int) -> bytes:
        return self.frames[f'observation.images.{camera}'][index].as_py()['bytes']


@pytest.fixture
def make(tmp_path: Path, robot_file: Path) -> Any:
    def made(story: Story, **options: Any) -> Made:
        bag = write_bag(tmp_path / f'bag{len(list(tmp_path.iterdir()))}', story)
        out = tmp_path / 'out'
        wanted = DatasetOptions(**{'robot': load_robot(robot_file), **options})
        return Made(out, convert([bag], out, wanted, force=True))

    return made


def test_each_frame_has_the_newest_that_was_there_at_its_time(make: Any) -> None:
    made = make(Story(frame_ms=100))
    assert made.info['fps'] == 20
    assert len(made.frames) == 60
    at_ms = 50 * np.arange(60)
    np.testing.assert_allclose(made.column('timestamp'), at_ms / 1000, atol=1e-6)
    state, action = made.column('observation.state'), made.column('action')
    np.testing.assert_allclose(state[:, 0], position(at_ms), atol=1e-6)
    np.testing.assert_allclose(state[:, 1], 0.05, atol=1e-6)
    np.testing.assert_allclose(action, np.stack([command(at_ms), at_ms * 0 + 0.25], 1), atol=1e-6)
    for index in (0, 1, 2, 59):
        shown = np.array(Image.open(io.BytesIO(made.image('top', index))))
        np.testing.assert_array_equal(shown, pixels(index // 2))
        # What a camera sent as JPEG is not encoded again.
        assert made.image('hand', index) == jpeg(index // 2)
    assert made.result.repeated == 60
    assert 'record_images' in made.result.lines()[2]


def test_names_and_shapes_are_those_of_the_robot_file(make: Any) -> None:
    made = make(Story())
    features = made.info['features']
    assert features['observation.state']['names'] == ['shoulder', 'gripper']
    assert features['action']['names'] == ['shoulder', 'gripper.velocity']
    assert features['observation.images.top'] == {
        'dtype': 'image',
        'shape': [12, 16, 3],
        'names': ['height', 'width', 'channels'],
    }
    assert list(features) == made.frames.column_names
    assert (made.info['codebase_version'], made.info['robot_type']) == ('v3.0', 'small')
    assert made.info['splits'] == {'train': '0:1'}


@pytest.mark.parametrize(
    ('story', 'tasks', 'begins_ms', 'verdicts'),
    [
        (Story(said=((0, 'wave'), (1500, 'point'))), ['wave', 'point'], [0, 1500], [None, None]),
        # Said again, it is tried again.
        (Story(said=((0, 'wave'), (1500, 'wave'))), ['wave', 'wave'], [0, 1500], [None, None]),
        (Story(episodes=((0, 7), (1200, 8))), ['wave', 'wave'], [0, 1200], [None, None]),
        (
            Story(episodes=((0, 7), (1200, 8)), typed=True),
            ['wave', 'wave'],
            [0, 1200],
            [None, None],
        ),
        # After a verdict nothing is tried until something begins anew.
        (
            Story(said=((0, 'wave'), (1900, 'point')), verdicts=((1200, True),)),
            ['wave', 'point'],
            [0, 1900],
            [True, None],
        ),
        (
            Story(said=((0, 'a'), (1500, 'b')), verdicts=((1400, False), (2900, True))),
            ['a', 'b'],
            [0, 1500],
            [False, True],
        ),
        # Nothing is to be done before there is a task, nor after it was taken back.
        (Story(said=((1000, 'wave'), (2200, ''))), ['wave'], [1000], [None]),
    ],
)
def test_an_episode_is_one_try_of_one_task(
    make: Any,
    story: Story,
    tasks: list[str],
    begins_ms: list[int],
    verdicts: list[bool | None],
) -> None:
    made = make(story)
    assert made.episodes['tasks'].to_pylist() == [[task] for task in tasks]
    assert made.episodes['success'].to_pylist() == verdicts
    assert made.episodes['start_ns'].to_pylist() == [START_NS + ms * MS for ms in begins_ms]
    lengths = made.episodes['length'].to_pylist()
    ends = np.cumsum(lengths).tolist()
    assert made.episodes['dataset_to_index'].to_pylist() == ends
    assert made.column('episode_index').tolist() == np.repeat(range(len(tasks)), lengths).tolist()
    assert made.column('index').tolist() == list(range(ends[-1]))
    assert made.column('frame_index').tolist() == [i for n in lengths for i in range(n)]
    known = list(dict.fromkeys(tasks))
    assert (
        made.column('task_index').tolist()
        == np.repeat([known.index(task) for task in tasks], lengths).tolist()
    )


def test_success_is_in_the_frames_where_every_episode_was_judged(make: Any) -> None:
    story = Story(said=((0, 'a'), (1500, 'b')), verdicts=((1400, False), (2900, True)))
    made = make(story)
    success = made.column('next.success')
    assert np.flatnonzero(success).tolist() == [len(success) - 1]
    assert 'next.success' not in make(Story(said=story.said)).info['features']


def test_where_a_camera_is_silent_the_episode_is_cut_in_two(make: Any) -> None:
    made = make(Story(length_ms=5000, no_frames={'top': (2000, 3500)}))
    assert made.episodes['start_ns'].to_pylist() == [START_NS, START_NS + 3500 * MS]
    # The last frame before the gap is shown for half a second more.
    assert made.episodes['length'].to_pylist() == [50, 30]
    assert make(Story(no_frames={'top': (2000, 2600)}), frame_age_s=1.0).result.episodes == 1


def test_a_damaged_frame_is_replaced_by_the_one_before_and_counted(make: Any) -> None:
    made = make(Story(damaged=(5, 30)))
    assert made.result.damaged == 2
    assert made.image('hand', 5) == made.image('hand', 4) == jpeg(4)
    assert 'the one before was taken' in ' '.join(made.result.lines())
    (fault,) = (line for line in made.result.lines() if "camera 'hand'" in line)
    assert '/hand/image' in fault
    # Before there is a sound one the episode has not begun.
    made = make(Story(damaged=(0, 1)))
    assert made.image('hand', 0) == jpeg(2)
    np.testing.assert_allclose(made.column('observation.state')[0, 0], position(100), atol=1e-6)
    assert made.episodes['length'].to_pylist() == [58]


@pytest.mark.parametrize(
    'story',
    thorough_after(
        2,
        [
            Story(prefix='/left'),
            Story(plugin=StoragePlugin.SQLITE3),
            # Recorded on another clock than the stamps', as beside a simulation.
            Story(clock_ms=500_000_000),
            # A simulation at half the speed.
            Story(clock_ms=500_000_000, slow=2.0),
        ],
    ),
)
def test_namespace_storage_and_clock_of_a_bag_change_nothing(make: Any, story: Story) -> None:
    made, plain = make(story), make(Story())
    for name in ('observation.state', 'action', 'timestamp'):
        np.testing.assert_array_equal(made.column(name), plain.column(name))


def test_what_came_after_a_reset_of_the_clock_is_paired_by_itself(make: Any) -> None:
    """A simulation that began anew in the middle, recorded on the machine's clock."""
    story = Story(length_ms=4000, said=((0, 'a'), (2000, 'b')), reset_ms=2000)
    made = make(story)
    assert made.result.tasks == ['a', 'b']
    # The last before the reset is shown for half a second more.
    action = np.delete(made.column('action')[:, 0], range(40, 50))
    np.testing.assert_allclose(action, command(50 * np.arange(80)), atol=1e-6)
    for index, number in ((0, 0), (39, 39), (49, 39), (50, 40), (89, 79)):
        assert made.image('hand', index) == jpeg(number)
    assert any('stamps of /joint_states go back 1 times' in text for text in made.result.lines())


@pytest.mark.parametrize(
    ('camera_ms', 'words'),
    [(None, 'messages of /top/image have no stamps'), (-500_000_000, '/top/image are of another')],
)
def test_a_camera_off_the_clock_has_the_times_of_its_recording(
    make: Any, camera_ms: int | None, words: str
) -> None:
    made = make(Story(camera_ms=camera_ms, clock_ms=500_000_000))
    for index in (0, 1, 58):
        shown = np.array(Image.open(io.BytesIO(made.image('top', index))))
        np.testing.assert_array_equal(shown, pixels(index))
    assert any(words in line for line in made.result.lines())


def test_of_several_robots_in_a_bag_one_is_chosen(tmp_path: Path, robot_file: Path) -> None:
    two = write_bag(
        tmp_path / 'two',
        Story(prefix='/left', said=((0, 'wave'),), commands=False),
        Story(prefix='/right', said=((0, 'point'),), verdicts=((2900, True),)),
    )
    robot = load_robot(robot_file)
    with pytest.raises(ValueError, match='--nam'):
        convert([two], tmp_path / 'out', DatasetOptions(robot=robot))
    with pytest.raises(ValueError, match='--namespace'):
        convert([two], tmp_path / 'out', DatasetOptions(robot=robot, namespace='middle'))
    # The left robot's commands are not there, and it does not get the right one's.
    with pytest.raises(ValueError, match='trajectory'):
        convert([two], tmp_path / 'out', DatasetOptions(robot=robot, namespace='left'))
    left = DatasetOptions(robot=robot, namespace='left', measured_actions=True)
    made = convert([two], tmp_path / 'left_out', left)
    assert (made.tasks, made.verdicts) == (['wave'], [None])
    made = convert([two], tmp_path / 'out', DatasetOptions(robot=robot, namespace='/right/'))
    assert (made.tasks, made.verdicts) == (['point'], [True])


@pytest.mark.parametrize(
    ('only', 'tasks', 'left'),
    [(None, ['a', 'b', 'c'], 0), ('judged', ['a', 'b'], 1), ('success', ['b'], 2)],
)
def test_only_what_was_judged_may_be_taken(
    make: Any, only: str | None, tasks: list[str], left: int
) -> None:
    said = ((0, 'a'), (1500, 'b'), (3000, 'c'))
    story = Story(length_ms=4500, said=said, verdicts=((1400, False), (2900, True)))
    made = make(story, only=only)
    assert (made.result.tasks, made.result.others) == (tasks, left)
    assert ('next.success' in made.frames.column_names) == (only is not None)
    assert any('another verdict than --only' in line for line in made.result.lines()) == bool(left)


def test_actions_may_be_the_next_measured_positions(make: Any) -> None:
    made = make(Story(commands=False), measured_actions=True)
    state, action = made.column('observation.state'), made.column('action')
    np.testing.assert_array_equal(action[:-1], state[1:])
    assert made.info['features']['action']['names'] == ['shoulder', 'gripper']


def test_task_and_rate_may_be_given(make: Any) -> None:
    made = make(Story(said=(), step_ms=0), task='wave', fps=10)
    assert (made.result.tasks, made.info['fps'], len(made.frames)) == (['wave'], 10, 30)
    # Of every episode, so what was said splits nothing off.
    assert make(Story(said=((0, 'a'),)), task='wave').result.tasks == ['wave']


def test_statistics_are_those_of_the_frames(make: Any) -> None:
    made = make(Story())
    action = made.column('action')
    said = made.statistics['action']
    for name, found in {
        'min': action.min(axis=0),
        'max': action.max(axis=0),
        'mean': action.mean(axis=0),
        'std': action.std(axis=0),
        'q01': np.quantile(action, 0.01, axis=0),
        'q99': np.quantile(action, 0.99, axis=0),
    }.items():
        np.testing.assert_allclose(said[name], found, atol=1e-6)
    assert said['count'] == [60]
    seen = np.stack([pixels(number) for number in range(60)]) / 255
    image = made.statistics['observation.images.top']
    np.testing.assert_allclose(np.ravel(image['mean']), seen.mean(axis=(0, 1, 2)), atol=1e-9)
    np.testing.assert_allclose(np.ravel(image['std']), seen.std(axis=(0, 1, 2)), atol=1e-9)
    assert np.shape(image['q50']) == (3, 1, 1)
    assert made.episodes['stats/action/min'].to_pylist() == [said['min']]


def test_several_bags_become_one_data_set(tmp_path: Path, robot_file: Path) -> None:
    bags = [
        write_bag(tmp_path / name, Story(said=((0, task),)))
        for name, task in (('first', 'wave'), ('second', 'point'))
    ]
    result = convert(bags, tmp_path / 'out', DatasetOptions(robot=load_robot(robot_file)))
    made = Made(tmp_path / 'out', result)
    assert made.episodes['source'].to_pylist() == [str(bag) for bag in bags]
    assert (made.info['total_episodes'], made.info['total_frames']) == (2, 120)
    tasks = pq.read_table(made.folder / 'meta/tasks.parquet')
    assert tasks.to_pydict() == {'task_index': [0, 1], 'task': ['wave', 'point']}
    assert json.loads(tasks.schema.metadata[b'pandas'])['index_columns'] == ['task']


# ---------------------------------------------------------------- what cannot be used


SILENT = {'top': (0, 3000)}


@pytest.mark.parametrize(
    ('story', 'words', 'early'),
    [
        (Story(said=()), '--task', True),
        (Story(said=((0, ' '),)), '--task', True),
        (Story(step_ms=0), 'with --fps', True),
        (Story(step_ms=30), 'no whole number', True),
        # Of a damaged chunk.
        (Story(step_ms=400_000), r'the policy.s 0\.0025 steps a second are no whole', True),
        (Story(commands=False), '--actions', True),
        (Story(no_frames=SILENT), "'top'", True),
        (Story(no_frames=SILENT, plugin=StoragePlugin.SQLITE3), "'top'", True),
        (Story(length_ms=500), 'no episode in which', False),
        (Story(damaged=tuple(range(60))), "'hand'", False),
        (Story(encoding='8UC3'), "'top'", False),
        (Story(encoding='32FC1'), "'top'", False),
        (Story(encoding='yuv444'), "'top'", False),
    ],
)
def test_what_is_missing_is_named_before_the_bag_is_read_where_that_can_be(
    make: Any,
    tmp_path: Path,
    story: Story,
    words: str,
    early: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if early:
        monkeypatch.setattr('vla_tools.dataset.convert.read_contents', lambda *_: pytest.fail())
    with pytest.raises((DatasetError, MissingTopicError), match=words):
        make(story)
    assert not any('out' in path.name for path in tmp_path.iterdir())


def test_a_blank_instruction_is_told_apart_from_a_topic_that_is_missing(make: Any) -> None:
    with pytest.raises(DatasetError, match=r'no topic .*/instruction says.*--task'):
        make(Story(said=()))
    with pytest.raises(DatasetError, match=r'topic /\S*/instruction is there, but.*--task'):
        make(Story(said=((0, ' '),)))


def _recorded(folder: Path, family: str) -> Path:
    """A recording of a policy that nobody gave an instruction."""
    robot = folder / 'tiny.yaml'
    size = 'width: 64, height: 48'
    text = recorded_bag.ROBOT.replace('width: 40, height: 30', size)
    robot.write_text(text.replace('topic: top/image', f'topic: top/image, {size}'))
    bundle = write_tiny_policy(folder / family, tiny_spec(family))
    return recorded_bag.record(folder / 'bag', bundle, robot, [recorded_bag.Turn()] * 8)


def test_a_policy_without_language_needs_no_task(tmp_path: Path) -> None:
    bag = _recorded(tmp_path, 'act')
    options = DatasetOptions(measured_actions=True)
    made = Made(tmp_path / 'out', convert([bag], tmp_path / 'out', options))
    assert made.result.tasks == [''] and made.info['fps'] == 20
    assert any('--task' in line for line in made.result.lines())
    tasks = pq.read_table(made.folder / 'meta/tasks.parquet')
    assert tasks.to_pydict() == {'task_index': [0], 'task': ['']}
    given = convert([bag], tmp_path / 'given', replace(options, task='wave'))
    assert given.tasks == ['wave'] and given.frames == made.result.frames


def test_a_policy_with_language_needs_a_task(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match='--task'):
        convert(
            [_recorded(tmp_path, 'pi05')], tmp_path / 'out', DatasetOptions(measured_actions=True)
        )


def test_a_bag_without_a_policy_needs_the_robot_file(tmp_path: Path) -> None:
    bag = write_bag(tmp_path / 'bag', Story())
    with pytest.raises(DatasetError, match='--robot'):
        convert([bag], tmp_path / 'out', DatasetOptions())


def test_a_bag_that_cannot_be_used_is_left_out_and_named(tmp_path: Path, robot_file: Path) -> None:
    bags = [
        write_bag(tmp_path / 'first', Story()),
        write_bag(tmp_path / 'second', Story(commands=False)),
        tmp_path / 'third.mcap',
    ]
    bags[2].write_bytes(b'nothing')
    options = DatasetOptions(robot=load_robot(robot_file))
    result = convert(bags, tmp_path / 'out', options)
    assert result.episodes == 1
    second, third = result.lines()[-2:]
    assert re.search(r'^left out: \S*second: .*--actions measured', second)
    assert re.search(r'^left out: \S*third.mcap: .*third.mcap', third)
    with pytest.raises(DatasetError):
        convert(bags[1:], tmp_path / 'none', options)
    assert not (tmp_path / 'none').exists()


@pytest.mark.parametrize(
    ('old', 'new', 'words'),
    [
        (
            'unit: m,',
            'unit: mm,',
            r'second: joint gripper is in mm there, and in m in \S*first: one',
        ),
        (
            'unit: rad, lower: -3.0, upper: 3.0,',
            'unit: rad, continuous: true,',
            'second: joint shoulder is in rad, continuous there, and in rad in',
        ),
    ],
)
def test_recordings_of_other_units_are_not_put_together(
    tmp_path: Path,
    robot_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    old: str,
    new: str,
    words: str,
) -> None:
    text = robot_file.read_text().replace(old, new)
    (tmp_path / 'other.yaml').write_text(text)
    robots = {'first': load_robot(robot_file), 'second': load_robot(tmp_path / 'other.yaml')}
    monkeypatch.setattr(
        'vla_tools.dataset.convert.read_facts',
        lambda reader, _, namespace: read_facts(reader, robots[reader.path.name], namespace),
    )
    bags = [write_bag(tmp_path / name, Story()) for name in robots]
    with pytest.raises(DatasetError, match=words):
        convert(bags, tmp_path / 'out', DatasetOptions())


def test_an_empty_folder_is_written_to(tmp_path: Path, robot_file: Path, monkeypatch: Any) -> None:
    bag = write_bag(tmp_path / 'bag', Story())
    (tmp_path / 'out').mkdir()
    monkeypatch.chdir(tmp_path / 'out')
    convert([bag], Path(), DatasetOptions(robot=load_robot(robot_file)))
    assert (tmp_path / 'out/meta/info.json').is_file()


def test_what_is_there_is_kept_unless_it_is_to_be_replaced(
    tmp_path: Path, robot_file: Path
) -> None:
    bag, out = write_bag(tmp_path / 'bag', Story()), tmp_path / 'out'
    options = DatasetOptions(robot=load_robot(robot_file))
    convert([bag], out, options)
    (out / 'mark').touch()
    with pytest.raises(DatasetError, match='--force'):
        convert([bag], out, options)
    assert (out / 'mark').exists()
    convert([bag], out, options, force=True)
    assert (out / 'meta/info.json').is_file() and not (out / 'mark').exists()
    other = tmp_path / 'pictures'
    other.mkdir()
    (other / 'cat.png').touch()
    with pytest.raises(DatasetError):
        convert([bag], other, options, force=True)
    assert (other / 'cat.png').exists()


@pytest.mark.parametrize('replaces', [False, True])
def test_what_was_begun_is_not_left_behind(
    tmp_path: Path, robot_file: Path, monkeypatch: pytest.MonkeyPatch, replaces: bool
) -> None:
    bag, out = write_bag(tmp_path / 'bag', Story()), tmp_path / 'out'
    options = DatasetOptions(robot=load_robot(robot_file))
    if replaces:
        convert([bag], out, options)
    encode, calls = bag_frames.encode, iter(range(1000))

    def fail_later(message: Any, camera: Any) -> Any:
        if next(calls) == 30:
            raise OSError(28, 'No space left on device')
        return encode(message, camera)

    monkeypatch.setattr(bag_frames, 'encode', fail_later)
    with pytest.raises(DatasetError):
        convert([bag], out, options, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['bag', *(['out'] * replaces)]
    assert not replaces or (out / 'meta/info.json').is_file()


@pytest.mark.parametrize('name', ['notes.txt', 'meta/info.json'])
def test_what_appears_while_it_is_written_is_kept(tmp_path: Path, name: str) -> None:
    """Notes of a person, and the data set of the same command that was started twice."""
    out = tmp_path / 'out'
    with pytest.raises(DatasetError, match='exists already'), dataset_folder(out, force=False):
        (out / name).parent.mkdir(parents=True)
        (out / name).write_text('kept')
    assert (out / name).read_text() == 'kept'
    assert list(tmp_path.iterdir()) == [out]


def changed(robot_file: Path, tmp_path: Path, old: str, new: str) -> Path:
    path = tmp_path / 'changed.yaml'
    path.write_text(robot_file.read_text().replace(old, new))
    return path


def test_the_robot_file_says_what_bytes_of_a_camera_mean(
    make: Any, tmp_path: Path, robot_file: Path
) -> None:
    robot = changed(robot_file, tmp_path, 'topic: top/image', 'topic: top/image, encoding: bgr8')
    made = make(Story(encoding='8UC3'), robot=load_robot(robot))
    shown = Image.open(io.BytesIO(made.column('observation.images.top')[0]['bytes']))
    np.testing.assert_array_equal(np.asarray(shown), pixels(0)[:, :, ::-1])


def test_stamps_of_the_receipt_are_the_times_of_the_recording(
    make: Any, tmp_path: Path, robot_file: Path
) -> None:
    """A camera's clock is wrong by so little that nothing but the robot file can tell."""
    story = Story(camera_ms=-400)
    robot = changed(robot_file, tmp_path, 'topic: top/image', 'topic: top/image, stamp: receive')
    # A frame that says that it is older than it is is shown too late.
    assert np.median(ages_ms(make(story))) == pytest.approx(-400, abs=1)
    right = make(story, robot=load_robot(robot))
    assert np.abs(ages_ms(right)).max() <= 60
    assert any('stamp: receive' in line for line in right.result.lines())


def ages_ms(made: Any) -> np.ndarray:
    """Return by how much the top camera's frames are older than the measured angle beside them."""
    shown = [Image.open(io.BytesIO(made.image('top', at))) for at in range(len(made.frames))]
    number = {pixels(n).tobytes(): n for n in range(60)}
    frames = np.array([number[np.asarray(one).tobytes()] for one in shown])
    return made.column('observation.state')[:, 0] / position(1.0) - 50 * frames


MUTATIONS = 30
STORY = {
    'said': ((0, 'wave'), (1500, 'point')),
    'episodes': ((0, 1),),
    'verdicts': ((1400, True),),
}


def damaged(data: bytes, seed: int) -> bytes:
    """Cut the file, or change some of its bytes."""
    dice, changed = random.Random(seed), bytearray(data)
    if dice.random() < 0.3:
        return bytes(changed[: dice.randrange(len(changed))])
    for _ in range(dice.choice((1, 5, 50, 500))):
        changed[dice.randrange(len(changed))] = dice.randrange(256)
    return bytes(changed)


@pytest.mark.parametrize(
    'mutations', [MUTATIONS, pytest.param(2000, marks=pytest.mark.slow)], ids=['few', 'many']
)
@pytest.mark.parametrize(
    'plugin', thorough_but([StoragePlugin.MCAP], [StoragePlugin.MCAP, StoragePlugin.SQLITE3])
)
def test_nothing_but_our_own_errors(
    tmp_path: Path, robot_file: Path, plugin: StoragePlugin, mutations: int
) -> None:
    whole = write_bag(tmp_path / 'whole', Story(plugin=plugin, **STORY))
    file = next(path for path in whole.iterdir() if path.suffix in ('.mcap', '.db3'))
    data, options, made = file.read_bytes(), DatasetOptions(robot=load_robot(robot_file)), 0
    (tmp_path / 'bag').mkdir()
    for seed in range(mutations):
        (tmp_path / 'bag' / file.name).write_bytes(damaged(data, seed))
        try:
            made += convert([tmp_path / 'bag'], tmp_path / 'out', options, force=True).episodes > 0
        # Of a data set, a bag, a robot file or an image.
        except ValueError as error:
            assert type(error).__module__.startswith('vla_')
    assert 0 < made < mutations
    assert {path.name for path in tmp_path.iterdir()} == {'whole', 'bag', 'out'}


def test_a_stamp_that_is_years_away_asks_for_no_memory(tmp_path: Path, robot_file: Path) -> None:
    bag = write_bag(tmp_path / 'bag', Story(length_ms=3000, late_ms=300_000_000_000))
    result = convert([bag], tmp_path / 'out', DatasetOptions(robot=load_robot(robot_file)))
    # The last of every source is good for half a second more.
    assert result.episodes == 1 and 60 <= result.frames <= 70


HANDS = """
format: 1
name: hands
joints:
  - {name: arm, unit: rad, lower: -3.0, upper: 3.0, velocity: 1.0}
  - {name: left, unit: m, lower: 0.0, upper: 0.1, velocity: 1.0, zero: 0.02, one: 0.06,
     command: {name: gripper, unit: rad, zero: -0.5, one: 1.5}}
  - {name: right, unit: rad, lower: 0.0, upper: 1.0, velocity: 1.0, command: {name: jaw, unit: deg}}
outputs:
  - {kind: joint_group_command, topic: commands/joint_group, group: arm, joints: [arm]}
  - {kind: joint_single_command, topic: commands/joint_single, joints: [left]}
  - {kind: parallel_gripper_command, topic: jaw/gripper_cmd, joints: [right]}
"""
NS = 1_700_000_000_000_000_000
SINGLE = 'interbotix_xs_msgs/msg/JointSingleCommand'
GROUP = 'interbotix_xs_msgs/msg/JointGroupCommand'
JOINTS = 'sensor_msgs/msg/JointState'


def joint_state(names: list[str], positions: list[float], stamp_ns: int):
    types = message_types().types
    stamp = types['builtin_interfaces/msg/Time'](sec=stamp_ns // 10**9, nanosec=stamp_ns % 10**9)
    header = types['std_msgs/msg/Header'](stamp=stamp, frame_id='')
    nothing = np.zeros(0)
    return types[JOINTS](header, names, np.array(positions), nothing, nothing)


def write_commands(folder):
    types = message_types()
    messages = {
        ('/joint_states', JOINTS): joint_state(['arm', 'left', 'right'], [0.1, 0.03, 0.5], NS),
        ('/commands/joint_group', GROUP): types.types[GROUP](
            name='arm', cmd=np.array([0.25], dtype=np.float32)
        ),
        ('/commands/joint_single', SINGLE): types.types[SINGLE](name='gripper', cmd=0.5),
        ('/jaw/gripper_cmd/goal', JOINTS): joint_state(['jaw'], [45.0], NS),
    }
    with Writer(folder, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        for (topic, kind), message in messages.items():
            connection = writer.add_connection(topic, kind, typestore=types)
            writer.write(connection, NS, bytes(types.serialize_cdr(message, kind)))
    return folder


def test_commands_are_in_the_joints_own_units(tmp_path):
    (tmp_path / 'robot.yaml').write_text(HANDS)
    contents = read_contents(
        BagReader(write_commands(tmp_path / 'bag')), load_robot(tmp_path / 'robot.yaml')
    )
    assert contents.missing_outputs == []
    found = {series.names[0]: series.rows[0][0] for series in contents.actions}
    assert found == {
        'arm': 0.25,
        'left': pytest.approx(0.04),
        'right': pytest.approx(np.pi / 4),
    }
