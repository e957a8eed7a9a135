"""Error of a data set export."""

from __future__ import annotations


class DatasetError(ValueError):
    """A data set that cannot be made; the message names the bag or folder and what mends it."""
