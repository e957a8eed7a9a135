"""Meta-World as a study's world; success is as the environment judges it."""

from __future__ import annotations

import numpy as np

from vla_runtime.execution.columns import Column
from vla_runtime.execution.limits import Limits
from vla_runtime.types import Observation
from vla_tabletop.metaworld.simulator import (
    ACTION_NAMES,
    CAMERAS,
    STEP_TIME_S,
    TICK_S,
    Simulator,
)
from vla_tabletop.metaworld.tasks import TASKS, TaskName, sample_instruction
from vla_tabletop.sim.gl import mujoco
from vla_tabletop.sim.tasks import Outcome
from vla_tabletop.study.condition import Condition
from vla_tabletop.study.world import Asked

# As Meta-World's own evaluation and LeRobot's; experts need 1 to 1.5 s.
TIME_LIMIT_S = 500 * TICK_S
# Of `camera_jitter`, each camera and axis; and of `lighting`, the factor on every colour.
_CAMERA_SHIFT_M = 0.02
_DARKEST, _BRIGHTEST = 0.6, 1.2


class MetaWorld(Simulator):
    """The eight tasks with the scenes, wordings and cameras of a condition."""

    step_time_s = STEP_TIME_S
    tick_s = TICK_S
    # Velocities of the end effector hold at zero. The gripper's command is no position of it: how
    # far it opens is measured in other units, in the state alone.
    columns = (
        *(Column(name, 'velocity', feedback=False) for name in ACTION_NAMES[:3]),
        Column(ACTION_NAMES[3], feedback=False),
    )
    limits: Limits | None = None

    def __init__(self) -> None:
        super().__init__()
        self._nominal: dict[TaskName, tuple[np.ndarray, ...]] = {}

    def begin(self, condition: Condition, seed: int, index: int, sees: bool) -> Asked:
        """Begin the episode that a seed stands for."""
        family = condition.families[index % len(condition.families)]
        task = TASKS[[str(name) for name in TASKS].index(family)]
        rng = np.random.default_rng([seed, 100])
        self.reset(task, int(rng.integers(2**31)))
        instruction = sample_instruction(task, condition.wording, rng)
        self._dress(task, condition.variant, rng)
        return Asked(instruction, family, 0)

    def measured(self) -> np.ndarray:
        """(4,) at rest with the gripper open: no column has feedback."""
        return np.array([0.0, 0.0, 0.0, -1.0])

    def proprioception(self) -> np.ndarray:
        """(4,) in the order of `STATE_NAMES`."""
        return self.state

    def observe(self, instruction: str) -> Observation:
        """The present images and state."""
        now_ns = round(self.time_s * 1e9)
        return Observation(
            images={camera: self.render(camera) for camera in CAMERAS},
            state=self.state,
            instruction=instruction,
            stamps_ns={**dict.fromkeys(CAMERAS, now_ns), 'state': now_ns},
        )

    def judge(self) -> Outcome | None:
        """The environment's own verdict, or the end of the time."""
        if self.success:
            return Outcome('success', self.time_s, 0)
        if self.time_s >= TIME_LIMIT_S - TICK_S / 2:
            return Outcome('timeout', self.time_s, None)
        return None

    def _dress(self, task: TaskName, variant: str, rng: np.random.Generator) -> None:
        """Shift the cameras or recolour everything, from how the task comes."""
        model = self.model()
        nominal = self._nominal.setdefault(
            task, tuple(one.copy() for one in (model.cam_pos, *_colours(model)))
        )
        for now, then in zip((model.cam_pos, *_colours(model)), nominal, strict=True):
            now[:] = then
        if variant == 'camera_jitter':
            for camera in CAMERAS:
                shift = rng.uniform(-_CAMERA_SHIFT_M, _CAMERA_SHIFT_M, size=3)
                model.cam_pos[model.camera(camera).id] += shift
        elif variant == 'lighting':
            tint = rng.uniform(_DARKEST, _BRIGHTEST, size=3)
            for colours in _colours(model):
                colours[:, :3] = np.clip(colours[:, :3] * tint, 0.0, 1.0)
        mujoco.mj_forward(model, self.data())


def _colours(model: mujoco.MjModel) -> tuple[np.ndarray, ...]:
    """Every colour of a scene; the balls that show goals are sites."""
    return model.mat_rgba, model.geom_rgba, model.site_rgba
