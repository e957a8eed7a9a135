"""Greedy decoding: the likeliest token each time, read back for the next, on any engine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vla_runtime.engines.protocol import TokenEngine

# Called with a token's place, the tokens so far (n,) int64 and its logits (vocabulary,).
TokenObserver = Callable[[int, np.ndarray, np.ndarray], None]


def write_answer(
    engine: TokenEngine, length: int, end: int | None, on_token: TokenObserver | None = None
) -> np.ndarray:
    """Write the answer to the prefix that the engine holds; of several prompt rows to the first.

    Args:
        engine: engine with its prefix selected.
        length: most tokens of an answer.
        end: token that ends an answer; None: it has `length` tokens.
        on_token: called after each token.

    Returns:
        (n,) int64 tokens, the end among them

    Raises:
        ValueError: logits that are not finite, whose likeliest token means nothing.
    """
    engine.begin_answer()
    tokens: list[np.ndarray] = []
    while True:
        tokens.append(engine.next_token())
        logits = engine.read_logits()[0]
        if not np.isfinite(logits).all():
            raise not_finite()
        if on_token is not None:
            on_token(len(tokens) - 1, np.array([token[0] for token in tokens]), logits)
        if len(tokens) == length or tokens[-1][0] == end:
            return np.array([token[0] for token in tokens], dtype=np.int64)
        engine.read_token(tokens[-1], len(tokens) - 1)


def not_finite() -> ValueError:
    """Return the error of logits that are not finite."""
    return ValueError(
        'the policy returned a logit that is not finite, so its tokens mean nothing; the chunk is '
        'refused. Check the weights (`vla_runtime info BUNDLE`) and the precision it runs in'
    )
