"""pi0-FAST's network and action tokens against the reference cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from network_cases import each_case
from pi0_fast_cases import load_pi0_fast_case, refused

pytestmark = pytest.mark.cases
# What LeRobot makes of streams that are refused here.
BROKEN = 1000.0


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
