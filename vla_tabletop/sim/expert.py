"""The scripted expert: from measured joints and known block positions to a chunk of setpoints.

A chunk depends on the given state alone: any goal can label any frame, and a disturbed arm gets a
chunk that recovers. The tip follows a Cartesian reference; damped least squares (Wampler 1986) on
the MuJoCo model gives the joints, with the tool upright and unrolled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vla_tabletop.sim.gl import mujoco
from vla_tabletop.sim.scene import BLOCK_HALF_SIZE_M, EDGE_M
from vla_tabletop.sim.tasks import SIDE_SIGN, Goal
from vla_tabletop.sim.world import JOINT_NAMES, MODEL_PATH

STEP_TIME_S = 0.05
HORIZON = 32

_ARM = 5  # joints that move the tip; the sixth is the gripper
_DAMPING = 0.02
_UPRIGHT_WEIGHT_M = 0.12  # a radian of tilt counts like this many metres
_UNROLL_WEIGHT_M = 0.05
_LONGEST_JOINT_STEP_RAD = 0.1
_GRIPPER_STEP_RAD = 0.06

_FUNNEL_M = 0.024  # sideways, from hovering to all the way down
_FUNNEL_FOOT_M = 0.006

_TOUCH_GAP_M = 0.002
_PUSH_HEIGHT_M = 0.016
_LOW_M = 0.04  # a tip below this pushes instead of approaching,
_BESIDE_LOW_M = 0.028  # this near to the block below this
_DOWN_M = 0.02  # and goes forward from about here on
# Distance behind the block's centre where the tip may go down.
_CORRIDOR_M = (0.03, 0.13)
_CORRIDOR_MARGIN_M = 0.03
_CORRIDOR_LEAST_M = 0.015
_CORRIDOR_ASIDE_M = 0.010
_BESIDE_OTHERS_M = 0.035  # between the tip and the centre of a block that is not meant
_PUSH_ASIDE_M = 0.035
_PUSH_SPEED_M_S = 0.12
_IN_LINE_M = 0.003  # beside the block's middle: up to here full speed forward,
_SLIP_ASIDE_M = 0.008  # from here on back, until this far behind:
_CLEAR_OF_BLOCK_M = 0.05
_CONTACT_M = 0.025  # from the block's centre to a tip that pushes it
_PUSH_BEYOND_M = 0.02


@dataclass(frozen=True)
class Style:
    """Style of an expert's motion, from good demonstrations to poor ones.

    `hover_m`: approach height over the target; `aim_m`: (2,) constant error of a touch's target (a
    push, which forgives less, is aimed well).
    """

    speed_m_s: float = 0.15
    hover_m: float = 0.07
    aim_m: tuple[float, float] = (0.0, 0.0)


def sample_style(rng: np.random.Generator) -> Style:
    """Draw one from quick and exact to slow and careless, the two independent."""
    careless = rng.uniform() < 0.4
    aim = rng.normal(0.0, 0.010 if careless else 0.001, size=2)
    speed = rng.uniform(0.07, 0.13) if rng.uniform() < 0.5 else rng.uniform(0.13, 0.20)
    return Style(speed, rng.uniform(0.06, 0.08), (float(aim[0]), float(aim[1])))


class Expert:
    """Plans on its own copy of the model, so planning never disturbs a running simulation."""

    def __init__(self) -> None:
        self._model = mujoco.MjModel.from_xml_path(str(MODEL_PATH))
        self._data = mujoco.MjData(self._model)
        joints = [self._model.joint(name) for name in JOINT_NAMES]
        # Slices, which need no copy, where the model has the joints one after the other.
        self._qpos = _places([joint.qposadr[0] for joint in joints])
        self._arm_dofs = _places([joint.dofadr[0] for joint in joints[:_ARM]])
        self._lower = np.array([joint.range[0] for joint in joints])
        self._upper = np.array([joint.range[1] for joint in joints])
        self._tip = self._model.site('tip').id
        self._jacobian = np.zeros((6, self._model.nv))
        # Rows: position, tilt, roll of the last arm joint.
        self._task_jacobian = np.zeros((7, _ARM))
        self._task_jacobian[6, _ARM - 1] = _UNROLL_WEIGHT_M
        self._error = np.zeros(7)
        self._diagonal = np.diag_indices(_ARM)

    def plan(
        self,
        joint_rad: np.ndarray,
        block_m: np.ndarray,
        goal: Goal,
        style: Style,
        steps: int = HORIZON,
    ) -> np.ndarray:
        """A chunk of setpoints from here towards the goal.

        `joint_rad` (6,) is measured; `block_m` (3, 3) centres lie still unless pushed. Returns
        (steps, 6) rad; row i is commanded i steps from now and reached one step (`STEP_TIME_S`)
        later.
        """
        joints = np.clip(joint_rad, self._lower, self._upper)
        # Lists: Python's floats are NumPy's numbers, computed several times as fast.
        blocks = np.asarray(block_m, dtype=np.float64).tolist()
        aimed = blocks[goal.block]
        others = [other for number, other in enumerate(blocks) if number != goal.block]
        if goal.side is None:
            aimed[:2] = [place + error for place, error in zip(aimed, style.aim_m, strict=False)]
        chunk = np.empty((steps, len(JOINT_NAMES)))
        tip = self.tip(joints).tolist()
        for i in range(steps):
            if goal.side is None:
                way = _way_to_touch(tip, aimed, style)
            else:
                way = _way_to_push(tip, aimed, others, SIDE_SIGN[goal.side], style)
            joints[:_ARM] += self._joint_step(joints, way)
            joints[_ARM] = max(joints[_ARM] - _GRIPPER_STEP_RAD, 0.0)
            self._limit(joints)
            chunk[i] = joints
            tip = self.tip(joints).tolist()
            if goal.side is not None:
                _carry_pushed(aimed, tip, SIDE_SIGN[goal.side])
        return chunk

    def reach(self, tip_m: np.ndarray, start_rad: np.ndarray, iterations: int = 60) -> np.ndarray:
        """Joints (6,) that bring the upright tip to a point, as near as the arm gets."""
        joints = np.array(start_rad, dtype=np.float64)
        for _ in range(iterations):
            joints[:_ARM] += self._joint_step(joints, tip_m - self.tip(joints))
            self._limit(joints)
        return joints

    def _limit(self, joints: np.ndarray) -> None:
        # `np.clip` in two steps, several times as fast on six numbers.
        np.maximum(joints, self._lower, out=joints)
        np.minimum(joints, self._upper, out=joints)

    def tip(self, joint_rad: np.ndarray) -> np.ndarray:
        """Return the position of the tip with these joints (6,): (3,) in metres."""
        self._data.qpos[self._qpos] = joint_rad
        mujoco.mj_kinematics(self._model, self._data)
        return self._data.site_xpos[self._tip].copy()

    def _joint_step(self, joints: np.ndarray, way: np.ndarray) -> np.ndarray:
        """Damped least squares at the model's configuration: (5,) rad for `way` metres."""
        mujoco.mj_comPos(self._model, self._data)
        full = self._jacobian
        mujoco.mj_jacSite(self._model, self._data, full[:3], full[3:], self._tip)
        jacobian, error = self._task_jacobian, self._error
        jacobian[:6] = full[:, self._arm_dofs]
        jacobian[3:6] *= _UPRIGHT_WEIGHT_M
        _, _, x, _, _, y, _, _, z = self._data.site_xmat[self._tip].tolist()
        error[:3] = way
        # Rotation that brings the tool's axis to straight down: axis x (0, 0, -1), at most a
        # tenth of a radian at a time so that the tip's path comes first.
        about_x, about_y = -y, x
        if z > 0:
            length = max(float(np.hypot(about_x, about_y)), 1e-6)
            about_x, about_y = about_x / length, about_y / length
        least = min(1.0, 0.1 / max(float(np.hypot(about_x, about_y)), 1e-9))
        error[3] = _UPRIGHT_WEIGHT_M * about_x * least
        error[4] = _UPRIGHT_WEIGHT_M * about_y * least
        error[6] = _UNROLL_WEIGHT_M * min(max(-float(joints[_ARM - 1]), -0.1), 0.1)
        square = jacobian.T @ jacobian
        square[self._diagonal] += _DAMPING**2
        step = np.linalg.solve(square, jacobian.T @ error)
        longest = max(map(abs, step.tolist()))
        return step * min(1.0, _LONGEST_JOINT_STEP_RAD / max(longest, 1e-9))


def _places(numbers: list[int]) -> slice | np.ndarray:
    first = numbers[0]
    if numbers == [*range(first, first + len(numbers))]:
        return slice(first, first + len(numbers))
    return np.array(numbers)


# A point in metres.
Point = list[float]


def _way_to_touch(tip: Point, block: Point, style: Style) -> np.ndarray:
    height = block[2] + BLOCK_HALF_SIZE_M + _TOUCH_GAP_M
    away = float(np.hypot(block[0] - tip[0], block[1] - tip[1])) - _FUNNEL_FOOT_M
    return _approach(tip, [block[0], block[1], height], away, style)


def _way_to_push(
    tip: Point, block: Point, others: list[Point], sign: float, style: Style
) -> np.ndarray:
    """Down anywhere in the corridor behind the block, and through it until beyond the stripe."""
    if sign * block[1] >= EDGE_M + _PUSH_BEYOND_M:
        rest = block[2] + BLOCK_HALF_SIZE_M + style.hover_m
        return _limited([0.0, 0.0, rest - tip[2]], style.speed_m_s)
    behind = sign * (block[1] - tip[1])
    aside = abs(block[0] - tip[0])
    # Over the block itself a tip at its top is not behind it: it goes back up, and down again.
    low = _LOW_M if behind > _CORRIDOR_M[0] else _BESIDE_LOW_M
    if tip[2] < low and 0.0 < behind < _CORRIDOR_M[1] + 0.02 and aside < _PUSH_ASIDE_M:
        return _way_along(tip, block, sign, style)
    near, far = _CORRIDOR_M
    for other in others:
        gap = sign * (block[1] - other[1])
        if gap > 0.0 and abs(other[0] - block[0]) < _BESIDE_OTHERS_M:
            far = min(far, gap - _BESIDE_OTHERS_M)
    far = max(far, near + _CORRIDOR_LEAST_M)
    # Aims well inside it, and goes down once over it.
    margin = min(_CORRIDOR_MARGIN_M, (far - near) / 2)
    enter = min(max(behind, near + margin), far - margin)
    entry = [block[0], block[1] - sign * enter, _PUSH_HEIGHT_M]
    before = max(near - behind, behind - far, 0.0)
    away = float(np.hypot(max(aside - _CORRIDOR_ASIDE_M, 0.0), before))
    return _approach(tip, entry, away, style)


def _way_along(tip: Point, block: Point, sign: float, style: Style) -> np.ndarray:
    """Low behind the block: forward while in line, back while beside it, lest it turn and slip."""
    behind = sign * (block[1] - tip[1])
    aside = abs(block[0] - tip[0])
    forward = min(max((_SLIP_ASIDE_M - aside) / (_SLIP_ASIDE_M - _IN_LINE_M), -1.0), 1.0)
    if forward > 0.0:
        forward *= min(max((_DOWN_M + 0.01 - tip[2]) / 0.01, 0.0), 1.0)
    else:
        forward *= min(max((_CLEAR_OF_BLOCK_M - behind) / 0.01, 0.0), 1.0)
    way = [block[0] - tip[0], sign * 0.03 * forward, _PUSH_HEIGHT_M - tip[2]]
    return _limited(way, min(style.speed_m_s, _PUSH_SPEED_M_S))


def _approach(tip: Point, target: Point, away: float, style: Style) -> np.ndarray:
    """One step's way of the tip: up, over and down a funnel to the target."""
    clear = BLOCK_HALF_SIZE_M * 2 + style.hover_m
    z = target[2] + (clear - target[2]) * min(max(away / _FUNNEL_M, 0.0), 1.0)
    up = z - tip[2]
    # Rise before going sideways, so as not to sweep what stands in between.
    low = (up - 0.02) / 0.03
    aside = min(max(1.0 - low, 0.05), 1.0)
    way = [(target[0] - tip[0]) * aside, (target[1] - tip[1]) * aside, up]
    return _limited(way, style.speed_m_s)


def _limited(way: Point, speed_m_s: float) -> np.ndarray:
    longest, whole = speed_m_s * STEP_TIME_S, np.array(way)
    return whole * min(1.0, longest / max(math.sqrt(whole.dot(whole)), 1e-9))


def _carry_pushed(block: Point, tip: Point, sign: float) -> None:
    """Foresee that a block the tip runs into goes along with it."""
    near = abs(block[0] - tip[0]) < 0.012 and tip[2] < BLOCK_HALF_SIZE_M * 2
    if near and 0 < sign * (block[1] - tip[1]) < _CONTACT_M:
        block[1] = tip[1] + sign * _CONTACT_M
