"""Shapes known from earlier operators are those that PyTorch finds on its `meta` device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vla_runtime.models.shapes import meta_shapes
from vla_runtime.models.shapes.meta_shapes import OperatorShapeCache


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch):
    monkeypatch.setattr(meta_shapes, '_FOUND', {})


def form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


x = torch.empty(2, 3, 4, device='meta')
whole = torch.ones(3, dtype=torch.int64, device='meta')
OPERATORS = {
    'two layouts of one shape': lambda: [x + 1, x.mT.contiguous().mT + 1],
    'numbers that are equal': lambda: [whole * one for one in (1, 1.0, True)],
    'two dtypes': lambda: [x.to(torch.float16) * 2, x * 2],
    'broadcast': lambda: [x * x[:, :1], x * x[0, 0]],
    'several results': lambda: [*torch.topk(x, 2), *torch.max(x, dim=1)],
    'views': lambda: [*x.chunk(2, dim=-1), x.transpose(0, 2), x[:, None].expand(2, 5, 3, 4)],
    'lists': lambda: [torch.cat([x, x]), torch.cat([x, x[:, :2]], dim=1), torch.stack([x, x])],
    'named arguments': lambda: [x.sum(dim=1), x.sum(dim=1, keepdim=True), x.mean(dtype=torch.half)],
    'factories': lambda: [torch.zeros(2, 3, device='meta'), torch.arange(4, device='meta')],
    'attention': lambda: [F.scaled_dot_product_attention(x, x, x)],
    'linear': lambda: [F.linear(x, torch.empty(5, 4, device='meta'))],
}


@pytest.mark.parametrize('name', OPERATORS)
def test_results_are_those_of_the_device_the_first_time_and_the_second(name):
    run = OPERATORS[name]
    expected = [form(one) for one in run()]
    with OperatorShapeCache():
        for _ in range(2):
            found = run()
            assert [form(one) for one in found] == expected
    assert len({id(one) for one in found}) == len(found)


def test_a_shape_is_found_once():
    with OperatorShapeCache():
        x + x
        known = dict(meta_shapes._FOUND)
        x + x
        assert known == meta_shapes._FOUND and len(known) == 1


def test_what_is_written_in_place_is_the_tensor_itself_and_numbers_are_computed():
    numbers, buffer = torch.arange(3.0), x.clone()
    with OperatorShapeCache():
        for _ in range(2):
            assert buffer.add_(1) is buffer
            assert (numbers + 1).tolist() == [1.0, 2.0, 3.0]
    assert not meta_shapes._FOUND


def test_gradients_are_traced_through_known_results():
    weight, frozen = (torch.empty(4, 4, device='meta', requires_grad=g) for g in (True, False))
    with OperatorShapeCache():
        for _ in range(2):
            found = F.gelu(x @ weight) + x @ frozen
            assert torch.autograd.grad(found.sum(), [weight])[0].shape == weight.shape


@pytest.mark.parametrize('inference', [False, True])
def test_operators_made_of_others_are_seen_one_by_one(inference):
    names = []

    class Seen(OperatorShapeCache):
        def ran(self, func, args, kwargs, result):
            names.append(str(func.overloadpacket))

    with torch.inference_mode(inference):
        given = torch.empty(2, 3, 4, device='meta')
        with Seen():
            F.linear(given, torch.empty(5, 4, device='meta'))
    assert 'aten.mm' in names and 'aten.linear' not in names
