"""OpenVLA's language model alone, with image tokens as they were recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from network_cases import each_case, each_entry, relative_error
from openvla_cases import OpenVlaCase, load_decoding_case
from torch import Tensor

pytestmark = pytest.mark.cases
TOLERANCE = 2e-5


def close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert relative_error(found, expected) <= TOLERANCE


@each_entry('openvla_ar')
def test_decoding_alone(path: Path, b: int):
    case = load_decoding_case(path)
    network, tensors, d = case.network, case.tensors, case.description
    embeddings = prompt_of(case, b)
    close(embeddings, tensors['prefill_embeddings'][b])
    image_tokens = tensors['vision_embeddings'][b][None]
    tokens, mask = text_of(case, b)
    past = network.prefix(
        image_tokens, torch.ones(1, dtype=torch.bool), tokens=tokens, token_mask=mask
    )
    length = d['prefill']
    close(past['prefix_key'][:, 0, :, :length], tensors['prefill_keys'][b])
    close(past['prefix_value'][:, 0, :, :length], tensors['prefill_values'][b])
    found, logits = network.answer(past)
    assert torch.equal(found[0], tensors['tokens'][b])
    close(logits[0], tensors['logits'][b])


@each_case('openvla_ar')
def test_rows_of_different_lengths_do_not_see_each_other(path: Path):
    case = load_decoding_case(path)
    rows = [text_of(case, request) for request in range(2)]
    tokens, mask = (torch.cat(parts) for parts in zip(*rows, strict=True))
    # The second row's prompt ends three tokens earlier.
    mask[1, mask[1].sum() - 3 :] = False
    image_tokens = case.tensors['vision_embeddings'][0][None]
    seen = torch.ones(1, dtype=torch.bool)

    def answer(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        past = case.network.prefix(image_tokens, seen, tokens=tokens, token_mask=mask)
        return case.network.answer(past)

    together, logits = answer(tokens, mask)
    for row in range(2):
        alone, expected = answer(tokens[row : row + 1], mask[row : row + 1])
        assert torch.equal(together[row], alone[0])
        close(logits[row], expected[0])


def text_of(case: OpenVlaCase, request: int) -> tuple[Tensor, Tensor]:
    """Tokens (1, L) and mask (1, L) of a request of a decoding case."""
    d = case.description
    found = torch.cat([torch.tensor([d['bos']]), case.tensors['text_ids'][request]])
    tokens = torch.zeros(1, case.network.dims.prompt_length, dtype=torch.int64)
    tokens[0, : len(found)] = found
    return tokens, torch.arange(tokens.shape[1])[None] < len(found)


def prompt_of(case: OpenVlaCase, request: int) -> Tensor:
    """Embeddings (P, W) of a request of a decoding case."""
    tokens, mask = text_of(case, request)
    images = case.tensors['vision_embeddings'][request][None]
    embeddings, seen = case.network.embed_prefix(
        images, torch.ones(1, dtype=torch.bool), tokens=tokens, token_mask=mask
    )
    return embeddings[0, seen[0]]
