"""Meta-World (arXiv 1910.10897) as a robot: velocities and a gripper in, state and images out.

The environment moves its end effector by up to 1 cm a tick of 12.5 ms. Here the first three
actions are velocities in m/s, the fourth closes the gripper. Everything random is a function of
task and seed.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from vla_tabletop.metaworld.tasks import CAMERAS, FIELDS_OF_VIEW_DEG, TaskName
from vla_tabletop.sim.gl import mujoco

TICK_S = 0.0125
STEP_TICKS = 2  # of a policy's step
STEP_TIME_S = TICK_S * STEP_TICKS
IMAGE_SIZE = 64
STATE_NAMES = ('hand_x', 'hand_y', 'hand_z', 'gripper_opening')
ACTION_NAMES = ('hand_x_velocity', 'hand_y_velocity', 'hand_z_velocity', 'gripper')
__all__ = ['CAMERAS', 'Expert', 'Simulator']

# Speed of an action of 1.
FULL_SPEED_M_S = 0.01 / TICK_S
POINTS = ('object', 'goal')
_GOAL = slice(36, 39)
_OBJECT = slice(4, 7)


class Simulator:
    """One task at a time; each task gets a new renderer.

    Attributes:
        observation: (39,) the environment's own, now.
        success: the environment has said so since the reset.
        time_s: simulated time since the reset.
    """

    def __init__(self) -> None:
        self._environments: dict[TaskName, Any] = {}
        self._renderer: mujoco.Renderer | None = None
        self._rendered: TaskName | None = None
        self.task: TaskName = 'reach'
        self.observation = np.zeros(39)
        self.success = False
        self.time_s = 0.0

    def reset(self, task: TaskName, seed: int) -> None:
        """Begin the episode that a task and a seed stand for."""
        self.task = task
        environment = self._environment()
        environment.seed(seed)
        environment.reset()
        # It moves pieces and goal after its own last look: what it returns is the scene before.
        mujoco.mj_forward(environment.model, environment.data)
        # An observation holds the one before it: the second has this scene in both halves.
        environment._get_obs()
        self.observation = environment._get_obs()
        self.success, self.time_s = False, 0.0

    def step(self, command: np.ndarray) -> None:
        """Advance one tick.

        `command` is (4,) in the order of `ACTION_NAMES`: m/s, and the gripper in [-1, 1], cut to
        the environment's limits.
        """
        action = np.array(command, dtype=np.float64)
        action[:3] /= FULL_SPEED_M_S
        environment = self._environment()
        # What it checks is whether the episode is over; here that is the judge's decision.
        environment.curr_path_length = 0
        self.observation, _, _, _, facts = environment.step(np.clip(action, -1.0, 1.0))
        self.success = self.success or facts['success'] > 0.5
        self.time_s += TICK_S

    @property
    def state(self) -> np.ndarray:
        """(4,) measured, in the order of `STATE_NAMES`: m, and the opening in 0 to 1."""
        return self.observation[:4].copy()

    @property
    def points_m(self) -> np.ndarray:
        """(2, 3) positions of object and goal, which no robot knows."""
        return np.stack([self.observation[_OBJECT], self.observation[_GOAL]])

    def render(self, camera: str, size: int = IMAGE_SIZE) -> np.ndarray:
        """Render a camera: uint8 (size, size, 3), RGB."""
        environment = self._environment()
        if self._renderer is None or self._rendered != self.task or self._renderer.height != size:
            self.close()
            self._renderer, self._rendered = _renderer(environment.model, size), self.task
        self._renderer.update_scene(environment.data, camera)
        return self._renderer.render()

    def project(self, camera: str) -> np.ndarray:
        """Return object and goal, (2, 2), right and down in [-1, 1]; NaN behind the camera."""
        environment = self._environment()
        index = environment.model.camera(camera).id
        axes = environment.data.cam_xmat[index].reshape(3, 3)
        local = (self.points_m - environment.data.cam_xpos[index]) @ axes
        depth = np.where(local[:, 2] < -1e-6, -local[:, 2], np.nan)
        scale = np.tan(np.deg2rad(environment.model.cam_fovy[index]) / 2)
        return np.stack([local[:, 0], -local[:, 1]], axis=1) / (depth * scale)[:, None]

    def model(self) -> mujoco.MjModel:
        """The task's model; changes of it last until this object is gone."""
        return self._environment().model

    def data(self) -> mujoco.MjData:
        return self._environment().data

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def _environment(self) -> Any:
        if self.task not in self._environments:
            self._environments[self.task] = _make(self.task)
        return self._environments[self.task]


def _make(task: TaskName) -> Any:
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    environment = ALL_V3_ENVIRONMENTS[f'{task}-v3']()
    # The scripted experts read the goal off the observation; a new scene is drawn at each reset.
    environment._partially_observable = False
    environment.__dict__.pop('sawyer_observation_space', None)
    environment._freeze_rand_vec = False
    # Else it draws from NumPy's global generator, whatever the seed.
    environment.seeded_rand_vec = True
    environment._set_task_called = True
    for camera, field_of_view in FIELDS_OF_VIEW_DEG.items():
        environment.model.cam_fovy[environment.model.camera(camera).id] = field_of_view
    return environment


def _renderer(model: mujoco.MjModel, size: int) -> mujoco.Renderer:
    # Shadows and multisampling are most of what a frame costs: 24 ms of 30.
    buffer = model.vis.global_
    buffer.offwidth = buffer.offheight = size
    model.vis.quality.offsamples = 0
    renderer = mujoco.Renderer(model, height=size, width=size)
    for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
        renderer.scene.flags[flag] = False
    return renderer


class Expert:
    """Meta-World's scripted policies: (4,) commands from the present observation."""

    def __init__(self, task: TaskName) -> None:
        from metaworld.policies import ENV_POLICY_MAP

        self._policy = ENV_POLICY_MAP[f'{task}-v3']()

    def command(self, simulator: Simulator) -> np.ndarray:
        """Return the command of this tick, in the units of `Simulator.step`."""
        with warnings.catch_warnings():
            # Their gains are meant to be clipped.
            warnings.simplefilter('ignore')
            action = np.clip(self._policy.get_action(simulator.observation), -1.0, 1.0)
        action[:3] *= FULL_SPEED_M_S
        return np.asarray(action, dtype=np.float64)
