"""Kernels around an expert's layers, interpreted on a CPU, beside PyTorch's operators."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from triton_package import interpreted, needs_triton  # noqa: F401

from vla_runtime.models.blocks import flow_update

pytestmark = [needs_triton, pytest.mark.usefixtures('interpreted')]

BOUND = 1e-5


@pytest.fixture
def step():
    from vla_runtime.models.triton import step as triton_step

    return triton_step


@pytest.mark.parametrize(('inputs', 'outputs'), [(7, 5), (32, 300), (1500, 20)])
def test_a_small_layer_gives_the_numbers_of_the_operators(inputs, outputs, step):
    torch.manual_seed(0)
    layer, x = nn.Linear(inputs, outputs), torch.randn(2, 3, inputs)
    with torch.inference_mode():
        found, expected = step.linear(layer, x), layer(x)
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= BOUND


def test_an_input_that_is_a_part_of_a_tensor_is_read_where_it_is(step):
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 4), torch.randn(2, 5, 6)
    with torch.inference_mode():
        found, expected = step.linear(layer, x[:, -3:]), layer(x[:, -3:])
    assert float((found - expected).abs().max()) <= BOUND


@pytest.mark.parametrize(
    'layer',
    [nn.Linear(8, 4, bias=False), nn.Linear(8, 4).to(torch.bfloat16), nn.Linear(512, 512)],
    ids=['without bias', '16 bits', 'large'],
)
def test_other_layers_stay_in_pytorchs_operators(layer, step, monkeypatch):
    monkeypatch.setattr(step, 'kernels', None)
    x = torch.ones(1, 2, layer.in_features, dtype=layer.weight.dtype)
    with torch.inference_mode():
        assert torch.equal(step.linear(layer, x), layer(x))


@pytest.mark.parametrize('rows', [1, 2])
@pytest.mark.parametrize('requests', [1, 3])
def test_the_update_gives_the_numbers_of_the_operators(rows, requests, step):
    torch.manual_seed(0)
    horizon, actions = 50, 7
    inputs = (
        torch.randn(requests, horizon, actions),
        torch.randn(requests * rows, horizon, actions),
        torch.tensor(0.7),
        torch.tensor(-0.1),
        torch.randn(requests, rows) if requests > 1 else torch.tensor([2.0, -1.0][:rows]),
        torch.randn(requests, horizon, actions),
        torch.rand(requests, horizon, 1),
    )
    found, expected = step.advance(*inputs), flow_update.advance(*inputs)
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= BOUND
