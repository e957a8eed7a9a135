"""A policy whose tokens are no chunk: both nodes as processes, and an arm that must not move."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticArray
from executor_bench import HOME
from graph import RELIABLE, graph
from test_open_requests_graph import POLICY, Scene, write_token_policy

pytestmark = pytest.mark.graph


def test_an_answer_that_is_no_chunk_never_moves_the_robot(tmp_path: Path) -> None:
    """A policy that is to write `Action:` first and was not trained to: each answer is refused."""
    bundle = write_token_policy(tmp_path / 'tabletop', 0.05, checks_prefix=True)
    with graph() as made:
        reasons: list[str] = []

        def on_diagnostics(message: DiagnosticArray) -> None:
            reasons.extend(one.message for one in message.status if one.name.startswith(POLICY))

        made.node.create_subscription(DiagnosticArray, '/diagnostics', on_diagnostics, RELIABLE)
        scene = Scene(made, bundle, 'pipeline:=packed')
        made.wait_for(lambda: int(scene.status.get('requests', 0)) >= 3, 'requests')
        made.wait_for(
            lambda: any('the chunk is refused' in reason for reason in reasons), 'the reason'
        )
        made.wait_for(lambda: len(scene.arm.commands) >= 20, 'commands')
        assert not scene.headers() and int(scene.status['accepted']) == 0
        commanded = np.array([one.points[-1].positions for one in list(scene.arm.commands)])
        np.testing.assert_allclose(commanded, np.tile(HOME[:5], (len(commanded), 1)), atol=1e-6)
        scene.close()
