"""Corrections in a data set: who drove, row by row, as LeRobot's DAgger sets have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from dataset_bag import Story, command, write_bag
from lerobot_apart import needs_lerobot, read_by_lerobot

from vla_runtime.robot.file import load_robot
from vla_tools.dataset.convert import DatasetOptions, Result, convert
from vla_tools.dataset.layout import INTERVENTION

# Frames every 50 ms; a person leads from 1.0 s to 2.0 s.
TAKES_OVER = ((0, 'policy', 'nobody'), (1000, 'leader', 'policy'), (2000, 'policy', 'leader'))


@pytest.fixture
def make(tmp_path: Path, robot_file: Path) -> Any:
    def made(*stories: Story, **options: Any) -> tuple[Path, Result]:
        bags = [write_bag(tmp_path / f'bag{n}', story) for n, story in enumerate(stories)]
        wanted = DatasetOptions(robot=load_robot(robot_file), **options)
        return tmp_path / 'out', convert(bags, tmp_path / 'out', wanted, force=True)

    return made


def frames_of(folder: Path) -> Any:
    return pq.read_table(folder / 'data/chunk-000/file-000.parquet')


def test_rows_that_a_person_led_say_so_by_the_time_of_the_command(make: Any) -> None:
    folder, result = make(Story(drivers=TAKES_OVER))
    frames = frames_of(folder)
    led = np.array(frames[INTERVENTION].to_pylist())
    times = np.array(frames['timestamp'].to_pylist())
    assert np.array_equal(led, (times >= 1.0 - 1e-6) & (times < 2.0 - 1e-6))
    assert result.layout.features()[INTERVENTION] == {'dtype': 'bool', 'shape': [1], 'names': None}
    assert result.corrections == 20 and any('20 frames' in line for line in result.lines())
    # The actions of a correction are what was commanded then.
    action = np.array(frames['action'].to_pylist())[:, 0]
    assert np.allclose(action, [command(1000.0 * time) for time in times], atol=1e-6)


@pytest.mark.parametrize('drivers', [(), ((0, 'policy', 'nobody'),)])
def test_without_a_leader_there_is_no_such_column(make: Any, drivers: Any) -> None:
    _, result = make(Story(drivers=drivers))
    assert INTERVENTION not in result.layout.features() and not result.corrections


def test_an_episode_is_cut_where_nobody_drove(make: Any) -> None:
    drivers = (
        (500, 'policy', 'nobody'),
        (2000, 'nobody', 'policy'),
        (3000, 'leader', 'nobody'),
    )
    folder, result = make(Story(length_ms=5000, drivers=drivers))
    frames = frames_of(folder)
    episodes = np.array(frames['episode_index'].to_pylist())
    led = np.array(frames[INTERVENTION].to_pylist())
    assert result.episodes == 2
    assert not led[episodes == 0].any() and led[episodes == 1].all()
    assert np.bincount(episodes).tolist() == [30, 40]


def test_bags_with_and_without_a_correction_make_one_data_set(make: Any) -> None:
    folder, _ = make(Story(), Story(drivers=TAKES_OVER))
    frames = frames_of(folder)
    episodes = np.array(frames['episode_index'].to_pylist())
    led = np.array(frames[INTERVENTION].to_pylist())
    assert not led[episodes == 0].any() and led[episodes == 1].sum() == 20


@pytest.mark.parametrize('wrong', ['nobody at all', ''])
def test_a_report_that_cannot_be_read_changes_nothing(make: Any, wrong: str) -> None:
    _, result = make(Story(drivers=((1000, wrong, 'policy'), (1500, 'policy', wrong))))
    assert INTERVENTION not in result.layout.features()


@needs_lerobot
def test_lerobots_loader_reads_corrections_and_verdicts(make: Any) -> None:
    folder, result = make(Story(drivers=TAKES_OVER, verdicts=((2900, True),)))
    frames = frames_of(folder)
    found = read_by_lerobot(folder)
    assert found['dtype'] == 'torch.bool'
    assert found['intervention'] == frames[INTERVENTION].to_pylist()
    assert found['success'] == frames['next.success'].to_pylist() and sum(found['success']) == 1
    assert np.allclose(found['action'], frames['action'].to_pylist())
    assert (found['episodes'], found['frames']) == (result.episodes, result.frames)


def test_a_recording_that_begins_while_a_person_leads_says_so_from_its_first_row(make: Any) -> None:
    told = ((700, 'leader', 'leader'), (1700, 'leader', 'leader'), (2000, 'policy', 'leader'))
    folder, _ = make(Story(drivers=told))
    frames = frames_of(folder)
    led = np.array(frames[INTERVENTION].to_pylist())
    times = np.array(frames['timestamp'].to_pylist())
    assert np.array_equal(led, times < 2.0 - 1e-6)
