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
    """
    engine.begin_answer()
    tokens: list[np.ndarray] = []
    while True:
        tokens.append(engine.next_token())
        if on_token is not None:
            so_far = np.array([token[0] for token in tokens])
            on_token(len(tokens) - 1, so_far, engine.read_logits()[0])
        if len(tokens) == length or tokens[-1][0] == end:
            return np.array([token[0] for token in tokens], dtype=np.int64)
        engine.read_token(tokens[-1], len(tokens) - 1)
