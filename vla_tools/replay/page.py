"""A replay as one HTML page that needs no other file and no network.

Its script draws what the page holds: images, recorded and replayed chunk, latency, ages and cache
of each inference; hand-overs and holds.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from vla_runtime.files.atomic_write import write_text
from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.images import to_rgb
from vla_runtime.messages.trajectories import HandoverReport, read_handover
from vla_runtime.nodes.policy.description import PolicyDescription
from vla_runtime.pages.page import render
from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.recording.topics import is_topic
from vla_runtime.types import ActionChunk
from vla_tools.replay.recorded import SkippedInference
from vla_tools.replay.rerun import ReplayedInference
from vla_tools.replay.summary import ReplaySummary

# --- Hand-overs and holds of the executor in a recording


_DIAGNOSTICS = 'diagnostic_msgs/msg/DiagnosticArray'


@dataclass(frozen=True)
class HoldEvent:
    """A stretch of time in which the executor held the robot, until something else was reported.

    `reason` is the executor's name of it, `text` its words.
    """

    begin_ns: int
    end_ns: int
    reason: str
    text: str


@dataclass(frozen=True)
class Events:
    """Hand-overs and holds of the executor in a policy's namespace."""

    handovers: tuple[HandoverReport, ...]
    holds: tuple[HoldEvent, ...]


def read_events(reader: BagReader, policy_node: str) -> Events:
    """Read the hand-overs and holds of the executor beside a policy node."""
    executor = f'{policy_node.rpartition("/")[0]}/vla_executor'
    handovers: list[HandoverReport] = []
    reports: list[tuple[int, bool, str, str]] = []
    topics = (f'{executor}/report', '/diagnostics')
    for raw in reader.messages(lambda topic, kind: topic in topics and kind == _DIAGNOSTICS):
        message = reader.read(raw)
        for status in message.status if message is not None else ():
            try:
                if status.name == f'{executor}: seam':
                    handovers.append(read_handover(status))
                elif status.name == f'{executor}: control':
                    values = values_of(status)
                    held = values['kind'] == 'hold'
                    reports.append((raw.time_ns, held, values.get('reason', ''), status.message))
            # A damaged message loses only its event.
            except (KeyError, ValueError):
                continue
    handovers.sort(key=lambda report: report.time_ns)
    reports.sort()
    return Events(tuple(handovers), tuple(_holds(reports)))


def _holds(reports: list[tuple[int, bool, str, str]]) -> list[HoldEvent]:
    holds: list[HoldEvent] = []
    begun: tuple[int, str, str] | None = None
    for time_ns, held, reason, text in reports:
        if begun is not None and (not held or reason != begun[1]):
            holds.append(HoldEvent(begun[0], time_ns, begun[1], begun[2]))
            begun = None
        if held and begun is None:
            begun = time_ns, reason, text
    if begun is not None:
        holds.append(HoldEvent(begun[0], reports[-1][0], begun[1], begun[2]))
    return holds


# --------------------------------------------------------------------------------------------------

# Width of the images, pixels, and their quality: some 8 kB each.
_WIDTH = 240
_QUALITY = 80
# A page of more would be slow to open; of a longer recording every so many have their images.
_MOST_WITH_IMAGES = 400
_DIGITS = 5


class ReplayPage:
    """Collects what the page shows, inference by inference."""

    def __init__(self, inferences: int) -> None:
        self._every = -(-inferences // _MOST_WITH_IMAGES) or 1
        self._entries: list[dict[str, Any]] = []
        # Joints of both chunks, which may differ between bundles.
        self._joints: dict[str, None] = {}

    def add(self, found: ReplayedInference | SkippedInference) -> None:
        """Take one inference."""
        recorded = found.recorded
        entry: dict[str, Any] = {
            't': recorded.stamp_ns,
            'number': recorded.number,
            'episode': recorded.episode,
            'instruction': recorded.instruction,
            'beta': recorded.report.get('beta', ''),
            'rtc': recorded.report.get('rtc_mode', ''),
            'cache': _cache(recorded.report),
            'ms': _number(recorded.report.get('ms.total')),
            'ages': {
                key.removeprefix('age_ms.'): _number(value)
                for key, value in recorded.report.items()
                if key.startswith('age_ms.')
            },
            'recorded': recorded.chunk,
            'replayed': None,
            'note': '',
            'images': {},
        }
        if isinstance(found, SkippedInference):
            entry['note'] = f'skipped: {found.reason}'
        else:
            entry['replayed'] = found.chunk
            entry['ms2'] = round(found.report.milliseconds['total'], 2)
            entry['note'] = found.note
            if found.error is not None:
                entry['identical'] = found.error.identical
                entry['error'] = f'{found.error.absolute.max():.3g}'
            if len(self._entries) % self._every == 0:
                encodings = _encodings(recorded.description)
                entry['images'] = {
                    name: _jpeg(message, encodings[name])
                    for name, message in found.messages.items()
                }
        for chunk in (entry['replayed'], entry['recorded']):
            self._joints.update(dict.fromkeys(() if chunk is None else chunk.names))
        self._entries.append(entry)

    def write(self, path: Path, summary: ReplaySummary, events: Events) -> None:
        """Write the page (WriteError)."""
        times = [entry['t'] for entry in self._entries]
        times += [handover.time_ns for handover in events.handovers]
        start_ns = min(times, default=0)
        for entry in self._entries:
            entry['t'] = _seconds(entry['t'], start_ns)
            for which in ('recorded', 'replayed'):
                entry[which] = _rows(entry[which], self._joints)
        data = {
            'joints': list(self._joints),
            'units': [summary.units.get(name, '') for name in self._joints],
            'inferences': self._entries,
            'handovers': [
                {
                    't': _seconds(handover.time_ns, start_ns),
                    'late': handover.late,
                    'jump': _finite(handover.position_jump),
                    'text': handover.text,
                }
                for handover in events.handovers
            ],
            'holds': [
                {
                    't': _seconds(hold.begin_ns, start_ns),
                    'end': _seconds(hold.end_ns, start_ns),
                    'reason': hold.reason,
                    'text': hold.text,
                }
                for hold in events.holds
            ],
        }
        write_text(path, _page(summary, data))


def _page(summary: ReplaySummary, data: dict[str, Any]) -> str:
    return render(
        Path(__file__).with_name('page.html.j2'),
        title=f'Replay of {Path(summary.recording).name}',
        lines=summary.lines(),
        # Texts must not end the script.
        data=json.dumps(data, allow_nan=False).replace('<', '\\u003c'),
    )


def _rows(chunk: ActionChunk | None, joints: Iterable[str]) -> list[list[float | None]] | None:
    """Return the steps of a chunk by these joints; None for a joint that it does not have."""
    if chunk is None:
        return None
    columns = [chunk.names.index(name) if name in chunk.names else None for name in joints]
    return [
        [None if column is None else _finite(row[column]) for column in columns]
        for row in np.round(chunk.actions, _DIGITS)
    ]


def _finite(value: float) -> float | None:
    """JSON has no other numbers; a damaged bag may."""
    return float(value) if np.isfinite(value) else None


def _seconds(time_ns: int, start_ns: int) -> float:
    return round((time_ns - start_ns) * 1e-9, 3)


def _number(text: str | None) -> float | None:
    try:
        value = float(text or 'nan')
    except ValueError:
        return None
    return _finite(round(value, 2))


def _cache(report: Any) -> str:
    parts = [report[key] for key in ('cache.vision', 'cache.prefix') if key in report]
    return '; prefix '.join(parts)


def _encodings(description: PolicyDescription) -> dict[str, str | None]:
    """Policy's camera name to the `encoding` of its camera in the robot file."""
    known = {camera.topic: camera.encoding for camera in description.robot.cameras}
    return {
        name: next((known[one] for one in known if is_topic(topic, one)), None)
        for name, topic in description.cameras.items()
    }


def _jpeg(message: Any, encoding: str | None) -> str:
    """A frame as a small JPEG, as the source of an image."""
    pixels = np.ascontiguousarray(to_rgb(message, encoding=encoding)[:, :, ::-1])
    height, width = pixels.shape[:2]
    if width > _WIDTH:
        size = _WIDTH, max(1, round(height * _WIDTH / width))
        pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
    data = cv2.imencode('.jpg', pixels, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])[1]
    return f'data:image/jpeg;base64,{base64.b64encode(data.tobytes()).decode("ascii")}'
