"""Words of the executor's status."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import LimitKind, Reason
from vla_runtime.execution.config import ExecutorConfig, Mode
from vla_runtime.execution.executor import ChunkExecutor
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.messages.diagnostics import Level
from vla_runtime.nodes.executor.control_loop import LoopStatus
from vla_runtime.nodes.executor.status import Answers, Facts, control

ANSWERS = Answers(silent_s=None, policies=1, topic='/action_chunk', unreadable=0, last_refusal='')


@pytest.mark.parametrize(
    ('overrun', 'delay', 'horizon', 'words'),
    [
        ('hold', 4, 50, ''),
        ('hold', 7, 0, '7 steps and the robot moves for 4 of them: raise replan_interval or set'),
        ('hold', 7, 8, '7 steps and the robot moves for 4 of them: raise replan_interval or set'),
        ('hold', 8, 8, '8 steps and a chunk has 8: lower denoise_steps'),
        ('continue', 7, 50, ''),
        ('continue', 9, 50, '9 steps and the robot moves for 7 of them: raise replan_interval'),
    ],
)
def test_a_pause_says_whether_the_next_answer_will_be_late_too(
    overrun: str, delay: int, horizon: int, words: str
) -> None:
    parameters = ExecutorParameters(
        replan_interval=4,
        overrun=overrun,  # type: ignore[arg-type]
        max_overrun_steps=3,
    )
    executor = ChunkExecutor(ExecutorConfig((Column('a'),)), parameters)
    # A starved robot that is not running any more needs a start, and says that instead.
    starved = replace(
        executor.status(),
        mode=Mode.RUNNING,
        reason=Reason.STARVED,
        delay_estimate=delay,
        horizon=horizon,
    )
    text = control(Facts(LoopStatus(starved, executor.counters, 0), ANSWERS, '')).text
    assert 'no chunk came in time' in text
    assert words in text and ('answers take' in text) == bool(words)


@pytest.mark.parametrize(
    'reason',
    [
        Reason.TRACKING_ERROR,
        Reason.STATE_STALE,
        Reason.CONTROLLER,
        Reason.SPEED_SCALED_TO_ZERO,
        Reason.STARVED,
    ],
)
def test_a_hold_and_a_stop_of_one_reason_are_told_apart(reason: Reason) -> None:
    executor = ChunkExecutor(ExecutorConfig((Column('a'),)), ExecutorParameters())
    for mode, begin in ((Mode.RUNNING, 'holding:'), (Mode.STOPPED, 'stopped:')):
        shown = replace(executor.status(), mode=mode, reason=reason)
        item = control(Facts(LoopStatus(shown, executor.counters, 0), ANSWERS))
        assert item.text.startswith(begin)
        assert item.values['mode'] == mode.value


def test_a_closed_latch_is_a_stop_because_it_waits_for_a_reset() -> None:
    executor = ChunkExecutor(ExecutorConfig((Column('a'),)), ExecutorParameters())
    shown = replace(executor.status(), mode=Mode.RUNNING, reason=Reason.CLAMP_LATCH)
    text = control(Facts(LoopStatus(shown, executor.counters, 0), ANSWERS)).text
    assert text.startswith('stopped:')


def test_the_joint_and_the_limit_that_changed_commands_most_are_named() -> None:
    executor = ChunkExecutor(ExecutorConfig((Column('a'), Column('b'))), ExecutorParameters())
    values = control(Facts(LoopStatus(executor.status(), executor.counters, 0), ANSWERS)).values
    assert values['limited_most'] == ''
    executor.counters.count_limited([('a', LimitKind.VELOCITY), ('b', LimitKind.ACCELERATION)])
    executor.counters.count_limited([('b', LimitKind.ACCELERATION)])
    values = control(Facts(LoopStatus(executor.status(), executor.counters, 0), ANSWERS)).values
    assert (values['limited_ticks'], values['limited.b.acceleration']) == (2, 2)
    assert values['limited.a.velocity'] == 1
    assert values['limited_most'] == "'b' by acceleration, 2 ticks"


def status_of(mode: Mode, reason: Reason, detail: str = '') -> LoopStatus:
    executor = ChunkExecutor(ExecutorConfig((Column('a'),)), ExecutorParameters())
    shown = replace(executor.status(), mode=mode, reason=reason, detail=detail)
    return LoopStatus(shown, executor.counters, 0)


def test_before_a_start_the_status_says_what_would_refuse_it() -> None:
    idle = status_of(Mode.IDLE, Reason.NOT_STARTED)
    ready = control(Facts(idle, ANSWERS))
    assert (ready.level, ready.text) == (Level.OK, 'not started: call ~/start')
    refused = control(Facts(idle, ANSWERS, start_refused='the latch is closed'))
    assert refused.level == Level.WARN
    assert refused.values['start_refused'] in refused.text
    assert 'call ~/start' not in refused.text


def test_a_stop_whose_cause_stays_is_not_told_twice() -> None:
    detail = 'the measured position of a is 0.2 s old; this lasted for 1.5 s'
    stopped = status_of(Mode.STOPPED, Reason.STATE_STALE, detail)
    same = control(Facts(stopped, ANSWERS, start_refused='the measured position of a is 9.1 s old'))
    assert same.text.count('measured position') == 1
    assert '~/start' in same.text
    other = control(Facts(stopped, ANSWERS, start_refused='the latch is closed'))
    assert 'the latch is closed' in other.text


@pytest.mark.parametrize(
    ('mode', 'reason'),
    [
        (Mode.IDLE, Reason.NOT_STARTED),
        (Mode.RUNNING, Reason.WAITING_FOR_CHUNK),
        (Mode.RUNNING, Reason.STARVED),
        (Mode.STOPPED, Reason.STARVED),
    ],
)
def test_what_the_policy_waits_for_is_repeated(mode: Mode, reason: Reason) -> None:
    waits = '/vla_policy waits: the camera'
    said = control(Facts(status_of(mode, reason), replace(ANSWERS, policy_waits=waits)))
    assert said.text.count(waits) == 1
    asked = replace(ANSWERS, policy_waits=waits, silent_s=5.0)
    assert control(Facts(status_of(mode, reason), asked)).text.count(waits) == 1
    moving = control(Facts(status_of(Mode.RUNNING, Reason.TRACKING), asked))
    assert waits not in moving.text


def test_only_the_first_chunk_is_called_the_first() -> None:
    waiting = status_of(Mode.RUNNING, Reason.WAITING_FOR_CHUNK)
    assert 'first chunk' in control(Facts(waiting, ANSWERS)).text
    waiting.counters.taken_over = 19
    assert 'first chunk' not in control(Facts(waiting, ANSWERS)).text


@pytest.mark.parametrize('advice', [': call ~/start', ', then call ~/start', ', and call ~/start'])
def test_a_stop_does_not_advise_a_start_that_would_be_refused(advice: str) -> None:
    stopped = status_of(Mode.STOPPED, Reason.STARVED, f'the policy has not answered{advice}')
    assert 'call ~/start' in control(Facts(stopped, ANSWERS)).text
    refused = control(Facts(stopped, ANSWERS, start_refused='the latch is closed'))
    assert 'call ~/start' not in refused.text and 'the latch is closed' in refused.text


def test_a_stops_text_is_bounded_and_keeps_both_ends() -> None:
    detail = f"'shoulder_pan' does not follow: {'look at it, ' * 20}: call ~/start"
    stopped = status_of(Mode.STOPPED, Reason.TRACKING_ERROR, detail)
    waits = replace(ANSWERS, policy_waits=f'/vla_policy waits: {"camera " * 20}is 6 s old')
    item = control(Facts(stopped, waits, start_refused=f'nothing {"of the robot " * 20}is here'))
    assert len(item.text) < 300
    assert item.text.startswith('stopped') and item.text.endswith('is 6 s old')
    # In full for whoever looks further.
    assert item.values['detail'] == detail


def test_of_a_stop_without_a_refusal_the_cause_is_kept() -> None:
    cause = "'shoulder_pan' is blocked, 0.05 of at most 0.05 (max_step) for 1.0 s (blocked_after_s)"
    stopped = status_of(Mode.STOPPED, Reason.TRACKING_ERROR, f'{cause}; {"look at it, " * 40}')
    assert cause in control(Facts(stopped, ANSWERS)).text
