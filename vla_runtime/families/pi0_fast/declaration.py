"""pi0-FAST (arXiv 2501.09747): PaliGemma writes a chunk as tokens of its frequencies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vla_runtime.families.pi0_fast.dimensions import (
    ACTION_TOKENIZER,
    LIMITS,
    PI0_FAST,
    Pi0FastDims,
)
from vla_runtime.family.declaration import Family, NoTimes, no_inputs, prompt_inputs
from vla_runtime.processing.fast_tokens import FastScale, FastTokens
from vla_runtime.processing.prompt_layout import PromptLayout

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
        limits=LIMITS,
        templates={'pi0_fast': PROMPT},
        prefix_inputs=prompt_inputs,
        head_inputs=no_inputs,
        time_table=NoTimes,
        answer_decoder=_decoder,
        files=(ACTION_TOKENIZER,),
    ),
)
