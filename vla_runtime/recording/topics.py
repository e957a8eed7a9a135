"""Topics of a bag by the names that robot files and nodes give them, in whatever namespace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# --- Modes by which a recording keeps frames of the cameras


# `used`: those that an inference used, bit for bit; `all`, likewise; `reduced`: a few a second.
ImageMode = Literal['used', 'all', 'reduced']

# How often a reduced image of a camera is kept, and how: raw ones of 20 Hz are 100 MB a minute.
IMAGE_RATE_HZ = 4
JPEG_QUALITY = 85


# --------------------------------------------------------------------------------------------------

IMAGE_TYPES = ('sensor_msgs/msg/Image', 'sensor_msgs/msg/CompressedImage')
JOINT_STATE = 'sensor_msgs/msg/JointState'
STRING = 'std_msgs/msg/String'
TRAJECTORY = 'trajectory_msgs/msg/JointTrajectory'
# Of `action_chunk` and `committed_plan`, the typed ones first; see `messages.trajectories`.
CHUNK_TYPES = ('vla_interfaces/msg/ActionChunk', TRAJECTORY)
PLAN_TYPES = ('vla_interfaces/msg/CommittedPlan', TRAJECTORY)
# The policy's instruction and the one it was told; the first that a bag has is used.
INSTRUCTIONS = ('current_instruction', 'instruction')


class MissingTopicError(ValueError):
    """A source of the robot file is not in a bag; the message names the topics that are."""


def missing_topic(
    bag: Path, robot: Path, name: str, source: str, there: Iterable[str]
) -> MissingTopicError:
    """Return the error that topic `name`, for a source of the robot file, is not in a bag."""
    return MissingTopicError(
        f"{bag}: no topic {name} for '{source}' of the robot file {robot.name}; there are: "
        f'{", ".join(sorted(there)) or "none of that kind"}. Give the robot file its name '
        'there, and the file with --robot'
    )


class NamespaceError(ValueError):
    """Topics of the robot file are in several namespaces of a bag, or not in the chosen one."""


def is_topic(topic: str, name: str) -> bool:
    """Return whether a bag's topic is one of a robot file or node, in any namespace."""
    return topic == name or topic.endswith(f'/{name.lstrip("/")}')


def camera_topics(topic: str) -> tuple[str, str]:
    """Return names under which a camera's frames may be recorded, the preferred one first."""
    return topic, f'{topic}/compressed'


@dataclass(frozen=True)
class Source:
    """A camera or joint of a robot file, with possible topic names, the best first, and types."""

    names: Sequence[str]
    types: Sequence[str]


@dataclass(frozen=True)
class Namespace:
    """Namespace of one robot's topics in a bag.

    Attributes:
        name: such as `/left`; empty where the topics have the robot file's own names.
        others: namespaces of other robots in the bag that have the same topics.
    """

    name: str = ''
    others: tuple[str, ...] = ()

    def find_topic(
        self, kinds: Mapping[str, str], names: Sequence[str], types: Sequence[str]
    ) -> str | None:
        """Return the robot's topic with the first name possible; None without one.

        Args:
            kinds: topic of the bag to its type.
            names, types: those that it may have; the preferred name is first.
        """
        own = {topic: kind for topic, kind in kinds.items() if topic.startswith(f'{self.name}/')}
        for there in (own, kinds):
            for name in names:
                found = [
                    topic
                    for topic, kind in there.items()
                    if kind in types and is_topic(topic, name) and not self.is_other(topic)
                ]
                if found:
                    return min(found, key=lambda one: (_before(one, name) != self.name, len(one)))
        return None

    def is_other(self, topic: str) -> bool:
        """Return whether a topic is another robot's; one of no robot's is everybody's."""
        inside = [one for one in (self.name, *self.others) if topic.startswith(f'{one}/')]
        return max(inside, key=len, default=self.name) != self.name


def robot_namespace(
    kinds: Mapping[str, str], sources: Sequence[Source], wanted: str | None
) -> Namespace:
    """Return the namespace under which a bag has all sources of a robot file.

    Args:
        kinds: topic of the bag to its type.

    Raises:
        NamespaceError: several robots are in the bag and none was chosen, or none is there.
    """
    places = [
        {
            _before(topic, name)
            for topic, kind in kinds.items()
            for name in source.names
            if kind in source.types and is_topic(topic, name)
        }
        for source in sources
    ]
    several = [place for place in places if len(place) > 1]
    robots = set.intersection(*places) if places else set()
    others = robots
    if not robots and several:
        # Cameras that robots share are there once.
        robots, others = set.intersection(*several), set()
    if wanted is not None:
        name = _normal(wanted)
        if not any(name in place for place in places):
            there = ', '.join(sorted({one or '/' for place in places for one in place}))
            raise NamespaceError(
                f'--namespace {wanted}: no topic of the robot file is there; it has them in '
                f'{there or "none"}'
            )
        return Namespace(name, tuple(sorted(others - {name})))
    # `/arm` may have a `/arm/gripper` with topics of the same names.
    outer = [one for one in robots if not any(one.startswith(f'{o}/') for o in robots - {one})]
    if len(outer) > 1 or (several and not outer):
        there = ', '.join(sorted(outer or set.union(*several)))
        raise NamespaceError(
            f'several robots have the topics of the robot file: {there}; choose one with '
            '--namespace'
        )
    name = outer[0] if outer else ''
    return Namespace(name, tuple(sorted(others - {name})))


def _normal(namespace: str) -> str:
    bare = namespace.strip('/')
    return f'/{bare}' if bare else ''


def _before(topic: str, name: str) -> str:
    return topic.removesuffix(name.lstrip('/')).rstrip('/')
