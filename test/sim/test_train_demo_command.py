"""`vla_runtime train-demo`, whole, on a handful of frames."""

from __future__ import annotations

from pathlib import Path

import pytest

from vla_runtime.bundle import read_bundle
from vla_runtime.cli.main import main

TINY = [
    *('--episodes', '4', '--processes', '1', '--threads', '1', '--check-episodes', '0'),
    *('--see-steps', '1', '--ground-steps', '1', '--act-steps', '1'),
]


def _train(folder: Path, *more: str) -> int:
    places = ['--out', str(folder / 'demo'), '--work', str(folder / 'work')]
    return main(['train-demo', *places, *TINY, *more])


def test_a_bundle_comes_out_and_a_finished_run_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _train(tmp_path) == 0
    first = read_bundle(tmp_path / 'demo')
    assert (tmp_path / 'work' / 'loss.png').stat().st_size > 0
    capsys.readouterr()

    assert _train(tmp_path) == 2
    assert 'exists already; choose another name or use --force' in capsys.readouterr().err

    checkpoint = (tmp_path / 'work' / 'checkpoint.pt').read_bytes()
    assert _train(tmp_path, '--force') == 0
    assert (tmp_path / 'work' / 'checkpoint.pt').read_bytes() == checkpoint
    assert read_bundle(tmp_path / 'demo').spec.files == first.spec.files


def test_other_arguments_in_the_same_folder_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _train(tmp_path) == 0
    capsys.readouterr()
    assert _train(tmp_path, '--force', '--act-steps', '2') == 2
    assert 'checkpoint.pt: is a run of' in capsys.readouterr().err
    assert _train(tmp_path, '--force', '--episodes', '5') == 2
    assert 'dataset.json: holds a data set of' in capsys.readouterr().err
