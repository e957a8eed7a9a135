"""Refusals are immediate: PyTorch, which takes seconds to import, is not imported for them.

All refusals run in one process of their own, through the program's real `main`; of each it is asked
what it has imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from checkpoint_folders import openpi_statistics, tiny_tensors, write_openpi_folder
from commands import run_command
from onnx_bundles import copy_bundle, tiny_onnx_bundle
from onnx_faults import change_weight
from paths import ROOT
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.writer import seal

_RUN = """
import contextlib, io, json, sys
from vla_runtime.cli.main import main
heavy = {'torch', 'onnx', 'matplotlib', 'tensorrt', 'rclpy'}
found = []
for arguments in json.loads(sys.argv[1]):
    before, told, shown = set(sys.modules), io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(shown):
        code = main(arguments)
    imported = sorted(heavy & (set(sys.modules) - before))
    found.append([code, shown.getvalue(), told.getvalue(), imported])
print(json.dumps(found))
"""


class Refusal(NamedTuple):
    """A command line, in which {…} is a folder of the test's, and the expected message."""

    command: str
    told: str


REFUSALS = (
    Refusal('demo --backend jax', "error: backend 'jax' is unknown; known are: auto, torch, onnx"),
    Refusal('bench {tiny} --device cpuu', "error: device 'cpuu' is unknown; use cpu, cuda, cuda:N"),
    Refusal('train-demo --out {new} --family smolvl', "no recipe for it; did you mean 'smolvla'?"),
    Refusal('demo --backend tensorrt', "the Python package 'tensorrt' is not installed"),
    Refusal('demo --seconds 0', '--seconds 0: expected more than 0'),
    Refusal('demo --seconds nan', '--seconds nan: expected more than 0'),
    Refusal('demo --seed -1', "argument --seed: '-1' is not a whole number from 0 to"),
    Refusal('demo --seed 99999999999999999999999999', 'argument --seed: '),
    Refusal('study success --seed 99999999999999999999', 'argument --seed: '),
    Refusal('train-demo --out {new} --seed 99999999999999999999', 'argument --seed: '),
    Refusal('demo --robot {fifo}', 'robot {fifo}: is a FIFO (named pipe)'),
    Refusal('demo --robot /dev/zero', 'robot /dev/zero: is a device'),
    Refusal('info {fifo}/policy.yaml', '{fifo}: is a file; expected a policy bundle'),
    Refusal('info {piped}/policy.yaml', '{piped}/policy.yaml: is a FIFO (named pipe)'),
    Refusal('export {receipt} --out {new}', '{receipt}/verification.json: is not a mapping'),
    Refusal('study success --out {studies}', '{studies}/study_zzz.json: cannot be read: '),
    Refusal('demo --replan-interval 0', "argument --replan-interval: '0' is not a whole number"),
    Refusal('demo --replan-interval 999', 'replan_interval is 999 steps but a chunk has only 32'),
    Refusal('demo --cfg-beta 0.5', '--cfg-beta 0.5: expected 1 to 5'),
    Refusal('demo --namespace 1st', "--namespace '1st': expected letters"),
    Refusal('demo --bundle {nowhere}', '{nowhere}: no such folder; expected a policy bundle'),
    Refusal('demo --bundle lerobot/pi05_base', 'hf download lerobot/pi05_base --local-dir'),
    Refusal('study success --bundle lerobot/pi05_base', 'hf download lerobot/pi05_base'),
    Refusal('info lerobot/pi05_base', 'hf download lerobot/pi05_base --local-dir pi05_base'),
    Refusal('export lerobot/pi05_base --out {new}', 'hf download lerobot/pi05_base --local-dir'),
    Refusal('bench {checkpoint}', 'looks like a checkpoint: make a policy bundle of it first'),
    Refusal('info {checkpoint}', 'vla_runtime export {checkpoint} --out BUNDLE'),
    Refusal(
        'info {run}', 'vla_runtime export {run}/checkpoints/last/pretrained_model --out BUNDLE'
    ),
    Refusal('demo --bundle {cut}', 'weights.safetensors: is not a whole safetensors file'),
    Refusal('demo --bundle {tiny}', "no joint 'shoulder'"),
    Refusal('demo --robot so102', "robot 'so102' is neither a file nor one that comes with"),
    Refusal('demo --robot so101', 'so101.yaml: is of another robot than the simulated tabletop'),
    Refusal('demo --robot so101', "joints[2].lower: -1.69; the tabletop's 'elbow_flex' goes from"),
    Refusal('demo --cfg-beta 5.1', '--cfg-beta 5.1: expected 1 to 5'),
    Refusal('demo --out {a_file}/run', '--out {a_file}/run: is no folder that can be made: Not a'),
    Refusal('demo --bundle {tiny}/policy.yaml', "no joint 'shoulder'"),
    Refusal('study success --out {a_file}', '--out {a_file}: is no folder that can be made: File'),
    Refusal('study success --bundle {tiny}', "no joint 'shoulder'"),
    Refusal('study success --bundle {nowhere}', '{nowhere}: no such folder'),
    Refusal('info {nowhere}', '{nowhere}: no such folder; expected a policy bundle'),
    Refusal('info {cut}', 'weights.safetensors: is not a whole safetensors file'),
    Refusal('info {a_file}', '{a_file}: is a file; expected a policy bundle'),
    Refusal('export {nowhere} --out {new}', '{nowhere}'),
    Refusal('export {empty} --out {new}', '{empty}'),
    Refusal('export {tiny} --out {tiny}', '{tiny}: exists already; choose another name or use'),
    Refusal('export {tiny} --out {empty} --force', 'is not a policy bundle (it has no policy.yaml'),
    Refusal('export {tiny} --out {a_file}/new', 'cannot be made, because {a_file} is a file'),
    Refusal('export {tiny} --out {new} --horizon 3', 'which says everything itself'),
    Refusal('export {tiny} --out {new} --onnx-precision none', 'leaves nothing to do'),
    Refusal('export {cut} --out {new}', 'weights.safetensors: is not a whole safetensors file'),
    Refusal('bench {tiny} --plot {new} --json {new}', '--plot and --json are both {new}: name two'),
    Refusal('roofline --list --json {new}', '--list writes no file: leave out --json'),
    Refusal('train-demo --out {new} --device cuda', "device 'cuda': no CUDA device answers here"),
    Refusal('train-demo --out {new} --device gpu', "device 'gpu' is unknown to backend 'torch'"),
    Refusal('train-demo --out {tiny}', '{tiny}: exists already; choose another name or use'),
    Refusal('train-demo --out {new} --work {a_file}', '--work {a_file}: is no folder that can'),
    Refusal('train-demo --out {empty} --force', 'is not a policy bundle (it has no policy.yaml'),
    # What is read is not written over, nor into.
    Refusal(
        'demo --out {tiny}', "argument --out: '{tiny}' lies in the policy bundle {tiny}, which"
    ),
    Refusal('demo --record {tiny}/bag', "argument --record: '{tiny}/bag' lies in the policy"),
    Refusal('bench {tiny} --json {tiny}/policy.yaml', 'lies in the policy bundle {tiny}, which'),
    Refusal('study success --work {tiny}/onnx/w', "argument --work: '{tiny}/onnx/w' lies in the"),
    Refusal('export {tiny} --out {tiny}/copy', '{tiny}/copy: lies in the policy bundle {tiny}'),
    Refusal('replay {bag} --json {bag}/result.json', "'{bag}/result.json' is part of a recording"),
    Refusal('replay {bag} --page {new}.mcap', "argument --page: '{new}.mcap' is part of a record"),
    Refusal('bench {nowhere}', '{nowhere}'),
    Refusal('bench test', 'policy.yaml: is missing; is this folder a policy bundle?'),
    Refusal('bench {tiny} --json no/o.json', "there is no folder 'no'"),
    Refusal('bench {tiny} --json test', "'test' is a folder"),
    # The name of earlier releases.
    Refusal('bench {tiny} --triton denoise', "argument --triton: invalid choice: 'denoise'"),
    Refusal('bench {tiny} --repeats 0', "--repeats: '0' is not a whole number from 1 to 1000000"),
    Refusal(f'bench {{tiny}} --repeats {"9" * 30}', 'is not a whole number from 1 to 1000000'),
    Refusal('bench {tiny} --threads 5000', "--threads: '5000' is not a whole number from 0 to 256"),
    Refusal('bench {tiny} --views 9', '--views 9: this policy has 2 cameras; expected 1 to that'),
    Refusal('bench {tiny} --steps 1001', "--steps: '1001' is not a whole number from 1 to 1000"),
    Refusal('bench {tiny} --backend jax', "backend 'jax' is unknown"),
    Refusal('bench {tiny} --device cuda:x', "device 'cuda:x' is unknown; use cpu, cuda"),
    Refusal('bench {tiny} --device cuda:99 --threads 1', "device 'cuda:99': "),
    Refusal(
        'bench {tiny} --backend tensorrt --device cpu', "device 'cpu' is not supported by back"
    ),
    Refusal('bench {tiny} --backend onnxruntime', 'vision.onnx: is missing'),
    Refusal('roofline nowhere --device thor', "MODEL 'nowhere' is neither the folder of a"),
    Refusal('roofline test --device thor', 'policy.yaml: is missing; is this folder a policy bun'),
    Refusal('roofline pi05 --device thor --json no/o.json', "there is no folder 'no'"),
    Refusal('roofline pi05 --device thor --views 0', 'not a whole number from 1 to 16'),
    Refusal('roofline pi05 --device thor --views 99999999', 'not a whole number from 1 to 16'),
    Refusal('roofline pi05 --device thor --steps 99999999', 'not a whole number from 1 to 100'),
    Refusal(f'roofline pi05 --device thor --steps {"9" * 5000}', '(5000 characters)'),
    Refusal('verify {nowhere}', 'error: {nowhere}: no such folder; expected a policy bundle'),
    Refusal('verify {empty}', 'policy.yaml: is missing; is this folder a policy bundle?'),
    Refusal('verify {tiny}', 'vision.onnx: is missing'),
    Refusal('verify {changed}', 'weights.data: has changed'),
    Refusal('verify {onnx} --device tpu', "device 'tpu' is unknown to backend 'onnxruntime'"),
    Refusal('verify {onnx} --json /not/there/x.json', "there is no folder '/not/there'"),
    Refusal('verify {onnx} --json {empty}', 'is a folder; name a file in it'),
    Refusal('verify {onnx} --backend cuda', "invalid choice: 'cuda'"),
    Refusal('verify {nowhere} --backend tensorrt', 'no such folder; expected a policy bundle'),
    Refusal(
        'verify {onnx} --backend tensorrt --device cpu',
        "device 'cpu' is not supported by backend 'tensorrt'",
    ),
    Refusal('build {nowhere}', 'error: {nowhere}: no such folder; expected a policy bundle'),
    Refusal('build {tiny}/policy.yaml/x', 'expected a policy bundle'),
    Refusal('build {tiny}', 'vision.onnx: is missing'),
    Refusal('build {onnx} --device cpu', "device 'cpu' is not supported by backend 'tensorrt'"),
    Refusal('build {onnx} --workspace 0', "'0' is not a whole number of at least 1"),
    Refusal('study success --processes 100000', "'100000' is not a whole number from 1 to 256"),
    Refusal('study', 'replan'),
    Refusal('study success speed', "there is no study 'speed'"),
    Refusal('study succes --page', "there is no study 'succes'; did you mean 'success'?"),
    Refusal('study --page --out {empty}', '--out {empty}: there is no study_*.json'),
    Refusal('bench {tiny} --rows 2', "--rows 2: policy 'tiny pi05' was trained without advantage"),
    Refusal('bench {tiny} --rows 3', '--rows: invalid choice: 3'),
    Refusal('view --port 99999', "--port: '99999' is not a whole number from 0 to 65535"),
    Refusal('bench {tiny} --views -1', "--views: '-1' is not a whole number of at least 1"),
    Refusal('build {tiny}', 'vla_runtime export {tiny} --out'),
    Refusal('build {onnx}', "the Python package 'tensorrt' is not installed"),
    Refusal('verify {onnx} --backend tensorrt', "the Python package 'tensorrt' is not installed"),
    Refusal('roofline', 'MODEL is missing'),
    Refusal('roofline pi05', '--device is missing, such as in: vla_runtime roofline pi05'),
    Refusal('roofline pi5 --device thor', "a published size; did you mean 'pi05'?"),
    Refusal('roofline none --device thor', '; expected one of act, '),
    Refusal('roofline pi05 --device orin', "--device: 'orin' is unknown; "),
    Refusal('roofline pi05 --device agx-orin thr', "'thr' is unknown; did you mean 'thor'?"),
    Refusal('selftest --device gpu', "device 'gpu'"),
    Refusal('selftest --device cpu --family gr00t', "family 'gr00t' is unknown"),
    Refusal('train-demo --out {new} --episodes 0', "argument --episodes: '0' is not a whole"),
    Refusal('train-demo --out {new} --check-episodes -1', "argument --check-episodes: '-1' is not"),
    Refusal('train-demo --out {new} --threads two', "argument --threads: 'two' is not a whole"),
    Refusal('train-demo --out {new} --family evo1', "family 'evo1' cannot be trained here"),
    Refusal('replay {nowhere}', '{nowhere}: does not exist'),
    Refusal('replay {empty}', 'has no bag file'),
    Refusal('to-dataset {nowhere} --out {new}', 'error: {nowhere}: does not exist'),
)


def run(commands: list[list[str]], **environment: str) -> list[list]:
    # No GPU, should this machine have one.
    given = {**os.environ, 'CUDA_VISIBLE_DEVICES': '', **environment}
    done = subprocess.run(
        [sys.executable, '-c', _RUN, json.dumps(commands)],
        cwd=ROOT,
        env=given,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope='module')
def places(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp('refusals')
    cut = copy_bundle(tiny_onnx_bundle(), folder / 'cut')
    changed = copy_bundle(tiny_onnx_bundle(), folder / 'changed')
    change_weight(changed, 'expert.blocks.0.mlp', 1.01)
    weights = cut / 'weights.safetensors'
    weights.write_bytes(weights.read_bytes()[:-100])
    (folder / 'a_file').touch()
    (folder / 'empty').mkdir()
    os.mkfifo(folder / 'fifo')
    (folder / 'piped').mkdir()
    os.mkfifo(folder / 'piped' / 'policy.yaml')
    (folder / 'studies').mkdir()
    (folder / 'studies' / 'study_zzz.json').write_text('{bad')
    receipt = write_tiny_policy(folder / 'receipt', tiny_spec())
    spec = read_bundle(receipt, verify=False).spec
    (receipt / 'verification.json').write_text('[]')
    seal(receipt, replace(spec, files={}))
    (folder / 'checkpoint').mkdir()
    (folder / 'checkpoint' / 'config.json').write_text('{"type": "pi05"}')
    (folder / 'bag').mkdir()
    (folder / 'bag' / 'metadata.yaml').touch()
    trained = folder / 'run' / 'checkpoints' / 'last' / 'pretrained_model'
    trained.mkdir(parents=True)
    (trained / 'model.safetensors').touch()
    return {
        'tiny': write_tiny_policy(folder / 'tiny', tiny_spec()),
        'cut': cut,
        'changed': changed,
        'onnx': tiny_onnx_bundle(),
        **{name: folder / name for name in ('nowhere', 'new', 'a_file', 'empty', 'checkpoint')},
        **{name: folder / name for name in ('fifo', 'piped', 'studies', 'receipt', 'run', 'bag')},
    }


@pytest.fixture(scope='module')
def told(places) -> dict[str, list]:
    """Outcome of each command line of REFUSALS."""
    commands = [
        [word.format_map(places) for word in refusal.command.split()] for refusal in REFUSALS
    ]
    outcomes = run(commands)
    return {refusal.command: outcome for refusal, outcome in zip(REFUSALS, outcomes, strict=True)}


@pytest.mark.parametrize('refusal', REFUSALS, ids=[refusal.command[:80] for refusal in REFUSALS])
def test_it_is_refused_with_what_is_wrong_and_without_pytorch(refusal, told, places):
    code, shown, error, imported = told[refusal.command]
    assert code == 2
    # An export tells of what it is made before it is made.
    assert not shown or refusal.command.startswith('export')
    assert refusal.told.format_map(places) in error, error
    assert 'Traceback' not in error
    assert imported == []
    assert not places['new'].exists()


def test_the_program_itself_ends_with_2_and_one_line(monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    done = run_command('demo', '--backend', 'tensorrt')
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: backend 'tensorrt'") or 'no CUDA device answers here' in line
    assert not done.imported & {'torch', 'tensorrt', 'mujoco', 'rclpy', 'onnx'}


def test_a_package_that_is_missing_is_told_before_anything_is_begun(places, tmp_path):
    code = (
        'import sys; sys.modules.update(dict.fromkeys(sys.argv[1].split(",")));'
        'from vla_runtime.cli.main import main; sys.exit(main(sys.argv[2:]))'
    )
    openpi = places['empty'].parent / 'openpi'
    write_openpi_folder(openpi, tiny_tensors(), openpi_statistics())
    for missing, command, told in (
        ('rclpy', ['demo'], "the demo needs the Python package 'rclpy', which is not installed"),
        ('matplotlib', ['demo'], "the demo needs the Python package 'matplotlib'"),
        ('torch', ['demo'], "backend 'torch': the Python package 'torch' is not installed"),
        ('mujoco', ['study', '--list'], "study needs the Python package 'mujoco'"),
        (
            'metaworld',
            ['study', 'metaworld', '--bundle', str(places['tiny'])],
            './run metaworld vl',
        ),
        ('matplotlib', ['train-demo', '--out', 'new'], "needs the Python package 'matplotlib'"),
        ('onnx', ['export', str(places['tiny']), '--out', 'new'], "need the Python package 'onnx'"),
        ('onnx', ['export', str(openpi), '--out', 'new', '--dry-run'], "the Python package 'onnx'"),
        ('matplotlib', ['bench', str(places['tiny']), '--plot', 'new'], "package 'matplotlib'"),
    ):
        done = subprocess.run(
            [sys.executable, '-c', code, missing, *command],
            cwd=tmp_path,
            env={**os.environ, 'PYTHONPATH': str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, told in done.stderr) == (2, True), done.stderr
        assert 'Traceback' not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('package', ['safetensors', 'sentencepiece', 'yaml'])
def test_info_names_a_package_that_is_not_installed(package):
    program = (
        f"import sys; sys.modules['{package}'] = None\n"
        'from vla_runtime.cli.main import main\n'
        "sys.exit(main(['info', 'engines/demo']))"
    )
    done = subprocess.run(
        [sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.startswith('error: ')
    assert f"the Python package '{package}'" in done.stderr
    assert done.stderr.count('\n') == 1
