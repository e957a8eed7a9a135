"""A recording as a page's source: what was known at every tenth of a second, and a time line.

The whole bag is read once, by the same state that a live robot fills; pictures are kept small.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tqdm import tqdm

from vla_runtime.messages.images import ImageError
from vla_runtime.nodes.polled_topics import FRESH_S, HeardItem, read_items
from vla_runtime.nodes.robot_report import robot_reports
from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.recording.storage_file import RawMessage, header_stamp_ns
from vla_runtime.recording.topics import IMAGE_TYPES, JOINT_STATE, camera_topics
from vla_tools.view import wire
from vla_tools.view.moment import constants, moment
from vla_tools.view.pictures import small_jpeg
from vla_tools.view.scene_keeper import SceneKeeper
from vla_tools.view.source import Publish, ViewOptions
from vla_tools.view.state import CameraState, ViewState
from vla_tools.view.wire import Motion

_PERIOD_NS = 100_000_000
# Of a recording of hours fewer moments are kept.
_MOST_MOMENTS = 20_000
# Pictures are kept as often as `reduced` recordings have them.
_PICTURE_NS = 240_000_000
_RATE_WINDOW_NS = 2_000_000_000
# Topics that tell where a robot's namespace ends.
_TELLING = (wire.CHUNK, wire.PLAN, wire.INFERENCE, wire.HANDOVER)


@dataclass(frozen=True)
class _Moment:
    time_ns: int
    page: Mapping[str, Any]
    positions: Mapping[str, float]
    plan: Motion | None
    chunks: tuple[Motion, ...]


@dataclass
class _Frames:
    """Pictures of one camera, by rising time."""

    times_ns: list[int] = field(default_factory=list)
    jpegs: list[bytes] = field(default_factory=list)
    recent_ns: list[int] = field(default_factory=list)

    def at(self, time_ns: int) -> tuple[int, bytes]:
        """Return number and JPEG of the newest picture; the number is 0 before the first."""
        number = bisect_right(self.times_ns, time_ns)
        return number, self.jpegs[number - 1] if number else b''

    def rate_hz(self, time_ns: int) -> float | None:
        """Note a frame, and return how many a second the recording has."""
        self.recent_ns = [one for one in self.recent_ns if time_ns - one < _RATE_WINDOW_NS]
        self.recent_ns.append(time_ns)
        span_ns = time_ns - self.recent_ns[0]
        return None if span_ns <= 0 else 1e9 * (len(self.recent_ns) - 1) / span_ns


class BagSource:
    """See `app.Source`.

    Args:
        reader: of the recording; its problems grow while it is read.

    Raises:
        ValueError: several robots are in it and none was chosen, nothing in it can be shown, or the
            URDF that a person named cannot be read.
    """

    def __init__(self, reader: BagReader, options: ViewOptions) -> None:
        # First: a whole recording is read for a minute.
        self._scenes = SceneKeeper(options.urdf, options.tip)
        self._reader = reader
        self.pages = 0
        kinds = _kinds(reader)
        namespace = _namespace(reader, kinds, options.namespace)
        self._state = ViewState(namespace, options.robot, kept_points=10 * _MOST_MOMENTS)
        self._frames: dict[str, _Frames] = {}
        self._heard: dict[tuple[str, str], HeardItem] = {}
        self._moments: list[_Moment] = []
        self._read(kinds)
        if not self._moments:
            raise ValueError(
                f'{reader.path}: no joint states, chunks or reports of {namespace or "/"} are in it'
            )
        self._at, self._playing, self._seen_version = 0, False, -1
        self._publish: Publish | None = None
        self._news, self._ending = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name='bag', daemon=True)

    # --- app.Source

    @property
    def pictures(self) -> Mapping[str, tuple[int, bytes]]:
        time_ns = self._moments[self._at].time_ns
        return {name: frames.at(time_ns) for name, frames in self._frames.items()}

    @property
    def scene_port(self) -> int | None:
        return self._scenes.port

    def begin(self, publish: Publish) -> None:
        self._publish = publish
        self._thread.start()

    def close(self) -> None:
        """End the thread and the scene."""
        self._ending = True
        self._news.set()
        self._thread.join()
        self._scenes.close()

    def hello(self) -> dict[str, Any]:
        begin_ns, end_ns = self._moments[0].time_ns, self._moments[-1].time_ns
        fixed = constants(self._state)
        self._news.set()
        return {
            **fixed,
            'title': self._reader.path.name,
            'source': _described(fixed['robot'], self._reader.problems),
            'live': False,
            'read_only': True,
            'actions': [],
            'offered': [],
            'no_scene': self._scenes.why_none,
            'scene_note': self._scenes.note,
            'begin_s': begin_ns * 1e-9,
            'length_s': round((end_ns - begin_ns) * 1e-9, 1),
            'history': {name: list(points) for name, points in self._state.points.items()},
        }

    async def command(self, command: Mapping[str, Any]) -> str:
        what = command.get('do')
        if what in ('play', 'pause'):
            self._playing = what == 'play'
            if self._playing and self._at == len(self._moments) - 1:
                self._at = 0
        elif what == 'seek':
            at = command.get('at')
            if not isinstance(at, int | float):
                raise ValueError('seek: at is a number of seconds')
            self._seek(float(at))
        else:
            raise ValueError(f'a recording can play, pause and seek, got {what!r:.40}')
        self._news.set()
        return ''

    def _seek(self, seconds: float) -> None:
        wanted_ns = self._moments[0].time_ns + round(seconds * 1e9)
        times = [one.time_ns for one in self._moments]
        self._at = max(0, bisect_right(times, wanted_ns) - 1)

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._ending:
            if self._playing:
                step_ns = self._step()
                due_s = max(due_s + step_ns * 1e-9, time.monotonic())
                time.sleep(max(0.0, due_s - time.monotonic()))
            else:
                # A scene that is being made is shown when it is there.
                self._news.wait(0.5)
                self._news.clear()
                due_s = time.monotonic()
            self._show()

    def _step(self) -> int:
        """Go on by one moment; return how long it lasts, ns."""
        if self._at + 1 >= len(self._moments):
            self._playing = False
            return 0
        self._at += 1
        return self._moments[self._at].time_ns - self._moments[self._at - 1].time_ns

    def _show(self) -> None:
        shown = self._moments[self._at]
        self._scenes.show(self._state, shown.positions, shown.plan, shown.chunks)
        if self._publish is None or not self.pages:
            return
        before, self._seen_version = self._seen_version, self._scenes.version
        self._publish(
            {'now': {**shown.page, 'playing': self._playing}},
            anew=before != self._seen_version,
        )

    # --- reading

    def _read(self, kinds: Mapping[str, str]) -> None:
        state = self._state
        roles = {state.full_name(topic.name): role for role, topic in wire.TOPICS.items()}
        # Cameras and limits are in the description, which a recorder may have got late.
        for role in (wire.DESCRIPTION, wire.URDF):
            wanted = state.full_name(wire.TOPICS[role].name)
            texts = list(self._reader.texts(partial(str.__eq__, wanted)))
            for text in texts[:1]:
                state.take(role, _Text(text[2]), text[0])
        cameras = self._camera_topics(kinds)
        joints = self._joint_topics(kinds)
        newest: dict[str, RawMessage] = {}
        step_ns, due_ns = _PERIOD_NS, 0
        wanted_topics = {*roles, *cameras, *joints, wire.STATUS_TOPIC}
        messages = self._reader.messages(lambda topic, _: topic in wanted_topics)
        for raw in tqdm(
            messages, f'reading {self._reader.path}', unit=' messages', leave=False, disable=None
        ):
            if raw.time_ns >= due_ns:
                self._keep(newest, due_ns)
                due_ns = raw.time_ns + step_ns if not due_ns else due_ns + step_ns
                # Nothing was recorded for a while.
                due_ns = max(due_ns, raw.time_ns)
            if raw.topic in joints:
                newest[raw.topic] = raw
            elif raw.topic in cameras:
                self._take_frame(cameras[raw.topic], raw)
            elif (message := self._reader.read(raw)) is None:
                continue
            elif raw.topic == wire.STATUS_TOPIC:
                self._take_status(message, raw.time_ns)
            else:
                state.take(roles[raw.topic], message, raw.time_ns)
        self._keep(newest, due_ns)
        every = -(-len(self._moments) // _MOST_MOMENTS) or 1
        self._moments = self._moments[::every]

    def _keep(self, newest: dict[str, RawMessage], now_ns: int) -> None:
        """Keep what is known at this time."""
        for raw in newest.values():
            if (message := self._reader.read(raw)) is not None:
                self._state.take_joints(message, raw.time_ns)
        newest.clear()
        self._state.fresh_points()
        if now_ns and (self._state.positions() or self._state.chunks or self._state.report):
            self._moments.append(
                _Moment(
                    now_ns,
                    moment(self._state, now_ns),
                    self._state.positions(),
                    self._state.plan_at(now_ns),
                    tuple(self._state.chunks),
                )
            )

    def _take_status(self, message: Any, now_ns: int) -> None:
        now_s = now_ns * 1e-9
        for item in read_items(message, now_s):
            self._heard[item.node, item.item] = item
        self._heard = {
            key: item for key, item in self._heard.items() if now_s - item.heard_s < FRESH_S
        }
        found = robot_reports(self._heard.values(), (), self._state.namespace)
        self._state.take_report(found[0] if found else None, now_ns)

    def _take_frame(self, name: str, raw: RawMessage) -> None:
        frames = self._frames.setdefault(name, _Frames())
        stamp_ns = header_stamp_ns(raw.serialised) or 0
        rate_hz = frames.rate_hz(raw.time_ns)
        self._state.take_frame(name, stamp_ns, raw.time_ns, rate_hz)
        if frames.times_ns and raw.time_ns - frames.times_ns[-1] < _PICTURE_NS:
            return
        message = self._reader.read(raw)
        if message is None:
            return
        try:
            jpeg = small_jpeg(message, self._state.encoding_of(name))
        except ImageError as error:
            self._state.cameras[name].problem = str(error)
            return
        frames.times_ns.append(raw.time_ns)
        frames.jpegs.append(jpeg)

    def _camera_topics(self, kinds: Mapping[str, str]) -> dict[str, str]:
        """Return topics of images to their cameras; without a robot file each is one."""
        images = [topic for topic, kind in kinds.items() if kind in IMAGE_TYPES]
        if self._state.robot is None:
            for topic in images:
                self._state.cameras[topic] = CameraState(topic, topic)
            return {topic: topic for topic in images}
        found = {}
        for camera in self._state.cameras.values():
            for topic in camera_topics(camera.topic):
                if topic in images:
                    found[topic] = camera.name
                    break
        return found

    def _joint_topics(self, kinds: Mapping[str, str]) -> set[str]:
        states = {topic for topic, kind in kinds.items() if kind == JOINT_STATE}
        if self._state.robot is None:
            return states
        wanted = {self._state.full_name(one.topic) for one in self._state.robot.joint_states}
        return states & wanted


@dataclass(frozen=True)
class _Text:
    """A `std_msgs/String`."""

    data: str


def _kinds(reader: BagReader) -> dict[str, str]:
    """Return every topic's type."""
    found: dict[str, str] = {}

    def note(topic: str, kind: str) -> bool:
        found[topic] = kind
        return False

    for _ in reader.messages(note):
        pass
    return found


def _namespace(reader: BagReader, kinds: Iterable[str], wanted: str | None) -> str:
    """Return the robot's namespace; ValueError where several are there, or not the wanted one."""
    names = [f'/{wire.TOPICS[role].name}' for role in _TELLING]
    found = sorted(
        {topic.removesuffix(name) for topic in kinds for name in names if topic.endswith(name)}
    )
    shown = ', '.join(one or '/' for one in found)
    if wanted is not None:
        name = f'/{wanted.strip("/")}'.rstrip('/')
        if name not in found:
            raise ValueError(f'--namespace {wanted}: {reader.path} has robots in {shown or "none"}')
        return name
    if len(found) > 1:
        raise ValueError(f'{reader.path}: several robots: {shown}; choose one with --namespace')
    return found[0] if found else ''


def _described(robot: str, problems: list[str]) -> str:
    """Describe a recording beside its name."""
    parts = [f'recording of {robot}' if robot else 'recording', *problems[:2]]
    if len(problems) > 2:
        parts.append(f'{len(problems) - 2} more')
    return '; '.join(parts)
