"""Status items of the executor node."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from vla_runtime.execution.command import CommandKind, Counters, LimitKind, Reason
from vla_runtime.execution.config import ExecutorStatus, Mode
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.files.quotes import one_line
from vla_runtime.messages.diagnostics import Level, StatusItem, without_numbers
from vla_runtime.nodes.executor.control_loop import LoopStatus, TimedHandover
from vla_runtime.nodes.executor.parameters import values_in_force
from vla_runtime.nodes.executor.steady_loop import Lateness

_TEXTS = {
    Reason.TRACKING: 'executing chunk {chunk}, step {step}',
    Reason.OVERRUN: 'the next chunk is late: going on with chunk {chunk}, step {step}',
    Reason.APPROACHING: 'approaching at the set speed: {progress}',
    Reason.BRAKING: 'coming to rest, to hold',
    Reason.NOT_STARTED: 'not started',
    Reason.STOPPED: 'stopped until ~/start',
    Reason.RELEASED: 'released: nothing is published, others may command until ~/start',
    Reason.WAITING_FOR_CHUNK: '{stands}: waiting for the {which} chunk',
    Reason.SYNCHRONOUS_WAIT: '{stands}: waiting for the next chunk',
    Reason.STARVED: '{stands}: no chunk came in time',
    Reason.SPEED_SCALED_TO_ZERO: "{stands}: the robot's speed scaling is 0",
}
_WAITING = (Reason.WAITING_FOR_CHUNK, Reason.SYNCHRONOUS_WAIT, Reason.STARVED, Reason.OVERRUN)
# Faults that a second publisher of joint states may be behind.
DOUBTED = (Reason.STATE_IMPLAUSIBLE, Reason.STATE_DOUBLED)
# Faults of the measured state, which the node knows the topics of.
OF_STATES = (
    *DOUBTED,
    Reason.STATE_MISSING,
    Reason.STATE_STALE,
    Reason.STATE_FROM_FUTURE,
    Reason.STATE_NOT_FINITE,
)
# A request is answered within an inference; after so long, say who does not answer.
_SILENT_AFTER_S = 1.0
# Characters of the text of a robot that does not run; the values have everything. `vla_runtime
# status` writes the namespace and a word before and behind it, and prints no more than 300.
_LONGEST = 260
_ADVICE = re.compile(r'(:|,? then|,? and) call ~/start(, which asks once more)?\b')
# p99 of the lateness above this share of the period is worth a warning.
_LATE_SHARE = 0.5
_GAVE_WAY = (
    'the hold gave way to the robot, {}: the robot was pushed, something blocks it, or it sags '
    'under its load by max_step of the robot file'
)
_UNCONDITIONED = (
    '; handover_mode is rtc but the chunk is not tied to the plan that it joined, so it was '
    'blended: set real_time_chunking of the policy node to true, and pipeline to latency (others '
    'have a chunk made before the one before it is known)'
)


@dataclass(frozen=True)
class Answers:
    """Answers to requests, as the node sees them.

    Attributes:
        silent_s: steady seconds since the request that is still open was published; None without
            one.
        policies: publishers of the chunk topic.
        topic: the chunk topic.
        unreadable: messages on it that were no chunks.
        last_refusal: reason why the newest chunk was refused; '' when it was not.
        policy_waits: what the policy node says is missing; '' where nothing is.
    """

    silent_s: float | None
    policies: int
    topic: str
    unreadable: int
    last_refusal: str
    policy_waits: str = ''


def inactive(lifecycle: str, problem: str = '') -> StatusItem:
    """Return the status before activation and after deactivation.

    Args:
        lifecycle: label of the node's state.
        problem: why it is not further; '' where nothing went wrong.
    """
    text = f'{lifecycle}: nothing is commanded'
    if problem:
        text += f'; {problem}'
    return StatusItem('control', Level.ERROR if problem else Level.OK, text, {'mode': 'inactive'})


def control(
    status: LoopStatus,
    answers: Answers,
    conflict: str = '',
    unheard: str = '',
    about_states: str = '',
    received: Sequence[str] = (),
    controllers: str = '',
    start_refused: str = '',
    state_ages_ms: Mapping[str, float] = MappingProxyType({}),
) -> StatusItem:
    """Return the status of the present command: its kind and its reason.

    Args:
        status: status of the loop.
        answers: answers that came.
        conflict: two executors that ask one policy, or policies that answer one executor; empty
            without any.
        unheard: outputs that no node takes commands from; empty without any.
        about_states: topics and publishers behind a fault of the measured state; empty without one.
        received: topics of joint states that are stamped when they are received.
        controllers: controllers that make the motion worse than it could be; empty without any.
        start_refused: what ~/start would answer; empty where it would start, and while it runs.
        state_ages_ms: topic of joint states to the age of its newest message.
    """
    executor = status.executor
    reason = executor.reason
    text = _TEXTS.get(reason, f'{{stands}}: {reason.value}').format(
        stands='holding' if _goes_on_by_itself(executor) else 'stopped',
        chunk=executor.chunk,
        step=executor.step,
        progress=executor.progress,
        which='next' if status.counters.taken_over else 'first',
    )
    level = Level.OK
    if reason in (Reason.STARVED, Reason.OVERRUN):
        level = Level.WARN
    elif reason not in _TEXTS:
        level = Level.ERROR
    if reason in _WAITING and answers.silent_s is not None and answers.silent_s > _SILENT_AFTER_S:
        level = Level.WARN
        text += f'; asked {answers.silent_s:.1f} s ago, {_who(answers)}'
    elif reason in _WAITING and answers.policy_waits:
        text += f'; {answers.policy_waits}'
    if reason in (Reason.STARVED, Reason.OVERRUN):
        text += _too_slow(executor)
    if reason is Reason.STARVED and executor.mode is not Mode.RUNNING:
        level, text = Level.ERROR, f'stopped: {executor.detail}'
    if reason is Reason.RELEASED:
        if executor.kind is not CommandKind.IDLE:
            text = 'coming to rest, to release the robot'
        # Nobody called for it: another node has taken the robot.
        level = Level.WARN if executor.detail else Level.OK
    if executor.clamp_latched and executor.mode is not Mode.RUNNING:
        level, text = Level.ERROR, f'stopped: {executor.clamp_latched}'
    if executor.detail and (reason not in _TEXTS or reason in (Reason.BRAKING, Reason.RELEASED)):
        text += f': {executor.detail}'
    if about_states:
        text += f'; {about_states}'
    if executor.detail and reason is Reason.APPROACHING:
        text += f'; {executor.detail}'
    if executor.gave_way:
        level = max(level, Level.WARN)
        text += f'; {_GAVE_WAY.format(executor.gave_way)}'
    if executor.unconditioned:
        level = max(level, Level.WARN)
        text += _UNCONDITIONED
    if controllers and executor.mode is Mode.RUNNING:
        level = max(level, Level.WARN)
        text += f'; {controllers}'
    if unheard and executor.mode is Mode.RUNNING:
        level = max(level, Level.WARN)
        text = f'{unheard}: is the controller running? {text}'
    if conflict and executor.mode is Mode.RUNNING:
        level = Level.ERROR
        text = f'{conflict}; end one of them; {text}'
    if executor.mode is not Mode.RUNNING:
        level = max(level, Level.WARN if start_refused or answers.policy_waits else Level.OK)
        start = _before_start(executor, start_refused, answers.policy_waits)
        text = _bounded(text, start, refused=bool(start_refused))
    if executor.dry_run:
        text = f'dry run, nothing is published: {text}'
    values = _control_values(status) | {
        'stamped_when_received': ', '.join(received),
        'start_refused': start_refused,
        'policy_waits': answers.policy_waits,
        **{f'age_ms.{topic}': age_ms for topic, age_ms in state_ages_ms.items()},
    }
    return StatusItem('control', level, text, values)


def _before_start(executor: ExecutorStatus, refused: str, policy_waits: str) -> str:
    """Say what ~/start would answer, and what the policy waits for."""
    if not refused:
        text = ': call ~/start' if executor.reason is Reason.NOT_STARTED else ''
    elif without_numbers(refused.split(';')[0]) in without_numbers(executor.detail):
        text = '; ~/start is refused as long as it stays so'
    else:
        text = f'; ~/start would be refused: {refused}'
    return text + (f'; {policy_waits}' if policy_waits else '')


def _bounded(stands: str, start: str, *, refused: bool) -> str:
    """Join why the robot stands and what a start would answer, of which the second is kept longest.

    Args:
        refused: a start would be, and advice to call ~/start is left out.
    """
    if refused:
        stands = _ADVICE.sub('', stands)
    room = max(_LONGEST - len(start), _LONGEST // 2)
    if len(stands) > room:
        # The cause comes first.
        stands = f'{stands[:room]} …'
    return one_line(stands + start, _LONGEST)


def _goes_on_by_itself(executor: ExecutorStatus) -> bool:
    """Return whether this is a hold; a stop waits for ~/start, the latch for ~/reset."""
    return executor.mode is Mode.RUNNING and executor.reason is not Reason.CLAMP_LATCH


def _too_slow(executor: ExecutorStatus) -> str:
    """Say that no answer can come in time; empty where this one alone is late."""
    parameters, steps = executor.parameters, executor.parameters.replan_interval
    mend = 'raise replan_interval'
    if parameters.overrun == 'hold':
        mend += ' or set overrun to continue'
    else:
        steps += parameters.max_overrun_steps
    delay, horizon = executor.delay_estimate, executor.horizon
    if delay <= steps:
        return ''
    if 0 < horizon <= delay:
        return (
            f'; answers take about {delay} steps and a chunk has {horizon}: lower denoise_steps, '
            'choose a faster backend or a policy with longer chunks'
        )
    return f'; answers take about {delay} steps and the robot moves for {steps} of them: {mend}'


def _control_values(status: LoopStatus) -> dict[str, object]:
    executor, counters = status.executor, status.counters
    return {
        'mode': executor.mode.value,
        'kind': executor.kind.value,
        'reason': executor.reason.value,
        'detail': executor.detail,
        'gave_way': executor.gave_way,
        'episode': executor.episode,
        'step': executor.step,
        'chunk': executor.chunk,
        'pending_chunk': executor.pending_chunk,
        'replan_interval': executor.parameters.replan_interval,
        'delay_steps': executor.delay_estimate,
        'request_open': executor.open_requests > 0,
        'open_requests': executor.open_requests,
        'most_open_requests': executor.most_open_requests,
        'observation_age_ms': executor.observation_age_ms,
        'observation_age_mean_ms': counters.mean_observation_age_ms,
        'clamp_latched': bool(executor.clamp_latched),
        'dry_run': executor.dry_run,
        'sent': status.sent,
        'steps': counters.steps,
        'starved_ticks': counters.starved_ticks,
        'starvations': counters.starvations,
        'overrun_ticks': counters.overrun_ticks,
        'overrun_steps': counters.overrun_steps,
        'limited_ticks': counters.limited_ticks,
        'limited_most': limited_most(counters.limited),
        **{f'limited.{name}.{by.value}': count for (name, by), count in counters.limited.items()},
        **{f'holds.{key.value}': count for key, count in counters.holds.items() if count},
        **_parameters(executor.parameters, dry_run=executor.dry_run),
    }


def limited_most(limited: Mapping[tuple[str, LimitKind], int]) -> str:
    """Name the joint and the limit that changed the command most often; empty if none did."""
    if not limited:
        return ''
    (name, by), count = max(limited.items(), key=lambda item: item[1])
    return f"'{name}' by {by.value}, {count} ticks"


def _parameters(parameters: ExecutorParameters, *, dry_run: bool) -> dict[str, object]:
    in_force = values_in_force(parameters, dry_run=dry_run)
    return {f'parameter.{name}': value for name, value in in_force.items()}


def _who(answers: Answers) -> str:
    if answers.policy_waits:
        return answers.policy_waits
    if not answers.policies:
        return f'and nobody publishes {answers.topic}: is the policy node running, and active?'
    return 'without an answer: is the policy node running, and what does its status say?'


def chunks(status: LoopStatus, answers: Answers) -> StatusItem:
    """Return the status of the chunks: counts of accepted and refused ones."""
    counters = status.counters
    stamps = status.executor.wrong_stamps
    level = Level.WARN if answers.last_refusal or stamps else Level.OK
    text = f'{counters.received} received, {counters.accepted} accepted'
    if answers.last_refusal:
        text += f'; the newest was refused: {answers.last_refusal}'
    if stamps:
        text += f'; {stamps}'
    return StatusItem('chunks', level, text, _chunk_values(counters, answers, status.executor))


def _chunk_values(
    counters: Counters, answers: Answers, executor: ExecutorStatus
) -> dict[str, object]:
    return {
        'newest_refusal': answers.last_refusal,
        'requests': counters.requests,
        'requests_timed_out': counters.requests_timed_out,
        'received': counters.received,
        'accepted': counters.accepted,
        'taken_over': counters.taken_over,
        'superseded': counters.superseded,
        'dropped': counters.dropped,
        'late': counters.late,
        'short': counters.short,
        'clamped': counters.clamped,
        'policy_restarts': counters.policy_restarts,
        'unreadable': answers.unreadable,
        'publishers': answers.policies,
        **{f'refused.{key.value}': count for key, count in counters.refused.items() if count},
    }


def timing(lateness: Lateness, rate_hz: float, counters: Counters) -> StatusItem:
    """Return the status of the tick: its punctuality."""
    period_ms = 1e3 / rate_hz
    late = lateness.p99_ms > _LATE_SHARE * period_ms
    text = f'p99 {lateness.p99_ms:.2f} ms late, at most {lateness.maximum_ms:.2f} ms'
    if late:
        text += (
            f', of a period of {period_ms:.1f} ms: the machine is too busy; give the node a CPU of '
            'its own (cpu_affinity) and a realtime_priority'
        )
    return StatusItem(
        'tick',
        Level.WARN if late else Level.OK,
        text,
        {
            'rate_hz': rate_hz,
            'ticks': lateness.ticks,
            'late_p50_ms': lateness.p50_ms,
            'late_p99_ms': lateness.p99_ms,
            'late_max_ms': lateness.maximum_ms,
            'skipped': lateness.skipped,
            'late_ticks': counters.late_ticks,
            'clock_jumps': counters.clock_jumps,
            'states_malformed': counters.states_malformed,
            'states_out_of_order': counters.states_out_of_order,
            'states_implausible': counters.states_implausible,
            'internal_errors': counters.internal_errors,
        },
    )


def seam(timed: TimedHandover, names: tuple[str, ...]) -> StatusItem:
    """Return the report of a hand-over."""
    report = timed.seam
    position, velocity = np.abs(report.position_jump), np.abs(report.velocity_jump)
    worst = int(np.argmax(position))
    text = f'chunk {report.chunk} took over at its row {report.join_index}'
    unconditioned = timed.parameters.handover.mode == 'rtc' != report.mode and not report.from_hold
    return StatusItem(
        'seam',
        Level.WARN if report.late or unconditioned else Level.OK,
        text + (', late' if report.late else '') + (_UNCONDITIONED if unconditioned else ''),
        {
            'stamp_ns': timed.stamp_ns,
            'chunk': report.chunk,
            'step': report.step,
            'row': report.join_index,
            'delay_steps': report.delay_steps,
            'mode': report.mode,
            'late': report.late,
            'from_hold': report.from_hold,
            'position_jump': float(position[worst]),
            'position_jump_of': names[worst],
            'velocity_jump': float(velocity.max()),
            **_parameters(timed.parameters, dry_run=timed.dry_run),
        },
    )
