"""Passes of a `tokens` head in the cases that exported networks are compared on.

The first passes of an answer are compared one after the other, from the reference's own tokens, and
the last one over keys and values that are drawn: an answer of hundreds of tokens would take hours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vla_convert.export.receipt import SEED
from vla_runtime.bundle.onnx_files import ANSWER_INPUTS, LOGITS, TOKENS
from vla_runtime.engines.recorded_cases import Case
from vla_runtime.engines.token_embedding import TokenEmbedding
from vla_runtime.families.token_network import TokenNetwork

# Most passes of an answer that follow one another.
_PASSES = 16

Feed = dict[str, np.ndarray]


class PassOfCase(NamedTuple):
    """One pass of a case: its inputs, and the logits (R, vocabulary) that PyTorch gave."""

    feed: Feed
    logits: np.ndarray


def compute_answer(network: TokenNetwork, case: Case) -> None:
    """Add `answer`, `logits`, `answer_key` and `answer_value` to a case with its past.

    With a place behind those of the passes that are compared one after the other also `far_place`,
    `far_token` and `far_logits`.
    """
    past = {name: torch.from_numpy(array) for name, array in case.past.items()}
    key, value = network.answer_places(past)
    passes = min(_PASSES, network.dims.answer_length - 1)
    random = torch.Generator().manual_seed(SEED)
    for cache in (key, value):
        cache[passes:] = torch.randn(cache[passes:].shape, generator=random)

    def read(token: Tensor, place: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return network.read_token(token[:, None], torch.tensor(place), past, key, value)

    tokens, logits = [], [past[LOGITS]]
    for place in range(passes):
        tokens.append(logits[-1].argmax(dim=-1))
        found, _, key[place], value[place] = read(tokens[-1], place)
        logits.append(found)
    reference = {
        'answer': torch.stack(tokens) if tokens else torch.zeros(0, case.rows, dtype=torch.int64),
        LOGITS: torch.stack(logits),
        **dict(zip(ANSWER_INPUTS, (key, value), strict=True)),
    }
    far = len(key) - 1
    if far >= passes:
        token = logits[-1].argmax(dim=-1)
        reference |= {
            'far_place': torch.tensor(far),
            'far_token': token,
            'far_logits': read(token, far)[0],
        }
    case.reference |= {name: tensor.numpy() for name, tensor in reference.items()}


def pass_inputs(
    token: np.ndarray,
    place: int,
    past: Mapping[str, np.ndarray],
    answer: Mapping[str, np.ndarray],
    table: TokenEmbedding | None,
) -> Feed:
    """Inputs of a graph of one pass.

    Args:
        token: (R,) int64; place: its place in the answer.
        past: outputs of the prefix.
        answer: keys and values of the answer, by the names of `ANSWER_INPUTS`.
        table: text table of a graph that takes rows of it.
    """
    tokens: Mapping[str, np.ndarray] = {TOKENS: token[:, None]}
    if table is not None:
        tokens = table.replace_tokens(tokens)
    seen = {name: array for name, array in past.items() if name != LOGITS}
    return {**tokens, 'place': np.array(place), **seen, **answer}


def passes_of(case: Case, table: TokenEmbedding | None) -> Iterator[PassOfCase]:
    """Every compared pass alone, over PyTorch's own keys and values."""
    reference = case.reference
    answer = {name: reference[name] for name in ANSWER_INPUTS}
    for place, token in enumerate(reference['answer']):
        feed = pass_inputs(token, place, case.past, answer, table)
        yield PassOfCase(feed, reference[LOGITS][place + 1])
    if 'far_place' in reference:
        place, token = int(reference['far_place']), reference['far_token']
        yield PassOfCase(
            pass_inputs(token, place, case.past, answer, table), reference['far_logits']
        )
