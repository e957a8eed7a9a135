"""Checkpoints of Evo-1: LeRobot's folders.

The folder lacks head counts (looked up by width) and tokenizer of its vision-language model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from vla_convert.checkpoints.folder_facts import (
    CONFIG_FILE,
    ExportError,
    FolderFacts,
    count_image_places,
)
from vla_convert.checkpoints.lerobot_folder import LeRobotPolicy
from vla_convert.checkpoints.lerobot_processors import POSTPROCESSOR_FILE
from vla_convert.checkpoints.missing_facts import MissingFacts
from vla_convert.checkpoints.reader import VLM_TOKENIZER, CheckpointReader, MakeDims, Source
from vla_convert.checkpoints.tensor_names import DECODER, TensorNames, row, rows_under
from vla_convert.checkpoints.tensors import CheckpointError
from vla_convert.checkpoints.unread_keys import LEROBOT_KEYS
from vla_convert.readers.block_sizes import (
    KnownHeads,
    Shapes,
    check_stated,
    checked_dims,
    decoder_dims,
    image_size_of,
    resolve_heads,
    square_edge,
    vision_dims,
)
from vla_runtime.bundle.schema import ImageSpec
from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.families.evo1.declaration import PROMPT, Evo1Dims, HeadDims
from vla_runtime.files.json_file import JsonMapping, read_json

_VLM = r'embedder\.model\.'
_TOWER = rf'{_VLM}vision_tower\.'
_LAYER = r'encoder\.layer\.(?P<i>\d+)\.'
_HEAD = r'action_head\.'
_BLOCK = rf'{_HEAD}transformer_blocks\.(?P<i>\d+)\.'
NAMES = TensorNames(
    rows=(
        row(rf'{_TOWER}embeddings\.cls_token', 'vision.class_token'),
        row(rf'{_TOWER}embeddings\.position_embeddings', 'vision.position_embedding'),
        row(rf'{_TOWER}{_LAYER}lambda_(?P<n>[12])', r'vision.blocks.\g<i>.scale\g<n>'),
        *rows_under(
            _TOWER,
            'vision.',
            (
                (r'embeddings\.patch_embeddings\.projection', 'patch_embedding'),
                (rf'{_LAYER}layernorm_before', r'blocks.\g<i>.norm1'),
                (rf'{_LAYER}layernorm_after', r'blocks.\g<i>.norm2'),
                (rf'{_LAYER}attention\.(?P<n>[qkv])_proj', r'blocks.\g<i>.attention.\g<n>'),
                (rf'{_LAYER}attention\.projection_layer', r'blocks.\g<i>.attention.out'),
                (rf'{_LAYER}mlp\.(?P<n>fc[12])', r'blocks.\g<i>.mlp.\g<n>'),
            ),
        ),
        *rows_under(
            rf'{_VLM}multi_modal_projector\.',
            'vision.projector.',
            ((r'layer_norm', 'norm'), (r'linear_(?P<n>[12])', r'fc\g<n>')),
        ),
        *rows_under(rf'{_VLM}language_model\.', 'language.', DECODER),
        row(rf'{_HEAD}action_encoder\.pos_encoding\.pe', 'action_positions'),
        row(rf'{_HEAD}time_pos_enc\.pe', 'time_rows'),
        *rows_under(
            _BLOCK,
            r'blocks.\g<i>.',
            (
                (r'norm(?P<n>[12])', r'norm\g<n>'),
                (r'attn\.out_proj', 'attention.out'),
                (r'ff\.0', 'mlp.fc1'),
                (r'ff\.2', 'mlp.fc2'),
            ),
        ),
        # With one embodiment each of these is a layer, with several a stack of matrices.
        *rows_under(
            _HEAD,
            '',
            (
                (r'norm_out', 'norm'),
                (r'seq_pool_proj', 'pool'),
                (r'state_encoder\.(?P<n>fc[12])(?:\.linear)?', r'state_encoder.\g<n>'),
                (r'action_encoder\.W(?P<n>[123])(?:\.linear)?', r'action_encoder.fc\g<n>'),
                (r'mlp_head\.(?P<n>fc[12])(?:\.linear)?', r'velocity_head.\g<n>'),
            ),
        ),
    ),
    packed=(
        (
            re.compile(rf'{_BLOCK}attn\.in_proj_(?P<leaf>weight|bias)'),
            tuple(rf'blocks.\g<i>.attention.{part}.\g<leaf>' for part in ('q', 'k', 'v')),
        ),
    ),
)
# Layers with a matrix for each embodiment.
_EMBODIMENT = re.compile(r'(state_encoder|action_encoder|velocity_head)\.fc[123]\.(weight|bias)')
# Heads of InternVL3's vision towers by width: InternViT-300M.
_VISION_HEADS = {1024: 16}
# Key/value heads of its language models by width: Qwen2.5 0.5B and 1.5B.
_KV_HEADS = {896: 2, 1536: 2}
# Text tokens of a prompt: those around three images, 20, and an instruction; LeRobot pads to the
# longest of a batch.
_PROMPT_LENGTH = 68
_ACTION_STEP = 'evo1_action_processor'


class Evo1Reader(CheckpointReader):
    names = NAMES
    known = (
        *LEROBOT_KEYS,
        'training_stage|apply_training_stage_defaults|enable_gradient_checkpointing',
        'gradient_checkpointing_use_reentrant|enable_vlm_gradient_checkpointing',
        'finetune_(vlm|language_model|vision_model|action_head)',
        'max_text_length|vlm_(model_name|num_layers|dtype)|use_flash_attn',
        'embed_dim|hidden_dim|state_hidden_dim|num_layers|num_categories',
        'task_field|embodiment_id_field',
        # Of binarize_gripper, which is refused.
        r'(steps\[\d+\]\.config\.)?gripper_(index|threshold)',
        r'(steps\[\d+\]\.config\.)?gripper_(below|above)_threshold_value',
    )
    lerobot = (
        LeRobotPolicy(
            type='evo1',
            template='after_images',
            images=ImageSpec(padding='stretch', resample='bicubic'),
            steps=('evo1_pad_state_processor', 'evo1_pad_action_processor', _ACTION_STEP),
            fixed={
                'action_head': 'flowmatching',
                'return_cls_only': False,
                'binarize_gripper': False,
            },
            image_size_key='image_resolution',
            # ImageNet's, by channel.
            image_statistics=((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            views_key='max_views',
            denoise_steps_key='num_inference_timesteps',
            usual_prompt_length=_PROMPT_LENGTH,
            has_state_token=True,
            source=('vlm_model_name', 'default_embodiment_id'),
        ),
    )
    wanted = VLM_TOKENIZER

    def refuse_unserved(self, folder: Path) -> None:
        path = folder / CONFIG_FILE
        if not path.is_file():
            return
        config = read_json(path)
        if 'type' not in config and 'vlm_name' in config and 'per_action_dim' in config:
            raise ExportError(
                f"{path}: is of Evo-1's authors, who keep weights and statistics in another form; "
                "served are LeRobot's folders (0.6 and later, type evo1): train or fine-tune the "
                'policy with LeRobot'
            )

    def select(self, source: Source) -> dict[str, StoredTensor]:
        """Keep the matrices of the embodiment that config.json names (`default_embodiment_id`)."""
        stated = read_json(source.folder / CONFIG_FILE).get('default_embodiment_id', int, 0)
        source.missing.pick(
            '--embodiment', source.options.embodiment, str(stated), 'number of the embodiment'
        )
        return of_embodiment(source.tensors, stated)

    def sizes(self, source: Source) -> MakeDims | None:
        folder, tensors, facts, options, missing = source
        shape, config = Shapes(tensors, 'Evo-1'), read_json(folder / CONFIG_FILE)
        _check_action_step(folder, config, facts, missing)
        states, actions = (
            shape(f'{encoder}_encoder.fc1.weight', 2) for encoder in ('state', 'action')
        )
        input_major = _input_major(tensors)
        inputs = 0 if input_major else 1
        state_dim, action_dim = states[inputs], actions[inputs]
        image_size = image_size_of(shape, class_tokens=1)
        check_stated(
            missing,
            (facts.image_size_key, facts.image_size, image_size),
            ('chunk_size', facts.horizon, shape('action_positions', 3)[1]),
            ('action dimensions', facts.action_dim, action_dim),
            ('state dimensions', facts.state_dim, state_dim),
        )
        known = KnownHeads(
            vision=_VISION_HEADS.get(shape('vision.patch_embedding.weight', 4)[0]),
            kv=_KV_HEADS.get(shape('language.embedding.weight', 2)[1]),
            vision_example='InternVL3-1B has 16',
            kv_example='InternVL3-1B has 2',
        )
        heads = resolve_heads(shape, known, options, missing)
        tokenizer = facts.tokenizer or options.tokenizer
        if heads is None or tokenizer is None or not tokenizer.is_file():
            return None  # The exporter asks for a tokenizer itself.
        head_heads = config.count('num_heads')
        vision = vision_dims(shape, heads.vision, image_size)
        (joined,) = shape('vision.projector.norm.weight', 1)
        edge = square_edge(joined, vision.width, 'projector')
        return lambda cameras, prompt_length, horizon: checked_dims(
            lambda: Evo1Dims(
                vision=vision,
                pixel_shuffle=edge,
                language=decoder_dims(shape, 'language', heads.kv),
                head=_head_dims(shape, head_heads),
                vocabulary=shape('language.embedding.weight', 2)[0],
                cameras=cameras,
                image_places=count_image_places(tokenizer, PROMPT, cameras, prompt_length),
                prompt_length=prompt_length,
                horizon=horizon,
                action_dim=action_dim,
                real_actions=facts.action_length or action_dim,
                state_dim=state_dim,
                input_major=input_major,
            )
        )


def of_embodiment(tensors: Mapping[str, StoredTensor], embodiment: int) -> dict[str, StoredTensor]:
    """Cut one embodiment's matrices out of those of all; CheckpointError: no such embodiment."""
    chosen = dict(tensors)
    for name, stored in tensors.items():
        axes = 3 if name.endswith('weight') else 2
        if not _EMBODIMENT.fullmatch(name) or len(stored.shape) != axes:
            continue
        matrices = stored.shape[0]
        if not 0 <= embodiment < matrices:
            raise CheckpointError(
                f"{stored.path}: tensor '{stored.name}' has matrices of {matrices} embodiments, "
                f'but default_embodiment_id in {CONFIG_FILE} is {embodiment}; set it to 0 to '
                f'{matrices - 1}'
            )
        chosen[name] = stored.part(embodiment)
    return chosen


def _check_action_step(
    folder: Path, config: JsonMapping, facts: FolderFacts, missing: MissingFacts
) -> None:
    """Note a step behind the network that cuts or switches actions otherwise than this runtime."""
    if config.value('postprocess_action_dim') not in (None, facts.action_length):
        missing.conflict(
            f'config.json says postprocess_action_dim {config.values["postprocess_action_dim"]} '
            f'but {facts.action_length} action dimensions; only equal ones are supported'
        )
    for step in read_json(folder / POSTPROCESSOR_FILE).mappings('steps'):
        if step.get('registry_name', str, None) != _ACTION_STEP:
            continue
        found = step.mapping('config', optional=True)
        if found.get('binarize_gripper', bool, False):
            raise found.error(
                'binarize_gripper', 'True is not supported; this runtime does not switch actions'
            )
        kept = found.count('action_dim', facts.action_length)
        if kept != facts.action_length:
            raise found.error(
                'action_dim', f'{kept} where the {facts.action_length} of {CONFIG_FILE} is expected'
            )


def _input_major(tensors: Mapping[str, StoredTensor]) -> bool:
    """Return whether the checkpoint is for several embodiments: its matrices are no layers."""
    return not tensors['state_encoder.fc1.weight'].name.endswith('.linear.weight')


def _head_dims(shape: Shapes, num_heads: int) -> HeadDims:
    return HeadDims(
        depth=shape.depth('blocks'),
        num_heads=num_heads,
        mlp_dim=shape('blocks.0.mlp.fc1.weight', 2)[0],
        state_hidden=shape('state_encoder.fc1.bias', 1)[0],
        velocity_hidden=shape('velocity_head.fc1.bias', 1)[0],
    )


READER = Evo1Reader()
