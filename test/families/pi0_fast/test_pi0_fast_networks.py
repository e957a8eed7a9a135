"""pi0-FAST's network and action tokens against the reference cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from network_cases import each_case, each_entry, relative_error
from pi0_fast_cases import load_pi0_fast_case, refused
from torch import Tensor

pytestmark = pytest.mark.cases
TOLERANCE = 2e-5
# What LeRobot makes of streams that are refused here.
BROKEN = 1000.0


def close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert relative_error(found, expected) <= TOLERANCE


@each_entry('pi0_fast')
def test_images_and_prefix(path: Path, b: int):
    case = load_pi0_fast_case(path)
    pixels, seen = case.images(b)
    image_tokens = case.network.vision(pixels)
    for camera in range(case.description['cameras']):
        close(image_tokens[camera], case.tensors[f'image_features_{camera}'][b])
    tokens, mask = case.prompt(b)
    embeddings, valid = case.network.embed_prefix(
        image_tokens, seen, tokens=tokens, token_mask=mask
    )
    places = case.places(b)
    close(embeddings[0, valid[0]], case.tensors['prefix_embeddings'][b, places])
    past = case.past(b)
    assert torch.equal(past['prefix_mask'], valid)
    for name in ('key', 'value'):
        expected = case.tensors[f'prefix_{name}s'][:, b][:, :, places]
        close(past[f'prefix_{name}'][:, 0][:, :, valid[0]], expected)
    close(past['logits'][0], case.tensors['logits'][b, 0])


@each_entry('pi0_fast')
def test_tokens_and_their_logits(path: Path, b: int):
    case = load_pi0_fast_case(path)
    tokens, logits = case.network.answer(case.past(b))
    steps = case.tensors['logits'].shape[1]
    close(logits[0, :steps], case.tensors['logits'][b])
    expected = case.tensors['generated_tokens'][b, :steps]
    assert torch.equal(tokens[0, :steps], expected)
    chunk = case.decoder()(tokens[0, :steps].numpy())
    assert np.abs(chunk - case.tensors['chunk'][b].numpy()).max() <= 1e-5


@each_case('pi0_fast')
def test_streams_are_decoded_or_refused(path: Path):
    case = load_pi0_fast_case(path)
    decoder, decoded = case.decoder(), 0
    for tokens, expected in zip(
        case.tensors['detok_tokens'].numpy(), case.tensors['detok_actions'].numpy(), strict=True
    ):
        if not expected.any() or np.abs(expected).max() > BROKEN:
            assert refused(decoder, tokens)
            continue
        decoded += 1
        assert np.abs(decoder.decode(tokens) - expected).max() <= 1e-5
        if case.description['end_of_action'] not in tokens:
            with pytest.raises(ValueError):
                decoder(tokens)
    assert decoded


@each_case('pi0_fast')
def test_encoded_actions_come_back(path: Path):
    """The training side: coefficients were rounded to the scale."""
    case = load_pi0_fast_case(path)
    decoder = case.decoder(checks_prefix=True)
    for tokens, mask, actions in zip(
        case.tensors['encode_tokens'].numpy(),
        case.tensors['encode_mask'].numpy(),
        case.tensors['encode_actions'].numpy(),
        strict=True,
    ):
        if case.description['end_of_action'] not in tokens[mask]:
            # Cut at the most action tokens of a sequence.
            continue
        written = tokens[mask]
        # A BOS stands in front in training.
        written = written[written != case.description['bos']]
        assert np.abs(decoder(written) - actions).max() <= 0.5


@each_case('pi0_fast')
def test_an_answer_without_the_prefix_is_refused_where_the_folder_says_so(path: Path):
    case = load_pi0_fast_case(path)
    names = case.description['detok_sequences']
    bare = case.tensors['detok_tokens'][names.index('no prefix')].numpy()
    assert not refused(case.decoder(), bare)
    assert refused(case.decoder(checks_prefix=True), bare)
