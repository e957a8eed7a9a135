"""Attention that the families share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vla_runtime.models.blocks import attention


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries of four heads, keys and values of two, and a mask that differs by query."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 3, 8, generator=generator)
    k, v = (torch.randn(2, 2, 5, 8, generator=generator) for _ in range(2))
    return q, k, v, torch.ones(2, 3, 5, dtype=torch.bool).tril(2)


def test_grouped_queries_give_what_copied_keys_and_values_give(inputs) -> None:
    q, k, v, mask = inputs
    copied = (tensor.repeat_interleave(2, dim=1) for tensor in (k, v))
    expected = F.scaled_dot_product_attention(q, *copied, attn_mask=mask[:, None])
    found = attention.attend(q, k, v, mask)
    torch.testing.assert_close(found, expected.transpose(1, 2).reshape(2, 3, 32))


def test_a_result_in_any_memory_layout_is_taken(inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.4 returns tokens before heads in memory; later releases do not."""
    expected = attention.attend(*inputs)
    real = F.scaled_dot_product_attention

    def tokens_first(*tensors: Tensor, **options: Tensor) -> Tensor:
        return real(*tensors, **options).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(F, 'scaled_dot_product_attention', tokens_first)
    assert torch.equal(attention.attend(*inputs), expected)
