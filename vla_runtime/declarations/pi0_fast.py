"""pi0-FAST (arXiv 2501.09747): PaliGemma writes a chunk as tokens of its frequencies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from vla_runtime.family.declaration import Family, NoTimes, no_inputs, prompt_inputs
from vla_runtime.family.dimensions import (
    DecoderDims,
    VisionDims,
    check_language,
    check_positive,
    check_vision,
    size,
)
from vla_runtime.processing.fast_tokens import FastScale, FastTokens
from vla_runtime.processing.prompts import PromptLayout

# --------------------------------------------------------------------------------------------------
# The sizes of pi0-FAST: one dataclass, a preset for the published model. Pure numbers.

# File of the action tokenizer in a bundle.
ACTION_TOKENIZER = 'action_tokenizer.json'


@dataclass(frozen=True, kw_only=True)
class Pi0FastDims:
    """All that fixes the shapes of a pi0-FAST policy, and what its answers mean.

    Attributes:
        prompt_length: tokens of the padded prompt, with the BOS behind it that begins the answer.
        action_dim: actions, none padded.
        skipped_tokens: tokens at the end of the text vocabulary that are no actions.
        action_scale, least_coefficient: of the action tokenizer (`fast_tokens.FastScale`).
        checks_prefix: an answer that does not begin with `Action:` is refused.
    """

    vision: VisionDims
    language: DecoderDims
    vocabulary: Annotated[int, size('language.embedding.weight')]
    cameras: int
    prompt_length: int
    horizon: int
    action_dim: int
    answer_tokens: int
    skipped_tokens: int = 0
    action_scale: float
    least_coefficient: float
    checks_prefix: bool = True
    rope_base: float = 1e4

    def __post_init__(self) -> None:
        check_vision(self.vision)
        check_language(self.language)
        check_positive(self, 'answer_tokens', 'action_scale', 'rope_base')
        if self.least_coefficient % 1:
            raise ValueError(
                f'least_coefficient {self.least_coefficient} where a whole number is expected'
            )

    @property
    def image_size(self) -> int:
        return self.vision.image_size

    @property
    def answer_length(self) -> int:
        """K, most tokens of an answer."""
        return self.answer_tokens

    @property
    def prefix_length(self) -> int:
        """P: image tokens of all cameras, then prompt tokens."""
        return self.cameras * self.vision.tokens + self.prompt_length

    @property
    def state_dim(self) -> int:
        """The network has no state token: the state is in the prompt."""
        return 0


# lerobot/pi0fast-base: SigLIP So400m/14 and Gemma 2B, with the published FAST tokenizer.
PI0_FAST = Pi0FastDims(
    vision=VisionDims(
        width=1152, depth=27, num_heads=16, mlp_dim=4304, patch_size=14, image_size=224
    ),
    language=DecoderDims(
        width=2048, depth=18, mlp_dim=16384, num_heads=8, num_kv_heads=1, head_dim=256
    ),
    vocabulary=257152,
    cameras=3,
    prompt_length=201,
    horizon=50,
    action_dim=32,
    answer_tokens=256,
    skipped_tokens=128,
    action_scale=10.0,
    least_coefficient=-354.0,
)


# --------------------------------------------------------------------------------------------------

# The BOS behind the prompt begins the answer. LeRobot puts it behind the padding, which is the
# same: every token sees every other, and positions count what is no padding.
PROMPT = PromptLayout('Task: {task}, State: {state};\n', closing='<bos>', lerobot_task='cleaned')


def _decoder(dims: Pi0FastDims, tokenizer: Path, files: Mapping[str, Path]) -> FastTokens:
    return FastTokens(
        tokenizer,
        files[ACTION_TOKENIZER],
        FastScale(dims.action_scale, int(dims.least_coefficient)),
        (dims.horizon, dims.action_dim),
        skipped=dims.skipped_tokens,
        checks_prefix=dims.checks_prefix,
    )


FAMILIES = (
    Family(
        name='pi0_fast',
        title='pi0-FAST (arXiv 2501.09747)',
        head='tokens',
        dims=Pi0FastDims,
        presets={'pi0_fast': PI0_FAST},
        templates={'pi0_fast': PROMPT},
        prefix_inputs=prompt_inputs,
        head_inputs=no_inputs,
        time_table=NoTimes,
        answer_decoder=_decoder,
        files=(ACTION_TOKENIZER,),
    ),
)
