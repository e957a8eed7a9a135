"""Keeps a scene for the robot that is known, made anew when its description changes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vla_runtime.files.quotes import join_truncated
from vla_tools.view.state import ViewState
from vla_tools.view.wire import Motion

if TYPE_CHECKING:
    from vla_tools.view.scene import RobotScene
    from vla_tools.view.shape import RobotShape

NO_SHAPE = (
    'There is no description of the robot, so it cannot be drawn; everything else is shown. '
    'Publish robot_description (robot_state_publisher does), name the URDF in urdf of the robot '
    'file, or give it with --urdf FILE.'
)
_READING = 'reading the description of the robot …'


class SceneKeeper:
    """Makes scenes in a thread of its own: meshes take seconds to read.

    Attributes:
        why_none: why there is no scene; '' where there is one.
        note: what is missing in it; '' where nothing is.
        version: counts scenes and reasons.
        shape: of the robot that is shown; None without a scene.
        factors: of joint positions to the URDF's units, by name in messages.

    Args:
        urdf: file that a person named; None: what the state knows.
        tip: link whose path is drawn; None: found.

    Raises:
        ValueError: that file cannot be read.
    """

    def __init__(self, urdf: Path | None, tip: str | None) -> None:
        self.why_none, self.note, self.version = NO_SHAPE, '', 0
        self.shape: RobotShape | None = None
        self.factors: Mapping[str, float] = {}
        self._urdf, self._tip = urdf, tip
        self._own = '' if urdf is None else _text_of(urdf)
        self._scene: RobotScene | None = None
        self._made_of: tuple[str, str] = ('', '')
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int | None:
        scene = self._scene
        return None if scene is None else scene.port

    def show(
        self,
        state: ViewState,
        positions: Mapping[str, float],
        plan: Motion | None,
        chunks: tuple[Motion, ...],
        *,
        watched: bool = True,
    ) -> None:
        """Show a moment where it is watched; begin a new scene where the robot is another one."""
        text = self._own or state.urdf
        made_of = (text, state.robot.text if state.robot is not None else '')
        if text and made_of != self._made_of and not self.is_making:
            self._made_of = made_of
            self._tell(_READING)
            self._thread = threading.Thread(
                target=self._make, args=(text, state), name='scene', daemon=True
            )
            self._thread.start()
        if watched and self._scene is not None and not self.is_making:
            self._scene.show(positions, plan, chunks)

    @property
    def is_making(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._scene is not None:
            self._scene.close()

    def _tell(self, why: str) -> None:
        self.why_none = why
        self.version += 1

    def _make(self, text: str, state: ViewState) -> None:
        from vla_tools.view.scene import RobotScene
        from vla_tools.view.shape import RobotShape, ShapeError, in_urdf_units

        robot, before = state.robot, self._scene
        commanded = [joint.in_messages for joint in robot.joints] if robot is not None else []
        try:
            shape = RobotShape(text, self._folder(state), commanded, self._tip)
            factors = in_urdf_units(robot)
            scene = RobotScene(shape, factors)
        except ShapeError as error:
            self._tell(str(error))
            return
        self.shape, self.factors, self._scene = shape, factors, scene
        self.note = _missing(shape.missing_meshes)
        self._tell('')
        if before is not None:
            before.close()

    def _folder(self, state: ViewState) -> Path | None:
        """Return where the URDF's relative paths begin; None for one that came as a message."""
        if self._urdf is not None:
            return self._urdf.parent
        if state.robot is not None and state.robot.urdf is not None:
            return (state.robot.file.parent / state.robot.urdf).parent
        return None


def _text_of(urdf: Path) -> str:
    try:
        return urdf.read_text(encoding='utf-8')
    except OSError as error:
        raise ValueError(f'--urdf {urdf}: {error.strerror}') from None
    except UnicodeDecodeError:
        raise ValueError(f'--urdf {urdf}: is no text') from None


def _missing(meshes: list[str]) -> str:
    if not meshes:
        return ''
    return f'meshes that are not on this computer are left out: {join_truncated(meshes, ", ", 3)}'
