"""Print to a terminal that may close while the demo runs."""

from __future__ import annotations

import sys
from typing import TextIO

from vla_runtime.files.standard_output import LostOutputError, discard


def say(text: str, *, end: str = '\n', stream: TextIO | None = None) -> None:
    """Print at once, to standard output by default; a closed terminal is ignored."""
    stream = stream or sys.stdout
    try:
        print(text, end=end, file=stream, flush=True)
    except (OSError, LostOutputError):
        discard(stream)
