"""The keys and values of a prompt, by the joined blocks of a language model.

Padding is left out, or where shapes are static and a kernel takes lengths, packed behind what is
valid and never read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from vla_runtime.models.blocks.attention import (
    attend_heads,
    complex_rotary,
    heads_mask,
    uninterleave,
)
from vla_runtime.models.blocks.key_lengths import FirstKeys, Kernel, pack_valid_keys
from vla_runtime.models.blocks.transformer import Block


def encode_stack(
    blocks: Sequence[Block],
    x: Tensor,
    mask: Tensor,
    used: Tensor | None,
    prefix_sees: Callable[[Tensor], Tensor] = lambda mask: mask[:, None],
    kernel: Kernel | None = None,
    static_shapes: bool = False,
) -> tuple[Tensor, Tensor]:
    """Keys (rotated) and values of every layer, (layers, B, kv_heads, P, D) each.

    Args:
        x: (B, P, W); mask: (B, P) bool, valid tokens.
        used: tokens as `used_tokens` gives them; keys and values of others are zero. None: all.
        prefix_sees: the mask to what each token sees, (B, P or 1, P) bool; by default all that
            is valid.
        kernel: attends without a mask, as `key_lengths.flash`; for the default mask alone.
        static_shapes: the numbers of a mask change no operator.
    """
    if used is not None:
        keys, values = encode_stack(blocks, x[:, used], mask[:, used], None, prefix_sees)
        return _spread(keys, used, x.shape[1]), _spread(values, used, x.shape[1])
    positions = mask.cumsum(dim=1) - 1
    if kernel is not None:
        places = pack_valid_keys(mask)
        x = torch.empty_like(x).scatter_(1, places[..., None].expand_as(x), x)
        positions = torch.empty_like(positions).scatter_(1, places, positions)
        attend = _by_length(kernel, mask)
    else:
        first = blocks[0]
        heads = first.attention.num_heads, first.attention.kv_heads
        dtype = first.attention.q.weight.dtype
        hidden = heads_mask(prefix_sees(mask), *heads, dtype, static_shapes)
        attend = partial(attend_heads, mask=hidden)
    rotation = complex_rotary(positions, blocks[0].attention.head_dim)
    of_layers = []
    for block in blocks[:-1]:
        q, k, v = block.project(x, rotation)
        x = block.combine(x, attend(q, k, v))
        of_layers.append((k, v))
    # All that is needed of the last layer; its queries cost little beside a product of their own.
    _, k, v = blocks[-1].project(x, rotation)
    keys, values = map(torch.stack, zip(*of_layers, (k, v), strict=True))
    if kernel is not None:
        # Back to where the tokens were.
        index = places[None, :, None, :, None]
        keys, values = (heads.take_along_dim(index, dim=3) for heads in (keys, values))
    return uninterleave(keys), values


def _by_length(kernel: Kernel, mask: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention as `attend_heads`, to as many first keys of a row as it has valid tokens (B, P)."""
    rows, tokens = mask.shape
    first_keys = FirstKeys(kernel, rows, tokens, tokens, mask.device)
    first_keys.lengths.copy_(mask.sum(dim=1))

    def attend(*heads: Tensor) -> Tensor:
        attended = first_keys(*(tensor.transpose(1, 2).flatten(0, 1) for tensor in heads))
        return attended.view(rows, tokens, -1)

    return attend


def used_tokens(mask: Tensor) -> Tensor | None:
    """Places of the tokens that are valid in a row of (B, P); None if all of them are."""
    used = mask.any(dim=0)
    return None if used.all() else used.nonzero().squeeze(1)


def _spread(heads: Tensor, used: Tensor, tokens: int) -> Tensor:
    """(..., tokens in use, D) to (..., tokens, D); zero elsewhere."""
    whole = heads.new_zeros(*heads.shape[:-2], tokens, heads.shape[-1])
    return whole.index_copy_(-2, used, heads)
