"""Packed passes write what requests write alone, on the networks of the cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from network_cases import each_case
from openvla_cases import load_openvla_case
from pi0_fast_cases import load_pi0_fast_case
from recorded_graphs import RecordedGraphs

from vla_runtime.engines.torch import cuda_graph
from vla_runtime.engines.torch import engine as torch_engine
from vla_runtime.engines.torch.token_engine import TorchTokenEngine

pytestmark = pytest.mark.cases


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
