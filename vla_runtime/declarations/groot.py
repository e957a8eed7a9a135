"""GR00T N1.5, N1.6 and N1.7 (arXiv 2503.14734): a language model's features and a DiT."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

from vla_runtime.family.declaration import Family, prompt_inputs, state_input
from vla_runtime.family.dimensions import (
    DecoderDims,
    Most,
    Shown,
    ShuffledImages,
    TensorShapes,
    VisionDims,
    check_heads,
    check_language,
    check_places,
    check_positive,
    depth_of,
    size,
    squares_joined,
)
from vla_runtime.family.dit import DitDims, DitTimeTable, StackDims
from vla_runtime.family.frame_vision import (
    FrameVisionDims,
    SquaredImages,
    check_sections,
    table_side,
)
from vla_runtime.family.performance_figures import PerformanceFigures, vla_cpp_runs
from vla_runtime.processing.prompts import PromptLayout

# --------------------------------------------------------------------------------------------------


# Euler steps of the published base models.
DENOISE_STEPS = 4
# Text tokens of a prompt: the layout of several cameras and a long task.
USUAL_PROMPT_LENGTH = 128


@dataclass(frozen=True, kw_only=True)
class HeadDims(DitDims):
    """Sizes of GR00T's action head and of what it stands on, for one embodiment.

    Attributes:
        language: Qwen3 decoder layers that the checkpoint keeps.
        dit: cross- and self-attention over state, future and action tokens. Even blocks attend to
            the context, odd ones to the tokens themselves.
        head_width: output of the DiT, and hidden numbers of the embodiment's encoder and decoder.
        positions: rows of the table of action positions.
        cameras: images of an observation; an earlier frame of a camera is an image of its own.
        image_places: text tokens before each image, padding before the prompt among them, in the
            order of the cameras.
        prompt_length: text tokens of the padded prompt, without image tokens.
        action_dim, state_dim: padded; the state's of all its time steps together.
    """

    language: DecoderDims
    dit: StackDims
    head_width: Annotated[int, size('out.weight'), Most(16384)]
    positions: Annotated[int, size('positions'), Most(65536)]
    vocabulary: Annotated[int, size('language.embedding.weight')]
    cameras: int
    image_places: tuple[int, ...]
    prompt_length: int
    horizon: int
    action_dim: Annotated[int, size('action_encoder.embed.weight')]
    state_dim: Annotated[int, size('state_encoder.fc1.weight')]
    rope_base: float = 1e6
    rms_epsilon: float = 1e-6
    # Layers of an embodiment are stored so.
    input_major = True

    if TYPE_CHECKING:
        # Fields or constants of each version.
        @property
        def context(self) -> StackDims | None: ...
        @property
        def future_tokens(self) -> int: ...

    @property
    def image_tokens(self) -> int:
        """N, tokens of one image."""
        raise NotImplementedError

    @property
    def prefix_length(self) -> int:
        """P: image tokens of all cameras, and text tokens."""
        return self.cameras * self.image_tokens + self.prompt_length

    def check_head(self) -> None:
        self.check_dit()
        if self.state_steps < 1 or self.state_dim % self.state_steps:
            raise ValueError(
                f'state_dim {self.state_dim} is not a multiple of state_steps {self.state_steps}'
            )
        check_positive(self, 'rope_base', 'rms_epsilon')


@dataclass(frozen=True, kw_only=True)
class AlternatingDims(SquaredImages, HeadDims):
    """Sizes of a head whose cross-attention blocks read either the text or the images.

    Attributes:
        image: height and width of every camera's image in pixels.
        text_every: every so many cross-attention blocks the first attends to the text, the others
            to the images.
        real_horizon: first actions of the chunk that the embodiment has.
    """

    image: tuple[int, int]
    text_every: int
    real_horizon: int
    future_tokens = 0

    @property
    def text_blocks(self) -> tuple[int, ...]:
        return self.cross_blocks[:: self.text_every]

    @property
    def image_blocks(self) -> tuple[int, ...]:
        return tuple(block for block in self.cross_blocks if block not in self.text_blocks)

    def check_alternation(self) -> None:
        """Raise ValueError if the sizes of images, prompt and head do not fit each other."""
        self.check_squares()
        check_language(self.language)
        self.check_head()
        if self.text_every < 1:
            raise ValueError('text_every 0 where at least 1 is expected')
        if not 1 <= self.real_horizon <= self.horizon:
            raise ValueError(
                f'real_horizon {self.real_horizon} where 1 to horizon {self.horizon} is expected'
            )
        check_places(self.image_places, self.cameras, self.prompt_length)


def _connector_layers(shape: TensorShapes) -> int:
    return 2 if 'vision.connector.3.weight' in shape else 1


def _pixel_shuffle(shape: TensorShapes) -> int:
    first = f'vision.connector.{_connector_layers(shape) - 1}.weight'
    return squares_joined(first, tower='vision.').read(shape)


@dataclass(frozen=True, kw_only=True)
class GrootDims(ShuffledImages, HeadDims):
    """All that fixes the shapes of a GR00T N1.5 policy for one embodiment.

    Attributes:
        pixel_shuffle: edge of the square of patches that becomes one image token; 1: each patch.
        connector_layers: linear layers from patches to the language model: 1, or 2 with a norm.
        context: self-attention over the language model's features; its blocks are as wide as those.
        future_tokens: learned tokens between state and actions.
    """

    vision: VisionDims
    pixel_shuffle: Annotated[int, Shown(_pixel_shuffle)]
    connector_layers: Annotated[int, Shown(_connector_layers)]
    context: StackDims
    future_tokens: Annotated[int, size('future_tokens')]

    def __post_init__(self) -> None:
        self.check_images()
        if self.connector_layers not in (1, 2):
            raise ValueError(f'connector_layers {self.connector_layers} where 1 or 2 is expected')
        check_language(self.language)
        self.check_head()
        check_places(self.image_places, self.cameras, self.prompt_length)


# nvidia/GR00T-N1.5-3B: SigLIP 2 at 224 pixels, twelve layers of Qwen3 1.7B, sixteen DiT blocks.
# Two cameras and LeRobot's chat template: 20 text tokens before the first image, 7 between two.
GROOT_N15 = GrootDims(
    vision=VisionDims(
        width=1152, depth=27, num_heads=16, mlp_dim=4304, patch_size=14, image_size=224
    ),
    pixel_shuffle=1,
    connector_layers=1,
    language=DecoderDims(
        width=2048, depth=12, mlp_dim=6144, num_heads=16, num_kv_heads=8, head_dim=128
    ),
    context=StackDims(depth=4, num_heads=32, head_dim=64, mlp_dim=8192),
    dit=StackDims(depth=16, num_heads=32, head_dim=48, mlp_dim=6144),
    head_width=1024,
    future_tokens=32,
    positions=1024,
    vocabulary=151680,
    cameras=2,
    image_places=(20, 27),
    prompt_length=64,
    horizon=16,
    action_dim=32,
    state_dim=64,
)


# --------------------------------------------------------------------------------------------------


def _patch_size(shape: TensorShapes) -> int:
    """Edge of a square patch of 3 channels, all of whose numbers a linear layer takes."""
    inputs = shape('patch_embedding.weight', 2)[1]
    patch = math.isqrt(inputs // 3)
    if 3 * patch**2 != inputs:
        raise ValueError(
            f'the vision tower has patches of {inputs} numbers; square ones of 3 channels are '
            'expected'
        )
    return patch


@dataclass(frozen=True)
class Siglip2Dims:
    """Eagle's SigLIP 2 tower (arXiv 2502.14786) for images of any grid of patches.

    Attributes:
        patch_size: edge of a patch in pixels.
        merge: edge of the square of patches that becomes one image token.
        positions: edge of the square table of patch positions.
        rope_base: base of rotary positions by row and column; None: there are none.
        window: edge of the squares of patches that attend to themselves; None: all blocks attend
            to the whole image.
        full_attention: numbers of the blocks, counted from 1 and ascending, that attend to the
            whole image where there are windows.
    """

    width: Annotated[int, size('patch_embedding.weight')]
    depth: Annotated[int, depth_of('blocks')]
    num_heads: int
    mlp_dim: Annotated[int, size('blocks.0.mlp.fc1.weight')]
    patch_size: Annotated[int, Shown(_patch_size)]
    merge: Annotated[int, squares_joined('connector.1.weight')]
    positions: Annotated[int, Shown(table_side)]
    rope_base: float | None = None
    window: int | None = None
    full_attention: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_heads('vision', self)
        if self.rope_base is not None:
            check_positive(self, 'rope_base')
            if self.head_dim % 4:
                raise ValueError(
                    f'vision: width {self.width} is not a multiple of 4 * num_heads '
                    f'{self.num_heads}; the rotary embedding turns pairs of numbers by row and '
                    'column'
                )
        if self.window is not None:
            check_positive(self, 'window')
        if any(a >= b for a, b in pairwise((0, *self.full_attention, self.depth + 1))):
            raise ValueError(
                f'vision: full_attention {list(self.full_attention)} must ascend from 1 to depth '
                f'{self.depth}'
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads


@dataclass(frozen=True, kw_only=True)
class GrootN16Dims(AlternatingDims):
    """All that fixes the shapes of a GR00T N1.6 policy; each of its state steps is a token."""

    vision: Siglip2Dims
    state_steps: int = 1

    # No self-attention over the features.
    context = None

    def __post_init__(self) -> None:
        self.check_alternation()


# nvidia/GR00T-N1.6-3B: SigLIP 2 of Eagle-Block2A-2B-v2, sixteen layers of Qwen3 1.7B, 32 DiT
# blocks. Two cameras of 256 by 256 pixels, which are 252 in whole image tokens.
GROOT_N16 = GrootN16Dims(
    vision=Siglip2Dims(
        width=1152, depth=27, num_heads=16, mlp_dim=4304, patch_size=14, merge=2, positions=16
    ),
    image=(252, 252),
    language=DecoderDims(
        width=2048, depth=16, mlp_dim=6144, num_heads=16, num_kv_heads=8, head_dim=128
    ),
    dit=StackDims(depth=32, num_heads=32, head_dim=48, mlp_dim=6144),
    text_every=2,
    head_width=1024,
    positions=1024,
    vocabulary=151680,
    cameras=2,
    image_places=(54, 61),
    prompt_length=64,
    horizon=50,
    real_horizon=50,
    action_dim=128,
    state_dim=128,
)


# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GrootN17Dims(AlternatingDims):
    """All that fixes the shapes of a GR00T N1.7 policy for one embodiment.

    Attributes:
        rope_sections: pairs of a head's numbers that turn by time, by row and by column.
        context: self-attention over the language model's features, whose blocks are as wide as
            those; None: there is none.
    """

    vision: FrameVisionDims
    rope_sections: tuple[int, int, int]
    context: StackDims | None = None
    rope_base: float = 5e6

    def __post_init__(self) -> None:
        check_sections(self.rope_sections, self.language)
        self.check_alternation()


# nvidia/GR00T-N1.7-3B: sixteen layers of Cosmos-Reason2 2B (Qwen3-VL), 32 DiT blocks. Two cameras
# of 256 by 256 pixels.
GROOT_N17 = GrootN17Dims(
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
        width=2048, depth=16, mlp_dim=6144, num_heads=16, num_kv_heads=8, head_dim=128
    ),
    rope_sections=(24, 20, 20),
    context=StackDims(depth=4, num_heads=32, head_dim=64, mlp_dim=8192),
    dit=StackDims(depth=32, num_heads=32, head_dim=48, mlp_dim=6144),
    text_every=2,
    head_width=1024,
    positions=1024,
    vocabulary=151936,
    cameras=2,
    image_places=(4, 6),
    prompt_length=64,
    horizon=40,
    real_horizon=40,
    action_dim=132,
    state_dim=132,
)


# --------------------------------------------------------------------------------------------------


# --------------------------------------------------------------------------------------------------

_CHAT = ('<|im_start|>', '<|im_end|>')
# Eagle's chat template with a user's images and task, as its processor writes it.
N15_PROMPT = PromptLayout(
    '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n'
    '<|im_start|>user\n{images}{task}<|im_end|>\n'
    '<|im_start|>assistant\n',
    image='<image {number}><img>{tokens}</img>',
    bos=False,
    special=(*_CHAT, '<img>', '</img>'),
)
# Eagle's chat template with a user's task and images, as its processor writes it for N1.6.
N16_PROMPT = PromptLayout(
    '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n'
    '<|im_start|>user\n{task}{images}<|im_end|>\n',
    image='<image {number}><img>{tokens}</img>',
    bos=False,
    special=(*_CHAT, '<img>', '</img>'),
)
# Qwen3-VL's chat template with a user's images and task.
N17_PROMPT = PromptLayout(
    '<|im_start|>user\n{images}{task}<|im_end|>\n',
    image='<|vision_start|>{tokens}<|vision_end|>',
    bos=False,
    special=(*_CHAT, '<|vision_start|>', '<|vision_end|>'),
)

_N15_FIGURES = PerformanceFigures(
    runs=vla_cpp_runs(
        {
            'agx-orin': (409.57, 129.22),
            'orin-nano': (1182.67, 299.38),
            'rtx-3060': (203.73, 51.09),
            'rtx-5090': (29.4, 5.9),
        }
    )
)
_N17_FIGURES = PerformanceFigures(
    runs=vla_cpp_runs(
        {
            'agx-orin': (367.43, 145.29),
            'rtx-3060': (139.89, 44.63),
            'rtx-5090': (33.4, 6.2),
        }
    )
)


def _version(
    number: str,
    dims: type,
    published: HeadDims,
    prompt: PromptLayout,
    figures: PerformanceFigures | None,
) -> Family:
    """Declare one version; what differs are its sizes, its prompt and its figures."""
    name = f'groot_n{number.replace(".", "")}'
    return Family(
        name=name,
        title=f'GR00T N{number} (arXiv 2503.14734, NVIDIA Isaac-GR00T)',
        head='flow',
        dims=dims,
        presets={name: published},
        templates={'chat': prompt},
        prefix_inputs=prompt_inputs,
        head_inputs=state_input,
        time_table=DitTimeTable,
        freezes_actions=number != '1.5',
        flow_steps=DENOISE_STEPS,
        figures={} if figures is None else {name: figures},
    )


FAMILIES = (
    _version('1.5', GrootDims, GROOT_N15, N15_PROMPT, _N15_FIGURES),
    _version('1.6', GrootN16Dims, GROOT_N16, N16_PROMPT, None),
    _version('1.7', GrootN17Dims, GROOT_N17, N17_PROMPT, _N17_FIGURES),
)
