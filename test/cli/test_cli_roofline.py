"""`vla_runtime roofline`: fits or not, floors per phase, and clear answers to wrong questions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.cli.main import main
from vla_runtime.devices import DEVICES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope='module')
def bundle(tmp_path_factory):
    return write_tiny_policy(tmp_path_factory.mktemp('roofline') / 'bundle', tiny_spec())


def figures(tmp_path, *arguments) -> dict:
    out = tmp_path / 'roofline.json'
    assert main(['roofline', *map(str, arguments), '--json', str(out)]) == 0
    return json.loads(out.read_text())


def test_list_shows_every_device_with_its_source(capsys):
    assert main(['roofline', '--list']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(DEVICES)
    for line, (key, device) in zip(lines[1:], DEVICES.items(), strict=True):
        assert line.split()[0] == key
        assert line.endswith(device.source)


def test_it_says_what_fits_and_how_long_each_phase_takes_at_least(capsys):
    assert main(['roofline', 'pi05', '--device', 'orin-nano', 'agx-orin']) == 0
    small, large = capsys.readouterr().out.split('\n\npi05')
    assert small.startswith('pi05 on NVIDIA Jetson Orin Nano 8GB (Super, 25 W): DOES NOT FIT')
    assert 'AGX Orin 64GB: fits' in large
    rows = dict(re.findall(r'^  (\S.*?)  +([\d.]+) +[\d.]+  ', large, re.MULTILINE))
    expected = ['vision, one view', 'prefix', 'denoise, one step', 'denoise, 10 steps']
    assert list(rows)[-6:] == [*expected, 'miss, 3 view(s)', 'hit']
    assert rows['hit'] == rows['denoise, 10 steps']
    assert float(rows['prefix']) > float(rows['hit'])


def test_the_json_has_all_figures_and_half_precision_halves_the_weights(tmp_path):
    half = figures(tmp_path, 'pi0', '--device', 'thor', '--precision', 'float16', '--views', 2)
    full = figures(tmp_path, 'pi0', '--device', 'thor', '--precision', 'float32', '--views', 2)
    assert half['prefix_tokens'] == 2 * 256 + 48
    ratio = full['memory_bytes']['weights'] / half['memory_bytes']['weights']
    assert 1.9 < ratio < 2.0
    thor = half['devices']['thor']
    assert thor['fits'] is True
    assert thor['source'] == DEVICES['thor'].source
    one, two = thor['floors_ms']['1_rows'], thor['floors_ms']['2_rows']
    assert two['prefix']['milliseconds'] > one['prefix']['milliseconds']
    assert one['step']['bound'] == 'memory'


def test_a_bundle_brings_its_own_sizes_and_steps(bundle, tmp_path, capsys):
    found = figures(tmp_path, bundle, '--device', 'thor')
    assert found['steps'] == 3
    assert found['views'] == 2
    # 2 cameras of 4 tokens, 64 of the prompt.
    assert found['prefix_tokens'] == 72
    one_new = figures(tmp_path, bundle, '--device', 'thor', '--views', 1, '--steps', 7)
    assert one_new['prefix_tokens'] == 72
    assert 'denoise, 7 steps' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('arguments', 'text'),
    [
        (['pi06', '--device', 'thor'], "MODEL 'pi06' is neither a known family (pi05, pi0) nor"),
        (['pi05'], '--device is missing, such as in: vla_runtime roofline pi05'),
        ([], 'MODEL is missing'),
        (['pi05', '--device', 'thor', '--views', '0'], '--views 0: expected a whole number'),
        (['pi05', '--device', 'thor', '--steps', '-1'], '--steps -1: expected a whole number'),
        (['pi05', '--device', 'orin'], "invalid choice: 'orin' (choose from"),
        (['.', '--device', 'thor'], 'policy.yaml: is missing; is this folder a policy bundle?'),
    ],
)
def test_a_wrong_question_is_answered_with_what_mends_it(arguments, text, capsys):
    assert main(['roofline', *arguments]) == 2
    assert text in capsys.readouterr().err


def test_more_views_than_a_bundle_has_are_refused(bundle, capsys):
    assert main(['roofline', str(bundle), '--device', 'thor', '--views', '3']) == 2
    assert 'this policy has 2 cameras' in capsys.readouterr().err


def test_it_needs_no_torch():
    code = (
        'import sys; sys.modules["torch"] = None; from vla_runtime.cli.main import main; '
        'sys.exit(main(["roofline", "pi05", "--device", "thor"]))'
    )
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert 'AGX Thor (T5000): fits' in done.stdout
