"""Chunks and plans to messages and back; stamps to integers.

Both are a `JointTrajectory` with facts beside it:

- `header.stamp`: for a chunk the time of its observation, for a plan the time at which the step
  of its first row begins;
- `points[i].time_from_start`: i * step time;
- `positions` and `velocities` hold the columns of either kind. A message with both kinds fills
  both, and NaN stands where a column is of the other kind.

The facts have two forms. Where `vla_interfaces` is built they are fields of `ActionChunk` and
`CommittedPlan`, which hold the trajectory. Elsewhere, and in recordings from before, the trajectory
is the message and its `header.frame_id` a tag: `chunk episode=3 number=17 tied=1 step=96
request=40`, or `plan episode=3 certain=4 step=99 request=40`. A chunk answers the request of its
episode that it names, and is `tied` (conditioned) when it continues that request's plan (real-time
chunking; 0 where it does not say so). `certain` counts the rows that will be executed whatever the
answer is. `step` is the plan step of row 0: steps stand still while the robot holds. `open` counts
the requests that the policy takes before it answers the first of them; 1 where it is left out.

An empty plan (no points) is a request too: the executor is not executing anything.
Stamps are integers of nanoseconds from end to end. Reading takes any object with the message's
fields, of either form; only writing needs ROS 2's message classes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_runtime.files.package_files import share_folder
from vla_runtime.files.quotes import one_line, quoted
from vla_runtime.messages.diagnostics import values_of
from vla_runtime.types import ActionChunk, ChunkHeader, PlanRequest

if TYPE_CHECKING:
    from builtin_interfaces.msg import Time
    from diagnostic_msgs.msg import DiagnosticStatus
    from trajectory_msgs.msg import JointTrajectory

# A line of a message file that declares a field, no constant.
_FIELD = re.compile(r'^[\w/\[\]]+ (\w+)$', re.MULTILINE)

# --- The executor's report of a handover, read back from its message


@dataclass(frozen=True)
class HandoverReport:
    """One handover from chunk to chunk.

    Attributes:
        time_ns: ROS time of the first command after it.
        delay_steps: steps between its observation and its arrival.
        position_jump: largest disagreement of a joint before blending, in its own unit.
        velocity_jump: largest jump of a joint's velocity, per second.
    """

    time_ns: int
    chunk: int
    delay_steps: int
    late: bool
    from_hold: bool
    position_jump: float
    velocity_jump: float
    text: str


def read_handover(status: DiagnosticStatus) -> HandoverReport:
    """Read the status `seam`; KeyError or ValueError where a value is missing or no number."""
    values = values_of(status)
    return HandoverReport(
        time_ns=int(values['stamp_ns']),
        chunk=int(values['chunk']),
        delay_steps=int(values['delay_steps']),
        late=values['late'] == 'true',
        from_hold=values['from_hold'] == 'true',
        position_jump=float(values['position_jump']),
        velocity_jump=float(values['velocity_jump']),
        text=status.message,
    )


# --------------------------------------------------------------------------------------------------

_SECOND_NS = 1_000_000_000
# Times that were seconds in single precision once are rounded by so much.
_ROUNDING_NS = 1000
# At most 18 digits each: what fits into 63 bits.
_MOST = 10**18
_N = r'([0-9]{1,18})'
_STEP = r'(?: step=(-?[0-9]{1,18}))?'
_CHUNK_TAG = re.compile(
    rf'chunk episode={_N} number={_N}(?: tied=([01]))?{_STEP}(?: request={_N})?(?: open={_N})?'
)
_PLAN_TAG = re.compile(rf'plan episode={_N} certain={_N}{_STEP}(?: request={_N})?')


class TrajectoryError(ValueError):
    """A trajectory message that is not a chunk or not a plan; the message names the field."""


def stamp_to_ns(stamp: Time) -> int:
    return int(stamp.sec) * _SECOND_NS + int(stamp.nanosec)


def ns_to_stamp(stamp_ns: int) -> Time:
    from builtin_interfaces.msg import Time

    return Time(sec=stamp_ns // _SECOND_NS, nanosec=stamp_ns % _SECOND_NS)


@cache
def typed_messages() -> Any | None:
    """Return the module `vla_interfaces.msg`; None where it is not built for this Python.

    Raises:
        RuntimeError: it was built of another version of its files.
    """
    try:
        from vla_interfaces import msg

        # What was built for another Python has classes and cannot be sent.
        msg.ActionChunk.__class__.__import_type_support__()
    except ImportError:
        return None
    if msg.ActionChunk.__class__._TYPE_SUPPORT is None:
        return None
    refuse_other_fields(msg)
    return msg


def refuse_other_fields(built: Any) -> None:
    """Raise RuntimeError unless messages (a module of classes) have the fields of their files."""
    for file in sorted((share_folder() / 'interfaces' / 'vla_interfaces' / 'msg').glob('*.msg')):
        fields = set(_FIELD.findall(file.read_text(encoding='utf-8')))
        found = set(getattr(built, file.stem).get_fields_and_field_types())
        if fields != found:
            raise RuntimeError(
                f'vla_interfaces was built of another version of this package: {file.stem} differs '
                f'in {", ".join(sorted(fields ^ found))}; build it again (`./run setup`, or in '
                'your workspace `colcon build --packages-select vla_interfaces`)'
            )


def chunk_type() -> Any:
    """Message class of `action_chunk`."""
    return _trajectory_type() if (typed := typed_messages()) is None else typed.ActionChunk


def plan_type() -> Any:
    """Message class of `committed_plan`."""
    return _trajectory_type() if (typed := typed_messages()) is None else typed.CommittedPlan


def spoken() -> str:
    """Say in which form chunks and plans are sent."""
    if typed_messages() is None:
        return 'trajectories with tags (vla_interfaces is not built)'
    return 'typed messages (vla_interfaces)'


def trajectory_of(message: Any) -> JointTrajectory:
    """Return the trajectory of a chunk or plan, whose message it may be."""
    return getattr(message, 'trajectory', message)


def chunk_to_message(chunk: ActionChunk, header: ChunkHeader) -> Any:
    trajectory = _to_trajectory(
        chunk.actions, chunk.names, chunk.kinds, chunk.step_time_s, stamp_ns=header.observation_ns
    )
    if (typed := typed_messages()) is not None:
        return typed.ActionChunk(
            trajectory=trajectory,
            episode=header.episode,
            number=header.number,
            conditioned=header.tied,
            max_open_requests=header.open_requests,
            **_optional(header.step, header.request),
        )
    trajectory.header.frame_id = (
        f'chunk episode={header.episode} number={header.number} tied={int(header.tied)}'
        f'{_tag("step", header.step)}{_tag("request", header.request)}'
        # Left out where it is the default, so that an earlier release reads the message.
        f'{_tag("open", header.open_requests) if header.open_requests > 1 else ""}'
    )
    return trajectory


def message_to_chunk(
    message: Any, *, step_time_s: float | None = None
) -> tuple[ActionChunk, ChunkHeader]:
    """Read a message that `chunk_to_message` wrote; limits are checked elsewhere.

    `normalised` does not travel. `step_time_s` is for a single row, which cannot tell its own.

    Raises:
        TrajectoryError: not a chunk.
    """
    trajectory = trajectory_of(message)
    header = _tagged_chunk(trajectory) if trajectory is message else _typed_chunk(message)
    if not trajectory.points:
        raise TrajectoryError('points: a chunk needs at least one')
    rows, kinds = _rows(trajectory)
    step = _step_time_s(trajectory) or step_time_s
    if step is None:
        raise TrajectoryError('points: a single one does not tell the step time')
    chunk = ActionChunk(
        actions=rows,
        names=tuple(trajectory.joint_names),
        kinds=kinds,
        step_time_s=step,
        normalised=np.zeros((len(rows), 0), dtype=np.float32),
    )
    return chunk, header


def _tagged_chunk(message: JointTrajectory) -> ChunkHeader:
    tag = _CHUNK_TAG.fullmatch(message.header.frame_id)
    if tag is None:
        raise TrajectoryError(
            f'header.frame_id is {quoted(message.header.frame_id)}, expected '
            "'chunk episode=E number=N tied=0 or 1 step=F request=K open=M'"
        )
    return ChunkHeader(
        observation_ns=stamp_to_ns(message.header.stamp),
        episode=int(tag[1]),
        number=int(tag[2]),
        tied=tag[3] == '1',
        step=None if tag[4] is None else int(tag[4]),
        request=None if tag[5] is None else int(tag[5]),
        open_requests=1 if tag[6] is None else int(tag[6]),
    )


def _typed_chunk(message: Any) -> ChunkHeader:
    return ChunkHeader(
        observation_ns=stamp_to_ns(message.trajectory.header.stamp),
        episode=_count(message, 'episode'),
        number=_count(message, 'number'),
        tied=bool(message.conditioned),
        step=_step(message),
        request=_count(message, 'request') if message.has_request else None,
        # A sender that knows of no more leaves the field at 0.
        open_requests=max(1, int(message.max_open_requests)),
    )


def plan_to_message(plan: PlanRequest) -> Any:
    """The executor's request as a message; more than one row needs a step time."""
    trajectory = _to_trajectory(
        plan.rows, plan.names, plan.kinds, plan.step_time_s or 0.0, stamp_ns=plan.stamp_ns
    )
    if (typed := typed_messages()) is not None:
        return typed.CommittedPlan(
            trajectory=trajectory,
            episode=plan.episode,
            committed_steps=plan.certain,
            **_optional(plan.step, plan.request),
        )
    trajectory.header.frame_id = (
        f'plan episode={plan.episode} certain={plan.certain}'
        f'{_tag("step", plan.step)}{_tag("request", plan.request)}'
    )
    return trajectory


def message_to_plan(message: Any) -> PlanRequest:
    """Read a message that `plan_to_message` wrote; TrajectoryError for another one."""
    trajectory = trajectory_of(message)
    facts = _tagged_plan(trajectory) if trajectory is message else _typed_plan(message)
    names = tuple(trajectory.joint_names)
    if trajectory.points:
        rows, kinds = _rows(trajectory)
        if not np.isfinite(rows).all():
            raise TrajectoryError('points: hold a number that is not finite')
    else:
        rows, kinds = np.zeros((0, len(names))), ('position',) * len(names)
    return PlanRequest(
        rows=rows,
        names=names,
        kinds=kinds,
        step_time_s=_step_time_s(trajectory),
        stamp_ns=stamp_to_ns(trajectory.header.stamp),
        **facts,
    )


def _tagged_plan(message: JointTrajectory) -> dict[str, Any]:
    tag = _PLAN_TAG.fullmatch(message.header.frame_id)
    if tag is None:
        raise TrajectoryError(
            f'header.frame_id is {quoted(message.header.frame_id)}, expected '
            "'plan episode=E certain=N step=F request=K'"
        )
    return {
        'episode': int(tag[1]),
        'certain': int(tag[2]),
        'step': None if tag[3] is None else int(tag[3]),
        'request': None if tag[4] is None else int(tag[4]),
    }


def _typed_plan(message: Any) -> dict[str, Any]:
    return {
        'episode': _count(message, 'episode'),
        'certain': int(message.committed_steps),
        'step': _step(message),
        'request': _count(message, 'request') if message.has_request else None,
    }


def _optional(step: int | None, request: int | None) -> dict[str, Any]:
    return {
        'has_step': step is not None,
        'step': step or 0,
        'has_request': request is not None,
        'request': request or 0,
    }


def _count(message: Any, name: str) -> int:
    """Return a count, as bounded as those of the tags."""
    value = int(getattr(message, name))
    if value >= _MOST:
        raise TrajectoryError(f'{name} is {value}, expected less than 1e18')
    return value


def _step(message: Any) -> int | None:
    if not message.has_step:
        return None
    if abs(int(message.step)) >= _MOST:
        raise TrajectoryError(f'step is {message.step}, expected less than 1e18 either way')
    return int(message.step)


def _trajectory_type() -> Any:
    from trajectory_msgs.msg import JointTrajectory

    return JointTrajectory


def _tag(name: str, value: int | None) -> str:
    return '' if value is None else f' {name}={value}'


def _to_trajectory(
    rows: np.ndarray,
    names: Sequence[str],
    kinds: Sequence[str],
    step_time_s: float,
    *,
    stamp_ns: int,
) -> JointTrajectory:
    from builtin_interfaces.msg import Duration
    from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

    rows = np.asarray(rows, dtype=np.float64)
    if rows.ndim != 2 or not rows.shape[1] == len(names) == len(kinds):
        raise ValueError(
            f'a trajectory of {len(names)} columns and {len(kinds)} kinds cannot have rows of '
            f'shape {rows.shape}'
        )
    is_position = np.array([kind == 'position' for kind in kinds], dtype=bool)
    step_ns = round(step_time_s * _SECOND_NS)
    message = JointTrajectory(joint_names=list(names))
    message.header.stamp = ns_to_stamp(stamp_ns)
    positions = np.where(is_position, rows, np.nan).tolist() if is_position.any() else None
    velocities = np.where(is_position, np.nan, rows).tolist() if not is_position.all() else None
    for index in range(len(rows)):
        point = JointTrajectoryPoint()
        if positions is not None:
            point.positions = positions[index]
        if velocities is not None:
            point.velocities = velocities[index]
        seconds, nanoseconds = divmod(index * step_ns, _SECOND_NS)
        point.time_from_start = Duration(sec=seconds, nanosec=nanoseconds)
        message.points.append(point)
    return message


def _rows(message: JointTrajectory) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return rows (n, columns) and the kind of each column, read from the first row."""
    count = len(message.joint_names)
    if not count:
        raise TrajectoryError('joint_names: is empty')
    if len(set(message.joint_names)) != count:
        counted = Counter(message.joint_names)
        twice = next(name for name, times in counted.items() if times > 1)
        raise TrajectoryError(f'joint_names: {quoted(twice)} is named twice')
    positions = _matrix(message, 'positions', count)
    velocities = _matrix(message, 'velocities', count)
    if positions is None and velocities is None:
        raise TrajectoryError('points: have neither positions nor velocities')
    if positions is None or velocities is None:
        rows = positions if positions is not None else velocities
        assert rows is not None
        return rows, ('velocity' if positions is None else 'position',) * count
    is_velocity = np.isnan(positions[0])
    for name, matrix, absent in (
        ('positions', positions, is_velocity),
        ('velocities', velocities, ~is_velocity),
    ):
        if not np.isnan(matrix[:, absent]).all():
            columns = ', '.join(message.joint_names[index] for index in np.flatnonzero(absent))
            raise TrajectoryError(
                f'points: {name} of {one_line(columns, 200)} must be NaN in every row, because the '
                'first row commands them the other way'
            )
    return (
        np.where(is_velocity, velocities, positions),
        tuple('velocity' if velocity else 'position' for velocity in is_velocity),
    )


def _matrix(message: JointTrajectory, field: str, count: int) -> np.ndarray | None:
    lengths = {len(getattr(point, field)) for point in message.points}
    if lengths == {0}:
        return None
    if lengths != {count}:
        raise TrajectoryError(
            f'points: {field} have {sorted(lengths)} numbers for {count} joint_names'
        )
    return np.array([getattr(point, field) for point in message.points], dtype=np.float64)


def _step_time_s(message: JointTrajectory) -> float | None:
    """Seconds between two rows, None for less than two; each must be where i * step time is.

    A step of 1/30 s is no whole number of nanoseconds: each row, or the step, is rounded.
    """
    times = [stamp_to_ns(point.time_from_start) for point in message.points]
    if not times:
        return None
    step = times[-1] / max(1, len(times) - 1)
    late = (abs(time - index * step) for index, time in enumerate(times))
    if times[0] or (len(times) > 1 and step <= 0) or max(late) > _ROUNDING_NS:
        raise TrajectoryError('points: time_from_start must be i * step time, beginning with 0')
    return step / _SECOND_NS if len(times) > 1 else None
