"""What the graph shows of publishers and subscriptions that never meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import rclpy
from graph import Graph, graph
from rclpy.duration import Duration
from rclpy.node import Node
from rclpy.qos import (
    DurabilityPolicy,
    LivelinessPolicy,
    QoSCompatibility,
    QoSProfile,
    ReliabilityPolicy,
    qos_check_compatible,
)
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import Float64MultiArray

from vla_runtime.nodes.graph_faults import (
    qos_conflicts,
    type_name,
    why_silent,
    why_without_subscribers,
)
from vla_runtime.nodes.qos import NEWEST

pytestmark = pytest.mark.graph

IMAGE, COMPRESSED = 'sensor_msgs/msg/Image', 'sensor_msgs/msg/CompressedImage'
COMMANDS = 'std_msgs/msg/Float64MultiArray'
BEST_EFFORT = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
RELIABLE = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE)
LATCHED = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)


@pytest.fixture(scope='module')
def made() -> Iterator[Graph]:
    with graph() as one:
        yield one


@pytest.fixture
def driver() -> Iterator[Node]:
    # A participant of its own: one has every topic with one type.
    context = rclpy.Context()
    rclpy.init(context=context)
    node = rclpy.create_node('driver', context=context, namespace='/left')
    yield node
    node.destroy_node()
    rclpy.shutdown(context=context)


def said(made: Graph, ask: Callable[[], str], *words: str) -> str:
    """What is said once it holds these words; discovery takes its time."""
    return made.wait_for(
        lambda: all(word in (text := ask()) for word in words) and text, str(words)
    )


PROFILES = [
    QoSProfile(
        depth=1, reliability=reliability, durability=durability, deadline=deadline, liveliness=alive
    )
    for reliability, durability, deadline, alive in itertools.product(
        (ReliabilityPolicy.BEST_EFFORT, ReliabilityPolicy.RELIABLE),
        (DurabilityPolicy.VOLATILE, DurabilityPolicy.TRANSIENT_LOCAL),
        (Duration(), Duration(seconds=0.1), Duration(seconds=1)),
        (LivelinessPolicy.AUTOMATIC, LivelinessPolicy.MANUAL_BY_TOPIC),
    )
]


def test_conflicts_are_exactly_where_the_middleware_says_so() -> None:
    for offered, asked in itertools.product(PROFILES, PROFILES):
        compatible, reason = qos_check_compatible(offered, asked)
        found = qos_conflicts(offered, asked)
        assert bool(found) == (compatible == QoSCompatibility.ERROR), (offered, asked, reason)
        assert len(found) == reason.count(';'), (found, reason)


def test_a_type_is_called_as_in_the_graph() -> None:
    assert (type_name(Image), type_name(Float64MultiArray)) == (IMAGE, COMMANDS)


# ---------------------------------------------------------------- nobody listens


@pytest.mark.parametrize(
    ('message_type', 'qos', 'words'),
    [
        (Float64MultiArray, LATCHED, ('durability transient_local', 'durability volatile')),
        (
            Float64MultiArray,
            QoSProfile(depth=1, deadline=Duration(seconds=0.1)),
            ('deadline 0.1 s', 'deadline none'),
        ),
        (Image, RELIABLE, (IMAGE, COMMANDS)),
    ],
)
def test_a_listener_that_cannot_hear_is_none_and_is_named(
    made: Graph, driver: Node, message_type: type, qos: QoSProfile, words: tuple[str, ...]
) -> None:
    made.node.create_publisher(Float64MultiArray, '/commands', NEWEST)
    ask = lambda: why_without_subscribers(made.node, '/commands', COMMANDS, NEWEST, 0)  # noqa: E731
    driver.create_subscription(message_type, '/commands', lambda _: None, qos)
    said(made, ask, '/commands', '/left/driver', *words)
    hears = rclpy.create_node('hears', context=made.node.context)
    hears.create_subscription(Float64MultiArray, '/commands', lambda _: None, BEST_EFFORT)
    made.wait_for(lambda: ask() == '', 'a listener that hears')
    hears.destroy_node()


def test_neither_a_recorder_nor_ones_own_subscription_counts(made: Graph) -> None:
    recorder = rclpy.create_node('rosbag2_recorder', context=made.node.context)
    recorder.create_subscription(Float64MultiArray, '/own', lambda _: None, 1)
    own = made.node.create_subscription(Float64MultiArray, '/own', lambda _: None, 1)
    made.wait_for(lambda: made.node.count_subscribers('/own') == 2, 'both')
    assert why_without_subscribers(made.node, '/own', COMMANDS, NEWEST, 1)
    # A node of the same name is another one.
    twin = rclpy.create_node(made.node.get_name(), context=made.node.context)
    twin.create_subscription(Float64MultiArray, '/own', lambda _: None, 1)
    made.wait_for(
        lambda: not why_without_subscribers(made.node, '/own', COMMANDS, NEWEST, 1), 'the twin'
    )
    made.node.destroy_subscription(own)
    for node in (recorder, twin):
        node.destroy_node()


# ---------------------------------------------------------------- nobody sends


def silent(made: Graph, topic: str, asked: QoSProfile = BEST_EFFORT) -> str:
    return why_silent(made.node, topic, IMAGE, asked, [IMAGE, COMPRESSED])


def test_a_publisher_that_offers_too_little_is_named_with_both_sides(
    made: Graph, driver: Node
) -> None:
    driver.create_publisher(Image, '/cam/image_raw', BEST_EFFORT)
    text = said(
        made,
        lambda: silent(made, '/cam/image_raw', RELIABLE),
        '/left/driver offers reliability best_effort',
        'asks for reliability reliable',
    )
    assert 'near' not in text
    assert silent(made, '/cam/image_raw', BEST_EFFORT) == ''


def test_another_type_and_what_is_near_are_named_with_types(made: Graph, driver: Node) -> None:
    for message_type, topic in (
        (Image, '/cam2/color/image_raw'),
        (CompressedImage, '/cam2/color/image_raw/compressed'),
        (Image, '/cam2/depth/image_rect'),
        (Float64MultiArray, '/cam2/color/image_ra'),
    ):
        driver.create_publisher(message_type, topic, 1)
    said(
        made,
        lambda: silent(made, '/cam2/color/image_raw/compressed'),
        f'/left/driver publishes {COMPRESSED} there, and {IMAGE} is expected',
        f'near it: /cam2/color/image_raw ({IMAGE})',
    )
    text = said(
        made,
        lambda: silent(made, '/cam2/color/image'),
        'no node publishes it',
        f'/cam2/color/image_raw/compressed ({COMPRESSED})',
        f'near it: /cam2/color/image_raw ({IMAGE})',
    )
    assert COMMANDS not in text and '/cam2/color/image_ra ' not in text


def test_a_topic_with_subscriptions_alone_is_not_near(made: Graph, driver: Node) -> None:
    driver.create_subscription(Image, '/only/heard', lambda _: None, 1)
    made.wait_for(lambda: made.node.count_subscribers('/only/heard'), 'the subscription')
    assert '/only/heard' not in silent(made, '/only/heart')
