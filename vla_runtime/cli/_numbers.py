"""Numbers on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from vla_runtime.files.quotes import quoted

# Of data, training and episodes: what is derived from it stays within int64.
MOST_SEED = 10**12
# More than the cores of any one machine; a process takes tens of megabytes before it has work.
MOST_PROCESSES = 256


def at_least(smallest: int) -> Callable[[str], int]:
    """Argparse `type`: whole numbers of at least this; argparse names the option."""
    return _whole(smallest, None)


def between(smallest: int, largest: int) -> Callable[[str], int]:
    """Argparse `type`: whole numbers in a range, both ends included."""
    return _whole(smallest, largest)


def seconds(text: str) -> float:
    """Argparse `type`: seconds above 0, an hour at most; argparse names the option."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 3600.0:
        raise argparse.ArgumentTypeError(f'{quoted(text)} is not a number of seconds up to 3600')
    return value


def _whole(smallest: int, largest: int | None) -> Callable[[str], int]:
    wanted = f'of at least {smallest}' if largest is None else f'from {smallest} to {largest}'

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = smallest - 1
        if value < smallest or (largest is not None and value > largest):
            raise argparse.ArgumentTypeError(f'{quoted(text)} is not a whole number {wanted}')
        return value

    return parse
