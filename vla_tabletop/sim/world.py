"""The tabletop robot: set joint positions in, joint states and camera images out.

Everything random is in the `Scene`: the same seed and commands give bit-identical states and
images. A world belongs to one thread (its rendering context does) and renders only when asked.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np

from vla_tabletop.sim.arm import JOINT_NAMES, MODEL_PATH
from vla_tabletop.sim.gl import mujoco
from vla_tabletop.sim.scene import (
    BELT_HIGH_M,
    BELT_LOW_M,
    BLOCK_HALF_SIZE_M,
    CAMERAS,
    COLOURS,
    Scene,
    Variant,
    sample_scene,
)
from vla_tabletop.sim.urdf import tabletop_urdf


@dataclass(frozen=True)
class TabletopState:
    """State of the simulator; a real robot measures only the joints.

    Attributes:
        time_s: simulated, since reset.
        joint_rad: (6,) positions in the order of `JOINT_NAMES`.
        joint_rad_s: (6,) velocities.
        tip_m: (3,) the point between the jaws' ends.
        block_m: (3, 3) centres of the blocks in the order of `COLOURS`.
    """

    time_s: float
    joint_rad: np.ndarray
    joint_rad_s: np.ndarray
    tip_m: np.ndarray
    block_m: np.ndarray


class Tabletop:
    """The simulated arm, table, blocks and cameras.

    `control_rate_hz`: simulated rate of `step`; the physics' 200 Hz must be a multiple of it.
    """

    joint_names = JOINT_NAMES
    cameras = CAMERAS
    colours = COLOURS

    def __init__(self, control_rate_hz: float = 100.0) -> None:
        self._model = mujoco.MjModel.from_xml_path(str(MODEL_PATH))
        self._nominal = mujoco.MjModel.from_xml_path(str(MODEL_PATH))
        self._data = mujoco.MjData(self._model)
        substeps = 1.0 / (control_rate_hz * self._model.opt.timestep)
        if substeps < 1 or abs(substeps - round(substeps)) > 1e-9:
            raise ValueError(
                f'control_rate_hz {control_rate_hz}: the physics runs at '
                f'{1 / self._model.opt.timestep:.0f} Hz, which must be a multiple of it'
            )
        self._substeps = round(substeps)
        self.control_period_s = 1.0 / control_rate_hz
        joints = [self._model.joint(name) for name in JOINT_NAMES]
        self._qpos = np.array([joint.qposadr[0] for joint in joints])
        self._qvel = np.array([joint.dofadr[0] for joint in joints])
        self.lower_rad = np.array([joint.range[0] for joint in joints])
        self.upper_rad = np.array([joint.range[1] for joint in joints])
        blocks = [self._model.joint(f'{colour}_block') for colour in COLOURS]
        self._block_qpos = np.array([block.qposadr[0] for block in blocks])
        self._block_qvel = np.array([block.dofadr[0] for block in blocks])
        self._block_body = np.array([self._model.body(f'{c}_block').id for c in COLOURS])
        self._tip = self._model.site('tip').id
        self._renderers: dict[tuple[int, int], mujoco.Renderer] = {}
        # GL objects freed at interpreter exit crash inside PyOpenGL; free them before.
        self._finalizer = weakref.finalize(self, _close_all, self._renderers)
        self._belt_sign = 1.0
        self.scene: Scene
        self.reset(0)

    def reset(self, seed: int, variant: Variant = 'still') -> TabletopState:
        """Start the episode that `seed` and `variant` stand for."""
        return self.load(sample_scene(seed, variant))

    def load(self, scene: Scene) -> TabletopState:
        """Start an episode with this scene."""
        self.scene = scene
        self._belt_sign = 1.0
        mujoco.mj_resetData(self._model, self._data)
        qpos = self._data.qpos
        qpos[self._qpos] = np.clip(scene.start_rad, self.lower_rad, self.upper_rad)
        self._data.ctrl[:] = qpos[self._qpos]
        for address, xy, yaw in zip(
            self._block_qpos, scene.block_xy_m, scene.block_yaw_rad, strict=True
        ):
            qpos[address : address + 2] = xy
            qpos[address + 2] = BLOCK_HALF_SIZE_M
            qpos[address + 3 : address + 7] = [np.cos(yaw / 2), 0, 0, np.sin(yaw / 2)]
        self._light_scene(scene)
        self._place_cameras(scene)
        mujoco.mj_forward(self._model, self._data)
        return self.state()

    def urdf(self) -> str:
        """Return the arm and the table as a URDF, for programs that show robots."""
        return tabletop_urdf(self._nominal)

    def step(self, command_rad: np.ndarray) -> None:
        """Hold these position setpoints for one control period.

        `command_rad` is (6,) in the order of `JOINT_NAMES`; servos stop at the joint limits.
        Raises ValueError: wrong size or not finite.
        """
        command = np.asarray(command_rad, dtype=np.float64)
        if command.shape != (len(JOINT_NAMES),) or not np.all(np.isfinite(command)):
            raise ValueError(
                f'command {command_rad!r}: expected {len(JOINT_NAMES)} finite positions in rad '
                f'for {", ".join(JOINT_NAMES)}'
            )
        self._data.ctrl[:] = np.clip(command, self.lower_rad, self.upper_rad)
        if self._blocks_are_carried():
            for _ in range(self._substeps):
                self._carry_blocks()
                mujoco.mj_step(self._model, self._data)
        else:
            mujoco.mj_step(self._model, self._data, self._substeps)

    def state(self) -> TabletopState:
        """A copy of the state now."""
        # mj_step leaves positions of bodies and sites one substep behind the joints.
        mujoco.mj_kinematics(self._model, self._data)
        return TabletopState(
            time_s=self.sim_time_s,
            joint_rad=self.joint_positions,
            joint_rad_s=self.joint_velocities,
            tip_m=self._data.site_xpos[self._tip].copy(),
            block_m=self._data.xpos[self._block_body].copy(),
        )

    @property
    def sim_time_s(self) -> float:
        return float(self._data.time)

    @property
    def joint_positions(self) -> np.ndarray:
        """(6,) measured positions in rad."""
        return self._data.qpos[self._qpos].copy()

    @property
    def joint_velocities(self) -> np.ndarray:
        """(6,) measured velocities in rad/s."""
        return self._data.qvel[self._qvel].copy()

    def render(self, camera: str, width: int = 320, height: int = 240) -> np.ndarray:
        """Render a camera: uint8 (height, width, 3), RGB; ValueError: unknown camera."""
        if camera not in CAMERAS:
            raise ValueError(f'camera {camera!r} is unknown; the tabletop has {", ".join(CAMERAS)}')
        renderer = self._renderers.get((width, height))
        if renderer is None:
            renderer = self._renderers[width, height] = self._make_renderer(width, height)
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_camlight(self._model, self._data)
        renderer.update_scene(self._data, camera)
        return renderer.render()

    def configuration(self) -> np.ndarray:
        """A copy of all positions, joints and blocks, for `show`."""
        return self._data.qpos.copy()

    def show(self, configuration: np.ndarray) -> None:
        """Put everything where it is in another world, to be rendered; nothing is simulated."""
        self._data.qpos[:] = configuration

    def project(self, camera: str, points_m: np.ndarray) -> np.ndarray:
        """Project points (n, 3) to (n, 2), right and down: NaN behind, height in [-1, 1]."""
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_camlight(self._model, self._data)
        index = self._model.camera(camera).id
        axes = self._data.cam_xmat[index].reshape(3, 3)
        local = (np.asarray(points_m) - self._data.cam_xpos[index]) @ axes
        depth = np.where(local[:, 2] < -1e-6, -local[:, 2], np.nan)
        scale = np.tan(np.deg2rad(self._model.cam_fovy[index]) / 2)
        return np.stack([local[:, 0], -local[:, 1]], axis=1) / (depth * scale)[:, None]

    def close(self) -> None:
        self._finalizer()

    def _make_renderer(self, width: int, height: int) -> mujoco.Renderer:
        # A frame is cleared and read back at the buffer's size: keep it as small as the image.
        buffer = self._model.vis.global_
        buffer.offwidth, buffer.offheight = width, height
        renderer = mujoco.Renderer(self._model, height=height, width=width, max_geom=64)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            renderer.scene.flags[flag] = False
        return renderer

    def _blocks_are_carried(self) -> bool:
        shove = self.scene.shove
        shoved = (
            shove is not None
            and shove.start_s - self.control_period_s
            <= self._data.time
            <= shove.start_s + shove.duration_s + self.control_period_s
        )
        return shoved or bool(np.any(self.scene.belt_m_s))

    def _carry_blocks(self) -> None:
        """Give the blocks the velocity of the belt or the shove for one physics step."""
        scene = self.scene
        velocity = np.zeros((len(COLOURS), 2))
        if np.any(scene.belt_m_s):
            xy = self._data.qpos[self._block_qpos[:, None] + np.arange(2)]
            way = self._belt_sign * scene.belt_m_s
            if np.any((xy > BELT_HIGH_M) & (way > 0)) or np.any((xy < BELT_LOW_M) & (way < 0)):
                self._belt_sign = -self._belt_sign
            velocity += self._belt_sign * scene.belt_m_s
        shove = scene.shove
        if shove is not None and 0 <= self._data.time - shove.start_s < shove.duration_s:
            velocity += shove.displacement_m / shove.duration_s
        self._data.qvel[self._block_qvel[:, None] + np.arange(2)] = velocity
        self._data.qvel[self._block_qvel[:, None] + np.arange(3, 6)] = 0.0

    def _light_scene(self, scene: Scene) -> None:
        model, nominal, light = self._model, self._nominal, scene.lighting
        lamp, table = model.light('lamp').id, model.geom('table').id
        if light is None:
            model.light_dir[lamp] = nominal.light_dir[lamp]
            model.light_diffuse[lamp] = nominal.light_diffuse[lamp]
            model.vis.headlight.ambient[:] = nominal.vis.headlight.ambient
            model.geom_rgba[table] = nominal.geom_rgba[table]
        else:
            model.light_dir[lamp] = light.lamp_direction / np.linalg.norm(light.lamp_direction)
            model.light_diffuse[lamp] = light.lamp_diffuse
            model.vis.headlight.ambient[:] = light.ambient
            model.geom_rgba[table, :3] = light.table_rgb

    def _place_cameras(self, scene: Scene) -> None:
        model, nominal = self._model, self._nominal
        for camera in CAMERAS:
            index = model.camera(camera).id
            model.cam_pos[index] = nominal.cam_pos[index]
            model.cam_quat[index] = nominal.cam_quat[index]
            offset = scene.camera_offsets.get(camera)
            if offset is not None:
                model.cam_pos[index] += offset.shift_m
                mujoco.mju_quatIntegrate(model.cam_quat[index], offset.rotation_rad, 1.0)


def _close_all(renderers: dict[tuple[int, int], mujoco.Renderer]) -> None:
    while renderers:
        renderers.popitem()[1].close()
