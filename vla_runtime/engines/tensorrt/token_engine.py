"""The TensorRT backend of a `tokens` head: one graph launch a token.

Token and place are inputs of the pass, so one graph serves all places. Keys and values of the token
are copied into their place after it, on the same stream.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from vla_runtime.bundle.onnx_files import (
    ANSWER_INPUTS,
    LOGITS,
    PASS_OUTPUTS,
    TEXT_INPUT,
    TOKENS,
)
from vla_runtime.engines.cuda_runtime import CudaRuntime
from vla_runtime.engines.graphed_work import GraphedWork
from vla_runtime.engines.protocol import DenoiseLoop
from vla_runtime.engines.tensorrt.buffers import DeviceArray, PrefixRows, PrefixSlot
from vla_runtime.engines.tensorrt.engine import TensorRTEngine, Tensors
from vla_runtime.family.listing import find_family


class _TokenRows(PrefixRows):
    """Buffers for one number of prompt rows, with its prefix slots."""

    def __init__(
        self,
        runtime: CudaRuntime,
        prefix: Tensors,
        expert: Tensors,
        inputs: list[str],
    ) -> None:
        super().__init__(runtime, prefix, inputs)
        self._runtime = runtime
        self.text = TEXT_INPUT if TEXT_INPUT in expert else TOKENS
        self.inputs = {
            name: DeviceArray.of(runtime, expert[name])
            for name in (self.text, 'place', *ANSWER_INPUTS)
        }
        self.outputs = {name: DeviceArray.of(runtime, expert[name]) for name in PASS_OUTPUTS}
        self._read = [name for name in self.past if name in expert and name != LOGITS]

    def addresses(self, slot: PrefixSlot) -> dict[str, int]:
        past = {name: slot.arrays[name] for name in self._read}
        named = {**past, **self.inputs, **self.outputs}
        return {name: array.address for name, array in named.items()}

    def keep(self, place: int) -> None:
        for name, output in zip(ANSWER_INPUTS, ('key', 'value'), strict=True):
            made = self.outputs[output]
            target = self.inputs[name].address + place * made.size
            self._runtime.copy(target, made.address, made.size)


class _PassProbe:
    """Random keys and values of a prefix, and a random token."""

    def __init__(self, rows: _TokenRows, slot: PrefixSlot, vocabulary: int) -> None:
        self._rows, self._slot, self._vocabulary = rows, slot, vocabulary

    def vary(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        for array in self._slot.arrays.values():
            array.draw(random)
        text = self._rows.inputs[self._rows.text]
        if self._rows.text == TOKENS:
            text.write(random.integers(0, self._vocabulary, text.shape))
        else:
            text.draw(random)
        self._rows.inputs['place'].write(np.zeros(self._rows.inputs['place'].shape, np.int64))

    def outputs(self) -> np.ndarray:
        floats = (LOGITS, 'key', 'value')
        return np.concatenate([self._rows.outputs[name].read().ravel() for name in floats])


class TensorRTTokenEngine(TensorRTEngine):
    """Vision, prefix and pass engines (`protocol.TokenEngine`); see `TensorRTEngine`."""

    _buffers: dict[int, _TokenRows]

    def _row_buffers(self, prefix: Tensors, expert: Tensors) -> _TokenRows:
        inputs = list(self._family.prefix_inputs(self.dims))
        return _TokenRows(self._runtime, prefix, expert, inputs)

    def _make_head(self, expert: Tensors) -> None:
        # Logits of the first token are the prefix's.
        self._first: np.ndarray | None = None
        self._passes: dict[tuple[int, int], GraphedWork] = {}
        # Whose graph reads the answer's tokens.
        self._read_by = (self._rows, self._slot)

    def _begin_schedule(self, denoise_steps: int) -> None:
        """Tokens have no schedule."""

    def _prepare_head(self, place: tuple[int, int]) -> None:
        buffers = self._buffers[place[0]]
        vocabulary = buffers.outputs[LOGITS].shape[-1]
        self._passes[place] = self._graphed('denoise', partial(self._run_pass, place))
        self._passes[place].prepare(_PassProbe(buffers, self._prefix_slot(place), vocabulary))

    @property
    def cuda_graph(self) -> dict[str, str]:
        place = self._graphs_of(self._rows, self._slot)
        return {
            'vision': self._vision.status,
            'prefix': self._encoding(place).status,
            'denoise': self._passes[place].status,
        }

    def captures(self, loop: DenoiseLoop) -> bool:
        # All were captured at load.
        return False

    def begin_answer(self) -> None:
        self._read_by = self._bring_prefix()
        self._first = self._prefix_slot(self._read_by).arrays[LOGITS].read()

    def read_token(self, token: np.ndarray, place: int) -> None:
        rows = self._buffers[self._rows]
        given = {TOKENS: token[:, None]}
        if self._token_embedding is not None:
            given = self._token_embedding.replace_tokens(given)
        rows.inputs[rows.text].write(given[rows.text])
        rows.inputs['place'].write(np.array(place))
        self._passes[self._read_by]()
        rows.keep(place)
        self._first = None

    def next_token(self) -> np.ndarray:
        if self._first is not None:
            return self._first.argmax(axis=-1)
        return self._buffers[self._rows].outputs['token'].read()

    def read_logits(self) -> np.ndarray:
        if self._first is not None:
            return self._first
        return self._buffers[self._rows].outputs[LOGITS].read()

    @property
    def _works(self) -> tuple[GraphedWork, ...]:
        return (*super()._works, *self._passes.values())

    def _run_pass(self, place: tuple[int, int]) -> None:
        addresses = self._buffers[place[0]].addresses(self._prefix_slot(place))
        self._run('expert', place[0], addresses)


def engine_class(family: str) -> type[TensorRTEngine]:
    return TensorRTTokenEngine if find_family(family).head == 'tokens' else TensorRTEngine
