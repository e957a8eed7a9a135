"""Poses of an end effector to joints and back, on the robot's URDF (through pinocchio).

Inverse kinematics by damped least squares (Wampler 1986), row after row from where the robot is,
within the joints' limits. A pose that is not reached, or reached by a jump alone, is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

import numpy as np

from vla_runtime.execution.columns import OutOfReach

# Before the name of every link.
_LINK = 'link/'
# Largest errors of a pose that counts as reached.
REACHED_M, REACHED_RAD = 1e-3, 0.01
# Iterations go on below these, while they still gain.
_EXACT_M, _EXACT_RAD = 1e-6, 1e-5
_ITERATIONS = 200
_DAMPING = 1e-6
_LONGEST_STEP = 0.2
# A radian counts like this many metres, as on an arm of half a metre.
_RADIAN_M = 0.5
INSTALL = "pip install '.[kinematics]' (the package pin), or ROS 2's package pinocchio"


class KinematicsError(ValueError):
    """The URDF has no such chain, or the library for it is missing."""


class ArmKinematics:
    """The chain of joints between two frames of a URDF.

    Any thread may ask: a chunk is checked in one while another tells where the plan leads, so what
    pinocchio writes on the way belongs to a call.

    Args:
        base: link that poses are given in.
        tip: link that is the end effector.
        known: names of the joints that the robot commands, as the URDF has them.

    Attributes:
        joints: the chain's joints in order, as the URDF names them; angles in rad, ways in m.

    Raises:
        KinematicsError: pinocchio is missing, a link is not there, or a joint of the chain is none
            of the robot's.
    """

    def __init__(self, urdf: str, base: str, tip: str, known: Sequence[str]) -> None:
        self._pin = _pinocchio()
        try:
            model = self._pin.buildModelFromXML(_prepared(urdf))
        except (ValueError, RuntimeError, ElementTree.ParseError) as error:
            raise KinematicsError(f'the URDF cannot be used: {error}') from None
        links = [
            frame.name.removeprefix(_LINK)
            for frame in model.frames
            if frame.type == self._pin.FrameType.BODY
        ]
        for link in (base, tip):
            if link not in links:
                raise KinematicsError(f"the URDF has no link '{link}' (it has {', '.join(links)})")
        above, below = (_joints_above(model, _LINK + link) for link in (base, tip))
        moving = below - above
        if above - below or not moving:
            raise KinematicsError(f"no chain of joints leads from '{base}' to '{tip}'")
        self.joints = tuple(model.names[joint] for joint in sorted(moving))
        missing = [name for name in self.joints if name not in known]
        if missing:
            raise KinematicsError(
                f"joints {', '.join(missing)} between '{base}' and '{tip}' are none of the robot's"
            )
        others = [
            joint for joint in range(1, model.njoints) if model.names[joint] not in self.joints
        ]
        rest = self._pin.neutral(model)
        self._model = self._pin.buildReducedModel(model, others, rest)
        if self._model.nq != len(self.joints):
            raise KinematicsError(
                f"joints between '{base}' and '{tip}' that neither turn about one axis nor slide "
                'along one'
            )
        self._base, self._tip = (self._model.getFrameId(_LINK + link) for link in (base, tip))

    def forward(self, joints: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the poses of joint positions (n, joints): (n, 3) in m and (n, 3, 3)."""
        data = self._model.createData()
        placed = [self._pose(row, data) for row in np.asarray(joints, dtype=np.float64)]
        return (
            np.array([pose.translation for pose in placed]).reshape(-1, 3),
            np.array([pose.rotation for pose in placed]).reshape(-1, 3, 3),
        )

    def inverse(
        self,
        positions: np.ndarray,
        rotations: np.ndarray,
        start: np.ndarray,
        lower: np.ndarray,
        upper: np.ndarray,
        longest: np.ndarray,
    ) -> np.ndarray:
        """Return joints that hold the poses, (n, joints) float64, each row near the row before.

        Args:
            positions: (n, 3) in m.
            rotations: (n, 3, 3).
            start: (joints,) where the robot is.
            lower, upper: (joints,) limits.
            longest: (joints,) longest way from row to row; the first row may be anywhere.

        Raises:
            OutOfReach: a pose that is not reached within the limits, or by a jump alone.
        """
        # Joints whose limits lie apart by less than nothing cannot be; a start outside is moved in.
        joints = np.clip(start, lower, upper)
        rows, data = [], self._model.createData()
        for index, (position, rotation) in enumerate(zip(positions, rotations, strict=True)):
            target = self._pin.SE3(np.asarray(rotation), np.asarray(position))
            found, away_m, away_rad = self._reach(target, joints, lower, upper, data)
            if away_m > REACHED_M or away_rad > REACHED_RAD:
                raise OutOfReach(
                    f'row {index} is out of reach: the arm stays {away_m * 1e3:.0f} mm and '
                    f'{away_rad:.2f} rad away from it'
                )
            # A joint that may not move at all has a search's own error.
            share = np.abs(found - joints) / np.maximum(longest, _EXACT_RAD)
            if index and (share > 1.0).any():
                joint = int(np.argmax(share))
                raise OutOfReach(
                    f"row {index} is reached by a jump alone: '{self.joints[joint]}' would go "
                    f'from {joints[joint]:.2f} to {found[joint]:.2f} in one step'
                )
            joints = found
            rows.append(found)
        return np.array(rows).reshape(-1, len(self.joints))

    def _pose(self, joints: np.ndarray, data: Any) -> Any:
        self._pin.forwardKinematics(self._model, data, joints)
        self._pin.updateFramePlacements(self._model, data)
        frames = data.oMf
        return frames[self._base].actInv(frames[self._tip])

    def _reach(
        self, target: Any, start: np.ndarray, lower: np.ndarray, upper: np.ndarray, data: Any
    ) -> tuple[np.ndarray, float, float]:
        """Nearest joints that were found, and how far in m and rad their pose is off."""
        weights = np.array([1.0, 1.0, 1.0, *[_RADIAN_M] * 3])
        joints, best = start, (start, np.inf, np.inf)
        for _ in range(_ITERATIONS):
            error = self._pin.log6(self._pose(joints, data).actInv(target)).vector
            away = float(np.linalg.norm(error[:3])), float(np.linalg.norm(error[3:]))
            if away[0] + _RADIAN_M * away[1] < best[1] + _RADIAN_M * best[2]:
                best = (joints, *away)
            if away[0] < _EXACT_M and away[1] < _EXACT_RAD:
                break
            jacobian = weights[:, None] * self._pin.computeFrameJacobian(
                self._model, data, joints, self._tip, self._pin.LOCAL
            )
            step = _damped_step(jacobian, weights * error, joints, lower, upper)
            if not step.any():
                break
            longest = float(np.abs(step).max())
            step = step * min(1.0, _LONGEST_STEP / longest)
            joints = np.clip(joints + step, lower, upper)
        return best


def _damped_step(
    jacobian: np.ndarray,
    error: np.ndarray,
    joints: np.ndarray,
    lower: np.ndarray,
    upper: np.ndarray,
) -> np.ndarray:
    """Return a step towards the target; joints at a limit leave the way to others."""
    damping = _DAMPING + 1e-2 * float(error @ error)
    free = np.ones(len(joints), dtype=bool)
    step = np.zeros(len(joints))
    for _ in range(len(joints)):
        moving = jacobian[:, free]
        step[:] = 0.0
        step[free] = moving.T @ np.linalg.solve(
            moving @ moving.T + damping * np.eye(len(error)), error
        )
        stuck = ((joints <= lower) & (step < 0.0)) | ((joints >= upper) & (step > 0.0))
        if not (stuck & free).any():
            break
        free &= ~stuck
        if not free.any():
            return np.zeros(len(joints))
    return step


def _joints_above(model: Any, frame: str) -> set[int]:
    parent = model.frames[model.getFrameId(frame)].parentJoint
    return {joint for joint in model.supports[parent] if joint}


def _prepared(urdf: str) -> str:
    """Return a URDF for pinocchio: endless joints get far end stops, links names of no joint."""
    tree = ElementTree.fromstring(urdf)
    for link in tree.findall('link'):
        link.set('name', _LINK + link.get('name', ''))
    for joint in tree.iter('joint'):
        for end in (*joint.findall('parent'), *joint.findall('child')):
            end.set('link', _LINK + end.get('link', ''))
        if joint.get('type') == 'continuous':
            joint.set('type', 'revolute')
            limit = joint.find('limit')
            if limit is None:
                limit = ElementTree.SubElement(joint, 'limit')
            limit.attrib.update(lower='-1e6', upper='1e6')
            limit.attrib.setdefault('effort', '0')
            limit.attrib.setdefault('velocity', '0')
    return ElementTree.tostring(tree, encoding='unicode')


def _pinocchio() -> Any:
    try:
        import pinocchio
    except ImportError as error:
        raise KinematicsError(
            f'poses through joints need pinocchio, which cannot be imported ({error}); install it: '
            f'{INSTALL}'
        ) from None
    return pinocchio
