"""What a node has heard of the others, while more comes in."""

from __future__ import annotations

import pytest
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from graph import RELIABLE, graph

from vla_runtime.nodes.polled_topics import HeardStatus

pytestmark = pytest.mark.graph


def test_who_looks_goes_on_while_another_thread_takes_what_has_come() -> None:
    """On Humble a transition looks while the status timer takes."""
    with graph() as made:
        heard = HeardStatus(made.node)
        publisher = made.node.create_publisher(DiagnosticArray, '/diagnostics', RELIABLE)

        def take(name: str) -> bool:
            message = DiagnosticArray(status=[DiagnosticStatus(name=f'/{name}: node')])
            publisher.publish(message)
            heard.take()
            return heard.of(f'/{name}', 'node') is not None

        for name in ('one', 'two'):
            made.wait_for(lambda name=name: take(name), f'the status of {name}')
        looks = heard.items()
        seen = {next(looks).node}
        made.wait_for(lambda: take('three'), 'the status of three')
        assert seen | {one.node for one in looks} == {'/one', '/two'}
        heard.close()
