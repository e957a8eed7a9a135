"""The instruction has one place: the newest counts, given as a parameter or on the topic."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from graph import LATCHED, Graph, Process, graph
from std_msgs.msg import String
from test_policy_node import TASK, Executor, start
from tiny_policy import tiny_spec, write_tiny_policy
from tiny_robot import write_robot

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.nodes.policy.instruction import FILE_VARIABLE

pytestmark = pytest.mark.graph


@pytest.fixture(scope='module')
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp('policy')
    bundle = write_tiny_policy(folder / 'tiny', tiny_spec(advantage='task_newline'))
    return bundle, write_robot(folder / 'tiny.yaml')


@pytest.fixture(scope='module')
def executor(files: tuple[Path, Path]) -> Iterator[Executor]:
    with graph() as made:
        start(made, *files)
        made_executor = Executor(made)
        made_executor.prepare()
        yield made_executor


def give(executor: Executor, text: str) -> None:
    assert executor.graph.set_parameter(executor.node, 'instruction', text).successful


def wait_for_topic(executor: Executor, text: str) -> None:
    """Publish it, and wait until the node has it."""
    told = executor.graph.collect(String, f'{executor.node}/current_instruction', LATCHED)
    executor.drivers.instruct(text)
    executor.graph.wait_for(lambda: told and told[-1].data == text, f"'{text}' to be told")


def test_the_newest_instruction_counts_however_it_was_given(executor: Executor) -> None:
    assert executor.chunk()[1]['instruction'] == TASK
    give(executor, 'open the drawer')
    assert executor.chunk()[1]['instruction'] == 'open the drawer'
    wait_for_topic(executor, 'close the drawer')
    assert executor.chunk()[1]['instruction'] == 'close the drawer'
    give(executor, TASK)
    _, report = executor.chunk()
    assert report['instruction'] == report['parameter.instruction'] == TASK


def test_an_empty_instruction_by_parameter_ends_inference_too(executor: Executor) -> None:
    give(executor, '')
    status = executor.wait_for_status('observation', 'no instruction', 'a status about it')
    assert 'set parameter instruction' in status.message
    give(executor, TASK)
    executor.chunk()


def test_who_judges_by_the_instruction_is_told_of_a_parameter_and_of_a_repeated_message(
    executor: Executor,
) -> None:
    made = executor.graph
    told = made.collect(String, f'{executor.node}/current_instruction', LATCHED)
    give(executor, 'wave')
    made.wait_for(lambda: told and told[-1].data == 'wave', 'the parameter')
    for message in ('the first', 'the second'):
        count = len(told)
        executor.drivers.instruct('wave')
        made.wait_for(lambda count=count: len(told) > count, f'{message} message')
    # Late, and told all the same.
    late = made.collect(String, f'{executor.node}/current_instruction', LATCHED)
    made.wait_for(lambda: late, 'the latched one')
    assert late[0].data == 'wave'


def test_an_old_latched_message_does_not_undo_a_newer_parameter_on_activation(
    executor: Executor,
) -> None:
    made, node = executor.graph, executor.node
    wait_for_topic(executor, 'from the topic')
    give(executor, 'from the parameter')
    assert made.transition(node, 'deactivate')
    assert made.transition(node, 'activate')
    # The publisher of the older one is there still, and has it latched.
    assert executor.chunk()[1]['instruction'] == 'from the parameter'


def test_a_message_that_came_before_activation_counts(executor: Executor) -> None:
    made, node = executor.graph, executor.node
    assert made.transition(node, 'deactivate')
    wait_for_topic(executor, 'before activation')
    assert made.transition(node, 'activate')
    assert executor.chunk()[1]['instruction'] == 'before activation'


@pytest.fixture
def respawned(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Respawned]:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / 'instruction.json'))
    with graph() as made:
        yield Respawned(made, files)


class Respawned:
    """A policy node that is started anew with the same arguments when it dies, as launch does."""

    def __init__(self, made: Graph, files: tuple[Path, Path]) -> None:
        self._files = files
        self.executor = Executor(made, '/respawned')
        self.process = self._start()

    def die(self) -> None:
        """Let it be killed, and start another one in its place."""
        self.process.stop(signal.SIGKILL)
        self.process = self._start()

    def instruction(self) -> str:
        """Ask until a chunk comes, because a reader that died is seen as a listener for a while."""

        def ask() -> None:
            executor.drivers()
            executor.drivers.request(without_subscribers=True)

        executor = self.executor
        self.wait_for_log(': loading')
        executor.reports.clear()
        executor.graph.wait_for(lambda: executor.reports, 'a chunk', meanwhile=ask)
        return values_of(executor.reports[-1].status[0])['instruction']

    def wait_for_log(self, words: str) -> None:
        self.executor.graph.wait_for(lambda: words in self.process.text(), f"'{words}' in the log")

    def _start(self) -> Process:
        arguments = ('-r', '__ns:=/respawned', '-p', 'instruction:=touch', '-p', 'autostart:=true')
        return start(self.executor.graph, *self._files, *arguments)


def test_a_respawned_node_goes_on_with_the_newest_instruction(respawned: Respawned) -> None:
    executor = respawned.executor
    assert respawned.instruction() == 'touch'
    give(executor, 'push')
    respawned.die()
    assert respawned.instruction() == 'push'
    respawned.wait_for_log("instruction: 'push', as before this node was respawned, not 'touch'")
    wait_for_topic(executor, 'lift')
    respawned.die()
    assert respawned.instruction() == 'lift'


@pytest.mark.thorough
def test_a_respawned_node_does_not_take_a_superseded_message_again(respawned: Respawned) -> None:
    executor = respawned.executor
    wait_for_topic(executor, 'push')
    give(executor, 'lift')
    respawned.die()
    # The publisher of the older one is there still, and has it latched.
    respawned.wait_for_log("instruction: 'push' is not taken")
    assert respawned.instruction() == 'lift'
