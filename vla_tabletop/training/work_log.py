"""Log of a work folder: commands, versions of the code, and durations."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vla_runtime.files.atomic_write import write_text
from vla_runtime.files.json_file import read_document


class WorkLog:
    """`runs.json` of a work folder: a run that was cut off is in it, too, as far as it came.

    Args:
        path: path of the file; the runs that it already holds stay.
        command: this run's command line.
        code: version of the code that runs.

    Raises:
        ValueError: the file is no list of runs.
    """

    def __init__(self, path: Path, command: str, code: str) -> None:
        self._path = path
        self.runs: list[dict[str, Any]] = []
        if path.exists():
            runs = read_document(path)
            if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
                raise ValueError(f'{path}: is not a list of runs; remove it')
            self.runs += runs
        self.runs.append({'command': command, 'code': code})

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Note the seconds of wall time that the block takes, however it ends."""
        start_s = time.monotonic()
        try:
            yield
        finally:
            self.runs[-1][f'{step}_seconds'] = round(time.monotonic() - start_s, 1)
            write_text(self._path, json.dumps(self.runs, indent=2) + '\n')
