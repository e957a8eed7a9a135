"""`vla_runtime check`: what a launch would say of a robot file and a bundle, without one."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from checkpoint_folders import joints, lerobot_folder
from paths import ROOT
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.schema import WORDLESS_TASKS
from vla_runtime.bundle.success import success_fault
from vla_runtime.bundle.summary import task_notes
from vla_runtime.cli.main import main
from vla_runtime.engines import candidates
from vla_runtime.robot.file import load_robot


def test_files_that_fit_give_0(capsys):
    assert main(['check', 'tabletop', str(ROOT / 'engines' / 'demo')]) == 0
    assert main(['check', str(ROOT / 'config' / 'robots' / 'ur5e.yaml')]) == 0


@pytest.mark.parametrize('name', ['so101', 'so101_split', 'ur5e', 'aloha'])
def test_every_topic_that_is_heard_is_told_with_its_type(name, capsys):
    assert main(['check', name]) == 0
    told = re.findall(r'(\S+) \[(\w+/msg/\w+)\]$', capsys.readouterr().out, re.MULTILINE)
    robot = load_robot(ROOT / 'config' / 'robots' / f'{name}.yaml')
    images = {'raw': 'sensor_msgs/msg/Image', 'compressed': 'sensor_msgs/msg/CompressedImage'}
    assert told == [
        *((source.topic, 'sensor_msgs/msg/JointState') for source in robot.joint_states),
        *((camera.topic, images[camera.type]) for camera in robot.cameras),
    ]


def test_every_conflict_is_told_and_gives_2(tmp_path, capsys):
    spec = tiny_spec()
    bundle = write_tiny_policy(tmp_path / 'tiny', spec)
    assert main(['check', 'so101', str(bundle)]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) > 1
    assert all('so101.yaml' in line for line in error.splitlines())


@pytest.mark.parametrize('words', [['so102'], ['so101', 'nowhere'], ['/no/file.yaml']])
def test_files_that_cannot_be_read_give_2(words, capsys):
    assert main(['check', *words]) == 2
    assert 'error: ' in capsys.readouterr().err


def test_info_names_a_study_only_for_a_policy_of_the_tabletop(tmp_path, capsys, monkeypatch):
    # As of exported files in 8 bits that no study has judged.
    monkeypatch.setattr(
        candidates,
        'reduced_precisions',
        lambda bundle, device: {'int8': success_fault(bundle, 'onnxruntime', 'int8')},
    )
    bundle = write_tiny_policy(tmp_path / 'tiny', tiny_spec())
    assert main(['info', str(bundle)]) == 0
    shown = capsys.readouterr().out
    assert 'not int8' in shown
    assert 'vla_runtime study' not in shown
    # The demo policy drives that robot; without its receipt nothing of it is judged.
    demo = shutil.copytree(ROOT / 'engines' / 'demo', tmp_path / 'demo')
    (demo / 'verification.json').unlink()
    text = (demo / 'policy.yaml').read_text()
    lines = [line for line in text.splitlines() if 'verification.json' not in line]
    (demo / 'policy.yaml').write_text('\n'.join(lines))
    assert main(['info', '--quick', str(demo)]) == 0
    assert 'vla_runtime study' in capsys.readouterr().out


@pytest.mark.parametrize('tasks', [('pick', ''), ('pick', 'place')])
def test_tasks_without_words_are_told_at_export_and_of_the_bundle(tmp_path, tasks, capsys):
    meta = tmp_path / 'dataset' / 'meta'
    meta.mkdir(parents=True)
    names = joints().split(',')
    feature = {'dtype': 'float32', 'shape': [len(names)], 'names': names}
    features = {'observation.state': feature, 'action': feature}
    (meta / 'info.json').write_text(json.dumps({'fps': 30, 'features': features}))
    rows = [{'task_index': index, 'task': task} for index, task in enumerate(tasks)]
    (meta / 'tasks.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    bundle = tmp_path / 'bundle'
    words = ['export', str(lerobot_folder()), '--out', str(bundle), '--onnx-precision', 'none']
    words += ['--dataset', str(meta.parent), '--units', 'rad', '--vision-heads', '4']
    assert main(words) == 0
    told = [capsys.readouterr().out]
    for verb in (['info', '--quick', str(bundle)], ['check', 'so101', str(bundle)]):
        assert main(verb) == 0
        told.append(capsys.readouterr().out)
    spec = read_bundle(bundle).spec
    tasks_without_text = '' in tasks
    assert spec.source.get(WORDLESS_TASKS) == ('1 of 2' if tasks_without_text else None)
    assert len(task_notes(spec)) == tasks_without_text
    for text in told:
        assert all(note in text for note in task_notes(spec))
