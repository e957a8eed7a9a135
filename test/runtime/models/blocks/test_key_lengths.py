"""Attention by lengths: valid tokens first, and a kernel that is tried before it is used."""

from __future__ import annotations

import logging

import pytest
import torch
from plain_lengths import attend_by_lengths

from vla_runtime.models.blocks.key_lengths import (
    Shape,
    flash,
    pack_valid_keys,
    usable,
)

CPU = torch.device('cpu')
# Actions as heads of a single token, as published.
PI05 = Shape(50, 1018, 8, 1, 256).folded
SMOLVLA = Shape(50, 241, 15, 5, 64).folded
# A prefix with grouped heads, and one whose heads share all keys.
SMALL = [Shape(9, 40, 6, 3, 8), Shape(24, 24, 8, 1, 16)]


def test_valid_tokens_come_first_and_each_part_keeps_its_order():
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(40, 17, generator=generator) < torch.linspace(0, 1, 40)[:, None]
    for row, places in zip(mask.tolist(), pack_valid_keys(mask).tolist(), strict=True):
        valid = [token for token, holds in enumerate(row) if holds]
        in_order = valid + [token for token, holds in enumerate(row) if not holds]
        assert [in_order[place] for place in places] == list(range(17))


def test_the_plain_attention_is_that_of_each_row_over_its_first_keys():
    """The stand-in itself, in a loop."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(6, 4, 8, generator=generator)
    key, value = torch.randn(2, 10, 2, 8, generator=generator).unbind(0)
    starts = torch.arange(3, dtype=torch.int32)
    lengths = torch.tensor([5, 2], dtype=torch.int32)
    found = attend_by_lengths(query, key, value, starts * 3, starts * 5, 3, 5, lengths)
    for row, length in enumerate(lengths.tolist()):
        for head in range(4):
            k, v = (part[5 * row : 5 * row + length, head // 2] for part in (key, value))
            one = query[3 * row : 3 * row + 3, head]
            expected = (one @ k.T / 8**0.5).softmax(dim=-1) @ v
            assert torch.allclose(found[3 * row : 3 * row + 3, head], expected, atol=1e-6)


def test_queries_of_all_heads_of_a_group_become_heads_of_one_token():
    assert Shape(50, 1018, 8, 1, 256).folded == Shape(1, 1018, 400, 1, 256)
    assert Shape(50, 241, 15, 5, 64).folded == Shape(1, 241, 150, 1, 64)


@pytest.mark.parametrize(
    ('dtype', 'shape'),
    [
        (torch.bfloat16, PI05),
        (torch.float16, SMOLVLA),
        (torch.bfloat16, SMOLVLA),
        *((torch.float32, shape) for shape in SMALL),
    ],
)
def test_a_kernel_of_the_right_numbers_is_used(dtype, shape, caplog):
    with caplog.at_level(logging.INFO):
        assert usable(attend_by_lengths, CPU, dtype, shape) is attend_by_lengths
    assert not caplog.records


def one_key_too_few(*arguments):
    return attend_by_lengths(*arguments[:-1], arguments[-1] - 1)


def without_lengths(*arguments):
    return attend_by_lengths(*arguments[:-1], torch.full_like(arguments[-1], arguments[-2]))


def rows_mixed_up(*arguments):
    return attend_by_lengths(*arguments).flip(0)


def other_scale(query, *arguments):
    return attend_by_lengths(1.2 * query, *arguments)


def only_the_first_row(*arguments):
    """As PyTorch's kernel over pages of keys, where it splits them (its issue 194167)."""
    found = attend_by_lengths(*arguments)
    found[len(found) // 2 :] = torch.nan
    return found


def padding_times_zero(query, key, value, *arguments):
    """As a mask after the softmax: what is behind counts nothing, unless it is NaN."""
    return attend_by_lengths(query, key, value, *arguments) + 0.0 * value.sum()


WRONG = [
    padding_times_zero,
    one_key_too_few,
    without_lengths,
    rows_mixed_up,
    other_scale,
    only_the_first_row,
]


# The smallest fault at the largest size, and each at small ones.
FAULTS = [
    (one_key_too_few, torch.bfloat16, PI05),
    *((kernel, torch.bfloat16, SMOLVLA) for kernel in WRONG),
    *((kernel, torch.float32, shape) for kernel in WRONG for shape in SMALL),
]


@pytest.mark.parametrize(('kernel', 'dtype', 'shape'), FAULTS)
def test_a_kernel_of_wrong_numbers_is_not_used_and_the_log_says_so(kernel, dtype, shape, caplog):
    with caplog.at_level(logging.INFO):
        assert usable(kernel, CPU, dtype, shape) is None
        # Asked again, it knows.
        assert usable(kernel, CPU, dtype, shape) is None
    (record,) = caplog.records
    assert 'keeps its mask on cpu' in record.message and 'off by' in record.message


def test_where_the_operator_refuses_or_is_missing_the_log_says_why(caplog):
    def missing(*arguments):
        return torch.ops.aten.no_such_attention(*arguments)

    usable.cache_clear()
    with caplog.at_level(logging.INFO):
        assert usable(flash, CPU, torch.bfloat16, SMOLVLA) is None
        assert usable(missing, CPU, torch.bfloat16, SMOLVLA) is None
    refused, absent = (record.message for record in caplog.records)
    assert "'aten::_flash_attention_forward'" in refused and "'CPU'" in refused
    assert 'no_such_attention' in absent
    assert all('\n' not in message for message in (refused, absent))


def test_the_operator_takes_what_it_is_given():
    """Arguments alone: without a GPU there are no numbers."""
    queries, keys, heads, kv_heads, head_dim = PI05
    meta = {'device': 'meta', 'dtype': torch.bfloat16}
    query = torch.empty(2 * queries, heads, head_dim, **meta)
    key, value = (torch.empty(2 * keys, kv_heads, head_dim, **meta) for _ in range(2))
    starts = torch.empty(3, dtype=torch.int32, device='meta')
    found = flash(query, key, value, starts, starts, queries, keys, starts[1:])
    assert (found.shape, found.dtype) == (query.shape, query.dtype)
