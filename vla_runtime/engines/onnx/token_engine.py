"""The ONNX Runtime backend of a `tokens` head: one run of the expert's graph a token.

The graph writes keys and values of a token straight into their place, which is an input; it sees
that place by what it computes itself, and no place behind it.
"""

from __future__ import annotations

import numpy as np

from vla_runtime.bundle.onnx_files import ANSWER_INPUTS, LOGITS, TEXT_INPUT, TOKENS
from vla_runtime.engines.onnx.engine import OnnxEngine, PrefixRows
from vla_runtime.engines.onnx.graphs import Graphs
from vla_runtime.engines.onnx.session import Binding, Buffer, Session


class _TokenRows(PrefixRows):
    """Bindings and buffers for one number of prompt rows, with its prefix slots."""

    def __init__(self, expert: Session, prefix: Session) -> None:
        super().__init__(prefix)
        self._expert = expert
        self.text = next(name for name in (TEXT_INPUT, TOKENS) if name in expert.inputs)
        self.tokens, self.place = expert.buffer(self.text), expert.buffer('place')
        self.logits, self.token = expert.buffer(LOGITS), expert.buffer('token')
        self._answer = [expert.buffer(name) for name in ANSWER_INPUTS]
        self.places = self._answer[0].shape[0]
        # By slot and place.
        self.read: list[list[Binding]] = []

    def open_session(
        self, slots: list[dict[str, Buffer]], image_tokens: Buffer, image_mask: Buffer
    ) -> None:
        super().open_session(slots, image_tokens, image_mask)
        for slot in range(len(self.read), len(self.past)):
            self.read.append([self._reading(slot, place) for place in range(self.places)])

    def _reading(self, slot: int, place: int) -> Binding:
        binding = self._expert.binding()
        for name, buffer in self.past[slot].items():
            if name in self._expert.inputs:
                binding.input(name, buffer)
        binding.input(self.text, self.tokens)
        binding.input('place', self.place)
        for name, output, buffer in zip(ANSWER_INPUTS, ('key', 'value'), self._answer, strict=True):
            binding.input(name, buffer)
            binding.output_row(output, buffer.shape[1:], buffer, place)
        binding.output(LOGITS, self.logits)
        binding.output('token', self.token)
        return binding


class OnnxTokenEngine(OnnxEngine):
    """Vision, prefix and passes in ONNX Runtime (`protocol.TokenEngine`); see `OnnxEngine`."""

    _rows: dict[int, _TokenRows]

    def _make_head(self, graphs: Graphs) -> None:
        self._rows = {
            rows: _TokenRows(graphs.expert[rows], prefix) for rows, prefix in graphs.prefix.items()
        }
        # Those of the first token are the prefix's.
        self._logits = np.zeros(0, dtype=np.float32)
        self._token = np.zeros(0, dtype=np.int64)

    def begin_answer(self) -> None:
        count, slot = self._prefix
        self._logits = self._rows[count].past[slot][LOGITS].read()
        self._token = self._logits.argmax(axis=-1)

    def read_token(self, token: np.ndarray, place: int) -> None:
        count, slot = self._prefix
        rows = self._rows[count]
        given = {TOKENS: token[:, None]}
        if rows.text == TEXT_INPUT:
            assert self._token_embedding is not None
            given = self._token_embedding.replace_tokens(given)
        rows.tokens.write(given[rows.text])
        rows.place.write(np.array(place))
        self._ran.run(rows.read[slot][place])
        self.synchronize()
        self._token = rows.token.read()
        self._logits = np.zeros(0, dtype=np.float32)

    def next_token(self) -> np.ndarray:
        return self._token

    def read_logits(self) -> np.ndarray:
        return self._logits if self._logits.size else self._rows[self._prefix[0]].logits.read()
