"""One consistent look at the robot from many messages: the newest frames that belong together.

Pure: no ROS, no clock of its own. Invariants:
- the frames of a selection lie within `tolerance_ns` of each other, none older than `max_age_ns`,
  and no camera has a newer frame in its buffer with which that would hold;
- frames that belong together are found, whatever the cameras' rates, unless a camera sent more
  within the age limit than are kept and the tolerance forbids to thin them (`camera_buffer`); none
  is more than the tolerance older than without thinning;
- while stamps and limits stay in order, a selection is never of an earlier time than the last one;
- an earlier frame of a camera is the one nearest to its age before the camera's selected frame,
  within the tolerance, or the camera's very first one; likewise an earlier state, before the
  selection's stamp. As in training, an episode's first selection stands for those before it;
- the state is that of the selection's stamp, which is the newest frame's: interpolated between two
  samples, held after the last one;
- what cannot be selected is refused with a reason for every source that is missing;
- memory is bounded; every stamp kept is newer than the one before it;
- a clock that goes back (a simulation restarted, a bag looped) empties everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from threading import Lock
from types import MappingProxyType

import numpy as np

from vla_runtime.robot.match import EarlierFrame
from vla_runtime.sensors.camera_buffer import CameraBuffer, CameraCounters, Frame
from vla_runtime.sensors.joint_buffer import JointBuffer, JointSource, JointTopic

# Threads that wait for the lock may bring times in the wrong order: a smaller step back is no jump.
_JUMP_NS = 100_000_000


@dataclass(frozen=True)
class SyncLimits:
    """Limits of frames and states that belong to one observation.

    `tolerance_ns` is the largest difference between the frames' stamps, `max_age_ns` the largest
    age against the ROS clock.
    """

    tolerance_ns: int
    max_age_ns: int


@dataclass(frozen=True)
class MissingInput:
    """A missing input, such as `camera NAME`, `clock` or `instruction`, and text for the person."""

    source: str
    text: str


@dataclass(frozen=True)
class Selection:
    """Frames and state of one observation.

    Attributes:
        stamp_ns: ROS time that the selection stands for.
        state: (number of joints,) float64 in the order of the sources.
        state_stamp_ns: stamp of the newest sample of that joint whose newest is oldest.
        earlier_states: states of the steps before, as `state`, the newest first, with the times
            that they stand for.
    """

    stamp_ns: int
    frames: Mapping[str, Frame]
    state: np.ndarray
    state_stamp_ns: int
    earlier_states: tuple[tuple[int, np.ndarray], ...] = ()


@dataclass(frozen=True)
class CameraStatus:
    """One camera for a status message; `problem` and `age_s` (by stamp) are None without any."""

    name: str
    topic: str
    counters: CameraCounters
    rate_hz: float
    usable: bool
    problem: str | None
    age_s: float | None = None


class Synchronizer:
    """Buffers of all cameras and joints of one robot.

    Args:
        cameras: camera name to topic.
        joints: one source for each number of the state, in order.
        limits: may be replaced at any time.
        earlier: cameras that show an earlier frame of another camera.
        state_ages_ns: ages of the earlier states, the newest first.
    """

    def __init__(
        self,
        cameras: Mapping[str, str],
        joints: Sequence[JointSource],
        limits: SyncLimits,
        earlier: Mapping[str, EarlierFrame] = MappingProxyType({}),
        state_ages_ns: Sequence[int] = (),
    ) -> None:
        self.limits = limits
        self.clock_jumps = 0
        self._lock = Lock()
        self._now_ns = 0
        self._earlier = earlier
        self._state_ages_ns = tuple(state_ages_ns)
        # Stamps of an episode's first observation, of each camera and of the whole; empty before
        # it was made, None where nobody tells of episodes.
        self._first: dict[str, int] | None = None
        self._first_ns = 0
        self._cameras = {
            name: CameraBuffer(name, topic, _kept_ns(name, earlier))
            for name, topic in cameras.items()
            if name not in earlier
        }
        self._joints = [JointBuffer(source) for source in joints]
        self._topics = {
            topic: JointTopic(topic, [j for j in self._joints if j.source.topic == topic])
            for topic in dict.fromkeys(source.topic for source in joints)
        }

    def add_frame(self, camera: str, frame: Frame, now_ns: int) -> bool:
        """Take a camera's frame; return whether it was kept."""
        with self._lock:
            self._see(now_ns)
            buffer = self._cameras[camera]
            limits = self.limits
            kept = buffer.add(frame, now_ns, limits.max_age_ns, limits.tolerance_ns)
            buffer.expire(now_ns, limits.max_age_ns)
            return kept

    def refuse_frame(self, camera: str, reason: str) -> None:
        with self._lock:
            self._cameras[camera].refuse(reason)

    def discard_frame(self, camera: str, frame: Frame, reason: str) -> None:
        """Drop a selected frame that could not be decoded, so that it is not selected again."""
        with self._lock:
            of = self._earlier[camera].camera if camera in self._earlier else camera
            self._cameras[of].discard(frame, reason)

    def note_pixels(self, camera: str, frame: Frame, pixels: np.ndarray) -> None:
        """Take the pixels that an inference uses of a camera, (height, width, 3) uint8."""
        with self._lock:
            if camera in self._cameras:
                self._cameras[camera].content.note_pixels(frame.stamp_ns, pixels)

    def add_joints(
        self,
        topic: str,
        names: Sequence[str],
        positions: Sequence[float],
        stamp_ns: int,
        now_ns: int,
    ) -> bool:
        """Take a joint-state message; return whether header and shape were right."""
        with self._lock:
            self._see(now_ns)
            source, max_age_ns = self._topics[topic], self.limits.max_age_ns
            taken = source.add(names, positions, stamp_ns, now_ns, max_age_ns)
            source.expire(now_ns, max_age_ns + max(self._state_ages_ns, default=0))
            return taken

    def begin_episode(self) -> None:
        """Let the next observation have no history: it stands for those before it."""
        with self._lock:
            self._first = {}

    def note_observation(self, selection: Selection) -> None:
        """Note that a selection was used: an episode's first is the oldest of its history."""
        with self._lock:
            if self._first == {}:
                self._first = {name: frame.stamp_ns for name, frame in selection.frames.items()}
                self._first_ns = selection.stamp_ns

    def clear(self) -> None:
        """Drop all messages; counters stay."""
        with self._lock:
            self._clear()

    def select(self, now_ns: int) -> Selection | tuple[MissingInput, ...]:
        """Return the newest frames that belong together and the state at their time, or why not."""
        with self._lock:
            self._see(now_ns)
            limits = self.limits
            missing = [*self._missing_cameras(now_ns), *self._missing_joints(now_ns)]
            if missing:
                return tuple(missing)
            frames = self._newest_together(limits.tolerance_ns)
            if frames is None:
                return (self._apart(),)
            stamp_ns = max(frame.stamp_ns for frame in frames.values())
            before = self._before(frames)
            if isinstance(before, MissingInput):
                return (before,)
            states = []
            for wanted_ns in (stamp_ns, *self._earlier_times(stamp_ns)):
                state = self._state(wanted_ns)
                if not isinstance(state, _State):
                    return state
                states.append((wanted_ns, state))
            (_, newest), *older = states
            self._mark_selected(frames | before)
            return Selection(
                stamp_ns,
                frames | before,
                newest.values,
                newest.newest_ns,
                tuple((wanted_ns, state.values) for wanted_ns, state in older),
            )

    def camera_statuses(self, now_ns: int) -> tuple[CameraStatus, ...]:
        with self._lock:
            self._see(now_ns)
            problems = {item.source: item.text for item in self._missing_cameras(now_ns)}
            for buffer in self._cameras.values():
                buffer.compare()
            return tuple(
                CameraStatus(
                    buffer.name,
                    buffer.topic,
                    copy(buffer.counters),
                    buffer.rate_hz,
                    f'camera {buffer.name}' not in problems,
                    problems.get(f'camera {buffer.name}', buffer.fault or buffer.warning),
                    buffer.age_s(now_ns),
                )
                for buffer in self._cameras.values()
            )

    def note_silences(self, silences: Mapping[str, str]) -> None:
        """Note why no message can come, by topic, from what the graph shows; the others can."""
        with self._lock:
            for camera in self._cameras.values():
                camera.silence = silences.get(camera.topic, '')
            for name, topic in self._topics.items():
                topic.silence = silences.get(name, '')

    def joint_problems(self, now_ns: int) -> tuple[str, ...]:
        with self._lock:
            self._see(now_ns)
            return tuple(item.text for item in self._missing_joints(now_ns))

    def joint_warnings(self) -> tuple[str, ...]:
        """Describe joint states that are used although something is wrong with them."""
        with self._lock:
            return tuple(f'{t.name}: {t.ahead}' for t in self._topics.values() if t.ahead)

    def _see(self, now_ns: int) -> None:
        if now_ns < self._now_ns - _JUMP_NS:
            self.clock_jumps += 1
            self._clear()
            self._now_ns = now_ns
        self._now_ns = max(self._now_ns, now_ns)

    def _clear(self) -> None:
        for camera in self._cameras.values():
            camera.clear()
        for topic in self._topics.values():
            topic.clear()
        if self._first is not None:
            self._first = {}

    def _missing_cameras(self, now_ns: int) -> list[MissingInput]:
        max_age_ns = self.limits.max_age_ns
        missing = []
        for buffer in self._cameras.values():
            buffer.expire(now_ns, max_age_ns)
            if not buffer.frames:
                text = buffer.why_empty(now_ns, max_age_ns)
                missing.append(MissingInput(f'camera {buffer.name}', text))
        return missing

    def _missing_joints(self, now_ns: int) -> list[MissingInput]:
        missing = []
        for joint in self._joints:
            text = self._topics[joint.source.topic].why_not(joint, now_ns, self.limits.max_age_ns)
            if text is not None:
                missing.append(MissingInput(f'joint {joint.source.joint}', text))
        return missing

    def _newest_together(self, tolerance_ns: int) -> dict[str, Frame] | None:
        """Walk back from the newest frames; the newest of the candidates is the one to give way.

        A frame more than the tolerance newer than another camera's candidate fits none of its older
        ones either, so what is skipped is never part of a selection.
        """
        frames = {name: buffer.frames for name, buffer in self._cameras.items()}
        places = {name: len(usable) - 1 for name, usable in frames.items()}
        while True:
            chosen = {name: usable[places[name]] for name, usable in frames.items()}
            newest = max(chosen, key=lambda name: chosen[name].stamp_ns)
            oldest_ns = min(frame.stamp_ns for frame in chosen.values())
            if chosen[newest].stamp_ns - oldest_ns <= tolerance_ns:
                return chosen
            if places[newest] == 0:
                return None
            places[newest] -= 1

    def _before(self, frames: Mapping[str, Frame]) -> dict[str, Frame] | MissingInput:
        """The earlier frames that the policy sees; a camera's first frame stands for older ones."""
        found = {}
        for name, earlier in self._earlier.items():
            if self._first == {}:
                found[name] = frames[earlier.camera]
                continue
            buffer = self._cameras[earlier.camera]
            wanted_ns = frames[earlier.camera].stamp_ns - earlier.age_ns
            if self._first:
                wanted_ns = max(wanted_ns, self._first[earlier.camera])
            frame = buffer.nearest(wanted_ns)
            off_ns = abs(frame.stamp_ns - wanted_ns)
            if off_ns > self.limits.tolerance_ns and frame.stamp_ns != buffer.first_ns:
                return MissingInput(
                    f'camera {name}',
                    f"camera '{earlier.camera}' ({buffer.topic}): no frame from "
                    f'{earlier.age_ns * 1e-9:.3f} s before its newest; the nearest is '
                    f'{off_ns * 1e-9:.3f} s off (sync_tolerance_s): frames are lost, or the camera '
                    'is too slow',
                )
            found[name] = frame
        return found

    def _earlier_times(self, stamp_ns: int) -> tuple[int, ...]:
        if self._first == {}:
            return (stamp_ns,) * len(self._state_ages_ns)
        oldest_ns = self._first_ns if self._first else 0
        return tuple(max(stamp_ns - age_ns, oldest_ns) for age_ns in self._state_ages_ns)

    def _mark_selected(self, frames: Mapping[str, Frame]) -> None:
        for name, buffer in self._cameras.items():
            earlier = (other for other, item in self._earlier.items() if item.camera == name)
            buffer.mark_selected(frames[camera].stamp_ns for camera in (name, *earlier))

    def _apart(self) -> MissingInput:
        newest = {name: buffer.frames[-1].stamp_ns for name, buffer in self._cameras.items()}
        ahead, behind = max(newest, key=newest.__getitem__), min(newest, key=newest.__getitem__)
        apart_s = (newest[ahead] - newest[behind]) * 1e-9
        return MissingInput(
            'cameras',
            f'no frames within sync_tolerance_s = {self.limits.tolerance_ns * 1e-9:g} s of each '
            f"other: the newest of '{ahead}' and '{behind}' are {apart_s:.3f} s apart; synchronise "
            'the cameras, or raise sync_tolerance_s',
        )

    def _state(self, stamp_ns: int) -> _State | tuple[MissingInput, ...]:
        limits = self.limits
        values, newest, missing = [], [], []
        for joint in self._joints:
            found = joint.at(stamp_ns, limits.tolerance_ns, limits.max_age_ns)
            if isinstance(found, str):
                text = f"joint '{joint.source.joint}' ({joint.source.topic}): {found}"
                missing.append(MissingInput(f'joint {joint.source.joint}', text))
            else:
                newest.append(found[0])
                values.append(found[1])
        if missing:
            return tuple(missing)
        return _State(np.array(values), min(newest, default=stamp_ns))


@dataclass(frozen=True)
class _State:
    values: np.ndarray
    newest_ns: int


def _kept_ns(camera: str, earlier: Mapping[str, EarlierFrame]) -> int:
    """Time that a camera's frames are kept beyond the age of usable ones."""
    return max((item.age_ns for item in earlier.values() if item.camera == camera), default=0)
