"""Other forms of an expert's layers are used only where each layer is as right as its operators.

The faults are planted in `JoinedExpert`, which stands for the other form: Triton's interpreter has
no bfloat16, in which a whole network hides them.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
import pytest
import torch
from recorded_graphs import RecordedGraphs
from test_torch_graphs import chunk, encode, seeded_network
from thorough import thorough_but
from torch import Tensor
from torch.nn import functional as F

from vla_runtime.engines.torch import cuda_graph, layer_trial
from vla_runtime.engines.torch import engine as torch_engine
from vla_runtime.engines.torch.engine import TorchEngine
from vla_runtime.inference.denoise import flow_times
from vla_runtime.models.blocks.expert import JoinedExpert, Past
from vla_runtime.models.blocks.layers import gelu_tanh

FAMILIES = ['pi05', 'pi0', 'smolvla']
HALF = [torch.bfloat16, torch.float16]


class Right(JoinedExpert):
    """The operators once more."""


class LastKeyHidden(JoinedExpert):
    def load(self, mask: Tensor, own: Past | None, cross: Past | None = None) -> None:
        last = mask.cumsum(dim=1).argmax(dim=1, keepdim=True)
        super().load(mask.scatter(1, last, False), own, cross)


class NoValues(JoinedExpert):
    def load(self, mask: Tensor, own: Past | None, cross: Past | None = None) -> None:
        zeroed = [past and (past[0], torch.zeros_like(past[1])) for past in (own, cross)]
        super().load(mask, *zeroed)


class KeysReversed(JoinedExpert):
    """Keys whose rotary positions are those of other tokens."""

    def load(self, mask: Tensor, own: Past | None, cross: Past | None = None) -> None:
        turned = [past and (past[0].flip(-2), past[1]) for past in (own, cross)]
        super().load(mask, *turned)


class OtherActivation(JoinedExpert):
    def __init__(self, blocks: Sequence[Any], *rest: Any) -> None:
        changed = [copy(block) for block in blocks]
        for block in changed:
            block.gated = copy(block.gated)
            was = block.gated.activation
            block.gated.activation = F.silu if was is gelu_tanh else gelu_tanh
        super().__init__(changed, *rest)


class NoGate(JoinedExpert):
    """Residuals without the gate, or twice where there is none."""

    def _add(self, product: Tensor, modulation: Any) -> None:
        super()._add(2 * product if modulation is None else product, None)


class FirstTokensNorm(JoinedExpert):
    """Scale and shift of every token are the first one's."""

    def _normalise(self, scale: Any, modulation: Any, epsilon: float) -> None:
        super()._normalise(scale, modulation and [part[:, :1] for part in modulation], epsilon)


class FirstTokensGate(JoinedExpert):
    """The gate of every token is the first one's."""

    def _add(self, product: Tensor, modulation: Any) -> None:
        super()._add(product, modulation and [part[:, :1] for part in modulation])


FAULTS = [LastKeyHidden, NoValues, KeysReversed, OtherActivation, NoGate]


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    monkeypatch.setenv('TRITON_INTERPRET', '1')


def engine_of(
    family: str, form: Any, dtype: torch.dtype, monkeypatch: Any, action_times: bool = False
) -> TorchEngine:
    monkeypatch.setattr(layer_trial, 'triton_layers', lambda: form)
    precision = str(dtype).removeprefix('torch.')
    engine = TorchEngine(seeded_network(family, dtype), max_rows=2)
    layer_trial.choose_layers(engine, precision, action_times=action_times)
    return engine


def chunk_of(engine: TorchEngine, **changes: Any) -> np.ndarray:
    engine.set_schedule(flow_times(3), -1 / 3)
    encode(engine, 3, 1, slot=0)
    return chunk(engine, 3, 1, 0, **changes)


def laid_out_in(engine: TorchEngine) -> set[type]:
    return {type(prepared.value) for prepared in engine._prepared.values()}


@pytest.mark.parametrize('dtype', [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize('family', FAMILIES)
def test_a_right_form_is_used(family, dtype, monkeypatch):
    engine = engine_of(family, Right, dtype, monkeypatch)
    assert engine.triton == 'on', engine.why_triton
    chunk_of(engine)
    assert laid_out_in(engine) == {Right}


@pytest.mark.parametrize('form', FAULTS)
@pytest.mark.parametrize('dtype', thorough_but(HALF[:1], HALF), ids=str)
@pytest.mark.parametrize('family', thorough_but(['pi05', 'smolvla'], FAMILIES))
def test_a_form_with_a_fault_is_not_used(family, dtype, form, monkeypatch):
    engine = engine_of(family, form, dtype, monkeypatch)
    assert engine.triton == 'off'
    assert 'denoise eager (in Triton kernels ' in engine.why_triton
    chunk_of(engine)
    assert laid_out_in(engine) == {JoinedExpert}


@pytest.mark.parametrize('form', [FirstTokensNorm, FirstTokensGate])
@pytest.mark.parametrize('dtype', HALF, ids=str)
def test_a_fault_with_a_flow_time_for_each_action_is_found_where_such_steps_run(
    form, dtype, monkeypatch
):
    plain = TorchEngine(seeded_network('pi05', dtype))
    for compared in (True, False):
        engine = engine_of('pi05', form, dtype, monkeypatch, compared)
        assert engine.triton == ('off' if compared else 'on'), engine.why_triton
        # What was not compared runs in the operators.
        assert np.array_equal(*(chunk_of(one, clean_actions=2) for one in (engine, plain)))
        assert JoinedExpert in laid_out_in(engine)


# The first comparison has whole prompts: a form is built 10 times there and run 12 times, for the
# head and each layer of it. The rest is the second one's.
@pytest.mark.parametrize('good', thorough_but([0, 5], [0, 1, 5, 12, 17]))
@pytest.mark.parametrize('when', ['built', 'loaded', 'run'])
def test_after_an_error_of_any_kind_the_operators_run(when, good, monkeypatch, caplog):
    calls = []

    class OddError(Exception):
        pass

    class Failing(JoinedExpert):
        def _fail_at(self, point: str) -> None:
            calls.extend([point] * (point == when))
            if len(calls) > good:
                raise OddError('out of memory\nfor good')

        def __init__(self, *arguments: Any) -> None:
            self._fail_at('built')
            super().__init__(*arguments)

        def load(self, *arguments: Any) -> None:
            self._fail_at('loaded')
            super().load(*arguments)

        def __call__(self, *arguments: Any) -> Tensor:
            self._fail_at('run')
            return super().__call__(*arguments)

    engine = engine_of('pi05', Failing, torch.float32, monkeypatch)
    assert len(calls) > good, 'it has failed'
    assert engine.triton == 'off'
    assert engine.why_triton == 'denoise eager (cannot be compiled: OddError: out of memory)'
    assert 'please report it' in caplog.text
    calls.clear()
    assert np.array_equal(chunk_of(engine), chunk_of(TorchEngine(seeded_network('pi05'))))
    assert laid_out_in(engine) == {JoinedExpert} and not calls


def test_a_trial_captures_no_graph_that_stays_and_none_without_work(monkeypatch, recwarn):
    monkeypatch.setattr(torch_engine, 'captures_graphs', lambda device: True)
    monkeypatch.setattr(cuda_graph, 'CudaGraphCapture', RecordedGraphs)
    engine = engine_of('pi05', Right, torch.float32, monkeypatch, True)
    assert engine.triton == 'on', engine.why_triton
    assert not engine._prepared and not [w for w in recwarn if 'is empty' in str(w.message)]
    found, expected = (
        chunk_of(one, clean_actions=2) for one in (engine, TorchEngine(seeded_network('pi05')))
    )
    assert np.abs(found - expected).max() <= 1e-5
    assert laid_out_in(engine) == {Right}
    assert set(engine.cuda_graph.values()) == {'captured'}


def test_a_capture_that_fails_in_a_trial_leaves_the_operators_their_graphs(monkeypatch):
    monkeypatch.setattr(torch_engine, 'captures_graphs', lambda device: True)
    monkeypatch.setattr(cuda_graph, 'CudaGraphCapture', RecordedGraphs)

    class Waiting(JoinedExpert):
        def __call__(self, *arguments: Any) -> Tensor:
            found = super().__call__(*arguments)
            return found.mul_(1.0 + 0.0 * found.sum().item())

    engine = engine_of('pi05', Waiting, torch.float32, monkeypatch)
    assert 'denoise eager (cannot be captured: RuntimeError: operation not' in engine.why_triton
    chunk_of(engine)
    assert laid_out_in(engine) == {JoinedExpert}
    assert set(engine.cuda_graph.values()) == {'captured'}


def test_a_number_that_is_none_is_a_fault(monkeypatch):
    class NotANumber(JoinedExpert):
        def _add(self, product: Tensor, modulation: Any) -> None:
            super()._add(product * float('nan'), modulation)

    engine = engine_of('pi05', NotANumber, torch.bfloat16, monkeypatch)
    assert engine.triton == 'off'
