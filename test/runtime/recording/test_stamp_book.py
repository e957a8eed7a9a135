"""Stamps that inferences used, and those that came."""

from __future__ import annotations

from vla_runtime.recording.stamp_book import StampBook


def test_what_was_used_and_did_not_come_is_missing():
    book = StampBook(10)
    book.came(1)
    book.wanted(1)
    book.wanted(2)
    assert book.missing == 1
    # A report may be heard before the message that it names.
    book.came(2)
    assert book.missing == 0


def test_what_is_remembered_is_bounded():
    book = StampBook(3)
    for stamp_ns in range(100):
        book.came(stamp_ns)
        book.wanted(1000 + stamp_ns)
    assert book.missing == 3
    book.wanted(99)
    assert book.missing == 3
