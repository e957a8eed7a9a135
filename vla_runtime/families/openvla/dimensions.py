"""The sizes of OpenVLA: one dataclass, a preset for the published model. Pure numbers."""

from __future__ import annotations

from dataclasses import dataclass

from vla_runtime.families.blocks.dimensions import (
    LIMITS as STACK_LIMITS,
)
from vla_runtime.families.blocks.dimensions import (
    DecoderDims,
    VisionDims,
    check_language,
    check_positive,
    check_vision,
)

_LARGEST_OF = {name.partition('.')[2]: limit for name, limit in STACK_LIMITS.items()}
LIMITS = {
    **{
        f'{tower}.{name}': _LARGEST_OF[name]
        for tower in ('dino', 'siglip')
        for name in ('width', 'depth', 'num_heads', 'mlp_dim', 'image_size', 'patch_size')
    },
    **{name: limit for name, limit in STACK_LIMITS.items() if name.startswith('language.')},
    'dino_registers': 64,
    'projector_dim': 131072,
    'action_bins': 65536,
    'used_vocabulary': 4_194_304,
}
Channels = tuple[float, float, float]


@dataclass(frozen=True)
class OpenVlaDims:
    """All that fixes the shapes of an OpenVLA policy.

    Attributes:
        dino, siglip: the towers, with the blocks that are run: all but the last.
        dino_registers: register tokens of DINOv2, beside its class token.
        projector_dim: width between the projector's first two layers.
        language: the Llama 2.
        vocabulary: tokens that the network knows.
        used_vocabulary: tokens without the padding of the text table; actions are the last of them.
        action_bins: edges of the bins over [-1, 1], one more than there are bins.
        prompt_length: tokens of the padded prompt.
        action_dim: actions, and tokens of an answer.
        dino_mean, dino_std, siglip_mean, siglip_std: of the colour channels, from [0, 1].
        rope_base: base of the language model's rotary positions.
        rms_epsilon: epsilon of the language model's norms.
        cameras: 1 in every published policy; images follow one another.
    """

    dino: VisionDims
    siglip: VisionDims
    dino_registers: int
    projector_dim: int
    language: DecoderDims
    vocabulary: int
    used_vocabulary: int
    action_bins: int
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
    def image_size(self) -> int:
        """S, edge of the square image in pixels."""
        return self.dino.image_size

    @property
    def image_tokens(self) -> int:
        """N, tokens of the image."""
        return self.dino.tokens

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
        """Actions of a chunk."""
        return 1

    @property
    def state_dim(self) -> int:
        """The network reads no state."""
        return 0


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
