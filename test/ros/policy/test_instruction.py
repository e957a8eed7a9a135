"""The instruction has one place: the newest counts, given as a parameter or on the topic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from graph import LATCHED, graph
from std_msgs.msg import String
from test_policy_node import NODE, TASK, Executor, start
from tiny_policy import tiny_spec, write_tiny_policy
from tiny_robot import write_robot

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


def test_an_instruction_given_at_start_is_in_force(files: tuple[Path, Path]) -> None:
    with graph() as made:
        arguments = ('-r', '__ns:=/alone', '-p', 'instruction:=wave')
        process = start(made, *files, *arguments)
        executor = Executor(made, '/alone')
        assert made.transition(f'/alone{NODE}', 'configure')
        assert made.transition(f'/alone{NODE}', 'activate')
        assert executor.chunk()[1]['instruction'] == 'wave'
        assert "instruction: 'wave'" in process.text()
