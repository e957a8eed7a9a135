"""Folders as LeRobot's releases write them, against the chunks of each release's own policy.

`make_release.py` made them. The folders lack what the weights are made of: names and shapes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from made_weights import made_picture, made_tensor
from safetensors.numpy import load_file, save_file

from vla_runtime.cli.main import main
from vla_runtime.policy import Policy
from vla_runtime.types import Observation

HERE = Path(__file__).parent
RELEASES = sorted(path.parent for path in HERE.glob('*/description.json'))
TOKENIZERS = {
    'pi0': HERE.parent / 'cases' / 'lerobot_pi05_tiny' / 'tokenizer.json',
    'pi05': HERE.parent / 'cases' / 'lerobot_pi05_tiny' / 'tokenizer.json',
    'smolvla': HERE.parent / 'cases' / 'smolvla_folder' / 'tokenizer.json',
}
# Heads that tensors do not show.
HEADS = {
    'pi0': ['--vision-heads', '4'],
    'pi05': ['--vision-heads', '4'],
    'smolvla': ['--vision-heads', '4', '--kv-heads', '2'],
}
OF_THE_TEST = ('statistics.safetensors', 'tensors.json', 'chunks.safetensors', 'description.json')
NAMES = 'j1,j2,j3,j4,j5,gripper'


def write_folder(release: Path, target: Path) -> Path:
    """Write the whole folder that a release saved."""
    shutil.copytree(release, target)
    statistics = target / 'statistics.safetensors'
    tensors = load_file(statistics) if statistics.exists() else {}
    shapes = json.loads((target / 'tensors.json').read_text())
    tensors |= {name: made_tensor(name, shape) for name, shape in shapes.items()}
    save_file(tensors, target / 'model.safetensors')
    for name in OF_THE_TEST:
        (target / name).unlink(missing_ok=True)
    return target


def described(release: Path) -> dict:
    return json.loads((release / 'description.json').read_text())


def arguments(release: Path) -> list[str]:
    """Options that the folder of a release asks for."""
    policy, version = described(release)['type'], described(release)['lerobot']
    options = ['--state-names', NAMES, '--action-names', NAMES, '--units', 'rad', '--rate-hz', '30']
    options += ['--onnx-precision', 'none', *HEADS.get(policy, [])]
    if policy == 'pi0' and version.startswith('0.3'):
        # Later ones name the language model.
        options += ['--kv-heads', '1']
    if policy in TOKENIZERS:
        options += ['--tokenizer', str(TOKENIZERS[policy])]
    if asks_for_release(release):
        options += ['--lerobot', version[:3]]
    return options


def asks_for_release(release: Path) -> bool:
    """Return whether the folder is one of those that do not say what trained them."""
    description = described(release)
    return description['type'].startswith('pi') and description['lerobot'] in (
        *(f'0.4.{patch}' for patch in range(5)),
        '0.5.0',
    )


def largest_error(release: Path, bundle: Path) -> float:
    """Largest difference from the release's own chunks, in robot units."""
    description, tensors = described(release), load_file(release / 'chunks.safetensors')
    policy, errors = Policy.load(bundle), []
    for index, task in enumerate(description['tasks']):
        observation = Observation(
            images={
                name: made_picture(f'{name} {index}', *size)
                for name, size in description['cameras'].items()
            },
            state=tensors[f'state_{index}'],
            instruction=task,
        )
        noise = None if description['type'] == 'act' else tensors['noise']
        chunk, _ = policy.infer(observation, **({} if noise is None else {'noise': noise}))
        errors.append(np.abs(chunk.actions - tensors[f'chunk_{index}']).max())
    return float(max(errors))


@pytest.mark.parametrize('release', RELEASES, ids=lambda path: path.name)
def test_chunks_are_those_of_the_release(release, tmp_path):
    folder, bundle = write_folder(release, tmp_path / 'policy'), tmp_path / 'bundle'
    assert main(['export', str(folder), '--out', str(bundle), *arguments(release)]) == 0
    assert largest_error(release, bundle) <= 1e-4


@pytest.mark.parametrize(
    'release', [path for path in RELEASES if asks_for_release(path)], ids=lambda path: path.name
)
def test_a_folder_that_does_not_say_its_release_is_asked_about(release, tmp_path, capsys):
    folder, bundle = write_folder(release, tmp_path / 'policy'), tmp_path / 'bundle'
    options = arguments(release)
    del options[options.index('--lerobot') :][:2]
    options = options[: options.index('--lerobot')] if '--lerobot' in options else options
    assert main(['export', str(folder), '--out', str(bundle), *options]) == 2
    assert '--lerobot' in capsys.readouterr().err
    assert not bundle.exists()


@pytest.mark.parametrize(
    'release', [path for path in RELEASES if path.name.endswith('pi05')], ids=lambda path: path.name
)
def test_the_other_release_makes_other_chunks(release, tmp_path):
    if not asks_for_release(release):
        pytest.skip('says its release')
    folder, bundle = write_folder(release, tmp_path / 'policy'), tmp_path / 'bundle'
    options = arguments(release)
    options[-1] = '0.5' if options[-1] == '0.4' else '0.4'
    assert main(['export', str(folder), '--out', str(bundle), *options]) == 0
    assert largest_error(release, bundle) > 0.1
