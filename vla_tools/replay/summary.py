"""Summary of a replayed recording, as a table for people and as JSON for tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from vla_runtime.files.quotes import counted
from vla_tools.replay.recorded import RecordedInference, RecordedRun, SkippedInference
from vla_tools.replay.rerun import ChunkError, ErrorTotal, ReplayedInference

_STEPS_SHOWN = 10
_OTHER_JOINTS = 'not compared: its joints are not those of the first chunk; another policy ran then'


class LivePart(Protocol):
    """Result of playing a recording through a real node."""

    @property
    def agrees(self) -> bool:
        """True where every inference that was played gave the offline chunk."""

    def as_json(self) -> dict[str, Any]:
        """Everything, of plain types."""

    def lines(self) -> list[str]:
        """Lines of text for a person."""


@dataclass
class ReplaySummary:
    """Result of replaying one recording; grows with `add`.

    Attributes:
        certain_identical: bit-identical ones without a note.
        skipped: reason to number of inferences.
        notes: note to number of inferences.
        replay_s: reading included.
        first_difference: first differing chunk without a note, and where it differs most.
        live: result of playing through a real node; None: not played.
    """

    recording: str
    node: str
    inferences: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    differences: Sequence[str] = ()
    problems: Sequence[str] = ()
    recorded_s: float = 0.0
    replay_s: float = 0.0
    replayed: int = 0
    certain_identical: int = 0
    error: ErrorTotal = field(default_factory=ErrorTotal)
    milliseconds: dict[str, list[float]] = field(
        default_factory=lambda: {'recorded': [], 'replayed': []}
    )
    units: Mapping[str, str] = field(default_factory=dict)
    first_difference: Mapping[str, Any] | None = None
    live: LivePart | None = None

    def add(self, found: ReplayedInference | SkippedInference) -> None:
        """Take one inference."""
        self.inferences += 1
        if isinstance(found, SkippedInference):
            self.skipped[found.reason] += 1
            return
        self.replayed += 1
        error, note = found.error, found.note
        if error is not None and self.error.chunks and error.joints != self.error.joints:
            error, note = None, _OTHER_JOINTS
        if note:
            self.notes[note] += 1
        if error is not None:
            self.error.add(error)
            self.certain_identical += error.identical and not note
            if not (error.identical or note or self.first_difference):
                self.first_difference = _largest_difference(found.recorded, error)
        recorded = found.recorded.report.get('ms.total')
        if recorded is not None:
            self.milliseconds['recorded'].append(float(recorded))
        self.milliseconds['replayed'].append(found.report.milliseconds['total'])

    @property
    def must_be_identical(self) -> bool:
        """True where nothing differs from the recording."""
        return not self.differences

    @property
    def is_broken(self) -> bool:
        """True where chunks that must be identical are not."""
        certain = self.replayed - sum(self.notes.values())
        differs = self.must_be_identical and self.certain_identical < certain
        return differs or (self.live is not None and not self.live.agrees)

    def finish(self, run: RecordedRun, differences: Sequence[str], replay_s: float) -> None:
        """Take what is known at the end."""
        self.differences, self.replay_s = tuple(differences), replay_s
        self.problems = [*run.reader.problems, *run.problems]
        times = [inference.time_ns for inference in run.inferences]
        self.recorded_s = (max(times) - min(times)) * 1e-9 if times else 0.0
        if run.inferences:
            robot = run.inferences[0].description.robot
            self.units = {
                name: joint.unit
                for joint in robot.joints
                for name in (joint.name, joint.in_messages)
            }

    def as_json(self) -> dict[str, Any]:
        """Everything, of plain types."""
        error = self.error
        return {
            'recording': self.recording,
            'node': self.node,
            'is_broken': self.is_broken,
            'inferences': self.inferences,
            'replayed': self.replayed,
            'compared': error.chunks,
            'identical': error.identical,
            'skipped': dict(self.skipped),
            'notes': dict(self.notes),
            'differences': list(self.differences),
            'first_difference': self.first_difference,
            'problems': list(self.problems),
            'live': None if self.live is None else self.live.as_json(),
            'recorded_s': self.recorded_s,
            'replay_s': self.replay_s,
            'joints': list(error.joints),
            'units': [self.units.get(name, '') for name in error.joints],
            'mean_error_by_step': error.mean.tolist(),
            'largest_error_by_step': error.largest.tolist(),
            'median_ms': {
                name: float(np.median(values)) if values else None
                for name, values in self.milliseconds.items()
            },
        }

    def lines(self) -> list[str]:
        """Lines of text for a person."""
        error = self.error
        lines = [
            f'{self.recording}: {counted(self.inferences, "inference")} of '
            f'{self.node}, '
            f'{self.recorded_s:.1f} s; replayed in {self.replay_s:.1f} s',
            f'  replayed {self.replayed}, compared {error.chunks}, bit-identical {error.identical}',
        ]
        for text in self.differences:
            lines.append(f'  differs from the recording: {text}')
        if self.first_difference and self.must_be_identical:
            lines.append(
                '  first that differs: inference {inference} of episode {episode} (stamp '
                '{stamp_ns} ns), most at step {step} of {joint}: {error:.3g} '.format(
                    **self.first_difference
                )
                + self.units.get(self.first_difference['joint'], '')
            )
        for reason, count in self.skipped.most_common():
            lines.append(f'  skipped {count}: {reason}')
        for note, count in self.notes.most_common():
            lines.append(f'  noted {count}: {note}')
        for problem in self.problems:
            lines.append(f'  problem: {problem}')
        lines += [] if self.live is None else self.live.lines()
        if error.chunks and error.identical < error.chunks:
            lines += self._error_lines()
        return lines

    def _error_lines(self) -> list[str]:
        error = self.error
        wide = max(20, *map(len, error.joints))
        lines = ['', f'  {"joint":<{wide}} {"unit":<8} {"mean error":>12} {"largest":>12}']
        for column, name in enumerate(error.joints):
            lines.append(
                f'  {name:<{wide}} {self.units.get(name, ""):<8} '
                f'{error.mean[:, column].mean():>12.3g} {error.largest[:, column].max():>12.3g}'
            )
        lines += ['', f'  {"step":<6} {"mean error":>12} {"largest":>12}   (over all joints)']
        steps = len(error.mean)
        shown = range(0, steps, max(1, -(-steps // _STEPS_SHOWN)))
        for step in shown:
            lines.append(
                f'  {step:<6} {error.mean[step].mean():>12.3g} {error.largest[step].max():>12.3g}'
            )
        return lines


def _largest_difference(recorded: RecordedInference, error: ChunkError) -> dict[str, Any]:
    step, column = np.unravel_index(int(np.argmax(error.absolute)), error.absolute.shape)
    return {
        'episode': recorded.episode,
        'inference': recorded.number,
        'stamp_ns': recorded.stamp_ns,
        'step': int(step),
        'joint': error.joints[column],
        'error': float(error.absolute[step, column]),
    }
