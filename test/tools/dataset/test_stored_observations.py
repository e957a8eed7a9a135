"""Observations of the data sets that people have: videos, names of every form, renamed cameras."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tiny_policy import CAMERAS, JOINTS, tiny_spec
from tiny_student import FRAMES, write_tiny_data

from vla_tools.dataset.layout import INFO, STATE, TASKS, DatasetError, image_key
from vla_tools.dataset.observations import StoredObservation, read_observations

# Its joints in another order than the policy's.
WRITTEN = JOINTS[::-1]
POINTER = b'version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n'


@pytest.fixture(scope='module')
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_data(tmp_path_factory.mktemp('data') / 'set')


@pytest.fixture
def copied(images: Path, tmp_path: Path) -> Path:
    return shutil.copytree(images, tmp_path / 'set')


def _change(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    info = json.loads((folder / INFO).read_text())
    change(info)
    (folder / INFO).write_text(json.dumps(info))


def _same(found: list[StoredObservation], others: list[StoredObservation]) -> None:
    assert len(found) == len(others) > 0
    for one, other in zip(found, others, strict=True):
        np.testing.assert_array_equal(one.state, other.state)
        assert one.task == other.task
        pixels, expected = one.decode().images, other.decode().images
        assert pixels.keys() == expected.keys()
        for camera in pixels:
            np.testing.assert_array_equal(pixels[camera], expected[camera])


@pytest.mark.parametrize('count', [7, FRAMES])
@pytest.mark.parametrize('version', ['v2.1', 'v3.0'])
def test_frames_of_videos_are_those_of_images(
    images: Path, copied: Path, version: str, count: int
) -> None:
    pytest.importorskip('av', reason='videos need av')
    from video_dataset import make_videos

    make_videos(copied, version)
    assert not list(copied.glob('data/*/*.png'))
    _same(
        read_observations(copied, tiny_spec(), count),
        read_observations(images, tiny_spec(), count),
    )


def _second(folder: Path) -> Path:
    return next(folder.glob(f'videos/{image_key(CAMERAS[1])}/*/*.mp4'))


@pytest.mark.parametrize(
    ('content', 'words'), [(POINTER, 'git lfs pull'), (b'', 'is empty: .*get the file again')]
)
@pytest.mark.parametrize('pattern', ['data/*/*.parquet', TASKS, INFO])
def test_a_file_that_never_arrived_is_named_with_the_remedy(
    copied: Path, pattern: str, content: bytes, words: str
) -> None:
    file = next(copied.glob(pattern))
    file.write_bytes(content)
    with pytest.raises(DatasetError, match=f'{file}: {words}|{file}: .*{words}'):
        read_observations(copied, tiny_spec(), 7)


def test_a_data_set_without_its_frames_is_one_that_was_not_downloaded_whole(copied: Path) -> None:
    shutil.rmtree(copied / 'data')
    with pytest.raises(DatasetError, match='download data/'):
        read_observations(copied, tiny_spec(), 7)


def test_a_file_of_another_form_is_no_data_set(tmp_path: Path) -> None:
    file = tmp_path / 'episode_0.hdf5'
    file.write_bytes(b'\x89HDF')
    with pytest.raises(DatasetError, match=r"is a '\.hdf5' file; .*LeRobot"):
        read_observations(file, tiny_spec(), 7)


@pytest.mark.parametrize(
    ('damage', 'words'),
    [
        (lambda folder: _second(folder).unlink(), 'with its videos'),
        (lambda folder: _second(folder).write_bytes(b'version https://git-lfs'), 'be decoded'),
        (lambda folder: _second(folder).write_bytes(b''), 'is empty'),
        (lambda folder: _second(folder).write_bytes(POINTER), 'git lfs pull'),
        (
            lambda folder: _change(folder, lambda info: info.update(video_path=None)),
            'info.json: video_path: is missing',
        ),
        (
            lambda folder: _change(folder, lambda info: info.update(video_path='{other}.mp4')),
            'info.json: other: is missing',
        ),
        (lambda folder: shutil.rmtree(folder / 'meta' / 'episodes'), 'lack episode 0'),
    ],
)
def test_a_video_that_cannot_be_read_is_named(
    copied: Path, damage: Callable[[Path], object], words: str
) -> None:
    pytest.importorskip('av', reason='videos need av')
    from video_dataset import make_videos

    make_videos(copied, 'v3.0')
    damage(copied)
    with pytest.raises(DatasetError, match=words):
        read_observations(copied, tiny_spec(), FRAMES)


def test_a_video_that_ends_before_its_episode_is_named(copied: Path) -> None:
    pytest.importorskip('av', reason='videos need av')
    from video_dataset import make_videos, write_video

    make_videos(copied, 'v3.0')
    write_video(_second(copied), [np.zeros((30, 40, 3), np.uint8)] * 3, 20)
    with pytest.raises(DatasetError, match='has no frame at'):
        read_observations(copied, tiny_spec(), FRAMES)


@pytest.mark.parametrize(
    'names',
    [
        {'motors': list(WRITTEN)},
        [list(WRITTEN)],
        {name: index for index, name in enumerate(WRITTEN)},
        {'arm': list(WRITTEN[:2]), 'hand': list(WRITTEN[2:])},
        [f'{name}.pos' for name in WRITTEN],
    ],
)
def test_names_of_the_state_are_read_in_every_form(images: Path, copied: Path, names: Any) -> None:
    _change(copied, lambda info: info['features'][STATE].update(names=names))
    _same(read_observations(copied, tiny_spec(), 7), read_observations(images, tiny_spec(), 7))


@pytest.mark.parametrize('names', [None, ['a'], {'motors': ['a', 'a', 'b']}])
def test_names_that_say_nothing_are_refused(copied: Path, names: Any) -> None:
    _change(copied, lambda info: info['features'][STATE].update(names=names))
    with pytest.raises(DatasetError, match=r'features\.observation\.state\.names'):
        read_observations(copied, tiny_spec(), 7)


def _rename(folder: Path, renamed: dict[str, str]) -> None:
    _change(
        folder,
        lambda info: info.update(
            features={renamed.get(key, key): one for key, one in info['features'].items()}
        ),
    )
    for path in folder.glob('data/*/*.parquet'):
        table = pq.read_table(path)
        pq.write_table(table.rename_columns([renamed.get(c, c) for c in table.column_names]), path)


def test_features_have_the_names_of_the_trainings_data(images: Path, copied: Path) -> None:
    theirs = {image_key(camera): image_key(f'their_{camera}') for camera in CAMERAS}
    _rename(copied, theirs)
    with pytest.raises(DatasetError, match=f'the data set has their_{CAMERAS[0]}'):
        read_observations(copied, tiny_spec(), 7)
    _rename(copied, {STATE: 'observation.joints'})
    theirs[STATE] = 'observation.joints'
    with pytest.raises(DatasetError, match=rf'{STATE} is missing'):
        read_observations(copied, tiny_spec(), 7)
    spec = replace(tiny_spec(), rename_map={other: ours for ours, other in theirs.items()})
    _same(read_observations(copied, spec, 7), read_observations(images, tiny_spec(), 7))
    # Data that was recorded with the policy has the policy's own names.
    _same(read_observations(images, spec, 7), read_observations(images, tiny_spec(), 7))


def test_a_task_without_words_is_named_before_anything_is_learned(copied: Path) -> None:
    tasks = pq.read_table(copied / TASKS)
    words = tasks.set_column(tasks.column_names.index('task'), 'task', [['task 0', ' ']])
    pq.write_table(words, copied / TASKS)
    with pytest.raises(DatasetError, match='task 1 has no words'):
        read_observations(copied, tiny_spec(), FRAMES)


def test_the_names_of_openpis_converters_are_read(images: Path, copied: Path) -> None:
    _rename(copied, {STATE: 'state', **{image_key(camera): camera for camera in CAMERAS}})
    _same(read_observations(copied, tiny_spec(), 7), read_observations(images, tiny_spec(), 7))
