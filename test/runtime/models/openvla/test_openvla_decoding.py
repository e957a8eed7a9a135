"""OpenVLA's language model alone, and packed passes: each answer is that of its request alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from network_cases import each_case, each_entry, relative_error
from openvla_cases import OpenVlaCase, load_decoding_case, load_openvla_case
from pi0_fast_cases import load_pi0_fast_case
from recorded_graphs import RecordedGraphs
from torch import Tensor

from vla_runtime.engines.torch import cuda_graph
from vla_runtime.engines.torch import engine as torch_engine
from vla_runtime.engines.torch.token_engine import TorchTokenEngine

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


def rows_of(case, request: int) -> dict[str, np.ndarray]:
    tokens, mask = case.prompt(request)
    return {'tokens': tokens.numpy(), 'token_mask': mask.numpy()}


@pytest.mark.parametrize('graphs', [False, True])
@each_case('openvla_full')
def test_every_request_of_a_case_in_a_full_ring(path: Path, graphs: bool, monkeypatch):
    case = load_openvla_case(path)
    if graphs:
        monkeypatch.setattr(torch_engine, 'captures_graphs', lambda device: True)
        monkeypatch.setattr(cuda_graph, 'CudaGraphCapture', RecordedGraphs)
    engine = TorchTokenEngine(case.network, max_rows=1)
    length = case.network.dims.answer_length
    written: dict[int, list[int]] = {}
    before = RecordedGraphs.captured
    for number in range(3 * length):
        # Some ticks have no new request.
        came = number % 5 != 3
        slot = number % length
        if came:
            request = number % len(case.requests)
            pixels, rows = case.pixels(request), rows_of(case, request)
            engine.encode_image(0, pixels[0].numpy())
            engine.tick(slot, np.ones(1, bool), rows)
            written[number] = []
        else:
            engine.tick(slot)
        tokens = engine.stage_tokens()
        for begun, answer in written.items():
            if number - begun < length:
                answer.append(tokens[begun % length])
    for begun, answer in written.items():
        expected = case.tensors['tokens'][begun % len(case.requests)][: len(answer)]
        assert np.array_equal(answer, expected.numpy())
    if graphs:
        # One with a new prompt, one without, and the camera's.
        assert RecordedGraphs.captured - before == 3
        assert engine.cuda_graph['tick'] == 'captured'
    engine.close()


@each_case('pi0_fast')
def test_prefix_attention_is_packed_as_well(path: Path):
    case = load_pi0_fast_case(path)
    engine = TorchTokenEngine(case.network, max_rows=1)
    pixels, seen = case.images(0)
    for camera, image in enumerate(pixels):
        engine.encode_image(camera, image.numpy())
    length = case.network.dims.answer_length
    steps = case.tensors['logits'].shape[1]
    answers: list[list[int]] = [[], [], []]
    for number in range(steps + 2):
        if number < len(answers):
            engine.tick(number, seen.numpy(), rows_of(case, 0))
        else:
            engine.tick(number % length)
        tokens = engine.stage_tokens()
        for slot, answer in enumerate(answers):
            if slot <= number and len(answer) < steps:
                answer.append(tokens[slot])
    for answer in answers:
        assert np.array_equal(answer, case.tensors['generated_tokens'][0, :steps].numpy())
    engine.close()
