"""Messages with anything in them: refused by our own errors, never a warning, never a crash."""

import array
import math
from random import Random
from typing import Any

import numpy as np
import pytest
from mutations import COUNTS, fuzz, mutated
from sensor_msgs.msg import CompressedImage, Image

from vla_runtime.execution.column_model import ColumnModel
from vla_runtime.execution.columns import Column, CommandColumns
from vla_runtime.execution.state import MeasuredState
from vla_runtime.execution.watchdog import StateWatch, WatchdogParameters
from vla_runtime.messages.images import ImageError, check_image, to_rgb
from vla_runtime.messages.trajectories import (
    TrajectoryError,
    chunk_to_message,
    message_to_chunk,
    message_to_plan,
    plan_to_message,
    trajectory_of,
    typed_messages,
)
from vla_runtime.processing.normalization import Normalizer
from vla_runtime.sensors.joint_buffer import JointBuffer, JointSource, JointTopic
from vla_runtime.types import ActionChunk, ChunkHeader, PlanRequest

NAMES = ('a', 'b', 'turn')
NUMBERS = (0.0, -1.0, 1e308, -1e308, 1e39, 5e-324, math.nan, math.inf, -math.inf, 3.5)
COLUMNS = ColumnModel(CommandColumns((Column('a'), Column('b'), Column('turn', continuous=True))))
SECOND = 10**9


class RefusedError(TrajectoryError):
    """A joint state that was refused, as the others are by an error."""


@pytest.mark.parametrize('count', COUNTS)
def test_whatever_a_message_says_expect_it_used_or_refused(count):
    robot = Robot()
    accepted, refused = fuzz(count, 'messages', robot.take, (TrajectoryError, ImageError))
    assert accepted > count / 10 and refused > count / 4


class Robot:
    """Everything that takes messages, in the two nodes."""

    def __init__(self) -> None:
        # What ROS 2 imports with it warns, which counts as a fault below.
        typed_messages()
        self.state = MeasuredState(COLUMNS)
        self.watch = StateWatch(WatchdogParameters(), COLUMNS)
        self.joints = [JointBuffer(JointSource('/j', n, continuous=n == 'turn')) for n in NAMES]
        self.topic = JointTopic('/j', self.joints)
        self.now_ns = SECOND
        limits = {'q01': np.full(3, -1.0), 'q99': np.array([1.0, 1.0, -1.0])}
        self.normalisers = [
            Normalizer(k, limits) for k in ('quantiles_lerobot', 'quantiles_openpi')
        ]

    def take(self, random: Random) -> None:
        random.choice((self._chunk, self._plan, self._joint_state, self._image))(random)

    def _chunk(self, random: Random) -> None:
        kinds = tuple(random.choice(('position', 'velocity')) for _ in NAMES)
        chunk = ActionChunk(np.zeros((4, 3)), NAMES, kinds, 0.05, np.zeros((4, 0), np.float32))
        message = chunk_to_message(chunk, ChunkHeader(self.now_ns, 3, 17, tied=False))
        chunk_read, header = message_to_chunk(_changed(message, random))
        sent = trajectory_of(message)
        assert chunk_read.actions.shape == (len(sent.points), len(sent.joint_names))
        assert chunk_read.step_time_s > 0 and header.episode < 2**63

    def _plan(self, random: Random) -> None:
        rows = np.zeros((random.choice((0, 1, 4)), 3))
        kinds = ('position',) * 3
        message = plan_to_message(
            PlanRequest(rows, NAMES, kinds, 0.05, stamp_ns=9, episode=1, certain=2)
        )
        received = message_to_plan(_changed(message, random))
        assert np.isfinite(received.rows).all() and received.certain < 2**63

    def _joint_state(self, random: Random) -> None:
        names = [random.choice((*NAMES, *NAMES, '', 'x', '\x00')) for _ in NAMES]
        if random.random() < 0.5:
            names = list(NAMES)
        positions = [random.choice(NUMBERS) for _ in range(random.choice((3, 3, 3, 2)))]
        self.now_ns += SECOND // 100
        stamp_ns = self.now_ns + random.choice((0, 0, 0, -SECOND, SECOND, (2**32) * SECOND))
        self.state.observe(names, array.array('d', positions), stamp_ns)
        fault = self.watch.check(self.state, self.now_ns)
        said = self.watch.describe(fault, self.state, self.now_ns) if fault else ''
        if fault is None:
            self.state.bring_near(np.zeros(3))
            assert np.isfinite(self.state.positions).all()
            self.watch.too_far(np.zeros(3), self.state.positions)
        taken = self.topic.add(names, positions, stamp_ns, self.now_ns, SECOND)
        self.topic.expire(self.now_ns, SECOND)
        for joint in self.joints:
            if not joint.samples:
                continue
            value = joint.at(self.now_ns, SECOND, SECOND)
            if isinstance(value, tuple):
                for normaliser in self.normalisers:
                    assert np.isfinite(normaliser.normalise(np.full(3, value[1]))).all()
        if not taken or fault:
            raise RefusedError(said or self.topic.fault)

    def _image(self, random: Random) -> None:
        message = random.choice((_raw, _compressed))(random)
        check_image(message)
        rgb = to_rgb(message)
        assert rgb.ndim == 3 and rgb.shape[2] == 3 and rgb.dtype == np.uint8


def _changed(whole: Any, random: Random) -> Any:
    message = trajectory_of(whole)
    for _ in range(random.randint(1, 2)):
        change = random.randrange(6)
        point = random.choice(message.points) if message.points else None
        if change == 0 and whole is not message:
            name = random.choice(('episode', 'request', 'step'))
            setattr(whole, name, random.choice((0, 1, 10**18, 2**63 - 1)))
        elif change == 0:
            tag = mutated(message.header.frame_id.encode(), random)
            message.header.frame_id = tag.decode('utf-8', 'replace')
        elif change == 1:
            message.joint_names = random.choice(
                ([], ['a', 'a', 'b'], ['a'], ['', '\n', 'x' * 5000])
            )
        elif change == 2 and point is not None:
            values = [random.choice(NUMBERS) for _ in range(random.choice((0, 2, 3, 3, 3)))]
            setattr(point, random.choice(('positions', 'velocities', 'effort')), values)
        elif change == 3 and point is not None:
            point.time_from_start.sec = random.choice((0, 1, -1, 2**31 - 1, -(2**31)))
            point.time_from_start.nanosec = random.choice((0, 1, 10**9, 2**32 - 1))
        elif change == 4:
            message.header.stamp.sec = random.choice((0, -1, 2**31 - 1, -(2**31)))
        elif point is not None:
            message.points = random.choice(([], [point], [point] * 300, message.points[::-1]))
    return whole


def _raw(random: Random) -> Image:
    width, height = (random.choice((0, 1, 5, 7, 2**32 - 1)) for _ in range(2))
    width, height = (width, height) if random.random() < 0.5 else (5, 7)
    size = random.choice((0, 1, 105, 105, 140, 4000))
    return Image(
        width=width,
        height=height,
        step=random.choice((0, 1, 15, 15, 20, 2**32 - 1)),
        encoding=random.choice(('rgb8', 'bgr8', 'mono8', 'rgba8', 'bayer_rggb8', '', 'x' * 5000)),
        is_bigendian=random.choice((0, 1, 255)),
        data=array.array('B', bytes(size)),
    )


def _compressed(random: Random) -> CompressedImage:
    data = mutated(bytes.fromhex(PNG), random)
    return CompressedImage(
        format=random.choice(
            ('png', 'rgb8; png compressed bgr8', 'jpeg', '16UC1; compressedDepth')
        ),
        data=array.array('B', data[: random.choice((0, 8, 10_000))]),
    )


# A picture of one red pixel.
PNG = (
    '89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8cf'
    'c0000003010100c9fe92ef0000000049454e44ae426082'
)
