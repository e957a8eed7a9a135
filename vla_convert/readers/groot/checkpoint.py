"""Checkpoints of GR00T: LeRobot's folders of type `groot` (N1.5, N1.7), NVIDIA's (N1.6, N1.7).

A folder holds encoders and decoders of every embodiment; the bundle gets those of one. It names
neither attention heads nor the tokenizer. NVIDIA's N1.5 folders are refused: the order of their
joints is in the training project's Python code.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import ClassVar

from vla_convert.checkpoints.adapters import is_adapter, refuse_unmerged
from vla_convert.checkpoints.dims import Heads, MakeDims, Shapes
from vla_convert.checkpoints.draft import Draft
from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.lerobot_folder import LeRobotPolicy, is_lerobot_folder
from vla_convert.checkpoints.lerobot_processors import PREPROCESSOR_FILE, read_pipeline
from vla_convert.checkpoints.reader import CheckpointReader, Source
from vla_convert.checkpoints.tensor_names import SIGLIP, Rows, TensorNames, under
from vla_convert.checkpoints.tensors import CheckpointError
from vla_convert.checkpoints.unread_keys import TRANSFORMERS_KEYS
from vla_convert.readers.groot.backbones import later_settings
from vla_convert.readers.groot.lerobot import PACK_STEP, PREPROCESSORS, fill_groot
from vla_convert.readers.groot.n17_folder import fill_n17, n17_embodiments
from vla_convert.readers.qwen3_vl import DIFFUSERS_BLOCK, DIT_HEAD, QWEN3, QWEN_TOWER
from vla_runtime.bundle.schema import ImageSpec
from vla_runtime.bundle.tensors import StoredTensor

# --- Tensor names of every version, NVIDIA's and LeRobot's

# LeRobot puts the first before NVIDIA's names. Eagle is N1.5's and N1.6's, Qwen3-VL N1.7's.
_GROOT = '(_groot_model.)'
_EAGLE = f'{_GROOT}backbone.(eagle_)model.'
_QWEN = f'{_GROOT}backbone.model.model.'
_HEAD = f'{_GROOT}action_head.'

_CONTEXT = {'norm1.*': 'norm1.*', 'norm3.*': 'norm2.*', **DIFFUSERS_BLOCK}
# The action head, every version's.
_HEAD_ROWS: Rows = {
    **DIT_HEAD,
    'vlln.*': 'context_norm.*',
    **under('vl_self_attention.transformer_blocks.{i}.', 'context.{i}.', _CONTEXT),
    '{state_encoder|action_decoder}.layer{1|2}.W': '{state_encoder|action_decoder}.fc{1|2}.weight',
    '{state_encoder|action_decoder}.layer{1|2}.b': '{state_encoder|action_decoder}.fc{1|2}.bias',
    **{
        f'action_encoder.{layer}.{theirs}': f'action_encoder.{name}.{ours}'
        for layer, name in (('W1', 'embed'), ('W2', 'mix'), ('W3', 'out'))
        for theirs, ours in (('W', 'weight'), ('b', 'bias'))
    },
}
NAMES = TensorNames(
    rows={
        **under(_HEAD, '', _HEAD_ROWS),
        **under(f'{_EAGLE}vision_model.vision_model.', 'vision.', SIGLIP),
        f'{_EAGLE}mlp1.{{i}}.*': 'vision.connector.{i}.*',
        **under(f'{_EAGLE}language_model.model.', 'language.', QWEN3),
        **under(f'{_QWEN}visual.', 'vision.', QWEN_TOWER),
        **under(f'{_QWEN}language_model.', 'language.', QWEN3),
    },
    unused=(
        # The backbone emits features, no text; the tower's pooled vector is not read.
        f'{_EAGLE}language_model.lm_head.weight',
        f'{_EAGLE}vision_model.vision_model.head.*',
        # N1.7's features are those before the last norm. Its mask token serves training.
        f'{_GROOT}backbone.model.lm_head.weight',
        f'{_QWEN}language_model.norm.weight',
        f'{_HEAD}mask_token',
    ),
)
# Tensors with a slice for each embodiment.
SLICED = ('state_encoder.', 'action_encoder.', 'action_decoder.')


_LOGGER = logging.getLogger(__name__)


# SigLIP So400m's; later versions' backbones say theirs.
_TOWER_HEADS = Heads({1152: 16})


class GrootReader(CheckpointReader):
    names = NAMES
    heads: ClassVar[Mapping[str, Heads]] = {
        'context.num_heads': Heads({2048: 32}),
        'dit.num_heads': Heads({1536: 32}),
    }
    known = (
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
    lerobot = (
        LeRobotPolicy(
            type='groot',
            template='chat',
            images=ImageSpec(padding='stretch', resample='bicubic_uint8'),
        ),
    )
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

    def read(self, draft: Draft) -> None:
        folder, of_lerobot = draft.folder, is_lerobot_folder(draft.folder)
        if of_lerobot and not is_adapter(folder):
            refuse_unmerged(folder)
        if draft.family != 'groot_n15':
            fill_n17(draft, draft.family)
            return
        if not of_lerobot:
            raise ExportError(
                f"{folder}: is a folder of NVIDIA's own; it does not say in which order state and "
                'actions are joined. Fine-tune or save the policy with LeRobot (type groot) first'
            )
        fill_groot(draft)

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
        shape, family = Shapes(source.tensors), self.family(source.folder, source.tensors)
        head_dim = shape('language.blocks.0.attention.k_norm.weight', 1)[0]
        keys = shape('language.blocks.0.attention.k.weight', 2)[0]
        given = {'language.num_kv_heads': max(1, keys // head_dim)}
        if family == 'groot_n15':
            return self.dims(source, given, heads={'vision.num_heads': _TOWER_HEADS, **self.heads})
        settings = later_settings(source, family)
        make = self.dims(source, {**given, **(settings or {})})
        # The facts ask for the images' sizes.
        return make if settings is not None and source.facts.image_sizes else None


def _slice(stored: StoredTensor, index: int, mapping: Path) -> StoredTensor:
    """The part of one embodiment; no byte is copied."""
    count = stored.shape[0] if stored.shape else 0
    if not 0 <= index < count:
        raise CheckpointError(
            f"{stored.path}: tensor '{stored.name}' has {count} embodiments but {mapping.name}"
            f' gives this one number {index}'
        )
    return stored.part(index)


READER = GrootReader()
