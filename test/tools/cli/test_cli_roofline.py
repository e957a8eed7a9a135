"""`vla_runtime roofline`: fits or not, floors per phase, and clear answers to wrong questions."""

from __future__ import annotations

import json
import re
import sys

import pytest
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.cli.main import main
from vla_runtime.declarations.pi import PI05
from vla_runtime.family.listing import family_names, find_family, performance_figures, preset_names
from vla_runtime.models.shapes.operation_counts import count_operations
from vla_tools.performance.devices import DEVICES
from vla_tools.performance.roofline import largest_engine_bytes


@pytest.fixture(scope='module')
def bundle(tmp_path_factory):
    spec = tiny_spec(advantage='task_newline')
    return write_tiny_policy(tmp_path_factory.mktemp('roofline') / 'bundle', spec)


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
    assert small.startswith('pi05 on NVIDIA Jetson Orin Nano 8GB (Super, 25 W): FITS IN PART')
    assert re.search(r'torch, 1 row .* DOES NOT FIT', small)
    assert 'AGX Orin 64GB: fits' in large
    rows = dict(re.findall(r'^  (\S.*?)  +([\d.]+) +[\d.]+  ', large, re.MULTILINE))
    expected = ['vision, one view', 'prefix', 'denoise, one step', 'denoise, 10 steps']
    assert list(rows)[-6:] == [*expected, 'miss, 3 view(s)', 'hit']
    assert rows['hit'] == rows['denoise, 10 steps']
    assert float(rows['prefix']) > float(rows['hit'])


def test_pytorch_on_a_gpu_is_predicted_by_its_kernels_in_every_phase(tmp_path, capsys):
    devices = ('h200', 'agx-orin', 'orin-nx', 'orin-nano', 'thor')
    found = figures(tmp_path, 'pi05', '--device', *devices, '--steps', 5)
    header = 'PyTorch predicted, ms    operators    Triton  1 row; least time + 4 µs a kernel'
    assert capsys.readouterr().out.count(header) == 5
    for device in devices:
        least = found['devices'][device]['floors_ms']['1_rows']
        for run_by, predicted in found['devices'][device]['predicted_ms'].items():
            kernels = {p: (predicted[p] - least[p]['milliseconds']) / 4e-3 for p in predicted}
            one = performance_figures('pi05').kernels[run_by]
            assert kernels['step'] == pytest.approx(one.step)
            assert kernels['hit'] == pytest.approx(5 * one.step + one.inputs)
            assert kernels['miss'] == pytest.approx(kernels['hit'] + 3 * one.vision + one.prefix)


@pytest.mark.thorough
@pytest.mark.parametrize(
    'model',
    [
        # Counting takes seconds for each; the images of a prompt are what may go wrong.
        name if name == 'evo1' else pytest.param(name, marks=pytest.mark.slow)
        for name in preset_names()
    ],
)
def test_every_published_size_can_have_other_cameras(model, tmp_path, capsys):
    device = ('--device', 'agx-orin')
    found = [figures(tmp_path, model, *device, '--views', views) for views in (1, 2, 5)]
    assert [one['views'] for one in found] == [1, 2, 5]
    one, two, five = (one['prefix_tokens'] for one in found)
    assert five - two == 3 * (two - one) > 0
    assert 'miss, 5 view(s)' in capsys.readouterr().out


@pytest.mark.parametrize('arguments', [('pi05', '--precision', 'float32'), ('act',)])
def test_what_was_not_counted_is_not_predicted(arguments, tmp_path, capsys):
    found = figures(tmp_path, *arguments, '--device', 'h200')
    assert found['devices']['h200']['predicted_ms'] == {}
    assert 'no prediction for PyTorch' in capsys.readouterr().out


def test_shares_of_a_miss_stand_beside_those_that_others_measured(tmp_path, capsys):
    found = figures(tmp_path, 'smolvla', '--device', 'agx-orin', 'rtx-5070', '--views', 2)
    orin, card = (found['devices'][key] for key in ('agx-orin', 'rtx-5070'))
    floors, shares = orin['floors_ms']['1_rows'], orin['miss_shares']['1_rows']
    whole = floors['miss']['milliseconds']
    assert shares['vision'] == pytest.approx(2 * floors['vision']['milliseconds'] / whole)
    assert shares['prefix'] == pytest.approx(floors['prefix']['milliseconds'] / whole)
    assert sum(shares.values()) == pytest.approx(1.0)
    (run,) = orin['measured_by_others']
    assert (run['total_ms'], run['vision_ms']) == (205.95, 109.44)
    assert card['measured_by_others'] == []
    text = capsys.readouterr().out
    assert re.search(r'least time, 1 row +\d+% +\d+% +\d+%', text)
    assert re.search(r'vla\.cpp, 206 ms +53% +47% together  github\.com', text)


def test_what_others_measured_is_of_published_sizes_and_devices_of_the_table():
    figures = {model: performance_figures(model) for model in preset_names()}
    runs = [run for one in figures.values() for run in one.runs]
    assert len(runs) == 20
    assert all(0 < run.vision_ms < run.total_ms and run.device in DEVICES for run in runs)
    for one in figures.values():
        assert sum(len(one.runs_on(device)) for device in DEVICES) == len(one.runs)
    assert not performance_figures('engines/demo').runs


def test_figures_are_of_published_sizes():
    for name in family_names():
        family = find_family(name)
        assert family.figures.keys() <= family.presets.keys()


def test_the_json_has_all_figures_and_half_precision_halves_the_weights(tmp_path):
    half = figures(tmp_path, 'pi0', '--device', 'thor', '--precision', 'float16', '--views', 2)
    full = figures(tmp_path, 'pi0', '--device', 'thor', '--precision', 'float32', '--views', 2)
    assert half['prefix_tokens'] == 2 * 256 + 48
    for backend, of_backend in half['memory_bytes'].items():
        for built, need in of_backend.items():
            ratio = full['memory_bytes'][backend][built]['weights'] / need['weights']
            assert 1.9 < ratio < 2.0
    thor = half['devices']['thor']
    both = {'1_row': True, '1_to_2_rows': True}
    assert thor['fits'] == {'torch': both, 'onnxruntime': both, 'tensorrt': both}
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


def test_more_views_than_a_bundle_has_are_refused(bundle, capsys):
    assert main(['roofline', str(bundle), '--device', 'thor', '--views', '3']) == 2
    assert 'this policy has 2 cameras' in capsys.readouterr().err


def test_memory_is_told_for_every_backend_and_number_of_rows(tmp_path, capsys):
    assert main(['roofline', 'pi05', '--device', 'orin-nx', '--views', '2']) == 0
    text = capsys.readouterr().out
    # It runs there, and cannot be built there.
    assert text.startswith('pi05 on NVIDIA Jetson Orin NX 16GB (25 W): FITS IN PART')
    line = re.compile(r'^  (\w+, 1(?: to 2)? rows?) +([\d.]+) GiB .*  (fits)$', re.MULTILINE)
    rows = line.findall(text)
    assert [label for label, *_ in rows] == [
        f'{backend}, {built}'
        for backend in ('torch', 'onnxruntime', 'tensorrt')
        for built in ('1 row', '1 to 2 rows')
    ]
    needs = {label: float(size) for label, size, _ in rows}
    # One set of weights for any number of rows; ONNX Runtime's files have one each.
    assert needs['tensorrt, 1 to 2 rows'] < 1.05 * needs['tensorrt, 1 row']
    assert needs['onnxruntime, 1 to 2 rows'] > 1.6 * needs['tensorrt, 1 to 2 rows']
    # The text table, 257,152 rows of 2,048 numbers, is the host's.
    table = 257_152 * 2_048 * 2 / (1 << 30)
    assert needs['tensorrt, 1 row'] < needs['torch, 1 row'] - table
    assert needs['onnxruntime, 1 row'] == needs['tensorrt, 1 row']


def test_building_is_told_apart_from_running(tmp_path, capsys):
    chosen = ('--device', 'orin-nano', 'orin-nx', 'agx-orin', 'rtx-4090', '--precision', 'float16')
    devices = figures(tmp_path, 'pi05', *chosen)['devices']
    # By hand: the largest file thrice (parsed, on the GPU, built), scratch, and CUDA's own twice.
    largest = largest_engine_bytes(count_operations('pi05', PI05), 2)
    # The decoder without its table; of the last layer only the keys and values are read.
    layer = 2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 16384
    matrices = 17 * layer + 2 * 2048 * 256
    assert matrices * 2 < largest < matrices * 2.01
    shared, card = 3 * largest + (3 << 30), largest + (2 << 30)
    builds = {key: device['build'] for key, device in devices.items()}
    # Engines fit where they can be built, with swap if need be.
    assert not any(devices['orin-nano']['fits']['tensorrt'].values())
    assert all(devices['orin-nx']['fits']['tensorrt'].values())
    assert builds['orin-nx'] == {
        'memory_bytes': shared,
        'host_bytes': 0,
        'swap_bytes': shared - (13 << 30),
        'fits': False,
    }
    assert (builds['orin-nano']['swap_bytes'], builds['orin-nano']['fits']) == (None, False)
    assert (builds['agx-orin']['swap_bytes'], builds['agx-orin']['fits']) == (0, True)
    assert builds['rtx-4090'] == {
        'memory_bytes': card,
        'host_bytes': 2 * largest + (1 << 30),
        'swap_bytes': 0,
        'fits': True,
    }
    lines = re.findall(r'^  tensorrt, build +(.*)$', capsys.readouterr().out, re.MULTILINE)
    assert [re.sub(' +', ' ', line) for line in lines] == [
        '13.47 GiB DOES NOT FIT',
        '13.47 GiB DOES NOT FIT without 0.47 GiB of swap',
        '13.47 GiB fits',
        '5.49 GiB fits, beside 7.98 GiB of the host',
    ]


@pytest.mark.parametrize(
    ('device', 'precision', 'noted'),
    [
        ('rtx-4090', 'float16', True),
        ('rtx-4090', 'bfloat16', False),
        ('l40s', 'float16', False),
    ],
)
def test_a_floor_that_can_be_beaten_says_so(device, precision, noted, capsys):
    assert main(['roofline', 'pi05', '--device', device, '--precision', precision]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith('  note: float16 accumulated in float16') == noted


def test_a_policy_without_a_tag_has_one_row_alone(tmp_path, capsys):
    bundle = write_tiny_policy(tmp_path / 'untagged', tiny_spec())
    found = figures(tmp_path, bundle, '--device', 'thor')
    assert {tuple(of) for of in found['memory_bytes'].values()} == {('1_row',)}
    assert list(found['devices']['thor']['floors_ms']) == ['1_rows']
    text = capsys.readouterr().out
    assert re.search(r'^  at least, ms +1 row  bound by$', text, re.MULTILINE)
    assert '2 rows' not in text


def test_without_pytorch_it_says_what_counts_the_operations(monkeypatch, capsys):
    count_operations.cache_clear()
    monkeypatch.setitem(sys.modules, 'torch', None)
    monkeypatch.delitem(sys.modules, 'vla_runtime.models.shapes.meta_runs', raising=False)
    assert main(['roofline', 'pi05', '--device', 'thor']) == 2
    assert 'operations are counted by PyTorch' in capsys.readouterr().err


def test_a_policy_that_runs_once_has_one_step_and_one_row(capsys):
    assert main(['roofline', 'act', '--device', 'agx-orin']) == 0
    text = capsys.readouterr().out
    assert 'prefix of 1202 tokens, 1 denoise steps' in text
    assert '2 rows' not in text and '2_rows' not in text
    assert main(['roofline', 'act', '--device', 'agx-orin', '--steps', '4']) == 2
    assert '--steps 4: the head of act (single) runs once' in capsys.readouterr().err


@pytest.mark.parametrize(('model', 'length'), [('openvla', 7), ('pi0_fast', 256)])
def test_a_policy_that_writes_tokens_has_answers_and_one_row(model, length, tmp_path, capsys):
    found = figures(tmp_path, model, '--device', 'thor')
    assert found['answer_tokens'] == length
    assert {tuple(of) for of in found['memory_bytes'].values()} == {('1_row',)}
    assert list(found['devices']['thor']['floors_ms']) == ['1_rows']
    text = capsys.readouterr().out
    assert re.search(r'^  one token +[\d.]+ ', text, re.MULTILINE)
    assert re.search(rf'^  answer, {length} tokens +[\d.]+ ', text, re.MULTILINE)
    assert 'denoise' not in text and '2 rows' not in text
