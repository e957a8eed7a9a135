"""Recorded inferences as steps to play to a node. No ROS 2 here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vla_runtime.types import PlanRequest


@dataclass(frozen=True)
class PolicyNodeOptions:
    """The policy node's full name, and fixed parameters as `-p NAME:=VALUE` has them."""

    name: str
    parameters: Mapping[str, str]

    @property
    def namespace(self) -> str:
        return self.name.rpartition('/')[0] or '/'


@dataclass(frozen=True)
class PlayedMessage:
    """A message to publish as it stands in a bag.

    Attributes:
        type_name: type of the message, like `sensor_msgs/msg/Image`.
        serialised: CDR.
    """

    topic: str
    type_name: str
    serialised: bytes


@dataclass(frozen=True)
class LiveStep:
    """One inference to play.

    Attributes:
        now_ns: ROS time at which it is played.
        stamp_ns: ROS time of its observation, and of its chunk.
        begins_episode: the node is reset before it.
        parameters: live ones in force, by name.
        messages: the observation's joint states and frames.
        plan: committed plan that it answered, under a stamp that fits `stamp_ns`.
    """

    now_ns: int
    stamp_ns: int
    begins_episode: bool
    parameters: Mapping[str, Any]
    messages: Sequence[PlayedMessage]
    plan: PlanRequest
