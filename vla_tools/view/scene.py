"""The robot in three dimensions, on a port of this machine that the page shows (viser).

The robot stands as it was measured, with the end of the committed plan as a ghost, the plan's path
and those of the newest chunks.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import rich
import viser
from viser.extras import ViserUrdf

from vla_tools.view.shape import RobotShape
from vla_tools.view.wire import Motion

BLUE, ORANGE = (31, 111, 139), (224, 159, 62)
_GHOST = (0.12, 0.44, 0.55, 0.35)
_WIDTH_PX = 3.0
# From where the robot is looked at first, in its reach.
_EYE, _CENTRE = np.array([1.5, -1.2, 0.9]), np.array([0.25, 0.0, 0.3])


class RobotScene:
    """A scene with one robot; one thread calls `show`.

    Args:
        factors: of joint positions to the URDF's units, by name in messages.
    """

    def __init__(self, shape: RobotShape, factors: Mapping[str, float]) -> None:
        self._shape, self._factors = shape, factors
        # It prints its own address, which is not the page's.
        rich.get_console().quiet = True
        self._server = viser.ViserServer(host='127.0.0.1', port=_free_port(), verbose=False)
        # A browser may ask it to publish the scene by a server on the internet.
        self._server.request_share_url = lambda verbose=True: None  # type: ignore[method-assign]
        self._server.gui.configure_theme(show_logo=False, show_share_button=False)
        self.port = self._server.get_port()
        scene = self._server.scene
        scene.set_up_direction('+z')
        base, reach_m = shape.base, shape.reach_m
        scene.add_grid(
            '/grid',
            width=6 * reach_m,
            height=6 * reach_m,
            cell_size=0.1,
            cell_color=(230, 230, 233),
            section_color=(205, 205, 210),
            position=(0.0, 0.0, -0.002),
        )
        self._robot = ViserUrdf(self._server, shape.urdf, root_node_name='/robot')
        self._ghost = ViserUrdf(
            self._server, shape.moving, root_node_name='/plan', mesh_color_override=_GHOST
        )
        self._ghost_root = scene.add_frame('/plan', show_axes=False, visible=False)
        self._plan: Motion | None = None
        self._chunks: tuple[Motion, ...] = ()
        self._measured: dict[str, float] = {}
        self._server.initial_camera.look_at = tuple(base + reach_m * _CENTRE)
        self._server.initial_camera.position = tuple(base + reach_m * _EYE)

    def close(self) -> None:
        self._server.stop()

    def show(
        self, measured: Mapping[str, float], plan: Motion | None, chunks: Sequence[Motion]
    ) -> None:
        """Show this; what has not changed costs nothing."""
        with self._server.atomic():
            if measured != self._measured:
                self._measured = dict(measured)
                self._robot.update_cfg(self._configuration(measured))
            if plan is not self._plan:
                self._plan = plan
                self._show_plan(measured, plan)
            if [*map(id, chunks)] != [*map(id, self._chunks)]:
                self._chunks = tuple(chunks)
                self._show_chunks(measured)

    def _show_plan(self, measured: Mapping[str, float], plan: Motion | None) -> None:
        ends = {} if plan is None else columns(plan)
        self._ghost_root.visible = bool(ends)
        if not ends or plan is None:
            self._draw('/plan_path', [], BLUE)
            return
        end = {name: float(rows[-1]) for name, rows in ends.items()}
        self._ghost.update_cfg(self._configuration({**measured, **end}))
        self._draw('/plan_path', self.paths(measured, plan), BLUE)

    def _show_chunks(self, measured: Mapping[str, float]) -> None:
        for ago, chunk in enumerate(reversed(self._chunks)):
            fresh = 1.0 / (1 + ago)
            red, green, blue = (round(255 - (255 - one) * fresh) for one in ORANGE)
            self._draw(f'/chunks/{ago}', self.paths(measured, chunk), (red, green, blue))

    def paths(self, measured: Mapping[str, float], motion: Motion) -> list[np.ndarray]:
        """Return the way of each end effector along a motion, (n, 3) in m."""
        return tip_paths(self._shape, self._factors, measured, motion)

    def _draw(self, name: str, paths: Iterable[np.ndarray], colour: tuple[int, int, int]) -> None:
        pairs = [np.stack([path[:-1], path[1:]], axis=1) for path in paths if len(path) > 1]
        points = np.concatenate(pairs) if pairs else np.zeros((1, 2, 3))
        self._server.scene.add_line_segments(
            name,
            points.astype(np.float32),
            colour,
            thickness=_WIDTH_PX,
            thickness_units='screen',
            visible=bool(pairs),
        )

    def _configuration(self, joints: Mapping[str, float]) -> np.ndarray:
        return np.array(
            [
                joints.get(name, 0.0) * self._factors.get(name, 1.0)
                for name in self._shape.urdf.actuated_joint_names
            ]
        )


def columns(motion: Motion) -> dict[str, np.ndarray]:
    """Return the positions of a motion by joint."""
    return {
        name: motion.rows[:, index]
        for index, (name, kind) in enumerate(zip(motion.names, motion.kinds, strict=True))
        if kind == 'position' and len(motion.rows)
    }


def tip_paths(
    shape: RobotShape,
    factors: Mapping[str, float],
    measured: Mapping[str, float],
    motion: Motion,
) -> list[np.ndarray]:
    """Return the way of each end effector along a motion, (n, 3) in m in the URDF's root.

    Joints that the motion does not command stay where they are measured. Empty where it moves none
    of the URDF's joints.
    """
    moved = {name: rows for name, rows in columns(motion).items() if name in shape.joints}
    if not moved:
        return []
    count = len(motion.rows)
    joints = {
        name: moved.get(name, np.full(count, measured.get(name, 0.0))) * factors.get(name, 1.0)
        for name in shape.joints
    }
    return [shape.positions(tip, joints) for tip in shape.tips]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return int(probe.getsockname()[1])
