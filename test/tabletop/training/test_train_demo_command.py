"""`vla_runtime train-demo`, whole, on a handful of frames."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.schema import VERIFICATION_FILE, WEIGHTS_FILE
from vla_runtime.cli.main import main
from vla_runtime.files.package_files import code_version
from vla_tabletop.training.start import WorkLog

TINY = [
    *('--episodes', '9', '--processes', '1', '--threads', '1', '--check-episodes', '0'),
    *('--see-steps', '1', '--ground-steps', '1', '--act-steps', '1'),
]


def _train(folder: Path, *more: str) -> int:
    places = ['--out', str(folder / 'demo'), '--work', str(folder / 'work')]
    return main(['train-demo', *places, *TINY, *more])


COMMAND = ['vla_runtime', 'train-demo', '--work', 'a folder']
# ACT learns from some of the episodes only, so the other families need fewer for a batch.
FEW_EPISODES = ('--episodes', '6')


@pytest.fixture(scope='module')
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('sys.argv', COMMAND)
        folder = tmp_path_factory.mktemp('trained')
        assert _train(folder) == 0
    return folder


@pytest.fixture
def trained(run_once: Path, tmp_path: Path) -> Path:
    """A folder with a finished run, the test's own."""
    return Path(shutil.copytree(run_once, tmp_path / 'trained'))


def _made(bundle: Path) -> dict[str, Any]:
    return json.loads((bundle / VERIFICATION_FILE).read_text())['made']


@pytest.mark.thorough
def test_a_finished_run_is_not_repeated_and_the_receipt_names_both(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('sys.argv', COMMAND)
    first = read_bundle(trained / 'demo')
    assert (trained / 'work' / 'pi05' / 'loss.png').stat().st_size > 0
    assert _train(trained) == 2
    assert 'exists already; choose another name or use --force' in capsys.readouterr().err
    checkpoint = (trained / 'work' / 'pi05' / 'checkpoint.pt').read_bytes()
    assert _train(trained, '--force') == 0
    assert (trained / 'work' / 'pi05' / 'checkpoint.pt').read_bytes() == checkpoint
    second = read_bundle(trained / 'demo')
    changed = set(first.spec.files.items()) ^ set(second.spec.files.items())
    assert {name for name, _ in changed} == {VERIFICATION_FILE}
    runs = _made(trained / 'demo')['runs']
    assert [run['command'] for run in runs] == ["vla_runtime train-demo --work 'a folder'"] * 2
    assert [run['code'] for run in runs] == [code_version()] * 2
    # The second run found all of it done.
    assert runs[0]['data_seconds'] > runs[1]['data_seconds'] >= 0
    assert runs[0]['training_seconds'] > runs[1]['training_seconds'] >= 0


@pytest.mark.thorough
def test_training_goes_on_from_a_bundle_and_the_receipt_says_from_which(
    run_once: Path, tmp_path: Path
) -> None:
    first, onward = read_bundle(run_once / 'demo'), tmp_path / 'onward'
    start = ('--from', str(run_once / 'demo'), '--seed', '1')
    assert _train(onward, *start, *FEW_EPISODES) == 0
    second, made = read_bundle(onward / 'demo'), _made(onward / 'demo')
    assert made['training']['start'] == first.spec.files[WEIGHTS_FILE]
    assert made['start'] == _made(run_once / 'demo')
    for kept in (first.tokenizer_path.name, 'statistics.safetensors'):
        assert second.spec.files[kept] == first.spec.files[kept]
    assert second.spec.files[WEIGHTS_FILE] != first.spec.files[WEIGHTS_FILE]


def test_a_start_that_is_no_bundle_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _train(tmp_path, '--from', str(tmp_path / 'none')) == 2
    assert 'none: no such folder; expected a policy bundle' in capsys.readouterr().err
    assert not (tmp_path / 'work').exists()


@pytest.mark.thorough
def test_another_family_is_trained_on_the_data_that_lies_there(trained: Path) -> None:
    family = 'pi0_fast'
    recorded = {path: path.stat().st_mtime_ns for path in (trained / 'work/data').iterdir()}
    assert _train(trained, '--force', '--family', family) == 0
    assert {path: path.stat().st_mtime_ns for path in (trained / 'work/data').iterdir()} == recorded
    bundle = read_bundle(trained / 'demo')
    assert bundle.spec.family == family
    assert _made(trained / 'demo')['training']['family'] == family


@pytest.mark.parametrize('text', ['5', 'null', '{"a": 1}', '"abc"', '["abc"]', '[' * 100_000])
def test_a_damaged_log_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / 'runs.json'
    path.write_text(text, encoding='utf-8')
    with pytest.raises(ValueError, match=r'runs\.json: '):
        WorkLog(path, 'command', 'abc')


def test_a_run_that_was_cut_off_stays_in_the_log_of_the_next(tmp_path: Path) -> None:
    path = tmp_path / 'runs.json'
    with pytest.raises(KeyboardInterrupt), WorkLog(path, 'first', 'abc').timed('data'):
        raise KeyboardInterrupt
    log = WorkLog(path, 'second', 'abc-dirty')
    with log.timed('data'):
        pass
    with log.timed('training'):
        pass
    first, second = json.loads(path.read_text())
    assert first.keys() == {'command', 'code', 'data_seconds'}
    assert second.keys() == {'command', 'code', 'data_seconds', 'training_seconds'}
    assert (second['command'], second['code']) == ('second', 'abc-dirty')
    assert log.runs == [first, second]
