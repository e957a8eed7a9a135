"""Checkpoints of SmolVLA: LeRobot's folders.

The folder lacks head counts (looked up by width) and tokenizer of its vision-language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from vla_convert.checkpoints.dims import Heads, MakeDims, Shapes
from vla_convert.checkpoints.draft import Draft
from vla_convert.checkpoints.folder_facts import CONFIG_FILE
from vla_convert.checkpoints.lerobot_folder import LeRobotPolicy, summed_times
from vla_convert.checkpoints.reader import VLM_TOKENIZER, CheckpointReader, Source
from vla_convert.checkpoints.tensor_names import DECODER, SIGLIP, TensorNames, under
from vla_runtime.bundle.schema import ImageSpec
from vla_runtime.files.json_file import read_json

_VLM, _EXPERT = 'vlm_with_expert.vlm.(model.)', 'vlm_with_expert.lm_expert.'
NAMES = TensorNames(
    rows={
        **under(f'{_VLM}vision_model.', 'vision.', SIGLIP),
        f'{_VLM}connector.modality_projection.proj.*': 'vision.projector.*',
        **under(f'{_VLM}text_model.', 'language.', DECODER),
        **under(_EXPERT, 'expert.', DECODER),
        'action_in_proj.*': 'action_in.*',
        'action_out_proj.*': 'action_out.*',
        'action_time_mlp_{in|out}.*': 'action_time_{in|out}.*',
        'state_proj.*': 'state_projection.*',
    },
    # Neither the language model nor the expert emits text.
    unused=(f'{_VLM}lm_head.weight', f'{_EXPERT}lm_head.weight'),
)


class SmolVlaReader(CheckpointReader):
    names = NAMES
    # SigLIP base (256M, 500M) and So400m (2.2B); SmolLM2 135M, 360M and 1.7B.
    heads: ClassVar[Mapping[str, Heads]] = {
        'vision.num_heads': Heads({768: 12, 1152: 16}, 'SmolVLM2 500M has 12'),
        'language.num_kv_heads': Heads({576: 3, 960: 5, 2048: 32}, 'SmolVLM2 500M has 5'),
    }
    # SmolVLM2's.
    marks = ('<fake_token_around_image>', '<end_of_utterance>')
    known = (
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
            keys={
                'image_size': 'resize_imgs_with_padding',
                'denoise_steps': 'num_steps',
                'action_dim': 'max_action_dim',
                'state_dim': 'max_state_dim',
            },
        ),
    )
    wanted = VLM_TOKENIZER

    def read(self, draft: Draft) -> None:
        longest = draft.config.get('prefix_length', int, 0)
        if longest > 0:
            raise draft.config.error(
                'prefix_length', f'{longest} is not supported: LeRobot pads shorter prefixes'
            )
        super().read(draft)
        draft.absent_cameras = 'left_out'
        summed_times(draft)

    def sizes(self, source: Source) -> MakeDims | None:
        config = read_json(source.folder / CONFIG_FILE)
        depth = Shapes(source.tensors).depth('language.blocks')
        layers = config.get('num_expert_layers', int, -1)
        if 0 < layers != depth:
            raise config.error(
                'num_expert_layers',
                f'{layers} is not supported; the expert of a policy that is served has as many '
                f'layers as its language model, here {depth} (LeRobot: num_expert_layers -1)',
            )
        # In LeRobot zero and less mean that no layer attends to itself; 2 is its default.
        every = max(0, config.get('self_attn_every_n_layers', int, 2))
        return self.dims(source, {'self_attention_every': every})


READER = SmolVlaReader()
