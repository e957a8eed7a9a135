"""The page beside a real executor: it shows, it asks, and its end leaves no trace in the motion."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from executor_bench import HOME, Bench
from graph import Graph, Process, graph
from rclpy.qos import QoSProfile
from tabletop_policy import write_tabletop_policy
from view_page import Page, open_page
from visualization_msgs.msg import MarkerArray

pytestmark = pytest.mark.graph

NAMESPACE = '/arm'
# Of a chunk's steps.
RISE_RAD = 0.01
URDF = """<robot name="two"><link name="base"/><link name="upper"/><link name="tip"/>
<joint name="shoulder_pan" type="revolute"><parent link="base"/><child link="upper"/>
<axis xyz="0 0 1"/><limit lower="-1.6" upper="1.6" effort="1" velocity="1"/></joint>
<joint name="elbow_flex" type="revolute"><parent link="upper"/><child link="tip"/>
<origin xyz="1 0 0"/><axis xyz="0 1 0"/><limit lower="0" upper="2.7" effort="1" velocity="1"/>
</joint></robot>"""


@pytest.fixture(scope='module')
def made() -> Iterator[Graph]:
    with graph() as found:
        yield found


@pytest.fixture(scope='module')
def bench(made: Graph, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bundle = write_tabletop_policy(tmp_path_factory.mktemp('bundle') / 'tabletop')
    # A busy machine must not look like a policy that is late.
    bench = Bench(made, bundle, NAMESPACE, '-p', 'max_overrun_steps:=8')
    yield bench
    bench.arm.close()


@pytest.fixture(scope='module')
def urdf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp('urdf') / 'two.urdf'
    path.write_text(URDF, encoding='utf-8')
    return path


def start_view(made: Graph, *arguments: str) -> tuple[Process, int]:
    """Start a view, and return it with its port."""
    chosen = ('--namespace', NAMESPACE, '--robot', 'tabletop', '--port', '0')
    process = made.start('vla_runtime', 'view', *chosen, *arguments, name='view')
    found = made.wait_for(
        lambda: re.search(r'ready: http://127\.0\.0\.1:(\d+)', process.text()), 'the page'
    )
    return process, int(found[1])


@pytest.fixture(scope='module')
def port(made: Graph, bench: Bench, urdf: Path) -> int:
    return start_view(made, '--urdf', str(urdf))[1]


@pytest.fixture
def page(bench: Bench, port: int) -> Iterator[Page]:
    bench.begin()
    with open_page(port) as opened:
        opened.wait_for(lambda: {'start', 'stop', 'replan_interval'} <= {*opened.offered})
        yield opened


def test_a_page_shows_the_joints_and_what_the_executor_says(page: Page) -> None:
    page.wait_for(lambda: page.now.get('mode') == 'idle')
    page.wait_for(lambda: page.now['joints'][0]['at'] == pytest.approx(HOME[0]))
    assert page.hello['robot'] == 'tabletop' and not page.hello['read_only']
    # No policy node is here to offer these.
    assert not {'instruction', 'cfg_beta'} & {*page.offered}


def test_buttons_start_and_stop_the_robot(bench: Bench, page: Page) -> None:
    bench.graph.wait_for(lambda: page.ask(do='start')['ok'], 'a start')
    bench.graph.wait_for(lambda: bench.arm.plans, 'a request')
    bench.move()
    page.wait_for(lambda: page.now['state'] == 'moving')
    page.wait_for(lambda: any(joint['to'] is not None for joint in page.now['joints']))
    assert page.ask(do='stop')['ok']
    bench.wait_for_status('the stop', lambda s: s['mode'] == 'stopped')


def test_a_live_setting_is_set_and_one_out_of_range_refused(bench: Bench, page: Page) -> None:
    assert page.ask(do='set', name='replan_interval', value=5)['ok']
    page.wait_for(lambda: page.now['replan_interval'] == '5')
    refused = page.ask(do='set', name='replan_interval', value=10_000)
    assert not refused['ok'] and 'replan_interval' in refused['text']
    for name, value in (('replan_interval', 'many'), ('bundle', 'x')):
        assert not page.ask(do='set', name=name, value=value)['ok']
    assert page.ask(do='set', name='replan_interval', value=8)['ok']


def test_what_nobody_offers_is_refused_by_name(page: Page) -> None:
    refused = page.ask(do='set', name='cfg_beta', value=1.5)
    assert not refused['ok'] and 'vla_policy' in refused['text']
    assert not page.ask(do='explode')['ok']


def test_a_stop_is_answered_within_a_tenth_of_a_second(page: Page) -> None:
    """The robot rests: what is measured is the way there and back."""
    taken = []
    for _ in range(9):
        begin_s = time.monotonic()
        assert page.ask(do='stop')['ok']
        taken.append(time.monotonic() - begin_s)
    assert median(taken) < 0.1


def test_a_page_that_only_looks_has_no_buttons_and_asks_nothing(made: Graph, bench: Bench) -> None:
    _, port = start_view(made, '--read-only')
    bench.begin()
    with open_page(port) as page:
        page.wait_for(lambda: page.now.get('mode') == 'idle')
        assert page.hello['read_only'] and not page.offered
        assert not page.ask(do='start')['ok']
        assert not page.ask(do='set', name='replan_interval', value=3)['ok']
    status = bench.wait_for_status('that it is idle', lambda s: s['mode'] == 'idle')
    assert status['replan_interval'] == '8'


def test_markers_show_plan_and_limits_in_the_root_of_the_urdf(
    made: Graph, bench: Bench, page: Page
) -> None:
    arrays = made.collect(MarkerArray, f'{NAMESPACE}/vla_view/markers', QoSProfile(depth=10))
    bench.arm.positions[0] = 1.59
    bench.start()

    def namespaces() -> set[str]:
        bench.answer_new()
        return {marker.ns for array in list(arrays) for marker in array.markers}

    made.wait_for(lambda: {'plan', 'chunk', 'limits'} <= namespaces(), 'the markers')
    newest = arrays[-1].markers
    assert {marker.header.frame_id for marker in newest} == {'base'}
    texts = [marker.text for array in arrays for marker in array.markers if marker.text]
    assert 'shoulder_pan at its upper limit' in texts


def test_a_view_that_stalls_or_is_killed_leaves_no_trace_in_the_motion(
    made: Graph, bench: Bench
) -> None:
    view, port = start_view(made)
    numbers = count()

    def answer() -> None:
        """Answer every request, up and down in turn."""
        number = next(numbers) if bench.arm.plans[-1] is not bench._answered else 0
        bench.answer_new(number, rise_rad=RISE_RAD if number % 2 else -RISE_RAD)

    def go_on(commands: int) -> None:
        wanted = len(bench.arm.commands) + commands
        made.wait_for(
            lambda: len(bench.arm.commands) >= wanted, f'{commands} commands', meanwhile=answer
        )

    def tracked() -> dict[str, str]:
        return bench.wait_for_status('motion', lambda s: s['kind'] == 'track', meanwhile=answer)

    bench.begin()
    with open_page(port) as page:
        page.wait_for(lambda: page.now)
        bench.start()
        begun = tracked()
        bench.arm.commands.clear()
        go_on(150)
        view.signal(signal.SIGSTOP)
        go_on(300)
        view.signal(signal.SIGCONT)
        go_on(100)
        view.signal(signal.SIGKILL)
        go_on(300)
        # Before the page's socket is closed, which waits for an answer.
        ended = tracked()
    assert view.wait() == -signal.SIGKILL
    # Neither a hold nor a new start, and no command beside the chunks.
    for name in ('episode', 'starvations', *(key for key in ended if key.startswith('holds.'))):
        assert ended[name] == begun.get(name), name
    way = bench.arm.commanded()
    assert len(way) >= 850 and np.all(np.abs(way - HOME[:5]) < 0.3)
    assert bench.arm.longest_way() < 0.05
