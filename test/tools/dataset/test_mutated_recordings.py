"""Cut and damaged bags end in our own errors or in a data set of what could be read."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from thorough import thorough_but

pytest.importorskip('pyarrow', reason='data sets need pyarrow')
pytest.importorskip('rosbags', reason='bags need rosbags')

from dataset_bag import Story, write_bag
from rosbags.rosbag2 import StoragePlugin

from vla_runtime.robot.file import load_robot
from vla_tools.dataset.convert import DatasetOptions, convert

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
