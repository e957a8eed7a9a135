"""VLA-JEPA (arXiv 2602.10098): Qwen3-VL's features at tokens of the prompt, and a DiT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from vla_runtime.family.declaration import Family, RowInput, prompt_inputs, state_input
from vla_runtime.family.dimensions import (
    DecoderDims,
    Most,
    check_language,
    check_places,
    check_positive,
    size,
)
from vla_runtime.family.dit import DitDims, DitTimeTable, StackDims
from vla_runtime.family.frame_vision import FrameVisionDims, SquaredImages, check_sections
from vla_runtime.processing.prompts import PromptLayout

# The tokens that are added to Qwen3-VL's: those of a frame, and those that the head reads.
FRAME_TOKEN, READ_TOKEN = '<|action_{}|>', '<|embodied_action|>'
FRAMES, READ = '{actions}', '{e_actions}'


@dataclass(frozen=True, kw_only=True)
class VlaJepaDims(SquaredImages, DitDims):
    """All that fixes the shapes of a VLA-JEPA policy.

    Attributes:
        rope_sections: pairs of a head's numbers that turn by time, by row and by column.
        dit: even blocks attend to the features, odd ones to the tokens themselves.
        head_width: output of the DiT, and hidden numbers of the encoder and decoder.
        positions: rows of the table of action positions.
        future_tokens: learned tokens before the actions, and tokens of the prompt whose features
            the head reads, as many.
        tokens_behind: tokens of the prompt behind these.
        frames, frame_tokens: frames in the prompt, and tokens that stand for each.
        image_places: text tokens before each image, in the order of the cameras.
        prompt_length: text tokens of the padded prompt, without image tokens.
        state_dim: 0 for a policy that sees no state.
    """

    vision: FrameVisionDims
    image: tuple[int, int]
    language: DecoderDims
    rope_sections: tuple[int, int, int]
    dit: StackDims
    head_width: Annotated[int, size('out.weight'), Most(16384)]
    positions: Annotated[int, size('positions'), Most(65536)]
    future_tokens: Annotated[int, size('future_tokens')]
    vocabulary: Annotated[int, size('language.embedding.weight')]
    tokens_behind: Annotated[int, Most(4096)]
    frames: Annotated[int, Most(1024)]
    frame_tokens: Annotated[int, Most(4096)]
    cameras: int
    image_places: tuple[int, ...]
    prompt_length: int
    horizon: int
    action_dim: Annotated[
        int, size('action_encoder.embed.weight', axis=1, stated='action dimensions')
    ]
    state_dim: int = 0
    rope_base: float = 5e6
    rms_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        check_sections(self.rope_sections, self.language)
        self.check_squares()
        check_language(self.language)
        self.check_dit()
        check_positive(self, 'rope_base', 'rms_epsilon', 'future_tokens')
        check_places(self.image_places, self.cameras, self.prompt_length)
        if self.future_tokens + self.tokens_behind > self.prompt_length:
            raise ValueError(
                f'future_tokens {self.future_tokens} and the {self.tokens_behind} tokens_behind do '
                f'not fit into a prompt of {self.prompt_length} tokens (prompt_length)'
            )

    @property
    def prefix_length(self) -> int:
        """P: image tokens of all cameras, and text tokens."""
        return self.cameras * self.image_tokens + self.prompt_length

    @property
    def prompt_marks(self) -> dict[str, str]:
        frames = (FRAME_TOKEN.format(frame) * self.frame_tokens for frame in range(self.frames))
        return {FRAMES: ''.join(frames), READ: READ_TOKEN * self.future_tokens}


# The sizes of LeRobot's defaults on Qwen/Qwen3-VL-2B-Instruct, with two cameras of LIBERO.
VLA_JEPA = VlaJepaDims(
    vision=FrameVisionDims(
        width=1024,
        depth=24,
        num_heads=16,
        mlp_dim=4096,
        patch_size=16,
        merge=2,
        positions=48,
        deepstack=(6, 12, 18),
    ),
    image=(256, 256),
    language=DecoderDims(
        width=2048, depth=28, mlp_dim=6144, num_heads=16, num_kv_heads=8, head_dim=128
    ),
    rope_sections=(24, 20, 20),
    dit=StackDims(depth=16, num_heads=12, head_dim=64, mlp_dim=3072),
    head_width=1024,
    positions=1024,
    future_tokens=32,
    vocabulary=151936,
    tokens_behind=6,
    frames=3,
    frame_tokens=8,
    cameras=2,
    image_places=(4, 6),
    prompt_length=192,
    horizon=7,
    action_dim=7,
    state_dim=8,
)

# Qwen3-VL's chat template with a user's images and the training's sentence.
PROMPT = PromptLayout(
    '<|im_start|>user\n{images}Your task is {task}. Infer the temporal dynamics from frames '
    f'{FRAMES} and produce the corresponding policy actions {READ}.<|im_end|>\n'
    '<|im_start|>assistant\n',
    image='<|vision_start|>{tokens}<|vision_end|>',
    bos=False,
    # Without those that the training adds.
    special=('<|im_start|>', '<|im_end|>', '<|vision_start|>', '<|vision_end|>'),
)


def _head_inputs(dims: VlaJepaDims) -> dict[str, RowInput]:
    return state_input(dims) if dims.state_dim else {}


FAMILIES = (
    Family(
        name='vla_jepa',
        title='VLA-JEPA (arXiv 2602.10098)',
        head='flow',
        dims=VlaJepaDims,
        presets={'vla_jepa': VLA_JEPA},
        templates={'chat': PROMPT},
        prefix_inputs=prompt_inputs,
        head_inputs=_head_inputs,
        time_table=DitTimeTable,
        flow_steps=4,
    ),
)
