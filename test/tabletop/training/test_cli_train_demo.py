"""`vla_runtime train-demo`: what cannot be is refused before hours of work, not after."""

import pytest

from vla_runtime.cli.main import main


@pytest.mark.parametrize(
    ('option', 'value'),
    [
        ('--episodes', '0'),
        ('--act-steps', '0'),
        ('--check-episodes', '-1'),
        ('--processes', '0'),
        ('--seed', '-1'),
        ('--threads', 'two'),
    ],
)
def test_a_number_that_cannot_be_is_refused_by_its_option(tmp_path, capsys, option, value):
    assert main(['train-demo', '--out', str(tmp_path / 'bundle'), option, value]) == 2
    error = capsys.readouterr().err
    assert option in error and f"'{value}'" in error


def test_a_device_that_is_not_to_be_had_is_refused_before_any_work(tmp_path, capsys):
    work = tmp_path / 'work'
    command = ['train-demo', '--out', str(tmp_path / 'bundle'), '--work', str(work)]
    assert main([*command, '--device', 'gpu']) == 2
    assert "device 'gpu' is unknown to backend 'torch'; use cpu" in capsys.readouterr().err
    assert not work.exists()


def test_help_says_what_each_stage_is(capsys):
    assert main(['train-demo', '--help']) == 0
    text = ' '.join(capsys.readouterr().out.split())
    for words in (
        '--see-steps N steps of the first stage: vision alone finds',
        '--ground-steps N steps of the second stage: the prefix points at',
        '--act-steps N steps of the third stage: everything learns',
    ):
        assert words in text
