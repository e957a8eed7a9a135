"""Checkpoints of X-VLA (arXiv 2510.10274): LeRobot's folders, in either layout of Florence-2.

LeRobot before 0.6, and so every checkpoint published until then, has the names of Microsoft's own
Florence-2, later ones those of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast, get_args

from vla_convert.checkpoints.dims import MakeDims, Shapes, check_stated
from vla_convert.checkpoints.draft import Draft
from vla_convert.checkpoints.folder_facts import (
    CONFIG_FILE,
    ExportError,
    FolderPose,
    expect,
    must_agree,
)
from vla_convert.checkpoints.lerobot_early import read_config
from vla_convert.checkpoints.lerobot_folder import LeRobotPolicy
from vla_convert.checkpoints.lerobot_processors import PREPROCESSOR_FILE, camera_statistics
from vla_convert.checkpoints.reader import CheckpointReader, Source
from vla_convert.checkpoints.tensor_names import TensorNames, under
from vla_convert.checkpoints.tensors import CheckpointError
from vla_runtime.bundle.schema import ImageSpec
from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.declarations.xvla import ACTION_SPACES, ActionMode
from vla_runtime.family.scheduler_config import common_image, pair
from vla_runtime.files.json_file import JsonMapping, read_json
from vla_runtime.files.typed_yaml import did_you_mean

# In parentheses what Microsoft's layout has between.
_HALF = 'blocks.{s}.{b}.{spatial|channel}_block.'
_OURS = 'stages.{s}.{b}.{spatial|channel}.'
_TOWER = {
    'convs.{s}.{conv|proj}.*': 'convs.{s}.conv.*',
    'convs.{s}.norm.*': 'convs.{s}.norm.*',
    f'{_HALF}conv{{1|2}}(.fn.dw).*': f'{_OURS}conv{{1|2}}.*',
    f'{_HALF}norm{{1|2}}.*': f'{_OURS}norm{{1|2}}.*',
    f'{_HALF}{{window|channel}}_attn.norm.*': f'{_OURS}norm1.*',
    f'{_HALF}ffn.norm.*': f'{_OURS}norm2.*',
    f'{_HALF}{{window|channel}}_attn(.fn).qkv.{{weight|bias}}': (
        f'{_OURS}attention.{{q,k,v}}.{{weight|bias}}'
    ),
    f'{_HALF}{{window|channel}}_attn(.fn).proj.*': f'{_OURS}attention.out.*',
    f'{_HALF}ffn(.fn.net).{{fc1|fc2}}.*': f'{_OURS}mlp.{{fc1|fc2}}.*',
}
_PROJECTOR = {
    'image_{position|pos}_embed.{row|column}_embeddings.weight': '{row|column}_positions',
    'image_projection(.weight)': 'projection.weight',
    'image_proj_norm.*': 'norm.*',
}
_ENCODER = {
    'embed_tokens.weight': 'encoder_embedding.weight',
    'embed_positions.weight': 'position_embedding',
    'layernorm_embedding.*': 'norm.*',
    **under(
        'layers.{i}.',
        'blocks.{i}.',
        {
            'self_attn.{q|k|v}_proj.*': 'attention.{q|k|v}.*',
            'self_attn.out_proj.*': 'attention.out.*',
            'self_attn_layer_norm.*': 'norm1.*',
            'final_layer_norm.*': 'norm2.*',
            '{fc1|fc2}.*': 'mlp.{fc1|fc2}.*',
        },
    ),
}
_HEAD = {
    'pos_emb': 'position_embedding',
    'soft_prompt_hub.weight': 'soft_prompts',
    'norm.*': 'norm.*',
    # A layer of the domain: matrices and biases are rows of two tables.
    'action_{encoder|decoder}.fc.weight': 'action_{encoder|decoder}.weight',
    'action_{encoder|decoder}.bias.weight': 'action_{encoder|decoder}.bias',
    'vlm_proj(.fc).weight': 'feature_projection.weight',
    'vlm_proj.bias(.weight)': 'feature_projection.bias',
    'aux_visual_proj(.fc).weight': 'view_projection.weight',
    'aux_visual_proj.bias(.weight)': 'view_projection.bias',
    'blocks.{i}.norm{1|2}.*': 'blocks.{i}.norm{1|2}.*',
    'blocks.{i}.attn.qkv.{weight|bias}': 'blocks.{i}.attention.{q,k,v}.{weight|bias}',
    'blocks.{i}.attn.proj.*': 'blocks.{i}.attention.out.*',
    'blocks.{i}.mlp.{fc1|fc2}.*': 'blocks.{i}.mlp.{fc1|fc2}.*',
}
_LANGUAGE = 'vlm.language_model.(model.)'
NAMES = TensorNames(
    rows={
        **under('vlm.vision_tower.', 'vision.', _TOWER),
        **under('vlm.(multi_modal_projector.)', 'vision.', _PROJECTOR),
        f'{_LANGUAGE}shared.weight': 'text.embedding.weight',
        **under(f'{_LANGUAGE}encoder.', 'text.', _ENCODER),
        **under('transformer.', '', _HEAD),
    },
    unused=(
        # Sines and cosines, of which the first row alone is seen.
        'vlm.(multi_modal_projector.)visual_temporal_embed.*',
        'vlm.language_model.{final_logits_bias|lm_head.weight}',
        f'{_LANGUAGE}decoder.*',
    ),
    tied={'text.encoder_embedding.weight': 'text.embedding.weight'},
)
# Tables with a row for each domain, and those that have one with `use_hetero_proj`.
_BY_DOMAIN = ('action_encoder', 'action_decoder')
_PROJECTIONS = ('feature_projection', 'view_projection')
_SOFT_PROMPTS = 'soft_prompts'

# ImageNet's, of the channels in [0, 1]: a step of its own normalises images.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SCALE = 'xvla_image_scale'
_TO_FLOAT, _NORMALISE = 'xvla_image_to_float', 'xvla_imagenet_normalize'
_DOMAIN = 'xvla_add_domain_id'
# Of LeRobot after 0.6.1: before a training it makes LIBERO's seven numbers poses, as `ee6d` has.
_LIBERO, _LIBERO_ACTIONS = 'xvla_libero_action_to_ee6d', 7
# What Florence-2 has where its configuration is silent.
_TOWER_KEYS: Mapping[str, tuple[str, list[Any]]] = {
    'num_heads': ('num_heads', [4, 8, 16, 32]),
    'groups': ('num_groups', [4, 8, 16, 32]),
    'strides': ('patch_stride', [4, 2, 2, 2]),
    'paddings': ('patch_padding', [3, 1, 1, 1]),
    'pre_norms': ('patch_prenorm', [False, True, True, True]),
}
# Numbers of an arm in `ee6d`: x, y, z, six of a rotation, a gripper.
_ARM = 10
# Domains of the published training by number (`DATA_DOMAIN_ID` of its authors' code).
_DOMAINS = (
    'Bridge RT1 Calvin libero widowx-air AIR-AGILEX-HQ robotwin2_abs_ee|robotwin2_clean '
    'robocasa-human VLABench AGIBOT-challenge AIR-AGILEX robomind-franka robomind-ur Droid-Left '
    'Droid-Right AGIBOT robomind-agilex robomind-franka-dual AIRBOT'
)
DOMAINS: Mapping[str, int] = {
    name: number for number, names in enumerate(_DOMAINS.split()) for name in names.split('|')
}

_PADDED = LeRobotPolicy(
    type='xvla',
    template='bart',
    images=ImageSpec(padding='left_top', resample='bilinear', bars=0.0),
    steps=(_TO_FLOAT, _NORMALISE, _DOMAIN, _SCALE, _LIBERO),
    action_steps=(_LIBERO,),
    keys={'denoise_steps': 'num_denoising_steps'},
    source=('action_mode', 'tokenizer_name', 'dtype'),
)
_AS_THEY_COME = replace(_PADDED, images=ImageSpec(padding='none', resample='none'))


class XvlaReader(CheckpointReader):
    names = NAMES
    lerobot = (_PADDED,)
    wanted: ClassVar[Mapping[str, str]] = {
        '--tokenizer': (
            'tokenizer.json of the model that config.json names as tokenizer_name '
            '(facebook/bart-large), from the Hugging Face Hub'
        ),
    }
    known = (
        'tokenizer_(name|padding_side)|hidden_size|mlp_ratio|depth|num_domains',
        'max_state_dim|max_action_dim|use_proprio|freeze_language_encoder',
        'train_(policy_transformer|soft_prompts)',
        'optimizer_soft_prompt(_warmup)?_lr_scale',
        r'florence_config\.(\w+_config\.)?(model_type|projection_dim|dropout|\w+_token_id)',
        r'florence_config\.text_config\.(decoder_\w+|(attention|activation)_dropout|encoder_layers)',
        r'florence_config\.text_config\.(encoder_ffn_dim|d_model|vocab_size|\w+_layerdrop)',
        r'florence_config\.(text_config\.)?(max_position_embeddings|classifier_dropout|init_std)',
        r'florence_config\.(text_config\.)?(is_encoder_decoder|num_hidden_layers|use_cache|dtype)',
        r'florence_config\.(vision_config\.)?(enable_checkpoint|dim_embed|embed_dim|depths)',
        r'florence_config\.vision_config\.(image_pos_embed|patch_size|drop_path_rate|mlp_ratio)(\..*)?',
        r'florence_config\.vision_config\.(max_\w+_embeddings|qkv_bias|in_channels)',
        r'florence_config\.vision_config\.visual_temporal_embedding\.max_temporal_embeddings',
        r'steps\[\d+\]\.config\.(padding_side|validate_range|\w+_scale|model_action_dim)',
    )

    def policy(self, config: JsonMapping) -> LeRobotPolicy | None:
        if super().policy(config) is None:
            return None
        return _PADDED if config.value('resize_imgs_with_padding') else _AS_THEY_COME

    def refuse_unserved(self, folder: Path) -> None:
        path = folder / CONFIG_FILE
        if not path.is_file():
            return
        config = read_json(path)
        if 'type' not in config and 'florence_config' in config and 'num_actions' in config:
            raise ExportError(
                f"{path}: is of X-VLA's authors; served are LeRobot's folders (0.4.3 and later, "
                'type xvla), such as lerobot/xvla-base on the Hugging Face Hub: train or '
                'fine-tune the policy with LeRobot'
            )

    def read(self, draft: Draft) -> None:
        super().read(draft)
        config = draft.config
        _check_steps(draft.folder)
        if (mode := config.mapping('normalization_mapping').get('VISUAL', str, 'IDENTITY')) != (
            'IDENTITY'
        ):
            raise config.error(
                'normalization_mapping', f'VISUAL {mode}, beside the step {_NORMALISE}'
            )
        draft.absent_cameras = 'left_out'
        # A view without a camera is no image that is hidden: it is zeros behind those that are.
        cameras = tuple(camera for camera in draft.cameras if camera.present)
        draft.write(config.place('input_features'), cameras=cameras)
        draft.normalisation = replace(draft.normalisation, images='mean_std_lerobot')
        draft.statistics = {**(draft.statistics or {}), **camera_statistics(cameras, _MEAN, _STD)}
        _write_actions(draft)
        if (dtype := config.get('dtype', str, 'float32')) != 'float32':
            draft.notes.append(
                f'LeRobot computes this policy in {dtype} throughout (dtype), noise and time '
                'included; float32 is exact here, and gives actions a little other than those'
            )
        views, note = _views(config)
        draft.source['views'] = str(views)
        draft.notes += note
        longest = config.count('max_state_dim') if config.get('use_proprio', bool, True) else 0
        if longest and (draft.state_length or 0) > longest:
            draft.notes.append(
                f'the state has {draft.state_length} numbers, of which the network sees the first '
                f'{longest} (max_state_dim): name these'
            )
            draft.write(config.place('max_state_dim'), state_length=longest)
        draft.write(config.place('max_state_dim'), state_dim=longest)

    def select(self, source: Source) -> dict[str, StoredTensor]:
        """Keep the layers and soft prompts of the domain that the folder names."""
        stated = _stated_domain(source.folder)
        given = source.options.embodiment
        found = source.missing.pick(
            '--embodiment',
            None if given is None else _number(given),
            stated,
            'domain of the training, a number or one of ' + ', '.join(DOMAINS),
        )
        source.facts.source['domain'] = str(found)
        return of_domain(source.tensors, found or 0)

    def sizes(self, source: Source) -> MakeDims | None:
        config, shape, facts = read_config(source.folder), Shapes(source.tensors), source.facts
        florence = config.mapping('florence_config')
        text, vision = florence.mapping('text_config'), florence.mapping('vision_config')
        expect(text, 'activation_function', 'gelu')
        _check_tower(vision)
        resize = pair(config, 'resize_imgs_with_padding')
        time_width = config.count('dim_time')
        action_dim = shape('action_decoder.bias', 1)[0]
        state_dim = shape('action_encoder.weight', 2)[0] - action_dim - time_width
        check_stated(source.missing, 'max_state_dim', facts.state_dim, state_dim)
        shape('vision.projection.weight', 2)
        stored = source.tensors['vision.projection.weight']
        given = {
            **{f'vision.{name}': _stages(vision, *key) for name, key in _TOWER_KEYS.items()},
            'vision.window': vision.count('window_size', 12),
            'vision.input_major': not stored.name.endswith('.weight'),
            'text.num_heads': text.count('encoder_attention_heads'),
            'text.scaled': text.get('scale_embedding', bool, False),
            'head.num_heads': config.count('num_heads'),
            'head.time_width': time_width,
            'head.by_domain': config.get('use_hetero_proj', bool, False),
            'image': resize or common_image(config, facts.image_sizes),
            'empty_views': lambda values: int(facts.source['views']) - values['cameras'],
            'action_mode': _action_mode(config),
            'state_dim': state_dim,
            'sees_padding': _sees_padding(config, source.folder),
        }
        return self.dims(source, given, config=config)


def _check_steps(folder: Path) -> None:
    """Refuse processors that prepare images otherwise than X-VLA's (ExportError, JsonError)."""
    for name in (_TO_FLOAT, _NORMALISE):
        step = _step(folder, name)
        if step is None:
            raise ExportError(
                f"{folder / PREPROCESSOR_FILE}: has no step '{name}', without which images go in "
                'otherwise: take the processors of the training'
            )
        if step.value('image_keys') is not None:
            raise step.error('image_keys', 'only null, all cameras, is supported')
    path, order = folder / PREPROCESSOR_FILE, (_SCALE, _TO_FLOAT, _NORMALISE)
    names = [step.get('registry_name', str, '') for step in read_json(path).mappings('steps')]
    found = [name for name in names if name in order]
    if found != sorted(found, key=order.index):
        raise ExportError(
            f'{path}: has the steps {", ".join(found)} in this order, in which images go in '
            f'otherwise; expected {", ".join(name for name in order if name in found)}: take the '
            'processors of the training'
        )


def _step(folder: Path, name: str) -> JsonMapping | None:
    """Settings of a step of the preprocessor; None: it has none of this name."""
    for step in read_json(folder / PREPROCESSOR_FILE).mappings('steps'):
        if step.get('registry_name', str, None) == name:
            return step.mapping('config', optional=True)
    return None


def _sees_padding(config: JsonMapping, folder: Path) -> bool:
    """Return whether prompts are padded (JsonError, ExportError); `longest` of one is none."""
    step = _step(folder, 'tokenizer_processor') or JsonMapping(folder / PREPROCESSOR_FILE, {})
    found, key = step.get('padding', str, 'max_length'), 'pad_language_to'
    must_agree(config, key, config.get(key, str, found), step, 'padding', found)
    if found not in ('max_length', 'longest'):
        raise step.error('padding', f"'{found}' is not supported; expected max_length or longest")
    return found == 'max_length'


def _action_mode(config: JsonMapping) -> ActionMode:
    mode = config.get('action_mode', str, 'ee6d').lower()
    known = get_args(ActionMode)
    if mode not in known:
        raise config.error(
            'action_mode', f"'{mode}' is not supported; expected one of {', '.join(known)}"
        )
    return cast(ActionMode, mode)


def _write_actions(draft: Draft) -> None:
    """Write what the action mode says of the columns (JsonError: it does not fit them)."""
    config = draft.config
    mode = _action_mode(config)
    space, length = ACTION_SPACES[mode], draft.action_length or 0
    padded = config.count('max_action_dim') if space.actions is None else None
    draft.write(config.place('max_action_dim'), action_dim=padded)
    if padded and length > padded:
        raise config.error(
            'output_features', f"action has {length} numbers, and action_mode '{mode}' {padded}"
        )
    of_libero = _step(draft.folder, _LIBERO) is not None
    if of_libero:
        _check_libero(config, mode, length)
    if space.actions:
        _check_length(config, mode, space.actions, space.arms, length)
    if space.grippers and not config.get('use_proprio', bool, True):
        raise config.error(
            'use_proprio',
            f"false with action_mode '{mode}', whose grippers are left out of the state too: "
            'LeRobot fails there, and so no policy was trained so',
        )
    if mode.endswith('ee6d') and not draft.options.poses:
        # That step writes one arm's rotation by columns, and leaves twenty numbers as they are.
        shown = of_libero and length == _ARM and draft.options.pose_rotation is None
        poses = (
            FolderPose(name, n, state=None, form='rotation_6d' if shown else None, is_delta=False)
            for name, n in zip(('left', 'right'), range(0, length, _ARM), strict=False)
        )
        draft.write(config.place('action_mode'), folder_poses=tuple(poses))


def _check_libero(config: JsonMapping, mode: ActionMode, length: int) -> None:
    """Refuse actions from before the step that makes LIBERO's numbers poses (JsonError)."""
    if mode != 'ee6d':
        raise config.error(
            'action_mode',
            f"'{mode}' beside the step {_LIBERO} of {PREPROCESSOR_FILE}, which makes all actions "
            "those of 'ee6d': take the processors of the training",
        )
    if length == _LIBERO_ACTIONS:
        raise config.error(
            'output_features',
            f"action has {length} numbers, LIBERO's from before the step {_LIBERO}, and the "
            'policy gives x, y, z, six numbers of a rotation and the gripper: write the shape [10]',
        )


def _check_length(
    config: JsonMapping, mode: ActionMode, actions: int, arms: int, length: int
) -> None:
    """Refuse actions that are not those of all arms, or of the first alone (JsonError)."""
    known = list(dict.fromkeys((actions // arms, actions)))
    if length not in known:
        shapes = ' or '.join(f'[{one}]' for one in known)
        raise config.error(
            'output_features',
            f"action has {length} numbers, and action_mode '{mode}' "
            f'{" (one arm) or ".join(map(str, known))}: write the shape of what the network was '
            f"trained on, {shapes}, or train with action_mode 'auto', which takes any",
        )


def _views(config: JsonMapping) -> tuple[int, list[str]]:
    """Return the views that the policy was trained with, and a note where LeRobot runs others.

    LeRobot raises `num_image_views` to its count of views before a training, and saves it, and its
    empty cameras as features. It counts these a second time when it reads the folder.
    """
    features = config.mapping('input_features')
    visual = [key for key in features.values if features.mapping(key).get('type', str) == 'VISUAL']
    empty, stated = config.get('empty_cameras', int, 0), config.count('num_image_views', None)
    saved = [key for key in visual if key.rpartition('.')[2].startswith('empty_camera_')]
    counted = len(visual) + empty
    if not saved or not empty:
        return max(stated or 0, counted), []
    once = counted - min(len(saved), empty)
    if stated is None or stated < once:
        raise config.error(
            'num_image_views',
            f'{"is missing" if stated is None else stated}, and {", ".join(saved)} is counted by '
            f'empty_cameras too: the folder does not show whether the policy was trained with '
            f'{once} views or with {counted}, as LeRobot runs it; write the number of the training',
        )
    if stated >= counted:
        return stated, []
    return stated, [
        f'the policy runs with the {stated} views that it was trained with (num_image_views); '
        f'LeRobot, which counts {", ".join(saved)} twice when it reads a folder, runs it with '
        f'{counted}, and gives other actions'
    ]


def _stated_domain(folder: Path) -> int | None:
    """Number of the domain that the folder states; None: each observation brought its own."""
    if read_json(folder / CONFIG_FILE).get('domain_feature_key', str, None):
        return None
    step = _step(folder, _DOMAIN)
    return 0 if step is None else step.get('domain_id', int, 0)


def _number(given: str) -> int:
    """Number of a domain that is given by number or name (ExportError: unknown)."""
    if given.isdecimal():
        return int(given)
    for name, number in DOMAINS.items():
        if name.casefold() == given.casefold():
            return number
    raise ExportError(
        f"--embodiment says '{given}', which is no domain of X-VLA's training: give its number, or "
        f'one of {", ".join(DOMAINS)}{did_you_mean(given, list(DOMAINS))}'
    )


def of_domain(tensors: Mapping[str, StoredTensor], domain: int) -> dict[str, StoredTensor]:
    """Cut one domain's layers out of those of all (CheckpointError: no such domain, or layer)."""
    chosen, shape = dict(tensors), Shapes(tensors)
    for name in ('norm.weight', *(f'{layer}.bias' for layer in (*_BY_DOMAIN, *_PROJECTIONS))):
        shape(name, 1, 2)
    for name, stored in domain_tables(tensors).items():
        if len(stored.shape) != 2 or not 0 <= domain < stored.shape[0]:
            raise CheckpointError(
                f"{stored.path}: tensor '{stored.name}' of shape {list(stored.shape)} has "
                f'{stored.shape[0] if stored.shape else 0} domains, from 0 on, and {domain} is '
                f'asked for ({PREPROCESSOR_FILE}, step {_DOMAIN}: domain_id): give the number of '
                'the training'
            )
        row = stored.part(domain)
        inner = row_shape(name, row.shape[0], tensors)
        if math.prod(inner) != row.shape[0]:
            raise CheckpointError(
                f"{stored.path}: tensor '{stored.name}' of shape {list(stored.shape)}: a row is no "
                f'whole number of {inner[-1]} outputs'
            )
        chosen[name] = replace(row, shape=inner)
    return chosen


def domain_tables(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors, under our names, with a row for each domain."""
    layers = list(_BY_DOMAIN)
    # Of a layer that is not of the domain the bias has one axis.
    layers += [name for name in _PROJECTIONS if len(tensors[f'{name}.bias'].shape) == 2]
    names = [f'{layer}.{part}' for layer in layers for part in ('weight', 'bias')]
    return {name: tensors[name] for name in [*names, _SOFT_PROMPTS] if name in tensors}


def row_shape(name: str, length: int, tensors: Mapping[str, Any]) -> tuple[int, ...]:
    """Shape of a domain's row: (inputs, outputs) of a matrix, (prompts, width) of soft prompts."""
    layer, _, part = name.rpartition('.')
    if part == 'bias':
        return (length,)
    width = tensors['norm.weight' if name == _SOFT_PROMPTS else f'{layer}.bias'].shape[-1]
    return length // width, width


def _stages(vision: JsonMapping, key: str, usual: list[Any]) -> tuple[Any, ...]:
    """A number or a yes for each stage (JsonError: something else)."""
    kind = type(usual[0])
    found = vision.get(key, list, usual)
    if not all(type(one) is kind and one >= 0 for one in found):
        raise vision.error(key, f'{found} where a list such as {usual} is expected')
    return tuple(found)


def _check_tower(vision: JsonMapping) -> None:
    """Refuse image features that X-VLA does not take (JsonError)."""
    usual = ['spatial_avg_pool', 'temporal_avg_pool']
    if (found := vision.get('image_feature_source', list, usual)) != usual:
        raise vision.error('image_feature_source', f'{found} is not supported; expected {usual}')
    expect(vision.mapping('visual_temporal_embedding', optional=True), 'type', 'COSINE')


READER = XvlaReader()
