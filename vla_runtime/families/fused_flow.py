"""Fused form of a flow policy whose expert reads a language model's keys and values.

What depends on the prefix alone is laid out once per prefix, what depends on the flow time alone
once per schedule.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from vla_runtime.families.blocks.fused import (
    FusedBlock,
    FusedVision,
    norm_scale,
    used_tokens,
)
from vla_runtime.families.blocks.fused_expert import FusedExpert, Past
from vla_runtime.families.blocks.fused_lengths import Kernel
from vla_runtime.families.flow_network import FlowNetwork


class FusedFlow(FlowNetwork):
    """Vision, blocks and prefixes of such a network; a subclass adds prefix and velocity.

    Args:
        plain: plain network, which shares its weights.
        static_shapes: compute all tokens, as a captured graph must. Otherwise those that are valid
            in no row are left out.
        suffix_mask: (T, T) bool, what suffix tokens see of each other.
        cross: layers of the expert that attend to the prefix alone.

    Attributes:
        kernel: attends by lengths instead of a mask, with static shapes; None where nothing does.
    """

    expert_type = FusedExpert

    def __init__(
        self, plain: Any, static_shapes: bool, suffix_mask: Tensor, cross: Collection[int] = ()
    ) -> None:
        super().__init__()
        self.family, self.dims = plain.family, plain.dims
        self._plain, self._static_shapes = plain, static_shapes
        self.vision = FusedVision(plain.vision)
        self._language = [FusedBlock(block, epilogues=True) for block in plain.language.layers]
        self._expert = [
            FusedBlock(block, layer in cross, packed=True)
            for layer, block in enumerate(plain.expert.layers)
        ]
        self._final_scale = norm_scale(plain.expert.norm)
        self._suffix_mask = suffix_mask
        self.kernel: Kernel | None = None

    def time_conditioning(self, times: Tensor) -> Tensor:
        conditioning: Tensor = self._plain.time_conditioning(times)
        return conditioning

    def prepare_prefix(
        self, past: Mapping[str, Tensor], into: FusedExpert | None = None
    ) -> FusedExpert:
        mask = past['prefix_mask']
        used = self._used(mask)
        kinds = (self._of_kind(past, kind, used) for kind in ('past', 'self', 'cross'))
        whole, own, cross = kinds
        expert = into or self.expert_type(
            self._expert, self._suffix_mask, self.kernel, self._static_shapes
        )
        kept = mask if used is None else mask[:, used]
        expert.load(kept, whole or own, cross)
        return expert

    def join_prefixes(
        self, prepared: Sequence[FusedExpert], row_axes: Mapping[str, int]
    ) -> FusedExpert:
        return type(prepared[0]).joined(prepared)

    def _used(self, mask: Tensor) -> Tensor | None:
        return None if self._static_shapes else used_tokens(mask)

    @staticmethod
    def _of_kind(past: Mapping[str, Tensor], kind: str, used: Tensor | None) -> Past | None:
        """Keys and values of the layers of a kind, of the tokens in use."""
        if f'{kind}_key' not in past:
            return None
        key, value = past[f'{kind}_key'], past[f'{kind}_value']
        return (key, value) if used is None else (key[..., used, :], value[..., used, :])

    def advance(self, past: Any, *inputs: Tensor) -> Tensor:
        moved: Tensor = past.advance(*inputs)
        return moved
