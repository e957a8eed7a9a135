"""The robot's shape from its URDF, and where its end effector is at any joint positions.

Joints are given by their names in messages, in rad and m, as the URDF has them.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import yourdfpy

from vla_runtime.files.quotes import quoted
from vla_runtime.robot.schema import SIZE, Robot

# Links that drivers and descriptions give an end effector; the first that fits is drawn.
_TIP_WORDS = ('tcp', 'tool', 'tip', 'grasp', 'gripper_frame', 'ee_', 'flange', 'hand')
_NO_TIP_WORDS = ('camera', 'optical', 'lens', 'imu')
_MOVABLE = ('revolute', 'continuous', 'prismatic')


class ShapeError(ValueError):
    """A URDF that cannot be shown; the message says why and what would mend it."""


class RobotShape:
    """A robot's links and joints.

    Attributes:
        urdf: the whole robot, for `viser`.
        moving: the same without the shapes of links that never move, such as a table.
        joints: names of the joints that move.
        tips: links of the end effectors, one for each arm.
        missing_meshes: files that the URDF names and that are not here.

    Args:
        text: the URDF.
        folder: of its file, for meshes with relative paths; None where it came as a message.
        commanded: joints that the robot file has, by their names in messages; all where empty.
        tip: the link whose path is wanted; None: found.

    Raises:
        ShapeError: not a URDF that can be read, or it has no such link.
    """

    def __init__(
        self,
        text: str,
        folder: Path | None,
        commanded: Sequence[str] = (),
        tip: str | None = None,
    ) -> None:
        self.missing_meshes: list[str] = []
        self._folder = folder
        # Whatever the parsers raise.
        try:
            document = ElementTree.fromstring(text)
            self.urdf = self._load(document)
            self._joint_to = {joint.child: joint for joint in self.urdf.robot.joints}
            for link in document.findall('link'):
                if not any(j.type in _MOVABLE for j in self._chain(link.get('name', ''))):
                    for visual in link.findall('visual'):
                        link.remove(visual)
            self.moving = self._load(document)
        except Exception as error:
            raise ShapeError(f'the URDF cannot be read: {error}') from None
        moving = [joint.name for joint in self.urdf.robot.joints if joint.type in _MOVABLE]
        self.joints = tuple(moving)
        known = [name for name in moving if name in commanded] or moving
        links = [link.name for link in self.urdf.robot.links]
        if not links:
            raise ShapeError('the URDF has no link')
        if tip is not None and tip not in links:
            raise ShapeError(f'--tip {quoted(tip)}: the URDF has links {", ".join(links)}')
        self.tips = (tip,) if tip is not None else self._tips(links, known)

    @property
    def root(self) -> str:
        """The link that all poses are in."""
        return str(self.urdf.base_link)

    def link_of(self, joint: str) -> str | None:
        """Return the link that a joint moves; None where the URDF has no such joint."""
        return next((link for link, one in self._joint_to.items() if one.name == joint), None)

    @property
    def base(self) -> np.ndarray:
        """Where the first arm begins, (3,) in m."""
        first = self._arm()
        return self.poses(first[0].parent, {})[0, :3, 3] if first else np.zeros(3)

    @property
    def reach_m(self) -> float:
        """Length of the first arm, from joint to joint; a metre where there is none."""
        ways = [np.linalg.norm(joint.origin[:3, 3]) for joint in self._arm()[1:]]
        return float(sum(ways)) or 1.0

    def _arm(self) -> list[yourdfpy.Joint]:
        """Return the joints of the first arm, from the first that moves to its tip."""
        chain = self._chain(self.tips[0]) if self.tips else []
        first = next((n for n, joint in enumerate(chain) if joint.type in _MOVABLE), len(chain))
        return chain[first:]

    def positions(self, tip: str, joints: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return where a tip is, (n, 3) in m, at joint positions (n,); those left out are 0."""
        return self.poses(tip, joints)[:, :3, 3]

    def poses(self, link: str, joints: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the pose of a link in the root, (n, 4, 4), at joint positions (n,)."""
        count = max((len(values) for values in joints.values()), default=1)
        pose = np.tile(np.eye(4), (count, 1, 1))
        for joint in self._chain(link):
            if joint.origin is not None:
                pose = pose @ joint.origin
            if joint.type in _MOVABLE:
                pose = pose @ _moved(joint, self._values(joint, joints, count))
        return pose

    def _values(
        self, joint: yourdfpy.Joint, joints: Mapping[str, np.ndarray], count: int
    ) -> np.ndarray:
        if joint.mimic is None:
            return np.asarray(joints.get(joint.name, np.zeros(count)))
        leader = np.asarray(joints.get(joint.mimic.joint, np.zeros(count)))
        return joint.mimic.multiplier * leader + joint.mimic.offset

    def _chain(self, link: str) -> list[yourdfpy.Joint]:
        """Return the joints from the root to a link."""
        chain = []
        while link in self._joint_to:
            chain.append(self._joint_to[link])
            link = self._joint_to[link].parent
        return chain[::-1]

    def _tips(self, links: Sequence[str], commanded: Sequence[str]) -> tuple[str, ...]:
        """Choose one link for each arm: the best named at the end of its commanded joints."""
        above = {
            link: frozenset(joint.name for joint in self._chain(link) if joint.name in commanded)
            for link in links
        }
        arms: dict[str, str] = {}
        # An arm is told by the joint that its chain begins with.
        for link in sorted(links, key=lambda one: (_rank(one), -len(above[one]), one)):
            first = next((j.name for j in self._chain(link) if j.name in above[link]), None)
            deepest = max((len(its) for its in above.values() if first in its), default=0)
            # A gripper's own joints come behind the tool.
            if first is not None and len(above[link]) >= max(1, deepest - 2):
                arms.setdefault(first, link)
        return tuple(arms.values())

    def _load(self, document: ElementTree.Element) -> yourdfpy.URDF:
        text = ElementTree.tostring(document)
        # It prints what it thinks of a URDF.
        with redirect_stderr(io.StringIO()):
            return yourdfpy.URDF.load(
                io.BytesIO(text), filename_handler=self._mesh_file, mesh_dir=''
            )

    def _mesh_file(self, fname: str) -> str:
        path = _resolved(fname, self._folder)
        if path is None or not path.is_file():
            if fname not in self.missing_meshes:
                self.missing_meshes.append(fname)
            return fname
        return str(path)


def in_urdf_units(robot: Robot | None) -> dict[str, float]:
    """Return what a joint's position is multiplied with, by its name in messages.

    Joints in percent or `'1'` are left out: only the robot's driver knows their angle.
    """
    return {
        joint.in_messages: SIZE[joint.unit][1]
        for joint in (robot.joints if robot is not None else ())
        if SIZE[joint.unit][0] != 'none'
    }


def _rank(link: str) -> int:
    """Return how well a link's name tells an end effector, 0 the best."""
    lower = link.lower()
    if any(word in lower for word in _NO_TIP_WORDS):
        return len(_TIP_WORDS) + 1
    found = [number for number, word in enumerate(_TIP_WORDS) if word in lower]
    return min(found, default=len(_TIP_WORDS))


def _moved(joint: yourdfpy.Joint, values: np.ndarray) -> np.ndarray:
    """Return the motions (n, 4, 4) of a joint; turns by Rodrigues' formula."""
    axis = np.asarray(joint.axis, dtype=np.float64)
    axis = axis / np.linalg.norm(axis)
    made = np.tile(np.eye(4), (len(values), 1, 1))
    if joint.type == 'prismatic':
        made[:, :3, 3] = values[:, None] * axis
        return made
    x, y, z = axis
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    sine, cosine = np.sin(values)[:, None, None], np.cos(values)[:, None, None]
    made[:, :3, :3] = np.eye(3) + sine * cross + (1.0 - cosine) * (cross @ cross)
    return made


def _resolved(name: str, folder: Path | None) -> Path | None:
    """Return the file that a URDF's mesh names; None where its package is not here."""
    scheme, _, rest = name.rpartition('://')
    if scheme == 'package':
        from ament_index_python.packages import PackageNotFoundError, get_package_share_directory

        package, _, inside = rest.partition('/')
        try:
            return Path(get_package_share_directory(package)) / inside
        except PackageNotFoundError:
            return None
    return (folder or Path()) / rest
