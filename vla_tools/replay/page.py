"""A replay as one HTML page that needs no other file and no network.

Its script draws what the page holds: images, recorded and replayed chunk, latency, ages and cache
of each inference; hand-overs and holds.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from vla_runtime.files.atomic_write import write_text
from vla_runtime.messages.images import to_rgb
from vla_runtime.nodes.policy.description import PolicyDescription
from vla_runtime.pages.page import render
from vla_runtime.recording.topics import is_topic
from vla_runtime.types import ActionChunk
from vla_tools.replay.events import Events
from vla_tools.replay.recorded import SkippedInference
from vla_tools.replay.rerun import ReplayedInference
from vla_tools.replay.summary import ReplaySummary

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
