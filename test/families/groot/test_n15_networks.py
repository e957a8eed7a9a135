"""GR00T N1.5's networks against the training code's numbers, and against themselves uncached."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from groot_cases import N15, load_groot_case
from network_cases import denoised, each_entry, relative_error

pytestmark = pytest.mark.cases

# Relative to the largest value: float32's own noise is 3e-6 in the actions.
BOUND = 5e-5

entries = each_entry(N15)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@entries
def test_image_features_and_embeddings_equal_the_reference(path: Path, b: int):
    case = load_groot_case(path, b)
    cameras = case.description['cameras']
    features = case.network.vision(case.pixels)
    reference = case.tensors['image_features'][b * cameras : (b + 1) * cameras]
    assert relative_error(features, reference) <= BOUND
    embeddings, mask = case.embedded()
    assert mask.all()
    assert relative_error(embeddings[0], case.tensors['input_embeddings'][b, case.valid]) <= BOUND


@entries
def test_features_and_context_equal_the_reference(path: Path, b: int):
    case = load_groot_case(path, b)
    embeddings, mask = case.embedded()
    features = case.network.features(embeddings, mask)
    expected = case.tensors['backbone_features'][b, case.valid]
    assert relative_error(features[0], expected) <= BOUND
    if not case.masks_padding:
        pytest.skip('the head of the training code does not mask padding')
    context = case.network.encode_context(features, mask)
    assert relative_error(context[0], case.tensors['vl_embeddings'][b]) <= BOUND
    past = case.prefix()
    for ours, theirs in (('cross_key', 'cross_keys'), ('cross_value', 'cross_values')):
        assert relative_error(past[ours], case.tensors[theirs][:, b : b + 1]) <= BOUND, ours


@entries
def test_each_steps_velocity_and_the_chunk_equal_the_reference(path: Path, b: int):
    case = load_groot_case(path, b)
    if not case.masks_padding:
        pytest.skip('the head of the training code does not mask padding')
    encoded = case.network.state_encoder(case.state()['state'])
    assert relative_error(encoded, case.tensors['state_features'][b]) <= BOUND
    noise = case.tensors['noise'][b : b + 1]
    steps = denoised(case.network, case.prefix(), noise, case.steps, rows=case.state())
    for k, (_, velocity) in enumerate(steps):
        # Ours runs from 1 to 0.
        assert relative_error(-velocity[0], case.tensors['v_t'][k, b]) <= BOUND, f'step {k}'
    assert relative_error(steps[-1][0][0], case.tensors['actions'][b]) <= BOUND
