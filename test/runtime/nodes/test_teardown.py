"""Bounds of a node's teardown: outputs, callbacks and threads that hang; and its log."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from graph import graph
from paths import ROOT
from rclpy.logging import get_logger

from vla_runtime.nodes.node_main import MODULES
from vla_runtime.nodes.node_runner import RosLogHandler
from vla_runtime.processes.parent_death import dies_with_this_process

pytestmark = pytest.mark.graph

TIMEOUT_S = 60.0
# Time without a sign of life after which Fast DDS takes a participant for dead.
LEASE_S = 20.0
BEGIN = """
import ctypes, sys, threading, time
from rclpy.lifecycle import LifecycleNode, TransitionCallbackReturn
from std_msgs.msg import String
from vla_runtime.nodes import node_runner

def hold_the_interpreter():
    ctypes.PyDLL(None).sleep(1000)

class Node(LifecycleNode):
    def __init__(self):
        super().__init__('hanging')
        self.trigger_configure()
        self.trigger_activate()
        print('ready', flush=True)

    def on_configure(self, state):
        return TransitionCallbackReturn.SUCCESS

    def on_deactivate(self, state):
        print('holding', flush=True)
        return super().on_deactivate(state)
"""


@contextmanager
def node(methods: str, make: str = 'Node', bound: str = '') -> Iterator[subprocess.Popen[str]]:
    """A node with these methods, spinning in a process of its own."""
    script = f'{BEGIN}{methods}\n{bound}\nsys.exit(node_runner.run_node({make}, "hanging"))\n'
    process = subprocess.Popen(
        [sys.executable, '-c', script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=dies_with_this_process(),
    )
    try:
        assert process.stdout is not None
        # Fast DDS may say something before, such as that a dead process has left a port behind.
        said = iter(process.stdout.readline, '')
        assert 'ready\n' in said, process.communicate()[1]
        yield process
    finally:
        process.kill()
        process.wait()


def interrupt(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Ctrl-C: exit code, stdout and stderr."""
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, out, err


def test_a_node_without_trouble_ends_with_code_0_and_not_a_word_of_error() -> None:
    with node('') as process:
        code, out, err = interrupt(process)
    assert (code, out) == (0, 'holding\n')
    assert 'hangs' not in err and 'Traceback' not in err


def test_a_node_that_has_ended_is_gone_from_the_graph() -> None:
    """Not only when Fast DDS takes it for dead: a launch that follows would call its services."""
    with graph() as others, node('') as process:
        others.wait_for(lambda: 'hanging' in others.node.get_node_names(), 'the node')
        interrupt(process)
        others.wait_for(
            lambda: 'hanging' not in others.node.get_node_names(),
            'its end',
            timeout_s=LEASE_S / 2,
        )


def test_a_callback_that_hangs_keeps_nothing_from_the_hold() -> None:
    methods = """
    def destroy_node(self):
        raise AssertionError('the callback still uses it')

    def hang(self):
        print('in the callback', flush=True)
        time.sleep(1000)

def make():
    node = Node()
    node.create_timer(0.01, node.hang)
    return node
"""
    with node(methods, make='make') as process:
        assert process.stdout is not None
        assert process.stdout.readline() == 'in the callback\n'
        code, out, err = interrupt(process)
    assert (code, out) == (0, 'holding\n'), err


@pytest.mark.parametrize(
    ('hang', 'said'),
    [('time.sleep(1000)', 'hanging: the teardown hangs'), ('hold_the_interpreter()', 'Timeout')],
)
def test_a_teardown_that_hangs_ends_with_code_1_and_says_so(hang: str, said: str) -> None:
    methods = f"""
    def on_cleanup(self, state):
        {hang}
"""
    with node(methods, bound='node_runner._TEARDOWN_S = 5.0') as process:
        code, out, err = interrupt(process)
    assert (code, out) == (1, 'holding\n')
    assert said in err


def test_a_transition_that_fails_is_an_exit_code_of_1() -> None:
    methods = """
    def on_cleanup(self, state):
        return TransitionCallbackReturn.ERROR

    def on_error(self, state):
        return TransitionCallbackReturn.SUCCESS
"""
    with node(methods) as process:
        code, out, _ = interrupt(process)
    assert (code, out) == (1, 'holding\n')


def test_a_thread_that_goes_on_does_not_outlive_the_teardown() -> None:
    methods = """
    def on_cleanup(self, state):
        threading.Thread(target=time.sleep, args=(1000,)).start()
        return TransitionCallbackReturn.SUCCESS
"""
    with node(methods) as process:
        code, out, _ = interrupt(process)
    assert (code, out) == (0, 'holding\n')


@pytest.mark.thorough
def test_what_python_does_at_its_end_does_not_make_a_clean_end_a_failure() -> None:
    # Freeing PyTorch takes seconds, and many on a busy machine.
    methods = """
    def on_cleanup(self, state):
        import atexit
        atexit.register(time.sleep, 1000)
        return TransitionCallbackReturn.SUCCESS
"""
    with node(methods) as process:
        code, out, _ = interrupt(process)
    assert (code, out) == (0, 'holding\n')


@pytest.mark.parametrize(
    ('name', 'how'),
    [('policy_node', 'executable'), ('executor_node', 'executable'), ('tabletop_node', 'module')],
)
def test_ctrl_c_while_it_imports_ends_it_without_a_traceback(name: str, how: str) -> None:
    # Whoever imports rclpy is told, and waits: the signal comes in the middle of it.
    watch = (
        'import sys\n'
        'class Watch:\n'
        '    def find_spec(self, name, *_):\n'
        '        if name == "rclpy":\n'
        '            import time\n'
        '            print("importing", flush=True)\n'
        '            time.sleep(1000)\n'
        'sys.meta_path.insert(0, Watch())\n'
    )
    run = {
        'executable': f'from vla_runtime.nodes.node_main import {name}; sys.exit({name}())',
        'module': f'import runpy; runpy.run_module("{MODULES[name]}", None, "__main__")',
    }[how]
    process = subprocess.Popen(
        [sys.executable, '-c', f'{watch}{run}'],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=dies_with_this_process(),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == 'importing\n', process.communicate()[1]
        assert interrupt(process) == (0, '', '')
    finally:
        process.kill()
        process.wait()


def test_the_executables_are_those_that_take_signals_first() -> None:
    text = (Path(sys.executable).parent / 'executor_node').read_text(encoding='utf-8')
    assert 'node_main' in text


def test_warnings_and_errors_reach_the_ros_log(capfd: pytest.CaptureFixture[str]) -> None:
    source = logging.Logger('engine')
    source.addHandler(RosLogHandler(get_logger('a_node')))
    for name in ('info', 'warning', 'error', 'warning'):
        getattr(source, name)('%s of an engine', name)
    lines = [line for line in capfd.readouterr().err.splitlines() if '[a_node]' in line]
    assert [line.split()[0] for line in lines] == ['[WARN]', '[ERROR]', '[WARN]']
    assert all('of an engine' in line for line in lines)
