"""BitVLA (arXiv 2506.07530): SigLIP and BitNet b1.58 2B in ternary weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from vla_runtime.family.declaration import Family, NoTimes, no_inputs, prompt_and_state
from vla_runtime.family.dimensions import (
    DecoderDims,
    VisionDims,
    check_language,
    check_places,
    check_positive,
    check_vision,
    depth_of,
    size,
)
from vla_runtime.processing.prompts import PromptLayout

# --------------------------------------------------------------------------------------------------
# The sizes of BitVLA: one dataclass, a preset for the published model. Pure numbers.


@dataclass(frozen=True)
class BitVlaDims:
    """All that fixes the shapes of a BitVLA policy.

    Attributes:
        vision: the SigLIP tower, with the blocks that are run.
        ternary_vision: the tower's linear layers are ternary too.
        image_places: text tokens before each camera's image.
        state_place: text tokens before the token of the state.
        stop_token: token behind the places of the actions.
        action_dim: numbers of an action, each with a place of its own behind the prompt.
    """

    vision: VisionDims
    language: DecoderDims
    vocabulary: Annotated[int, size('language.embedding.weight')]
    cameras: int
    image_places: tuple[int, ...]
    state_place: int
    prompt_length: int
    stop_token: int
    horizon: int
    action_dim: Annotated[int, size('head.fc2.weight', stated='actions without padding')]
    state_dim: Annotated[
        int, size('state_projection.fc1.weight', axis=1, stated='state without padding')
    ]
    head_width: Annotated[int, size('head.fc2.weight', axis=1)]
    head_blocks: Annotated[int, depth_of('head.blocks', first='norm.weight')] = 2
    ternary_vision: bool = True
    rope_base: float = 5e5
    rms_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        check_vision(self.vision)
        check_language(self.language)
        check_positive(self, 'rope_base', 'rms_epsilon', 'head_width')
        check_positive(self, 'horizon', 'action_dim', 'state_dim')
        check_places(self.image_places, self.cameras, self.prompt_length)
        if not 0 <= self.state_place < self.prompt_length:
            raise ValueError(
                f'state_place {self.state_place} where a place among the prompt_length '
                f'{self.prompt_length} text tokens is expected'
            )
        if not 0 <= self.stop_token < self.vocabulary:
            raise ValueError(
                f'stop_token {self.stop_token} where a token of the vocabulary '
                f'{self.vocabulary} is expected'
            )
        if self.head_blocks < 0:
            raise ValueError(f'head_blocks {self.head_blocks} where 0 or more is expected')

    @property
    def image_size(self) -> int:
        return self.vision.image_size

    @property
    def image_tokens(self) -> int:
        """N, tokens of an image."""
        return self.vision.tokens

    @property
    def action_places(self) -> int:
        """K, places behind the prompt whose features the action head reads."""
        return self.horizon * self.action_dim

    @property
    def prefix_length(self) -> int:
        """P: images and prompt, the places of the actions, and the stop token."""
        return self.cameras * self.image_tokens + self.prompt_length + self.action_places + 1


# hongyuw/ft-bitvla-bitsiglipL-224px-libero_*-bf16: SigLIP So400m/14 up to its last block but one,
# BitNet b1.58 2B, two cameras.
BITVLA = BitVlaDims(
    vision=VisionDims(
        width=1152, depth=26, num_heads=16, mlp_dim=4304, patch_size=14, image_size=224
    ),
    language=DecoderDims(
        width=2560, depth=30, mlp_dim=6912, num_heads=20, num_kv_heads=5, head_dim=128
    ),
    vocabulary=128256,
    cameras=2,
    image_places=(39, 39),
    state_place=39,
    prompt_length=96,
    stop_token=128001,
    horizon=8,
    action_dim=7,
    state_dim=8,
    head_width=2560,
)


# --------------------------------------------------------------------------------------------------

_BEGIN, _END, _STATE = '<|begin_of_text|>', '<|eot_id|>', '<proprio_pad>'
# Token behind the places of the actions.
STOP = '<|end_of_text|>'
# The chat template that BitVLA's `convert_ckpt.py` writes into the tokenizer's settings.
PROMPT = PromptLayout(
    f'{_BEGIN}System: A chat between a curious human and an artificial intelligence assistant. The '
    "assistant gives helpful, detailed, and polite answers to the human's questions."
    f'{_END}User: {{images}}{_STATE}What action should the robot take to {{task}}?{_END}'
    'Assistant: ',
    image='{tokens}',
    bos=False,
    special=(_BEGIN, _END, _STATE, STOP),
)


FAMILIES = (
    Family(
        name='bitvla',
        title='BitVLA (arXiv 2506.07530)',
        head='single',
        dims=BitVlaDims,
        presets={'bitvla': BITVLA},
        templates={'bitvla': PROMPT},
        prefix_inputs=prompt_and_state,
        head_inputs=no_inputs,
        time_table=NoTimes,
        rounds_activations=True,
    ),
)
