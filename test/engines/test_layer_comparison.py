"""Other forms of an expert's layers are used only where each layer is as right as its operators.

The faults are planted in `FusedExpert`, which stands for the other form: Triton's interpreter has
no bfloat16, in which a whole network hides them.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import pytest
import torch
from test_torch_graphs import seeded_network
from torch import Tensor
from torch.nn import functional as F

from vla_runtime.engines.torch import compilation, compiled_parts
from vla_runtime.engines.torch.engine import TorchEngine
from vla_runtime.families.blocks.fused_expert import FusedExpert, Past
from vla_runtime.families.blocks.layers import gelu_tanh

FAMILIES = ['pi05', 'pi0', 'smolvla']
HALF = [torch.bfloat16, torch.float16]


class Right(FusedExpert):
    """The operators once more."""


class LastKeyHidden(FusedExpert):
    def load(self, mask: Tensor, own: Past | None, cross: Past | None = None) -> None:
        last = mask.cumsum(dim=1).argmax(dim=1, keepdim=True)
        super().load(mask.scatter(1, last, False), own, cross)


class NoValues(FusedExpert):
    def load(self, mask: Tensor, own: Past | None, cross: Past | None = None) -> None:
        zeroed = [past and (past[0], torch.zeros_like(past[1])) for past in (own, cross)]
        super().load(mask, *zeroed)


class KeysReversed(FusedExpert):
    """Keys whose rotary positions are those of other tokens."""

    def load(self, mask: Tensor, own: Past | None, cross: Past | None = None) -> None:
        turned = [past and (past[0].flip(-2), past[1]) for past in (own, cross)]
        super().load(mask, *turned)


class OtherActivation(FusedExpert):
    def __init__(self, blocks: Sequence[Any], *rest: Any) -> None:
        changed = [copy(block) for block in blocks]
        for block in changed:
            block.gated = copy(block.gated)
            was = block.gated.activation
            block.gated.activation = F.silu if was is gelu_tanh else gelu_tanh
        super().__init__(changed, *rest)


class NoGate(FusedExpert):
    """Residuals without the gate, or twice where there is none."""

    def _add(self, product: Tensor, modulation: Any) -> None:
        super()._add(2 * product if modulation is None else product, None)


FAULTS = [LastKeyHidden, NoValues, KeysReversed, OtherActivation, NoGate]


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    for name in ('_LEAST_TRIALS', '_MOST_TRIALS'):
        monkeypatch.setattr(compilation, name, 1)


def engine_of(family: str, form: Any, dtype: torch.dtype, monkeypatch: Any) -> TorchEngine:
    monkeypatch.setattr(compiled_parts, 'triton_layers', lambda name, call: form)
    precision = str(dtype).removeprefix('torch.')
    engine = TorchEngine(seeded_network(family, dtype), max_rows=2)
    compiled_parts.compile_networks(engine, 'triton', precision)
    return engine


@pytest.mark.parametrize('dtype', [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize('family', FAMILIES)
def test_a_right_form_is_used(family, dtype, monkeypatch):
    engine = engine_of(family, Right, dtype, monkeypatch)
    assert engine.torch_compile == 'triton', engine.why_compiled
    assert {type(laid_out.value) for laid_out in engine._laid_out.values()} == {Right}


@pytest.mark.parametrize('form', FAULTS)
@pytest.mark.parametrize('dtype', HALF, ids=str)
@pytest.mark.parametrize('family', FAMILIES)
def test_a_form_with_a_fault_is_not_used(family, dtype, form, monkeypatch):
    engine = engine_of(family, form, dtype, monkeypatch)
    assert engine.torch_compile == 'none'
    assert 'denoise eager (in Triton kernels ' in engine.why_compiled
    assert {type(laid_out.value) for laid_out in engine._laid_out.values()} == {FusedExpert}


def test_a_number_that_is_none_is_a_fault(monkeypatch):
    class NotANumber(FusedExpert):
        def _add(self, product: Tensor, modulation: Any) -> None:
            super()._add(product * float('nan'), modulation)

    engine = engine_of('pi05', NotANumber, torch.bfloat16, monkeypatch)
    assert engine.torch_compile == 'none'
