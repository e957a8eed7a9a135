"""Open loop: what a policy predicts on any bag, against the motion that followed in it.

The node's own synchroniser chooses frames and states, on the bag's clock (`BagClock`). Nothing the
policy says moves anything: an error measures the difference from whoever drove the robot, not how
well the policy would do.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_runtime.inference.settings import PolicySettings
from vla_runtime.nodes.policy.robot_policy import RobotPolicy
from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.recording.storage_file import RawMessage
from vla_runtime.sensors.camera_buffer import Frame
from vla_runtime.sensors.synchronizer import Selection, Synchronizer, SyncLimits
from vla_runtime.types import ActionChunk, Observation, PlanRequest
from vla_tools.replay.bag_topics import BagTopics
from vla_tools.replay.motion import RecordedMotion

# Messages of a bag lie within this of the order of their stamps; a recorder of used frames writes
# them when their chunk is there.
_WINDOW_NS = 3_000_000_000
# The policy node's defaults.
LIMITS = SyncLimits(tolerance_ns=50_000_000, max_age_ns=500_000_000)


@dataclass(frozen=True)
class Prediction:
    """One chunk on recorded inputs, in robot names and units, and its inference's time."""

    stamp_ns: int
    chunk: ActionChunk
    messages: Mapping[str, Any]
    milliseconds: float


class OpenLoop:
    """Predicts every `every_s` seconds along a bag.

    `instruction` gives the task at a time (ns), empty for none. `motion` is complete once all
    predictions are made; `missing` counts those that could not be made, by reason.
    """

    def __init__(
        self,
        reader: BagReader,
        topics: BagTopics,
        policy: RobotPolicy,
        settings: PolicySettings,
        instruction: Callable[[int], str],
        every_s: float,
    ) -> None:
        self.motion = RecordedMotion()
        self.missing: Counter[str] = Counter()
        self._reader = reader
        self._topics = topics
        self._policy = policy
        self._settings = settings
        self._instruction = instruction
        self._every_ns = round(every_s * 1e9)
        earlier = policy.match.earlier
        self._camera_of = {
            topic: name for name, topic in topics.cameras.items() if name not in earlier
        }
        self._joint_topics = {source.topic for source in topics.measured.values()}
        self._synchronizer = Synchronizer(
            topics.cameras, list(topics.joints), LIMITS, earlier, policy.match.state_ages_ns
        )

    def predictions(self) -> Iterator[Prediction]:
        """Make them, in the order of time."""
        self._policy.policy.reset()
        due_ns: int | None = None
        for stamp_ns, message in self._in_order():
            if due_ns is not None and stamp_ns >= due_ns:
                yield from self._predict(stamp_ns)
                due_ns = max(due_ns + self._every_ns, stamp_ns)
            self._take(stamp_ns, message)
            if due_ns is None:
                due_ns = stamp_ns + self._every_ns

    def _in_order(self) -> Iterator[tuple[int, Any]]:
        """Yield messages in the order of their stamps."""
        waiting: list[tuple[int, int, RawMessage, Any]] = []
        newest_ns, count = 0, 0
        topics = {*self._camera_of, *self._joint_topics}
        for raw in self._reader.messages(lambda topic, _: topic in topics):
            message = self._reader.read(raw)
            if message is None:
                continue
            stamp_ns = self._topics.clock.time_ns(raw)
            count += 1
            heapq.heappush(waiting, (stamp_ns, count, raw, message))
            newest_ns = max(newest_ns, stamp_ns)
            while waiting[0][0] < newest_ns - _WINDOW_NS:
                first = heapq.heappop(waiting)
                yield first[0], (first[2].topic, first[3])
        while waiting:
            first = heapq.heappop(waiting)
            yield first[0], (first[2].topic, first[3])

    def _take(self, stamp_ns: int, item: tuple[str, Any]) -> None:
        topic, message = item
        if topic in self._camera_of:
            frame = Frame(stamp_ns, 0, message)
            self._synchronizer.add_frame(self._camera_of[topic], frame, stamp_ns)
            return
        names, positions = list(message.name), [float(value) for value in message.position]
        if any(source.topic == topic for source in self._topics.joints):
            self._synchronizer.add_joints(topic, names, positions, stamp_ns, stamp_ns)
        for joint, source in self._topics.measured.items():
            if source.topic == topic and source.joint in names and len(positions) == len(names):
                self.motion.add(joint, stamp_ns, positions[names.index(source.joint)])

    def _predict(self, now_ns: int) -> Iterator[Prediction]:
        selection = self._synchronizer.select(now_ns)
        if not isinstance(selection, Selection):
            self.missing[selection[0].source] += 1
            return
        instruction = self._instruction(now_ns)
        if self._policy.policy.reads_instruction and not instruction.strip():
            self.missing['instruction'] += 1
            return
        messages = {name: frame.message for name, frame in selection.frames.items()}
        stamps = {name: frame.stamp_ns for name, frame in selection.frames.items()}
        try:
            observation = Observation(
                images={name: self._policy.pixels(name, m) for name, m in messages.items()},
                state=self._policy.state(selection.state),
                earlier_states=self._policy.earlier_states(selection),
                instruction=instruction,
                stamps_ns={**stamps, 'state': selection.state_stamp_ns},
            )
            done = self._policy.submit(
                observation,
                self._no_plan(selection.stamp_ns),
                self._settings,
                stamp_ns=selection.stamp_ns,
            ).result()
        except ValueError as error:
            self.missing[str(error)] += 1
            return
        milliseconds = done.report.milliseconds['total']
        yield Prediction(selection.stamp_ns, done.chunk, messages, milliseconds)

    def _no_plan(self, stamp_ns: int) -> PlanRequest:
        match = self._policy.match
        rows = np.zeros((0, len(match.action_names)))
        return PlanRequest(rows, match.action_names, match.action_kinds, None, stamp_ns, 0, 0)
