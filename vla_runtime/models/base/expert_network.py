"""Flow policies whose expert reads the keys and values of a language model: pi0, pi0.5, SmolVLA.

After `join` what depends on the prefix alone is laid out once per prefix (`JoinedExpert`), and what
depends on the flow time alone is computed once per schedule (`StepConditioning`). What runs:

| situation                                  | prefix                          | head           |
|--------------------------------------------|---------------------------------|----------------|
| gradients, or no `join` (ONNX export)      | `Stack.keys_values`             | `Expert`       |
| torch engine on a CPU                      | `encode_stack`, without padding | `JoinedExpert` |
| torch engine on CUDA                       | `encode_stack`, static shapes   | `JoinedExpert` |
| the same, where Triton is right and faster | `encode_stack`, static shapes   | `TritonExpert` |

Static shapes, which CUDA graphs need, keep the padding: a mask hides it, or a kernel that takes
key lengths (`key_lengths`) never reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vla_runtime.models.base.flow_network import FlowNetwork
from vla_runtime.models.blocks.attention import rotary
from vla_runtime.models.blocks.expert import BlockProducts, Expert, JoinedExpert, Past
from vla_runtime.models.blocks.key_lengths import Kernel, Shape, flash, usable
from vla_runtime.models.blocks.layers import Apply, Modulation, joined
from vla_runtime.models.blocks.prompt_keys import encode_stack, used_tokens
from vla_runtime.models.blocks.transformer import Stack

# One tensor for each layer, or one whose first axis is the layers.
Layers = Sequence[Tensor] | Tensor


@dataclass(frozen=True)
class StepConditioning:
    """One step's row of the time table, as the head takes it, and the modulations of its norms."""

    row: Tensor
    modulations: Sequence[Modulation] = ()


def stacked(kind: str, keys: Layers, values: Layers) -> dict[str, Tensor]:
    """Return a prefix's outputs (layers, R, kv_heads, P, D) of a kind of expert layers."""
    named = {f'{kind}_key': keys, f'{kind}_value': values}
    # A graph that is traced must not take apart what it has put together: it stays in the file.
    return {
        name: layers if isinstance(layers, Tensor) else torch.stack(tuple(layers))
        for name, layers in named.items()
    }


class ExpertNetwork(FlowNetwork):
    """Language model and expert of such a policy; a subclass embeds prefix and suffix.

    Shapes: R rows, P prefix tokens, T suffix tokens, H horizon, A padded action dimension.

    Attributes:
        kernel: attends by lengths instead of a mask, with static shapes; None where nothing does.
        prefix_kernel: likewise, in the prefix.
    """

    dims: Any
    expert_type = JoinedExpert
    language: Stack
    expert: Stack
    action_out: nn.Linear
    # What attends by lengths, where the device can.
    lengths_kernel: Kernel = staticmethod(flash)

    def __init__(self) -> None:
        super().__init__()
        self.kernel: Kernel | None = None
        self.prefix_kernel: Kernel | None = None
        self._products: list[BlockProducts] | None = None

    def suffix_sees(self, device: torch.device) -> Tensor:
        """What suffix tokens see of each other, (T, T) bool."""
        raise NotImplementedError

    def embed_suffix(
        self, x: Tensor, step: StepConditioning, rows: Mapping[str, Tensor], linear: Apply
    ) -> Tensor:
        """Return suffix tokens (B or R, T, expert width) of actions (B, H, A).

        `rows` are the head's inputs, `linear` computes projections.
        """
        raise NotImplementedError

    def split_conditioning(self, conditioning: Tensor) -> StepConditioning:
        """Split a row (B or 1, C), or a row for each action (B or 1, H, C)."""
        raise NotImplementedError

    @staticmethod
    def prefix_sees(mask: Tensor) -> Tensor:
        """What tokens of a prefix with this mask (R, P) see, (R, P or 1, P) bool: all valid."""
        return mask[:, None]

    def join(self, static_shapes: bool = False) -> None:
        super().join(static_shapes)
        self._products = [BlockProducts(block) for block in self.expert.layers]
        if static_shapes:
            self._use_kernels(len(self.suffix_sees(self.device)), self.dims.prefix_length)

    def _use_kernels(self, suffix: int, prefix: int) -> None:
        """Attend by lengths where that is right, for so many tokens."""

    def _usable(self, stack: Stack, queries: int, keys: int, *, folded: bool) -> Kernel | None:
        attention = stack.layers[0].attention
        shape = Shape(queries, keys, attention.num_heads, attention.kv_heads, attention.head_dim)
        dtype = attention.q.weight.dtype
        shape = shape.folded if folded else shape
        return usable(type(self).lengths_kernel, self.device, dtype, shape)

    @property
    def is_laid_out(self) -> bool:
        """True where the steps run over what `prepare_prefix` returns: without gradients."""
        return joined(self._products) is not None

    @property
    def device(self) -> torch.device:
        return self.action_out.weight.device

    def encode_prefix(self, embeddings: Tensor, mask: Tensor) -> tuple[Layers, Layers]:
        """Keys (already rotated) and values (R, kv_heads, P, D) of every layer.

        Entries at padded positions are meaningless.
        """
        if self.is_laid_out:
            return encode_stack(
                self.language.layers,
                embeddings,
                mask,
                self._used(mask),
                self.prefix_sees,
                self.prefix_kernel,
                self.static_shapes,
            )
        rotation = rotary(mask.long().cumsum(dim=1) - 1, self.dims.language.head_dim)
        return self.language.keys_values(embeddings, rotation, self.prefix_sees(mask))

    def prepare_prefix(self, past: Mapping[str, Tensor], into: JoinedExpert | None = None) -> Any:
        """Lay a prefix out for the steps; one of a network that is not joined stays as it is."""
        if not self.is_laid_out or self._products is None:
            return past
        mask = past['prefix_mask']
        used = self._used(mask)
        expert = into or self.expert_type(
            self._products, self.suffix_sees(mask.device), self.kernel, self.static_shapes
        )
        expert.load(mask if used is None else mask[:, used], *_of_kinds(past, used))
        return expert

    def join_prefixes(
        self, prepared: Sequence[JoinedExpert], row_axes: Mapping[str, int]
    ) -> JoinedExpert:
        return type(prepared[0]).joined(prepared)

    def _used(self, mask: Tensor) -> Tensor | None:
        return None if self.static_shapes else used_tokens(mask)

    def velocity(self, x: Tensor, past: Any, conditioning: Any, **rows: Tensor) -> Tensor:
        """As `FlowNetwork.velocity`.

        Args:
            past: outputs of `prefix`, or what they are laid out in.
            conditioning: rows of the time table, or a step's of `split_conditioning`.
        """
        expert, step = past, conditioning
        if isinstance(conditioning, Tensor):
            step = self.split_conditioning(conditioning)
        if isinstance(past, Mapping):
            expert = Expert(
                self.expert.layers,
                self.suffix_sees(x.device),
                past['prefix_mask'],
                *_of_kinds(past, None),
            )
        h = expert(self.embed_suffix(x, step, rows, expert.linear), step.modulations)
        last = step.modulations[-1] if step.modulations else None
        h = self.expert.norm(h[:, -self.dims.horizon :], last)
        velocity: Tensor = expert.linear(self.action_out, h)
        return velocity

    def advance(self, past: Any, *inputs: Tensor) -> Tensor:
        if isinstance(past, Mapping):
            return super().advance(past, *inputs)
        moved: Tensor = past.advance(*inputs)
        return moved


def _of_kinds(past: Mapping[str, Tensor], used: Tensor | None) -> tuple[Past | None, Past | None]:
    """Keys and values of layers that attend to the suffix too, and to the prefix alone.

    `used`: tokens that are taken; None: all.
    """

    def of_kind(kind: str) -> Past | None:
        if f'{kind}_key' not in past:
            return None
        key, value = past[f'{kind}_key'], past[f'{kind}_value']
        return (key, value) if used is None else (key[..., used, :], value[..., used, :])

    return of_kind('past') or of_kind('self'), of_kind('cross')
