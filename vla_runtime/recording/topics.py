"""Topics of a bag by the names that robot files and nodes give them, in whatever namespace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

IMAGE_TYPES = ('sensor_msgs/msg/Image', 'sensor_msgs/msg/CompressedImage')
JOINT_STATE = 'sensor_msgs/msg/JointState'
STRING = 'std_msgs/msg/String'
# What the policy did and what it was told; the first that a bag has is used.
INSTRUCTIONS = ('current_instruction', 'instruction')


class MissingTopicError(ValueError):
    """A source of the robot file is not in a bag; the message names the topics that are."""

    def __init__(self, bag: Path, robot: Path, name: str, source: str, there: Iterable[str]):
        super().__init__(
            f"{bag}: no topic {name} for '{source}' of the robot file {robot.name}; there are: "
            f'{", ".join(sorted(there)) or "none of that kind"}. Give the robot file its name '
            'there, and the file with --robot'
        )


def is_topic(topic: str, name: str) -> bool:
    """Return whether a bag's topic is one of a robot file or node, in any namespace."""
    return topic == name or topic.endswith(f'/{name.lstrip("/")}')


def camera_topics(topic: str) -> tuple[str, str]:
    """Return names under which a camera's frames may be recorded, the preferred one first."""
    return topic, f'{topic}/compressed'


def find_topic(kinds: Mapping[str, str], names: Sequence[str], types: Sequence[str]) -> str | None:
    """Return the topic with the shortest name that has the first name possible; None without one.

    Args:
        kinds: topic of the bag to its type.
        names: that the topic may have, the preferred one first.
        types: that it may have.
    """
    for name in names:
        found = [topic for topic, kind in kinds.items() if kind in types and is_topic(topic, name)]
        if found:
            return min(found, key=len)
    return None
