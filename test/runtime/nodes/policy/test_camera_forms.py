"""Cameras as drivers have them: no stamps, grey, another size, damaged. A real policy node."""

from __future__ import annotations

import array
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from graph import graph
from sensor_msgs.msg import Image
from test_policy_node import MAX_AGE_S, Executor, start
from tiny_policy import tiny_spec, write_tiny_policy
from tiny_robot import ROBOT, write_robot

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import ns_to_stamp

pytestmark = pytest.mark.graph

RECEIVED = ROBOT.replace('topic: top/image', 'topic: top/image, stamp: receive').replace(
    'joints: [gripper]}\noutputs', 'joints: [gripper], stamp: receive}\noutputs'
)
MINUTE_NS = 60 * 1_000_000_000


@pytest.fixture(scope='module')
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    folder = tmp_path_factory.mktemp('policy')
    bundle = write_tiny_policy(folder / 'tiny', tiny_spec(advantage='task_newline'))
    robot = write_robot(folder / 'tiny.yaml', RECEIVED)
    with graph() as made:
        start(made, bundle, robot, '-p', f'sync_tolerance_s:={MAX_AGE_S}')
        yield Executor(made)


@pytest.fixture
def executor(running: Executor) -> Executor:
    running.drivers.heal()
    running.prepare()
    return running


@pytest.mark.parametrize('offset_ns', [None, MINUTE_NS])
def test_what_is_stamped_when_it_is_received_needs_no_stamp_of_its_own(
    executor: Executor, offset_ns: int | None
) -> None:
    drivers = executor.drivers
    drivers.offset_ns = {'top': offset_ns, 'gripper': offset_ns}
    before_ns = drivers.clock_ns()
    _, report = executor.chunk()
    after_ns = drivers.clock_ns()
    for source in ('top', 'state'):
        # A state is as old as its oldest joint, and those of the arm have stamps.
        assert before_ns - MAX_AGE_S * 1e9 < int(report[f'stamp_ns.{source}']) < after_ns
    assert 'content.top' in report and 'content.wrist' not in report
    status = executor.wait_for_status('camera top', 'stamped when received', 'the status')
    assert values_of(status)['stamp'] == 'receive'
    states = executor.wait_for_status('joint states', 'gripper/joint_states', 'the status')
    assert 'stamped when received' in states.message
    # Sources that are not said to be so are refused as ever, and the remedy is named.
    drivers.offset_ns |= {'wrist': offset_ns, 'arm': offset_ns}
    # Whichever comes first is refused first, and alone.
    executor.diagnostics.clear()

    def refuses_both_alone() -> bool:
        # A machine that stood still for a second lacks everything for a moment.
        return any(
            all(word in text for word in ("camera 'wrist'", '; /joint_states', 'stamp: receive'))
            and not any(word in text for word in ("camera 'top'", '/gripper/joint_states'))
            for text in [status.message for status in executor.statuses('observation')]
        )

    executor.graph.wait_for(
        refuses_both_alone, 'the refusal of both, and of no other', meanwhile=drivers
    )


def test_forms_that_a_policy_was_not_trained_with_are_said(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    drivers = executor.drivers
    sent = SimpleNamespace(width=64, height=48, encoding='bgr8', channels=3)

    def publish(stamp_ns: int) -> None:
        size = sent.height, sent.width * sent.channels
        pixels = np.random.default_rng(stamp_ns % 1000).integers(0, 256, size, dtype=np.uint8)
        message = Image(height=sent.height, width=sent.width, encoding=sent.encoding)
        message.step, message.data = size[1], array.array('B', pixels.tobytes())
        message.header.stamp = ns_to_stamp(stamp_ns)
        drivers._top.publish(message)

    monkeypatch.setattr(drivers, '_publish_top', publish)
    executor.chunk()
    sent.encoding, sent.channels = 'mono8', 1
    executor.wait_for_status('camera top', 'frames are grey', 'a warning of grey')
    executor.chunk('one of grey frames')
    sent.encoding, sent.channels, sent.width = 'yuv422_yuy2', 2, 32
    executor.wait_for_status('camera top', '32x48 pixels, and were 64x48', 'a warning of the size')
    executor.chunk('one of another size')
    sent.width = 33
    executor.wait_for_status('camera top', 'width must be even', 'an odd width')
    sent.width, sent.encoding = 64, '16UC1'
    executor.wait_for_status('camera top', 'it is depth', 'depth')
    sent.encoding = 'uyvy'
    executor.chunk('one after all that')


def test_a_damaged_frame_is_a_lost_frame_and_named(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    drivers = executor.drivers
    healthy, seen, cut = drivers._publish_wrist, [], set()

    def damaged(stamp_ns: int) -> None:
        publish, drivers._wrist = drivers._wrist, SimpleNamespace(publish=seen.append)
        healthy(stamp_ns)
        drivers._wrist = publish
        message = seen.pop()
        message.data = message.data[: len(message.data) // 2]
        cut.add(stamp_ns)
        publish.publish(message)

    executor.chunk()
    monkeypatch.setattr(drivers, '_publish_wrist', damaged)

    def refused() -> bool:
        drivers.request()
        found = executor.statuses('observation')
        return any("camera 'wrist'" in one.message and 'damaged' in one.message for one in found)

    executor.graph.wait_for(refused, 'a refusal that names the camera', meanwhile=drivers)
    executor.graph.wait_for(
        lambda: any('damaged' in one.message for one in executor.statuses('camera wrist')),
        'the status of the camera',
        meanwhile=drivers,
    )
    monkeypatch.undo()
    _, report = executor.chunk('one of good frames')
    used = {int(values_of(one.status[0])['stamp_ns.wrist']) for one in executor.reports}
    assert int(report['stamp_ns.wrist']) in used and not used & cut
    warning = executor.wait_for_status('camera wrist', 'could not be used', 'the warning')
    assert warning.level == b'\1' and int(values_of(warning)['refused']) > 0
