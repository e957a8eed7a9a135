"""Which commands made what lies in a work folder, with which code, and how long each step took."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class WorkLog:
    """`runs.json` of a work folder: a run that was cut off is in it, too, as far as it came.

    Args:
        path: of the file; the runs that it already holds stay.
        command: this run's command line.
        code: version of the code that runs.
    """

    def __init__(self, path: Path, command: str, code: str) -> None:
        self._path = path
        self.runs: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
        self.runs.append({'command': command, 'code': code})

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Note the seconds of wall time that the block takes, however it ends."""
        start_s = time.monotonic()
        try:
            yield
        finally:
            self.runs[-1][f'{step}_seconds'] = round(time.monotonic() - start_s, 1)
            temporary = self._path.with_suffix('.part')
            temporary.write_text(json.dumps(self.runs, indent=2) + '\n')
            os.replace(temporary, self._path)
