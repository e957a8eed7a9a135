"""The robot file: what a robot measures, sees and can be commanded, and its limits.

One YAML file describes one robot (`config/robots/*.yaml`), in the units of its drivers; `match`
maps a policy's names and units onto it. No rclpy here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from vla_runtime.files.field_error import FieldError
from vla_runtime.files.input_files import near_path, read_text, regular_file
from vla_runtime.files.quotes import quoted
from vla_runtime.files.typed_yaml import LARGEST_FILE, did_you_mean, loads, parse
from vla_runtime.robot.limits import check_names, urdf_limits
from vla_runtime.robot.rules import check_home, check_robot, check_with_limits
from vla_runtime.robot.schema import Robot, RobotSpec

_LARGEST_URDF = 1 << 24
# More than a replay sends before it waits, several times over.
_PLAYED_DEPTH = 100


class RobotError(ValueError):
    """A robot file that cannot be used: `FILE: field FIELD: what is wrong and what would mend it`.

    `field` is a dotted path such as `joints[2].upper`; '' is the file as a whole.
    """

    def __init__(self, file: Path, field: str, message: str) -> None:
        super().__init__(f'{file}: {FieldError(field, message)}')
        self.file = file
        self.field = field
        self._message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return RobotError, (self.file, self.field, self._message)


def load_robot(path: str | Path) -> Robot:
    """Read and check a robot file with the URDF that it names, or raise RobotError."""
    file = Path(path)
    text = _read(file, file, '', LARGEST_FILE)
    return read_robot(text, file, lambda name: _read_urdf(file, name))


def read_robot(text: str, file: Path, read_urdf: Callable[[str], str | None]) -> Robot:
    """Read and check the text of a robot file; RobotError names `file`.

    `read_urdf` gives the text of the URDF that it names.
    """
    try:
        spec = parse(RobotSpec, loads(text))
        check_robot(spec)
    except FieldError as error:
        raise RobotError(file, error.field, error.message) from None
    urdf_text = None if spec.urdf is None else read_urdf(spec.urdf)
    written = {item.name: getattr(spec, item.name) for item in fields(spec)}
    robot = Robot(**written, file=file, text=text, urdf_text=urdf_text)
    _check_urdf(robot)
    return robot


def for_replay(text: str) -> str:
    """Return the text of a robot file for the messages of a replay, which all have stamps.

    None is dropped: one that comes after a newer one is refused, so a gap would last.
    """
    document = loads(text)
    for source in (*document.get('joint_states', ()), *document.get('cameras', ())):
        source.pop('stamp', None)
        source |= {'reliability': 'reliable', 'depth': _PLAYED_DEPTH}
    return yaml.safe_dump(document, sort_keys=False)


def find_robot(name_or_path: str | Path, folder: Path) -> Path:
    """Return the robot file that `so101` (a name in `folder`) or `path/to/my_robot.yaml` means.

    Raises:
        ValueError: there is no such file, which says which there are; or it is no regular one.
    """
    # A shell does not expand what follows `robot:=`.
    path = Path(os.path.expanduser(name_or_path))
    if path.is_file():
        return path
    shipped = sorted(file.stem for file in folder.glob('*.yaml'))
    if str(name_or_path) in shipped:
        return folder / f'{name_or_path}.yaml'
    if os.path.lexists(path):
        try:
            regular_file(path)
        except (OSError, ValueError) as error:
            reason = getattr(error, 'strerror', None) or error
            raise ValueError(f'robot {path}: {reason}') from None
    near = ''
    if path.stem not in shipped:
        near = near_path(path, lambda one: one.suffix in ('.yaml', '.yml'))
    raise ValueError(
        f'robot {quoted(str(name_or_path))} is neither a file nor one that comes with the package'
        f'{near or did_you_mean(path.stem, shipped)}'
    )


def _read_urdf(robot_file: Path, name: str) -> str:
    if '://' in name:
        message = f'{quoted(name)}: package and other URIs are not resolved here'
        mend = 'give the path of the file, absolute or relative to the robot file'
        raise RobotError(robot_file, 'urdf', f'{message}; {mend}')
    return _read(robot_file, robot_file.parent / name, 'urdf', _LARGEST_URDF)


def _read(robot_file: Path, path: Path, field: str, most_bytes: int) -> str:
    try:
        return read_text(path, most_bytes)
    except (OSError, ValueError) as error:
        reason = getattr(error, 'strerror', None) or error
        other = '' if path == robot_file else f'{path} '
        raise RobotError(robot_file, field, f'{other}cannot be read ({reason})') from None


def _check_urdf(robot: Robot) -> None:
    if robot.urdf_text is None:
        return
    try:
        check_names(robot)
        known = urdf_limits(robot)
        for index, joint in enumerate(robot.joints):
            limits = known.get(joint.name)
            if limits is not None and joint.lower is None and not joint.continuous:
                check_with_limits(f'joints[{index}]', joint, limits.lower, limits.upper)
            if limits is not None and joint.name in robot.home:
                check_home(joint, robot.home[joint.name], limits.lower, limits.upper)
    except FieldError as error:
        raise RobotError(robot.file, error.field, error.message) from None
    except ValueError as error:
        raise RobotError(robot.file, 'urdf', f'{robot.urdf}: {error}') from None
