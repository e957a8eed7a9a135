"""Explanations of refused chunks, for the reader of the report."""

from __future__ import annotations

from vla_runtime.execution.command import ChunkRefusal

MEANINGS: dict[ChunkRefusal, str] = {
    ChunkRefusal.NOT_RUNNING: 'it came while the executor was not started; usual after a stop, '
    'when the answer to the last request is still on its way',
    ChunkRefusal.HOLDING: 'the robot was held by a fault that passes by itself, or coming to rest',
    ChunkRefusal.APPROACHING: 'the robot was still on its way to where a plan may begin',
    ChunkRefusal.OTHER_EPISODE: 'it answers a request of an episode that has ended',
    ChunkRefusal.DUPLICATE: 'the same chunk came before',
    ChunkRefusal.REQUEST_CLOSED: 'its request was given up after request_timeout_s, was answered '
    'before, or ended with a stop',
    ChunkRefusal.OUT_OF_ORDER: 'its observation is older than that of the chunk in force',
    ChunkRefusal.OBSERVATION_FROM_FUTURE: 'its observation is later than now: clocks differ',
    ChunkRefusal.OBSERVATION_TOO_OLD: 'its observation is older than max_observation_age_s',
    ChunkRefusal.OBSERVATION_UNKNOWN: 'its observation was made before the executor was started, '
    'so its step is not known; usual for the first one after a start',
    ChunkRefusal.MALFORMED: 'it is no table of numbers, a row a step',
    ChunkRefusal.WRONG_JOINTS: "its joints are not the robot's",
    ChunkRefusal.NOT_FINITE: 'it holds a number that is not finite',
    ChunkRefusal.NO_ROTATION: 'it holds a rotation that is none',
    ChunkRefusal.OUT_OF_REACH: 'the arm cannot reach a pose in it',
    ChunkRefusal.WRONG_STEP_TIME: 'its step time is not that of the chunks before',
    ChunkRefusal.INTERVAL_EXCEEDS_HORIZON: 'it has fewer steps than replan_interval asks for',
    ChunkRefusal.LIMIT: "it violates a limit that the robot file's on_violation refuses",
    ChunkRefusal.CLAMP_LATCH: 'too many chunks had to be clamped; ~/reset allows more',
    ChunkRefusal.USEFUL_PART_PAST: 'it came so late that the steps to execute were over',
    ChunkRefusal.START_TOO_FAR: 'it begins too far from where the robot is',
    ChunkRefusal.INTERNAL_ERROR: 'a fault in the executor; its log has more',
}

# What comes of the last request before a stop, or of the first frames after a start.
_AT_A_START = frozenset(
    {
        ChunkRefusal.NOT_RUNNING,
        ChunkRefusal.OTHER_EPISODE,
        ChunkRefusal.REQUEST_CLOSED,
        ChunkRefusal.OBSERVATION_UNKNOWN,
        ChunkRefusal.APPROACHING,
    }
)


def in_order(reason: ChunkRefusal, count: int, starts: int) -> bool:
    """Return whether a run in which nothing is wrong may have so many of them."""
    return reason in _AT_A_START and count <= starts
