"""What a page is shown of a state, of plain types: what stays, and what is so at one moment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from vla_runtime.robot.schema import RobotJoint
from vla_tools.view.state import STRIPS, ViewState

_DIGITS = 4
_NO_CAMERAS = 'the robot file has no camera'
_NO_ROBOT = (
    'cameras and limits are in the robot file: give --robot, or start the policy node, whose '
    'description has it'
)


def constants(state: ViewState) -> dict[str, Any]:
    """Return what changes with the robot alone, of plain types."""
    joints: list[dict[str, Any]] = []
    positions = state.positions()
    if state.robot is not None:
        limits = state.limits()
        joints = [_joint(joint, *limits[joint.in_messages]) for joint in state.robot.joints]
    else:
        joints = [{'name': name, 'unit': 'as sent'} for name in positions]
    return {
        'robot': state.robot.name if state.robot else '',
        'no_cameras': _NO_CAMERAS if state.robot else _NO_ROBOT,
        'robot_file': str(state.robot.file) if state.robot else '',
        'namespace': state.namespace or '/',
        'joints': joints,
        'cameras': [
            {'name': camera.name, 'topic': camera.topic} for camera in state.cameras.values()
        ],
        'strips': {
            name: {'title': strip.title, 'unit': strip.unit, 'mark': strip.mark}
            for name, strip in STRIPS.items()
        },
    }


def moment(state: ViewState, now_ns: int) -> dict[str, Any]:
    """Return what is so at this time, of plain types."""
    control = state.item('control')
    executor = None if state.report is None else state.report.executor
    said = None if executor is None else executor.item('control')
    return {
        't': round(now_ns * 1e-9, 2),
        **_words(state),
        'doing': '' if said is None else said.text,
        'mode': control.get('mode', ''),
        'kind': control.get('kind', ''),
        'reason': control.get('reason', ''),
        'replan_interval': control.get('replan_interval', ''),
        'delay_steps': control.get('delay_steps', ''),
        'open_requests': control.get('open_requests', ''),
        'dry_run': control.get('dry_run') == 'true',
        'instruction': state.instruction,
        'beta': state.inference.beta if state.inference else None,
        'inference_ms': state.inference.milliseconds if state.inference else {},
        'chunk': state.inference.number if state.inference else None,
        'joints': _joint_values(state, now_ns, control),
        'cameras': [
            {
                'age_ms': _rounded(camera.age_ms(now_ns), 0),
                'rate_hz': _rounded(camera.rate_hz, 1),
                'problem': camera.problem or _camera_problem(state, camera.name),
            }
            for camera in state.cameras.values()
        ],
        'nodes': _nodes(state),
    }


def _words(state: ViewState) -> dict[str, Any]:
    if state.report is None:
        return {'state': 'nothing heard', 'why': '', 'remedy': '', 'refused': ''}
    return {
        'state': state.report.state(),
        'why': state.report.why(),
        'remedy': state.report.remedy(),
        'refused': state.item('control').get('start_refused', ''),
    }


def _joint_values(
    state: ViewState, now_ns: int, control: Mapping[str, str]
) -> list[dict[str, Any]]:
    targets, positions = state.targets(now_ns), state.positions()
    names = (
        [(joint.name, joint.in_messages) for joint in state.robot.joints]
        if state.robot is not None
        else [(name, name) for name in positions]
    )
    found = []
    for name, in_messages in names:
        measured = positions.get(in_messages)
        limited = {
            key.rpartition('.')[2]: int(value)
            for key, value in control.items()
            if key.startswith(f'limited.{name}.') and value.isdecimal()
        }
        found.append(
            {
                'at': None if measured is None else _rounded(measured, _DIGITS),
                'to': _rounded(targets.get(in_messages, targets.get(name)), _DIGITS),
                'limited': limited,
            }
        )
    return found


def _camera_problem(state: ViewState, name: str) -> str:
    """Return what the policy node says against a camera."""
    for node in state.report.nodes if state.report else ():
        found = node.item(f'camera {name}')
        if found is not None and found.level:
            return found.text
    return ''


def _nodes(state: ViewState) -> list[dict[str, Any]]:
    nodes: Iterable[Any] = state.report.nodes if state.report else ()
    return [
        {
            'name': node.name,
            'lifecycle': node.claim.lifecycle if node.claim else 'silent',
            'problems': [f'{item.item}: {item.text}' for item in node.problems()],
        }
        for node in nodes
    ]


def _joint(joint: RobotJoint, lower: float, upper: float) -> dict[str, Any]:
    return {
        'name': joint.name,
        'unit': joint.unit,
        'lower': _rounded(lower, _DIGITS),
        'upper': _rounded(upper, _DIGITS),
        'velocity': joint.velocity,
        'continuous': joint.continuous,
    }


def _rounded(value: float | None, digits: int) -> float | None:
    """JSON has no numbers that are not finite."""
    return None if value is None or not math.isfinite(value) else round(value, digits)
