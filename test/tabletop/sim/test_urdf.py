"""The tabletop's URDF puts its tip where the simulator has it."""

from __future__ import annotations

import numpy as np
import pytest

from vla_runtime.execution.urdf import read_urdf_limits
from vla_tabletop.sim.arm import JOINT_NAMES, joint_ranges_rad
from vla_tabletop.sim.world import Tabletop

pytest.importorskip('yourdfpy', reason='viser and yourdfpy are the extra view')


def test_the_tip_is_where_the_simulator_has_it() -> None:
    from vla_tools.view.shape import RobotShape

    world = Tabletop()
    shape = RobotShape(world.urdf(), None, JOINT_NAMES)
    assert shape.tips == ('tip',) and set(shape.joints) == set(JOINT_NAMES)
    for seed in range(5):
        state = world.reset(seed)
        joints = {
            name: np.array([value])
            for name, value in zip(JOINT_NAMES, state.joint_rad, strict=True)
        }
        np.testing.assert_allclose(shape.positions('tip', joints)[0], state.tip_m, atol=1e-6)


def test_its_limits_are_those_of_the_model() -> None:
    found = read_urdf_limits(Tabletop().urdf())
    ranges = {name: (one.limits.lower, one.limits.upper) for name, one in found.items()}
    assert ranges == joint_ranges_rad()
