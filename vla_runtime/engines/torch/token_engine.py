"""The PyTorch backend of a `tokens` head: one captured graph a pass.

Every number of rows and slot has one graph: token and place are inputs of it. It writes keys and
values of the token into their place. Packed requests have two more, with and without a new prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vla_runtime.engines.graphed_work import GraphedWork
from vla_runtime.engines.protocol import FEATURES, DenoiseLoop, Feature, PrefixSlot
from vla_runtime.engines.torch.engine import TorchEngine
from vla_runtime.models.base.packed_pass import Ring
from vla_runtime.models.base.packed_pass import tick as run_tick
from vla_runtime.models.base.token_network import TokenNetwork

# Place of one prompt row whose stream the ring is used in.
_FIRST = (1, 0)


class _Answer:
    """Buffers of the answers to one number of prompt rows.

    Attributes:
        tokens: (R, 1) int64, read back; place: () int64.
        key, value: (F, layers, R, kv_heads, D).
        logits: (R, vocabulary) float32; token: (R,) int64, the likeliest.
    """

    def __init__(self, network: TokenNetwork, past: Mapping[str, Tensor]) -> None:
        logits = past['logits']
        self.tokens = torch.zeros(len(logits), 1, dtype=torch.int64, device=logits.device)
        self.place = torch.zeros((), dtype=torch.int64, device=logits.device)
        self.key, self.value = network.answer_places(past)
        self.logits = torch.zeros_like(logits)
        self.token = torch.zeros_like(self.tokens[:, 0])


class TorchTokenEngine(TorchEngine):
    """Vision, prefix and passes in PyTorch (`protocol.TokenEngine`); see `TorchEngine`."""

    _network: TokenNetwork
    # An answer is written request by request.
    features: frozenset[Feature] = FEATURES['torch'] - {'together'}

    def __init__(
        self, network: TokenNetwork, *, max_rows: int = 2, use_cuda_graphs: bool = True
    ) -> None:
        self._passes: dict[PrefixSlot, GraphedWork] = {}
        super().__init__(network, max_rows=max_rows, use_cuda_graphs=use_cuda_graphs)
        self._answers = {
            rows: _Answer(network, buffers.slots[0]) for rows, buffers in self._buffers.items()
        }
        self._ring: Ring | None = None
        # With and without a new prompt.
        self._ticks = {
            newest: self._graphed('prefix', partial(self._run_tick, newest))
            for newest in (True, False)
        }

    @property
    def cuda_graph(self) -> Mapping[str, str]:
        graphs = {**super().cuda_graph, 'denoise': self._passes[self._place].status}
        return graphs if self._ring is None else {**graphs, 'tick': self._ticks[True].status}

    def captures(self, loop: DenoiseLoop) -> bool:
        place = loop.rows, loop.slot
        return any(work.captures for work in (*self._prefix[place], self._passes[place]))

    def open_session(self) -> int:
        session = super().open_session()
        for place in self._encodings:
            if place not in self._passes:
                self._passes[place] = self._graphed('denoise', partial(self._run_pass, *place))
        return session

    @property
    def captures_tick(self) -> bool:
        return any(work.captures for work in self._ticks.values())

    @torch.inference_mode()
    def begin_answer(self) -> None:
        answer, (rows, slot) = self._answers[self._variant.rows], self._place
        with self._denoising(self._place):
            answer.logits.copy_(self._buffers[rows].slots[slot]['logits'])
            answer.token.copy_(answer.logits.argmax(dim=-1))

    @torch.inference_mode()
    def read_token(self, token: np.ndarray, place: int) -> None:
        answer = self._answers[self._variant.rows]
        with self._denoising(self._place):
            answer.tokens.copy_(torch.from_numpy(token)[:, None])
            answer.place.fill_(place)
            self._passes[self._place].run()

    def next_token(self) -> np.ndarray:
        with self._denoising():
            return self._answers[self._variant.rows].token.cpu().numpy().copy()

    def read_logits(self) -> np.ndarray:
        with self._denoising():
            return self._answers[self._variant.rows].logits.cpu().numpy().copy()

    @torch.inference_mode()
    def tick(
        self,
        slot: int,
        image_mask: np.ndarray | None = None,
        rows: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        # In the prefix's stream, which waits for the images.
        with self._encoding(_FIRST):
            ring = self._make_ring()
            self._slot.fill_(slot)
            if rows is not None:
                assert image_mask is not None
                self._image_mask.copy_(torch.from_numpy(image_mask))
                for name, buffer in self._buffers[1].prefix_inputs.items():
                    buffer.copy_(torch.from_numpy(rows[name]))
            work = self._ticks[rows is not None]
            if work.captures:
                # A capture runs the pass more than once.
                kept = [tensor.clone() for tensor in ring.state()]
                work.prepare()
                for tensor, value in zip(ring.state(), kept, strict=True):
                    tensor.copy_(value)
            work.run()

    def stage_tokens(self) -> np.ndarray:
        with self._encoding(_FIRST):
            return self._make_ring().tokens.cpu().numpy().copy()

    def _make_ring(self) -> Ring:
        if self._ring is None:
            self._ring = Ring.of(self._network, self._buffers[1].slots[0])
            self._slot = torch.zeros(1, dtype=torch.int64, device=self._device)
        return self._ring

    def _run_tick(self, newest: bool) -> None:
        ring, given = self._make_ring(), None
        if newest:
            given = self._network.embed_prefix(
                self._image_tokens[0], self._image_mask, **self._buffers[1].prefix_inputs
            )
        run_tick(self._network, ring, self._slot, given)

    def close(self) -> None:
        self._passes, self._ticks = {}, {}
        super().close()
        self._answers, self._ring = {}, None

    def _run_pass(self, rows: int, slot: int) -> None:
        answer = self._answers[rows]
        found = self._network.read_token(
            answer.tokens, answer.place, self._buffers[rows].slots[slot], answer.key, answer.value
        )
        place = answer.place[None]
        answer.key.index_copy_(0, place, found.key[None])
        answer.value.index_copy_(0, place, found.value[None])
        answer.logits.copy_(found.logits)
        answer.token.copy_(found.token)
