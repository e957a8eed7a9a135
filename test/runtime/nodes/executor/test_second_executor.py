"""A second executor of one robot, on a real graph: it refuses, and the first one goes on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from diagnostic_msgs.msg import DiagnosticArray
from executor_bench import Bench, start
from graph import graph
from thorough import thorough_but

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.nodes.parameter_table import COULD_NOT_START

pytestmark = pytest.mark.graph

AUTOSTART = ('-p', 'autostart:=true')


@pytest.fixture(scope='module')
def bench(bundle: Path) -> Iterator[Bench]:
    with graph() as made:
        bench = Bench(made, bundle)
        bench.begin()
        bench.start()
        yield bench
        bench.arm.close()


@pytest.mark.parametrize('name', thorough_but(['another'], ['vla_executor', 'another']))
def test_a_second_one_refuses_and_the_moving_one_is_not_disturbed(
    bench: Bench, bundle: Path, name: str
) -> None:
    bench.move()
    bench.diagnostics.clear()
    second = start(bench.graph, bundle, '-r', f'__node:={name}', *AUTOSTART, name='second')
    bench.graph.wait_for(lambda: not second.running, 'its end', meanwhile=bench.answer_new)
    assert second.wait() == COULD_NOT_START
    said = second.text()
    assert f'{bench.node} (process {bench.process.pid} on ' in said
    assert '/arm_controller/joint_trajectory' in said
    statuses = list(bench.statuses())
    assert {status['mode'] for status in statuses} == {'running'}
    # Where a machine stood still the second had been configured before it heard the first.
    heard_in_time = "' drives '" not in said
    assert not (heard_in_time and any('two executors' in status['text'] for status in statuses))
    # The one that is left answers.
    assert bench.call('start').message == 'already started'


def test_a_dry_run_of_another_name_commands_nothing_and_may_run_beside_it(
    bench: Bench, bundle: Path
) -> None:
    robot = bundle.parent / 'global.yaml'
    text = (bundle.parent / 'patient.yaml').read_text(encoding='utf-8')
    robot.write_text(text.replace('topic: arm_', 'topic: /arm_'), encoding='utf-8')
    node = '/shadow/vla_executor'
    beside = ('-r', '__ns:=/shadow', '-p', f'robot:={robot}')
    start(bench.graph, bundle, *beside, name='shadow')

    def refused() -> bool:
        # Until the first one is discovered nothing speaks against a second.
        if not bench.graph.transition(node, 'configure'):
            return True
        assert bench.graph.transition(node, 'cleanup')
        return False

    bench.graph.wait_for(refused, 'a refusal', meanwhile=bench.answer_new)
    assert bench.graph.set_parameter(node, 'dry_run', True).successful
    assert bench.graph.transition(node, 'configure')
    assert bench.graph.transition(node, 'activate')


def test_after_a_kill_the_next_one_is_not_locked_out(bundle: Path) -> None:
    with graph() as made:
        bench = Bench(made, bundle, '/killed')
        bench.begin()
        bench.start()
        bench.process.stop(signal.SIGKILL)
        assert made.node.count_publishers('/killed/committed_plan'), 'it stays in the graph'
        start(made, bundle, '-r', '__ns:=/killed', *AUTOSTART, name='next')
        bench.wait_for_status('that it is active', lambda s: s['reason'] == 'not_started')
        bench.arm.close()


def test_of_two_that_come_up_at_once_one_gives_way(bundle: Path) -> None:
    with graph() as made:
        said = made.collect(DiagnosticArray, '/diagnostics')
        remap = ('-r', '__ns:=/both', *AUTOSTART)
        both = [start(made, bundle, *remap, name=f'number {index}') for index in range(2)]

        def states() -> list[str]:
            """Newest of each process that runs."""
            found = {}
            for message in list(said):
                for item in message.status:
                    if item.name == '/both/vla_executor: node':
                        values = values_of(item)
                        found[values['process'].split()[1]] = values['lifecycle']
            return sorted(found.get(str(one.pid), '') if one.running else 'ended' for one in both)

        made.wait_for(
            lambda: states() in (['active', 'unconfigured'], ['active', 'ended']),
            'one that is active',
        )
