"""Close several resources of a device, even if some fail to close, as after a lost CUDA context."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


def close_all(closings: Iterable[Callable[[], object]]) -> None:
    """Call every close function; raise the first error of CUDA or TensorRT (RuntimeError)."""
    first: RuntimeError | None = None
    for close in closings:
        try:
            close()
        except RuntimeError as error:
            first = first or error
    if first is not None:
        raise first


@contextmanager
def close_on_error(close: Callable[[], object]) -> Iterator[None]:
    """Close where the block fails, and raise the block's error, also where closing fails too."""
    try:
        yield
    except BaseException:
        try:
            close()
        except Exception as error:
            logger.warning('closing after an error failed, too: %s', error)
        raise
