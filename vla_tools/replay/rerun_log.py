"""A replay for the Rerun viewer: frames, recorded and replayed chunks, latency, holds, handovers.

To a file, or to a viewer that runs. Everything is on the timeline `ros_time`. Of each chunk the
rows are shown that come before the next one's: those that could be executed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import rerun

from vla_runtime.messages.images import ImageError, to_rgb
from vla_runtime.messages.jpeg import encode_jpeg
from vla_runtime.types import ActionChunk
from vla_tools.replay.page import Events
from vla_tools.replay.recorded import SkippedInference
from vla_tools.replay.rerun import ReplayedInference

_QUALITY = 85
_TIMELINE = 'ros_time'


class RerunLog:
    """Logs inferences in their order; `finish` ends it.

    Args:
        target: file to write, or address of a viewer, `rerun+http://HOST:PORT/proxy`.
        name: of the recording.
    """

    def __init__(self, target: str, name: str) -> None:
        self._stream = rerun.RecordingStream('vla_runtime replay')
        self._stream.send_recording_name(name)
        if '://' in target:
            self._stream.connect_grpc(target)
        else:
            self._stream.save(target)
        self._before: ReplayedInference | SkippedInference | None = None
        self._instruction = ''

    def add(self, found: ReplayedInference | SkippedInference) -> None:
        """Take one inference."""
        self._log_chunks(found.recorded.stamp_ns)
        self._before = found
        recorded = found.recorded
        self._at(recorded.stamp_ns)
        if recorded.instruction != self._instruction:
            self._instruction = recorded.instruction
            self._text('instruction', self._instruction)
        names, positions = recorded.description.state_joints, recorded.state
        for joint, position in zip(names, positions, strict=False):
            self._scalar(f'joints/{joint}/state', position)
        if 'ms.total' in recorded.report:
            self._scalar('latency_ms/recorded', float(recorded.report['ms.total']))
        if isinstance(found, SkippedInference):
            self._text('replay', f'inference {recorded.number} skipped: {found.reason}', 'WARN')
            return
        self._scalar('latency_ms/replayed', found.report.milliseconds['total'])
        if found.error is not None:
            self._scalar('largest_difference', float(found.error.absolute.max()))
        for camera, message in found.messages.items():
            self._log_frame(camera, message)

    def finish(self, events: Events) -> None:
        """Log the executor's events, and end."""
        if self._before is not None:
            self._log_chunks(None)
        for handover in events.handovers:
            self._at(handover.time_ns)
            self._scalar('delay_steps', handover.delay_steps)
            self._text('executor', handover.text, 'WARN' if handover.late else 'INFO')
        for hold in events.holds:
            self._at(hold.begin_ns)
            self._text('executor', hold.text, 'WARN')
        self._stream.flush()
        self._stream.disconnect()

    def _log_chunks(self, until_ns: int | None) -> None:
        """Log the rows of the inference before, as far as an observation time."""
        before = self._before
        if before is None:
            return
        self._log_rows('recorded', before.recorded.chunk, before.recorded.stamp_ns, until_ns)
        if not isinstance(before, SkippedInference):
            self._log_rows('replayed', before.chunk, before.recorded.stamp_ns, until_ns)

    def _log_rows(
        self, which: str, chunk: ActionChunk | None, stamp_ns: int, until_ns: int | None
    ) -> None:
        if chunk is None:
            return
        times = stamp_ns + np.round(np.arange(chunk.horizon) * chunk.step_time_s * 1e9)
        shown = np.ones(len(times), dtype=bool) if until_ns is None else times < until_ns
        # A chunk that was asked for again within a step.
        shown[0] = True
        stamps = times[shown].astype('datetime64[ns]')
        for column, joint in enumerate(chunk.names):
            self._stream.send_columns(
                f'joints/{joint}/{which}',
                indexes=[rerun.TimeColumn(_TIMELINE, timestamp=stamps)],
                columns=rerun.Scalars.columns(scalars=chunk.actions[shown, column]),
            )

    def _log_frame(self, camera: str, message: Any) -> None:
        try:
            jpeg = encode_jpeg(to_rgb(message), _QUALITY)
        except ImageError as error:
            self._text('replay', f'camera {camera}: {error}', 'WARN')
            return
        image = rerun.EncodedImage(contents=jpeg, media_type='image/jpeg')
        self._stream.log(f'cameras/{camera}', image)

    def _at(self, time_ns: int) -> None:
        self._stream.set_time(_TIMELINE, timestamp=np.datetime64(time_ns, 'ns'))

    def _scalar(self, entity: str, value: float | Sequence[float]) -> None:
        self._stream.log(entity, rerun.Scalars(value))

    def _text(self, entity: str, text: str, level: str = 'INFO') -> None:
        self._stream.log(entity, rerun.TextLog(text, level=level))
