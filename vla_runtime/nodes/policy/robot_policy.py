"""A policy in a robot's names and units: the conversions that the node and a replay share.

No ROS 2 here, and no clock: frames, state, plan and settings are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vla_runtime.inference.chunk_policy import ChunkPolicy, Inference
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.messages.images import ImageFacts, to_rgb
from vla_runtime.processing.poses import whole_turns
from vla_runtime.robot.match import RobotMatch
from vla_runtime.sensors.synchronizer import Selection
from vla_runtime.types import (
    ActionChunk,
    ChunkHeader,
    CommittedPlan,
    InferenceReport,
    Observation,
    PlanRequest,
    same_step_time,
)

# The executor's committed plan, seen from an observation's time.


class AlignmentError(ValueError):
    """A plan that is not for this policy; the message names what differs."""


def align_plan(
    plan: PlanRequest,
    *,
    stamp_ns: int,
    names: Sequence[str],
    kinds: Sequence[str],
    step_time_s: float,
    horizon: int,
) -> CommittedPlan | None:
    """Cut and order a plan so that row 0 is the step that was current at the observation.

    Steps already over at that time are dropped. A plan that begins later is continued backwards
    by its first row, because the executor keeps no setpoints older than that. Row i of the answer
    then stands where row i of the new chunk will.

    Args:
        stamp_ns: ROS time of the observation.
        names: the policy's action names, in order.
        kinds: kind of each action, `position` or `velocity`.
        step_time_s: seconds between two actions of the policy.
        horizon: rows of a chunk; the plan is cut to it.

    Returns:
        The plan, or None when nothing of it is left at the observation's time.

    Raises:
        AlignmentError: other names, kinds or step time than the policy's.
    """
    if not len(plan.rows):
        return None
    order = _column_order(plan, names, kinds)
    if plan.step_time_s is not None and not same_step_time(plan.step_time_s, step_time_s):
        raise AlignmentError(
            f'committed_plan: rows are {plan.step_time_s:g} s apart, but a step of the policy is '
            f'{step_time_s:g} s'
        )
    over = _steps_over(plan, stamp_ns, step_time_s)
    rows = plan.rows[max(0, over) :, order]
    missing_rows = max(0, -over)
    # Nothing of the plan falls within the chunk.
    if not len(rows) or missing_rows >= horizon:
        return None
    rows = np.concatenate([np.repeat(rows[:1], missing_rows, axis=0), rows])[:horizon]
    return CommittedPlan(
        actions=rows,
        delay_steps=min(max(0, plan.certain - over), len(rows)),
        execution_horizon=len(rows),
    )


def _column_order(plan: PlanRequest, names: Sequence[str], kinds: Sequence[str]) -> list[int]:
    """Return the plan's column of each action; AlignmentError for other names or kinds."""
    if set(plan.names) != set(names) or len(plan.names) != len(names):
        missing = ', '.join(name for name in names if name not in plan.names) or 'none'
        unknown = ', '.join(name for name in plan.names if name not in names) or 'none'
        raise AlignmentError(
            f"committed_plan: joint_names are not the policy's actions (missing: {missing}; "
            f'unknown: {unknown}); give executor and policy the same robot file and bundle'
        )
    order = [plan.names.index(name) for name in names]
    for name, kind, column in zip(names, kinds, order, strict=True):
        if plan.kinds[column] != kind:
            raise AlignmentError(
                f"committed_plan: '{name}' is given as {plan.kinds[column]}, but the policy "
                f'commands it as {kind}'
            )
    return order


def step_of_row_0(plan: PlanRequest, *, stamp_ns: int, step_time_s: float) -> int | None:
    """Return the plan step of row 0 of a chunk that `align_plan` aligned.

    It is before the plan's first where the plan was continued backwards; None where the plan does
    not say. `stamp_ns` is the observation's ROS time, `step_time_s` the policy's.
    """
    if plan.step is None:
        return None
    return plan.step + _steps_over(plan, stamp_ns, step_time_s)


def _steps_over(plan: PlanRequest, stamp_ns: int, step_time_s: float) -> int:
    """Steps of the plan that were over at the observation; negative where it begins later."""
    return (stamp_ns - plan.stamp_ns) // round(step_time_s * 1e9)


@dataclass(frozen=True)
class Answer:
    """A chunk in the robot's names and units, with all that explains it.

    Attributes:
        chunk: actions in robot units; `normalised` as the network returned it.
        header: travels with the chunk; `tied` where it continues the plan.
        plan: in the robot's units, on which the chunk is conditioned; None without one.
        request: the request that it answers, with the plan as it was used.
        observation: what the policy was given, its state in policy units.
        selection: messages that the observation was made of; None where it was recorded.
        now_ns: ROS time at which the inference began; 0 where it was recorded.
    """

    chunk: ActionChunk
    header: ChunkHeader
    report: InferenceReport
    plan: CommittedPlan | None
    request: PlanRequest
    observation: Observation
    selection: Selection | None
    now_ns: int

    @property
    def ready_ns(self) -> int:
        """Steady time at which request and newest frame were both there."""
        frames = () if self.selection is None else self.selection.frames.values()
        return max([self.request.arrived_ns, *(frame.arrived_ns for frame in frames)])

    def overhead_ms(self, now_ns: int) -> float:
        """Milliseconds from `ready_ns` to `now_ns` (steady clock), less those in the policy."""
        return (now_ns - self.ready_ns) * 1e-6 - self.report.milliseconds['total']


class RobotPolicy:
    """One loaded policy on one robot; `match` maps names and units."""

    def __init__(self, policy: ChunkPolicy, match: RobotMatch) -> None:
        self.policy = policy
        self.match = match
        endless = {column.name for column in match.columns if column.continuous}
        # Indices among actions and state of the joints whose angle may be written in several ways.
        self._endless = [
            (action, match.state_joints.index(name))
            for action, name in enumerate(match.action_names)
            if name in endless and name in match.state_joints
        ]

    def pixels(self, camera: str, message: Any, facts: ImageFacts | None = None) -> np.ndarray:
        """Convert a camera's message, (height, width, 3) uint8 RGB; see `to_rgb`.

        Raises:
            ImageError: it cannot be decoded, or is not of the robot file's size.
        """
        known = self.match.cameras[camera]
        return to_rgb(
            message,
            width=known.width,
            height=known.height,
            encoding=known.encoding,
            facts=facts,
        )

    def state(self, measured: np.ndarray) -> np.ndarray:
        """Return measured positions, (joints,) in robot units, as the policy's state, float64."""
        return self.match.policy_state(measured)

    def earlier_states(self, selection: Selection) -> list[np.ndarray]:
        """Return a selection's earlier states as the policy's, float64, the newest first."""
        return [self.state(measured) for _, measured in selection.earlier_states]

    def submit(
        self,
        observation: Observation,
        request: PlanRequest,
        settings: PolicySettings,
        *,
        stamp_ns: int,
        number: int | None = None,
        selection: Selection | None = None,
        now_ns: int = 0,
    ) -> Future[Answer]:
        """Begin an inference for a request; see `Policy.submit`.

        Args:
            observation: its state in policy units.
            stamp_ns: ROS time of the observation.
            number: inference number; None: the next one.
            selection, now_ns: see `Answer`.

        Raises:
            ValueError: a plan that is not for this robot, or an observation that the policy
                refuses.
        """
        spec = self.policy.spec
        aligned = align_plan(
            request,
            stamp_ns=stamp_ns,
            names=self.match.action_names,
            kinds=self.match.action_kinds,
            step_time_s=spec.step_time_s,
            horizon=spec.real_horizon,
        )
        aligned = self._written_like(observation.state, aligned)
        step = step_of_row_0(request, stamp_ns=stamp_ns, step_time_s=spec.step_time_s)
        inferred = self.policy.submit(
            observation, settings=settings, plan=self._in_policy_units(aligned), number=number
        )
        answered: Future[Answer] = Future()

        def answer(done: Future[Inference]) -> None:
            try:
                chunk, report = done.result()
                tied = report.rtc_mode != 'off'
                header = ChunkHeader(
                    observation_ns=stamp_ns,
                    episode=request.episode,
                    number=report.number,
                    tied=tied,
                    step=step if tied else None,
                    request=request.request,
                    open_requests=self.policy.open_requests(settings),
                )
                plan = aligned if tied else None
                chunk = self._in_robot_units(chunk)
                answered.set_result(
                    Answer(chunk, header, report, plan, request, observation, selection, now_ns)
                )
            except Exception as error:
                answered.set_exception(error)

        inferred.add_done_callback(answer)
        return answered

    def _written_like(self, state: np.ndarray, plan: CommittedPlan | None) -> CommittedPlan | None:
        """Write the plan's angles without end stops by the turn that the observed state is on.

        The executor counts on where a driver wraps, and a plan a whole turn off would pull the
        chunk there. `state` is (dimensions,) in policy units, the plan in robot units.
        """
        if plan is None or not self._endless:
            return plan
        measured, actions = self.match.state.to_robot(state), plan.actions.copy()
        for action, joint in self._endless:
            actions[:, action] += whole_turns(measured[joint] - actions[0, action])
        return replace(plan, actions=actions)

    def _in_policy_units(self, plan: CommittedPlan | None) -> CommittedPlan | None:
        if plan is None:
            return None
        return replace(plan, actions=self.match.actions.to_policy(plan.actions))

    def _in_robot_units(self, chunk: ActionChunk) -> ActionChunk:
        return replace(
            chunk,
            actions=self.match.actions.to_robot(chunk.actions),
            names=self.match.action_names,
        )
