"""What a page asks of the nodes, where answers are lost as rmw_fastrtps loses them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import rclpy
from graph import Graph, graph
from rclpy.node import Node

from vla_runtime.nodes import service_call
from vla_tools.view import controls as controls_module
from vla_tools.view.controls import ACTIONS, ControlError, Controls

pytestmark = pytest.mark.graph


class Executor:
    """An executor's services; `loses` says which answers are lost."""

    def __init__(self, made: Graph) -> None:
        self.requests: list[str] = []
        self.loses: Callable[[str], bool] = lambda name: False
        for name, kind in ACTIONS.items():
            self._offer(made.node, name, kind)

    def _offer(self, node: Node, name: str, kind: Any) -> None:
        def heard(_: Any, response: Any) -> Any:
            self.requests.append(name)
            response.success, response.message = True, 'done'
            return response

        service = node.create_service(kind, f'vla_executor/{name}', heard)
        send = service.send_response
        # rclpy calls it with what the callback returns.
        service.send_response = lambda *sent: self.loses(name) or send(*sent)


@pytest.fixture(scope='module')
def made() -> Iterator[Graph]:
    with graph() as one:
        yield one


@pytest.fixture(scope='module')
def served(made: Graph) -> Executor:
    return Executor(made)


@pytest.fixture
def executor(served: Executor) -> Executor:
    served.requests.clear()
    return served


@pytest.fixture(scope='module')
def controls(made: Graph, served: Executor) -> Iterator[Controls]:
    rclpy.init()
    node = rclpy.create_node('_asks')
    asking = Controls(node)
    made.wait_for(lambda: {*ACTIONS} <= {*asking.offered()}, 'the services')
    yield asking
    asking.stop()
    node.destroy_node()
    rclpy.shutdown()


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a tenth of a second pass at each look at the clock."""
    looks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: 0.1 * next(looks))
    monkeypatch.setattr(service_call, 'time', clock)
    monkeypatch.setattr(controls_module, 'time', clock)


@pytest.mark.parametrize('name', ['stop', 'pause'])
def test_what_lets_a_robot_rest_is_asked_for_until_it_is_answered(
    name: str, executor: Executor, controls: Controls, fast: None
) -> None:
    executor.loses = lambda asked: executor.requests.count(asked) < 2
    assert asyncio.run(controls.act(name)) == 'done'
    assert executor.requests.count(name) >= 2


@pytest.mark.parametrize('name', [name for name in ACTIONS if name not in ('stop', 'pause')])
def test_anything_else_is_asked_for_once(
    name: str, executor: Executor, controls: Controls, fast: None
) -> None:
    executor.loses = lambda asked: asked == name
    with pytest.raises(ControlError, match='no answer'):
        asyncio.run(controls.act(name))
    # Whatever was sent again has come by the answer to a later request.
    assert asyncio.run(controls.act('stop')) == 'done'
    assert executor.requests.count(name) == 1


@pytest.mark.parametrize('name', ['start', 'resume', 'home'])
def test_a_stop_drops_what_would_move_the_robot_and_has_no_answer(
    name: str, executor: Executor, controls: Controls
) -> None:
    executor.loses = lambda asked: asked == name

    async def press() -> None:
        pending = asyncio.create_task(controls.act(name))
        while name not in executor.requests:
            await asyncio.sleep(0.005)
        assert await controls.act('stop') == 'done'
        with pytest.raises(ControlError, match=f'{name} was dropped'):
            await pending

    asyncio.run(press())
    assert executor.requests == [name, 'stop']


@pytest.mark.parametrize('value', [float('inf'), float('nan'), 10**30, -(10**30), 'many', [1]])
def test_a_number_that_no_parameter_holds_is_refused(value: Any, controls: Controls) -> None:
    with pytest.raises(ControlError, match=r'replan_interval: .* is no int'):
        asyncio.run(controls.set('replan_interval', value))
