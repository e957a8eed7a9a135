"""The contract of checkpoint folders: what each becomes, what it asks for, and what is refused.

What a folder becomes is `policy.yaml` and its statistics under `golden/`. Delete a file there and
run the test to have it written anew; read what changed.
"""

from __future__ import annotations

import json
import re
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import bitvla_folders
import numpy as np
import oft_cases
import openvla_folders
import pytest
import torch
import yaml
from checkpoint_folders import (
    edit_config,
    edit_json,
    edit_tensors,
    full_size_shapes,
    write_sparse_checkpoint,
)
from folder_cases import (
    KINDS,
    N16,
    N17,
    SIX,
    Change,
    added,
    backbone,
    both,
    config,
    given,
    json_file,
    lost,
    made,
    n17_action,
    n17_modality,
    planned,
    step,
    tensors,
    without,
    written,
)
from reference_cases import shipped
from safetensors.torch import load_file, save_file
from tiny_policy import tokenizer_of
from torch import Tensor

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.export.conversion import ExportPlan, plan_export, write_export
from vla_convert.readers import evo1, smolvla
from vla_runtime.bundle.rules import dump_spec
from vla_runtime.bundle.schema import CameraSpec
from vla_runtime.bundle.tensors import check_tensors
from vla_runtime.declarations.smolvla import SMOLVLA
from vla_runtime.family.listing import find_family
from vla_runtime.files.json_file import JsonError
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.models.base.flow_network import weight_shapes
from vla_runtime.policy import Policy

GOLDEN = Path(__file__).parent / 'golden'
REFUSED_AS = (ExportError, JsonError)
FLOW = {'objective': 'flow_matching'}
OPENVLA = json.loads(shipped('openvla_full_a').read_text())
OPENCV = {'use_albumentations': True, 'crop_fraction': 0.95}
PATCHES = {'image_target_size': [40, 72], 'image_crop_size': [36, 54]}
# Of LeRobot's pipelines: `normalizer_processor` of ACT, `groot_pack_inputs_v3` of GR00T N1.5.
ACT_NORMALISER, N15_PACK = 3, 2


def feature(name: str, shape: list[int]) -> Change:
    """A camera of another shape, or one more."""
    camera = {f'observation.images.{name}': {'type': 'VISUAL', 'shape': shape}}
    return json_file('config.json', lambda d: d['input_features'].update(camera))


CAMERA = 'observation.images.'
OTHER_ROPE = {'rope_theta': 2e4}


def beside(folder: Path) -> Path:
    """The folder of MolmoAct2's model."""
    return folder.with_name('molmoact2_folder_base')


def base(name: str, **changes: Any) -> Change:
    """A file of MolmoAct2's model with other values, of parts only those that are named."""

    def change(document: dict[str, Any]) -> None:
        for key, value in changes.items():
            document[key] = {**document[key], **value} if isinstance(value, dict) else value

    return Change(lambda f: edit_json(beside(f) / f'{name}.json', change))


def of_signs(signs: list[float] | None) -> Change:
    return both(*(step(2, f'{one}processor', joint_signs=signs) for one in ('pre', 'post')))


def of_statistics(*cameras: str) -> Change:
    """MolmoAct2 with statistics of a data set's cameras."""
    added = {f'{CAMERA}{name}.mean': torch.zeros(3, 1, 1) for name in cameras}

    def change(folder: Path) -> None:
        for path in folder.glob('policy_preprocessor_*.safetensors'):
            save_file({**load_file(path), **added}, path)

    return Change(change)


def of_states(length: int) -> Change:
    """Statistics of a state of another length, and its names; config.json has that of the base."""

    def fitted(tensor: Tensor) -> Tensor:
        return tensor.repeat(2)[:length].clone()

    def change(folder: Path) -> None:
        for path in folder.glob('policy_*_step_*.safetensors'):
            stored = load_file(path)
            for name in [name for name in stored if name.startswith('observation.state.')]:
                stored[name] = fitted(stored[name]) if stored[name].ndim else stored[name]
            save_file(stored, path)

    return both(Change(change), given(state_names=tuple(f'state_{n}' for n in range(length))))


def of_encoder(length: int) -> Change:
    """The layer that reads VLA-JEPA's state, made for one of this length."""

    def change(found: dict[str, Tensor]) -> dict[str, Tensor]:
        (name,) = (one for one in found if one.endswith('state_encoder.layer1.weight'))
        return {**found, name: found[name][:, :length].contiguous()}

    return tensors(change)


def of_camera(key: str) -> Change:
    """MolmoAct2 with a single camera, of a feature of this name."""

    def change(document: dict[str, Any]) -> None:
        features = document['input_features']
        del features[f'{CAMERA}wrist']
        features[key] = features.pop(f'{CAMERA}top')

    return json_file('config.json', change)


def masked(most: float) -> Change:
    """A gripper that is not normalised, from 0 to `most`."""

    def change(folder: Path) -> None:
        for path in folder.glob('policy_*.safetensors'):
            stored = load_file(path)
            for feature in ('action', 'observation.state'):
                stored[f'{feature}.mask'][-1] = 0.0
                stored[f'{feature}.q01'][-1], stored[f'{feature}.q99'][-1] = 0.0, most
            save_file(stored, path)

    return both(Change(change), given(units=('deg', 'state_5=1', 'action_5=1')))


def tagged(**entry: Any) -> Change:
    """Statistics of the model by a tag, of which the folder takes one."""
    document = json.dumps({'metadata_by_tag': {'so101': entry}})
    written = Change(lambda f: (beside(f) / 'norm_stats.json').write_text(document))
    return both(config(norm_tag='so101'), written)


def of_xvla(views: int, **domain: int) -> Change:
    return both(config(num_image_views=views), step(5, **domain))


# Actions of one arm of X-VLA's `ee6d`.
ARM = ('x', 'y', 'z', *(f'r{n}' for n in range(6)), 'gripper')
INTERLEAVED = 'rotation_6d_interleaved'


def of_arm() -> Change:
    """Actions of one arm, without statistics of their own."""

    def change(document: dict[str, Any]) -> None:
        document['output_features']['action']['shape'] = [10]
        document['normalization_mapping']['ACTION'] = 'IDENTITY'

    def identity(document: dict[str, Any]) -> None:
        document['steps'][-1 if len(document['steps']) > 2 else 0]['config']['norm_map'] = {}

    return both(
        json_file('config.json', change),
        *(json_file(f'policy_{name}.json', identity) for name in ('preprocessor', 'postprocessor')),
        Change(lambda f: [save_file({}, path) for path in f.glob('policy_*_step_*.safetensors')]),
        given(
            state_names=tuple(f's{n}' for n in range(8)),
            action_names=ARM,
            units=('rad', 'gripper=1'),
        ),
    )


def of_libero(mode: str, actions: int) -> Change:
    """A folder of X-VLA of after LeRobot 0.6.1, which makes LIBERO's actions poses."""

    def change(document: dict[str, Any]) -> None:
        document['action_mode'] = mode
        document['output_features']['action']['shape'] = [actions]

    # Of the data set's numbers.
    statistics = {f'action.{name}': torch.ones(7) for name in ('mean', 'std')}
    return both(
        of_arm(),
        json_file('config.json', change),
        with_step('xvla_libero_action_to_ee6d'),
        Change(lambda f: [save_file(statistics, one) for one in f.glob('policy_*_step_*')]),
    )


def of_long_state() -> Change:
    """A state of 24 numbers, of which X-VLA sees the first 20."""
    names = tuple(f's{n}' for n in range(20))

    def change(document: dict[str, Any]) -> None:
        document['input_features']['observation.state']['shape'] = [24]

    def longer(path: Path) -> None:
        save_file(
            {
                name: torch.arange(24.0) if name.startswith('observation.state.') else tensor
                for name, tensor in load_file(path).items()
            },
            path,
        )

    return both(
        json_file('config.json', change),
        Change(lambda f: [longer(path) for path in f.glob('policy_*_step_*.safetensors')]),
        given(state_names=names),
    )


def of_images(edge: int) -> Change:
    """Images of all cameras of one size."""

    def change(document: dict[str, Any]) -> None:
        for one in document['input_features'].values():
            if one['type'] == 'VISUAL':
                one['shape'] = [3, edge, edge]

    return json_file('config.json', change)


def florence(part: str, **changes: Any) -> Change:
    """Other settings of a part of X-VLA's Florence-2."""
    return json_file('config.json', lambda d: d['florence_config'][part].update(changes))


def with_step(name: str) -> Change:
    def change(document: dict[str, Any]) -> None:
        document['steps'].insert(-1, {'registry_name': name, 'config': {}})

    return json_file('policy_preprocessor.json', change)


def normalised_images() -> Change:
    """Images of X-VLA by statistics."""
    return both(
        json_file('config.json', lambda d: d['normalization_mapping'].update(VISUAL='MEAN_STD')),
        json_file(
            'policy_preprocessor.json',
            lambda d: d['steps'][-1]['config']['norm_map'].update(VISUAL='MEAN_STD'),
        ),
    )


def without_step(name: str, pipeline: str = 'preprocessor') -> Change:
    def change(document: dict[str, Any]) -> None:
        document['steps'] = [s for s in document['steps'] if s['registry_name'] != name]

    return json_file(f'policy_{pipeline}.json', change)


# VLA-JEPA's steps behind the network, and what config.json says of them.
JEPA_STEPS = {
    'clip': ('vla_jepa_clip_actions', 'clip_normalized_actions'),
    'snap': ('vla_jepa_pre_snap_gripper', 'pre_snap_gripper_action'),
    'binarise': ('vla_jepa_binarize_gripper', 'binarize_gripper_action'),
}


def without_steps(*names: str) -> Change:
    steps = [JEPA_STEPS[name] for name in names]
    return both(
        *(without_step(step, 'postprocessor') for step, _ in steps),
        config(**{key: False for _, key in steps}),
    )


def without_state() -> Change:
    return both(
        json_file('config.json', lambda d: d['input_features'].pop('observation.state')),
        given(state_names=('joint',)),
    )


def without_processor() -> Change:
    """VLA-JEPA with its Qwen3-VL beside it, of which the image processor's settings are missing."""

    def change(folder: Path) -> None:
        kept = shipped('vla_jepa_folder.end_to_end').with_name('vla_jepa_folder_base')
        target = Path(
            shutil.copytree(kept, folder.with_name('qwen'), copy_function=shutil.copyfile)
        )
        (target / 'processor_config.json').unlink()

    return both(Change(change), config(qwen_model_name='qwen'), given(tokenizer=None))


def added_step(pipeline: str, name: str, **settings: Any) -> Change:
    """One more step in front of a processor's."""
    added = {'registry_name': name, 'config': settings}
    return json_file(f'policy_{pipeline}.json', lambda d: d['steps'].insert(0, added))


def environment(mode: str | None = None) -> Change:
    """An environment state of two numbers for ACT."""

    def change(folder: Path) -> None:
        of = {'observation.environment_state': {'type': 'ENV', 'shape': [2]}}
        edit_json(folder / 'config.json', lambda d: d['input_features'].update(of))
        if mode:
            edit_json(folder / 'config.json', lambda d: d['normalization_mapping'].update(ENV=mode))
            edit_json(
                folder / 'policy_preprocessor.json',
                lambda d: d['steps'][ACT_NORMALISER]['config']['norm_map'].update(ENV=mode),
            )
        shapes = {
            'encoder_env_state_input_proj.weight': (32, 2),
            'encoder_env_state_input_proj.bias': (32,),
            'encoder_1d_feature_pos_embed.weight': (3, 32),
        }
        edit_tensors(folder, lambda t: t | {name: torch.ones(s) for name, s in shapes.items()})

    return Change(change, options={'state_names': (*SIX, 'block_x', 'block_y')})


def renamed_cameras(**renamed: str) -> Change:
    """Statistics under the data set's names: LeRobot 0.4 to 0.6.1 left such images as they were."""
    prefix = 'observation.images.'
    names = {f'{prefix}{theirs}': f'{prefix}{ours}' for theirs, ours in renamed.items()}

    def change(folder: Path) -> None:
        for path in folder.glob('policy_*_step_*.safetensors'):
            stored = load_file(path)
            for theirs, ours in names.items():
                for key in [key for key in stored if key.startswith(f'{ours}.')]:
                    stored[key.replace(ours, theirs, 1)] = stored.pop(key)
            save_file(stored, path)

    return both(step(0, rename_map=names), Change(change))


def statistics_lost(part: str) -> Change:
    def change(folder: Path) -> None:
        for path in folder.glob('policy_*_step_*.safetensors'):
            save_file({k: v for k, v in load_file(path).items() if part not in k}, path)

    return Change(change)


def letterboxed() -> Change:
    """OpenVLA's letter box, in both of its files."""
    change = {'image_resize_strategy': 'letterbox'}
    return both(config(**change), json_file('preprocessor_config.json', lambda d: d.update(change)))


def openvla_statistics(**fields: Any) -> Change:
    stats = openvla_folders.norm_stats(OPENVLA)
    stats['set_one']['action'].update(fields)
    return config(norm_stats=stats)


def swapped_bounds(masked: bool) -> Change:
    """A least value above the greatest, of a number that is scaled or of one that is not."""
    action = openvla_folders.norm_stats(OPENVLA)['set_one']['action']
    place = action['mask'].index(masked)
    low, high = list(action['q01']), list(action['q99'])
    low[place], high[place] = 5.0, 1.0
    return openvla_statistics(q01=low, q99=high)


def stored_transforms(**changes: Any) -> Change:
    """What OpenVLA's training makes of its processor's settings and saves beside them."""

    def change(document: dict[str, Any]) -> None:
        edge = document['input_sizes'][0][-1]
        resized = {
            'size': [edge, edge],
            'interpolation': 3,
            'max_size': None,
            'antialias': True,
        }
        document |= {
            'tvf_do_letterbox': False,
            'tvf_letterbox_fill': None,
            'tvf_resize_params': [resized] * 2,
            'tvf_crop_params': [{'output_size': [edge, edge]}] * 2,
            'tvf_normalize_params': [
                {
                    'mean': np.float32(mean).tolist(),
                    'std': np.float32(std).tolist(),
                    'inplace': False,
                }
                for mean, std in zip(document['means'], document['stds'], strict=True)
            ],
            **changes,
        }

    return json_file('preprocessor_config.json', change)


def two_data_sets(sets: dict[str, Any], further: str) -> Change:
    (numbers,) = sets.values()
    return json_file('dataset_statistics.json', lambda d: d.update({**sets, further: numbers}))


BITVLA_SETS = two_data_sets(
    bitvla_folders.norm_stats(json.loads(shipped('bitvla_a').read_text())), 'another'
)
OFT_D = oft_cases.description_of(shipped('openvla_full_a'))
OFT_SETS = two_data_sets(
    {oft_cases.DATA_SET: oft_cases.statistics_of(OFT_D)}, 'libero_goal_no_noops'
)


def oft_statistics(name: str) -> Change:
    """One data set of this name."""

    def change(folder: Path) -> None:
        document = json.dumps({name: oft_cases.statistics_of(OFT_D)})
        (folder / 'dataset_statistics.json').write_text(document)

    return Change(change)


def oft_columns(group: str, keep: bool) -> Change:
    """Statistics of one number fewer, or none."""

    def change(document: dict[str, Any]) -> None:
        of_set = document[oft_cases.DATA_SET]
        if keep:
            of_set[group] = {key: values[:-1] for key, values in of_set[group].items()}
        else:
            del of_set[group]

    return json_file('dataset_statistics.json', change)


def denoising_head(folder: Path) -> None:
    named = {
        name.replace('action_head.model.', 'action_head.noise_predictor.mlp_resnet.'): tensor
        for name, tensor in oft_cases.head_weights(OFT_D).items()
    }
    oft_cases.write_heads(folder, named)


def checkpoint_lost(head: str) -> Change:
    return Change(lambda f: [path.unlink() for path in f.glob(f'{head}--*')])


def checkpoint_twice(head: str) -> Change:
    def change(folder: Path) -> None:
        (path,) = folder.glob(f'{head}--*')
        path.with_name(f'{head}--10_checkpoint.pt').write_bytes(path.read_bytes())

    return Change(change)


def adapter_alone(folder: Path) -> None:
    for path in [*folder.glob('model*'), *folder.glob('*.pt')]:
        path.unlink()
    (folder / 'lora_adapter' / 'adapter_model.safetensors').write_bytes(b'')


def of_encoders(count: int) -> Change:
    """An encoder for each camera, as LeRobot names them; each is another."""

    def change(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        shared = {k: v for k, v in t.items() if '.vision_encoder.' in k}
        own = {
            k.replace('.vision_encoder.', f'.vision_encoders.{i}.'): v * (1.0 + 0.2 * i)
            for k, v in shared.items()
            for i in range(count)
        }
        return {k: v for k, v in t.items() if k not in shared} | own

    return tensors(change)


def cross_layers(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """SmolVLA's expert with keys and values of the language model's width in every layer."""
    own = re.compile(r'.*lm_expert\.layers\.[02]\.self_attn\.[kv]_proj.*')
    return {k: torch.zeros(len(v), 32) if own.match(k) else v for k, v in t.items()}


def evo1_statistics(length: int) -> Change:
    """Statistics of a policy with so many numbers in its state and actions."""
    values = {
        f'{feature}.{kind}': torch.full((length,), value)
        for feature in ('observation.state', 'action')
        for kind, value in (('min', -1.0), ('max', 1.0))
    }
    return Change(
        lambda f: [save_file(values, path) for path in f.glob('policy_*_step_*.safetensors')]
    )


def slot(value: int | None) -> Change:
    """Another slice of GR00T's weights for the embodiment, or none."""

    def change(document: dict[str, Any]) -> None:
        mapping = document['steps'][N15_PACK]['config']['embodiment_mapping']
        del mapping['so100']
        if value is not None:
            mapping['so100'] = value

    return json_file('policy_preprocessor.json', change)


def n16_history() -> Change:
    d = json.loads(N16.read_text())
    modality = {**d['modality_config'], 'video': n17_modality('video')['video']}
    modality['video'] = {'modality_keys': d['camera_order'], 'delta_indices': [0]}
    modality['state'] = {**modality['state'], 'delta_indices': [-1, 0]}
    return written(modality_configs={d['embodiment_tag']: modality})


def n17_by_step(rows: int) -> Change:
    """A state's range for each step."""

    def change(document: dict[str, Any]) -> None:
        groups = next(iter(document.values()))
        numbers = next(iter(groups['state'].values()))
        numbers.update({key: [values] * rows for key, values in numbers.items()})

    return json_file('statistics.json', change)


def libero(transform: str) -> Change:
    return both(written(embodiment_tag='libero_sim'), config(action_decode_transform=transform))


def no_image_tokens(document: dict[str, Any]) -> None:
    """A tokenizer of Evo-1 without them."""
    kept = [token for token in document['added_tokens'] if 'img' not in token['content']]
    document['added_tokens'] = kept
    for token in ('<img>', '</img>'):
        del document['model']['vocab'][token]


def openpi_statistics_are(document: Any) -> Change:
    path = 'assets/lab/arm/norm_stats.json'
    return Change(lambda f: (f / path).write_text(json.dumps(document)))


def cut(part: str, length: int) -> Change:
    return tensors(lambda t: {k: v[:length] if k.endswith(part) else v for k, v in t.items()})


def zeros(part: str, *shape: int) -> Change:
    return tensors(lambda t: {k: torch.zeros(shape) if part in k else v for k, v in t.items()})


def nvidia_n15(folder: Path) -> None:
    """N1.5 under the names of NVIDIA's own folders."""
    (folder / 'config.json').write_text('{"model_type": "gr00t_n1_5"}')
    path = folder / 'model.safetensors'
    save_file({k.removeprefix('_groot_model.'): v for k, v in load_file(path).items()}, str(path))


AS_WRITTEN = Change()
N17_LEROBOT, N17_NVIDIA = 'groot_n17 of LeRobot', 'groot_n17 of NVIDIA'

# Family and change, by the name of the golden policy.yaml. Several may become the same.
BECOMES: list[tuple[str, str, Change]] = [
    *((kind, 'as written', AS_WRITTEN) for kind in KINDS),
    ('act', 'as written', config(pretrained_backbone_weights=None)),
    ('act', 'cameras of two sizes', feature('wrist', [3, 48, 97])),
    ('act', 'environment', environment()),
    # One camera is left as it is, and the other normalised.
    ('act', 'a camera renamed in training', renamed_cameras(front='top')),
    ('act', 'images left alone', step(3, normalize_observation_keys=['observation.state'])),
    ('bitvla', 'another data set', both(BITVLA_SETS, given(unnorm_key='another'))),
    ('diffusion', '15 steps are sent', config(n_action_steps=15)),
    (
        'diffusion',
        'cosine',
        # Ends of betas that the cosine does not have are not judged.
        config(beta_schedule='squaredcos_cap_v2', beta_start=0.0, beta_end=1.5),
    ),
    ('groot_n15', 'new embodiment', slot(0)),
    ('groot_n15', 'new embodiment', slot(None)),
    (
        'groot_n16',
        'windows',
        backbone(
            'vision_config',
            use_rope=True,
            window_size=3,
            use_windows_attn=True,
            full_attention_indexes=[0, 2, 26],
        ),
    ),
    # The base of the rotary positions is the window's edge, whether there are windows or not.
    ('groot_n16', 'rotary', backbone('vision_config', use_rope=True, window_size=3)),
    ('groot_n16', 'longer prompt', given(prompt_length=75)),
    *((kind, 'whole tokens', written(**PATCHES)) for kind in (N17_LEROBOT, N17_NVIDIA)),
    *(
        (kind, 'letter box', written(letter_box_transform=True))
        for kind in (N17_LEROBOT, N17_NVIDIA)
    ),
    *(
        (kind, '7 denoise steps', config(num_inference_timesteps=7))
        for kind in (N17_LEROBOT, N17_NVIDIA)
    ),
    *(
        (
            kind,
            'letter box by OpenCV',
            # OpenCV keeps the aspect, and that of a square is known.
            written(letter_box_transform=True, **OPENCV, shortest_image_edge=64),
        )
        for kind in (N17_LEROBOT, N17_NVIDIA)
    ),
    (
        N17_LEROBOT,
        'two frames',
        written(video_horizon=2, modality_config=n17_modality('video', delta_indices=[-15, 0])),
    ),
    (N17_LEROBOT, 'OpenCV', written(**OPENCV)),
    (N17_LEROBOT, 'as written', config(use_relative_actions=True)),
    (
        N17_NVIDIA,
        'OpenCV',
        both(written(**OPENCV, shortest_image_edge=48), given(image_size=(90, 160))),
    ),
    *(
        (
            'multi_task_dit',
            f'flow by {method}',
            config(**FLOW, integration_method=method, num_integration_steps=7),
        )
        for method in ('euler', 'rk4')
    ),
    (
        'multi_task_dit',
        'encoder for each camera',
        both(of_encoders(2), config(use_separate_rgb_encoder_per_camera=True)),
    ),
    ('vla_jepa', 'another gripper', config(gripper_dim=2, gripper_threshold=0.25)),
    (
        'vla_jepa',
        'another gripper',
        both(
            step(1, 'postprocessor', gripper_dim=2, threshold=0.25),
            step(3, 'postprocessor', gripper_dim=2, threshold=0.25),
        ),
    ),
    # What the steps say, config.json need not say again.
    (
        'vla_jepa',
        'another gripper',
        both(
            config(gripper_dim=None, gripper_threshold=None),
            *(step(index, 'postprocessor', gripper_dim=2, threshold=0.25) for index in (1, 3)),
        ),
    ),
    ('vla_jepa', 'a gripper that is not', config(gripper_dim=7)),
    ('vla_jepa', 'a gripper that is not', without_steps('snap', 'binarise')),
    ('vla_jepa', 'a gripper that is snapped', without_steps('clip', 'binarise')),
    ('vla_jepa', 'a gripper that is switched', without_steps('snap')),
    ('vla_jepa', 'images that are averaged', config(resize_images_to=[40, 56])),
    (
        'vla_jepa',
        'images that are averaged',
        both(
            config(resize_images_to=[40, 56]),
            added_step('preprocessor', 'vla_jepa_image_prep', resize_to=[40, 56]),
        ),
    ),
    ('vla_jepa', 'large images', of_images(96)),
    ('vla_jepa', 'large images', given(image_size=(96, 96))),
    ('vla_jepa', 'without a state', without_state()),
    ('vla_jepa', 'a state of its own', both(of_states(6), of_encoder(6))),
    ('vla_jepa', 'as written', config(qwen_model_name='/somebody/vla_jepa_folder_base')),
    (
        'molmoact2',
        "a folder's own length, words as they are, no frame",
        both(
            config(num_inference_steps=4),
            step(5, max_sequence_length=300, normalize_language=False, add_setup_tokens=False),
            step(2, joint_signs=None),
            step(2, 'postprocessor', joint_signs=None),
        ),
    ),
    (
        'molmoact2',
        'tiles',
        base('processor_config', image_processor={'crop_mode': 'overlap-and-resize'}),
    ),
    (
        'molmoact2',
        'cameras in another order',
        step(5, image_keys=[f'{CAMERA}wrist', f'{CAMERA}top']),
    ),
    (
        'molmoact2',
        'olmo norms behind, no hidden tokens',
        base('config', action_mode='continuous', text_config={'norm_after': True}),
    ),
    ('molmoact2', 'as written', Change(lambda f: edit_config(f, checkpoint_path=str(beside(f))))),
    *(
        (
            'molmoact2',
            'as written',
            both(
                config(checkpoint_path=f'{place}/molmoact2_folder_base'),
                given(tokenizer=beside(shipped('molmoact2_folder.end_to_end')) / 'tokenizer.json'),
            ),
        )
        for place in ('/somewhere', '~')
    ),
    # LeRobot's defaults.
    ('molmoact2', 'without words', step(5, setup_type='', control_mode='')),
    (
        'molmoact2',
        'words with spaces and lines',
        step(5, setup_type=' one\narm ', add_setup_tokens=False, control_mode='<control_start>x'),
    ),
    ('molmoact2', 'a state of its own', both(of_states(7), of_signs(None))),
    *(
        (
            'molmoact2',
            'a single camera',
            both(of_camera('observation.image'), step(5, image_keys=of)),
        )
        for of in ([], ['observation.image'])
    ),
    (
        'molmoact2',
        'a single camera in tiles',
        both(
            of_camera('observation.image'),
            step(5, image_keys=[]),
            base('processor_config', image_processor={'crop_mode': 'overlap-and-resize-c2'}),
        ),
    ),
    # The images of an observation by their names.
    (
        'molmoact2',
        'as written',
        both(
            step(5, image_keys=[]),
            json_file(
                'config.json',
                lambda d: d.update(input_features=dict(reversed(d['input_features'].items()))),
            ),
            of_statistics('top', 'wrist'),
        ),
    ),
    ('molmoact2', 'as written', of_statistics('wrist', 'side', 'top')),
    (
        'molmoact2',
        'as written',
        both(of_statistics('side', 'top'), step(5, allow_image_key_fallback=False)),
    ),
    ('molmoact2', 'a gripper as it is, another chunk', both(masked(1.0), tagged(action_horizon=6))),
    (
        'molmoact2',
        'a gripper as it is, another chunk',
        both(
            masked(1.0),
            tagged(action_horizon=6),
            Change(lambda f: (beside(f) / 'norm_stats.json').rename(beside(f) / 'tags.json')),
            base('config', norm_stats_filename='tags.json'),
        ),
    ),
    ('xvla', 'another domain, the views that LeRobot runs', of_xvla(5, domain_id=4)),
    ('xvla', 'domain by name', both(config(domain_feature_key='domain'), given(embodiment='rt1'))),
    (
        'xvla',
        'poses of one arm',
        both(config(action_mode='EE6D'), of_arm(), given(pose_rotation='rotation_6d')),
    ),
    # LIBERO's policies write the rotation by columns.
    ('xvla', 'poses of one arm', of_libero('EE6D', 10)),
    (
        'xvla',
        'a state that is cut, no padding of prompts',
        both(config(pad_language_to='longest'), step(2, padding='longest'), of_long_state()),
    ),
    ('xvla', 'images as they come', both(config(resize_imgs_with_padding=None), of_images(64))),
    ('openvla', 'letter box', letterboxed()),
    ('openvla', '64 tokens', given(prompt_length=64)),
    # Of a number that stays as it is, nobody reads the bounds.
    ('openvla', 'as written', swapped_bounds(masked=False)),
    (
        'openvla_oft',
        'another data set',
        both(OFT_SETS, given(unnorm_key='libero_goal_no_noops')),
    ),
    ('openvla_oft', 'as written', given(horizon=None)),
    # Heads that were trained without DistributedDataParallel, and heads in bfloat16.
    ('openvla_oft', 'as written', written(parallel=False)),
    ('openvla_oft', 'as written', written(dtype=torch.bfloat16)),
    (
        'openvla_oft',
        'three steps',
        both(oft_statistics('aloha1_fold_shirt_30_demos'), given(horizon=3)),
    ),
    ('smolvla', 'empty camera', config(empty_cameras=1)),
    *(
        (
            'smolvla',
            'no layer attends to itself',
            both(config(self_attn_every_n_layers=every), tensors(cross_layers)),
        )
        for every in (0, -1)
    ),
    *(
        (
            'smolvla',
            'as written',
            config(prefix_length=length, num_expert_layers=0, pad_language_to='max_length'),
        )
        for length in (-1, 0)
    ),
    *(('smolvla', 'as written', config(num_expert_layers=layers)) for layers in (-1, 4)),
]

# A pattern of the message: the file, the field or the option that is named.
REFUSED: dict[str, list[tuple[Change, str]]] = {
    'act': [
        (config(feedforward_activation='glu'), 'field feedforward_activation'),
        (environment('MIN_MAX'), 'ENV: MIN_MAX is not supported where STATE is MEAN_STD'),
        (config(chunk_size=20), 'config.json.*chunk_size'),
        (config(n_heads=5), 'num_heads'),
        (config(n_obs_steps=2), 'field n_obs_steps'),
        (feature('top', [1, 64, 96]), r'has shape \[1, 64, 96\] where \[3, height, width\]'),
        (feature('third', [3, 64, 96]), r'images\.third\.mean'),
        (
            cut('encoder.layers.0.self_attn.in_proj_bias', 64),
            r'does not divide into the 3 tensors|expected for .encoder\.0\.attention',
        ),
        (without('encoder.layers.2.'), r"the checkpoint has no tensors for 'encoder\.2'"),
        (
            given(tokenizer=tokenizer_of('smolvla')),
            '--tokenizer is given, but .* act has no use',
        ),
        (given(prompt_template='pi0'), '--prompt-template is given, but .* act has no use'),
        (given(prompt_length=48), '--prompt-length is given, but .* act has no use'),
        (given(advantage='task_newline'), '--advantage is given, but .* act has no use'),
        (given(denoise_steps=4), '--denoise-steps'),
        (
            step(3, normalize_observation_keys=['observation.state', 'observation.images.top']),
            'normalised',
        ),
        (statistics_lost('.top.'), r"has no 'observation\.images\.top\.mean'; it has those"),
    ],
    'bitvla': [
        (BITVLA_SETS, '--unnorm-key'),
        *((checkpoint_lost(head), head) for head in bitvla_folders.HEADS),
        *((checkpoint_twice(head), head) for head in bitvla_folders.HEADS),
        (config(vision_feature_select_strategy='default'), 'vision_feature_select_strategy'),
        (config(projector_hidden_act='relu'), 'projector_hidden_act'),
        (config(vision_feature_layer=[-2, -1]), 'vision_feature_layer'),
        (config(vision_feature_layer=9), 'vision_feature_layer'),
        (
            json_file('config.json', lambda d: d['vision_config'].update(vit_weight_bits=32)),
            'vit_weight_bits',
        ),
    ],
    'diffusion': [
        (config(**changes), rf'config\.json: (field )?{named}')
        for named, changes in (
            ('n_action_steps', {'n_action_steps': 16}),
            ('n_groups', {'n_groups': None}),
            ('clip_sample_range', {'clip_sample_range': 0}),
            ('clip_sample_range', {'clip_sample_range': -1.0}),
            (
                'beta_start',
                {'beta_schedule': 'linear', 'beta_start': 0.02, 'beta_end': 0.0001},
            ),
            ('beta_schedule', {'beta_schedule': 'Linear'}),
            ('prediction_type', {'prediction_type': 'Epsilon'}),
            ('num_inference_steps', {'num_inference_steps': 2000}),
            ('timestep_spacing', {'timestep_spacing': 'trailing'}),
            ('steps_offset', {'steps_offset': 1}),
            ('thresholding', {'thresholding': True}),
            ('rescale_betas_zero_snr', {'rescale_betas_zero_snr': True}),
            ('beta_end', {'beta_schedule': 'linear', 'beta_start': 0.9, 'beta_end': 0.999}),
            ('beta_end', {'beta_schedule': 'linear', 'beta_start': 1e-12, 'beta_end': 1e-12}),
            ('beta_schedule', {'beta_schedule': 'sigmoid', 'noise_scheduler_type': 'DDIM'}),
            ('num_train_timesteps', {'num_train_timesteps': 100_000}),
        )
    ]
    # Sizes that the tensors contradict.
    + [
        (config(**{named: value}), named)
        for named, value in (
            ('down_dims', [16, 32]),
            ('kernel_size', 3),
            ('diffusion_step_embed_dim', 64),
            ('spatial_softmax_num_keypoints', 7),
        )
    ],
    'evo1': [
        (config(action_head='diffusion'), 'field action_head'),
        (config(return_cls_only=True), 'field return_cls_only'),
        (config(binarize_gripper=True), 'field binarize_gripper'),
        (step(1, 'postprocessor', binarize_gripper=True), 'binarize_gripper'),
        (step(1, 'postprocessor', action_dim=3), 'action_dim'),
        (config(postprocess_action_dim=3), 'config.json.*postprocess_action_dim'),
        (config(image_resolution=[224, 224]), 'config.json.*image_resolution'),
        (config(max_views=1), 'field max_views'),
        (
            both(
                tensors(
                    lambda t: {
                        k: torch.stack([v, v]) if 'mlp_head.fc1.linear.bias' in k else v
                        for k, v in t.items()
                    }
                ),
                config(default_embodiment_id=2),
            ),
            'default_embodiment_id',
        ),
        (lost('tokenizer.json'), r'tokenizer\.json.*config\.json'),
        (json_file('tokenizer.json', no_image_tokens), "has no token '<img>'"),
        (given(unnorm_key='bridge_orig'), '--unnorm-key'),
    ],
    'groot_n15': [
        (
            given(heads={'context': 4, 'dit': 4, 'contxt': 4}),
            '--heads contxt=N is given, but LeRobot groot_n15 has no use for it',
        ),
        (given(kv_heads=1), '--kv-heads is given, but LeRobot groot_n15 has no use for it'),
        (given(embodiment='gr1'), 'groot_n15'),
        (given(heads={'context': 4, 'dit': 3}), '--heads'),
        (slot(9), r'policy_preprocessor\.json'),
        (slot(-1), '-1'),
        (config(n_obs_steps=2), 'n_obs_steps'),
        (step(N15_PACK, formalize_language=True), 'formalize_language'),
        (step(N15_PACK, normalize_min_max=False), 'normalize_min_max'),
        (step(N15_PACK, state_horizon=2), 'state_horizon'),
        (
            config(input_features={'observation.state': {'type': 'STATE', 'shape': [8]}}),
            'no camera',
        ),
        (statistics_lost('state.'), r'state\.min'),
        (Change(nvidia_n15), 'order'),
    ],
    'groot_n16': [
        (lost('../backbone/config.json'), r'config\.json'),
        (backbone(select_layer=-2), r'config\.json.*select_layer'),
        (backbone(use_pixel_shuffle=False), r'config\.json.*use_pixel_shuffle'),
        (
            backbone('vision_config', full_attention_indexes=['7']),
            r'config\.json.*full_attention_indexes',
        ),
        (
            backbone('vision_config', num_attention_heads='many'),
            r'config\.json.*num_attention_heads',
        ),
        (written(formalize_language=False), 'field .*formalize_language'),
        (written(clip_outliers=False), 'field .*clip_outliers'),
        (written(letter_box_transform=True), 'field .*letter_box_transform'),
        (written(image_target_size=None), 'field .*image_target_size'),
        (config(use_alternate_vl_dit=False), 'use_alternate_vl_dit'),
        (config(attend_text_every_n_blocks='two'), 'attend_text_every_n_blocks'),
        (n16_history(), 'field .*delta_indices'),
        (
            Change(lambda f: (f / 'config.json').write_text('{"type": "groot"}')),
            r'N1\.6.*LeRobot',
        ),
    ],
    N17_LEROBOT: [
        (written(video_horizon=2), 'video_horizon'),
        (
            written(modality_config=n17_modality('video', delta_indices=[0, 5])),
            'steps back that end in 0',
        ),
        (written(clip_outliers=False), 'clip_outliers'),
        (written(formalize_language=False), 'formalize_language'),
        (written(action_decode_transform='libero'), 'action_decode_transform'),
        (written(image_target_size=None), 'image_target_size'),
        (
            both(written(use_relative_action=False), config(use_relative_actions=True)),
            r'config\.json: field use_relative_actions',
        ),
        (
            written(modality_config=n17_modality('action', delta_indices=[0, 2, 4])),
            'delta_indices',
        ),
        *(
            (
                written(modality_config=n17_modality(group, mean_std_embedding_keys=['arm'])),
                'arm: groups normalised by mean and spread',
            )
            for group in ('action', 'state')
        ),
        *(
            (written(modality_config=n17_action(1, rep=kind)), "'delta'")
            for kind in ('DELTA', 'ActionRepresentation.DELTA')
        ),
        (libero('libero'), 'action_decode_transform'),
        (libero('auto'), 'action_decode_transform'),
        (lost('../backbone/config.json'), r'config\.json'),
        (both(written(**OPENCV), given(image_size=(90, 160))), 'input_features'),
    ],
    N17_NVIDIA: [
        (written(image_crop_size=None), 'image_crop_size'),
        (written(image_crop_size=[50, 48]), 'image_crop_size'),
        (written(**OPENCV, shortest_image_edge=48), '--image-size'),
        # Where it does not matter.
        (given(image_size=(60, 84)), '--image-size'),
        (written(exclude_state=True), 'exclude_state: True is not supported'),
        (written(use_tactile=True), 'use_tactile: True is not supported'),
        (written(use_mean_std=True), 'use_mean_std'),
        (given(embodiment='other_arm'), 'other_arm'),
        (
            given(embodiment='so101'),
            f'so101.*{json.loads(N17.read_text())["embodiment_tag"]}',
        ),
        *((n17_by_step(rows), r'statistics\.json: field \w+\.state\.\w+\.') for rows in (1, 3)),
        (config(strict_action_padding_mask=True), 'strict_action_padding_mask'),
        (config(state_history_length=2), 'state_history_length'),
        (config(num_timestep_buckets=500), 'num_timestep_buckets'),
        (config(add_pos_embed=False), 'add_pos_embed'),
        (
            config(diffusion_model_cfg={'interleave_self_attention': False}),
            'diffusion_model_cfg',
        ),
    ],
    'multi_task_dit': [
        (config(objective='score'), 'objective'),
        (config(**FLOW, integration_method='heun'), 'integration_method'),
        (config(**FLOW, num_integration_steps=101), 'denoise_steps'),
        (config(beta_schedule='laplace'), 'beta_schedule'),
        (config(image_crop_shape=[24, 24]), 'positions'),
        (config(image_crop_shape=[32]), 'image_crop_shape'),
        (config(num_heads=5), 'num_heads'),
        (config(n_obs_steps=3), 'numbers of an observation'),
        (of_encoders(1), 'encoders'),
    ],
    'vla_jepa': [
        (config(prompt_template='{instruction}'), 'prompt_template'),
        (config(embodied_action_token='<|act|>'), 'embodied_action_token'),
        (config(action_num_timestep_buckets=100), 'action_num_timestep_buckets'),
        (config(num_video_frames=3), 'num_video_frames'),
        (config(num_embodied_action_tokens_per_instruction=4), 'num_embodied_action_tokens'),
        (config(action_model_type='DiT-H', action_num_heads=None), 'action_model_type'),
        (config(action_num_heads=None), 'action_num_heads times action_attention_head_dim'),
        (config(gripper_dim=-1), 'gripper_dim'),
        (json_file('config.json', lambda d: d.pop('gripper_dim')), 'gripper_dim'),
        (step(1, 'postprocessor', gripper_dim=5), 'differ'),
        (config(clip_normalized_actions=False), 'clip_normalized_actions'),
        (without_step('vla_jepa_binarize_gripper', 'postprocessor'), 'binarize_gripper_action'),
        (
            added_step('preprocessor', 'vla_jepa_image_prep', resize_to=[40, 56]),
            'resize_images_to',
        ),
        (feature('image3', [3, 32, 64]), 'images of'),
        (of_states(6), 'observation.state'),
        (config(resize_images_to=[40]), 'resize_images_to'),
        (given(tokenizer=shipped('vla_jepa_a').with_suffix('.tokenizer.json')), '--tokenizer'),
        (given(tokenizer=shipped('vla_jepa_a').with_suffix('.json')), 'tokenizer'),
        # Once.
        (given(tokenizer=None), r'(?s)^(?!.*--tokenizer.*--tokenizer).*--tokenizer'),
        (without_processor(), '--tokenizer .*preprocessor_config.*not the published size'),
        (given(prompt_length=30), '--prompt-length'),
        (without('action_decoder.layer2'), 'action_decoder'),
    ],
    'molmoact2': [
        (config(action_mode='discrete'), 'action_mode'),
        (config(inference_action_mode='discrete'), 'inference_action_mode'),
        (config(mask_action_dim_padding=False), 'mask_action_dim_padding'),
        (config(checkpoint_path='elsewhere'), '--tokenizer'),
        (config(chunk_size=13), 'chunk_size'),
        (masked(100.0), 'normalize_gripper'),
        (step(2, joint_offsets=[1.0] * 6), 'joint frame'),
        (step(2, joint_signs=['a']), 'joint_signs'),
        (of_signs([2.0] * 6), r'joint_frame\.signs'),
        (of_signs([1.0]), r'joint_frame\.signs'),
        (
            both(
                of_signs([1.0] * 5),
                *(step(2, f'{one}processor', joint_offsets=[0.0] * 5) for one in ('pre', 'post')),
            ),
            'joint_signs: 5 numbers where the state has 6.*write 1',
        ),
        (of_statistics('side', 'top'), 'image_keys: the cameras are top, wrist,.*side, .*top, and'),
        (both(of_statistics('top'), step(5, image_keys=[])), 'image_keys: the cameras are top, wr'),
        (both(of_statistics('a', 'top', 'wrist'), step(5, image_keys=[])), 'image_keys: the cam'),
        (config(norm_tag='so101'), r'base/norm_stats\.json: is missing.*norm_tag'),
        (
            both(tagged(action_horizon=6), base('config', norm_stats_filename='tags.json')),
            r'base/tags\.json: is missing',
        ),
        (both(tagged(action_horizon=6), config(norm_tag='so100')), 'field metadata_by_tag.so100'),
        (step(5, image_keys=['observation.images.left']), 'image_keys'),
        (without_step('molmoact2_pack_inputs'), 'molmoact2_pack_inputs'),
        (base('config', text_config={'rope_scaling_layers': [1]}), 'rope_scaling'),
        (base('config', text_config={'qk_norm_type': 'other'}), 'qk_norm_type'),
        *(
            (base('config', **{f'{part}_config': {key: None}}), rf'field {part}_config\.{key}: is')
            for part, key in (
                ('text', 'rope_theta'),
                ('text', 'use_qk_norm'),
                ('text', 'qk_norm_type'),
                ('adapter', 'pooling_attention_mask'),
            )
        ),
        *(
            (base('config', text_config={'rope_parameters': {**of, **OTHER_ROPE}}), named)
            for of, named in (
                ({'rope_type': 'default'}, 'rope_theta 5000000.0 but .*rope_theta 20000.0'),
                ({'rope_type': 'yarn'}, 'rope_parameters.rope_type'),
            )
        ),
        (base('config', text_config={'num_key_value_heads': 3}), 'text_config'),
        (base('config', adapter_config={'vit_layers': [4]}), 'vit_layers'),
        (base('config', action_expert_config={'causal_attn': True}), 'causal_attn'),
        (base('config', action_expert_depth_gate=True), 'action_expert_depth_gate'),
        (base('config', max_action_dim=16), 'max_action_dim'),
        (base('config', eos_token_id=None), 'eos_token_id'),
        (base('processor_config', image_processor={'crop_mode': 'middle'}), 'crop_mode'),
        (base('processor_config', image_processor={'image_mean': [0.4] * 3}), 'image_mean'),
        (base('processor_config', image_processor={'pooling_size': [2]}), 'pooling_size'),
        (base('tokenizer_config', eos_token=None), 'eos_token'),
        (Change(lambda f: (beside(f) / 'processor_config.json').unlink()), 'processor_config'),
    ],
    'xvla': [
        (config(num_image_views=None), 'num_image_views'),
        (config(num_image_views=3), 'num_image_views'),
        (step(5, domain_id=5), 'domain_id'),
        (step(5, domain_id=-1), 'domain_id'),
        (given(embodiment='3'), '--embodiment'),
        (given(embodiment='liberia'), "did you mean 'libero'"),
        (config(action_mode='delta_ee'), 'action_mode'),
        (config(max_action_dim=5), 'output_features'),
        *(
            (config(action_mode=mode), rf"6 numbers, and action_mode '{mode}' {lengths}: .*'auto'")
            for mode, lengths in (
                ('ee6d', r'10 \(one arm\) or 20'),
                ('joint', r'7 \(one arm\) or 14'),
                ('agibot_ee6d', r'10 \(one arm\) or 20'),
                ('franka_joint7', '7'),
            )
        ),
        (of_libero('ee6d', 7), r"output_features: action .*LIBERO's .*\[10\]"),
        (of_libero('joint', 7), 'action_mode'),
        # Twenty numbers are none of LIBERO's.
        (of_libero('ee6d', 20), '--pose-rotation'),
        (both(config(action_mode='ee6d'), of_arm()), '--pose-rotation'),
        (
            both(config(action_mode='ee6d'), of_arm(), given(pose_rotation='euler_sxyz')),
            r'--pose-rotation euler_sxyz: .*six numbers: .*rotation_6d_interleaved',
        ),
        (config(action_mode='so101_bimanual', use_proprio=False), 'use_proprio'),
        (config(pad_language_to='longest'), 'pad_language_to'),
        (step(2, padding='do_not_pad'), 'padding'),
        (step(3, image_keys=['image']), 'image_keys'),
        (without_step('xvla_imagenet_normalize'), 'xvla_imagenet_normalize'),
        # 255 times as bright, and normalised before they are scaled.
        (with_step('xvla_image_scale'), 'xvla_imagenet_normalize, xvla_image_scale in this order'),
        (
            both(without_step('xvla_image_to_float'), with_step('xvla_image_to_float')),
            'expected xvla_image_to_float, xvla_imagenet_normalize: take',
        ),
        (normalised_images(), 'VISUAL: MEAN_STD .*IDENTITY: the policy prepares images'),
        (florence('text_config', activation_function='relu'), 'activation_function'),
        (florence('vision_config', num_heads=[2, 3, 4]), 'vision.num_heads'),
        (florence('vision_config', num_groups=[2, 3, 5, 6]), 'vision.groups'),
        (florence('vision_config', window_size=0), 'window_size'),
        (florence('vision_config', image_feature_source=['last_frame']), 'image_feature_source'),
        (config(num_heads=5), 'num_heads'),
        (config(dim_time=14), 'max_state_dim'),
        (config(max_len_seq=80), 'max_len_seq'),
        (config(tokenizer_max_length=90), 'max_length'),
        (config(resize_imgs_with_padding=None), 'images of'),
        (config(resize_imgs_with_padding=[640, 640]), 'image'),
        (lost('policy_preprocessor.json'), 'policy_preprocessor.json'),
        (without('aux_visual_proj.bias'), 'view_projection.bias'),
        (without('action_decoder.bias'), 'action_decoder.bias'),
        (without('action_encoder.fc'), 'action_encoder.weight'),
        (without('image_projection'), 'vision.projection.weight'),
        (without('embed_tokens'), 'text.embedding.weight'),
        (
            tensors(lambda t: {k: v[:, :-1] if 'decoder.fc' in k else v for k, v in t.items()}),
            'whole number',
        ),
    ],
    'openvla': [
        (config(use_fused_vision_backbone=False), 'use_fused_vision_backbone'),
        (config(arch_specifier='no-align+linear'), 'arch_specifier'),
        (config(timm_override_act_layers=['quick_gelu', None]), 'timm_override_act_layers'),
        (config(n_action_bins=0), 'n_action_bins'),
        (config(image_resize_strategy='resize-crop'), 'image_resize_strategy'),
        (config(pad_to_multiple_of=-64), 'pad_to_multiple_of'),
        (given(unnorm_key='bridge'), 'set_one, set_two'),
        (openvla_statistics(q01=[0.0, 'x']), 'q01'),
        (openvla_statistics(mask=[True]), 'mask'),
        (openvla_statistics(q99=None), 'q99'),
        (swapped_bounds(masked=True), r'config\.json.*norm_stats\.set_one\.action\.q01'),
        (config(norm_stats={}), r'copy dataset_statistics\.json'),
        (
            json_file('preprocessor_config.json', lambda d: d.update(stds=[[0.0] * 3, [0.5] * 3])),
            r'preprocessor_config\.json: field stds',
        ),
        (lost('preprocessor_config.json'), r'preprocessor_config\.json.*copy'),
        (given(cameras=(CameraSpec('left'), CameraSpec('right'))), '--cameras'),
        (given(horizon=4), '--horizon'),
        (given(denoise_steps=10), '--denoise-steps'),
        (given(advantage='task_newline'), r'prompt\.advantage'),
        (given(prompt_length=1), '--prompt-length'),
        (given(prompt_length=5), '--prompt-length'),
    ],
    'openvla_oft': [
        (OFT_SETS, '--unnorm-key'),
        # The name of a known data set, but not its numbers.
        *(
            (both(oft_statistics(name), given(horizon=None)), '--horizon')
            for name in ('my_robot', 'aloha1_fold_shirt_30_demos')
        ),
        (added('vision_backbone--150000_checkpoint.pt'), 'FiLM'),
        (added('noisy_action_projector--150000_checkpoint.pt'), 'use_diffusion'),
        (added('action_head--10_checkpoint.pt'), 'action_head'),
        (added('proprio_projector--10_checkpoint.pt'), 'proprio_projector'),
        (checkpoint_lost('action_head'), 'action_head.*use_l1_regression.* copy'),
        (checkpoint_lost('proprio_projector'), 'proprio_projector.*--use_proprio True.* copy'),
        (Change(denoising_head), 'use_diffusion'),
        *((oft_columns(group, True), 'dimensions') for group in ('action', 'proprio')),
        *((oft_columns(group, False), group) for group in ('action', 'proprio')),
        (config(use_fused_vision_backbone=False), 'use_fused_vision_backbone'),
        (config(arch_specifier='no-align+linear'), 'arch_specifier'),
        (given(advantage='task_newline'), r'prompt\.advantage'),
    ],
    'pi05 of openpi': [
        *(
            (openpi_statistics_are(document), pattern)
            for document, pattern in (
                ({'norm_stats': {'state': {}}}, r'field norm_stats\.actions'),
                ({'state': [], 'actions': {}}, 'field state'),
                ({'state': {'mean': 'x'}, 'actions': {}}, r'field state\.mean'),
                ({'state': {'mean': [[1]]}, 'actions': {}}, r'field state\.mean'),
                ({'state': {'mean': []}, 'actions': {}}, r'field state\.mean'),
            )
        ),
        (config(action_horizon='ten'), 'field action_horizon'),
        (given(asset_id='arms'), '--asset-id'),
        *(
            (config(**{key: 'gemma_300m_lora'}), f'{key}: .* leaves LoRA weights out')
            for key in ('paligemma_variant', 'action_expert_variant')
        ),
    ],
    'smolvla': [
        (config(attention_mode='self_attn'), 'field attention_mode'),
        (config(add_image_special_tokens=True), 'field add_image_special_tokens'),
        (config(prefix_length=80), 'field prefix_length'),
        (config(adapt_to_pi_aloha=True), 'field adapt_to_pi_aloha'),
        (config(max_period=10.0), 'field max_period'),
        (config(resize_imgs_with_padding=[64, 48]), 'field resize_imgs_with_padding'),
        (config(resize_imgs_with_padding=[512, 512]), 'config.json.*resize_imgs_with_padding'),
        (config(max_state_dim=16), 'config.json'),
        (
            json_file(
                'policy_preprocessor.json',
                lambda d: d['steps'][2].update(registry_name='pi0_new_line_processor'),
            ),
            r'field steps\[2\]',
        ),
        (without('lm_expert.layers.3'), r'language\.depth'),
        (
            zeros('modality_projection', 64, 96),
            'the projector takes 96 numbers, which is no square of patches of 32 each',
        ),
        (lost('tokenizer.json'), r'tokenizer\.json.*config\.json'),
        *(
            (config(num_expert_layers=layers), 'field num_expert_layers: .* as many layers')
            for layers in (1, 2)
        ),
        *(
            (config(self_attn_every_n_layers=every), r'blocks\.0\.attention\.k')
            for every in (0, -1)
        ),
    ],
}


# Changes that are told, by what the one note of them says; None where nothing is to be told.
TVF = 'preprocessor_config.json has {}: '
NOTED: list[tuple[str, Change, str, str | None]] = [
    ('act', renamed_cameras(front='top'), '--rename_map', '--rename_map'),
    ('act', renamed_cameras(front='top'), 'absent', None),
    # What needs all its cameras has no use for one that is said to be absent.
    (
        'molmoact2',
        both(of_statistics('top'), step(5, allow_image_key_fallback=False)),
        'absent',
        None,
    ),
    ('vla_jepa', of_statistics('image'), 'absent', None),
    ('vla_jepa', config(gripper_threshold=1), 'is switched at', 'is switched at 1, as'),
    ('smolvla', of_statistics('top'), 'absent', 'wrist=absent'),
    (
        N17_NVIDIA,
        written(letter_box_transform=True, **OPENCV, shortest_image_edge=64),
        'letter_box_transform',
        'letter_box_transform',
    ),
    ('openvla', stored_transforms(), 'tvf_', None),
    *(
        ('openvla', stored_transforms(**{key: value}), 'tvf_', TVF.format(key))
        for key, value in (
            ('tvf_do_letterbox', True),
            ('tvf_letterbox_fill', [127, 127, 127]),
            ('tvf_resize_params', [{'size': 256}, {'size': 256}]),
            ('tvf_crop_params', [{'output_size': [20, 20]}] * 2),
            ('tvf_normalize_params', [{'mean': [0.1] * 3}, {'mean': [0.5] * 3}]),
            ('tvf_normalize_params', [{'std': [0.1] * 3}]),
        )
    ),
    ('xvla', AS_WRITTEN, 'LeRobot computes', None),
    ('xvla', config(dtype='bfloat16'), 'LeRobot computes', 'bfloat16'),
    ('openvla_oft', oft_statistics('my_robot'), 'my_robot', 'my_robot'),
    ('openvla_oft', AS_WRITTEN, 'lora_adapter/', 'merged'),
    ('openvla_oft', Change(lambda f: shutil.rmtree(f / 'lora_adapter')), 'lora_adapter/', None),
]


@pytest.mark.parametrize(
    ('kind', 'change', 'about', 'says'),
    [pytest.param(*one, id=f'{one[0]}: {one[3] or f"nothing about {one[2]}"}') for one in NOTED],
)
def test_what_is_not_certain_is_told(
    tmp_path: Path, kind: str, change: Change, about: str, says: str | None
) -> None:
    notes = [note for note in planned(kind, tmp_path, change).notes if about in note]
    assert len(notes) == (says is not None)
    assert says is None or says in notes[0]


@pytest.mark.parametrize(
    ('kind', 'name', 'change'), [pytest.param(*one, id=f'{one[0]}: {one[1]}') for one in BECOMES]
)
def test_a_folder_becomes(tmp_path: Path, kind: str, name: str, change: Change) -> None:
    plan = planned(kind, tmp_path, change)
    check_tensors(plan.tensors, weight_shapes(plan.spec.family, plan.spec.dims))
    golden, found = GOLDEN / file_of(kind, name), text_of(plan)
    if not golden.exists():
        golden.write_text(found)
        pytest.fail(f'{golden.name} was missing and is written: read it')
    expected, found = yaml.safe_load(golden.read_text()), yaml.safe_load(found)
    statistics, wanted = found.pop('statistics'), expected.pop('statistics')
    assert found == expected
    assert statistics.keys() == wanted.keys()
    for key, values in statistics.items():
        assert values == pytest.approx(wanted[key], rel=1e-4), key


def file_of(kind: str, name: str) -> str:
    return f'{kind}-{name}.yaml'.replace(' ', '_')


def text_of(plan: ExportPlan) -> str:
    """policy.yaml without this release's number, and the statistics to five digits."""
    source = {key: text for key, text in plan.spec.source.items() if key != 'exported_by'}
    statistics = {
        name: [float(f'{value:.5g}') for value in values.flatten()]
        for name, values in plan.statistics.items()
    }
    beside = yaml.safe_dump({'statistics': statistics}, default_flow_style=None, width=100)
    return dump_spec(replace(plan.spec, source=source)) + beside


def test_rotations_of_xvla_are_written_as_one_says(tmp_path: Path) -> None:
    arm = both(config(action_mode='ee6d'), of_arm())
    plan = planned('xvla', tmp_path / 'form', both(arm, given(pose_rotation=INTERLEAVED)))
    (pose,) = plan.spec.poses
    assert (pose.name, pose.form, pose.actions) == ('left', INTERLEAVED, ARM[:9])
    # Also where the folder shows another form.
    libero = both(of_libero('ee6d', 10), given(pose_rotation=INTERLEAVED))
    (pose,) = planned('xvla', tmp_path / 'libero', libero).spec.poses
    assert pose.form == INTERLEAVED
    named = given(poses={'tool': ARM[:9]}, pose_rotation='rotation_6d_rows')
    (pose,) = planned('xvla', tmp_path / 'pose', both(arm, named)).spec.poses
    assert (pose.name, pose.form, pose.frame) == ('tool', 'rotation_6d_rows', 'base')


def test_no_golden_file_is_without_a_folder() -> None:
    named = {file_of(kind, name) for kind, name, _ in BECOMES}
    assert {path.name for path in GOLDEN.iterdir()} == named


def asked(folder: Path, options: ExportOptions) -> set[str]:
    with pytest.raises(REFUSED_AS) as caught:
        plan_export(folder, options, default_name='tiny')
    return set(re.findall(r'^  (--\S+)', str(caught.value), flags=re.M))


@pytest.mark.parametrize('kind', KINDS)
def test_all_that_a_folder_does_not_say_is_asked_for_at_once(tmp_path: Path, kind: str) -> None:
    folder, options = made(kind, tmp_path, AS_WRITTEN)
    # GR00T's later folders have their tokenizer elsewhere.
    backbone_of = options.tokenizer if 'groot' in kind else None
    assert asked(folder, ExportOptions(tokenizer=backbone_of)) == KINDS[kind].asks


@pytest.mark.parametrize(
    ('kind', 'change', 'pattern'),
    [
        pytest.param(kind, change, pattern, id=f'{kind}: {pattern}')
        for kind, rows in REFUSED.items()
        for change, pattern in rows
    ],
)
def test_what_cannot_be_reproduced_is_refused_by_name(
    tmp_path: Path, kind: str, change: Change, pattern: str
) -> None:
    folder, options = made(kind, tmp_path, change)
    with pytest.raises(REFUSED_AS, match=pattern):
        plan_export(folder, options, default_name='tiny')


# What is not read off the tensors, and sizes that are the published policy's.
FULL_SIZE = {
    'evo1': (
        evo1.NAMES,
        both(
            config(chunk_size=50, max_action_dim=24, max_state_dim=24, num_heads=8),
            config(image_resolution=[448, 448]),
            evo1_statistics(24),
        ),
        ('vision', 'pixel_shuffle', 'language', 'head', 'vocabulary', 'horizon'),
    ),
    'smolvla': (
        smolvla.NAMES,
        both(
            feature('third', [3, 480, 640]),
            config(chunk_size=50, resize_imgs_with_padding=[512, 512]),
        ),
        tuple(vars(SMOLVLA)),
    ),
}


@pytest.mark.parametrize('kind', FULL_SIZE)
def test_a_full_size_policy_is_planned_without_reading_its_weights(tmp_path: Path, kind: str):
    names, change, sizes = FULL_SIZE[kind]
    folder, options = made(kind, tmp_path, both(change, given(vision_heads=None, kv_heads=None)))
    path = folder / 'model.safetensors'
    write_sparse_checkpoint(path, full_size_shapes(kind, names, load_file(path)))
    dims = plan_export(folder, options, default_name='tiny').spec.dims
    for name in sizes:
        assert getattr(dims, name) == getattr(find_family(kind).presets[kind], name), name


@pytest.mark.parametrize('kind', ['bitvla', 'openvla', 'openvla_oft'])
def test_settings_of_a_flow_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    write_export(planned(kind, tmp_path, AS_WRITTEN), tmp_path / 'bundle')
    settings = {'seed': 7, 'denoise_steps': 5}
    if kind == 'openvla':
        settings |= {'rtc_mode': 'guided', 'rtc_horizon': 1}
    with closing(Policy.load(tmp_path / 'bundle', backend='torch')) as policy:
        for name, value in settings.items():
            with pytest.raises(ValueError, match=name):
                policy.check(PolicySettings(**{name: value}))
