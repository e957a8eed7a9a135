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


@pytest.mark.parametrize('release', RELEASES, ids=lambda path: path.name)
def test_chunks_are_those_of_the_release(release, tmp_path):
    folder, bundle = write_folder(release, tmp_path / 'policy'), tmp_path / 'bundle'
    assert main(['export', str(folder), '--out', str(bundle), *arguments(release)]) == 0
    assert largest_error(release, bundle) <= 1e-4


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
    folder, bundle = write_folder(release, tmp_path / 'policy'), tmp_path / 'bundle'
    options = arguments(release)
    options[-1] = '0.5' if options[-1] == '0.4' else '0.4'
    assert main(['export', str(folder), '--out', str(bundle), *options]) == 0
    assert largest_error(release, bundle) > 0.1


@pytest.mark.parametrize('name', ['0.6.1_pi05', '0.3.3_pi0', '0.4.4_act'])
def test_a_folder_that_says_its_release_takes_no_other(tmp_path, name):
    release = HERE / name
    folder = write_folder(release, tmp_path / 'policy')
    options = ['--out', str(tmp_path / 'b'), '--lerobot', '0.4', *arguments(release)]
    assert main(['export', str(folder), *options]) == 2


@pytest.mark.parametrize('release', ASKED, ids=lambda path: path.name)
def test_the_bundle_says_what_the_release_does(release, tmp_path):
    folder, bundle = write_folder(release, tmp_path / 'policy'), tmp_path / 'bundle'
    assert main(['export', str(folder), '--out', str(bundle), *arguments(release)]) == 0
    spec = read_bundle(bundle).spec
    early = described(release)['lerobot'].startswith('0.4')
    assert spec.source['lerobot'] == ('0.4' if early else '0.5')
    assert spec.images.bars == (-3.0 if early else None)
    has_state = described(release)['type'] == 'pi05'
    assert spec.prompt.state_bins == (32 if early and has_state else None)


class TestAdapters:
    """A LoRA folder of PEFT, over the policy that it was trained on."""

    RELEASE = HERE / '0.6.1_pi05_lora'

    def test_chunks_are_those_of_policy_and_adapter(self, tmp_path):
        folder = write_folder(self.RELEASE, tmp_path / 'adapter')
        base = write_folder(HERE / described(self.RELEASE)['adapter_of'], tmp_path / 'base')
        bundle = tmp_path / 'bundle'
        options = ['--base', str(base), *arguments(self.RELEASE)]
        assert main(['export', str(folder), '--out', str(bundle), *options]) == 0
        assert largest_error(self.RELEASE, bundle) <= 1e-4

    def test_without_the_policy_below_it_is_asked_for_by_name(self, tmp_path, capsys):
        folder = write_folder(self.RELEASE, tmp_path / 'adapter')
        options = ['--out', str(tmp_path / 'bundle'), *arguments(self.RELEASE)]
        assert main(['export', str(folder), *options]) == 2
        message = capsys.readouterr().err
        assert '--base' in message
        assert 'someone/0.6.1_pi05' in message

    @pytest.mark.parametrize(
        ('key', 'value'),
        [('use_dora', True), ('peft_type', 'VERA'), ('init_lora_weights', 'pissa')],
    )
    def test_what_is_not_merged_exactly_is_refused_by_field(self, tmp_path, capsys, key, value):
        folder = write_folder(self.RELEASE, tmp_path / 'adapter')
        base = write_folder(HERE / described(self.RELEASE)['adapter_of'], tmp_path / 'base')
        config = folder / 'adapter_config.json'
        config.write_text(json.dumps(json.loads(config.read_text()) | {key: value}))
        options = ['--out', str(tmp_path / 'b'), '--base', str(base), *arguments(self.RELEASE)]
        assert main(['export', str(folder), *options]) == 2
        assert key in capsys.readouterr().err

    def refused(self, tmp_path, capsys, change=lambda tensors: None, config=None) -> str:
        """The error of an export whose adapter is spoilt."""
        folder = write_folder(self.RELEASE, tmp_path / 'adapter')
        base = write_folder(HERE / described(self.RELEASE)['adapter_of'], tmp_path / 'base')
        path = folder / 'adapter_config.json'
        path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
        tensors = load_file(folder / 'adapter_model.safetensors')
        change(tensors)
        save_file(tensors, folder / 'adapter_model.safetensors')
        options = ['--out', str(tmp_path / 'b'), '--base', str(base), *arguments(self.RELEASE)]
        assert main(['export', str(folder), *options]) == 2
        assert not (tmp_path / 'b').exists()
        return capsys.readouterr().err

    @pytest.mark.parametrize('lost', ['lora_A', 'lora_B'])
    @pytest.mark.parametrize('which', ['one', 'all'])
    def test_half_of_a_pair_is_refused_by_name(self, tmp_path, capsys, lost, which):
        gone = []

        def change(tensors):
            found = sorted(name for name in tensors if lost in name)
            gone.extend(found[:1] if which == 'one' else found)
            for name in gone:
                del tensors[name]

        message = self.refused(tmp_path, capsys, change)
        assert 'adapter_model.safetensors' in message
        assert gone[0].removeprefix('base_model.model.').partition('.lora_')[0] in message or (
            which == 'all'
        )

    def test_a_file_without_pairs_is_refused(self, tmp_path, capsys):
        message = self.refused(tmp_path, capsys, dict.clear)
        assert 'adapter_model.safetensors' in message

    @pytest.mark.parametrize('number', [np.nan, np.inf])
    @pytest.mark.parametrize('part', ['lora_A', 'lora_B'])
    def test_numbers_that_are_none_are_refused_by_tensor(self, tmp_path, capsys, number, part):
        spoilt = []

        def change(tensors):
            spoilt.append(sorted(name for name in tensors if part in name)[-1])
            tensors[spoilt[0]].flat[-1] = number

        message = self.refused(tmp_path, capsys, change)
        assert spoilt[0] in message
        assert 'adapter_model.safetensors' in message

    @pytest.mark.parametrize('alpha', [0, float('nan'), float('inf'), 1e300])
    def test_an_alpha_that_is_no_scale_is_refused(self, tmp_path, capsys, alpha):
        assert 'lora_alpha' in self.refused(tmp_path, capsys, config={'lora_alpha': alpha})
        shutil.rmtree(tmp_path)
        patterns = {'alpha_pattern': {'.*_proj': alpha}}
        assert 'alpha_pattern..*_proj' in self.refused(tmp_path, capsys, config=patterns)

    @pytest.mark.parametrize('form', ['adapter', 'whole'])
    @pytest.mark.parametrize('head', ['paligemma', 'gemma_expert'])
    def test_a_head_that_serves_nothing_is_left_out(self, tmp_path, head, form):
        folder = write_folder(self.RELEASE, tmp_path / 'adapter')
        base = write_folder(HERE / described(self.RELEASE)['adapter_of'], tmp_path / 'base')
        path, module = folder / 'adapter_model.safetensors', f'paligemma_with_expert.{head}.lm_head'
        tensors = load_file(path)
        width = 64 if head == 'paligemma' else 32
        added = {
            'adapter': {'lora_A.weight': (2, width), 'lora_B.weight': (400, 2)},
            'whole': {'weight': (400, width)},
        }[form]
        tensors |= {
            f'base_model.model.model.{module}.{part}': np.ones(shape, np.float32)
            for part, shape in added.items()
        }
        save_file(tensors, path)
        bundle = tmp_path / 'bundle'
        options = ['--base', str(base), *arguments(self.RELEASE)]
        assert main(['export', str(folder), '--out', str(bundle), *options]) == 0
        assert largest_error(self.RELEASE, bundle) <= 1e-4

    def test_a_merged_folder_may_still_say_that_it_is_an_adapter(self, tmp_path):
        release = HERE / '0.6.1_pi05'
        folder, bundle = write_folder(release, tmp_path / 'policy'), tmp_path / 'bundle'
        config = folder / 'config.json'
        config.write_text(json.dumps(json.loads(config.read_text()) | {'use_peft': True}))
        assert main(['export', str(folder), '--out', str(bundle), *arguments(release)]) == 0
        assert largest_error(release, bundle) <= 1e-4

    @pytest.mark.parametrize('file', ['adapter_model.safetensors', 'adapter_config.json'])
    def test_a_policy_beside_its_adapter_is_not_taken_for_merged(self, tmp_path, capsys, file):
        release = HERE / '0.6.1_pi05'
        folder = write_folder(release, tmp_path / 'policy')
        config = folder / 'config.json'
        config.write_text(json.dumps(json.loads(config.read_text()) | {'use_peft': True}))
        (folder / file).write_text('{}')
        options = ['--out', str(tmp_path / 'b'), *arguments(release)]
        assert main(['export', str(folder), *options]) == 2
        assert 'use_peft' in capsys.readouterr().err

    @pytest.mark.parametrize('pattern', ['(', '*_proj', 'q_proj['])
    def test_a_pattern_that_is_none_is_refused_by_field(self, tmp_path, capsys, pattern):
        message = self.refused(tmp_path, capsys, config={'alpha_pattern': {pattern: 3}})
        assert 'adapter_config.json' in message
        assert 'alpha_pattern' in message

    def test_a_policy_that_is_no_adapter_has_no_use_for_a_base(self, tmp_path, capsys):
        release = HERE / '0.6.1_act'
        folder = write_folder(release, tmp_path / 'policy')
        options = ['--out', str(tmp_path / 'b'), '--base', str(folder), *arguments(release)]
        assert main(['export', str(folder), *options]) == 2
        assert '--base' in capsys.readouterr().err


@pytest.mark.parametrize('prefix', ['module.', '_orig_mod.', 'module._orig_mod.', 'student.'])
@pytest.mark.parametrize('name', ['0.6.1_pi05', '0.3.3_act'])
def test_a_prefix_before_every_name_is_left_out(tmp_path, prefix, name):
    folder = write_folder(HERE / name, tmp_path / 'policy')
    tensors = load_file(folder / 'model.safetensors')
    save_file({prefix + key: value for key, value in tensors.items()}, folder / 'model.safetensors')
    bundle = tmp_path / 'bundle'
    assert main(['export', str(folder), '--out', str(bundle), *arguments(HERE / name)]) == 0
    assert largest_error(HERE / name, bundle) <= 1e-4


class TestOf2024:
    """ACT's folders of 2024: shapes and normalisers a feature, and no type."""

    @pytest.fixture
    def folder(self, tmp_path):
        folder = write_folder(HERE / '0.3.3_act', tmp_path / 'policy')
        path = folder / 'config.json'
        config = json.loads(path.read_text())
        for group in ('input', 'output'):
            features = config.pop(f'{group}_features')
            config[f'{group}_shapes'] = {key: one['shape'] for key, one in features.items()}
            config[f'{group}_normalization_modes'] = dict.fromkeys(features, 'mean_std')
        del config['type'], config['normalization_mapping']
        path.write_text(json.dumps(config))
        return folder

    def test_chunks_are_the_same(self, folder, tmp_path):
        release, bundle = HERE / '0.3.3_act', tmp_path / 'bundle'
        assert main(['export', str(folder), '--out', str(bundle), *arguments(release)]) == 0
        assert largest_error(release, bundle) <= 1e-4

    def test_another_policy_of_that_year_is_not_taken_for_it(self, folder, tmp_path, capsys):
        path = folder / 'config.json'
        config = json.loads(path.read_text())
        del config['n_vae_encoder_layers']
        path.write_text(json.dumps(config | {'noise_scheduler_type': 'DDPM'}))
        options = ['--out', str(tmp_path / 'b'), *arguments(HERE / '0.3.3_act')]
        assert main(['export', str(folder), *options]) == 2
        assert 'field type' in capsys.readouterr().err


def test_statistics_of_a_converted_folder_are_found(tmp_path):
    """LeRobot's conversion turns every `_` of a buffer's name into `.`."""
    release, bundle = HERE / '0.4.4_act', tmp_path / 'bundle'
    folder = write_folder(release, tmp_path / 'policy')
    for path in folder.glob('policy_*processor_step_*.safetensors'):
        tensors = load_file(path)
        save_file({name.replace('_', '.'): values for name, values in tensors.items()}, path)
    assert main(['export', str(folder), '--out', str(bundle), *arguments(release)]) == 0
    assert largest_error(release, bundle) <= 1e-4


def test_a_base_model_has_no_statistics(tmp_path, capsys):
    release = HERE / '0.3.3_pi0'
    folder = write_folder(release, tmp_path / 'policy')
    tensors = load_file(folder / 'model.safetensors')
    for name in tensors:
        if name.startswith('unnormalize_outputs'):
            tensors[name] = np.full_like(tensors[name], np.inf)
    save_file(tensors, folder / 'model.safetensors')
    options = ['--out', str(tmp_path / 'b'), *arguments(release)]
    assert main(['export', str(folder), *options]) == 2
    assert 'unnormalize_outputs' in capsys.readouterr().err


class TestBaseFeatures:
    """config.json keeps features of the policy that the training began with."""

    @pytest.mark.parametrize('name', ['0.6.1_pi05', '0.6.1_smolvla'])
    @pytest.mark.parametrize('stated', [32, 3])
    def test_statistics_decide_the_length_of_the_state(self, tmp_path, capsys, name, stated):
        release, bundle = HERE / name, tmp_path / 'bundle'
        folder = write_folder(release, tmp_path / 'policy')
        path = folder / 'config.json'
        config = json.loads(path.read_text())
        config['input_features']['observation.state']['shape'] = [stated]
        path.write_text(json.dumps(config))
        assert main(['export', str(folder), '--out', str(bundle), *arguments(release)]) == 0
        assert '\nnote ' in capsys.readouterr().out
        assert largest_error(release, bundle) <= 1e-4

    @pytest.mark.parametrize('name', ['0.6.1_pi05', '0.6.1_pi0', '0.6.1_smolvla', '0.6.1_act'])
    def test_a_camera_that_the_training_lacked_is_absent(self, tmp_path, capsys, name):
        release, bundle = HERE / name, tmp_path / 'bundle'
        folder = write_folder(release, tmp_path / 'policy')
        path = folder / 'config.json'
        config = json.loads(path.read_text())
        inputs = config['input_features']
        first = next(iter(inputs))
        # Before the others: present images keep their order whatever is between them.
        config['input_features'] = {'observation.images.base': inputs[first], **inputs}
        path.write_text(json.dumps(config))
        cameras = ','.join(['base=absent', *described(release)['cameras']])
        options = [*arguments(release), '--cameras', cameras]
        code = main(['export', str(folder), '--out', str(bundle), *options])
        if described(release)['type'] == 'act':
            assert code == 2
            return
        assert code == 0
        assert largest_error(release, bundle) <= 1e-4

    def test_a_camera_that_is_not_named_is_asked_about(self, tmp_path, capsys):
        release = HERE / '0.6.1_pi05'
        folder = write_folder(release, tmp_path / 'policy')
        options = [*arguments(release), '--cameras', 'top']
        assert main(['export', str(folder), '--out', str(tmp_path / 'b'), *options]) == 2
        assert 'wrist=absent' in capsys.readouterr().err
