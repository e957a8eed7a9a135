"""Inferences of a recording with the frames that each of them used, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vla_runtime.recording.cdr import header_stamp_ns
from vla_runtime.recording.storage_file import RawMessage
from vla_runtime.replay.recorded import IMAGE_TYPES, RecordedInference, RecordedRun

_Key = tuple[str, int]


@dataclass(frozen=True)
class CompleteInference:
    """An inference that can be repeated.

    Attributes:
        recorded: as it was reported.
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
        recorded: as it was reported.
        reason: what is missing.
    """

    recorded: RecordedInference
    reason: str


def with_frames(run: RecordedRun) -> Iterator[CompleteInference | SkippedInference]:
    """Yield every inference in order, with its frames or the reason why there are none.

    Only the frames that the next inferences need are in memory.
    """
    waiting = [(recorded, _missing(run, recorded)) for recorded in run.inferences]
    needs = Counter(
        (topic, stamp_ns)
        for recorded, missing in waiting
        if not missing
        for _, topic, stamp_ns in recorded.frames
    )
    held: dict[_Key, tuple[RawMessage, Any]] = {}
    lost: set[_Key] = set()
    frames = _frames(run, needs)
    for recorded, reason in waiting:
        if reason:
            yield SkippedInference(recorded, reason)
            continue
        keys = {camera: (topic, stamp_ns) for camera, topic, stamp_ns in recorded.frames}
        for key, raw, message in frames if not _all_in(keys, held, lost) else ():
            if message is None:
                lost.add(key)
            else:
                held[key] = raw, message
            if _all_in(keys, held, lost):
                break
        gone = [camera for camera, key in keys.items() if key not in held]
        if gone:
            yield SkippedInference(recorded, f'the frame of camera {gone[0]} is damaged')
        else:
            yield CompleteInference(
                recorded,
                {name: held[key][1] for name, key in keys.items()},
                {name: held[key][0] for name, key in keys.items()},
            )
        for key in keys.values():
            needs[key] -= 1
            if not needs[key]:
                held.pop(key, None)


def _all_in(keys: Mapping[str, _Key], held: Mapping[_Key, Any], lost: set[_Key]) -> bool:
    return all(key in held or key in lost for key in keys.values())


def _frames(
    run: RecordedRun, needs: Mapping[_Key, int]
) -> Iterator[tuple[_Key, RawMessage, Any | None]]:
    """Yield the frames that are needed, each once; None for a damaged one."""
    topics = {topic for topic, _ in needs}
    given: set[_Key] = set()
    wanted = run.reader.messages(lambda topic, kind: topic in topics and kind in IMAGE_TYPES)
    for message in wanted:
        stamp_ns = header_stamp_ns(message.serialised)
        if stamp_ns is None:
            continue
        key = message.topic, stamp_ns
        if needs.get(key) and key not in given:
            given.add(key)
            yield key, message, run.reader.read(message)


def _missing(run: RecordedRun, recorded: RecordedInference) -> str:
    """Return what an inference lacks to be repeated; empty when nothing is missing."""
    if recorded.plan is None:
        return 'its committed_plan is not in the recording'
    for camera, topic, stamp_ns in recorded.frames:
        if topic in run.reduced_topics:
            return (
                f"camera {camera}: {topic} has reduced images only (record_images: 'reduced'); "
                "record with 'used' to replay"
            )
        if stamp_ns not in run.frame_stamps.get(topic, ()):
            return f'camera {camera}: its frame of {topic} is not in the recording'
    return ''
