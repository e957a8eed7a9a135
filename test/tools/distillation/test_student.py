"""Students of few steps: what they learn, what they keep, what they refuse, how they go on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from thorough import thorough_but
from tiny_policy import CAMERAS, observation, tiny_spec, write_tiny_policy
from tiny_student import FRAMES, write_tiny_data

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.cli.main import main
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_tools.dataset.layout import INFO, STATE, TASKS, DatasetError, image_key
from vla_tools.dataset.observations import read_observations
from vla_tools.distillation.student import Distillation, DistillationSettings

FAMILIES = ['pi05', 'pi0', 'smolvla', 'groot_n15']


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set with the names of the tiny policies' robot, its joints in another order."""
    return write_tiny_data(tmp_path_factory.mktemp('data') / 'set')


@pytest.fixture(scope='module')
def checkpoint(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run of one update; its teacher lies beside its folder."""
    folder = tmp_path_factory.mktemp('run')
    words = ['distill', str(_teacher(folder)), '--data', str(data), '--out', str(folder / 'out')]
    assert main([*words, '--work', str(folder / 'work'), '--updates', '1']) == 0
    return folder / 'work' / 'checkpoint.pt'


def _teacher(folder: Path, family: str = 'pi05') -> Path:
    return write_tiny_policy(folder / 'teacher', tiny_spec(family))


def _settings(updates: int) -> DistillationSettings:
    return DistillationSettings((1, 2), teacher_steps=3, updates=updates, batch=4, draws=2)


def test_observations_are_those_that_were_written(data: Path) -> None:
    found = read_observations(data, tiny_spec(), 1000)
    assert len(found) == FRAMES and {one.task for one in found} == {'task 0', 'task 1'}
    states = {tuple(observation(seed).state): seed for seed in (*range(30), *range(100, 130))}
    for one in found[:5]:
        seed = states[tuple(one.state)]
        assert one.task == f'task {seed // 100}'
        for name, pixels in observation(seed).images.items():
            np.testing.assert_array_equal(one.decode().images[name], pixels)
    assert [one.task for one in read_observations(data, tiny_spec(), 7, seed=3)] == [
        one.task for one in read_observations(data, tiny_spec(), 7, seed=3)
    ]


def test_a_data_set_of_another_robot_is_refused(data: Path) -> None:
    spec = tiny_spec()
    other = replace(spec, cameras=(replace(spec.cameras[0], name='front'), spec.cameras[1]))
    with pytest.raises(DatasetError, match='front'):
        read_observations(data, other, 10)
    renamed = replace(spec, state=(replace(spec.state[0], name='hip'), *spec.state[1:]))
    with pytest.raises(DatasetError, match='hip'):
        read_observations(data, renamed, 10)


@pytest.mark.parametrize('family', thorough_but(['pi05'], FAMILIES))
def test_the_expert_alone_learns_the_teachers_chunks(
    family: str, data: Path, tmp_path: Path
) -> None:
    bundle = read_bundle(_teacher(tmp_path, family))
    observations = read_observations(data, bundle.spec, FRAMES)
    distillation = Distillation(bundle, observations, _settings(60), tmp_path)
    before = distillation.check()
    distillation.run(progress=False)
    after = distillation.check()
    assert after['steps_1'] < 0.8 * before['steps_1']
    assert after['steps_2'] < before['steps_2']
    changed = distillation.changed()
    assert changed and not any(name.startswith('vision.') for name in changed)


def test_a_run_that_was_cut_off_ends_as_if_it_had_not_been(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = read_bundle(_teacher(tmp_path))
    observations = read_observations(data, bundle.spec, FRAMES)
    monkeypatch.setattr('vla_tools.distillation.student._CHECKPOINT_EVERY', 3)
    whole = Distillation(bundle, observations, _settings(6), tmp_path / 'whole')
    whole.run(progress=False)
    cut = Distillation(bundle, observations, _settings(6), tmp_path / 'cut')
    real = Distillation._update

    def interrupted(self: Distillation) -> float:
        if self._step == 4:
            raise KeyboardInterrupt
        return real(self)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Distillation, '_update', interrupted)
        cut.run(progress=False)
    resumed = Distillation(bundle, observations, _settings(6), tmp_path / 'cut')
    assert resumed._step == 3
    resumed.run(progress=False)
    for name, value in whole.student.state_dict().items():
        assert torch.equal(value, resumed.student.state_dict()[name]), name
    with pytest.raises(ValueError, match='another folder'):
        Distillation(bundle, observations, _settings(7), tmp_path / 'cut')


def test_a_run_does_not_go_on_with_other_data(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher, work = _teacher(tmp_path), tmp_path / 'work'

    def distil(folder: Path, out: str, *more: str) -> int:
        words = ['distill', str(teacher), '--data', str(folder), '--out', str(tmp_path / out)]
        return main([*words, '--work', str(work), '--updates', '1', *more])

    assert distil(data, 'first') == 0
    receipt = json.loads((tmp_path / 'first' / 'verification.json').read_text())
    capsys.readouterr()
    # The same data under another way to it is the same.
    (tmp_path / 'set').symlink_to(data)
    assert distil(tmp_path / 'set', 'second') == 0
    other = write_tiny_data(tmp_path / 'other' / 'set', first_seed=500)
    assert distil(other, 'third') == 2
    error = capsys.readouterr().err
    assert f'{work / "checkpoint.pt"}: ' in error and 'data: set sha256:' in error
    more = write_tiny_data(tmp_path / 'more', per_episode=40)
    assert distil(more, 'fourth', '--frames', '70') == 2
    assert f'frames: {FRAMES}, asked for 70' in capsys.readouterr().err
    assert not (tmp_path / 'third').exists() and not (tmp_path / 'fourth').exists()
    state = torch.load(work / 'checkpoint.pt', weights_only=True)
    assert receipt['settings']['data'] == state['settings']['data']


def _info(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        info = json.loads((folder / INFO).read_text())
        change(info)
        (folder / INFO).write_text(json.dumps(info))

    return damage


def _without(pattern: str, column: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (file,) = folder.glob(pattern)
        pq.write_table(pq.read_table(file).drop_columns([column]), file)

    return damage


def _cut(pattern: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (file,) = folder.glob(pattern)
        file.write_bytes(file.read_bytes()[:50])

    return damage


@pytest.mark.parametrize(
    ('damage', 'file', 'field'),
    [
        (_cut(INFO), 'info.json', 'cannot be read'),
        (lambda folder: (folder / INFO).write_text('[]'), 'info.json', 'is not a mapping'),
        (_info(lambda info: info.pop('features')), 'info.json', 'features'),
        (_info(lambda info: info.update(features=3)), 'info.json', 'features'),
        (_info(lambda info: info['features'].update({STATE: 3})), 'info.json', STATE),
        (_info(lambda info: info['features'][STATE].update(names=3)), 'info.json', 'names'),
        (_info(lambda info: info.pop('codebase_version')), 'info.json', 'codebase_version'),
        (_cut('data/*/*.parquet'), '.parquet', 'cannot be read'),
        (_without('data/*/*.parquet', STATE), '.parquet', STATE),
        (_without('data/*/*.parquet', 'task_index'), '.parquet', 'task_index'),
        (_cut(TASKS), 'tasks.parquet', 'cannot be read'),
        (_without(TASKS, 'task_index'), 'tasks.parquet', 'task_index'),
        (lambda folder: (folder / TASKS).unlink(), 'tasks.parquet', 'is missing'),
    ],
)
def test_a_damaged_data_set_is_named(
    damage: Callable[[Path], object], file: str, field: str, data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / 'set'
    shutil.copytree(data, folder)
    damage(folder)
    with pytest.raises(DatasetError) as refused:
        read_observations(folder, tiny_spec(), 10)
    named, said = str(refused.value).split(': ', 1)
    assert named.startswith(str(folder)) and named.endswith(file)
    assert field in said and '\n' not in said and 'anew' in said


@pytest.mark.parametrize('image', [b'', b'no image'])
def test_a_frame_that_is_no_image_is_named(image: bytes, data: Path) -> None:
    (one,) = read_observations(data, tiny_spec(), 1)
    bad = replace(one, images={**one.images, CAMERAS[0]: image})
    with pytest.raises(DatasetError) as refused:
        bad.decode()
    assert str(refused.value).startswith(f'{one.file}: {image_key(CAMERAS[0])}: ')


@pytest.mark.parametrize(
    ('damage', 'field'),
    [
        (lambda path, state: path.write_bytes(path.read_bytes()[:-500]), 'the file'),
        (lambda path, state: path.write_bytes(b''), 'the file'),
        (lambda path, state: path.write_bytes(b'no checkpoint'), 'the file'),
        (lambda path, state: torch.save([1], path), 'the file'),
        (lambda path, state: torch.save({**state, 'settings': 1}, path), 'settings'),
        (lambda path, state: torch.save({**state, 'step': None}, path), 'step'),
        (lambda path, state: torch.save({**state, 'student': {}}, path), 'student'),
        (lambda path, state: torch.save({**state, 'optimizer': {}}, path), 'optimizer'),
    ],
)
def test_a_damaged_checkpoint_is_named(
    damage: Callable[[Path, dict[str, Any]], object],
    field: str,
    checkpoint: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    work = tmp_path / 'work'
    shutil.copytree(checkpoint.parent, work)
    path = work / 'checkpoint.pt'
    damage(path, torch.load(path, weights_only=True))
    capsys.readouterr()
    teacher = checkpoint.parent.parent / 'teacher'
    words = ['distill', str(teacher), '--data', str(data), '--out', str(tmp_path / 'out')]
    assert main([*words, '--work', str(work), '--updates', '1']) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f'error: {path}: {field}: ') and '--work' in line


def test_the_verb_writes_a_student_that_runs_with_its_steps_alone(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher, out = _teacher(tmp_path), tmp_path / 'student'
    words = ['distill', str(teacher), '--data', str(data), '--out', str(out), '--updates', '2']
    assert main(words) == 0
    bundle, taught = read_bundle(out), read_bundle(teacher)
    assert bundle.spec.student_steps == (1, 2) and bundle.spec.denoise_steps == 2
    receipt = json.loads((out / 'verification.json').read_text())
    assert receipt['teacher']['name'] == taught.spec.name and receipt['teacher']['sha256']
    before, after = load_file(taught.weights_path), load_file(bundle.weights_path)
    assert before.keys() == after.keys()
    differ = {name for name in before if not torch.equal(before[name], after[name])}
    assert differ and differ <= set(receipt['changed'])
    assert not any(name.startswith(('vision.', 'language.')) for name in differ)
    policy = Policy.load(out, 'torch', precision='float32', threads=1)
    for steps in (None, 1, 2):
        _, report = policy.infer(observation(), settings=PolicySettings(denoise_steps=steps))
        assert report.denoise_steps == (steps or 2)
    with pytest.raises(ValueError, match='denoise_steps is 3'):
        policy.settings = PolicySettings(denoise_steps=3)
    policy.close()
    # Bundle and data are named where they cannot be used.
    capsys.readouterr()
    assert main([*words[:3], 'nowhere', *words[4:], '--force']) == 2
    assert 'nowhere' in capsys.readouterr().err


def test_facts_of_the_teacher_are_told_before_the_data_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = write_tiny_policy(tmp_path / 'act', tiny_spec('act'))
    words = ['distill', str(teacher), '--data', 'nowhere', '--out', str(tmp_path / 'out')]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert 'no flow' in said and 'nowhere' not in said
