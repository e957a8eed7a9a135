"""Reports of the executor node: parameters, chunks that are not tied, a second publisher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from graph import graph
from pages import text_of
from tabletop_policy import HORIZON
from test_executor_node import Bench
from trajectory_msgs.msg import JointTrajectory

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.nodes.executor.parameters import EXECUTOR_PARAMETERS
from vla_runtime.nodes.graph_faults import other_publishers, several_publishers

pytestmark = pytest.mark.graph


class Reported(Bench):
    """A bench that keeps the seam reports too."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.reports = self.graph.collect(DiagnosticArray, f'{self.node}/report')

    def begin(self) -> None:
        super().begin()
        self.reports.clear()

    def next_seam(self, number: int) -> dict[str, str]:
        """Answer with this chunk; what is reported when it takes over."""
        self.arm.answer(number)

        def look() -> dict[str, str] | None:
            for message in self.reports:
                status = message.status[0]
                values = values_of(status)
                if values['chunk'] == str(number):
                    return {**values, 'text': status.message, 'level': str(status.level[0])}
            return None

        return self.graph.wait_for(look, f'the seam of chunk {number}')

    def wait_for_request(self) -> None:
        count = len(self.arm.plans)
        self.graph.wait_for(lambda: len(self.arm.plans) > count, 'a request')


@pytest.fixture(scope='module')
def shared(bundle: Path) -> Iterator[Reported]:
    with graph() as made:
        bench = Reported(made, bundle)
        yield bench
        bench.arm.close()


@pytest.fixture
def bench(shared: Reported) -> Reported:
    shared.begin()
    return shared


def test_every_live_parameter_in_force_is_in_each_report(bench: Reported) -> None:
    bench.start()
    seam = bench.next_seam(0)
    status = bench.move()
    live = {f'parameter.{row.name}' for row in EXECUTOR_PARAMETERS if not row.read_only}
    for said in (seam, status):
        assert live == {key for key in said if key.startswith('parameter.')}
        assert (said['parameter.blend_steps'], said['parameter.interpolation']) == ('4', 'cubic')


@pytest.mark.parametrize(
    ('name', 'value', 'before'), [('blend_steps', 2, 4), ('interpolation', 'linear', 'cubic')]
)
def test_an_accepted_change_is_in_the_report_of_the_next_seam(
    bench: Reported, name: str, value: int | str, before: int | str
) -> None:
    bench.start()
    assert bench.next_seam(0)[f'parameter.{name}'] == str(before)
    assert bench.graph.set_parameter(bench.node, name, value).successful
    bench.wait_for_status('the end of the chunk', lambda s: s['reason'] == 'starved')
    assert bench.next_seam(1)[f'parameter.{name}'] == str(value)
    bench.wait_for_status('the status', lambda s: s[f'parameter.{name}'] == str(value))
    assert bench.graph.set_parameter(bench.node, name, before).successful


@pytest.mark.parametrize('name', ['blend_steps', 'max_overrun_steps'])
def test_more_steps_than_a_chunk_has_are_refused_with_the_numbers(
    bench: Reported, name: str
) -> None:
    result = bench.graph.set_parameter(bench.node, name, HORIZON + 1)
    assert not result.successful
    assert f'{name} is {HORIZON + 1} but a chunk has only {HORIZON} steps' in result.reason


def test_a_value_of_the_wrong_type_is_refused_as_the_pages_say(bench: Reported) -> None:
    result = bench.graph.set_parameter(bench.node, 'request_timeout_s', 2)
    assert not result.successful
    assert f'`{result.reason}`' in text_of('docs/reference/messages.md')


def test_start_answers_that_it_started(bench: Reported) -> None:
    response = bench.graph.wait_for(
        lambda: (given := bench.call('start')).success and given, 'a start'
    )
    assert response.message.startswith('started')


def test_an_untied_chunk_under_rtc_is_blended_and_the_cause_named(bench: Reported) -> None:
    assert bench.graph.set_parameter(bench.node, 'handover_mode', 'rtc').successful
    bench.start()
    # It sets out from a hold: there is nothing to be tied to.
    assert bench.next_seam(0)['level'] == '0'
    # On a busy machine a chunk may come so late that it sets out from a hold again.
    for number in range(1, 20):
        bench.wait_for_request()
        seam = bench.next_seam(number)
        if seam['from_hold'] == 'false':
            break
    assert (seam['mode'], seam['level']) == ('blend', '1')
    assert 'real_time_chunking' in seam['text']
    assert bench.graph.set_parameter(bench.node, 'handover_mode', 'blend').successful


def test_a_second_executor_keeps_it_from_starting_and_is_named(bench: Reported) -> None:
    node = bench.graph.node
    rival = node.create_publisher(JointTrajectory, 'committed_plan', 1)

    def refusal() -> bool:
        response = bench.call('start')
        if response.success:
            bench.call('stop')
        return f'/committed_plan is also published by /{node.get_name()};' in response.message

    try:
        # Its name may be discovered after its publisher.
        bench.graph.wait_for(refusal, 'a refusal that names it')
    finally:
        node.destroy_publisher(rival)
    bench.graph.wait_for(lambda: bench.call('start').success, 'a start')


def test_a_second_executor_while_it_runs_is_an_error(bench: Reported) -> None:
    bench.start()
    node = bench.graph.node
    rival = node.create_publisher(JointTrajectory, 'committed_plan', 1)
    try:
        named = f'/{node.get_name()};'
        status = bench.wait_for_status(
            'the rival', lambda s: 'two executors' in s['text'] and named in s['text']
        )
        assert status['level'] == 2
    finally:
        node.destroy_publisher(rival)
    bench.wait_for_status('its end', lambda s: 'two executors' not in s['text'])


def test_a_node_of_the_same_name_is_told_from_oneself() -> None:
    with graph() as made:
        one, other = (rclpy.create_node('twin', context=made.node.context) for _ in range(2))
        publisher = one.create_publisher(JointTrajectory, '/chatter', 1)
        made.wait_for(lambda: one.count_publishers('/chatter') == 1, 'its own publisher')
        assert other_publishers(one, [publisher.topic_name]) == ''
        other.create_publisher(JointTrajectory, '/chatter', 1)
        said = made.wait_for(lambda: other_publishers(one, [publisher.topic_name]), 'the twin')
        assert said == '/chatter is also published by another node of the same name, /twin'
        assert several_publishers(one, '/chatter') == '2 publishers on /chatter: /twin, /twin'
        for node in (one, other):
            node.destroy_node()


def test_a_publisher_that_was_discovered_before_its_node_has_words_for_it() -> None:
    unknown = SimpleNamespace(
        node_name='_NODE_NAME_UNKNOWN_', node_namespace='_NODE_NAMESPACE_UNKNOWN_'
    )
    node: Any = SimpleNamespace(
        count_publishers=lambda topic: 2,
        get_fully_qualified_name=lambda: '/vla_executor',
        get_publishers_info_by_topic=lambda topic: [
            SimpleNamespace(node_name='vla_executor', node_namespace='/'),
            unknown,
        ],
    )
    said = other_publishers(node, ['/chatter'])
    assert said == '/chatter is also published by a node whose name is not known yet'
