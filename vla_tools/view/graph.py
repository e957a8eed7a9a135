"""Live robot: hears its topics in one thread, and shows them a few times a second.

Invariants:
- nothing is published but markers, and all is heard best effort: no node waits for this process;
- messages go by UDP, as the executor's do, so that no shared memory of this process can keep a
  node from sending, whether it stands still or is killed;
- only the newest message of a topic is decoded; cameras are heard while a page is open.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.serialization import deserialize_message
from sensor_msgs.msg import CompressedImage, Image, JointState

from vla_runtime.messages.images import ImageError
from vla_runtime.nodes.graph_status import GraphStatus
from vla_runtime.nodes.polled_topics import PolledTopic, PolledTopics
from vla_runtime.nodes.qos import LATCHED, NEWEST_HEARD
from vla_runtime.nodes.robot_report import RobotReport
from vla_runtime.recording.storage_file import header_stamp_ns
from vla_tools.view import wire
from vla_tools.view.pictures import small_jpeg
from vla_tools.view.state import ViewState

PERIOD_S = 0.1
_CAMERA_PERIOD_S = 0.2
# Every report counts in a strip.
_EACH = QoSProfile(depth=20, reliability=ReliabilityPolicy.BEST_EFFORT)
# A page that is loaded anew finds the cameras still heard.
_LINGER_S = 10.0
_RATE_WINDOW_S = 2.0
# Who is in the graph without a word; asking costs more than hearing.
_ASK_GRAPH_S = 2.0
# What a middleware says that does not count a publisher's messages.
_UNCOUNTED = 2**64 - 1


class _Camera:
    """A camera's subscription, and how often its driver sends."""

    def __init__(self, topic: PolledTopic, message_type: type) -> None:
        self.topic, self.message_type = topic, message_type
        self.due_s = 0.0
        # Number and time (ns) of the frames that were looked at in the last seconds.
        self._seen: list[tuple[int, int]] = []

    def rate_hz(self, number: int, received_ns: int) -> float | None:
        """Return the driver's rate by the numbers of its messages, lost ones counted."""
        if self._seen and number < self._seen[-1][0]:
            # Another driver.
            self._seen.clear()
        self._seen.append((number, received_ns))
        first = self._seen[0]
        while len(self._seen) > 2 and received_ns - self._seen[1][1] > _RATE_WINDOW_S * 1e9:
            first = self._seen.pop(0)
        if received_ns <= first[1] or number in (0, _UNCOUNTED):
            return None
        return (number - first[0]) * 1e9 / (received_ns - first[1])


class LiveGraph:
    """Fills a state from the graph; `on_moment` is called in its thread after each look.

    Attributes:
        pictures: camera to number and JPEG of its newest frame; replaced, never changed.
        pages: number of open pages, set by the server.

    Args:
        node: in the robot's namespace; the caller destroys it after `stop`.
        lock: held while the state is filled.
    """

    def __init__(
        self,
        node: Node,
        status: GraphStatus,
        state: ViewState,
        lock: threading.Lock,
        on_moment: Callable[[int], None],
    ) -> None:
        self.pictures: dict[str, tuple[int, bytes]] = {}
        self.pages = 0
        self._node, self._state = node, state
        self._lock, self._on_moment = lock, on_moment
        self._status, self._in_graph, self._asked_s = status, list[str](), 0.0
        self._topics = PolledTopics(node, 'topics')
        self._roles = {
            role: self._topics.subscribe(
                topic.message_type(),
                topic.name,
                LATCHED if topic.latched else _EACH,
            )
            for role, topic in wire.TOPICS.items()
        }
        self._joints: dict[str, PolledTopic] = {}
        self._camera_topics: PolledTopics | None = None
        self._cameras: dict[str, _Camera] = {}
        self._paged_s = 0.0
        self._robot_version = -1
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name='graph', daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and leave the topics."""
        self._ending.set()
        self._thread.join()
        self._close_cameras()
        self._topics.close()

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._ending.wait(max(0.0, due_s - time.monotonic())):
            # After a stop of the process, no looks to make up for.
            due_s = max(due_s + PERIOD_S, time.monotonic())
            try:
                with self._lock:
                    self._look()
            # A message that nobody thought of must not end the picture of all others.
            except Exception as error:
                self._node.get_logger().warning(f'view: {error!r}', throttle_duration_sec=10.0)

    def _look(self) -> None:
        now_ns = time.time_ns()
        for role, topic in self._roles.items():
            while (taken := topic.take()) is not None:
                self._state.take(role, taken.message, taken.received_ns or now_ns)
        self._follow_robot()
        for topic in self._joints.values():
            if (taken := topic.take()) is not None:
                self._state.take_joints(taken.message, now_ns)
        self._state.take_report(self._report(), now_ns)
        self._look_at_cameras(now_ns)
        self._on_moment(now_ns)

    def _report(self) -> RobotReport | None:
        if time.monotonic() - self._asked_s > _ASK_GRAPH_S:
            self._asked_s = time.monotonic()
            self._in_graph = self._status.in_graph()
        found = self._status.look(self._state.namespace, self._in_graph)
        return found[0] if found else None

    def _follow_robot(self) -> None:
        """Hear the joint states of the robot that is known now; cameras follow with the pages."""
        if self._robot_version == self._state.version and self._joints:
            return
        self._robot_version = self._state.version
        robot = self._state.robot
        topics = [one.topic for one in robot.joint_states] if robot else ['joint_states']
        for topic in {*topics} - self._joints.keys():
            self._joints[topic] = self._topics.subscribe(JointState, topic, NEWEST_HEARD)
        if self._cameras.keys() != self._state.cameras.keys():
            self._close_cameras()

    # --- cameras

    def _look_at_cameras(self, now_ns: int) -> None:
        now_s = time.monotonic()
        if self.pages:
            self._paged_s = now_s
            self._open_cameras()
        elif self._cameras and now_s - self._paged_s > _LINGER_S:
            self._close_cameras()
        for name, camera in self._cameras.items():
            if (taken := camera.topic.take(decode=False)) is not None:
                rate_hz = camera.rate_hz(taken.number, taken.received_ns)
                stamp_ns = header_stamp_ns(taken.message) or 0
                self._state.take_frame(name, stamp_ns, now_ns, rate_hz)
                if now_s >= camera.due_s:
                    camera.due_s = now_s + _CAMERA_PERIOD_S
                    self._show(name, deserialize_message(taken.message, camera.message_type))

    def _show(self, name: str, frame: Image | CompressedImage) -> None:
        """Make a picture of a frame; what is wrong with it stands beside the picture before."""
        camera = self._state.cameras[name]
        try:
            jpeg = small_jpeg(frame, self._state.encoding_of(name))
        except ImageError as error:
            camera.problem = str(error)
            return
        camera.problem = ''
        self.pictures = {**self.pictures, name: (camera.number, jpeg)}

    def _open_cameras(self) -> None:
        if self._camera_topics is not None or self._state.robot is None:
            return
        self._camera_topics = PolledTopics(self._node, 'cameras')
        for camera in self._state.robot.cameras:
            kind = Image if camera.type == 'raw' else CompressedImage
            topic = self._camera_topics.subscribe(kind, camera.topic, NEWEST_HEARD)
            self._cameras[camera.name] = _Camera(topic, kind)

    def _close_cameras(self) -> None:
        if self._camera_topics is not None:
            self._camera_topics.close()
        self._camera_topics = None
        self._cameras.clear()
