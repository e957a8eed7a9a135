"""What a page shows, and to whom: what live robots and recordings have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vla_runtime.robot.schema import Robot


@dataclass(frozen=True)
class ViewOptions:
    """What to show, and to whom.

    Attributes:
        namespace: of the robot; None: the only one there is.
        robot: the robot file; None: that of the policy's description.
        urdf: file with the robot's shape; None: the robot file's, or the topic robot_description.
        tip: link whose path is drawn; None: where the chain of commanded joints ends.
        keys: of who may look; none on this machine alone.
    """

    host: str
    namespace: str | None = None
    robot: Robot | None = None
    urdf: Path | None = None
    tip: str | None = None
    read_only: bool = False
    keys: tuple[str, ...] = ()


class Publish(Protocol):
    """See `Pages.publish`."""

    def __call__(self, news: Mapping[str, Any], *, anew: bool = False) -> None: ...


class Source(Protocol):
    """What a page shows: a live robot, or a recording.

    Attributes:
        pages: number of open pages, set here.
    """

    pages: int

    @property
    def pictures(self) -> Mapping[str, tuple[int, bytes]]:
        """Camera to number and JPEG of its newest frame."""

    @property
    def scene_port(self) -> int | None:
        """Port of the three-dimensional scene; None where there is none."""

    def begin(self, publish: Publish) -> None:
        """Show what comes from now on by `publish`."""

    def hello(self) -> dict[str, Any]:
        """Return what a page needs first; called in a thread of its own."""

    async def command(self, command: Mapping[str, Any]) -> str:
        """Carry out what a person asks; ValueError: why not."""
