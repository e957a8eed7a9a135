"""The tabletop as a study's world."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np

from vla_runtime.execution.columns import Column
from vla_runtime.execution.limits import ColumnLimits, Limits, make_limits
from vla_runtime.types import Observation
from vla_tabletop.sim.closed_loop import observe
from vla_tabletop.sim.expert import STEP_TIME_S
from vla_tabletop.sim.scene import Variant, sample_scene
from vla_tabletop.sim.tasks import Family, Judge, Outcome, sample_task
from vla_tabletop.sim.world import Tabletop
from vla_tabletop.study.condition import Condition
from vla_tabletop.study.world import Asked
from vla_tabletop.training.dataset import IMAGE_HEIGHT, IMAGE_WIDTH

# --- Wrist camera with another frame rate than the front camera, as on real robots


_CAMERA = 'wrist'


class SlowWrist:
    """Keeps the wrist camera's frame for a period, the first at time 0."""

    def __init__(self, world: Tabletop, period_ns: int) -> None:
        self._world, self._period_ns = world, period_ns
        self._frame: np.ndarray | None = None
        self._stamp_ns = 0

    def tick(self, elapsed_ns: int) -> None:
        """Take a frame if one is due; call at every tick of the world, before `put_into`."""
        if elapsed_ns % self._period_ns == 0:
            self._frame = self._world.render(_CAMERA, IMAGE_WIDTH, IMAGE_HEIGHT)
            self._stamp_ns = round(self._world.sim_time_s * 1e9)

    def put_into(self, observation: Observation) -> Observation:
        """The observation with the latest frame and its stamp instead of the wrist camera now."""
        return replace(
            observation,
            images={**observation.images, _CAMERA: self._frame},
            stamps_ns={**observation.stamps_ns, _CAMERA: self._stamp_ns},
        )


# --------------------------------------------------------------------------------------------------

CONTROL_RATE_HZ = 100.0


class TabletopWorld(Tabletop):
    """The tabletop with the scenes, tasks and cameras of a condition."""

    step_time_s = STEP_TIME_S

    def __init__(self) -> None:
        super().__init__(CONTROL_RATE_HZ)
        self.tick_s = self.control_period_s
        self.columns = tuple(Column(name) for name in self.joint_names)
        self.limits: Limits | None = make_limits(
            self.joint_names,
            {
                name: ColumnLimits(lower=float(lower), upper=float(upper))
                for name, lower, upper in zip(
                    self.joint_names, self.lower_rad, self.upper_rad, strict=True
                )
            },
        )
        self._judge: Judge | None = None
        self._wrist: SlowWrist | None = None
        self._ticks = 0

    def begin(self, condition: Condition, seed: int, index: int, sees: bool) -> Asked:
        """Begin the episode that a seed stands for."""
        # `Condition` has checked the words.
        scene = sample_scene(seed, cast('Variant', condition.variant))
        state = self.load(replace(scene, belt_m_s=scene.belt_m_s * condition.belt_speed))
        family = cast('Family', condition.families[index % len(condition.families)])
        rng = np.random.default_rng([seed, 100])
        task = sample_task(rng, state.block_m, family, condition.wording, condition.colours)
        self._judge, self._ticks, self._wrist = Judge(task, self.sim_time_s), 0, None
        if condition.wrist_every > 1 and sees:
            self._wrist = SlowWrist(self, condition.wrist_every * round(STEP_TIME_S * 1e9))
            self._wrist.tick(0)
        return Asked(task.instruction, family, task.goal.block)

    def measured(self) -> np.ndarray:
        """(6,) joint positions in rad."""
        return self.joint_positions

    def proprioception(self) -> np.ndarray:
        """(6,) joint positions in rad."""
        return self.joint_positions

    def observe(self, instruction: str) -> Observation:
        """The present images, but for a slow wrist camera's."""
        observation = observe(self, instruction)
        return observation if self._wrist is None else self._wrist.put_into(observation)

    def step(self, command_rad: np.ndarray) -> None:
        """Advance one tick, at whose end a slow camera may take a frame."""
        super().step(command_rad)
        self._ticks += 1
        if self._wrist is not None:
            self._wrist.tick(self._ticks * round(self.tick_s * 1e9))

    def judge(self) -> Outcome | None:
        """The outcome if the episode ended with this tick."""
        assert self._judge is not None
        return self._judge.judge(self.state())
