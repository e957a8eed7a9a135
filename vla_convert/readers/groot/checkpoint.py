"""Checkpoints of GR00T: LeRobot's folders of type `groot` (N1.5, N1.7), NVIDIA's (N1.6, N1.7).

A folder holds encoders and decoders of every embodiment; the bundle gets those of one. It names
neither attention heads nor the tokenizer. NVIDIA's N1.5 folders are refused: the order of their
joints is in the training project's Python code.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import ClassVar

from vla_convert.checkpoints.folder_facts import ExportError, FolderFacts, count_image_places
from vla_convert.checkpoints.lerobot_folder import is_lerobot_folder
from vla_convert.checkpoints.lerobot_processors import PREPROCESSOR_FILE, read_pipeline
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.checkpoints.reader import CheckpointReader, MakeDims, Source
from vla_convert.checkpoints.tensor_names import DECODER, SIGLIP, TensorNames, row, rows_under
from vla_convert.checkpoints.tensors import CheckpointError
from vla_convert.checkpoints.unread_keys import LEROBOT_KEYS, TRANSFORMERS_KEYS
from vla_convert.readers.block_sizes import (
    Shapes,
    checked_dims,
    decoder_dims,
    image_size_of,
    square_edge,
    vision_dims,
)
from vla_convert.readers.groot.lerobot import PACK_STEP, PREPROCESSORS, read_groot_folder
from vla_convert.readers.groot.n16_checkpoint import n16_sizes
from vla_convert.readers.groot.n17_checkpoint import n17_sizes
from vla_convert.readers.groot.n17_folder import n17_embodiments, read_n17_folder
from vla_convert.readers.groot.sizes import settle_stack_heads, stack_dims
from vla_runtime.bundle.schema import ImageSpec
from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.families.groot.declaration import N15_PROMPT
from vla_runtime.families.groot.dimensions import GrootDims

# --- Tensor names of every version, NVIDIA's and LeRobot's

# LeRobot puts this before NVIDIA's names.
_GROOT = r'(?:_groot_model\.)?'
# N1.5's and N1.6's.
_EAGLE = rf'{_GROOT}backbone\.(?:eagle_)?model\.'
_VISION = rf'{_EAGLE}vision_model\.vision_model\.'
_QWEN = rf'{_GROOT}backbone\.model\.model\.'
_TOWER = rf'{_QWEN}visual\.'
_HEAD = rf'{_GROOT}action_head\.'
_DIT = rf'{_HEAD}model\.'
_BLOCK = r'transformer_blocks\.(?P<i>\d+)\.'

_ATTENTION = (
    (r'attn1\.to_(?P<n>[qkv])', r'attention.\g<n>'),
    (r'attn1\.to_out\.0', 'attention.out'),
    (r'ff\.net\.0\.proj', 'mlp.fc1'),
    (r'ff\.net\.2', 'mlp.fc2'),
)
_LEAVES = ((r'W', 'weight'), (r'b', 'bias'))
_ENCODER_LAYERS = (('W1', 'embed'), ('W2', 'mix'), ('W3', 'out'))

# The action head, every version's.
_HEAD_ROWS = (
    row(rf'{_HEAD}position_embedding\.weight', 'positions'),
    *rows_under(_HEAD, '', ((r'vlln', 'context_norm'),)),
    *rows_under(
        rf'{_HEAD}vl_self_attention\.{_BLOCK}',
        r'context.\g<i>.',
        ((r'norm1', 'norm1'), (r'norm3', 'norm2'), *_ATTENTION),
    ),
    *rows_under(rf'{_DIT}{_BLOCK}', r'dit.\g<i>.', ((r'norm1\.linear', 'modulation'), *_ATTENTION)),
    *rows_under(
        _DIT,
        '',
        (
            (r'timestep_encoder\.timestep_embedder\.linear_1', 'time_in'),
            (r'timestep_encoder\.timestep_embedder\.linear_2', 'time_out'),
            (r'proj_out_1', 'out_modulation'),
            (r'proj_out_2', 'out'),
        ),
    ),
    *(
        row(rf'{_HEAD}{mlp}\.layer(?P<n>[12])\.{theirs}', rf'{mlp}.fc\g<n>.{ours}')
        for mlp in ('state_encoder', 'action_decoder')
        for theirs, ours in _LEAVES
    ),
    *(
        row(rf'{_HEAD}action_encoder\.{layer}\.{theirs}', f'action_encoder.{name}.{ours}')
        for layer, name in _ENCODER_LAYERS
        for theirs, ours in _LEAVES
    ),
)
_QWEN3 = (
    (r'layers\.(?P<i>\d+)\.self_attn\.(?P<n>[qk])_norm', r'blocks.\g<i>.attention.\g<n>_norm'),
    *DECODER,
)
_MERGER = ((r'norm', 'norm'), (r'linear_fc(?P<n>[12])', r'fc\g<n>'))

NAMES = TensorNames(
    rows=(
        *_HEAD_ROWS,
        # N1.5 and N1.6: Eagle.
        row(rf'{_HEAD}future_tokens\.weight', 'future_tokens'),
        row(rf'{_VISION}embeddings\.position_embedding\.weight', 'vision.position_embedding'),
        *rows_under(_VISION, 'vision.', SIGLIP),
        *rows_under(rf'{_EAGLE}language_model\.model\.', 'language.', _QWEN3),
        *rows_under(rf'{_EAGLE}mlp1\.', 'vision.connector.', ((r'(?P<i>\d+)', r'\g<i>'),)),
        # N1.7: Qwen3-VL.
        row(rf'{_TOWER}pos_embed\.weight', 'vision.position_embedding'),
        *rows_under(
            rf'{_QWEN}language_model\.', 'language.', [r for r in _QWEN3 if r[0] != 'norm']
        ),
        *rows_under(_TOWER, 'vision.', ((r'patch_embed\.proj', 'patch_embedding'),)),
        *rows_under(
            rf'{_TOWER}blocks\.(?P<i>\d+)\.',
            r'vision.blocks.\g<i>.',
            (
                (r'norm(?P<n>[12])', r'norm\g<n>'),
                (r'attn\.proj', 'attention.out'),
                (r'mlp\.linear_fc(?P<n>[12])', r'mlp.fc\g<n>'),
            ),
        ),
        *rows_under(rf'{_TOWER}merger\.', 'vision.merger.', _MERGER),
        *rows_under(
            rf'{_TOWER}deepstack_merger_list\.(?P<i>\d+)\.', r'vision.deepstack.\g<i>.', _MERGER
        ),
    ),
    packed=(
        (
            re.compile(rf'{_TOWER}blocks\.(?P<i>\d+)\.attn\.qkv\.(?P<leaf>weight|bias)'),
            tuple(rf'vision.blocks.\g<i>.attention.{name}.\g<leaf>' for name in 'qkv'),
        ),
    ),
    unused=(
        # The backbone emits features, no text; the tower's pooled vector is not read.
        re.compile(rf'{_EAGLE}language_model\.lm_head\.weight'),
        re.compile(rf'{_VISION}head\..*'),
        # N1.7's features are those before the last norm. Its mask token serves training.
        re.compile(rf'{_GROOT}backbone\.model\.lm_head\.weight'),
        re.compile(rf'{_QWEN}language_model\.norm\.weight'),
        re.compile(rf'{_HEAD}mask_token'),
    ),
)
# Tensors with a slice for each embodiment.
SLICED = ('state_encoder.', 'action_encoder.', 'action_decoder.')


_LOGGER = logging.getLogger(__name__)


_ALTERNATING = {'groot_n16': n16_sizes, 'groot_n17': n17_sizes}


class GrootReader(CheckpointReader):
    names = NAMES
    known = (
        *LEROBOT_KEYS,
        *TRANSFORMERS_KEYS,
        'chunk_size|max_(state|action)_dim|max_action_horizon|image_size|base_model_path',
        'model_version|tokenizer_assets_repo|n1_7_backbone_model|embodiment_tag',
        'tune_(llm|visual|projector|diffusion_model|vlln|top_llm_layers)',
        'lora_(rank|alpha|dropout|full_model)|warmup_ratio|use_bf16|video_backend',
        'balance_(dataset|trajectory)_weights|dataset_paths|output_dir|save_steps|max_steps',
        'batch_size|report_to|resume|dataloader_num_workers|rtc_ramp_rate|use_flash_attention',
        'model_params_fp32|relative_exclude_joints|action_feature_names',
        r'steps\[\d+\]\.config\.(raw_stats|modality_config|embodiment_mapping)(\..*)?',
        r'steps\[\d+\]\.config\.(language_key|env_action_dim|model_name|state_dropout_prob)',
        r'steps\[\d+\]\.config\.(libero_gripper_binarize|valid_action_horizon)',
        r'steps\[\d+\]\.config\.video_(horizon|modality_keys)',
        # NVIDIA also writes the processor's settings into config.json.
        'model_(type|dtype|name|revision)|backbone_(model_type|embedding_dim|trainable_params_fp32)',
        'select_layer|load_bf16|collator_overwrite_image_inputs|eagle_collator',
        'input_embedding_dim|attn_dropout|max_seq_len|noise_(beta_alpha|beta_beta|s)',
        'state_(dropout_prob|additive_noise_scale)|max_num_embodiments',
        'vl_self_attention_cfg(\\..*)?|statistics|processor_kwargs',
        r'diffusion_model_cfg\.(num_layers|num_attention_heads|attention_head_dim)',
        r'diffusion_model_cfg\.(dropout|final_dropout|output_dim)',
        r'(processor_kwargs\.)?(image_(crop|target)_size|shortest_image_edge|crop_fraction)',
        r'(processor_kwargs\.)?(random_rotation_angle|color_jitter_params|model_name|model_type)',
        r'(processor_kwargs\.)?(letter_box_transform|formalize_language|use_percentiles)',
        r'processor_kwargs\.max_(state_dim|action_dim|action_horizon)',
        r'(processor_kwargs\.)?(apply_sincos_state_encoding|use_relative_action)',
        r'(processor_kwargs\.)?(use_albumentations_transforms|extra_augmentation_config(\..*)?)',
        r'processor_kwargs\.(embodiment_id_mapping|modality_configs|statistics)(\..*)?',
        r'processor_kwargs\.(transformers_loading_kwargs(\..*)?|state_dropout_prob|clip_outliers)',
    )
    lerobot_types = ('groot',)
    projects = ("NVIDIA's GR00T N1.6 and N1.7",)
    wanted: ClassVar[Mapping[str, str]] = {
        '--tokenizer': (
            'tokenizer.json of the language model that the policy was trained from, from the '
            'Hugging Face Hub: N1.5 the Eagle processor (config.json: tokenizer_assets_repo), '
            'N1.7 nvidia/Cosmos-Reason2-2B; of N1.6 from Isaac-GR00T itself, '
            'gr00t/model/modules/nvidia/Eagle-Block2A-2B-v2'
        ),
        '--horizon': 'actions of a chunk (action_horizon of the base model; 16 in the published)',
    }

    def recognises(self, names: Collection[str]) -> bool:
        return any(name.startswith('action_head.vlln.') for name in names)

    def family(self, folder: Path, tensors: Mapping[str, StoredTensor]) -> str:
        if 'vision.merger.norm.weight' in tensors:
            return 'groot_n17'
        # N1.5's patches go through a convolution, N1.6's through a linear layer.
        patches = tensors.get('vision.patch_embedding.weight')
        return 'groot_n16' if patches is not None and len(patches.shape) == 2 else 'groot_n15'

    def read_folder(self, folder: Path, family: str, options: ExportOptions) -> FolderFacts:
        if family != 'groot_n15':
            return read_n17_folder(folder, family, options)
        if not is_lerobot_folder(folder):
            raise ExportError(
                f"{folder}: is a folder of NVIDIA's own; it does not say in which order state and "
                'actions are joined. Fine-tune or save the policy with LeRobot (type groot) first'
            )
        return read_groot_folder(folder, ImageSpec(padding='stretch', resample='bicubic_uint8'))

    def select(self, source: Source) -> dict[str, StoredTensor]:
        if self.family(source.folder, source.tensors) != 'groot_n15':
            stated, slots = n17_embodiments(source.folder, source.options)
        else:
            pack = read_pipeline(source.folder / PREPROCESSOR_FILE, PREPROCESSORS).step(PACK_STEP)
            stated, slots = pack.get('embodiment_tag', str), pack.mapping('embodiment_mapping')
        given = source.options.embodiment
        if given is not None and stated is not None and given.casefold() == stated.casefold():
            given = stated
        tag = source.missing.pick(
            '--embodiment',
            given,
            stated,
            'tag of the robot that the policy was trained for',
        )
        # LeRobot takes slice 0 for a tag that its mapping lacks (GrootPackInputsStep).
        index = slots.get(tag, int, 0) if tag is not None else 0
        if tag is not None and slots.get(tag, int, None) is None:
            _LOGGER.warning(
                '%s: embodiment_mapping has no %r; slice 0 is taken, as LeRobot does',
                slots.path,
                tag,
            )
        return {
            name: _slice(stored, index, slots.path) if name.startswith(SLICED) else stored
            for name, stored in source.tensors.items()
        }

    def sizes(self, source: Source) -> MakeDims | None:
        _, tensors, facts, options, missing = source
        if (alternating := _ALTERNATING.get(self.family(source.folder, tensors))) is not None:
            return alternating(source)
        shape = Shapes(tensors, 'GR00T N1.5')
        heads = settle_stack_heads(shape, ('vision', 'context', 'dit'), options, missing)
        tokenizer = facts.tokenizer or options.tokenizer
        if heads is None or tokenizer is None or not tokenizer.is_file():
            return None
        return lambda cameras, prompt_length, horizon: checked_dims(
            lambda: _dims(
                shape,
                heads,
                count_image_places(tokenizer, N15_PROMPT, cameras, prompt_length),
                cameras,
                prompt_length,
                horizon,
            )
        )


def _slice(stored: StoredTensor, index: int, mapping: Path) -> StoredTensor:
    """The part of one embodiment; no byte is copied."""
    count = stored.shape[0] if stored.shape else 0
    if not 0 <= index < count:
        raise CheckpointError(
            f"{stored.path}: tensor '{stored.name}' has {count} embodiments but {mapping.name}"
            f' gives this one number {index}'
        )
    return stored.part(index)


def _dims(
    shape: Shapes,
    heads: Mapping[str, int],
    places: tuple[int, ...],
    cameras: int,
    prompt_length: int,
    horizon: int,
) -> GrootDims:
    (head_dim,) = shape('language.blocks.0.attention.k_norm.weight', 1)
    keys, _ = shape('language.blocks.0.attention.k.weight', 2)
    vision = vision_dims(shape, heads['vision'], image_size_of(shape))
    layers = 2 if 'vision.connector.3.weight' in shape else 1
    _, inputs = shape(f'vision.connector.{layers - 1}.weight', 2)
    return GrootDims(
        vision=vision,
        pixel_shuffle=square_edge(inputs, vision.width, 'connector'),
        connector_layers=layers,
        language=decoder_dims(shape, 'language', max(1, keys // head_dim)),
        context=stack_dims(shape, 'context', heads['context']),
        dit=stack_dims(shape, 'dit', heads['dit']),
        head_width=shape('out.weight', 2)[0],
        future_tokens=shape('future_tokens', 2)[0],
        positions=shape('positions', 2)[0],
        vocabulary=shape('language.embedding.weight', 2)[0],
        cameras=cameras,
        image_places=places,
        prompt_length=prompt_length,
        horizon=horizon,
        action_dim=shape('action_encoder.embed.weight', 2)[0],
        state_dim=shape('state_encoder.fc1.weight', 2)[0],
    )


READER = GrootReader()
