"""Numbers on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(smallest: int) -> Callable[[str], int]:
    """An argument's `type`: whole numbers that are not smaller; argparse names the option."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = smallest - 1
        if value < smallest:
            raise argparse.ArgumentTypeError(
                f"'{text}' is not a whole number of at least {smallest}"
            )
        return value

    return parse
