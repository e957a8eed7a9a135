"""What it means that the executor refused a chunk, for a person who reads the report."""

from __future__ import annotations

from vla_runtime.execution.command import Refusal

MEANINGS: dict[Refusal, str] = {
    Refusal.NOT_RUNNING: 'it came while the executor was not started; usual after a stop, when the '
    'answer to the last request is still on its way',
    Refusal.HOLDING: 'the executor holds the robot and waits for a person',
    Refusal.APPROACHING: 'the robot was still on its way to where a plan may begin',
    Refusal.OTHER_EPISODE: 'it answers a request of an episode that has ended',
    Refusal.DUPLICATE: 'the same chunk came before',
    Refusal.OUT_OF_ORDER: 'its observation is older than that of the chunk in force',
    Refusal.OBSERVATION_FROM_FUTURE: 'its observation is later than now: clocks differ',
    Refusal.OBSERVATION_TOO_OLD: 'its observation is older than max_observation_age_s',
    Refusal.OBSERVATION_UNKNOWN: 'its observation was made before the executor was started, so '
    'nobody knows which step it belongs to; usual for the first one after a start',
    Refusal.MALFORMED: 'it is no table of numbers, a row a step',
    Refusal.WRONG_JOINTS: "its joints are not the robot's",
    Refusal.NOT_FINITE: 'it holds a number that is not finite',
    Refusal.NO_ROTATION: 'it holds a rotation that is none',
    Refusal.WRONG_STEP_TIME: 'its step time is not that of the chunks before',
    Refusal.INTERVAL_EXCEEDS_HORIZON: 'it has fewer steps than replan_interval asks for',
    Refusal.LIMIT: "it violates a limit that the robot file's on_violation refuses",
    Refusal.CLAMP_LATCH: 'too many chunks had to be clamped; ~/reset allows more',
    Refusal.USEFUL_PART_PAST: 'it came so late that the steps to execute were over',
    Refusal.START_TOO_FAR: 'it begins too far from where the robot is',
    Refusal.INTERNAL_ERROR: 'a fault in the executor; its log has more',
}
