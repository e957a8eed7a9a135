"""Recordings as plain units of work: any process replays each to the same result."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from vla_runtime import __version__
from vla_runtime.bundle.schema import SPEC_FILE
from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.robot.file import load_robot
from vla_tools.replay.open_loop_run import run_open_loop
from vla_tools.replay.recorded import read_run
from vla_tools.replay.rerun import PolicyStore, Replay
from vla_tools.replay.setup import Changes
from vla_tools.replay.summary import ReplaySummary

Json = dict[str, Any]
# Recordings of one robot come one after the other: a process loads their policy once.
_POLICIES = PolicyStore()


@dataclass(frozen=True)
class OpenLoopOptions:
    """Options of an open loop; see `run_open_loop`."""

    robot: Path | None = None
    instruction: str | None = None
    every_s: float = 0.5
    namespace: str | None = None


@dataclass(frozen=True)
class Unit:
    """One recording to replay; None: the only `node`, or no `open_loop`."""

    recording: Path
    changes: Changes
    node: str | None = None
    open_loop: OpenLoopOptions | None = None

    @property
    def name(self) -> str:
        """Name of all that the result depends on: files, work, code.

        A bundle that only the recording names is not included.
        """
        bundle = self.changes.bundle
        robot = None if self.open_loop is None else self.open_loop.robot
        files = [
            *BagReader(self.recording).files,
            # It has the checksums of all others.
            *([] if bundle is None else [bundle / SPEC_FILE]),
            *([] if robot is None else [robot]),
        ]
        stamps = [(str(file), *_size_and_time(file)) for file in files]
        parts = [__version__, stamps, asdict(self)]
        text = json.dumps(parts, sort_keys=True, default=str)
        return f'{self.recording.name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}'

    def inputs(self) -> list[Path]:
        """Return the files that a replay needs, but for a bundle that only the recording names."""
        given = [] if self.changes.bundle is None else self.changes.bundle.rglob('*')
        robot = None if self.open_loop is None else self.open_loop.robot
        return [
            *BagReader(self.recording).files,
            *(path for path in given if path.is_file()),
            *([] if robot is None else [robot]),
        ]


def _size_and_time(file: Path) -> tuple[int, int]:
    """Return size and mtime in ns; zeros for a missing file, which the replay reports."""
    try:
        found = file.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def run_unit(unit: Unit) -> Json:
    """Replay a recording; a recording that cannot be replayed is a result with an `error`."""
    begin_s = perf_counter()
    try:
        if unit.open_loop is not None:
            return _open_loop(unit, unit.open_loop)
        run = read_run(BagReader(unit.recording), unit.node)
        summary = ReplaySummary(str(unit.recording), run.node)
        replay = Replay(run, unit.changes, _POLICIES)
        for found in replay.inferences():
            summary.add(found)
        summary.finish(run, tuple(replay.differences), perf_counter() - begin_s)
        return summary.as_json()
    # PyTorch raises RuntimeError for want of memory, and for shapes of a damaged bundle.
    except (ValueError, RuntimeError, MemoryError) as error:
        reason = str(error) or f'{unit.recording}: {type(error).__name__}'
        return {'recording': str(unit.recording), 'error': reason, 'is_broken': False}


def _open_loop(unit: Unit, options: OpenLoopOptions) -> Json:
    return run_open_loop(
        unit.recording,
        unit.changes,
        robot=None if options.robot is None else load_robot(options.robot),
        instruction=options.instruction,
        every_s=options.every_s,
        namespace=options.namespace,
    ).as_json()
