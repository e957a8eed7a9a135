"""OpenVLA-OFT's network against a plain oracle, and the oracle against the reference cases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from network_cases import network_case_paths, relative_error
from oft_cases import load_oft_case
from oft_oracle import head_actions, image_features, language_features, linear
from torch import Tensor

pytestmark = pytest.mark.cases
PATHS = network_case_paths('openvla_full')
each = pytest.mark.parametrize('path', PATHS, ids=[path.stem for path in PATHS])
TOLERANCE, OF_ACTIONS = 2e-5, 1e-5


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@each
def test_the_oracle_gives_the_reference_features_and_logits(path: Path):
    """Towers, projector and language model are OpenVLA's; with causal attention so are logits."""
    case = load_oft_case(path)
    w, d, tensors = case.weights, case.description, case.of.tensors
    for request in case.requests:
        image = (case.of.pixels(request)[0].double() + 1) / 2
        found = image_features(w, d, image)
        assert relative_error(found, tensors[f'image_features_{request}']) <= TOLERANCE
        x = tensors[f'prefill_embeddings_{request}'].double()
        last = language_features(w, d, x, causal=True)[-1]
        logits = linear(w, 'language_model.lm_head', last)
        assert relative_error(logits, tensors['logits'][request, 0]) <= TOLERANCE
        assert relative_error(language_features(w, d, x)[-2], last) > 0.1


def parts_of(path: Path, request: int) -> tuple[Tensor, Tensor]:
    """Features that the head reads, and actions, of our network."""
    case = load_oft_case(path)
    network = case.network
    images = network.vision(case.pixels(request))
    seen = torch.ones(network.dims.cameras, dtype=torch.bool)
    past = network.prefix(images, seen, **case.rows(request))
    return past['action_features'][0], network.actions(past)[0]


@each
def test_features_and_actions_are_the_oracles(path: Path):
    case = load_oft_case(path)
    for request in case.requests:
        hidden = case.hidden(request)
        features, actions = parts_of(path, request)
        assert relative_error(features.reshape(hidden.shape), hidden) <= TOLERANCE
        expected = head_actions(case.weights, case.description, hidden)
        assert relative_error(actions, expected) <= OF_ACTIONS


@each
def test_the_places_of_a_chunk_see_each_other(path: Path):
    """The first action changes with what stands behind it: the stop token, say."""
    case = load_oft_case(path)
    network = case.network
    images = network.vision(case.pixels(0))
    seen = torch.ones(network.dims.cameras, dtype=torch.bool)
    embeddings, mask = network.embed_prefix(images, seen, *case.rows(0).values())
    right, _ = network.read(embeddings, mask)
    embeddings[:, -1] = 0.0
    without, _ = network.read(embeddings, mask)
    first = -1 - network.dims.action_places
    assert relative_error(without[:, first], right[:, first]) > 1e-3
