"""Checks a word of a bundle or a caller against its closed vocabulary."""

from __future__ import annotations

from typing import Any, get_args


def check_word(field: str, word: str, vocabulary: Any) -> None:
    """Raise a ValueError that lists the vocabulary, unless `word` belongs to it.

    Args:
        field: name of the word's field, as the reader knows it (`prompt.template`).
        vocabulary: a `typing.Literal` of `vla_runtime.types`.
    """
    allowed = get_args(vocabulary)
    if word not in allowed:
        raise ValueError(f'{field} must be one of {", ".join(allowed)}; got {word!r}')
