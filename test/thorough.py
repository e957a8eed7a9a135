"""What `./run test` leaves to `./run test --all`: cases of a test, and examples of Hypothesis."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings

# Examples of a test that names no number: of all tests, and without the thorough ones.
EXAMPLES, QUICK_EXAMPLES = 50, 17


def thorough_but(kept: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which those that are kept run for every change.

    Args:
        kept: cases that stand for all; each is one of them.
        cases: all cases; those of several parameters are tuples.
    """
    cases = list(cases)
    assert kept and all(one in cases for one in kept), 'what is kept is one of the cases'
    return [case if case in kept else _thorough(case) for case in cases]


def thorough_after(number: int, cases: Iterable[Any]) -> list[Any]:
    """The same, where the first of the cases stand for all."""
    return [case if turn < number else _thorough(case) for turn, case in enumerate(cases)]


def _thorough(case: Any) -> Any:
    if hasattr(case, 'marks'):  # of pytest.param
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.thorough])
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.thorough)


def examples(number: int) -> settings:
    """So many examples, and a third of them without the thorough tests."""
    return settings(max_examples=-(-number * settings().max_examples // EXAMPLES))
