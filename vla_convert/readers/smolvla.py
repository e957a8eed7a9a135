"""Checkpoints of SmolVLA: LeRobot's folders.

The folder lacks head counts (looked up by width) and tokenizer of its vision-language model.
"""

from __future__ import annotations

import re

from vla_convert.checkpoints.folder_facts import CONFIG_FILE
from vla_convert.checkpoints.lerobot_folder import LeRobotPolicy
from vla_convert.checkpoints.reader import VLM_TOKENIZER, CheckpointReader, MakeDims, Source
from vla_convert.checkpoints.tensor_names import DECODER, SIGLIP, TensorNames, row, rows_under
from vla_convert.checkpoints.unread_keys import LEROBOT_KEYS
from vla_convert.readers.block_sizes import (
    KnownHeads,
    Shapes,
    check_shown,
    checked_dims,
    decoder_dims,
    image_size_of,
    resolve_heads,
    square_edge,
    vision_dims,
)
from vla_runtime.bundle.schema import ImageSpec
from vla_runtime.families.smolvla.dimensions import SmolVlaDims
from vla_runtime.files.json_file import JsonMapping, read_json

_VLM = r'vlm_with_expert\.vlm\.(?:model\.)?'
_VISION = rf'{_VLM}vision_model\.'
NAMES = TensorNames(
    rows=(
        row(rf'{_VISION}embeddings\.position_embedding\.weight', 'vision.position_embedding'),
        *rows_under(_VISION, 'vision.', SIGLIP),
        *rows_under(rf'{_VLM}connector\.modality_projection\.', 'vision.', [('proj', 'projector')]),
        *rows_under(rf'{_VLM}text_model\.', 'language.', DECODER),
        *rows_under(r'vlm_with_expert\.lm_expert\.', 'expert.', DECODER),
        *rows_under(
            '',
            '',
            (
                (r'action_in_proj', 'action_in'),
                (r'action_out_proj', 'action_out'),
                (r'state_proj', 'state_projection'),
                (r'action_time_mlp_in', 'action_time_in'),
                (r'action_time_mlp_out', 'action_time_out'),
            ),
        ),
    ),
    # Neither the language model nor the expert emits text.
    unused=(re.compile(rf'(?:{_VLM}|vlm_with_expert\.lm_expert\.)lm_head\.weight'),),
)

# Heads of SmolVLM2's vision towers by width: SigLIP base (256M, 500M) and So400m (2.2B).
_VISION_HEADS = {768: 12, 1152: 16}
# Key/value heads of its language models by width: SmolLM2 135M, 360M and 1.7B.
_KV_HEADS = {576: 3, 960: 5, 2048: 32}


class SmolVlaReader(CheckpointReader):
    names = NAMES
    # SmolVLM2's.
    marks = ('<fake_token_around_image>', '<end_of_utterance>')
    known = (
        *LEROBOT_KEYS,
        'vlm_model_name|load_vlm_weights|num_vlm_layers|expert_width_multiplier',
        'use_cache|pad_language_to',
    )
    lerobot = (
        LeRobotPolicy(
            type='smolvla',
            template='task_line',
            images=ImageSpec(padding='left_top', resample='bilinear'),
            steps=('smolvla_new_line_processor',),
            fixed={
                'min_period': 0.004,
                'max_period': 4.0,
                'attention_mode': 'cross_attn',
                'add_image_special_tokens': False,
                'adapt_to_pi_aloha': False,
                'use_delta_joint_actions_aloha': False,
            },
            # LeRobot pads a prefix that is shorter than this.
            at_most={'prefix_length': 0},
            image_size_key='resize_imgs_with_padding',
            denoise_steps_key='num_steps',
            has_state_token=True,
            absent_cameras='left_out',
            summed_times=True,
        ),
    )
    wanted = VLM_TOKENIZER

    def sizes(self, source: Source) -> MakeDims | None:
        folder, tensors, facts, options, missing = source
        shape = Shapes(tensors, 'SmolVLA')
        check_shown(shape, facts, missing)
        known = KnownHeads(
            vision=_VISION_HEADS.get(shape('vision.patch_embedding.weight', 4)[0]),
            kv=_KV_HEADS.get(shape('language.embedding.weight', 2)[1]),
            vision_example='SmolVLM2 500M has 12',
            kv_example='SmolVLM2 500M has 5',
        )
        heads = resolve_heads(shape, known, options, missing)
        config = read_json(folder / CONFIG_FILE)
        _check_expert_layers(config, shape.depth('language.blocks'))
        # In LeRobot zero and less mean that no layer attends to itself; 2 is its default.
        every = max(0, config.get('self_attn_every_n_layers', int, 2))
        if heads is None:
            return None
        vision = vision_dims(shape, heads.vision, image_size_of(shape))
        return lambda cameras, prompt_length, horizon: checked_dims(
            lambda: SmolVlaDims(
                vision=vision,
                pixel_shuffle=square_edge(
                    shape('vision.projector.weight', 2)[1], vision.width, 'projector'
                ),
                language=decoder_dims(shape, 'language', heads.kv),
                expert=decoder_dims(shape, 'expert', heads.kv),
                self_attention_every=every,
                vocabulary=shape('language.embedding.weight', 2)[0],
                cameras=cameras,
                prompt_length=prompt_length,
                horizon=horizon,
                action_dim=shape('action_in.weight', 2)[1],
                state_dim=shape('state_projection.weight', 2)[1],
            )
        )


def _check_expert_layers(config: JsonMapping, depth: int) -> None:
    """Refuse an expert that takes part in some of the language model's layers alone (JsonError)."""
    layers = config.get('num_expert_layers', int, -1)
    if 0 < layers != depth:
        raise config.error(
            'num_expert_layers',
            f'{layers} is not supported; the expert of a policy that is served has as many layers '
            f'as its language model, here {depth} (LeRobot: num_expert_layers -1)',
        )


READER = SmolVlaReader()
