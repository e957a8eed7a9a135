"""Sizes of the stacks of GR00T's action head, read off their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vla_runtime.checkpoints.missing_facts import MissingFacts
from vla_runtime.checkpoints.options import ExportOptions
from vla_runtime.families.blocks.block_sizes import Shapes, decoder_dims
from vla_runtime.families.groot.dimensions import StackDims

# Heads of the published stacks by width: SigLIP So400m, and the two stacks of the action head.
_HEADS = {'vision': {1152: 16}, 'context': {2048: 32}, 'dit': {1536: 32}}
_TENSORS = {
    'vision': ('vision.patch_embedding.weight', 4),
    'context': ('context.0.attention.q.weight', 2),
    'dit': ('dit.0.attention.q.weight', 2),
}


def settle_stack_heads(
    shape: Shapes, parts: Sequence[str], options: ExportOptions, missing: MissingFacts
) -> Mapping[str, int] | None:
    """Heads of each part by the widths of published ones, else from the options.

    Args:
        shape: shapes of the checkpoint's tensors.
        parts: `vision`, `context`, `dit`.
        options: facts that the folder lacks.
        missing: list that missing and contradictory facts are noted in.

    Returns:
        heads by part; None once one is noted missing
    """
    found: dict[str, int] = {}
    for part in parts:
        width = shape(*_TENSORS[part])[0]
        option = '--vision-heads' if part == 'vision' else f'--heads {part}=N'
        given = options.vision_heads if part == 'vision' else options.heads.get(part)
        heads = missing.pick(
            option,
            given,
            _HEADS[part].get(width),
            f"attention heads of '{part}', {width} numbers wide",
        )
        if heads is None:
            continue
        if width % heads:
            missing.conflict(f'{option} says {heads}, which does not divide its width of {width}')
            continue
        found[part] = heads
    return found if len(found) == len(parts) else None


def stack_dims(shape: Shapes, stack: str, heads: int) -> StackDims:
    """Sizes of the stack `context` or `dit`."""
    return StackDims(
        depth=shape.depth(stack),
        num_heads=heads,
        head_dim=shape(f'{stack}.0.attention.q.weight', 2)[0] // heads,
        mlp_dim=shape(f'{stack}.0.mlp.fc1.weight', 2)[0],
    )


def alternating_sizes(
    shape: Shapes,
    heads: Mapping[str, int],
    text_every: int,
    places: tuple[int, ...],
    prompt_length: int,
    horizon: int,
    real_horizon: int | None,
) -> dict[str, Any]:
    """Sizes that N1.6 and N1.7 have in common, by the names of `AlternatingDims`' fields.

    Args:
        shape: shapes of the checkpoint's tensors.
        heads: heads of each part, see `settle_stack_heads`.
        text_every: every so many cross-attention blocks the first attends to the text.
        places: text tokens before each image.
        prompt_length: text tokens of the padded prompt.
        horizon: actions of a chunk.
        real_horizon: first of them that the embodiment has; None: all.
    """
    (head_dim,) = shape('language.blocks.0.attention.k_norm.weight', 1)
    keys, _ = shape('language.blocks.0.attention.k.weight', 2)
    return {
        'language': decoder_dims(shape, 'language', max(1, keys // head_dim)),
        'dit': stack_dims(shape, 'dit', heads['dit']),
        'text_every': text_every,
        'head_width': shape('out.weight', 2)[0],
        'positions': shape('positions', 2)[0],
        'vocabulary': shape('language.embedding.weight', 2)[0],
        'cameras': len(places),
        'image_places': places,
        'prompt_length': prompt_length,
        'horizon': horizon,
        'real_horizon': real_horizon or horizon,
        'action_dim': shape('action_encoder.embed.weight', 2)[0],
        'state_dim': shape('state_encoder.fc1.weight', 2)[0],
    }
