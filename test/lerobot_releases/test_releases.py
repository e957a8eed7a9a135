"""Folders as LeRobot's releases write them, against the chunks of each release's own policy.

`make_release.py` made them. The folders lack what the weights are made of: names and shapes.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_weights import made_picture, made_tensor
from safetensors.numpy import load_file, save_file

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.cli.main import main
from vla_runtime.policy import Policy
from vla_runtime.types import Observation

HERE = Path(__file__).parent
RELEASES = sorted(
    path.parent for path in HERE.glob('*/description.json') if 'lora' not in path.parent.name
)
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
# Changes a written folder.
Change = Callable[[Path], object]


def write_folder(release: Path, target: Path) -> Path:
    """Write the whole folder that a release saved."""
    shutil.copytree(release, target)
    file = 'adapter_model' if (target / 'adapter_config.json').exists() else 'model'
    statistics = target / 'statistics.safetensors'
    tensors = load_file(statistics) if statistics.exists() else {}
    shapes = json.loads((target / 'tensors.json').read_text())
    tensors |= {name: made_tensor(name, shape) for name, shape in shapes.items()}
    save_file(tensors, target / f'{file}.safetensors')
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


def export(release: Path, tmp_path: Path, *more: str, change: Change = lambda folder: None) -> int:
    """Export the folder of a release, changed, to `bundle`; an adapter over its policy."""
    folder, options = write_folder(release, tmp_path / 'policy'), [*arguments(release), *more]
    change(folder)
    if 'adapter_of' in described(release):
        base = write_folder(HERE / described(release)['adapter_of'], tmp_path / 'base')
        options += ['--base', str(base)]
    return main(['export', str(folder), '--out', str(tmp_path / 'bundle'), *options])


def tensors(change: Callable[[dict[str, np.ndarray]], object], file: str = 'model') -> Change:
    """Other tensors in a folder; what the change returns, if it is anything, in place of them."""

    def change_file(folder: Path) -> None:
        path = folder / f'{file}.safetensors'
        found = load_file(path)
        save_file(change(found) or found, path)

    return change_file


def document(change: Callable[[dict[str, Any]], object], name: str = 'config.json') -> Change:
    """Another JSON file in a folder."""

    def change_file(folder: Path) -> None:
        found = json.loads((folder / name).read_text())
        change(found)
        (folder / name).write_text(json.dumps(found))

    return change_file


@pytest.mark.parametrize('release', RELEASES, ids=lambda path: path.name)
def test_chunks_are_those_of_the_release(release, tmp_path):
    assert export(release, tmp_path) == 0
    assert largest_error(release, tmp_path / 'bundle') <= 1e-4
    if asks_for_release(release):
        spec = read_bundle(tmp_path / 'bundle').spec
        early = described(release)['lerobot'].startswith('0.4')
        assert spec.source['lerobot'] == ('0.4' if early else '0.5')
        assert spec.images.bars == (-3.0 if early else None)
        has_state = described(release)['type'] == 'pi05'
        assert spec.prompt.state_bins == (32 if early and has_state else None)


ASKED = [path for path in RELEASES if asks_for_release(path)]


@pytest.mark.parametrize('release', ASKED, ids=lambda path: path.name)
def test_a_folder_that_does_not_say_its_release_is_asked_about(release, tmp_path, capsys):
    folder, bundle = write_folder(release, tmp_path / 'policy'), tmp_path / 'bundle'
    options = arguments(release)
    options = options[: options.index('--lerobot')]
    assert main(['export', str(folder), '--out', str(bundle), *options]) == 2
    assert '--lerobot' in capsys.readouterr().err
    assert not bundle.exists()


@pytest.mark.parametrize(
    'release', [path for path in ASKED if path.name.endswith('pi05')], ids=lambda path: path.name
)
def test_the_other_release_makes_other_chunks(release, tmp_path):
    other = '0.5' if described(release)['lerobot'].startswith('0.4') else '0.4'
    assert export(release, tmp_path, '--lerobot', other) == 0
    assert largest_error(release, tmp_path / 'bundle') > 0.1


@pytest.mark.parametrize('name', ['0.6.1_pi05', '0.3.3_pi0', '0.4.4_act'])
def test_a_folder_that_says_its_release_takes_no_other(tmp_path, name):
    assert export(HERE / name, tmp_path, '--lerobot', '0.4') == 2


def adapter(change: Callable[[dict[str, np.ndarray]], object]) -> Change:
    return tensors(change, 'adapter_model')


def lora(**config: Any) -> Change:
    return document(lambda found: found.update(config), 'adapter_config.json')


def half_lost(part: str, count: int | None) -> Change:
    def change(found: dict[str, np.ndarray]) -> None:
        for name in sorted(name for name in found if part in name)[:count]:
            del found[name]

    return adapter(change)


def spoilt(part: str, number: float) -> Change:
    def change(found: dict[str, np.ndarray]) -> None:
        found[sorted(name for name in found if part in name)[-1]].flat[-1] = number

    return adapter(change)


def embedding_alone(found: dict[str, np.ndarray]) -> None:
    found.clear()
    found['base_model.model.table.lora_embedding_A'] = np.ones((4, 5), np.float32)


class TestAdapters:
    """A LoRA folder of PEFT, over the policy that it was trained on."""

    RELEASE = HERE / '0.6.1_pi05_lora'

    def test_chunks_are_those_of_policy_and_adapter(self, tmp_path):
        assert export(self.RELEASE, tmp_path) == 0
        assert largest_error(self.RELEASE, tmp_path / 'bundle') <= 1e-4

    def test_without_the_policy_below_it_is_asked_for_by_name(self, tmp_path, capsys):
        folder = write_folder(self.RELEASE, tmp_path / 'adapter')
        options = ['--out', str(tmp_path / 'bundle'), *arguments(self.RELEASE)]
        assert main(['export', str(folder), *options]) == 2
        message = capsys.readouterr().err
        assert '--base' in message
        assert 'someone/0.6.1_pi05' in message

    @pytest.mark.parametrize(
        ('change', 'told'),
        [
            (lora(use_dora=True), 'use_dora'),
            (lora(peft_type='VERA'), 'peft_type'),
            (lora(init_lora_weights='pissa'), 'init_lora_weights'),
            *((lora(lora_alpha=a), 'lora_alpha') for a in (0, np.nan, np.inf, 1e300)),
            *(
                (lora(alpha_pattern={'.*_proj': a}), r'alpha_pattern\.\.\*_proj')
                for a in (0, np.nan, np.inf, 1e300)
            ),
            *(
                (lora(alpha_pattern={pattern: 3}), r'adapter_config\.json.*alpha_pattern')
                for pattern in ('(', '*_proj', 'q_proj[')
            ),
            *(
                (half_lost(part, 1), r'adapter_model\.safetensors.*action_in_proj')
                for part in ('lora_A', 'lora_B')
            ),
            *(
                (half_lost(part, None), r'adapter_model\.safetensors')
                for part in ('lora_A', 'lora_B')
            ),
            (adapter(dict.clear), r'adapter_model\.safetensors'),
            (adapter(embedding_alone), r'lora_embedding_A.* does not merge; merge it with PEFT'),
            *(
                (spoilt(part, number), rf'adapter_model\.safetensors.*{part}')
                for part in ('lora_A', 'lora_B')
                for number in (np.nan, np.inf)
            ),
        ],
    )
    def test_what_is_not_merged_exactly_is_refused(self, tmp_path, capsys, change, told):
        assert export(self.RELEASE, tmp_path, change=change) == 2
        assert not (tmp_path / 'bundle').exists()
        assert re.search(told, capsys.readouterr().err, re.S)

    @pytest.mark.parametrize('form', ['adapter', 'whole'])
    @pytest.mark.parametrize('head', ['paligemma', 'gemma_expert'])
    def test_a_head_that_serves_nothing_is_left_out(self, tmp_path, head, form):
        width = 64 if head == 'paligemma' else 32
        added = {
            'adapter': {'lora_A.weight': (2, width), 'lora_B.weight': (400, 2)},
            'whole': {'weight': (400, width)},
        }[form]
        module = f'base_model.model.model.paligemma_with_expert.{head}.lm_head'
        ones = {f'{module}.{part}': np.ones(shape, np.float32) for part, shape in added.items()}
        assert export(self.RELEASE, tmp_path, change=adapter(lambda t: t.update(ones))) == 0
        assert largest_error(self.RELEASE, tmp_path / 'bundle') <= 1e-4

    def test_a_merged_folder_may_still_say_that_it_is_an_adapter(self, tmp_path):
        release = HERE / '0.6.1_pi05'
        assert export(release, tmp_path, change=document(lambda d: d.update(use_peft=True))) == 0
        assert largest_error(release, tmp_path / 'bundle') <= 1e-4

    @pytest.mark.parametrize('file', ['adapter_model.safetensors', 'adapter_config.json'])
    def test_a_policy_beside_its_adapter_is_not_taken_for_merged(self, tmp_path, capsys, file):
        def change(folder: Path) -> None:
            document(lambda d: d.update(use_peft=True))(folder)
            (folder / file).write_text('{}')

        assert export(HERE / '0.6.1_pi05', tmp_path, change=change) == 2
        assert 'use_peft' in capsys.readouterr().err

    def test_a_policy_that_is_no_adapter_has_no_use_for_a_base(self, tmp_path, capsys):
        assert export(HERE / '0.6.1_act', tmp_path, '--base', str(tmp_path / 'policy')) == 2
        assert '--base' in capsys.readouterr().err

    @pytest.mark.parametrize('kind', ['0.6.1_act', '0.6.1_pi0'])
    def test_a_base_of_another_kind_is_refused(self, tmp_path, capsys, kind):
        folder = write_folder(self.RELEASE, tmp_path / 'adapter')
        base = write_folder(HERE / kind, tmp_path / 'base')
        words = ['--out', str(tmp_path / 'bundle'), '--base', str(base), *arguments(self.RELEASE)]
        assert main(['export', str(folder), *words]) == 2
        assert str(base) in capsys.readouterr().err


@pytest.mark.parametrize('prefix', ['module.', '_orig_mod.', 'module._orig_mod.', 'student.'])
@pytest.mark.parametrize('name', ['0.6.1_pi05', '0.3.3_act'])
def test_a_prefix_before_every_name_is_left_out(tmp_path, prefix, name):
    change = tensors(lambda found: {prefix + key: value for key, value in found.items()})
    assert export(HERE / name, tmp_path, change=change) == 0
    assert largest_error(HERE / name, tmp_path / 'bundle') <= 1e-4


class TestOf2024:
    """ACT's folders of 2024: shapes and normalisers a feature, and no type."""

    RELEASE = HERE / '0.3.3_act'

    @staticmethod
    def of_2024(config: dict[str, Any]) -> None:
        for group in ('input', 'output'):
            features = config.pop(f'{group}_features')
            config[f'{group}_shapes'] = {key: one['shape'] for key, one in features.items()}
            config[f'{group}_normalization_modes'] = dict.fromkeys(features, 'mean_std')
        del config['type'], config['normalization_mapping']

    def test_chunks_are_the_same(self, tmp_path):
        assert export(self.RELEASE, tmp_path, change=document(self.of_2024)) == 0
        assert largest_error(self.RELEASE, tmp_path / 'bundle') <= 1e-4

    def test_another_policy_of_that_year_is_not_taken_for_it(self, tmp_path, capsys):
        def change(config: dict[str, Any]) -> None:
            self.of_2024(config)
            del config['n_vae_encoder_layers']
            config['noise_scheduler_type'] = 'DDPM'

        assert export(self.RELEASE, tmp_path, change=document(change)) == 2
        assert 'field type' in capsys.readouterr().err


def test_statistics_of_a_converted_folder_are_found(tmp_path):
    """LeRobot's conversion turns every `_` of a buffer's name into `.`."""

    def change(folder: Path) -> None:
        for path in folder.glob('policy_*processor_step_*.safetensors'):
            found = load_file(path)
            save_file({name.replace('_', '.'): values for name, values in found.items()}, path)

    assert export(HERE / '0.4.4_act', tmp_path, change=change) == 0
    assert largest_error(HERE / '0.4.4_act', tmp_path / 'bundle') <= 1e-4


def test_a_base_model_has_no_statistics(tmp_path, capsys):
    def change(found: dict[str, np.ndarray]) -> None:
        for name in found:
            if name.startswith('unnormalize_outputs'):
                found[name] = np.full_like(found[name], np.inf)

    assert export(HERE / '0.3.3_pi0', tmp_path, change=tensors(change)) == 2
    assert 'unnormalize_outputs' in capsys.readouterr().err


class TestBaseFeatures:
    """config.json keeps features of the policy that the training began with."""

    @pytest.mark.parametrize('name', ['0.6.1_pi05', '0.6.1_smolvla'])
    @pytest.mark.parametrize('stated', [32, 3])
    def test_statistics_decide_the_length_of_the_state(self, tmp_path, capsys, name, stated):
        def change(config: dict[str, Any]) -> None:
            config['input_features']['observation.state']['shape'] = [stated]

        assert export(HERE / name, tmp_path, change=document(change)) == 0
        assert '\nnote ' in capsys.readouterr().out
        assert largest_error(HERE / name, tmp_path / 'bundle') <= 1e-4

    @pytest.mark.parametrize('name', ['0.6.1_pi05', '0.6.1_pi0', '0.6.1_smolvla', '0.6.1_act'])
    def test_a_camera_that_the_training_lacked_is_absent(self, tmp_path, name):
        def change(config: dict[str, Any]) -> None:
            inputs = config['input_features']
            first = next(iter(inputs))
            # Before the others: present images keep their order whatever is between them.
            config['input_features'] = {'observation.images.base': inputs[first], **inputs}

        cameras = ','.join(['base=absent', *described(HERE / name)['cameras']])
        code = export(HERE / name, tmp_path, '--cameras', cameras, change=document(change))
        if described(HERE / name)['type'] == 'act':
            assert code == 2
            return
        assert code == 0
        assert largest_error(HERE / name, tmp_path / 'bundle') <= 1e-4

    def test_a_camera_that_is_not_named_is_asked_about(self, tmp_path, capsys):
        assert export(HERE / '0.6.1_pi05', tmp_path, '--cameras', 'top') == 2
        assert 'wrist=absent' in capsys.readouterr().err
