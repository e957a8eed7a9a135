"""Names of tensors: a training project's on one side, ours on the other.

A table has a template of their name and one of ours:

    'encoder.layers.{i}.self_attn.{q|k|v}_proj.*': 'blocks.{i}.attention.{q|k|v}.*'

`{i}` is a number, `{q|k|v}` one of these words, and the same braces in our name stand for what was
found. `(model.)` may be left out. A row that ends in `.*` is of a layer: its weight and its bias.
`{q,k,v}` in our name: the tensor is these in this order, stacked along its first axis.

The Hugging Face names of a SigLIP tower and of a decoder stack are written here once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

# Template of their names to the template of ours.
Rows = Mapping[str, str]

SIGLIP_BLOCKS: Rows = {
    'encoder.layers.{i}.layer_norm{1|2}.*': 'blocks.{i}.norm{1|2}.*',
    'encoder.layers.{i}.self_attn.{q|k|v}_proj.*': 'blocks.{i}.attention.{q|k|v}.*',
    'encoder.layers.{i}.self_attn.out_proj.*': 'blocks.{i}.attention.out.*',
    'encoder.layers.{i}.mlp.{fc1|fc2}.*': 'blocks.{i}.mlp.{fc1|fc2}.*',
}
SIGLIP: Rows = {
    'embeddings.patch_embedding.*': 'patch_embedding.*',
    'embeddings.position_embedding.weight': 'position_embedding',
    **SIGLIP_BLOCKS,
    'post_layernorm.*': 'norm.*',
}
DECODER: Rows = {
    'embed_tokens.*': 'embedding.*',
    'layers.{i}.input_layernorm.*': 'blocks.{i}.input_norm.*',
    'layers.{i}.post_attention_layernorm.*': 'blocks.{i}.post_norm.*',
    'layers.{i}.self_attn.{q|k|v}_proj.*': 'blocks.{i}.attention.{q|k|v}.*',
    'layers.{i}.self_attn.o_proj.*': 'blocks.{i}.attention.out.*',
    'layers.{i}.mlp.{gate|up|down}_proj.*': 'blocks.{i}.mlp.{gate|up|down}.*',
    'norm.*': 'norm.*',
}


# Stages of a residual network, and convolutions of a bottleneck; other blocks have the first two.
_STAGES, _CONVOLUTIONS = 4, 3


def under(theirs: str, ours: str, rows: Rows) -> dict[str, str]:
    """A table's rows where a checkpoint and our network have them."""
    return {f'{theirs}{name}': f'{ours}{own}' for name, own in rows.items()}


def resnet_names(
    theirs: str, ours: str, stem: tuple[str, str], stage: str, *, first: int
) -> dict[str, str]:
    """Table of tensor names for torchvision's blocks.

    `theirs` and `ours` are prefixes; `stem` names its convolution and norm; `stage` has `{}` for
    its number, from `first` on.
    """
    pairs = {stem: 'stem'}
    for index in range(_STAGES):
        block, own = f'{stage.format(index + first)}.{{b}}.', f'stages.{index}.{{b}}.'
        pairs[f'{block}downsample.0', f'{block}downsample.1'] = f'{own}shortcut'
        for n in range(_CONVOLUTIONS):
            pairs[f'{block}conv{n + 1}', f'{block}bn{n + 1}'] = f'{own}convolutions.{n}'
    leaf = '{weight|bias|running_mean|running_var}'
    rows = {}
    for (conv, norm), own in pairs.items():
        rows[f'{theirs}{conv}.weight'] = f'{ours}{own}.conv.weight'
        rows[f'{theirs}{norm}.{leaf}'] = f'{ours}{own}.norm.{leaf}'
    return rows


# Of LeRobot before 0.4, among every policy's tensors.
_EARLY_STATISTICS = '{normalize|unnormalize}_{inputs|targets|outputs}.*'
_LAYER, _LEAF = '.*', '.{weight|bias}'
_SIGN = re.compile(r'(\{[^}]*\}|\([^)]*\)|\*)')
_STACKED = re.compile(r'\{([^}|]*,[^}]*)\}')


@dataclass(frozen=True)
class TensorNames:
    """Names of the tensors in a family's checkpoints.

    Attributes:
        rows: their names (without LeRobot's leading `model.`) to ours.
        unused: tensors that inference does not use; `*` is anything.
        tied: our name of a tensor to that of the one it may stand in for.
    """

    rows: Rows = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)

    def is_unused(self, name: str) -> bool:
        """Return whether a checkpoint's tensor is known to be unused at inference."""
        bare = name.removeprefix('model.')
        return any(
            _match(template, bare) is not None for template in (*self.unused, _EARLY_STATISTICS)
        )

    def ours(self, name: str) -> str | None:
        """Our name of a checkpoint's tensor; None for several, or where the table has none."""
        names = self.parts(name)
        return names[0] if len(names) == 1 else None

    def parts(self, name: str) -> tuple[str, ...]:
        """Our names of the tensors in a checkpoint's: one, or several stacked; () if unknown."""
        bare = name.removeprefix('model.')
        for theirs, ours in self.rows.items():
            if theirs.endswith(_LAYER):
                theirs, ours = (one.removesuffix(_LAYER) + _LEAF for one in (theirs, ours))
            found = _match(theirs, bare)
            if found is not None:
                for braces, text in found.items():
                    ours = ours.replace(braces, text)
                return _unstacked(ours)
        return ()


def _match(template: str, name: str) -> dict[str, str] | None:
    """Return what the braces of a template stand for in a name; None: it does not fit."""
    pattern, braces = _compiled(template)
    found = pattern.fullmatch(name)
    return None if found is None else dict(zip(braces, found.groups(), strict=True))


@cache
def _compiled(template: str) -> tuple[re.Pattern[str], tuple[str, ...]]:
    pieces, braces = [], []
    for piece in _SIGN.split(template):
        if piece.startswith('{'):
            braces.append(piece)
            words = piece[1:-1].split('|')
            pieces.append(f'({"|".join(map(re.escape, words)) if len(words) > 1 else "[0-9]+"})')
        elif piece.startswith('('):
            pieces.append(f'(?:{re.escape(piece[1:-1])})?')
        else:
            pieces.append('.*' if piece == '*' else re.escape(piece))
    if len(set(braces)) < len(braces):
        raise ValueError(f"template '{template}' has the same braces twice; name one otherwise")
    return re.compile(''.join(pieces)), tuple(braces)


def _unstacked(name: str) -> tuple[str, ...]:
    found = _STACKED.search(name)
    if found is None:
        return (name,)
    return tuple(name.replace(found[0], part) for part in found[1].split(','))
