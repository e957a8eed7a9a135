"""Fused form of `PiNetwork`: the same numbers, with the work that steps share done once.

Everything that depends on the prefix alone (places of keys and values, mask or lengths, positions)
is laid out once per prefix, everything that depends on the flow time alone once per schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vla_runtime.families.blocks.attention import images_of_rows, repeat_rows
from vla_runtime.families.blocks.fused import (
    FusedBlock,
    FusedVision,
    encode_stack,
    norm_scale,
    normalise,
    rows_of_samples,
    used_tokens,
)
from vla_runtime.families.blocks.fused_expert import FusedExpert
from vla_runtime.families.blocks.fused_lengths import Kernel, flash
from vla_runtime.families.blocks.gemma import Modulation
from vla_runtime.families.flow_network import FlowNetwork
from vla_runtime.families.pi.flow_policy import PiNetwork


@dataclass(frozen=True)
class StepConditioning:
    """One step's row of the time table, and the modulations of its norms (none in pi0)."""

    row: Tensor
    modulations: tuple[Modulation, ...]


class FusedPi(FlowNetwork):
    """The same numbers as a `PiNetwork`, up to rounding.

    Args:
        plain: plain network with its weights, which become shared.
        static_shapes: compute all tokens, as a captured graph must. Otherwise those that are valid
            in no row are left out.
        kernel: attends by lengths instead of a mask: with static shapes, and where it is usable.

    Attributes:
        kernel: the kernel in use; None where nothing attends by lengths.
    """

    expert_type = FusedExpert

    def __init__(self, plain: PiNetwork, static_shapes: bool, kernel: Kernel = flash) -> None:
        super().__init__()
        self.family, self.dims = plain.family, plain.dims
        self._plain, self._static_shapes = plain, static_shapes
        self.vision = FusedVision(plain.vision)
        self._language = [FusedBlock(block, epilogues=True) for block in plain.language.layers]
        self._expert = [FusedBlock(block, packed=True) for block in plain.expert.layers]
        self._final_scale = norm_scale(plain.expert.norm)
        block, prefix = self._expert[0], self.dims.prefix_length
        self._suffix_mask = plain.suffix_mask(block.qkv.weight.device)
        suffix = len(self._suffix_mask)
        self.kernel = self._prefix_kernel = None
        if static_shapes:
            self.kernel = block.usable(kernel, suffix, suffix + prefix, folded=True)
        if self.kernel is not None:
            self._prefix_kernel = self._language[0].usable(kernel, prefix, prefix)

    def prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> Mapping[str, Tensor]:
        """As `PiNetwork.prefix`."""
        tokens, token_mask = rows['tokens'], rows['token_mask']
        images = images_of_rows(image_tokens, image_mask, tokens.shape[0])
        x, mask = self._plain.embed_prefix(*images, tokens, token_mask)
        past_key, past_value = encode_stack(
            self._language,
            x,
            mask,
            self._used(mask),
            kernel=self._prefix_kernel,
            static_shapes=self._static_shapes,
        )
        return {'past_key': past_key, 'past_value': past_value, 'prefix_mask': mask}

    def time_conditioning(self, times: Tensor) -> Tensor:
        """As `PiNetwork.time_conditioning`."""
        return self._plain.time_conditioning(times)

    def split_conditioning(self, conditioning: Tensor) -> StepConditioning:
        """Split a row (1, C), or a row for each action (1, H, C), into modulations."""
        modulations = (one for one in self._plain.modulations(conditioning) if one is not None)
        return StepConditioning(
            conditioning,
            tuple(
                (scale.contiguous(), shift.contiguous(), gate.contiguous())
                for scale, shift, gate in modulations
            ),
        )

    def prepare_prefix(
        self, past: Mapping[str, Tensor], samples: int, into: FusedExpert | None = None
    ) -> FusedExpert:
        """Return the expert over this prefix."""
        mask = past['prefix_mask']
        used = self._used(mask)
        cut = rows_of_samples(past['past_key'], past['past_value'], used, samples)
        expert = into or self.expert_type(
            self._expert, self._suffix_mask, self.kernel, self._static_shapes
        )
        expert.load(repeat_rows(mask if used is None else mask[:, used], samples), cut)
        return expert

    def _used(self, mask: Tensor) -> Tensor | None:
        return None if self._static_shapes else used_tokens(mask)

    def advance(self, past: Any, *inputs: Tensor) -> Tensor:
        """As `FlowNetwork.advance`."""
        return past.advance(*inputs)

    def velocity(self, x: Tensor, past: Any, conditioning: Any, **rows: Tensor) -> Tensor:
        """As `PiNetwork.velocity`.

        Args:
            x: (B or 1, H, A).
            past: the `FusedExpert` over the prefix.
            conditioning: a `StepConditioning`.
            **rows: pi0's `state` (R, S).
        """
        expert: FusedExpert = past
        step: StepConditioning = conditioning
        state = rows.get('state')
        if state is not None:
            state = repeat_rows(state, max(1, x.shape[0] // state.shape[0]))
        h = expert(self._plain.embed_suffix(x, step.row, state, expert.linear), step.modulations)
        last = step.modulations[-1] if step.modulations else None
        h = normalise(h[:, -self.dims.horizon :], self._final_scale, last)
        return expert.linear(self._plain.action_out, h)
