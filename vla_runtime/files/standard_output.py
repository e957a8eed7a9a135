"""Standard output that takes no more, told apart from a file that a verb reads or writes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO, cast

# Descriptors of a process.
_OUTPUT, _ERROR = 1, 2


class LostOutputError(Exception):
    """Standard output takes no more; no OSError, which verbs take for one of their files."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(f'standard output cannot be written: {cause.strerror}')
        # Whoever read it (`| head`) wants no more.
        self._unwanted = isinstance(cause, BrokenPipeError)

    def report(self) -> int:
        """Print the error where anybody is to know of it; return the exit code of the process."""
        if self._unwanted:
            return 141
        print(f'error: {self}', file=sys.stderr)
        return 2


@contextmanager
def watched_output() -> Iterator[None]:
    """Raise `LostOutputError` in the block, or at its end, where standard output takes no more."""
    stream = sys.stdout
    if stream is None:
        # The process was started with its output closed; `print` does nothing then.
        yield
        return
    watched = _Watched(stream)
    try:
        with redirect_stdout(cast(TextIO, watched)):
            yield
        watched.flush()
    except LostOutputError:
        discard(stream)
        raise


def discard(stream: TextIO) -> None:
    """Send a stream's output nowhere, or what it buffers fails again when the interpreter ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class _Watched:
    """A stream whose failed writes are `LostOutputError`s."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _lost():
            return self._stream.write(text)

    def flush(self) -> None:
        with _lost():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LostOutputError(error) from None


@contextmanager
def native_output_aside() -> Iterator[None]:
    """Send to standard error what libraries write to standard output beside Python, as DDS does."""
    if sys.stdout is None:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(_OUTPUT)
    os.dup2(_ERROR, _OUTPUT)
    try:
        yield
    finally:
        os.dup2(kept, _OUTPUT)
        os.close(kept)
