"""Networks of pi0 and pi0.5: a vision-language prefix and an action expert in one attention.

pi0 (arXiv 2410.24164): state as a token of its own, flow time mixed into the actions. pi0.5 (arXiv
2504.16054): state in the prompt, flow time through adaptive norms. The prefix never sees the
suffix, so its keys and values are computed once per observation. What runs for prefix and expert
where is a table in `base.expert_network`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.declarations.pi import PiDims
from vla_runtime.models.base.expert_network import ExpertNetwork, StepConditioning, stacked
from vla_runtime.models.blocks.action_time import mix_time, time_embedding, time_share
from vla_runtime.models.blocks.attention import images_of_rows
from vla_runtime.models.blocks.decoders import gemma
from vla_runtime.models.blocks.layers import AdaptiveNorm, Apply, by_request, split_modulations
from vla_runtime.models.blocks.siglip import VisionEncoder


class PiNetwork(ExpertNetwork):
    """Vision encoder, language model and action expert; each family adds its time and state inputs.

    Shapes: R prompt rows, V cameras, N tokens an image, L prompt tokens, P = V*N + L, T suffix
    tokens, H horizon, A padded action dimension, W language width, E expert width.
    """

    dims: PiDims
    vision: VisionEncoder

    def __init__(self, dims: PiDims, adaptive: bool) -> None:
        super().__init__()
        self.dims = dims
        self.vision = VisionEncoder(dims.vision, dims.language.width)
        self.language = gemma(dims.language, dims.vocabulary)
        self.expert = gemma(dims.expert, adaptive=adaptive)
        self.action_in = nn.Linear(dims.action_dim, dims.expert.width)
        self.action_out = nn.Linear(dims.expert.width, dims.action_dim)

    def embed_prefix(
        self, image_tokens: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Concatenate image tokens (R, V, N, W) and embedded text (R, L), images first.

        Returns embeddings (R, P, W) float32 and mask (R, P) bool.
        """
        images = image_tokens.flatten(1, 2)
        mask = image_mask.repeat_interleave(image_tokens.shape[2], dim=1)
        embeddings = torch.cat([images, self.language.embed(tokens)], dim=1)
        return embeddings, torch.cat([mask, token_mask], dim=1)

    def prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> Mapping[str, Tensor]:
        """Keys and values (layers, R, kv_heads, P, D) and `prefix_mask` (R, P) bool.

        `rows` are `tokens` (R, L) int64 and `token_mask` (R, L) bool. Valid tokens see all valid
        tokens.
        """
        tokens, token_mask = rows['tokens'], rows['token_mask']
        images = images_of_rows(image_tokens, image_mask, tokens.shape[0])
        embeddings, mask = self.embed_prefix(*images, tokens, token_mask)
        return {**stacked('past', *self.encode_prefix(embeddings, mask)), 'prefix_mask': mask}

    def _use_kernels(self, suffix: int, prefix: int) -> None:
        self.kernel = self._usable(self.expert, suffix, suffix + prefix, folded=True)
        if self.kernel is not None:
            self.prefix_kernel = self._usable(self.language, prefix, prefix, folded=False)


class Pi0(PiNetwork):
    """Suffix: a state token, which does not see the actions, then the actions."""

    def __init__(self, dims: PiDims) -> None:
        super().__init__(dims, adaptive=False)
        width = dims.expert.width
        self.state_projection = nn.Linear(dims.state_dim, width)
        self.action_time_in = nn.Linear(2 * width, width)
        self.action_time_out = nn.Linear(width, width)

    def time_conditioning(self, times: Tensor) -> Tensor:
        """Return the time's contribution to `action_time_in`, bias included; (N,) to (N, E)."""
        return time_share(self.action_time_in, times)

    def split_conditioning(self, conditioning: Tensor) -> StepConditioning:
        return StepConditioning(conditioning)

    def embed_suffix(
        self, x: Tensor, step: StepConditioning, rows: Mapping[str, Tensor], linear: Apply
    ) -> Tensor:
        if 'state' not in rows:
            raise ValueError('pi0 needs the state (R, S) of its state token')
        state = rows['state']
        actions = mix_time(
            self.action_time_in, self.action_time_out, linear(self.action_in, x), step.row
        ).expand(state.shape[0], -1, -1)
        token = by_request(partial(linear, self.state_projection), state)
        return torch.cat([token[:, None], actions], dim=1)

    def suffix_sees(self, device: torch.device) -> Tensor:
        tokens = self.dims.horizon + 1
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
        mask[0, 1:] = False
        return mask


class Pi05(PiNetwork):
    """The flow time becomes scale, shift and gate of the expert's norms; no state token."""

    def __init__(self, dims: PiDims) -> None:
        super().__init__(dims, adaptive=True)
        width = dims.expert.width
        self.time_in = nn.Linear(width, width)
        self.time_out = nn.Linear(width, width)

    def time_conditioning(self, times: Tensor) -> Tensor:
        """Return every norm's modulation in running order; (N,) to (N, (2 depth + 1) * 3 E)."""
        embedded = time_embedding(times, self.dims.expert.width)
        condition = F.silu(self.time_out(F.silu(self.time_in(embedded))))
        norms = [
            norm for block in self.expert.layers for norm in (block.first_norm, block.second_norm)
        ]
        adaptive = cast(list[AdaptiveNorm], [*norms, self.expert.norm])
        return torch.cat([norm.modulation(condition) for norm in adaptive], dim=1)

    def split_conditioning(self, conditioning: Tensor) -> StepConditioning:
        modulations = split_modulations(conditioning, self.dims.expert.width)
        if self.is_laid_out:
            # With a flow time for each action the parts are strided views of the row. Triton's
            # kernels address (B or 1, T or 1, E) by the shape alone.
            modulations = [
                (scale.contiguous(), shift.contiguous(), gate.contiguous())
                for scale, shift, gate in modulations
            ]
        return StepConditioning(conditioning, modulations)

    def embed_suffix(
        self, x: Tensor, step: StepConditioning, rows: Mapping[str, Tensor], linear: Apply
    ) -> Tensor:
        return linear(self.action_in, x)

    def suffix_sees(self, device: torch.device) -> Tensor:
        return torch.ones(self.dims.horizon, self.dims.horizon, dtype=torch.bool, device=device)


NETWORKS = {'pi05': Pi05, 'pi0': Pi0}
