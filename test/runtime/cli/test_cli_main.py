"""The `vla_runtime` program: verbs are found, help is quick, exit codes tell."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from paths import ROOT

from vla_runtime.cli import main as program


def test_help_lists_every_verb(capsys):
    assert program.main(['--help']) == 0
    text = capsys.readouterr().out
    for verb in ('export', 'info'):
        assert verb in text


@pytest.mark.parametrize('verb', ['export', 'info'])
def test_every_verb_explains_itself(capsys, verb):
    assert program.main([verb, '--help']) == 0
    assert capsys.readouterr().out.startswith(f'usage: vla_runtime {verb}')


@pytest.mark.parametrize(
    'argv', [[], ['fly'], ['export'], ['export', 'x', '--out', 'y', '--horizon', '0']]
)
def test_wrong_arguments_end_in_2(argv, capsys):
    assert program.main(argv) == 2
    assert 'usage:' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('argv', 'told'),
    [
        (['info', '--quik', 'X'], "unrecognized arguments: --quik; did you mean '--quick'?"),
        (['demo', '--robt', 'x'], "unrecognized arguments: --robt x; did you mean '--robot'?"),
        (['demo', '--robt=x'], "unrecognized arguments: --robt=x; did you mean '--robot'?"),
        (['info', 'X', 'Y'], 'unrecognized arguments: Y'),
        (['info', 'X', 'Y', '--quik'], "unrecognized arguments: Y --quik; did you mean '--quick'?"),
    ],
)
def test_an_unknown_argument_shows_the_verbs_usage_and_the_nearest_option(argv, told, capsys):
    assert program.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith(f'usage: vla_runtime {argv[0]} ')
    assert error.endswith(f'vla_runtime {argv[0]}: error: {told}\n')


@pytest.mark.parametrize(
    ('word', 'verb'), [('exprt', 'export'), ('to_dataset', 'to-dataset'), ('chek', 'check')]
)
def test_a_misspelt_verb_is_told_the_nearest(word, verb, capsys):
    assert program.main([word, 'x']) == 2
    assert f"did you mean '{verb}'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ('line', 'offered'), [('vla_runtime ex', {'export '}), ('vla_runtime info --q', {'--quick '})]
)
def test_a_shell_is_offered_verbs_and_options(line, offered, tmp_path):
    pytest.importorskip('argcomplete')
    answer = tmp_path / 'answer'
    environment = {
        **os.environ,
        '_ARGCOMPLETE': '1',
        '_ARGCOMPLETE_IFS': '\n',
        '_ARGCOMPLETE_STDOUT_FILENAME': str(answer),
        'COMP_LINE': line,
        'COMP_POINT': str(len(line)),
    }
    command = [sys.executable, '-m', 'vla_runtime', *line.split()[1:]]
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=60)
    assert set(answer.read_text().splitlines()) == offered


def test_help_of_the_tests_needs_no_setup(tmp_path):
    (tmp_path / 'run').write_bytes((ROOT / 'run').read_bytes())
    for words in (['test', '--help'], ['test', '-h']):
        done = subprocess.run(
            ['bash', str(tmp_path / 'run'), *words], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout[:6]) == (0, 'usage:')
    assert not (tmp_path / '.venv').exists()


def test_a_list_with_a_hole_is_refused(capsys):
    assert program.main(['export', 'x', '--out', 'y', '--state-names', 'a,,b']) == 2
    assert "'a,,b' has an empty entry" in capsys.readouterr().err


def test_control_c_ends_in_130(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr('vla_runtime.cli.info.main', interrupted)
    assert program.main(['info', 'x']) == 130


def test_control_c_while_a_verb_is_imported_ends_in_130(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr('vla_runtime.cli.main.importlib.import_module', interrupted)
    assert program.main(['info', 'x']) == 130
    assert capsys.readouterr().err == 'interrupted\n'


def test_help_needs_neither_torch_nor_rclpy():
    code = (
        'import sys; from vla_runtime.cli.main import main; main(["export", "--help"]); '
        'sys.exit(bool({"torch", "rclpy"} & set(sys.modules)))'
    )
    command = [sys.executable, '-c', code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 0


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='this system has no /dev/full')
@pytest.mark.parametrize('words', [['roofline', '--list'], ['info', '--help']])
def test_a_full_standard_output_is_said(words):
    with open('/dev/full', 'w') as full:
        done = subprocess.run(
            [sys.executable, '-m', 'vla_runtime', *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    said = 'error: standard output cannot be written: No space left on device\n'
    assert (done.returncode, done.stderr) == (2, said)


def test_a_closed_standard_output_is_no_error():
    command = f'exec {sys.executable} -m vla_runtime roofline --list >&-'
    done = subprocess.run(['sh', '-c', command], stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, '')


def test_a_reader_that_wants_no_more_ends_a_verb_quietly():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, '-u', '-m', 'vla_runtime', 'study', '--list'],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, '')
