"""Fused form of `PiNetwork`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vla_runtime.families.blocks.attention import images_of_rows, repeat_rows
from vla_runtime.families.blocks.fused import encode_stack, normalise
from vla_runtime.families.blocks.fused_expert import FusedExpert
from vla_runtime.families.blocks.fused_lengths import Kernel, flash
from vla_runtime.families.blocks.gemma import Modulation
from vla_runtime.families.fused_flow import FusedFlow
from vla_runtime.families.pi.flow_policy import PiNetwork


@dataclass(frozen=True)
class StepConditioning:
    """One step's row of the time table, and the modulations of its norms (none in pi0)."""

    row: Tensor
    modulations: tuple[Modulation, ...]


class FusedPi(FusedFlow):
    """The same numbers as a `PiNetwork`, up to rounding.

    Args:
        plain, static_shapes: as for `FusedFlow`.
        kernel: attends by lengths instead of a mask: with static shapes, and where it is usable.
    """

    def __init__(self, plain: PiNetwork, static_shapes: bool, kernel: Kernel = flash) -> None:
        device = plain.action_in.weight.device
        super().__init__(plain, static_shapes, plain.suffix_mask(device))
        prefix, suffix = plain.dims.prefix_length, len(self._suffix_mask)
        self._prefix_kernel = None
        if static_shapes:
            self.kernel = self._expert[0].usable(kernel, suffix, suffix + prefix, folded=True)
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
