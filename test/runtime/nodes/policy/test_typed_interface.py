"""The policy node's typed state and services on a real graph."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from graph import Graph, graph
from test_policy_node import NODE, TASK, start
from tiny_policy import JOINTS, tiny_spec, write_tiny_policy
from tiny_robot import Drivers, write_robot

from vla_runtime.messages.trajectories import chunk_type, message_to_chunk, typed_messages
from vla_runtime.nodes.policy import typed_interface

pytestmark = [
    pytest.mark.graph,
    pytest.mark.skipif(
        typed_messages() is None,
        reason='vla_interfaces is not built: no C++ compiler, or not set up by ./run',
    ),
]


class Running:
    """A policy node, its drivers, and what it publishes.

    `states` and `chunks` fill with its messages.
    """

    def __init__(self, made: Graph) -> None:
        self.graph, self.drivers = made, Drivers(made)
        self.states = made.collect(typed_messages().PolicyState, f'{NODE}/state')
        self.chunks = made.collect(chunk_type(), '/action_chunk')
        # The drivers go on while a service is waited for.
        self._timer = made.node.create_timer(0.05, self.drivers)

    def set_instruction(self, text: str) -> Any:
        from vla_interfaces.srv import SetInstruction

        request = SetInstruction.Request(instruction=text)
        return self.graph.call(SetInstruction, f'{NODE}/set_instruction', request)

    def get_chunk(self, instruction: str = '', timeout_s: int = 0) -> Any:
        from vla_interfaces.srv import GetActionChunk

        request = GetActionChunk.Request(instruction=instruction)
        request.timeout.sec = timeout_s
        return self.graph.call(GetActionChunk, f'{NODE}/get_action_chunk', request)

    def wait_for_state(self, what: str, holds: Any) -> Any:
        self.states.clear()
        return self.graph.wait_for(lambda: next(filter(holds, list(self.states)), None), what)

    def wait_for_chunk(self) -> Any:
        """A chunk of `~/get_action_chunk`, once the node has frames and no executor is answered."""
        return self.graph.wait_for(
            lambda: answer if (answer := self.get_chunk(TASK)).success else None, 'a chunk'
        )


def call(instruction: str = '', timeout_s: int = 0) -> SimpleNamespace:
    """A request of `~/get_action_chunk`, without ROS."""
    timeout = SimpleNamespace(sec=timeout_s, nanosec=0)
    return SimpleNamespace(instruction=instruction, timeout=timeout)


@pytest.fixture(scope='module')
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp('typed')
    bundle = write_tiny_policy(folder / 'tiny', tiny_spec(advantage='task_newline'))
    robot = write_robot(folder / 'tiny.yaml')
    with graph() as made:
        running = Running(made)
        start(made, bundle, robot, '-p', 'autostart:=true')
        running.wait_for_state('an active node', lambda state: state.lifecycle == 'active')
        yield running


def test_an_instruction_is_in_force_once_the_service_has_answered(running: Running) -> None:
    before = running.set_instruction('first').previous
    assert before != 'first'
    answer = running.set_instruction('second')
    # The call may have been carried out twice.
    assert answer.success and answer.previous in ('first', 'second')
    running.wait_for_state('the new one', lambda state: state.instruction == 'second')


def test_a_chunk_is_for_its_caller_alone(running: Running) -> None:
    answer = running.wait_for_chunk()
    chunk, header = message_to_chunk(answer.chunk)
    assert chunk.names == JOINTS and np.isfinite(chunk.actions).all()
    assert not header.tied and header.request is None
    # The sentinel: a chunk for an executor comes on the topic, and it is a later one.
    running.drivers.request(episode=header.episode)
    running.graph.wait_for(lambda: running.chunks, 'a chunk on the topic')
    assert message_to_chunk(running.chunks[0])[1].number > header.number


def test_an_executor_that_is_being_answered_keeps_others_out(running: Running) -> None:
    running.drivers.request()
    answer = running.get_chunk(TASK)
    assert not answer.success and '~/stop' in answer.message


def test_an_executor_keeps_others_out_while_its_chunk_lasts_and_its_task_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, active, said = 1000.0, False, []
    monkeypatch.setattr(typed_interface, 'typed_messages', lambda: None)
    monkeypatch.setattr(typed_interface, 'time', SimpleNamespace(monotonic=lambda: now_s))
    typed = typed_interface.TypedInterface(
        None,  # type: ignore[arg-type]
        SimpleNamespace(set=lambda text: said.append(text) or ''),  # type: ignore[arg-type]
        lambda where, error: None,
        request_chunk=lambda: None,
        missing=list,
        active=lambda: active,
    )

    def message() -> str:
        response = SimpleNamespace(message='')
        assert typed._on_get_chunk(call(TASK), response)()
        return response.message

    assert 'not active' in message() and not said
    active = True
    typed.note_request()
    chunk = SimpleNamespace(actions=np.zeros((100, 1)), step_time_s=0.5)
    answer = SimpleNamespace(request=SimpleNamespace(request=7, stamp_ns=0), chunk=chunk)
    assert not typed.takes(answer)  # type: ignore[arg-type]
    now_s += 50.0
    assert '~/stop' in message() and 'in 2 s' in message() and not said
    now_s += 2.5
    assert '~/stop' not in message() and said == [TASK]


def test_a_chunk_that_comes_after_its_call_was_given_up_is_no_executors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 1000.0
    asked = SimpleNamespace(request=None, stamp_ns=5)
    monkeypatch.setattr(typed_interface, 'typed_messages', lambda: None)
    monkeypatch.setattr(typed_interface, 'time', SimpleNamespace(monotonic=lambda: now_s))
    typed = typed_interface.TypedInterface(
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        lambda where, error: None,
        request_chunk=lambda: asked,  # type: ignore[arg-type, return-value]
        missing=list,
        active=lambda: True,
    )
    response = SimpleNamespace(message='', success=False)
    complete = typed._on_get_chunk(call(timeout_s=1), response)
    assert not complete()
    now_s += 1.5
    assert complete() and response.message and not response.success
    chunk = SimpleNamespace(actions=np.zeros((100, 1)), step_time_s=0.5)
    assert typed.takes(SimpleNamespace(request=asked, chunk=chunk))  # type: ignore[arg-type]
    # Another request of the same moment has a number, and is an executor's.
    numbered = SimpleNamespace(request=7, stamp_ns=5)
    assert not typed.takes(SimpleNamespace(request=numbered, chunk=chunk))  # type: ignore[arg-type]


def test_a_fault_that_comes_at_once_is_the_calls_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the call has come back from handing its request over."""
    asked = SimpleNamespace(request=None, stamp_ns=5)
    faults: list[threading.Thread] = []

    def request_chunk() -> Any:
        error = ValueError('the state is NaN')
        faults.append(threading.Thread(target=typed.take_error, args=(asked, error)))
        faults[0].start()
        faults[0].join(0.1)
        return asked

    monkeypatch.setattr(typed_interface, 'typed_messages', lambda: None)
    typed = typed_interface.TypedInterface(
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        lambda where, error: None,
        request_chunk=request_chunk,
        missing=list,
        active=lambda: True,
    )
    response = SimpleNamespace(message='', success=False)
    complete = typed._on_get_chunk(call(timeout_s=100), response)
    faults[0].join()
    assert complete() and response.message == 'the state is NaN'


def test_why_there_is_no_chunk_is_the_answer_after_the_time_out(running: Running) -> None:
    running.wait_for_chunk()
    running.drivers.silent.add('top')
    running.wait_for_state('the missing camera', lambda state: state.missing)
    answer = running.get_chunk(TASK, timeout_s=1)
    running.drivers.heal()
    assert not answer.success and "camera 'top'" in answer.message
    running.wait_for_chunk()


def test_the_state_tells_what_runs_and_how_old_its_inputs_are(running: Running) -> None:
    running.wait_for_chunk()
    state = running.wait_for_state(
        'a state with a chunk', lambda state: state.chunk >= 0 and not state.missing
    )
    assert (state.policy, state.backend, state.device) == ('tiny pi05', 'torch', 'cpu')
    assert 0.0 < state.inference_s <= state.answer_s
    assert {one.name for one in state.inputs} == {'top', 'wrist'}
    assert all(0.0 <= one.age_s < 60.0 for one in state.inputs)
