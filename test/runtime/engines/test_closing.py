"""Closing what a device holds: nothing is left open, and the first error is the one raised."""

from __future__ import annotations

import logging

import pytest

from vla_runtime.engines.closing import close_all, close_on_error


def failing(text: str, closed: list[str]):
    def close() -> None:
        closed.append(text)
        raise RuntimeError(text)

    return close


def test_all_are_closed_and_the_first_error_is_raised():
    closed: list[str] = []
    with pytest.raises(RuntimeError, match='one'):
        close_all([failing('one', closed), failing('two', closed)])
    assert closed == ['one', 'two']


def test_the_error_of_the_block_is_raised_and_that_of_closing_logged(caplog):
    closed: list[str] = []
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(ValueError, match='first'),
        close_on_error(failing('second', closed)),
    ):
        raise ValueError('first')
    assert closed == ['second']
    assert 'closing after an error failed, too: second' in caplog.text


def test_without_an_error_nothing_is_closed():
    closed: list[str] = []
    with close_on_error(failing('never', closed)):
        pass
    assert closed == []
