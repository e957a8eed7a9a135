"""A service that answers later keeps nothing else waiting, and loses no answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from graph import Graph, graph
from rclpy.node import Node
from std_srvs.srv import Trigger

from vla_runtime.nodes.later_service import LaterService
from vla_runtime.nodes.node_runner import make_executor

pytestmark = pytest.mark.graph


class Server:
    """A node under the executor that every node of the package runs with."""

    def __init__(self, made: Graph) -> None:
        self.done, self.errors = False, []
        self._node = Node('server', context=made.node.context)
        self._later = LaterService(
            self._node, Trigger, '~/later', self._begin, lambda *said: self.errors.append(said)
        )
        self._node.create_service(Trigger, '~/at_once', self._at_once)
        self._node.create_timer(0.01, lambda: self._later.look())
        self._executor = make_executor()
        self._executor.add_node(self._node)
        self._ended = False
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()

    def _spin(self) -> None:
        while not self._ended:
            self._executor.spin_once(timeout_sec=0.05)

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        self._executor.shutdown()
        self._node.destroy_node()

    def _at_once(self, _, response):
        response.message = 'at once'
        return response

    def _begin(self, _, response):
        response.message = 'begun'

        def complete() -> bool:
            if self.done == 'fails':
                raise OSError('no rest')
            response.success = bool(self.done)
            return response.success

        return complete


@pytest.fixture
def made() -> Iterator[Graph]:
    import rclpy

    with graph() as one:
        rclpy.init()
        try:
            yield one
        finally:
            rclpy.shutdown()


@pytest.fixture
def server(made: Graph) -> Iterator[Server]:
    one = Server(made)
    yield one
    one.close()


def asked(made: Graph, count: int):
    client = made.node.create_client(Trigger, '/server/later')
    made.wait_for(client.service_is_ready, 'the service')
    return [client.call_async(Trigger.Request()) for _ in range(count)]


def test_others_are_answered_while_one_waits_and_every_caller_gets_its_answer(made, server):
    waiting = asked(made, 3)
    for _ in range(3):
        assert made.call(Trigger, '/server/at_once', Trigger.Request()).message == 'at once'
    assert not any(one.done() for one in waiting)
    server.done = True
    made.wait_for(lambda: all(one.done() for one in waiting), 'the answers')
    assert all(one.result().success for one in waiting)
    assert not server.errors


def test_an_answer_that_cannot_be_completed_is_sent_as_it_is(made, server):
    server.done = 'fails'
    (waiting,) = asked(made, 1)
    made.wait_for(waiting.done, 'the answer')
    assert waiting.result().message == 'begun' and not waiting.result().success
    assert server.errors
