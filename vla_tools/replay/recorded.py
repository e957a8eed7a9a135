"""The inferences of a recording: everything that went into each, and the chunk that came out.

A report names its inputs, which are in other topics: the committed plan, the frames, the chunk. An
inference with a missing input cannot be repeated; what is missing is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from vla_runtime.bundle.schema import earlier_name
from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.images import content_id
from vla_runtime.messages.trajectories import message_to_chunk, message_to_plan
from vla_runtime.nodes.policy.description import CONTENT, PolicyDescription, read_description
from vla_runtime.nodes.policy.settings import live_settings, read_value
from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.recording.needed_frames import NeededFrames
from vla_runtime.recording.storage_file import RawMessage, header_stamp_ns
from vla_runtime.recording.topics import CHUNK_TYPES, IMAGE_TYPES, PLAN_TYPES
from vla_runtime.types import ActionChunk, PlanRequest

_REPORT, _DESCRIPTION = '/report', '/description'
_PARAMETER, _STAMP, _STATE = 'parameter.', 'stamp_ns.', 'state'


class ReplayError(ValueError):
    """A recording that cannot be replayed; the message names the file and what would mend it."""


@dataclass(frozen=True)
class RecordedInference:
    """One inference as it was reported.

    Attributes:
        time_ns: recording time of the report.
        stamp_ns: ROS time of the observation.
        state: (state_dim,) float64, as the policy was given it.
        earlier_states: as `state`, newest first.
        stamps_ns: camera, and `state`, to the input's stamp.
        values: settings by the node's names.
        plan: answered committed plan; None: not recorded.
        chunk: published one; None: not recorded.
    """

    time_ns: int
    episode: int
    number: int
    stamp_ns: int
    state: np.ndarray
    instruction: str
    stamps_ns: Mapping[str, int]
    values: Mapping[str, Any]
    report: Mapping[str, str]
    plan: PlanRequest | None
    chunk: ActionChunk | None
    description: PolicyDescription
    earlier_states: tuple[np.ndarray, ...] = ()

    @property
    def frames(self) -> tuple[tuple[str, str, int], ...]:
        """Camera, its topic, and the key of the frame that was used; see `frame_key`."""
        return tuple(
            (
                camera,
                self.description.cameras[camera],
                int(self.report.get(CONTENT + camera, stamp_ns)),
            )
            for camera, stamp_ns in self.stamps_ns.items()
            if camera in self.description.cameras
        )


@dataclass
class RecordedRun:
    """All inferences of one policy node in a recording.

    Attributes:
        frame_keys: topic to keys of the frames recorded bit for bit.
        content_topics: camera topics whose frames are identified by content.
        reduced_topics: camera topics with reduced frames only.
        problems: unusable reports and descriptions.
    """

    reader: BagReader
    node: str
    inferences: list[RecordedInference] = field(default_factory=list)
    frame_keys: dict[str, set[int]] = field(default_factory=dict)
    content_topics: set[str] = field(default_factory=set)
    reduced_topics: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def frame_key(self, raw: RawMessage) -> int | None:
        """The name of a frame in reports: its stamp, or that of its content; None: damaged."""
        if raw.topic not in self.content_topics:
            return header_stamp_ns(raw.serialised)
        message = self.reader.read(raw)
        return None if message is None else content_id(message)


def read_run(reader: BagReader, node: str | None = None) -> RecordedRun:
    """Read all but the pixels of a recording; `node` None: the only policy node.

    Raises ReplayError: no policy node, or several.
    """
    collector = _InferenceCollector(reader)
    for message in reader.messages(lambda topic, type_name: True):
        collector.take(message)
    return collector.run(node)


class _InferenceCollector:
    """Messages that inferences are made of, sorted as they come."""

    def __init__(self, reader: BagReader) -> None:
        self._reader = reader
        self._reports: dict[str, list[tuple[int, Mapping[str, str]]]] = {}
        self._descriptions: dict[str, list[tuple[int, str]]] = {}
        self._trajectories: dict[str, list[Any]] = {}
        self._frames: dict[str, set[int]] = {}

    def take(self, message: RawMessage) -> None:
        kind, topic = message.type_name.rpartition('/')[2], message.topic
        if message.type_name in IMAGE_TYPES:
            stamp_ns = header_stamp_ns(message.serialised)
            if stamp_ns is not None:
                self._frames.setdefault(topic, set()).add(stamp_ns)
        elif message.type_name in (*CHUNK_TYPES, *PLAN_TYPES):
            self._add(self._trajectories, topic, message, lambda read: read)
        elif kind == 'String' and topic.endswith(_DESCRIPTION):
            self._add(self._descriptions, topic, message, lambda read: (message.time_ns, read.data))
        elif kind == 'DiagnosticArray' and topic.endswith(_REPORT):
            self._add(
                self._reports,
                topic,
                message,
                lambda read: (message.time_ns, values_of(read.status[0])) if read.status else None,
            )

    def _add(
        self,
        kept: dict[str, list[Any]],
        topic: str,
        message: RawMessage,
        convert: Callable[[Any], Any],
    ) -> None:
        read = self._reader.read(message)
        if read is not None and (converted := convert(read)) is not None:
            kept.setdefault(topic, []).append(converted)

    def run(self, node: str | None) -> RecordedRun:
        found = RecordedRun(self._reader, self._node(node), frame_keys=self._frames)
        descriptions = self._read_descriptions(found)
        for topic in self._frames:
            raw = topic.removesuffix('/compressed')
            if raw != topic and raw not in self._frames:
                found.reduced_topics.add(raw)
        plans: dict[tuple[str, ...], PlanRequest] = {}
        chunks: dict[tuple[int, int, int], ActionChunk] = {}
        for topic in {description.committed_plan for _, description in descriptions}:
            for plan in self._converted(topic, message_to_plan, found.problems):
                plans[_plan_key(plan)] = plan
        steps = {one.action_chunk: one.step_time_s for _, one in descriptions}
        for topic, step_time_s in steps.items():
            read = partial(message_to_chunk, step_time_s=step_time_s)
            for chunk, header in self._converted(topic, read, found.problems):
                chunks[header.episode, header.number, header.observation_ns] = chunk
        reports = sorted(self._reports.get(found.node + _REPORT, ()), key=lambda item: item[0])
        for time_ns, values in reports:
            # Latched, so a recorder that came later has it with a later time.
            before = [one for at_ns, one in descriptions if at_ns <= time_ns]
            description = before[-1] if before else descriptions[0][1]
            try:
                found.inferences.append(_inference(time_ns, values, description, plans, chunks))
            except (KeyError, ValueError) as error:
                reason = f'it lacks {error}' if isinstance(error, KeyError) else str(error)
                _note(found.problems, f'a report of {found.node} cannot be used: {reason}')
        _note_lost(found)
        _read_contents(found)
        return found

    def _node(self, wanted: str | None) -> str:
        path = self._reader.path
        described = sorted(topic.removesuffix(_DESCRIPTION) for topic in self._descriptions)
        # Other nodes have descriptions too, but no reports.
        nodes = [node for node in described if node + _REPORT in self._reports] or described
        if wanted is not None:
            if wanted not in nodes:
                there = f'there are: {", ".join(nodes)}' if nodes else 'there is none'
                raise ReplayError(f'{path}: no policy node {wanted} in it; {there}')
            return wanted
        if not nodes:
            problems = '; '.join(self._reader.problems[:3])
            reason = (
                f'is not in what can be read ({problems})'
                if problems
                else 'was not recorded: record while a policy node runs, such as with record:=true'
            )
            raise ReplayError(
                f'{path}: …/vla_policy/description, which says what policy ran, {reason}; '
                '--open-loop compares motion without it'
            )
        if len(nodes) > 1:
            raise ReplayError(
                f'{path}: several policy nodes are in it; choose one with --node: '
                f'{", ".join(nodes)}'
            )
        return nodes[0]

    def _read_descriptions(self, found: RecordedRun) -> list[tuple[int, PolicyDescription]]:
        read, seen = [], ''
        for time_ns, text in self._descriptions[found.node + _DESCRIPTION]:
            if text == seen:
                continue
            try:
                read.append((time_ns, read_description(text)))
                seen = text
            except ValueError as error:
                _note(found.problems, f'{found.node}{_DESCRIPTION}: {error}')
        if not read:
            raise ReplayError(f'{self._reader.path}: {found.problems[0]}')
        return read

    def _converted(
        self, topic: str, convert: Callable[[Any], Any], problems: list[str]
    ) -> list[Any]:
        converted = []
        for message in self._trajectories.get(topic, ()):
            try:
                converted.append(convert(message))
            except ValueError as error:
                _note(problems, f'{topic}: {error}')
        return converted


def _inference(
    time_ns: int,
    values: Mapping[str, str],
    description: PolicyDescription,
    plans: Mapping[tuple[str, ...], PlanRequest],
    chunks: Mapping[tuple[int, int, int], ActionChunk],
) -> RecordedInference:
    episode, number, stamp_ns = (int(values[name]) for name in ('episode', 'number', 'stamp_ns'))
    stamps_ns = {
        key.removeprefix(_STAMP): int(value)
        for key, value in values.items()
        if key.startswith(_STAMP)
    }
    names = _states(values)
    if set(stamps_ns) != {*description.cameras, *names}:
        raise ValueError(f'its stamps are of {", ".join(stamps_ns)}')
    state, *earlier = (_read_state(values[name], description) for name in names)
    # A setting of earlier releases.
    if (samples := values.get(_PARAMETER + 'samples', '1')) != '1':
        raise ValueError(f'samples was {samples}, and this release draws one chunk at a time')
    return RecordedInference(
        time_ns=time_ns,
        episode=episode,
        number=number,
        stamp_ns=stamp_ns,
        state=state,
        earlier_states=tuple(earlier),
        instruction=values['instruction'],
        stamps_ns=stamps_ns,
        values={
            # A setting that came after the recording has the value of those before it.
            name: read_value(name, values.get(_PARAMETER + name, str(row.default)))
            for name, row in live_settings().items()
        },
        report=values,
        plan=plans.get(_asked(values)),
        chunk=chunks.get((episode, number, stamp_ns)),
        description=description,
    )


def _states(values: Mapping[str, str]) -> list[str]:
    """Names of a report's states, the newest first."""
    names = [_STATE]
    while (name := earlier_name(_STATE, len(names))) in values:
        names.append(name)
    return names


def _read_state(text: str, description: PolicyDescription) -> np.ndarray:
    state = np.array([float(number) for number in text.split()])
    if len(state) != len(description.state_joints):
        raise ValueError(f'its state has {len(state)} numbers')
    return state


def _read_contents(run: RecordedRun) -> None:
    """Find the frames that reports name by their content."""
    run.content_topics = {
        topic
        for one in run.inferences
        for camera, topic, _ in one.frames
        if CONTENT + camera in one.report
    }
    for topic in run.content_topics:
        run.frame_keys[topic] = set()
    wanted = lambda topic, kind: topic in run.content_topics and kind in IMAGE_TYPES  # noqa: E731
    if run.content_topics:
        for raw in run.reader.messages(wanted):
            key = run.frame_key(raw)
            if key is not None:
                run.frame_keys[raw.topic].add(key)


def _note_lost(run: RecordedRun) -> None:
    """Note reports that are not there: numbers count without a gap, but for what was discarded."""
    if not run.inferences:
        _note(run.problems, f'no report of {run.node}{_REPORT} can be used')
    lost = 0
    for before, after in pairwise(run.inferences):
        expected = before.number + 1 if after.episode == before.episode else 0
        lost += max(0, after.number - expected - int(after.report.get('discarded', 0)))
    if lost:
        _note(
            run.problems,
            f'at least {lost} inferences of {run.node} have no report: their numbers jump',
        )


def _plan_key(plan: PlanRequest) -> tuple[str, ...]:
    request = '' if plan.request is None else plan.request
    parts = (plan.episode, request, plan.stamp_ns, plan.certain, len(plan.rows))
    return tuple(map(str, parts))


def _asked(values: Mapping[str, str]) -> tuple[str, ...]:
    """Key of the committed plan that a report names."""
    request = (values[f'request.{part}'] for part in ('stamp_ns', 'certain', 'rows'))
    return values['episode'], values['request'], *request


def _note(problems: list[str], text: str) -> None:
    if text not in problems:
        problems.append(text)


# --- Inferences with their frames, in order


@dataclass(frozen=True)
class CompleteInference:
    """An inference that can be repeated; `raw` messages are as in the bag."""

    recorded: RecordedInference
    messages: Mapping[str, Any]
    raw: Mapping[str, RawMessage]


@dataclass(frozen=True)
class SkippedInference:
    """An inference that cannot be repeated."""

    recorded: RecordedInference
    reason: str


def with_frames(run: RecordedRun) -> Iterator[CompleteInference | SkippedInference]:
    """Yield every inference in order, with its frames or why there are none.

    Memory holds only the frames that the next inferences need.
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
