"""Keys of a checkpoint's configurations that its reader did not ask for.

A fork or a newer release may have keys that change the network. `noting_keys` records what a
reader asks for; keys without a use are listed here for a project, in `CheckpointReader.known` for
a family. All others are reported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from vla_convert.checkpoints.folder_facts import CONFIG_FILE
from vla_convert.checkpoints.lerobot_processors import POSTPROCESSOR_FILE, PREPROCESSOR_FILE
from vla_runtime.files.json_file import NotedMappings
from vla_runtime.files.quotes import join_truncated, one_line

# Patterns of whole fields: `optimizer_lr`, `steps[2].config.device`. Names are whole: what a fork
# adds often begins as a known one does, and a pattern such as `noise_.*` would pass it in silence.
LEROBOT_KEYS = (
    'type|device|dtype|use_amp|use_peft|push_to_hub|repo_id|private|tags|license',
    'pretrained_(path|revision)|gradient_checkpointing|compile_(model|mode)',
    r'rtc_config(\..*)?|optimizer_(betas|eps)',
    'optimizer_(lr|lr_backbone|weight_decay|grad_clip_norm)',
    'scheduler_(name|warmup_steps|decay_steps|decay_lr)',
    'freeze_vision_encoder|train_expert_only|train_state_proj|dropout',
    'do_mask_loss_for_padding|drop_n_last_frames',
    # Part of a chunk that LeRobot's loop executes.
    'n_action_steps',
    '(input_features|output_features|normalization_mapping)(\\..*)?',
    # Processors.
    'name|steps',
    r'steps\[\d+\]\.(registry_name|class|config|state_file|artifacts)',
    r'steps\[\d+\]\.config\.(device|float_dtype|task_key|padding|truncation|tokenizer_name)',
    r'steps\[\d+\]\.config\.(features|norm_map|rename_map)(\..*)?',
    r'steps\[\d+\]\.config\.(max_state_dim|max_action_dim|exclude_joints|action_names)',
)
_OF_TRANSFORMERS = (
    '_name_or_path|architectures|auto_map|dtype|torch_dtype|transformers_version|model_type|'
    '_attn_implementation(_internal|_autoset)?|_commit_hash|is_composition|tokenizer_class|processor_class|prefix|'
    'return_dict(_in_generate)?|output_(attentions|hidden_states|scores|past|projector_states)|'
    'torchscript|use_bfloat16|use_cache|tf_legacy_loss|pruned_heads|'
    'is_decoder|is_encoder_decoder|add_cross_attention|cross_attention_hidden_size|'
    'tie_word_embeddings|tie_encoder_decoder|chunk_size_feed_forward|finetuning_task|problem_type|'
    'task_specific_params|id2label|label2id|num_labels|remove_invalid_values|'
    # Text generation.
    'max_length|min_length|do_sample|early_stopping|num_beams|num_beam_groups|diversity_penalty|'
    'temperature|top_k|top_p|typical_p|repetition_penalty|length_penalty|'
    '(encoder_)?no_repeat_ngram_size|bad_words_ids|num_return_sequences|'
    'forced_(bos|eos)_token_id|exponential_decay_length_penalty|'
    'suppress_tokens|begin_suppress_tokens|'
    '(bos|eos|pad|sep|unk|decoder_start)_token_id|'
    # Training, or shown by the tensors.
    'initializer_(range|factor)|attention_dropout|pretraining_tp|vocab_size|hidden_size|'
    'intermediate_size|num_hidden_layers|num_attention_heads|num_key_value_heads|num_channels|'
    'max_position_embeddings|patch_size|image_size|head_dim|projection_dim'
)
TRANSFORMERS_KEYS = (
    rf'(\w+_config\.)?({_OF_TRANSFORMERS})(\..*)?',
    # Image processors.
    'image_processor_type|size|crop_size',
)
_FILES = (
    CONFIG_FILE,
    PREPROCESSOR_FILE,
    POSTPROCESSOR_FILE,
    'preprocessor_config.json',
    'processor_config.json',
)
_LONGEST_VALUE = 60


def unread_notes(folder: Path, noted: NotedMappings, known: Sequence[str]) -> tuple[str, ...]:
    """Return a note for each configuration with unknown keys.

    `noted`: mappings that the reader looked into; `known`: patterns of whole fields without a use.
    """
    patterns = [re.compile(pattern) for pattern in known]
    notes = []
    for file in _FILES:
        unread = {}
        for (path, place), keys in noted.items():
            if path != folder / file:
                continue
            for key in keys.unread:
                field = f'{place}.{key}' if place else key
                if not any(pattern.fullmatch(field) for pattern in patterns):
                    unread[field] = keys.values[key]
        if unread:
            listed = join_truncated([_shown(*item) for item in unread.items()], ', ')
            notes.append(
                f'{file} has keys that this runtime does not know, and that are not of the '
                f'training alone: {listed}. Where one changes the network or what goes into it, '
                "the bundle's actions are not the policy's"
            )
    return tuple(notes)


def _shown(field: str, value: object) -> str:
    return f'{one_line(field, 200)}: {one_line(json.dumps(value, default=str), _LONGEST_VALUE)}'
