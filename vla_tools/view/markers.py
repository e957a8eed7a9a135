"""Markers for RViz and Foxglove: ways of the plan and the newest chunk, joints at their limits.

All are in the root of the URDF, but for a workspace box, which is in the frame of its pose. They
vanish when this process ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from builtin_interfaces.msg import Duration
from geometry_msgs.msg import Point
from rclpy.node import Node
from std_msgs.msg import ColorRGBA
from visualization_msgs.msg import Marker, MarkerArray

from vla_runtime.messages.trajectories import ns_to_stamp
from vla_runtime.robot.schema import RobotPose
from vla_tools.view.scene import BLUE, ORANGE, tip_paths
from vla_tools.view.scene_keeper import SceneKeeper
from vla_tools.view.shape import RobotShape
from vla_tools.view.state import ViewState
from vla_tools.view.wire import Motion

TOPIC = '~/markers'
_RED, _AMBER, _GREY = (179, 40, 59), (224, 159, 62), (140, 140, 145)
_LINE_M, _BALL_M, _TEXT_M = 0.004, 0.05, 0.035
# Shares of a joint's range that are at and near its limit.
_AT, _NEAR = 0.02, 0.1
_EVERY_LOOKS = 2
_LIFETIME = Duration(sec=1)


class MarkerPublisher:
    """Publishes a state's markers while somebody listens; one thread calls `show`."""

    def __init__(self, node: Node) -> None:
        self._publisher = node.create_publisher(MarkerArray, TOPIC, 1)
        self._looks = 0

    def show(self, state: ViewState, scenes: SceneKeeper, now_ns: int) -> None:
        """Publish the markers of this time, every second time that it is called."""
        self._looks += 1
        shape = scenes.shape
        if self._looks % _EVERY_LOOKS or not self._publisher.get_subscription_count():
            return
        stamp, markers = ns_to_stamp(now_ns), list(_boxes(state))
        if shape is not None:
            markers += _motions(shape, scenes.factors, state, now_ns)
            markers += _limits(shape, scenes.factors, state)
        for number, marker in enumerate(markers):
            marker.id, marker.header.stamp, marker.lifetime = number, stamp, _LIFETIME
        self._publisher.publish(MarkerArray(markers=markers))


def _motions(
    shape: RobotShape, factors: Mapping[str, float], state: ViewState, now_ns: int
) -> Iterator[Marker]:
    shown: list[tuple[str, Motion | None, tuple[int, int, int]]] = [
        ('plan', state.plan_at(now_ns), BLUE),
        ('chunk', state.chunks[-1] if state.chunks else None, ORANGE),
    ]
    for name, motion, colour in shown:
        if motion is None:
            continue
        for path in tip_paths(shape, factors, state.positions(), motion):
            marker = _marker(name, shape.root, Marker.LINE_STRIP, colour)
            marker.scale.x = _LINE_M
            marker.points = [_point(place) for place in path]
            if len(path) > 1:
                yield marker


def _limits(shape: RobotShape, factors: Mapping[str, float], state: ViewState) -> Iterator[Marker]:
    """Yield a ball and its words at each joint that is near its limit."""
    positions = state.positions()
    joints = {name: np.array([value * factors.get(name, 1.0)]) for name, value in positions.items()}
    for name, (lower, upper) in state.limits().items():
        at, link = positions.get(name), shape.link_of(name)
        if at is None or link is None or not 0.0 < upper - lower < np.inf:
            continue
        share = (at - lower) / (upper - lower)
        margin = min(share, 1.0 - share)
        if margin > _NEAR:
            continue
        colour = _RED if margin <= _AT else _AMBER
        place = shape.poses(link, joints)[0, :3, 3]
        ball = _marker('limits', shape.root, Marker.SPHERE, colour, 0.6)
        ball.scale.x = ball.scale.y = ball.scale.z = _BALL_M
        ball.pose.position = _point(place)
        yield ball
        text = _marker('limits', shape.root, Marker.TEXT_VIEW_FACING, colour)
        text.scale.z = _TEXT_M
        text.pose.position = _point(place + np.array([0.0, 0.0, _BALL_M]))
        text.text = f'{name} {"at" if margin <= _AT else "near"} its {_end(share)} limit'
        yield text


def _end(share: float) -> str:
    return 'lower' if share < 0.5 else 'upper'


def _boxes(state: ViewState) -> Iterator[Marker]:
    """Yield the edges of each pose's workspace box."""
    for pose in state.robot.poses if state.robot is not None else ():
        if pose.lower is None or pose.upper is None:
            continue
        marker = _marker('workspace', pose.frame_id, Marker.LINE_LIST, _GREY)
        marker.scale.x = _LINE_M
        marker.points = [_point(place) for edge in _edges(pose) for place in edge]
        yield marker


def _edges(pose: RobotPose) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    lower, upper = np.array(pose.lower), np.array(pose.upper)
    corners = [(np.array(which), np.where(which, upper, lower)) for which in np.ndindex(2, 2, 2)]
    for number, (one, begin) in enumerate(corners):
        for other, end in corners[number + 1 :]:
            if np.sum(one != other) == 1:
                yield begin, end


def _marker(
    name: str, frame: str, kind: int, colour: tuple[int, int, int], opacity: float = 1.0
) -> Marker:
    marker = Marker(ns=name, type=kind, action=Marker.ADD)
    marker.header.frame_id = frame
    marker.pose.orientation.w = 1.0
    red, green, blue = (one / 255.0 for one in colour)
    marker.color = ColorRGBA(r=red, g=green, b=blue, a=opacity)
    return marker


def _point(place: np.ndarray) -> Point:
    x, y, z = map(float, place)
    return Point(x=x, y=y, z=z)
