"""OpenVLA's networks against the reference cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from network_cases import network_case_paths, relative_error
from openvla_cases import OpenVlaCase, load_decoding_case, load_openvla_case
from torch import Tensor

from vla_runtime.processing.action_bins import ActionBins

pytestmark = pytest.mark.cases
TOLERANCE = 2e-5


def each(kind: str):
    paths = network_case_paths(kind)
    return pytest.mark.parametrize('path', paths, ids=[path.stem for path in paths])


def entries(kind: str):
    """Parametrise with each request of each case."""
    load = load_openvla_case if kind == 'openvla_full' else load_decoding_case
    found = [
        pytest.param(path, request, id=f'{path.stem}-{request}')
        for path in network_case_paths(kind)
        for request in load(path).requests
    ]
    return pytest.mark.parametrize(('path', 'request_number'), found)


def close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert relative_error(found, expected) <= TOLERANCE


@entries('openvla_full')
def test_towers_and_projector(path: Path, request_number: int):
    case = load_openvla_case(path)
    tensors, vision = case.tensors, case.network.vision
    pixels = tensors[f'pixel_values_{request_number}'][None]
    for tower, given, name in (
        (vision.dino, pixels[:, :3], 'dino'),
        (vision.siglip, pixels[:, 3:], 'siglip'),
    ):
        x, expected = tower.embed(given), tensors[f'{name}_layers_{request_number}']
        for layer, block in enumerate(tower.blocks):
            x = block(x)
            close(x[0], expected[layer])
    close(
        vision.features(case.pixels(request_number))[0],
        tensors[f'vision_features_{request_number}'],
    )
    close(vision(case.pixels(request_number))[0], tensors[f'image_features_{request_number}'])


@entries('openvla_full')
def test_prefix_and_that_padding_does_not_matter(path: Path, request_number: int):
    case = load_openvla_case(path)
    past, dims = case.past(request_number), case.network.dims
    keys = case.tensors[f'prefill_keys_{request_number}']
    length = keys.shape[2]
    assert past['prefix_key'].shape[3] == dims.prefix_length == past['prefix_mask'].shape[1]
    assert past['prefix_mask'][0, :length].all() and not past['prefix_mask'][0, length:].any()
    close(past['prefix_key'][:, 0, :, :length], keys)
    close(
        past['prefix_value'][:, 0, :, :length],
        case.tensors[f'prefill_values_{request_number}'],
    )
    close(past['logits'][0], case.tensors['logits'][request_number, 0])


@entries('openvla_full')
def test_answers_and_actions(path: Path, request_number: int):
    case = load_openvla_case(path)
    past = case.past(request_number)
    tokens, logits = case.network.answer(past)
    close(logits[0], case.tensors['logits'][request_number])
    assert torch.equal(tokens[0], case.tensors['tokens'][request_number])
    dims = case.network.dims
    actions = ActionBins(dims.used_vocabulary, dims.action_bins)(tokens[0].numpy())
    assert actions.shape == (1, dims.action_dim)
    expected = case.tensors['normalized_actions'][request_number].numpy()
    assert np.abs(actions[0] - expected).max() <= 1e-6


@entries('openvla_ar')
def test_decoding_alone(path: Path, request_number: int):
    case = load_decoding_case(path)
    network, tensors, d = case.network, case.tensors, case.description
    embeddings = prompt_of(case, request_number)
    close(embeddings, tensors['prefill_embeddings'][request_number])
    image_tokens = tensors['vision_embeddings'][request_number][None]
    tokens, mask = text_of(case, request_number)
    past = network.prefix(
        image_tokens, torch.ones(1, dtype=torch.bool), tokens=tokens, token_mask=mask
    )
    length = d['prefill']
    close(past['prefix_key'][:, 0, :, :length], tensors['prefill_keys'][request_number])
    close(past['prefix_value'][:, 0, :, :length], tensors['prefill_values'][request_number])
    found, logits = network.answer(past)
    assert torch.equal(found[0], tensors['tokens'][request_number])
    close(logits[0], tensors['logits'][request_number])


@each('openvla_ar')
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
