"""A call whose first answer is lost, as rmw_fastrtps loses it, is answered all the same."""

from contextlib import closing

import pytest
from graph import Graph
from lifecycle_msgs.msg import State
from lifecycle_msgs.srv import ChangeState, GetState
from rcl_interfaces.srv import GetParameters, ListParameters

from vla_tabletop.demo.operator import Operator, TransitionError


class Server:
    """Services of a lifecycle node, each of which loses its first answer."""

    def __init__(self, graph: Graph, *, changes: bool = True, deaf: int = 0) -> None:
        self.requests: list[str] = []
        # Requests for a transition that it will not hear.
        self._deaf = deaf
        self.state = 'unconfigured'
        self._changes = changes
        for name, kind, answer in (
            ('list_parameters', ListParameters, lambda _, response: response),
            ('get_parameters', GetParameters, lambda _, response: response),
            ('change_state', ChangeState, self._change),
            ('get_state', GetState, self._get_state),
        ):
            self._offer(graph, name, kind, answer)

    def _offer(self, graph: Graph, name: str, kind, answer) -> None:
        def heard(request, response):
            self.requests.append(name)
            return answer(request, response)

        service = graph.node.create_service(kind, f'arm/{name}', heard)
        send = service.send_response
        # rclpy calls it with what the callback returns.
        service.send_response = lambda *sent: self.requests.count(name) > 1 and send(*sent)

    def _change(self, _, response):
        if self._deaf:
            self._deaf -= 1
            return response
        self.state = 'inactive' if self._changes else self.state
        response.success = self._changes
        return response

    def _get_state(self, _, response):
        response.current_state = State(label=self.state)
        return response


@pytest.fixture
def graph():
    with closing(Graph()) as graph:
        yield graph


def test_a_request_is_sent_again_until_an_answer_comes(graph):
    server = Server(graph)
    assert Operator(graph.node, lambda: None).parameters('arm') == {}
    assert server.requests == ['list_parameters'] * 2 + ['get_parameters'] * 2


def test_a_transition_is_asked_for_once_and_known_by_the_state_it_led_to(graph):
    server = Server(graph)
    Operator(graph.node, lambda: None).configure('arm')
    assert server.requests == ['change_state', 'get_state', 'get_state']


def test_a_transition_whose_request_was_lost_is_asked_for_again(graph):
    server = Server(graph, deaf=1)
    Operator(graph.node, lambda: None).configure('arm')
    assert server.requests == ['change_state', 'get_state', 'get_state', 'change_state']


def test_a_refused_transition_is_an_error(graph):
    server = Server(graph, changes=False)
    server.requests.append('change_state')  # So that its only answer arrives.
    with pytest.raises(TransitionError):
        Operator(graph.node, lambda: None).configure('arm')
