"""Products that take GELU or the residual stream along: which are used, and what they change."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vla_runtime.family.dimensions import DecoderDims, VisionDims
from vla_runtime.models.blocks import epilogues, products
from vla_runtime.models.blocks.decoders import gemma
from vla_runtime.models.blocks.epilogues import Epilogue, add, fault_of, gelu, usable
from vla_runtime.models.blocks.layers import Linear, gelu_tanh
from vla_runtime.models.blocks.products import FEW, MANY, Product
from vla_runtime.models.blocks.siglip import vision_block
from vla_runtime.models.blocks.transformer import Block

CPU, SHAPE = torch.device('cpu'), (7, 24, 40)
halves = pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
dtypes = pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])


@pytest.fixture
def on_gpu(monkeypatch):
    """Put stand-ins in the place of a GPU's operators: as cuBLAS, they round once at the end."""

    def put(
        change: Callable[[Tensor], Tensor] = lambda x: x,
        form: Any = gelu_tanh,
        of_stream: Any = lambda stream, dtype: stream,
        of_sum: Any = lambda found, dtype: found,
    ) -> None:
        def gelu_product(bias: Tensor, x: Tensor, matrix: Tensor, use_gelu: bool) -> Tensor:
            assert use_gelu
            found = form(x.float() @ matrix.float() + bias.float())
            return change(found).to(x.dtype)

        def add_product(stream: Tensor, x: Tensor, matrix: Tensor, dtype: Any, out: Tensor) -> None:
            assert out is stream and dtype == out.dtype == torch.float32
            found = of_stream(stream, x.dtype) + change(x.float() @ matrix.float())
            out.copy_(of_sum(found, x.dtype))

        monkeypatch.setattr(torch, '_addmm_activation', gelu_product)
        monkeypatch.setattr(torch.ops.aten.baddbmm, 'dtype_out', add_product, raising=False)

    return put


@dtypes
@pytest.mark.parametrize('epilogue', [gelu, add])
def test_right_ones_are_used(epilogue, dtype, on_gpu):
    on_gpu()
    assert fault_of(epilogue, CPU, dtype, SHAPE) == ''


@dtypes
@pytest.mark.parametrize('epilogue', [gelu, add])
@pytest.mark.parametrize(
    'change',
    [
        lambda x: torch.zeros_like(x),
        lambda x: 1.1 * x,
        lambda x: x.roll(1, dims=-1),
        lambda x: x.index_fill(-1, torch.tensor(3), 0.0),
        lambda x: x * torch.nan,
    ],
    ids=['nothing', 'larger', 'other outputs', 'an output left out', 'no number'],
)
def test_wrong_numbers_are_refused(epilogue, dtype, change, on_gpu):
    on_gpu(change)
    assert fault_of(epilogue, CPU, dtype, SHAPE).startswith('off by ')


@halves
@pytest.mark.parametrize('rounded', ['of_stream', 'of_sum'])
def test_a_stream_or_a_sum_in_half_precision_is_refused(rounded, dtype, on_gpu):
    on_gpu(**{rounded: lambda x, half: x.to(half).float()})
    assert fault_of(add, CPU, dtype, SHAPE).startswith('off by ')


@pytest.fixture
def off_by(monkeypatch):
    """Put operators there whose errors are those of the plain ones, changed."""

    def put(change: Callable[[Tensor], Tensor]) -> None:
        def found(plain: Epilogue, x: Tensor, matrix: Tensor, beside: Tensor) -> Tensor:
            weight = matrix.t()
            exact = plain(x.float(), weight.float(), beside.float())
            return exact + change(plain(x, weight, beside).float() - exact)

        def gelu_product(bias: Tensor, x: Tensor, matrix: Tensor, use_gelu: bool) -> Tensor:
            return found(epilogues.plain_gelu, x, matrix, bias)

        def add_product(stream: Tensor, x: Tensor, matrix: Tensor, dtype: Any, out: Tensor) -> None:
            out.copy_(found(epilogues.plain_add, x[0], matrix[0], stream[0]))

        monkeypatch.setattr(torch, '_addmm_activation', gelu_product)
        monkeypatch.setattr(torch.ops.aten.baddbmm, 'dtype_out', add_product, raising=False)

    return put


def worst_times(ratio: float) -> Callable[[Tensor], Tensor]:
    """Change the worst error alone, which the average of many hardly shows."""
    return lambda error: torch.where(error.abs() == error.abs().max(), ratio * error, error)


@halves
@pytest.mark.parametrize('epilogue', [gelu, add])
@pytest.mark.parametrize(
    ('change', 'right'),
    [
        (lambda error: 1.45 * error, True),
        (lambda error: 1.55 * error, False),
        (worst_times(2.9), True),
        (worst_times(3.2), False),
    ],
    ids=['on average', 'more on average', 'at worst', 'more at worst'],
)
def test_errors_are_bounded_by_those_of_the_plain_operators(epilogue, dtype, change, right, off_by):
    off_by(change)
    assert (fault_of(epilogue, CPU, dtype, (64, 24, 40)) == '') == right


@pytest.mark.parametrize(('offset', 'right'), [(1e-5, True), (5e-5, False)])
def test_float32_is_exact_up_to_the_last_bits_of_the_product(offset, right, on_gpu):
    """The product's, however large the stream is."""
    on_gpu(lambda x: x + offset * x.abs().max())
    assert (fault_of(add, CPU, torch.float32, SHAPE) == '') == right


@halves
def test_another_activation_is_refused_in_half_precision_too(dtype, on_gpu):
    on_gpu(form=F.silu)
    assert fault_of(gelu, CPU, dtype, SHAPE).startswith('off by ')


def test_a_cpu_has_another_gelu_and_no_such_sum():
    assert fault_of(gelu, CPU, torch.float32, SHAPE).startswith('off by ')
    # A misspelt call is another RuntimeError, and would silently leave every GPU without the sum.
    with pytest.raises((NotImplementedError, AttributeError)):
        fault_of(add, CPU, torch.bfloat16, SHAPE)
    assert (
        usable(gelu, CPU, torch.float32, SHAPE) is usable(add, CPU, torch.bfloat16, SHAPE) is None
    )


@pytest.mark.parametrize('error', [RuntimeError('not implemented\nfor this'), AttributeError('no')])
def test_what_a_device_refuses_is_said_once_and_not_used(error, monkeypatch, caplog):
    def refuse(*given: Any) -> str:
        raise error

    monkeypatch.setattr(epilogues, 'fault_of', refuse)
    epilogues._tried.cache_clear()
    with caplog.at_level('INFO'):
        for _ in range(2):
            assert usable(add, torch.device('cuda'), torch.bfloat16, SHAPE) is None
    (record,) = caplog.records
    assert '7 tokens, 24 outputs and 40 inputs leave add to a kernel of its own' in record.message
    assert 'for this' not in record.message
    epilogues._tried.cache_clear()


@pytest.mark.parametrize(
    'error',
    [
        torch.cuda.OutOfMemoryError('of PyTorch'),
        RuntimeError('CUDA error: out of memory'),
        RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`'),
    ],
)
def test_too_little_memory_is_no_refusal(error, monkeypatch):
    def fill(*given: Any) -> str:
        raise error

    monkeypatch.setattr(epilogues, 'fault_of', fill)
    with pytest.raises(type(error)):
        usable(gelu, torch.device('cuda'), torch.float16, SHAPE)


@pytest.fixture
def asked(monkeypatch):
    """Shapes that were asked for, with the plain operators as epilogues."""
    found: dict[Epilogue, list[tuple[int, int, int]]] = {gelu: [], add: []}

    def add_in_place(x: Tensor, weight: Tensor, stream: Tensor) -> Tensor:
        return stream.copy_(epilogues.plain_add(x, weight, stream))

    def use(epilogue: Epilogue, device: Any, dtype: Any, shape: tuple[int, int, int]) -> Epilogue:
        found[epilogue].append(shape)
        return epilogues.plain_gelu if epilogue is gelu else add_in_place

    monkeypatch.setattr(products, 'usable', use)
    return found


def joined(block: Block) -> Block:
    """A joined copy of a block."""
    copy = deepcopy(block)
    copy.join()
    return copy


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_a_vision_block_takes_its_gelu_along(dtype, asked, monkeypatch):
    torch.manual_seed(0)
    block = vision_block(
        VisionDims(width=24, depth=1, num_heads=2, mlp_dim=40, patch_size=4, image_size=8)
    )
    block.attention.to(dtype), block.mlp.to(dtype)
    x = torch.randn(2, 5, 24)
    with torch.inference_mode():
        found = joined(block)(x)
        monkeypatch.setattr(products, 'usable', lambda *given: None)
        expected = joined(block)(x)
    assert torch.equal(found, expected)
    assert asked == {gelu: [(10, 40, 24)], add: []}


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_a_language_block_takes_its_gelu_and_residual_stream_along(dtype, asked, monkeypatch):
    torch.manual_seed(0)
    exact = dtype == torch.float32
    dims = DecoderDims(width=24, mlp_dim=40, depth=1, num_heads=2, num_kv_heads=1, head_dim=8)
    (block,) = gemma(dims, vocabulary=3).layers
    block.attention.to(dtype), block.mlp.to(dtype)
    x, attended = torch.randn(2, 5, 24), torch.randn(2, 5, 16)
    with torch.inference_mode():
        with monkeypatch.context() as without:
            without.setattr(products, 'usable', lambda *given: None)
            expected = joined(block).combine(x.clone(), attended)
        one_by_one = block.combine(x.clone(), attended)
        found = joined(block).combine(x, attended)
        assert found is x
        # A product of two layers may add in another order than theirs one by one.
        bounds = {'rtol': 1e-5, 'atol': 1e-5 if exact else 2e-2}
        torch.testing.assert_close(found, expected, **bounds)
        torch.testing.assert_close(found, one_by_one, **bounds)
    # The gate's product, not that of `up`.
    assert asked == {gelu: [(10, 40, 24)], add: [(10, 24, 16), (10, 24, 40)]}


def test_an_expert_block_of_few_tokens_takes_nothing_along(asked):
    dims = DecoderDims(width=24, mlp_dim=40, depth=1, num_heads=2, num_kv_heads=1, head_dim=8)
    (block,) = gemma(dims).layers
    with torch.inference_mode():
        joined(block).combine(torch.randn(2, 5, 24), torch.randn(2, 5, 16))
    assert block.way == FEW and not any(asked.values())


def test_no_epilogue_in_a_wide_copy(asked):
    layer = Linear(24, 40, bias=False)
    product = Product([layer], MANY, epilogue=True)
    assert product._epilogue is add and product.in_float32()._epilogue is None
