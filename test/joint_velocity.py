"""Velocity of a network from one forward over everything, without any cache.

The networks run their prefix once and their head once a step on top of it (invariant 1 of the
design); these functions, never called at run time, are what that must equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vla_runtime.families.blocks.attention import attend, rotary
from vla_runtime.families.groot.networks import GrootN15, GrootN16, GrootN17
from vla_runtime.families.pi.networks import PiNetwork
from vla_runtime.families.smolvla.networks import (
    SmolVla,
    _action_sight,
    cross_memory,
    prefix_sight,
)


def joint_velocity(
    network: Any, embeddings: Tensor, mask: Tensor, x: Tensor, conditioning: Tensor, **rows: Tensor
) -> Tensor:
    """Return the velocity (B, H, A) of any network that has a cache.

    Args:
        network: network of the family.
        embeddings, mask: results of the network's `embed_prefix`, (B, P, …) and (B, P).
        x, conditioning: see `velocity`, batch B.
        rows: the head's inputs that come from an observation.
    """
    kinds = {PiNetwork: _pi, SmolVla: _smolvla, GrootN15: _groot_n15}
    kinds |= {GrootN16: _groot_alternating, GrootN17: _groot_alternating}
    (joint,) = (joint for kind, joint in kinds.items() if isinstance(network, kind))
    return joint(network, embeddings, mask, x, conditioning, **rows)


def _pi(
    network: PiNetwork,
    embeddings: Tensor,
    mask: Tensor,
    x: Tensor,
    conditioning: Tensor,
    state: Tensor | None = None,
) -> Tensor:
    prefix, suffix = embeddings, network.embed_suffix(x, conditioning, state)
    split, tokens = prefix.shape[1], suffix.shape[1]
    valid = torch.cat([mask, mask.new_ones(mask.shape[0], tokens)], dim=1)
    rotation = rotary(valid.long().cumsum(dim=1) - 1, network.dims.language.head_dim)
    cosine, sine = rotation
    prefix_rotation = cosine[:, :, :split], sine[:, :, :split]
    suffix_rotation = cosine[:, :, split:], sine[:, :, split:]
    seen = valid[:, None].repeat(1, split + tokens, 1)
    seen[:, :split, split:] = False
    seen[:, split:, split:] = network.suffix_mask(mask.device)
    modulations = network.modulations(conditioning)
    layers = zip(network.language.layers, network.expert.layers, strict=True)
    for layer, (language, expert) in enumerate(layers):
        pq, pk, pv, prefix_gate = language.project(prefix, prefix_rotation)
        sq, sk, sv, gate = expert.project(suffix, suffix_rotation, modulations[2 * layer])
        attended = attend(
            torch.cat([pq, sq], dim=2),
            torch.cat([pk, sk], dim=2),
            torch.cat([pv, sv], dim=2),
            seen,
        )
        prefix = language.combine(prefix, attended[:, :split], prefix_gate)
        suffix = expert.combine(suffix, attended[:, split:], gate, modulations[2 * layer + 1])
    suffix, _ = network.expert.norm(suffix, modulations[-1])
    return network.action_out(suffix[:, -network.dims.horizon :])


def _smolvla(
    network: SmolVla, embeddings: Tensor, mask: Tensor, x: Tensor, conditioning: Tensor
) -> Tensor:
    prefix, h = embeddings, network.embed_actions(x, conditioning)
    rotation = rotary(mask.long().cumsum(dim=1) - 1, network.dims.language.head_dim)
    own, cross = network.rotations(mask)
    split, steps = mask.shape[1], h.shape[1]
    sight = torch.zeros(*mask.shape, split + steps, dtype=torch.bool, device=mask.device)
    sight[..., :split] = prefix_sight(mask)
    sight = torch.cat([sight, _action_sight(mask, steps)], dim=1)
    pairs = zip(network.language.layers, network.expert.layers, strict=True)
    for layer, (language, expert) in enumerate(pairs):
        q, k, v = language.project(prefix, rotation)
        if layer in network.dims.self_layers:
            aq, ak, av = expert.project(h, own)
            q, k, v = (torch.cat(both, dim=2) for both in ((q, aq), (k, ak), (v, av)))
            attended = attend(q, k, v, sight)
            of_prefix, of_actions = attended[:, :split], attended[:, split:]
        else:
            of_prefix = attend(q, k, v, sight[:, :split, :split])
            memory = cross_memory(expert, k, v)
            of_actions = attend(expert.project_queries(h, cross), *memory, mask[:, None])
        prefix = language.combine(prefix, of_prefix)
        h = expert.combine(h, of_actions)
    return network.action_out(network.expert.norm(h))


def _groot_n15(
    network: GrootN15,
    embeddings: Tensor,
    mask: Tensor,
    x: Tensor,
    conditioning: Tensor,
    state: Tensor,
) -> Tensor:
    context = network.encode_context(network.features(embeddings, mask), mask)
    return _groot_head(
        network, dict.fromkeys(network.dims.cross_blocks, (context, mask)), x, conditioning, state
    )


def _groot_alternating(
    network: GrootN16 | GrootN17,
    embeddings: Tensor,
    mask: Tensor,
    x: Tensor,
    conditioning: Tensor,
    state: Tensor,
) -> Tensor:
    context = network.context_of(embeddings, mask)
    read = {block: context[part] for part, blocks in network.readers.items() for block in blocks}
    return _groot_head(network, read, x, conditioning, state)


def _groot_head(
    network: GrootN15 | GrootN16 | GrootN17,
    read: Mapping[int, tuple[Tensor, Tensor]],
    x: Tensor,
    conditioning: Tensor,
    state: Tensor,
) -> Tensor:
    """Run the head on the context and mask that each cross-attention block reads."""
    memories = {
        block: (*network.blocks[block].attention.keys_values(context), mask)
        for block, (context, mask) in read.items()
    }
    tokens, modulations = network.embed_tokens(x, network.encode_state(state), conditioning)
    return network.decode(tokens, modulations, memories)
