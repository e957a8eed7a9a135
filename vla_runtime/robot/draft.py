"""A draft of a robot file, from what a running graph shows; every guess in it is marked.

What only a person knows (limits, which camera is which, whether a joint grips) is guessed so that
the robot moves little and slowly, and marked `GUESS`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vla_runtime.execution.urdf import UrdfJoint, read_urdf_limits

MARK = 'GUESS'
# A joint of which nothing is known may move this far from where it stood, and so fast.
_AROUND, _SPEED, _STEP = 0.1, 0.5, 0.2
# A hand that moved a joint by less did not mean it.
MOVED = 0.02
_GRIPS = re.compile('grip|finger|jaw|claw', re.IGNORECASE)


@dataclass(frozen=True)
class SeenJoints:
    """A topic of joint states: last position, and the least and the largest, by joint name."""

    topic: str
    positions: Mapping[str, float]
    spans: Mapping[str, tuple[float, float]]
    stamped: bool = True


@dataclass(frozen=True)
class SeenCamera:
    """A topic of images; size 0 and rate 0.0 where none came."""

    topic: str
    type: str
    width: int = 0
    height: int = 0
    encoding: str = ''
    rate_hz: float = 0.0
    stamped: bool = True


@dataclass(frozen=True)
class SeenOutput:
    """Something that takes commands; its joints are empty where it does not say them."""

    kind: str
    topic: str
    joints: tuple[str, ...] = ()
    interface: str = 'position'


@dataclass(frozen=True)
class Survey:
    """What a graph shows of one robot; the text of its URDF is None where nobody publishes it."""

    joint_states: tuple[SeenJoints, ...]
    cameras: tuple[SeenCamera, ...] = ()
    outputs: tuple[SeenOutput, ...] = ()
    urdf: str | None = None

    @property
    def joints(self) -> list[str]:
        return list(dict.fromkeys(name for one in self.joint_states for name in one.positions))


def write_draft(name: str, survey: Survey, urdf_file: str, made_by: str) -> str:
    """Return the text of a robot file, for a person to correct.

    Args:
        urdf_file: path of the URDF's copy, relative to the robot file; '' without one.
        made_by: the command, for the head of the file.

    Raises:
        ValueError: the URDF cannot be used, or no joint was seen.
    """
    if not survey.joints:
        raise ValueError('no joint states came; vla_runtime doctor says where the robot is')
    limits = read_urdf_limits(survey.urdf) if survey.urdf is not None else {}
    lines = [
        f'# Draft, written by {made_by}: what was seen in a running graph.',
        f'# Look at every line with {MARK} before the first start, then remove its comment.',
        '# The fields: docs/reference/robot_file.md. Check it: vla_runtime check FILE.',
        'format: 1',
        f'name: {_text(name)}',
        *([f'urdf: {_text(urdf_file)}'] if urdf_file else []),
        '',
        'joints:',
    ]
    for one in survey.joint_states:
        for joint, position in one.positions.items():
            lines += _joint(joint, position, one.spans.get(joint), limits.get(joint), urdf_file)
            lines += _grip(joint, survey.outputs)
    lines += ['', 'joint_states:', *_joint_states(survey)]
    if survey.cameras:
        lines += ['', 'cameras:', *_cameras(survey.cameras)]
    lines += ['', 'outputs:', *_outputs(survey), '']
    lines += [
        f'# {MARK}: slow, and clamped. A start from further away than this moves there first.',
        'start: {tolerance: 0.1, on_too_far: approach, approach_speed: 0.2}',
        'on_violation: {position: clamp, velocity: clamp, acceleration: clamp, '
        'step_from_measured: clamp}',
    ]
    return '\n'.join(lines) + '\n'


def _joint(
    name: str,
    position: float,
    span: tuple[float, float] | None,
    urdf: UrdfJoint | None,
    urdf_file: str,
) -> Iterator[str]:
    yield f'  - name: {_text(name)}'
    if urdf is None:
        missing = 'the URDF has no such joint' if urdf_file else 'nobody publishes a URDF'
        yield f'    unit: rad  # {MARK}: {missing}; a joint that slides is in m'
    else:
        yield f'    unit: {urdf.unit}'
    low, high = (-math.inf, math.inf) if urdf is None else (urdf.limits.lower, urdf.limits.upper)
    turns = urdf is not None and not urdf.why and math.isinf(low)
    moved = span is not None and min(high, span[1]) - max(low, span[0]) > MOVED
    if turns:
        yield '    continuous: true  # as the URDF says'
    elif moved and span is not None:
        low, high = max(low, span[0]), min(high, span[1])
        yield f'    lower: {_number(low)}  # {MARK}: as far as a hand moved it'
        yield f'    upper: {_number(high)}  # {MARK}: likewise'
    elif urdf is None or urdf.why:
        yield f'    lower: {_number(position - _AROUND)}  # {MARK}: a little around where it stood'
        yield f'    upper: {_number(position + _AROUND)}  # {MARK}: likewise'
    else:
        yield f"    # lower and upper are the URDF's: {_number(low)} to {_number(high)}"
    yield f'    velocity: {_velocity(urdf)}  # {MARK}: slow to begin with'
    if not turns:
        yield f'    max_step: {_STEP}  # {MARK}: of what makes no joint jump'


def _grip(name: str, outputs: Sequence[SeenOutput]) -> Iterator[str]:
    if not _GRIPS.search(name):
        return
    # One that is commanded by velocity holds nothing by a position beyond it.
    by_velocity = any(
        one.interface == 'velocity' and (name in one.joints or _GRIPS.search(one.topic))
        for one in outputs
    )
    if not by_velocity:
        yield f'    grips: true  # {MARK}: by its name'
    yield '    # zero and one: vla_runtime robot gripper FILE measures them'


def _velocity(urdf: UrdfJoint | None) -> str:
    fastest = math.inf if urdf is None else urdf.limits.velocity
    return _number(min(_SPEED, fastest))


def _joint_states(survey: Survey) -> Iterator[str]:
    several = len(survey.joint_states) > 1
    for one in survey.joint_states:
        fields = [f'topic: {_text(one.topic)}']
        if several:
            fields.append(f'joints: {_list(one.positions)}')
        mark = ''
        if not one.stamped:
            fields.append('stamp: receive')
            mark = f'  # {MARK}: its messages have no stamp'
        yield f'  - {{{", ".join(fields)}}}{mark}'


def _cameras(cameras: Sequence[SeenCamera]) -> Iterator[str]:
    for camera in cameras:
        yield f'  - name: {_text(_camera_name(camera.topic))}  # {MARK}: as policies call it'
        yield f'    topic: {_text(camera.topic)}'
        yield f'    type: {camera.type}'
        if not camera.rate_hz:
            yield f'    # {MARK}: no image came while it was looked at'
            continue
        if camera.width:
            yield f'    width: {camera.width}'
            yield f'    height: {camera.height}'
        if camera.encoding.startswith('8UC'):
            yield f'    encoding: bgr8  # {MARK}: {camera.encoding} does not say; look at a picture'
        yield f'    rate_hz: {round(camera.rate_hz)}  # {MARK}: {camera.rate_hz:.1f} came a second'
        if not camera.stamped:
            yield f'    stamp: receive  # {MARK}: its messages have no stamp'


def _camera_name(topic: str) -> str:
    """Return the part of a topic that is most likely the camera's name."""
    words = [word for word in topic.split('/') if word]
    common = {'image', 'image_raw', 'image_rect', 'compressed', 'color', 'rgb', 'camera'}
    telling = [word for word in words if word not in common and not word.startswith('image')]
    return telling[-1] if telling else words[0]


def _outputs(survey: Survey) -> Iterator[str]:
    known = set(survey.joints)
    taken = {joint for one in survey.outputs for joint in one.joints}
    free = [joint for joint in survey.joints if joint not in taken]
    for output in survey.outputs:
        joints, mark = [name for name in output.joints if name in known], ''
        if not output.joints:
            joints = _likely(output, survey.outputs, free)
            free = [name for name in free if name not in joints]
            mark = f'  # {MARK}: its node does not say its joints; their order counts'
        if not joints:
            yield f'  # left out: {output.kind} {output.topic}, which takes none of the joints'
            continue
        yield f'  - kind: {output.kind}'
        yield f'    topic: {_text(output.topic)}'
        yield f'    joints: {_list(joints)}{mark}'
        if output.interface != 'position':
            yield f'    interface: {output.interface}'
    if not survey.outputs:
        yield f'  # {MARK}: no controller takes commands in this graph'
        yield '  - kind: joint_trajectory'
        yield f'    topic: arm_controller/joint_trajectory  # {MARK}'
        yield f'    joints: {_list(free)}  # {MARK}'
    elif free:
        yield f'  # no output takes {", ".join(free)}: measured alone'


def _likely(output: SeenOutput, outputs: Sequence[SeenOutput], free: Sequence[str]) -> list[str]:
    """Return the joints that a nameless output may take: a gripper's those that grip, if any."""
    grips = [name for name in free if _GRIPS.search(name)]
    if _GRIPS.search(output.topic):
        return grips
    others = any(_GRIPS.search(one.topic) for one in outputs)
    return [name for name in free if name not in grips] if others else list(free)


def _list(names: Sequence[str] | Mapping[str, float]) -> str:
    return f'[{", ".join(map(_text, names))}]'


def _number(value: float) -> str:
    whole, _, part = f'{value:.5f}'.partition('.')
    return f'{whole}.{part.rstrip("0") or "0"}'


def _text(value: str) -> str:
    """Return a scalar of YAML, in quotes where a plain one would be another value."""
    return value if re.fullmatch(r'[A-Za-z_/~][\w/.~-]*', value) else f"'{value}'"
