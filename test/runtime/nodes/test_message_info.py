"""Callbacks that are told what the middleware knows of a message, under every executor of rclpy."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import rclpy
from graph import RELIABLE, TIMEOUT_S
from rclpy.executors import Executor, MultiThreadedExecutor, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.serialization import deserialize_message
from std_msgs.msg import String

from vla_runtime.nodes.node_runner import make_executor
from vla_runtime.nodes.qos import with_info

pytestmark = pytest.mark.graph


@pytest.fixture
def node() -> Iterator[Node]:
    context = rclpy.Context()
    rclpy.init(context=context)
    made = Node('informed', context=context)
    yield made
    made.destroy_node()
    rclpy.shutdown(context=context)


def executor(kind: str, node: Node) -> Executor:
    if kind == 'events':
        events = pytest.importorskip('rclpy.experimental.events_executor')
        return events.EventsExecutor(context=node.context)
    kinds = {'single': SingleThreadedExecutor, 'multi': MultiThreadedExecutor}
    return kinds[kind](context=node.context)


@pytest.mark.parametrize('raw', [False, True])
@pytest.mark.parametrize('kind', ['events', 'single', 'multi'])
def test_a_callback_gets_the_message_and_what_the_middleware_knows(node, kind, raw) -> None:
    got: list[tuple[Any, Mapping[str, Any]]] = []
    call = with_info(lambda message, info: got.append((message, info)))
    node.create_subscription(String, 'said', call, RELIABLE, raw=raw)
    publisher = node.create_publisher(String, 'said', RELIABLE)
    spun = executor(kind, node)
    spun.add_node(node)
    sent, end_s = 0, time.monotonic() + TIMEOUT_S
    begin_ns = time.time_ns()
    while len(got) < 3:
        assert time.monotonic() < end_s
        publisher.publish(String(data=str(sent)))
        sent += 1
        spun.spin_once(timeout_sec=0.05)
    spun.shutdown()
    messages = [deserialize_message(m, String) if raw else m for m, _ in got]
    assert [int(message.data) for message in messages] == list(
        range(int(messages[0].data), int(messages[0].data) + len(got))
    )
    stamps = [info['source_timestamp'] for _, info in got]
    assert begin_ns - 1e9 < stamps[0] <= stamps[-1] < time.time_ns() + 1e9
    # Publishers are told apart by these numbers.
    numbers = [info['publication_sequence_number'] for _, info in got]
    assert [number - numbers[0] for number in numbers] == list(range(len(got)))


def test_a_message_alone_comes_without_knowledge() -> None:
    got: list[tuple[Any, Mapping[str, Any]]] = []
    # As Humble's executors call it.
    with_info(lambda message, info: got.append((message, info)))(String(data='alone'))
    assert got == [(String(data='alone'), {})]


def test_the_nodes_own_executor_is_among_those_tried(node) -> None:
    made = make_executor()
    assert type(made).__name__ in ('EventsExecutor', 'MultiThreadedExecutor')
    made.shutdown()
