"""Names of tensors: LeRobot's and openpi's on one side, ours on the other.

Both projects share one layout under `paligemma_with_expert`; LeRobot puts `model.` before it.
Older transformers nested the same modules differently (`paligemma.language_model.model.…`,
`paligemma.vision_tower.…`); the optional parts of the patterns cover that.
"""

from __future__ import annotations

import re

# The output table of the language model: tied to its input table, which may be absent.
TEXT_HEAD = 'language.head.weight'
TEXT_TABLE = 'language.embedding.weight'

_VISION = r'paligemma_with_expert\.paligemma\.(?:model\.)?vision_tower\.(?:vision_model\.)?'
_PROJECTOR = r'paligemma_with_expert\.paligemma\.(?:model\.)?multi_modal_projector\.linear'
_LANGUAGE = r'paligemma_with_expert\.paligemma\.(?:model\.)?language_model\.(?:model\.)?'
_EXPERT = r'paligemma_with_expert\.gemma_expert\.model\.'
_ANY = r'(?P<leaf>weight|bias)'

_VISION_TABLE = (
    (r'embeddings\.patch_embedding', 'patch_embedding'),
    (r'encoder\.layers\.(?P<i>\d+)\.layer_norm(?P<n>[12])', r'blocks.\g<i>.norm\g<n>'),
    (r'encoder\.layers\.(?P<i>\d+)\.self_attn\.(?P<n>[qkv])_proj', r'blocks.\g<i>.attention.\g<n>'),
    (r'encoder\.layers\.(?P<i>\d+)\.self_attn\.out_proj', r'blocks.\g<i>.attention.out'),
    (r'encoder\.layers\.(?P<i>\d+)\.mlp\.(?P<n>fc1|fc2)', r'blocks.\g<i>.mlp.\g<n>'),
    (r'post_layernorm', 'norm'),
)
_GEMMA_TABLE = (
    (r'embed_tokens', 'embedding'),
    (r'layers\.(?P<i>\d+)\.input_layernorm', r'blocks.\g<i>.input_norm'),
    (r'layers\.(?P<i>\d+)\.input_layernorm\.dense', r'blocks.\g<i>.input_norm.modulation'),
    (r'layers\.(?P<i>\d+)\.post_attention_layernorm', r'blocks.\g<i>.post_norm'),
    (r'layers\.(?P<i>\d+)\.post_attention_layernorm\.dense', r'blocks.\g<i>.post_norm.modulation'),
    (r'layers\.(?P<i>\d+)\.self_attn\.(?P<n>[qkv])_proj', r'blocks.\g<i>.attention.\g<n>'),
    (r'layers\.(?P<i>\d+)\.self_attn\.o_proj', r'blocks.\g<i>.attention.out'),
    (r'layers\.(?P<i>\d+)\.mlp\.(?P<n>gate|up|down)_proj', r'blocks.\g<i>.mlp.\g<n>'),
    (r'norm', 'norm'),
    (r'norm\.dense', 'norm.modulation'),
)
_TOP_TABLE = (
    (r'action_in_proj', 'action_in'),
    (r'action_out_proj', 'action_out'),
    (r'time_mlp_in', 'time_in'),
    (r'time_mlp_out', 'time_out'),
    (r'action_time_mlp_in', 'action_time_in'),
    (r'action_time_mlp_out', 'action_time_out'),
    (r'state_proj', 'state_projection'),
)


def _compile() -> tuple[tuple[re.Pattern[str], str], ...]:
    rows = [
        (rf'{_VISION}embeddings\.position_embedding\.weight', 'vision.position_embedding'),
        (rf'{_PROJECTOR}\.{_ANY}', r'vision.projector.\g<leaf>'),
        (
            r'paligemma_with_expert\.paligemma\.(?:language_model\.)?lm_head\.weight',
            TEXT_HEAD,
        ),
    ]
    rows += [
        (rf'{_VISION}{theirs}\.{_ANY}', rf'vision.{ours}.\g<leaf>')
        for theirs, ours in _VISION_TABLE
    ]
    for stack, prefix in ((_LANGUAGE, 'language'), (_EXPERT, 'expert')):
        rows += [
            (rf'{stack}{theirs}\.{_ANY}', rf'{prefix}.{ours}.\g<leaf>')
            for theirs, ours in _GEMMA_TABLE
        ]
    rows += [(rf'{theirs}\.{_ANY}', rf'{ours}.\g<leaf>') for theirs, ours in _TOP_TABLE]
    return tuple((re.compile(theirs), ours) for theirs, ours in rows)


_TABLE = _compile()
# The expert never emits text; its vocabulary head is carried along by both projects for nothing.
_UNUSED = re.compile(r'paligemma_with_expert\.gemma_expert\.lm_head\.weight')


def is_unused(name: str) -> bool:
    """Whether a checkpoint's tensor is known to serve nothing at inference."""
    return _UNUSED.fullmatch(name.removeprefix('model.')) is not None


def our_name(name: str) -> str | None:
    """Our name of a checkpoint's tensor, or None where the table has none."""
    bare = name.removeprefix('model.')
    for pattern, replacement in _TABLE:
        match = pattern.fullmatch(bare)
        if match:
            return match.expand(replacement)
    return None
