"""Inferences of a recording with the frames that each of them used, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vla_runtime.recording.needed_frames import NeededFrames
from vla_runtime.recording.storage_file import RawMessage
from vla_tools.replay.recorded import RecordedInference, RecordedRun


@dataclass(frozen=True)
class CompleteInference:
    """An inference that can be repeated.

    Attributes:
        recorded: inference as it was reported.
        messages: camera to its message.
        raw: camera to the same as it stands in the bag.
    """

    recorded: RecordedInference
    messages: Mapping[str, Any]
    raw: Mapping[str, RawMessage]


@dataclass(frozen=True)
class SkippedInference:
    """An inference that cannot be repeated.

    Attributes:
        recorded: inference as it was reported.
        reason: name of what is missing.
    """

    recorded: RecordedInference
    reason: str


def with_frames(run: RecordedRun) -> Iterator[CompleteInference | SkippedInference]:
    """Yield every inference in order, with its frames or the reason why there are none.

    Only the frames that the next inferences need are in memory.
    """
    waiting = [(recorded, _missing(run, recorded)) for recorded in run.inferences]
    frames = NeededFrames(
        run.reader,
        (
            (topic, key)
            for recorded, missing in waiting
            if not missing
            for _, topic, key in recorded.frames
        ),
        lambda raw: None if (message := run.reader.read(raw)) is None else (raw, message),
        run.frame_key,
    )
    for recorded, reason in waiting:
        if reason:
            yield SkippedInference(recorded, reason)
            continue
        taken = {camera: frames.take((topic, key)) for camera, topic, key in recorded.frames}
        found = {camera: frame for camera, frame in taken.items() if frame is not None}
        gone = [camera for camera in taken if camera not in found]
        if gone:
            yield SkippedInference(recorded, f'the frame of camera {gone[0]} is damaged')
        else:
            yield CompleteInference(
                recorded,
                {camera: message for camera, (_, message) in found.items()},
                {camera: raw for camera, (raw, _) in found.items()},
            )


def _missing(run: RecordedRun, recorded: RecordedInference) -> str:
    """Return what an inference lacks to be repeated; empty when nothing is missing."""
    if recorded.plan is None:
        return 'its committed_plan is not in the recording'
    for camera, topic, key in recorded.frames:
        if topic in run.reduced_topics:
            return (
                f"camera {camera}: {topic} has reduced images only (record_images: 'reduced'); "
                "record with 'used' to replay"
            )
        if key not in run.frame_keys.get(topic, ()):
            return f'camera {camera}: its frame of {topic} is not in the recording'
    return ''
