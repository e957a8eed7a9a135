"""`vla_runtime replay` as a person types it: results, refusals, exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_bag import Turn, record
from test_batch import here
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.cli import main as program


def test_without_changes_every_chunk_is_identical(recording, capsys, tmp_path):
    assert program.main(['replay', str(recording), '--json', str(tmp_path / 'out.json')]) == 0
    said = capsys.readouterr().out
    assert f'{recording}: 8 inferences of /vla_policy, ' in said
    assert 'replayed 8, compared 8, bit-identical 8' in said
    (result,) = json.loads((tmp_path / 'out.json').read_text())['recordings']
    assert (result['identical'], result['differences'], result['problems']) == (8, [], [])
    assert result['units'] == ['deg', 'rad', 'rad']


@pytest.fixture(scope='module')
def at_30_hz(tmp_path_factory: pytest.TempPathFactory, robot_file: Path) -> Path:
    """A recording of a policy whose step is no whole number of nanoseconds."""
    folder = tmp_path_factory.mktemp('at_30_hz')
    bundle = write_tiny_policy(folder / 'tiny', replace(tiny_spec(), step_time_s=1 / 30))
    return record(folder / 'first', bundle, robot_file, [Turn(), Turn(rows=0)])


def test_a_policy_of_30_hz_is_compared_chunk_by_chunk(at_30_hz, capsys):
    assert program.main(['replay', str(at_30_hz)]) == 0
    assert 'replayed 2, compared 2, bit-identical 2' in capsys.readouterr().out


def test_a_replay_that_compares_nothing_is_no_success(at_30_hz, bundle, capsys):
    assert program.main(['replay', str(at_30_hz), '--bundle', str(bundle)]) == 2
    said = capsys.readouterr()
    assert 'compared 0' in said.out
    assert 'steps of 0.0333333 s and of 0.05 s cannot be compared' in said.out
    assert 'not one recorded chunk could be compared' in said.err


def test_one_recording_of_several_that_compares_nothing_is_no_success(
    at_30_hz, recording, bundle, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr('vla_runtime.processes.workers.workers', lambda count: here())
    words = ['replay', str(at_30_hz), str(recording), '--bundle', str(bundle)]
    assert program.main([*words, '--out', str(tmp_path / 'results')]) == 2
    assert '1 of 2 recordings cannot be used' in capsys.readouterr().err


def test_a_what_if_tells_errors_by_joint_and_by_step(recording, capsys):
    words = ['replay', str(recording), '--set', 'cfg_enabled=true', '--set', 'cfg_beta=2.5']
    assert program.main(words) == 0
    said = capsys.readouterr().out
    assert 'differs from the recording: setting cfg_beta = 2.5' in said
    assert 'compared 8, bit-identical 0' in said
    assert 'shoulder             deg' in said


@pytest.mark.parametrize(
    ('words', 'reason'),
    [
        (['--set', 'cfg_beta'], '--set cfg_beta: expected NAME=VALUE'),
        (['--set', 'cfg_bta=2'], "setting 'cfg_bta' is unknown; did you mean 'cfg_beta'"),
        (['--set', 'cfg_beta=0.5'], 'cfg_beta is 0.5: it must be 1.0 to'),
        (['--bundle', 'nowhere'], 'nowhere'),
        (['--ray', 'auto', '--workers', '2'], '--workers with --ray auto: the cluster places'),
        (['--ray', 'auto', '--page', 'page.html'], '--page shows the replay of one recording here'),
        (['--ray', 'auto', '--live'], '--live plays one recording here'),
        (
            ['--out', 'results', '--page', 'page.html'],
            '--page shows the replay of one recording here',
        ),
        (['--out', 'results', '--live'], '--live plays one recording here'),
        (['--workers', '2'], '--workers is for several recordings'),
        (['--node', '/other'], 'no policy node /other in it; there are: /vla_policy'),
        (['--robot', 'nowhere'], '--robot is for --open-loop'),
        (['--instruction', 'wave'], '--instruction is for --open-loop'),
        (['--every', '1'], '--every is for --open-loop'),
        (['--open-loop', '--every', 'inf'], '--every inf: expected more than 0'),
        (['--open-loop', '--node', '/vla_policy'], '--node is not for --open-loop'),
        (['--rate', '2'], '--rate is for --live'),
        (['--page', 'same', '--json', 'same'], '--page and --json are both same'),
    ],
)
def test_what_cannot_be_used_is_refused(recording, capsys, monkeypatch, tmp_path, words, reason):
    monkeypatch.chdir(tmp_path)
    assert program.main(['replay', str(recording), *words]) == 2
    assert reason in capsys.readouterr().err


def test_a_replay_of_nothing_is_no_success(recording, capsys, tmp_path):
    words = ['replay', str(recording), '--set', 'cache_mode=bounded']
    assert program.main(words) == 2
    said = capsys.readouterr()
    assert 'skipped 8: cache_mode bounded' in said.out
    assert 'not one inference could be run again' in said.err


def test_a_chunk_that_should_be_identical_and_is_not_ends_in_1(recording, capsys, monkeypatch):
    from vla_tools.replay import rerun

    real = rerun.compare_chunks

    def off_by_a_bit(recorded, replayed):
        replayed.actions[0, 0] += 1e-12
        return real(recorded, replayed)

    monkeypatch.setattr(rerun, 'compare_chunks', off_by_a_bit)
    assert program.main(['replay', str(recording)]) == 1
    assert 'bit-identical 0' in capsys.readouterr().out
