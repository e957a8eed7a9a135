"""Sizes of the stacks of GR00T's action head, read off their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vla_runtime.checkpoints.missing_facts import MissingFacts
from vla_runtime.checkpoints.options import ExportOptions
from vla_runtime.families.blocks.block_sizes import Shapes
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
