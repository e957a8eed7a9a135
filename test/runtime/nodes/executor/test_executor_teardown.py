"""The executor node's transitions when a step of them fails: nothing of it lives on unseen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import rclpy
from tabletop_policy import write_tabletop_policy

from vla_runtime.nodes.executor.node import ExecutorNode

pytestmark = pytest.mark.graph

THREADS = {'control', 'dead man', 'requests'}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ExecutorNode]:
    """Configured, in this process, where a step can be made to fail."""
    bundle = write_tabletop_policy(tmp_path / 'tabletop')
    rclpy.init(args=['--ros-args', '-p', f'bundle:={bundle}', '-p', 'robot:=tabletop'])
    try:
        made = ExecutorNode()
        made.trigger_configure()
        yield made
        made.destroy_node()
    finally:
        rclpy.shutdown()


def state(node: ExecutorNode) -> str:
    return str(node._state_machine.current_state[1])


def own_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()} & THREADS


def fail(*_: object) -> None:
    raise RuntimeError('out of order')


@pytest.mark.parametrize('step', ['listen', 'writers'])
def test_an_activation_that_fails_half_way_leaves_no_thread(
    node: ExecutorNode, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(node._link, step, fail)
    node.trigger_activate()
    assert state(node) == 'inactive'
    assert not own_threads()
    monkeypatch.undo()
    node.trigger_activate()
    assert (state(node), own_threads()) == ('active', THREADS)
    node.trigger_deactivate()
    assert (state(node), own_threads()) == ('inactive', set())


def test_a_deactivation_that_fails_still_ends_the_commands_and_is_said(
    node: ExecutorNode, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    node.trigger_activate()
    monkeypatch.setattr(node, 'destroy_subscription', fail)
    node.trigger_deactivate()
    # An error leads back to where the node can be configured again.
    assert state(node) == 'unconfigured'
    assert not own_threads()
    assert 'deactivate failed: out of order' in capfd.readouterr().err
    node.trigger_configure()
    assert state(node) == 'inactive'


def test_a_cleanup_that_fails_is_said_and_the_node_can_be_configured_again(
    node: ExecutorNode, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node._link, 'close', fail)
    node.trigger_cleanup()
    assert state(node) == 'unconfigured'
    assert 'cleanup failed: out of order' in capfd.readouterr().err
    node.trigger_configure()
    assert state(node) == 'inactive'
