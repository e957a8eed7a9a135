"""`replay --live`: recorded inferences through a real policy node, beside the same offline."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vla_runtime.types import ActionChunk, ChunkHeader
    from vla_tools.replay.recorded import RecordedRun
    from vla_tools.replay.rerun import ReplayedInference
    from vla_tools.replay.setup import Changes

# Later inferences of its episode then have another number.
_UNANSWERED = 'the node gave no chunk for an inference of its episode before it'


class LiveResult:
    """Agreement of live, offline and recorded chunks.

    Attributes:
        answered: inferences with a chunk of the same observation.
        as_offline: those equal to the offline chunk bit for bit.
        as_recorded: those equal to the recorded chunk bit for bit.
        skipped: reason to number of inferences.
        first_difference: first one unlike the offline chunk; None: all are equal.
    """

    def __init__(self) -> None:
        self.played = self.answered = self.as_offline = self.as_recorded = 0
        self.skipped: dict[str, int] = {}
        self.first_difference: dict[str, int] | None = None
        self.seconds = 0.0

    @property
    def agrees(self) -> bool:
        """True where every inference that was played gave the offline chunk."""
        return self.first_difference is None

    def as_json(self) -> dict[str, Any]:
        """Everything, of plain types."""
        return {**vars(self), 'agrees': self.agrees}

    def lines(self) -> list[str]:
        """Lines of text for a person."""
        lines = [
            f'  live: played {self.played} in {self.seconds:.1f} s, answered {self.answered}; '
            f'{self.as_offline} are the offline chunks and {self.as_recorded} the recorded ones, '
            'bit for bit'
        ]
        if self.first_difference is not None:
            lines.append(
                '  live, first that differs from offline: inference {inference} of episode '
                '{episode} (stamp {stamp_ns} ns)'.format(**self.first_difference)
            )
        return lines + [f'  live, skipped {n}: {reason}' for reason, n in self.skipped.items()]


def play_live(
    run: RecordedRun,
    changes: Changes,
    offline: Mapping[tuple[int, int, int], ReplayedInference],
    rate: float,
) -> LiveResult:
    """Play a recording through a policy node.

    Args:
        offline: by episode, number and stamp.
        rate: multiple of the recorded speed; 0: as fast as the node answers.

    Raises LivePlayError: the node did not start, or ended.
    """
    from vla_runtime.nodes.player.live import LivePlayer
    from vla_tools.replay.live_steps import StandIn, live_steps
    from vla_tools.replay.recorded import SkippedInference

    result = LiveResult()
    with tempfile.TemporaryDirectory(prefix='vla_replay_') as folder:
        options, step_time_s, ages_ns, state_ages_ns = _options(run, changes, Path(folder))
        with LivePlayer(options, step_time_s, Path(folder), _warn) as player:
            begin_s, first_ns, answers = time.monotonic(), None, True
            for found in live_steps(run, changes.settings, ages_ns, state_ages_ns):
                if isinstance(found, SkippedInference):
                    _count(result.skipped, found.reason)
                    continue
                step = found.step if isinstance(found, StandIn) else found[1]
                answers = answers or step.begins_episode
                if isinstance(found, StandIn):
                    _count(result.skipped, found.skipped.reason)
                    answers = answers and player.play(step) is not None
                    continue
                inference = found[0]
                if not answers:
                    _count(result.skipped, _UNANSWERED)
                    continue
                first_ns = step.now_ns if first_ns is None else first_ns
                if rate:
                    due_s = begin_s + (step.now_ns - first_ns) * 1e-9 / rate
                    time.sleep(max(0.0, due_s - time.monotonic()))
                recorded = inference.recorded
                key = recorded.episode, recorded.number, recorded.stamp_ns
                chunk = player.play(step)
                answers = chunk is not None
                _compare(result, chunk, offline.get(key), key, step.stamp_ns)
            result.seconds = time.monotonic() - begin_s
    return result


def _warn(message: str) -> None:
    print(f'warning: {message}', file=sys.stderr)


def _count(counts: dict[str, int], reason: str) -> None:
    counts[reason] = counts.get(reason, 0) + 1


def _compare(
    result: LiveResult,
    answer: tuple[ActionChunk, ChunkHeader] | None,
    offline: ReplayedInference | None,
    key: tuple[int, int, int],
    played_ns: int,
) -> None:
    """Count an inference; `key` is the recorded one, `played_ns` the stamp that was played."""
    result.played += 1
    chunk = None
    if answer is not None:
        played, header = answer
        if (header.episode, header.number, header.observation_ns) == (*key[:2], played_ns):
            chunk = played
    result.answered += chunk is not None
    as_offline = False
    if chunk is not None and offline is not None:
        actions = chunk.actions
        as_offline = bool((actions == offline.chunk.actions).all())
        recorded = offline.recorded.chunk
        if recorded is not None and recorded.actions.shape == actions.shape:
            result.as_recorded += bool((actions == recorded.actions).all())
    result.as_offline += as_offline
    if not as_offline and result.first_difference is None:
        result.first_difference = dict(zip(('episode', 'inference', 'stamp_ns'), key, strict=True))


def _options(
    run: RecordedRun, changes: Changes, folder: Path
) -> tuple[Any, float, dict[str, int], tuple[int, ...]]:
    """Return the node's start options, the step time, and the ages of frames and states."""
    from vla_runtime.bundle.folder import read_bundle
    from vla_runtime.nodes.player.steps import PolicyNodeOptions
    from vla_runtime.robot.file import for_replay
    from vla_tools.replay.setup import fit_recording, recorded_bundle

    description = run.inferences[0].description
    if any(one.description is not description for one in run.inferences):
        raise ValueError(
            f'{run.reader.path}: the policy node was started anew in it, and --live plays to one'
        )
    if description.jpeg_quality:
        raise ValueError(
            f'{run.reader.path}: its images went to the server as JPEG, and --live plays them raw; '
            'replay it without --live'
        )
    robot = description.robot
    (folder / robot.file.name).write_text(for_replay(robot.text), encoding='utf-8')
    if robot.urdf is not None and robot.urdf_text is not None:
        (folder / Path(robot.urdf).name).write_text(robot.urdf_text, encoding='utf-8')
    bundle = (changes.bundle or recorded_bundle(description)).resolve()
    parameters = {
        'bundle': str(bundle),
        'robot': str(folder / robot.file.name),
        'backend': changes.backend or description.backend,
        'device': changes.device or description.device,
        'precision': changes.precision or description.precision,
        'torch_threads': str(changes.threads or description.threads),
        'use_cuda_graphs': str(description.use_cuda_graphs).lower(),
    }
    if parameters['backend'] == 'torch':
        parameters['triton'] = description.triton
    played = read_bundle(bundle, verify=False)
    match, cameras, _ = fit_recording(description, played)
    ages_ns = {
        recorded: match.earlier[name].age_ns if name in match.earlier else 0
        for name, recorded in cameras.items()
    }
    options = PolicyNodeOptions(run.node, parameters)
    return options, played.spec.step_time_s, ages_ns, match.state_ages_ns
