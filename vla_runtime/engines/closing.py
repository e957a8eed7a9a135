"""Closing several things of a device, of which some may fail.

After an error that a CUDA context does not recover from, every later call fails with it, also those
that free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


def close_all(closings: Iterable[Callable[[], object]]) -> None:
    """Call every one, also those after one that fails.

    Raises:
        RuntimeError: the first error of CUDA or TensorRT among them.
    """
    first: RuntimeError | None = None
    for close in closings:
        try:
            close()
        except RuntimeError as error:
            first = first or error
    if first is not None:
        raise first
