"""Predicted positions against measured ones, by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vla_runtime.robot.file import load_robot
from vla_runtime.types import ActionChunk
from vla_tools.replay.motion import RecordedMotion, open_loop_error

STEP_NS = 100_000_000
ROBOT = """
format: 1
name: turning
joints:
  - {name: wheel, unit: rad, continuous: true, velocity: 10.0}
cameras:
  - {name: top, topic: top/image}
joint_states:
  - {topic: joint_states}
outputs:
  - {kind: joint_trajectory, topic: arm/joint_trajectory, joints: [wheel]}
"""


@pytest.mark.parametrize('turns', [0, 1, -3])
def test_whole_turns_of_a_continuous_joint_are_no_error(tmp_path: Path, turns: int) -> None:
    (tmp_path / 'robot.yaml').write_text(ROBOT)
    angles = np.pi - 0.25 + 0.1 * np.arange(11)
    motion = RecordedMotion()
    for index, angle in enumerate(angles):
        # As a driver wraps it, between -pi and pi.
        motion.add('wheel', index * STEP_NS, float(np.arctan2(np.sin(angle), np.cos(angle))))
    # Half a step later than the measured ones, and 0.05 rad off.
    ahead = angles[:8, None] + 0.1 + 2.0 * np.pi * turns
    chunk = ActionChunk(ahead, ('wheel',), ('position',), STEP_NS * 1e-9, ahead)
    error = open_loop_error([(STEP_NS // 2, chunk)], motion, load_robot(tmp_path / 'robot.yaml'))
    np.testing.assert_allclose(error.largest, 0.05, atol=1e-9)
    np.testing.assert_allclose(error.still[:, 0], 0.1 * np.arange(8), atol=1e-9)
