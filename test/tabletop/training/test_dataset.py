"""Data: the same bytes however it was made, every goal labelled, the better half tagged."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from vla_tabletop.sim.scene import COLOURS
from vla_tabletop.training.dataset import (
    GOALS,
    DatasetSettings,
    better_half,
    generate,
    load,
)

PLAN = DatasetSettings(seed=5, episodes=5, episodes_per_shard=2)


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp('data')
    generate(path, PLAN, processes=1, progress=False)
    return path


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.thorough
def test_a_resumed_run_ends_with_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / 'shard_00001.npz').unlink()
    # What a killed process leaves behind is not taken for a shard.
    (tmp_path / '.shard_00001.123.npz').write_bytes(b'half')
    generate(tmp_path, PLAN, processes=1, progress=False)
    (tmp_path / '.shard_00001.123.npz').unlink()
    assert _bytes(tmp_path) == _bytes(folder)


@pytest.mark.thorough
def test_the_number_of_processes_changes_nothing(folder: Path, tmp_path: Path) -> None:
    generate(tmp_path, PLAN, processes=2, progress=False)
    assert _bytes(tmp_path) == _bytes(folder)


def test_a_folder_of_another_plan_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r'dataset\.json'):
        generate(folder, DatasetSettings(seed=6), processes=1, progress=False)


def test_an_unfinished_data_set_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / 'dataset.json').write_bytes((folder / 'dataset.json').read_bytes())
    with pytest.raises(FileNotFoundError, match='shard'):
        load(tmp_path)


def test_frames_hold_what_the_schema_says(folder: Path) -> None:
    data = load(folder)
    frames = len(data.state)
    assert frames > PLAN.episodes * 5
    assert data.images.shape == (frames, 2, 48, 64, 3) and data.images.dtype == np.uint8
    assert data.chunks.shape == (frames, len(GOALS), 32, 6)
    assert data.pixel.shape == (frames, 2, len(COLOURS), 2)
    assert np.array_equal(np.unique(data.episode), np.arange(PLAN.episodes))
    assert np.all(np.isfinite(data.chunks))


def test_each_goals_chunk_starts_at_the_frames_joints(folder: Path) -> None:
    data = load(folder)
    first = data.chunks[:, :, 0] - data.state[:, None]
    assert np.abs(first).max() < 0.101


def test_touch_chunks_of_different_blocks_differ(folder: Path) -> None:
    data = load(folder)
    ends = data.chunks[:, : len(COLOURS), -1, :5]
    apart = np.abs(ends[:, 0] - ends[:, 1]).max(axis=1)
    assert np.median(apart) > 0.05


def test_the_better_half_is_the_sooner_one_for_its_distance() -> None:
    distance = np.array([0.1, 0.2, 0.3, 0.4, 0.1, 0.2, 0.3, 0.4])
    late = np.array([-0.2, 0.2, -0.2, 0.2, 0.2, -0.2, 0.2, -0.2])
    success, push = np.ones(8, dtype=bool), np.zeros(8, dtype=bool)
    positive = better_half(success, 1 + 10 * distance + late, distance, push)
    np.testing.assert_array_equal(positive, late < 0)


def test_a_failure_is_never_tagged_and_behaviours_are_judged_apart() -> None:
    success = np.array([True, False, False, False, True, True])
    push = np.array([False, False, False, False, True, True])
    time_s = np.array([5.0, 0.1, 0.1, 0.1, 9.0, 12.0])
    positive = better_half(success, time_s, np.ones(6), push)
    np.testing.assert_array_equal(positive, [True, False, False, False, True, False])
