"""An executor node in this process, where any step of it can be made to hang or fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import rclpy
from executor_bench import HOME
from rclpy.parameter import Parameter
from std_srvs.srv import Trigger

from vla_runtime.nodes import restart
from vla_runtime.nodes.executor.node import ExecutorNode
from vla_tabletop.sim.world import JOINT_NAMES

pytestmark = pytest.mark.graph

TIMEOUT_S = 30.0


@pytest.fixture(scope='module')
def made(bundle: Path) -> Iterator[ExecutorNode]:
    # A lifecycle node of this process stays in the graph after its end, for good where two have one
    # name: in a namespace it is in no other test's way.
    words = ('-r', '__ns:=/in_process', '-p', f'bundle:={bundle}', '-p', 'robot:=tabletop')
    rclpy.init(args=['--ros-args', *words])
    try:
        made = ExecutorNode()
        yield made
        if state(made) == 'active':
            made.trigger_deactivate()
        made.destroy_node()
    finally:
        rclpy.shutdown()


@pytest.fixture
def node(made: ExecutorNode) -> ExecutorNode:
    """Active, and never spun: none of its callbacks is ever served."""
    if state(made) == 'active':
        made.trigger_deactivate()
    if state(made) == 'unconfigured':
        made.trigger_configure()
    made._latch.cause = ''
    made.set_parameters([Parameter('dry_run', value=False), Parameter('replan_interval', value=8)])
    made.trigger_activate()
    assert made._loop is not None
    return made


def state(node: ExecutorNode) -> str:
    return str(node._state_machine.current_state[1])


def seen(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, then: Callable[..., object]
) -> threading.Event:
    """Replace a method by `then`, and return an event that its call sets."""
    called = threading.Event()

    def call(*args: object) -> object:
        called.set()
        return then(*args)

    monkeypatch.setattr(owner, name, call)
    return called


def fail(*_: object) -> None:
    raise RuntimeError('out of order')


# ---------------------------------------------------------------- starting again in its place


def test_the_latch_is_as_the_process_before_left_it(
    node: ExecutorNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node._latch.cause = "position of 'elbow'"
    handed_over = json.dumps(asdict(restart.state_of(node)))
    monkeypatch.setenv(restart._VARIABLE, handed_over)
    after = ExecutorNode()
    try:
        assert after._latch.cause == node._latch.cause
    finally:
        after.destroy_node()


# ---------------------------------------------------------------- the dead-man


def test_the_dead_man_looks_though_no_callback_is_served(
    node: ExecutorNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = node._loop._executor
    looked = seen(monkeypatch, core, 'dead_man', core.dead_man)
    assert looked.wait(TIMEOUT_S)


def test_when_the_control_thread_hangs_the_dead_man_finds_the_gap_and_holds(
    node: ExecutorNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, release, found = node._loop, threading.Event(), threading.Event()
    dead_man = loop._executor.dead_man

    def look(now_s: float) -> object:
        command = dead_man(now_s)
        if command is not None:
            found.set()
        return command

    def hang() -> int:
        # Before the first tick there is no gap to find.
        if loop._executor.counters.ticks > 1:
            assert release.wait(TIMEOUT_S)
        return node._now_ns()

    monkeypatch.setattr(loop._executor, 'dead_man', look)
    # The control thread reads the clock before it takes the lock.
    monkeypatch.setattr(loop, '_ros_now_ns', hang)
    try:
        assert found.wait(TIMEOUT_S)
    finally:
        release.set()


# ---------------------------------------------------------------- the latch


def test_only_reset_opens_the_latch_whatever_transitions_come_between(node: ExecutorNode) -> None:
    node._latch.cause = "position of 'elbow'"
    for transition in ('deactivate', 'activate', 'deactivate', 'cleanup', 'configure', 'activate'):
        getattr(node, f'trigger_{transition}')()
    why = node._loop.status().executor.clamp_latched
    assert f'ros2 service call {node.get_fully_qualified_name()}/reset ' in why
    node._on_reset(None, Trigger.Response())
    assert not node._loop.status().executor.clamp_latched


def test_reset_opens_the_latch_of_an_inactive_node_too(node: ExecutorNode) -> None:
    node._latch.cause = "position of 'elbow'"
    node.trigger_deactivate()
    node._on_reset(None, Trigger.Response())
    node.trigger_activate()
    assert not node._loop.status().executor.clamp_latched


# ---------------------------------------------------------------- units


def test_a_state_in_another_unit_is_a_reason_not_to_command(
    node: ExecutorNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = dict(zip(JOINT_NAMES, HOME.tolist(), strict=True))
    monkeypatch.setattr(node._loop, 'measured', lambda: home)
    assert node._why_not_units() == ''
    degrees = {name: position * 57.3 for name, position in home.items()}
    monkeypatch.setattr(node._loop, 'measured', lambda: degrees)
    assert 'unit: rad' in node._why_not_units()
    # Nothing is known of a robot that is not measured.
    monkeypatch.undo()
    assert node._loop.measured() == {} and node._why_not_units() == ''


# ---------------------------------------------------------------- parameters that are not taken up


@pytest.mark.parametrize('broken', ['set_dry_run', 'set_parameters'])
def test_a_parameter_that_cannot_be_taken_up_is_said_once_and_stops_nothing_else(
    node: ExecutorNode,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    broken: str,
) -> None:
    loop, calls = node._loop, []
    for name in ('set_dry_run', 'set_parameters'):
        real = getattr(loop, name)

        def call(value: object, name: str = name, real: Callable[..., object] = real) -> object:
            calls.append(name)
            return fail() if name == broken else real(value)

        monkeypatch.setattr(loop, name, call)
    node.set_parameters([Parameter('dry_run', value=True), Parameter('replan_interval', value=3)])
    for _ in range(3):
        node._publish_status()
    assert calls == ['set_dry_run', 'set_parameters']
    assert capfd.readouterr().err.count('out of order') == 1
    status = loop.status().executor
    assert status.dry_run is (broken != 'set_dry_run')
    assert status.parameters.replan_interval == (8 if broken == 'set_parameters' else 3)


# ---------------------------------------------------------------- a dry run that is set just now


def test_when_a_dry_run_is_set_expect_it_in_force_before_anything_else_is_served(
    node: ExecutorNode,
) -> None:
    node.set_parameters([Parameter('dry_run', value=True)])
    assert node._loop.status().executor.dry_run
    node.set_parameters([Parameter('dry_run', value=False)])
    assert not node._loop.status().executor.dry_run


def test_when_a_start_follows_the_dry_run_without_a_hook_expect_the_start_to_take_it_up(
    node: ExecutorNode,
) -> None:
    # As before ROS 2 Iron.
    node.remove_post_set_parameters_callback(node._follow_parameters)
    node.set_parameters([Parameter('dry_run', value=True)])
    assert not node._loop.status().executor.dry_run
    node._on_start(None, Trigger.Response())
    assert node._loop.status().executor.dry_run
    node.add_post_set_parameters_callback(node._follow_parameters)


# ---------------------------------------------------------------- transitions that fail half way


THREADS = {'control', 'dead man', 'requests'}


def own_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()} & THREADS


@pytest.mark.parametrize('step', ['listen', 'writers'])
def test_an_activation_that_fails_half_way_leaves_no_thread(
    node: ExecutorNode, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    node.trigger_deactivate()
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
    node.trigger_deactivate()
    monkeypatch.setattr(node._link, 'close', fail)
    node.trigger_cleanup()
    assert state(node) == 'unconfigured'
    assert 'cleanup failed: out of order' in capfd.readouterr().err
    node.trigger_configure()
    assert state(node) == 'inactive'
