"""Status items of the executor node."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from vla_runtime.execution.command import CommandKind, Counters, LimitKind, Reason
from vla_runtime.execution.config import ExecutorStatus, Mode
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.files.quotes import one_line
from vla_runtime.messages.diagnostics import Level, StatusItem, without_numbers
from vla_runtime.nodes.executor.control_loop import DriverChange, LoopStatus, TimedHandover
from vla_runtime.nodes.executor.parameters import values_in_force
from vla_runtime.nodes.executor.steady_loop import Lateness

_TEXTS = {
    Reason.TRACKING: 'executing chunk {chunk}, step {step}',
    Reason.OVERRUN: 'the next chunk is late: going on with chunk {chunk}, step {step}',
    Reason.APPROACHING: 'approaching at the set speed: {progress}',
    Reason.LEADING: 'a leader leads the robot; the policy is asked for the record alone',
    Reason.BRAKING: 'coming to rest, to hold',
    Reason.NOT_STARTED: 'not started',
    Reason.STOPPED: 'stopped until ~/start',
    Reason.PAUSED: 'paused until ~/resume',
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
    'handover_mode is rtc but the chunk is not tied to the plan that it joined, so it was '
    'blended: set real_time_chunking of the policy node to true, and pipeline to latency (others '
    'have a chunk made before the one before it is known)'
)


@dataclass(frozen=True)
class Answers:
    """Answers to requests, as the node sees them.

    Attributes:
        silent_s: steady seconds since the open request was published; None without one.
        unreadable: messages on it that were no chunks.
        last_refusal: why the newest chunk was refused; '' when it was not.
        policy_waits: what the policy node says is missing; '' where nothing is.
    """

    silent_s: float | None
    policies: int
    topic: str
    unreadable: int
    last_refusal: str
    policy_waits: str = ''


def inactive(lifecycle: str, problem: str = '') -> StatusItem:
    """Return the status while inactive; `problem` says what went wrong, '' for nothing."""
    text = f'{lifecycle}: nothing is commanded'
    if problem:
        text += f'; {problem}'
    return StatusItem('control', Level.ERROR if problem else Level.OK, text, {'mode': 'inactive'})


@dataclass(frozen=True)
class Facts:
    """What the status of the present command is made of; texts are empty where all is well.

    Attributes:
        conflict: two executors that ask one policy, or policies that answer one executor.
        without_subscribers: outputs that no node takes commands from.
        about_states: topics and publishers behind a fault of the measured state.
        received: topics of joint states that are stamped when they are received.
        controllers: controllers that make the motion worse than it could be.
        start_refused: what ~/start would answer; empty also while the robot runs.
        state_ages_ms: topic of joint states to the age of its newest message.
    """

    status: LoopStatus
    answers: Answers
    conflict: str = ''
    without_subscribers: str = ''
    about_states: str = ''
    received: Sequence[str] = ()
    controllers: str = ''
    start_refused: str = ''
    state_ages_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def executor(self) -> ExecutorStatus:
        return self.status.executor

    @property
    def reason(self) -> Reason:
        return self.executor.reason

    @property
    def runs(self) -> bool:
        return self.executor.mode is Mode.RUNNING

    @property
    def latched(self) -> bool:
        return bool(self.executor.clamp_latched) and not self.runs

    @property
    def lost(self) -> bool:
        return self.reason is Reason.STARVED and not self.runs and not self.latched

    @property
    def releases(self) -> bool:
        moves = self.executor.kind is not CommandKind.IDLE
        return self.reason is Reason.RELEASED and moves and not self.latched

    @property
    def usual(self) -> bool:
        """Words and level of the reason alone say how the robot stands."""
        return not (self.latched or self.lost or self.releases)

    @property
    def waits(self) -> bool:
        return self.reason in _WAITING and self.usual

    @property
    def silent(self) -> bool:
        """Whether the oldest open request has gone unanswered for longer than an inference."""
        silent_s = self.answers.silent_s
        return silent_s is not None and silent_s > _SILENT_AFTER_S

    @property
    def known(self) -> bool:
        """Whether the reason has words of its own, as no fault has."""
        return self.reason in _TEXTS

    @property
    def same_refusal(self) -> bool:
        """Whether ~/start is refused for what the robot stands for."""
        refused = without_numbers(self.start_refused.split(';')[0])
        return refused in without_numbers(self.executor.detail)


@dataclass(frozen=True)
class Rule:
    """One thing to say of the present command; `joint` stands between earlier words and these."""

    when: Callable[[Facts], object]
    text: Callable[[Facts], str]
    level: Level = Level.OK
    joint: str = '; '


def _usual(facts: Facts) -> str:
    executor = facts.executor
    return _TEXTS.get(executor.reason, f'{{stands}}: {executor.reason.value}').format(
        stands='holding' if _goes_on_by_itself(executor) else 'stopped',
        chunk=executor.chunk,
        step=executor.step,
        progress=executor.progress,
        which='next' if facts.status.counters.taken_over else 'first',
    )


_LATE = (Reason.STARVED, Reason.OVERRUN)
# Why the robot stands or moves, in the order of the words. The level is the highest of those said.
RULES = [
    Rule(lambda f: f.runs and f.conflict, lambda f: f'{f.conflict}; end one of them;', Level.ERROR),
    Rule(
        lambda f: f.runs and f.without_subscribers,
        lambda f: f'{f.without_subscribers}: is the controller running?',
        Level.WARN,
        ' ',
    ),
    # One of the next six says how the robot stands.
    Rule(lambda f: f.latched, lambda f: f'stopped: {f.executor.clamp_latched}', Level.ERROR, ' '),
    Rule(lambda f: f.lost, lambda f: f'stopped: {f.executor.detail}', Level.ERROR, ' '),
    Rule(lambda f: f.releases, lambda f: 'coming to rest, to release the robot', joint=' '),
    Rule(lambda f: f.usual and f.reason in _LATE, _usual, Level.WARN, ' '),
    Rule(lambda f: f.usual and not f.known, _usual, Level.ERROR, ' '),
    Rule(lambda f: f.usual and f.known and f.reason not in _LATE, _usual, joint=' '),
    Rule(
        lambda f: f.waits and f.silent,
        lambda f: f'asked {f.answers.silent_s:.1f} s ago, {_who(f.answers)}',
        Level.WARN,
    ),
    Rule(
        lambda f: f.waits and not f.silent and f.answers.policy_waits,
        lambda f: f.answers.policy_waits,
    ),
    Rule(
        lambda f: f.usual and f.reason in _LATE and _too_slow(f.executor),
        lambda f: _too_slow(f.executor),
    ),
    # Nobody called for a release with a detail: another node has taken the robot.
    Rule(
        lambda f: f.executor.detail and f.reason is Reason.RELEASED,
        lambda f: f.executor.detail,
        Level.WARN,
        ': ',
    ),
    Rule(
        lambda f: f.executor.detail and (not f.known or f.reason is Reason.BRAKING),
        lambda f: f.executor.detail,
        joint=': ',
    ),
    Rule(
        lambda f: f.executor.detail and f.reason is Reason.PAUSED,
        lambda f: f.executor.detail,
        joint=': ',
    ),
    Rule(lambda f: f.about_states, lambda f: f.about_states),
    Rule(
        lambda f: f.executor.detail and f.reason is Reason.APPROACHING,
        lambda f: f.executor.detail,
    ),
    Rule(
        lambda f: f.executor.gave_way,
        lambda f: _GAVE_WAY.format(f.executor.gave_way),
        Level.WARN,
    ),
    Rule(lambda f: f.executor.unconditioned, lambda f: _UNCONDITIONED, Level.WARN),
    Rule(lambda f: f.runs and f.controllers, lambda f: f.controllers, Level.WARN),
]
# What ~/start would answer, and what the policy waits for.
START_RULES = [
    Rule(
        lambda f: not f.start_refused and f.reason is Reason.NOT_STARTED,
        lambda f: 'call ~/start',
        joint=': ',
    ),
    Rule(
        lambda f: f.start_refused and f.same_refusal,
        lambda f: '~/start is refused as long as it stays so',
        Level.WARN,
    ),
    Rule(
        lambda f: f.start_refused and not f.same_refusal,
        lambda f: f'~/start would be refused: {f.start_refused}',
        Level.WARN,
    ),
    Rule(lambda f: f.answers.policy_waits, lambda f: f.answers.policy_waits, Level.WARN),
]


def control(facts: Facts) -> StatusItem:
    said = [rule for rule in RULES if rule.when(facts)]
    of_start = [] if facts.runs else [rule for rule in START_RULES if rule.when(facts)]
    first, *more = said
    text = first.text(facts) + _joined(more, facts)
    if not facts.runs:
        text = _bounded(text, _joined(of_start, facts), refused=bool(facts.start_refused))
    if facts.executor.dry_run:
        text = f'dry run, nothing is published: {text}'
    values = _control_values(facts.status) | {
        'stamped_when_received': ', '.join(facts.received),
        'start_refused': facts.start_refused,
        'policy_waits': facts.answers.policy_waits,
        **{f'age_ms.{topic}': age_ms for topic, age_ms in facts.state_ages_ms.items()},
    }
    level = max(rule.level for rule in (*said, *of_start))
    return StatusItem('control', level, text, values)


def _joined(rules: Sequence[Rule], facts: Facts) -> str:
    return ''.join(rule.joint + rule.text(facts) for rule in rules)


def _bounded(stands: str, start: str, *, refused: bool) -> str:
    """Join why the robot stands and what a start would answer; no advice where it is refused."""
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
            f'answers take about {delay} steps and a chunk has {horizon}: lower denoise_steps, '
            'choose a faster backend or a policy with longer chunks'
        )
    return f'answers take about {delay} steps and the robot moves for {steps} of them: {mend}'


def _control_values(status: LoopStatus) -> dict[str, object]:
    executor, counters = status.executor, status.counters
    return {
        'mode': executor.mode.value,
        'driver': executor.driver.value,
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


def driver(change: DriverChange) -> StatusItem:
    """Return what a recording keeps of who drives, from which command on."""
    return StatusItem(
        'driver',
        Level.OK,
        f'{change.driver.value} drives the robot',
        {
            'stamp_ns': change.stamp_ns,
            'driver': change.driver.value,
            'before': change.before.value,
            'reason': change.reason.value,
        },
    )


def timing(lateness: Lateness, rate_hz: float, counters: Counters) -> StatusItem:
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
    report = timed.seam
    position, velocity = np.abs(report.position_jump), np.abs(report.velocity_jump)
    worst = int(np.argmax(position))
    text = f'chunk {report.chunk} took over at its row {report.join_index}'
    unconditioned = timed.parameters.handover.mode == 'rtc' != report.mode and not report.from_hold
    return StatusItem(
        'seam',
        Level.WARN if report.late or unconditioned else Level.OK,
        text + (', late' if report.late else '') + (f'; {_UNCONDITIONED}' if unconditioned else ''),
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
