"""Packed passes write what requests write alone, on the networks of the cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from network_cases import each_case, relative_error
from openvla_cases import load_openvla_case
from pi0_fast_cases import load_pi0_fast_case
from recorded_graphs import RecordedGraphs

from vla_runtime.engines.torch import cuda_graph
from vla_runtime.engines.torch import engine as torch_engine
from vla_runtime.engines.torch.token_engine import TorchTokenEngine
from vla_runtime.families.packed_pass import Ring
from vla_runtime.families.packed_pass import tick as run_tick

pytestmark = pytest.mark.cases


def rows_of(case, request: int) -> dict[str, np.ndarray]:
    tokens, mask = case.prompt(request)
    return {'tokens': tokens.numpy(), 'token_mask': mask.numpy()}


class PackedPass:
    """The packed pass of a network, with no engine around it."""

    def __init__(self, case) -> None:
        self._network = case.network
        self._ring = Ring.of(case.network, case.past(0))

    @torch.inference_mode()
    def tick(self, slot: int, pixels=None, seen=None, rows=None) -> torch.Tensor:
        """Run one pass; return the logits (K, vocabulary) of the newest tokens."""
        newest = None
        if rows is not None:
            images = self._network.vision(pixels)
            given = {name: torch.from_numpy(array) for name, array in rows.items()}
            newest = self._network.embed_prefix(images, seen, **given)
        run_tick(self._network, self._ring, torch.tensor([slot]), newest)
        return self._ring.logits


@pytest.mark.parametrize('graphs', [False, True])
@each_case('openvla_full')
def test_every_request_of_a_case_in_a_full_ring(path: Path, graphs: bool, monkeypatch):
    case = load_openvla_case(path)
    if graphs:
        monkeypatch.setattr(torch_engine, 'captures_graphs', lambda device: True)
        monkeypatch.setattr(cuda_graph, 'CudaGraphCapture', RecordedGraphs)
    engine = TorchTokenEngine(case.network, max_rows=1)
    alone = PackedPass(case)
    length = case.network.dims.answer_length
    written: dict[int, list[int]] = {}
    worst, before = 0.0, RecordedGraphs.captured
    for number in range(3 * length):
        # Some ticks have no new request.
        came = number % 5 != 3
        slot = number % length
        if came:
            request = number % len(case.requests)
            pixels, rows = case.pixels(request), rows_of(case, request)
            engine.encode_image(0, pixels[0].numpy())
            engine.tick(slot, np.ones(1, bool), rows)
            logits = alone.tick(slot, pixels, torch.ones(1, dtype=torch.bool), rows)
            written[number] = []
        else:
            engine.tick(slot)
            logits = alone.tick(slot)
        tokens = engine.stage_tokens()
        for begun, answer in written.items():
            if number - begun < length:
                expected = case.tensors['logits'][begun % len(case.requests), len(answer)]
                worst = max(worst, relative_error(logits[begun % length], expected))
                answer.append(tokens[begun % length])
    assert worst <= 2e-5
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
    engine, alone = TorchTokenEngine(case.network, max_rows=1), PackedPass(case)
    pixels, seen = case.images(0)
    for camera, image in enumerate(pixels):
        engine.encode_image(camera, image.numpy())
    length = case.network.dims.answer_length
    steps = case.tensors['logits'].shape[1]
    answers: list[list[int]] = [[], [], []]
    for number in range(steps + 2):
        if number < len(answers):
            engine.tick(number, seen.numpy(), rows_of(case, 0))
            logits = alone.tick(number, pixels, seen, rows_of(case, 0))
        else:
            engine.tick(number % length)
            logits = alone.tick(number % length)
        tokens = engine.stage_tokens()
        for slot, answer in enumerate(answers):
            if slot <= number and len(answer) < steps:
                expected = case.tensors['logits'][0, len(answer)]
                assert relative_error(logits[slot], expected) <= 2e-5
                answer.append(tokens[slot])
    for answer in answers:
        assert np.array_equal(answer, case.tensors['generated_tokens'][0, :steps].numpy())
    engine.close()
