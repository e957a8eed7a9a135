"""OpenVLA (arXiv 2406.09246) and OpenVLA-OFT (arXiv 2502.19645): Llama 2 7B, two vision towers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

import numpy as np

from vla_runtime.family.declaration import (
    Family,
    NoTimes,
    no_inputs,
    prompt_and_state,
    prompt_inputs,
)
from vla_runtime.family.dimensions import (
    DecoderDims,
    Part,
    VisionDims,
    check_language,
    check_positive,
    check_vision,
    depth_of,
    size,
)
from vla_runtime.processing.prompts import PromptLayout

# --------------------------------------------------------------------------------------------------
# The sizes of OpenVLA and OpenVLA-OFT, with a preset for each published model. Pure numbers.

# `</s>`, which ends Llama's texts.
_STOP_TOKEN = 2
Channels = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class BackboneDims:
    """Sizes of towers, projector and language model.

    Attributes:
        dino, siglip: the towers, with the blocks that are run: all but the last.
        dino_registers: register tokens of DINOv2, beside its class token.
        projector_dim: width between the projector's first two layers.
        dino_mean, dino_std, siglip_mean, siglip_std: of the colour channels, from [0, 1].
        cameras: images of a prompt, one behind the other.
    """

    dino: Annotated[VisionDims, Part('vision.dino.')]
    siglip: Annotated[VisionDims, Part('vision.siglip.')]
    dino_registers: Annotated[int, size('vision.dino.registers', axis=1, axes=3)]
    projector_dim: Annotated[int, size('vision.projector.fc1.weight')]
    language: DecoderDims
    vocabulary: Annotated[int, size('language.embedding.weight')]
    prompt_length: int
    action_dim: int
    dino_mean: Channels
    dino_std: Channels
    siglip_mean: Channels
    siglip_std: Channels
    rope_base: float = 1e4
    rms_epsilon: float = 1e-6
    cameras: int = 1

    def __post_init__(self) -> None:
        for tower in (self.dino, self.siglip):
            check_vision(tower)
        if self.dino.tokens != self.siglip.tokens or self.dino.image_size != self.siglip.image_size:
            raise ValueError(
                f'dino has {self.dino.tokens} patches of an image {self.dino.image_size} wide and '
                f'siglip {self.siglip.tokens} of one {self.siglip.image_size} wide: both towers '
                'read the same patches'
            )
        check_language(self.language)
        check_positive(self, 'rope_base', 'rms_epsilon', 'action_dim', 'prompt_length')
        if min(*self.dino_std, *self.siglip_std) <= 0:
            raise ValueError('dino_std and siglip_std must be above 0')

    @property
    def image_size(self) -> int:
        return self.dino.image_size

    @property
    def image_tokens(self) -> int:
        """N, tokens of an image."""
        return self.dino.tokens


@dataclass(frozen=True, kw_only=True)
class OpenVlaDims(BackboneDims):
    """All that fixes the shapes of an OpenVLA policy.

    Actions are the last of `used_vocabulary` tokens, which leave out the text table's padding;
    `action_bins` are edges over [-1, 1].
    """

    used_vocabulary: int
    action_bins: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.used_vocabulary > self.vocabulary:
            raise ValueError(
                f'used_vocabulary {self.used_vocabulary} is more than vocabulary {self.vocabulary}'
            )
        if not 2 <= self.action_bins <= self.used_vocabulary:
            raise ValueError(
                f'action_bins {self.action_bins} where 2 to {self.used_vocabulary} '
                '(used_vocabulary) is expected'
            )

    @property
    def answer_length(self) -> int:
        """K, a token for each action."""
        return self.action_dim

    @property
    def prefix_length(self) -> int:
        """P: image and prompt."""
        return self.cameras * self.image_tokens + self.prompt_length

    @property
    def horizon(self) -> int:
        return 1

    @property
    def state_dim(self) -> int:
        """The network reads no state."""
        return 0


@dataclass(frozen=True, kw_only=True)
class OpenVlaOftDims(BackboneDims):
    """All that fixes the shapes of an OpenVLA-OFT policy.

    Each number of the `horizon` actions of a chunk has a place of its own behind the prompt.
    """

    action_dim: Annotated[int, size('head.fc2.weight', stated='actions without padding')]
    horizon: int
    state_dim: Annotated[
        int, size('state_projection.fc1.weight', axis=1, stated='state without padding')
    ]
    head_width: Annotated[int, size('head.fc2.weight', axis=1)]
    head_blocks: Annotated[int, depth_of('head.blocks', first='norm.weight')] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, 'horizon', 'state_dim', 'head_width')
        if self.head_blocks < 0:
            raise ValueError(f'head_blocks {self.head_blocks} where 0 or more is expected')
        if self.vocabulary <= _STOP_TOKEN:
            raise ValueError(
                f'vocabulary {self.vocabulary} where more than the stop token {_STOP_TOKEN} is '
                'expected'
            )

    @property
    def action_places(self) -> int:
        """K, places behind the prompt whose features the action head reads."""
        return self.horizon * self.action_dim

    @property
    def stop_token(self) -> int:
        """Token behind the places of the actions."""
        return _STOP_TOKEN

    @property
    def prefix_length(self) -> int:
        """P: images, state and prompt, the places of the actions, and the stop token."""
        prompt = self.cameras * self.image_tokens + 1 + self.prompt_length
        return prompt + self.action_places + 1


# openvla/openvla-7b: ViT-L/14 with registers, So400m/14, Llama 2 7B; ImageNet's mean and standard
# deviation as its preprocessor_config.json has them, rounded to bfloat16.
OPENVLA = OpenVlaDims(
    dino=VisionDims(
        width=1024, depth=23, num_heads=16, mlp_dim=4096, patch_size=14, image_size=224
    ),
    siglip=VisionDims(
        width=1152, depth=26, num_heads=16, mlp_dim=4304, patch_size=14, image_size=224
    ),
    dino_registers=4,
    projector_dim=8704,
    language=DecoderDims(
        width=4096, depth=32, mlp_dim=11008, num_heads=32, num_kv_heads=32, head_dim=128
    ),
    vocabulary=32064,
    used_vocabulary=32000,
    action_bins=256,
    prompt_length=64,
    action_dim=7,
    dino_mean=(0.484375, 0.455078125, 0.40625),
    dino_std=(0.228515625, 0.2236328125, 0.224609375),
    siglip_mean=(0.5, 0.5, 0.5),
    siglip_std=(0.5, 0.5, 0.5),
)
# moojink/openvla-7b-oft-finetuned-libero-*: two cameras.
OPENVLA_OFT = OpenVlaOftDims(
    **{
        one.name: getattr(OPENVLA, one.name)
        for one in fields(BackboneDims)
        if one.name != 'cameras'
    },
    cameras=2,
    horizon=8,
    state_dim=8,
    head_width=4096,
)


# --------------------------------------------------------------------------------------------------
# Action tokens as bins over [-1, 1], as OpenVLA writes them.


class ActionBins:
    """Decode tokens that are each the bin of one action.

    The last token of the vocabulary in use (without the text table's padding) is the first bin. A
    token that is no bin's counts as the nearest one's, as in OpenVLA's own code. `edges` are one
    more than there are bins.
    """

    end: int | None = None

    def __init__(self, vocabulary: int, edges: int) -> None:
        self._vocabulary = vocabulary
        bounds = np.linspace(-1.0, 1.0, edges)
        self._centres = (bounds[:-1] + bounds[1:]) / 2.0

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """Return the actions (1, K) float32 of an answer (K,) int64."""
        bins = np.clip(self._vocabulary - 1 - tokens, 0, len(self._centres) - 1)
        return self._centres[bins].astype(np.float32)[None]


# --------------------------------------------------------------------------------------------------

# The space behind `Out:` that Llama's tokenizer leaves out, and the policy was trained with.
PROMPT = PromptLayout(
    'In: What action should the robot take to {task}?\nOut:', closing='\N{LOWER ONE EIGHTH BLOCK}'
)


FAMILIES = (
    Family(
        name='openvla',
        title='OpenVLA (arXiv 2406.09246)',
        head='tokens',
        dims=OpenVlaDims,
        presets={'openvla': OPENVLA},
        templates={'openvla': PROMPT},
        prefix_inputs=prompt_inputs,
        head_inputs=no_inputs,
        time_table=NoTimes,
        answer_decoder=lambda dims, *files: ActionBins(dims.used_vocabulary, dims.action_bins),
    ),
    Family(
        name='openvla_oft',
        title='OpenVLA-OFT (arXiv 2502.19645)',
        head='single',
        dims=OpenVlaOftDims,
        presets={'openvla_oft': OPENVLA_OFT},
        templates={'openvla': PROMPT},
        prefix_inputs=prompt_and_state,
        head_inputs=no_inputs,
        time_table=NoTimes,
    ),
)
