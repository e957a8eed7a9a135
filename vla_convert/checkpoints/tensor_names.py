"""Names of tensors: a training project's on one side, ours on the other.

The Hugging Face names of a SigLIP tower and of a decoder stack are written here once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

# Rows of a table: a pattern without its leaf (weight or bias), and our name without it.
Rows = tuple[tuple[str, str], ...]

SIGLIP: Rows = (
    (r'embeddings\.patch_embedding', 'patch_embedding'),
    (r'encoder\.layers\.(?P<i>\d+)\.layer_norm(?P<n>[12])', r'blocks.\g<i>.norm\g<n>'),
    (r'encoder\.layers\.(?P<i>\d+)\.self_attn\.(?P<n>[qkv])_proj', r'blocks.\g<i>.attention.\g<n>'),
    (r'encoder\.layers\.(?P<i>\d+)\.self_attn\.out_proj', r'blocks.\g<i>.attention.out'),
    (r'encoder\.layers\.(?P<i>\d+)\.mlp\.(?P<n>fc1|fc2)', r'blocks.\g<i>.mlp.\g<n>'),
    (r'post_layernorm', 'norm'),
)
DECODER: Rows = (
    (r'embed_tokens', 'embedding'),
    (r'layers\.(?P<i>\d+)\.input_layernorm', r'blocks.\g<i>.input_norm'),
    (r'layers\.(?P<i>\d+)\.post_attention_layernorm', r'blocks.\g<i>.post_norm'),
    (r'layers\.(?P<i>\d+)\.self_attn\.(?P<n>[qkv])_proj', r'blocks.\g<i>.attention.\g<n>'),
    (r'layers\.(?P<i>\d+)\.self_attn\.o_proj', r'blocks.\g<i>.attention.out'),
    (r'layers\.(?P<i>\d+)\.mlp\.(?P<n>gate|up|down)_proj', r'blocks.\g<i>.mlp.\g<n>'),
    (r'norm', 'norm'),
)

# Of LeRobot before 0.4, among every policy's tensors.
_EARLY_STATISTICS = re.compile(r'(?:un)?normalize_(?:inputs|targets|outputs)\..*')


@dataclass(frozen=True)
class TensorNames:
    """Names of the tensors in a family's checkpoints.

    Attributes:
        rows: patterns of whole names (without LeRobot's leading `model.`) to ours.
        packed: patterns of tensors stacked along the first axis in equal parts, to our names
            in order.
        unused: tensors that inference does not use.
        tied: our name of a tensor to that of the one it may stand in for.
    """

    rows: tuple[tuple[re.Pattern[str], str], ...]
    packed: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = ()
    unused: tuple[re.Pattern[str], ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)

    def is_unused(self, name: str) -> bool:
        """Return whether a checkpoint's tensor is known to be unused at inference."""
        bare = name.removeprefix('model.')
        return any(pattern.fullmatch(bare) for pattern in (*self.unused, _EARLY_STATISTICS))

    def ours(self, name: str) -> str | None:
        """Our name of a checkpoint's tensor, or None where the table has none."""
        bare = name.removeprefix('model.')
        for pattern, replacement in self.rows:
            match = pattern.fullmatch(bare)
            if match:
                return match.expand(replacement)
        return None

    def parts(self, name: str) -> tuple[str, ...]:
        """Our names of the tensors in a checkpoint's: one, or several packed; () if unknown."""
        bare = name.removeprefix('model.')
        for pattern, replacements in self.packed:
            match = pattern.fullmatch(bare)
            if match:
                return tuple(match.expand(replacement) for replacement in replacements)
        ours = self.ours(name)
        return () if ours is None else (ours,)


def row(theirs: str, ours: str) -> tuple[re.Pattern[str], str]:
    """Make a row for one whole name."""
    return re.compile(theirs), ours


def rows_under(
    their_prefix: str, our_prefix: str, table: Iterable[tuple[str, str]]
) -> tuple[tuple[re.Pattern[str], str], ...]:
    """A table's rows, weight and bias, where a checkpoint and our network have them."""
    return tuple(
        row(rf'{their_prefix}{theirs}\.(?P<leaf>weight|bias)', rf'{our_prefix}{ours}.\g<leaf>')
        for theirs, ours in table
    )
