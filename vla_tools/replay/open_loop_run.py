"""Open loop over one bag: policy loaded, predictions made, compared and put in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.files.quotes import counted
from vla_runtime.nodes.policy.description import find_description, is_description
from vla_runtime.nodes.policy.robot_policy import RobotPolicy
from vla_runtime.nodes.policy.settings import live_settings, settings_from
from vla_runtime.policy import Policy
from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.robot.match import match_robot
from vla_runtime.robot.schema import Robot
from vla_tools.replay.bag_topics import find_instructions, find_topics
from vla_tools.replay.motion import OpenLoopError, open_loop_error
from vla_tools.replay.open_loop import OpenLoop, Prediction
from vla_tools.replay.recorded import ReplayError
from vla_tools.replay.setup import Changes, recorded_bundle

_STEPS_SHOWN = 10
# Yields the predictions with progress.
Progress = Callable[[Iterable[Prediction]], Iterable[Prediction]]


@dataclass(frozen=True)
class OpenLoopResult:
    """Result of one bag.

    `error` by step ahead and joint; `missing`: reason to number of predictions; `times`: source of
    message times other than stamps; `problems`: unreadable parts.
    """

    recording: str
    error: OpenLoopError
    missing: dict[str, int]
    times: list[str]
    problems: list[str]
    replay_s: float

    def as_json(self) -> dict[str, Any]:
        """Everything, of plain types; None where nothing was measured."""
        error = self.error
        return {
            'recording': self.recording,
            'is_broken': False,
            'predictions': error.predictions,
            'missing': self.missing,
            'times': self.times,
            'problems': self.problems,
            'replay_s': self.replay_s,
            'joints': list(error.joints),
            'units': list(error.units),
            'step_time_s': error.step_time_s,
            'mean_error_by_step': _plain(error.mean),
            'largest_error_by_step': _plain(error.largest),
            'standing_still_by_step': _plain(error.still),
        }

    def lines(self) -> list[str]:
        """Lines of text for a person."""
        error = self.error
        lines = [
            f'{self.recording}: open loop, {counted(error.predictions, "prediction")} in '
            f'{self.replay_s:.1f} s'
        ]
        for reason, count in self.missing.items():
            lines.append(f'  no prediction {count} times: {reason}')
        lines += [f'  time: {text}' for text in self.times]
        for problem in self.problems:
            lines.append(f'  problem: {problem}')
        lines += ['', '  mean error; in brackets that of standing still']
        # Two columns never touch, however long a joint's name is.
        wide = 2 + max(18, *map(len, error.joints))
        lines.append('  ahead, s ' + ''.join(f'{name:>{wide}}' for name in error.joints))
        lines.append('           ' + ''.join(f'{unit:>{wide}}' for unit in error.units))
        steps = len(error.mean)
        for step in range(0, steps, max(1, -(-steps // _STEPS_SHOWN))):
            cells = zip(error.mean[step], error.still[step], strict=True)
            lines.append(
                f'  {step * error.step_time_s:<9.2f}'
                + ''.join(f'{f"{mean:.3g} ({still:.3g})":>{wide}}' for mean, still in cells)
            )
        return lines


def run_open_loop(
    path: Path,
    changes: Changes,
    *,
    robot: Robot | None,
    instruction: str | None,
    every_s: float,
    namespace: str | None = None,
    progress: Progress = lambda predictions: predictions,
) -> OpenLoopResult:
    """Predict along a bag every `every_s` seconds and compare with the motion in it.

    What `changes` leaves out is as recorded, or the default in a bag without this policy. None:
    `robot` and `instruction` of the bag, the only `namespace`. Raises ValueError: something is
    missing in the bag, or the policy cannot be loaded.
    """
    begin_s = perf_counter()
    reader = BagReader(path)
    changes, robot = _with_recorded(reader, changes, robot, namespace)
    policy = _load(changes, robot)
    try:
        topics = find_topics(reader, robot, policy, namespace)
        # A policy without language needs none in the bag.
        recorded = policy.policy.reads_instruction and not instruction
        instructions = (
            find_instructions(reader, topics).at if recorded else (lambda _: instruction or '')
        )
        given = {name: row.default for name, row in live_settings().items()}
        settings = settings_from({**given, **changes.settings})
        loop = OpenLoop(reader, topics, policy, settings, instructions, every_s)
        made = [(one.stamp_ns, one.chunk) for one in progress(loop.predictions())]
    finally:
        policy.policy.close()
    if not made:
        reasons = ', '.join(loop.missing) or f'it is shorter than --every {every_s:g} s'
        raise ReplayError(f'{path}: no prediction could be made: {reasons}')
    error = open_loop_error(made, loop.motion, robot)
    return OpenLoopResult(
        str(path),
        error,
        dict(loop.missing),
        topics.clock.notes,
        reader.problems,
        perf_counter() - begin_s,
    )


def _with_recorded(
    reader: BagReader, changes: Changes, robot: Robot | None, namespace: str | None
) -> tuple[Changes, Robot]:
    """Fill in from the recording what was not given."""
    if robot is not None and changes.bundle is not None:
        return changes, robot
    recorded = find_description(reader.texts(is_description), namespace, reader.note)
    if recorded is None:
        missing = '--robot' if robot is None else '--bundle'
        problems = '; '.join(reader.problems[:3])
        raise ReplayError(
            f'{reader.path}: no policy node is described in it{problems and f" ({problems})"}, so '
            f'give {missing}'
        )
    filled = Changes(
        changes.bundle or recorded_bundle(recorded),
        changes.backend or recorded.backend,
        changes.device or recorded.device,
        changes.precision or recorded.precision,
        changes.threads,
        changes.settings,
    )
    return filled, robot or recorded.robot


def _load(changes: Changes, robot: Robot) -> RobotPolicy:
    assert changes.bundle is not None
    bundle = read_bundle(changes.bundle, verify=False)
    match = match_robot(robot, bundle.spec, changes.bundle)
    policy = Policy.load(
        bundle,
        changes.backend or 'torch',
        changes.device or 'cpu',
        precision=changes.precision or 'float32',
        threads=changes.threads or 0,
    )
    return RobotPolicy(policy, match)


def _plain(values: np.ndarray) -> list[list[float | None]]:
    return [[float(v) if np.isfinite(v) else None for v in row] for row in values]
