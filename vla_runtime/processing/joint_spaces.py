"""Joint spaces: joints as a policy was trained on them, where they are not the robot's own.

States are converted before deltas and normalisation see them, actions after both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from vla_runtime.types import JointSpaceName

# Six joints and a gripper of each of ALOHA's two arms.
_SIGNS = np.tile([1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0], 2)
_GRIPPERS = np.array([6, 13])
# A measured gripper of 0 and 1: the finger's position in m.
_FINGER = (0.01844, 0.058)
# A commanded gripper of 0 and 1: the motor's angle in rad.
_MOTOR = (-0.6213, 1.491)
# A gripper of 0 and 1 on pi's own robots: likewise.
_PI_MOTOR = (0.5476, 1.6296)
# The motor pushes the finger with a horn and a rod of these lengths in m.
_HORN, _ROD = 0.022, 0.036


class JointSpace:
    """The robot's own joints, not converted; `units` None: any number of any unit."""

    units: tuple[str, ...] | None = None

    def state_to_policy(self, state: np.ndarray) -> np.ndarray:
        """Convert a measured state (n,); NaN where it has no meaning."""
        return state

    def actions_to_policy(self, actions: np.ndarray) -> np.ndarray:
        """Convert robot targets (H, n): the inverse of `actions_to_robot`."""
        return actions

    def actions_to_robot(self, actions: np.ndarray) -> np.ndarray:
        return actions


@dataclass(frozen=True)
class JointFrame(JointSpace):
    """Joints that turn the other way or have another zero; units are the robot's.

    Attributes:
        signs: 1 or -1 of each joint; offsets: the policy's number where the robot has 0.
    """

    signs: tuple[float, ...]
    offsets: tuple[float, ...]

    def state_to_policy(self, state: np.ndarray) -> np.ndarray:
        return np.array(self.signs) * state + np.array(self.offsets)

    def actions_to_policy(self, actions: np.ndarray) -> np.ndarray:
        return self.state_to_policy(actions)

    def actions_to_robot(self, actions: np.ndarray) -> np.ndarray:
        return np.array(self.signs) * (actions - np.array(self.offsets))


class OpenpiAloha(JointSpace):
    """openpi's `adapt_to_pi`: ALOHA's 14 joints as on pi's own robots.

    Shoulders and elbows turn the other way. Grippers are motor angles, where ALOHA's states are
    openings of the fingers, and its actions angles on another scale. pi's state of a gripper is 0
    and 1 at the ends of its motor's way, its action is the angle from the closed end in rad
    (openpi since July 2025).
    """

    units = (*('rad',) * 6, '1') * 2

    def state_to_policy(self, state: np.ndarray) -> np.ndarray:
        """Convert a measured state (14,); NaN for a gripper that is closed beyond its crank."""
        result = _SIGNS * state
        finger = _FINGER[0] + result[_GRIPPERS] * (_FINGER[1] - _FINGER[0])
        with np.errstate(divide='ignore', invalid='ignore'):
            sine = (_HORN**2 + finger**2 - _ROD**2) / (2.0 * _HORN * finger)
        # On the middle's other side the formula would call a closed gripper an open one.
        sine = np.where(finger > 0.0, sine, np.nan)
        angle = np.arcsin(np.clip(sine, -1.0, 1.0))
        result[_GRIPPERS] = (angle - _PI_MOTOR[0]) / (_PI_MOTOR[1] - _PI_MOTOR[0])
        return result

    def actions_to_policy(self, actions: np.ndarray) -> np.ndarray:
        result = _SIGNS * actions
        angle = _MOTOR[0] + result[:, _GRIPPERS] * (_MOTOR[1] - _MOTOR[0])
        result[:, _GRIPPERS] = angle - _PI_MOTOR[0]
        return result

    def actions_to_robot(self, actions: np.ndarray) -> np.ndarray:
        result = _SIGNS * actions
        angle = _PI_MOTOR[0] + result[:, _GRIPPERS]
        result[:, _GRIPPERS] = (angle - _MOTOR[0]) / (_MOTOR[1] - _MOTOR[0])
        return result


_SPACES: Mapping[JointSpaceName | None, JointSpace] = MappingProxyType(
    {None: JointSpace(), 'openpi_aloha': OpenpiAloha()}
)


def joint_space(name: JointSpaceName | None, frame: JointFrame | None = None) -> JointSpace:
    """Return the joint space of a bundle; None is the robot's own."""
    return _SPACES[name] if frame is None else frame
