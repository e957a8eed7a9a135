"""LeRobot's SmolVLA folders: what they say, what they leave to the model they were cut from."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_folders import edit_config, edit_json, edit_tensors, write_sparse_checkpoint
from safetensors.torch import load_file
from tiny_policy import tokenizer_of

from vla_convert.checkpoints.errors import ExportError
from vla_convert.checkpoints.lerobot_folder import read_lerobot_folder
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.checkpoints.reader import find_reader
from vla_convert.checkpoints.tensors import read_tensors
from vla_convert.export.conversion import ExportPlan, plan_export
from vla_convert.readers.smolvla import NAMES, SmolVlaReader
from vla_runtime.bundle.schema import CameraSpec
from vla_runtime.bundle.tensors import check_tensors
from vla_runtime.cli.main import main
from vla_runtime.families.flow_network import weight_shapes
from vla_runtime.families.smolvla.dimensions import SMOLVLA, SmolVlaDims
from vla_runtime.files.json_file import JsonError

REFERENCE = tokenizer_of('smolvla').parent
JOINTS = tuple('abcdef')
OPTIONS = ExportOptions(
    state_names=JOINTS,
    action_names=JOINTS,
    units=('deg',),
    rate_hz=30.0,
    vision_heads=4,
    kv_heads=2,
)

REFUSED = (ExportError, JsonError)


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(REFERENCE, tmp_path / 'policy'))


def plan(folder: Path, options: ExportOptions = OPTIONS) -> ExportPlan:
    return plan_export(folder, options, default_name='tiny')


def test_a_folder_says_all_but_names_units_rate_and_heads(folder):
    reader, policy = find_reader(folder)
    assert isinstance(reader, SmolVlaReader) and policy is not None
    facts = read_lerobot_folder(folder, policy)
    assert (facts.family, facts.template, facts.cleaning) == ('smolvla', 'task_line', 'lerobot')
    assert facts.cameras == (CameraSpec('top'), CameraSpec('wrist'))
    assert (facts.images.padding, facts.images.resample) == ('left_top', 'bilinear')
    assert (facts.horizon, facts.prompt_length, facts.denoise_steps) == (12, 48, 10)
    assert (facts.image_size, facts.action_dim, facts.state_dim) == (64, 32, 32)
    assert facts.normalisation.state == facts.normalisation.actions == 'mean_std_lerobot'
    with pytest.raises(REFUSED) as caught:
        plan(folder, ExportOptions())
    asked = re.findall(r'^  (--\S+)', str(caught.value), flags=re.M)
    assert set(asked) == {
        *('--state-names', '--action-names', '--units', '--rate-hz'),
        *('--vision-heads', '--kv-heads'),
    }


def test_all_sizes_are_read_off_the_tensors(folder):
    case = json.loads(REFERENCE.with_name('smolvla_folder.end_to_end.json').read_text())['dims']
    dims = plan(folder).spec.dims
    assert isinstance(dims, SmolVlaDims)
    assert (dims.vision.width, dims.vision.depth) == (case['v_hidden'], case['v_layers'])
    assert (dims.vision.patch_size, dims.image_size) == (case['patch'], case['image'])
    assert dims.pixel_shuffle == case['scale_factor']
    language, expert = dims.language, dims.expert
    assert (language.width, language.depth, language.mlp_dim) == (
        case['width'],
        case['depth'],
        case['mlp_dim'],
    )
    assert (language.num_heads, language.head_dim) == (case['num_heads'], case['head_dim'])
    assert (expert.width, expert.mlp_dim) == (case['e_width'], case['e_mlp_dim'])
    assert dims.self_attention_every == case['self_attn_every_n_layers']
    assert (dims.vocabulary, dims.rms_epsilon) == (case['vocab'], case['rms_eps'])


def test_the_tensors_are_those_of_the_network_but_for_the_output_table(folder):
    theirs = load_file(folder / 'model.safetensors')
    tensors = read_tensors(folder, NAMES)
    assert len(tensors) == len(theirs) - 1
    check_tensors(tensors, weight_shapes('smolvla', plan(folder).spec.dims))


def test_an_empty_camera_comes_last_and_is_always_masked(folder):
    edit_config(folder, empty_cameras=1)
    cameras = plan(folder).spec.cameras
    assert cameras[-1] == CameraSpec('empty_camera_0', present=False)
    assert len(cameras) == 3


@pytest.mark.parametrize('every', [0, -1])
def test_no_expert_layer_may_attend_to_itself(folder, every):
    def all_cross(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, value in tensors.items():
            if re.search(r'lm_expert\.layers\.[02]\.self_attn\.[kv]_proj', name):
                tensors[name] = torch.zeros(value.shape[0], 32)
        return tensors

    edit_config(folder, self_attn_every_n_layers=every)
    with pytest.raises(REFUSED, match=r'blocks\.0\.attention\.k'):
        plan(folder)
    edit_tensors(folder, all_cross)
    dims = plan(folder).spec.dims
    assert isinstance(dims, SmolVlaDims)
    assert dims.self_layers == () and dims.cross_layers == (0, 1, 2, 3)


@pytest.mark.parametrize('length', [-1, 0])
def test_a_prefix_that_is_not_padded_is_served_as_the_published_policy_writes_it(folder, length):
    edit_config(folder, prefix_length=length, num_expert_layers=0, pad_language_to='max_length')
    assert plan(folder).spec.family == 'smolvla'


DEFECTS: dict[str, tuple[Callable[[Path], object], str]] = {
    'self-attention only': (
        lambda f: edit_config(f, attention_mode='self_attn'),
        'field attention_mode',
    ),
    'image markers': (
        lambda f: edit_config(f, add_image_special_tokens=True),
        'field add_image_special_tokens',
    ),
    'padded prefix': (
        lambda f: edit_config(f, prefix_length=80),
        'field prefix_length',
    ),
    'ALOHA': (
        lambda f: edit_config(f, adapt_to_pi_aloha=True),
        'field adapt_to_pi_aloha',
    ),
    'time periods': (
        lambda f: edit_config(f, max_period=10.0),
        'field max_period',
    ),
    'oblong': (
        lambda f: edit_config(f, resize_imgs_with_padding=[64, 48]),
        'field resize_imgs_with_padding',
    ),
    'another image': (
        lambda f: edit_config(f, resize_imgs_with_padding=[512, 512]),
        'config.json.*resize_imgs_with_padding',
    ),
    'another state': (
        lambda f: edit_config(f, max_state_dim=16),
        'config.json',
    ),
    "another policy's step": (
        lambda f: edit_json(
            f / 'policy_preprocessor.json',
            lambda d: d['steps'][2].update(registry_name='pi0_new_line_processor'),
        ),
        r'field steps\[2\]',
    ),
    'expert with fewer layers': (
        lambda f: edit_tensors(
            f, lambda t: {k: v for k, v in t.items() if 'lm_expert.layers.3' not in k}
        ),
        r'language\.depth',
    ),
    'no square of patches': (
        lambda f: edit_tensors(
            f,
            lambda t: {
                k: torch.zeros(64, 96) if 'modality_projection' in k else v for k, v in t.items()
            },
        ),
        'the projector takes 96 numbers, which is no square of patches of 32 each',
    ),
    'no tokenizer': (
        lambda f: (f / 'tokenizer.json').unlink(),
        r'tokenizer\.json.*config\.json',
    ),
}


@pytest.mark.parametrize('defect', DEFECTS, ids=str)
def test_what_cannot_be_reproduced_is_refused_by_name(folder, defect):
    spoil, pattern = DEFECTS[defect]
    spoil(folder)
    with pytest.raises(REFUSED, match=pattern):
        plan(folder)


def their_name(name: str) -> str:
    """LeRobot's name of one of our tensors."""
    stacks = {
        'vision.': 'vlm_with_expert.vlm.model.vision_model.',
        'language.': 'vlm_with_expert.vlm.model.text_model.',
        'expert.': 'vlm_with_expert.lm_expert.',
    }
    parts = {
        'vision_model.projector': 'connector.modality_projection.proj',
        'action_time_in': 'action_time_mlp_in',
        'action_time_out': 'action_time_mlp_out',
        'action_in': 'action_in_proj',
        'action_out': 'action_out_proj',
        'state_projection': 'state_proj',
        'text_model.embedding': 'text_model.embed_tokens',
        'input_norm': 'input_layernorm',
        'post_norm': 'post_attention_layernorm',
        '.norm1': '.layer_norm1',
        '.norm2': '.layer_norm2',
        'vision_model.norm': 'vision_model.post_layernorm',
        'vision_model.patch_embedding': 'vision_model.embeddings.patch_embedding',
        'vision_model.position_embedding': 'vision_model.embeddings.position_embedding.weight',
        'vision_model.blocks': 'vision_model.encoder.layers',
        '.blocks.': '.layers.',
    }
    ours = name
    for stack, theirs in stacks.items():
        if name.startswith(stack):
            name = theirs + name.removeprefix(stack)
    for part, theirs in parts.items():
        if not (part in ('action_in', 'action_out') and 'time' in name):
            name = name.replace(part, theirs, 1)
    out = 'out_proj' if ours.startswith('vision.') else 'o_proj'
    name = re.sub(r'attention\.([qkv])\b', r'self_attn.\1_proj', name)
    name = name.replace('attention.out', f'self_attn.{out}')
    return 'model.' + re.sub(r'mlp\.(gate|up|down)\b', r'mlp.\1_proj', name)


def test_a_full_size_policy_is_planned_without_reading_its_weights(folder, capsys):
    shapes = weight_shapes('smolvla', SMOLVLA)
    write_sparse_checkpoint(
        folder / 'model.safetensors', {their_name(name): shape for name, shape in shapes.items()}
    )
    camera = {'type': 'VISUAL', 'shape': [3, 480, 640]}
    edit_json(
        folder / 'config.json',
        lambda d: d['input_features'].update({'observation.images.third': camera}),
    )
    edit_config(folder, chunk_size=50, resize_imgs_with_padding=[512, 512])
    arguments = ['--state-names', ','.join(JOINTS), '--action-names', ','.join(JOINTS)]
    arguments += ['--units', 'deg', '--rate-hz', '30', '--dry-run']
    assert main(['export', str(folder), '--out', str(folder / 'b'), *arguments]) == 0
    assert 'vision 12x768, language 16x960, expert 16x720' in capsys.readouterr().out
    options = ExportOptions(state_names=JOINTS, action_names=JOINTS, units=('deg',), rate_hz=30.0)
    assert plan(folder, options).spec.dims == SMOLVLA


@pytest.mark.parametrize('layers', [1, 2])
def test_an_expert_with_fewer_layers_is_refused_by_its_key(folder, layers):
    edit_json(folder / 'config.json', lambda config: config.update(num_expert_layers=layers))
    with pytest.raises(REFUSED, match=r'field num_expert_layers: .* as many layers'):
        plan(folder)


@pytest.mark.parametrize('layers', [-1, 0, 4])
def test_an_expert_with_all_layers_is_served_whatever_it_is_called(folder, layers):
    edit_json(folder / 'config.json', lambda config: config.update(num_expert_layers=layers))
    assert plan(folder).spec.dims.expert.depth == 4
