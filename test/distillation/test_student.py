"""Students of few steps: what they learn, what they keep, what they refuse, how they go on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from thorough import thorough_but
from tiny_policy import CAMERAS, IMAGE_SIZE, JOINTS, observation, tiny_spec, write_tiny_policy

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.cli.main import main
from vla_runtime.dataset.errors import DatasetError
from vla_runtime.dataset.frames import DatasetFrame, EncodedImage, EpisodeFacts
from vla_runtime.dataset.layout import Layout
from vla_runtime.dataset.observations import read_observations
from vla_runtime.dataset.writer import DatasetWriter, dataset_folder
from vla_runtime.distillation.student import Distillation, DistillationSettings
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy

FRAMES = 60
FAMILIES = ['pi05', 'pi0', 'smolvla', 'groot_n15']


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set with the names of the tiny policies' robot, its joints in another order."""
    return _write_data(tmp_path_factory.mktemp('data') / 'set')


def _write_data(folder: Path, first_seed: int = 0, per_episode: int = FRAMES // 2) -> Path:
    folder.parent.mkdir(exist_ok=True)
    layout = Layout('tiny', 20, dict.fromkeys(CAMERAS, IMAGE_SIZE), JOINTS[::-1], JOINTS, {})
    with dataset_folder(folder, force=False) as target:
        writer = DatasetWriter(target, layout)
        for episode in range(2):
            facts = EpisodeFacts(f'task {episode}', per_episode, None, 'made up', 1)
            seed = first_seed + episode * 100
            writer.write(facts, [_frame(seed + i) for i in range(per_episode)])
        writer.finish()
    return folder


def _frame(seed: int) -> DatasetFrame:
    look = observation(seed)
    images = {
        name: EncodedImage(cv2.imencode('.png', pixels[..., ::-1])[1].tobytes(), pixels)
        for name, pixels in look.images.items()
        if pixels is not None
    }
    return DatasetFrame(images, look.state[::-1], look.state)


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
    monkeypatch.setattr('vla_runtime.distillation.student._CHECKPOINT_EVERY', 3)
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
    other = _write_data(tmp_path / 'other' / 'set', first_seed=500)
    assert distil(other, 'third') == 2
    error = capsys.readouterr().err
    assert f'{work / "checkpoint.pt"}: ' in error and 'data: set sha256:' in error
    more = _write_data(tmp_path / 'more', per_episode=40)
    assert distil(more, 'fourth', '--frames', '70') == 2
    assert f'frames: {FRAMES}, asked for 70' in capsys.readouterr().err
    assert not (tmp_path / 'third').exists() and not (tmp_path / 'fourth').exists()
    state = torch.load(work / 'checkpoint.pt', weights_only=True)
    assert receipt['settings']['data'] == state['settings']['data']


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


def test_a_head_without_a_flow_is_refused(data: Path, tmp_path: Path) -> None:
    bundle = read_bundle(write_tiny_policy(tmp_path / 'act', tiny_spec('act')))
    with pytest.raises(ValueError, match='no flow'):
        Distillation(bundle, [], _settings(1), tmp_path)
