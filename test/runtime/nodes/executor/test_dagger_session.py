"""A person corrects a policy: the session is recorded, and becomes a data set with who drove."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from graph import Graph, graph, statuses
from leader_arm import LEADER_YAML, LeaderArm
from lerobot_apart import needs_lerobot, read_by_lerobot
from sensor_msgs.msg import Image
from stamped_arm import StampedBench
from std_srvs.srv import SetBool

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import ns_to_stamp, typed_messages
from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.robot.file import load_robot
from vla_tools.dataset.convert import DatasetOptions, Result, convert
from vla_tools.dataset.layout import INTERVENTION

pytestmark = pytest.mark.graph

NAMESPACE = '/dagger'
FPS = 20
PATIENT = LEADER_YAML.replace('mode: offset', 'mode: offset\n  timeout_s: 1.0')


@dataclass
class Session:
    """What is left of the session.

    Attributes:
        commands: stamp in ns and (5,) positions of each command that the arm got.
        changes: stamp in ns, and who drove from then on.
    """

    bag: Path
    folder: Path
    result: Result
    commands: list[tuple[int, np.ndarray]]
    changes: list[tuple[int, str]]

    @property
    def frames(self) -> Any:
        return pq.read_table(self.folder / 'data/chunk-000/file-000.parquet')

    def span(self) -> tuple[int, int]:
        """Begin and end of the leader's drive, ns."""
        begin_ns = next(stamp for stamp, who in self.changes if who == 'leader')
        end_ns = next(stamp for stamp, _ in self.changes if stamp > begin_ns)
        return begin_ns, end_ns


@contextmanager
def cameras(made: Graph) -> Iterator[None]:
    """Two cameras of the tabletop's robot file, five frames a second."""
    topics = [f'{NAMESPACE}/{name}/image_raw' for name in ('front', 'wrist')]
    publishers = [made.node.create_publisher(Image, topic, 10) for topic in topics]
    stop = threading.Event()

    def run() -> None:
        number = 0
        while not stop.wait(0.2):
            number += 1
            message = Image(height=240, width=320, step=960, encoding='rgb8')
            message.data = bytes([number % 256]) * (240 * 960)
            message.header.stamp = ns_to_stamp(made.node.get_clock().now().nanoseconds)
            for publisher in publishers:
                publisher.publish(message)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        for publisher in publishers:
            made.node.destroy_publisher(publisher)


def drive(bench: StampedBench, commands: int, meanwhile: Callable[[], None]) -> None:
    target = len(bench.stamped) + commands
    bench.graph.wait_for(
        lambda: len(bench.stamped) >= target, f'{commands} commands', meanwhile=meanwhile
    )


@pytest.fixture(scope='module')
def session(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    folder = tmp_path_factory.mktemp('session')
    with graph() as made, cameras(made):
        bench = StampedBench(made, bundle, NAMESPACE, PATIENT)
        robot = bundle.parent / f'stamped_{NAMESPACE.strip("/")}.yaml'
        bag = folder / 'bag'
        recorder = made.start(
            'vla_runtime.nodes.recorder.node',
            *('--ros-args', '-r', f'__ns:={NAMESPACE}', '-p', f'robot:={robot}'),
            *('-p', f'folder:={bag}', '-p', 'record_images:=all'),
        )
        bench.begin()
        leader = LeaderArm(made, NAMESPACE, 100.0)
        for topic in (f'{bench.node}/report', f'{NAMESPACE}/action_chunk'):
            made.wait_for(lambda topic=topic: made.node.count_subscribers(topic) >= 2, topic)
        number = iter(range(1, 10_000))

        def answer() -> None:
            bench.answer_new(next(number), rise_rad=0.002)

        def lead(*, leads: bool) -> bool:
            request = SetBool.Request(data=leads)
            return bench.graph.call(SetBool, f'{bench.node}/take_over', request).success

        bench.start()
        drive(bench, 200, answer)
        made.wait_for(lambda: lead(leads=True), 'the leader', meanwhile=answer)
        drive(bench, 250, answer)
        assert lead(leads=False)
        drive(bench, 200, answer)
        assert bench.call('success').success
        bench.wait_for_status('the end', lambda s: s['reason'] == 'paused')
        bench.assert_within_limits()

        def drivers() -> list[dict[str, str]]:
            said = statuses(bench.reports, f'{bench.node}: driver')
            return [values_of(one) for one in said][::-1]

        # The report has a topic of its own, which the status may come before.
        made.wait_for(lambda: drivers()[-1]['driver'] == 'nobody', 'the end of the drive')
        found = drivers()
        leader.close()
        assert recorder.stop(signal.SIGINT) == 0
        commands = [(round(stamp_s * 1e9), place) for stamp_s, place in bench.stamped]
        bench.arm.close()
    # A busy machine loses frames, which are not what is looked at.
    options = DatasetOptions(load_robot(robot), NAMESPACE, fps=FPS, task='wave', frame_age_s=10.0)
    result = convert([bag], folder / 'set', options)
    changes = [
        (int(one['stamp_ns']), one['driver']) for one in found if one['driver'] != one['before']
    ]
    yield Session(bag, folder / 'set', result, commands, changes)


def test_the_report_says_who_drove_from_which_command_on(session: Session) -> None:
    assert [who for _, who in session.changes] == ['policy', 'leader', 'policy', 'nobody']
    stamps = {stamp_ns for stamp_ns, _ in session.commands}
    near = min(abs(stamp - session.span()[0]) for stamp in stamps)
    # The stamp is that of a command, which a busy machine may have lost.
    assert near <= 20_000_000


@pytest.mark.skipif(typed_messages() is None, reason='vla_interfaces is not built')
def test_the_recorded_state_says_who_drove(session: Session) -> None:
    reader = BagReader(session.bag)
    states = reader.messages(lambda topic, _: topic == f'{NAMESPACE}/vla_executor/state')
    drivers = [reader.read(raw).driver for raw in states]
    assert [who for who, _ in groupby(drivers)] == [
        'nobody',
        'policy',
        'leader',
        'policy',
        'nobody',
    ]


def test_chunks_of_the_policy_are_recorded_while_a_person_leads(session: Session) -> None:
    reader = BagReader(session.bag)
    begin_ns, end_ns = session.span()
    chunks = reader.messages(lambda topic, _: topic == f'{NAMESPACE}/action_chunk')
    assert sum(begin_ns < raw.time_ns < end_ns for raw in chunks) >= 2
    leader = reader.messages(lambda topic, _: topic == f'{NAMESPACE}/leader/joint_states')
    assert next(iter(leader), None) is not None


def test_the_data_set_has_who_drove_and_what_was_commanded_in_every_row(session: Session) -> None:
    assert session.result.episodes == 1 and session.result.verdicts == [True]
    episodes = pq.read_table(session.folder / 'meta/episodes/chunk-000/file-000.parquet')
    start_ns = episodes['start_ns'][0].as_py()
    frames = session.frames
    times_ns = start_ns + np.round(np.arange(len(frames)) * 1e9 / FPS).astype(np.int64)
    led = np.array(frames[INTERVENTION].to_pylist())
    begin_ns, end_ns = session.span()
    # The clock of a bag is read off its stamps, to within a message.
    clear = (np.abs(times_ns - begin_ns) > 50_000_000) & (np.abs(times_ns - end_ns) > 50_000_000)
    expected = (times_ns >= begin_ns) & (times_ns < end_ns)
    assert (led[clear] == expected[clear]).all()
    assert led.sum() >= 30 and (~led).sum() >= 30
    action = np.array(frames['action'].to_pylist())[:, :5]
    stamps = np.array([stamp_ns for stamp_ns, _ in session.commands])
    newest = np.searchsorted(stamps, times_ns, side='right') - 1
    commanded = np.array([session.commands[at][1] for at in newest])
    # A command that came between the two readers' looks is one step away.
    assert np.abs(action - commanded).max() <= 0.05
    assert np.median(np.abs(action - commanded)) <= 1e-6


@needs_lerobot
def test_lerobot_reads_the_session(session: Session) -> None:
    found = read_by_lerobot(session.folder)
    frames = session.frames
    assert found['intervention'] == frames[INTERVENTION].to_pylist()
    assert (found['dtype'], found['fps'], found['tasks']) == ('torch.bool', FPS, ['wave'])
    assert np.allclose(found['action'], frames['action'].to_pylist(), atol=1e-6)
    assert found['success'] == frames['next.success'].to_pylist() and sum(found['success']) == 1
    assert set(found['images']) == {'observation.images.front', 'observation.images.wrist'}
