"""`vla_runtime to-dataset`: messages for people, and failures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip('pyarrow', reason='data sets need pyarrow')
pytest.importorskip('rosbags', reason='bags need rosbags')

from dataset_bag import ROBOT, Story, write_bag

from vla_runtime.cli.main import main


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """Arguments that are good."""
    bag = write_bag(tmp_path / 'bag', Story())
    robot = tmp_path / 'small.yaml'
    robot.write_text(ROBOT, encoding='utf-8')
    return ['to-dataset', str(bag), '--out', str(tmp_path / 'out'), '--robot', str(robot)]


def test_it_says_what_it_wrote(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given) == 0
    first, second, *times = capsys.readouterr().out.splitlines()
    assert first == f'{tmp_path / "out"}: 1 episode, 60 frames at 20 Hz (3.0 s), 1 task'
    assert second == 'judged 0, of them successful 0'
    assert [line.partition(' have')[0] for line in times] == [
        'time: messages of /arm/joint_trajectory',
        'time: messages of /gripper/rate',
    ]
    assert times[1].endswith(
        'no stamps: the times of their recording are used, on the clock of '
        '/joint_states (recordings: 1)'
    )


@pytest.mark.parametrize(
    ('more', 'words'),
    [
        (['--task', ' '], '--task: expected a task'),
        (['--fps', '100000'], 'is not a whole number from 1 to 1000'),
        (['--frame-age', '0'], '--frame-age 0: expected more than 0'),
        (['--robot', 'so100'], "did you mean 'so101'?"),
        (['--robot', 'so101'], 'no topic'),
    ],
)
def test_a_wrong_argument_is_named(
    given: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    words: str,
) -> None:
    assert main([*given, *more]) == 2
    said = capsys.readouterr().err
    assert 'error: ' in said and words in said
    assert not (tmp_path / 'out').exists()


def test_a_folder_of_recordings_is_read_and_none_twice(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, bag, *others = given
    (tmp_path / 'many').mkdir()
    Path(bag).rename(tmp_path / 'many' / 'bag')
    folder = str(tmp_path / 'many')
    assert main(['to-dataset', folder, f'{folder}/bag', *others]) == 0
    assert '1 episode, 60 frames' in capsys.readouterr().out


def test_ended_by_a_signal_it_leaves_nothing_behind(given: list[str], tmp_path: Path) -> None:
    """The signal comes while the first frames are written."""
    code = (
        'import os, signal, sys\n'
        'from vla_runtime.cli.main import main\n'
        'from vla_tools.dataset.writer import DatasetWriter\n'
        'DatasetWriter.write = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n'
        'sys.exit(main(sys.argv[1:]))\n'
    )
    ended = subprocess.run([sys.executable, '-c', code, *given], capture_output=True, text=True)
    assert ended.returncode == 143, ended.stderr
    assert ended.stderr.splitlines()[-1] == 'ended by SIGTERM'
    assert sorted(path.name for path in tmp_path.iterdir()) == ['bag', 'small.yaml']
