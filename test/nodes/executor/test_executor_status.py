"""Words of the executor's status."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import LimitKind, Reason
from vla_runtime.execution.config import ExecutorConfig, Mode
from vla_runtime.execution.executor import ChunkExecutor
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.nodes.executor.control_loop import LoopStatus
from vla_runtime.nodes.executor.status import Answers, control

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
    text = control(LoopStatus(starved, executor.counters, 0), ANSWERS, '').text
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
        item = control(LoopStatus(shown, executor.counters, 0), ANSWERS)
        assert item.text.startswith(begin)
        assert item.values['mode'] == mode.value


def test_a_closed_latch_is_a_stop_because_it_waits_for_a_reset() -> None:
    executor = ChunkExecutor(ExecutorConfig((Column('a'),)), ExecutorParameters())
    shown = replace(executor.status(), mode=Mode.RUNNING, reason=Reason.CLAMP_LATCH)
    text = control(LoopStatus(shown, executor.counters, 0), ANSWERS).text
    assert text.startswith('stopped:')


def test_the_joint_and_the_limit_that_changed_commands_most_are_named() -> None:
    executor = ChunkExecutor(ExecutorConfig((Column('a'), Column('b'))), ExecutorParameters())
    values = control(LoopStatus(executor.status(), executor.counters, 0), ANSWERS).values
    assert values['limited_most'] == ''
    executor.counters.count_limited([('a', LimitKind.VELOCITY), ('b', LimitKind.ACCELERATION)])
    executor.counters.count_limited([('b', LimitKind.ACCELERATION)])
    values = control(LoopStatus(executor.status(), executor.counters, 0), ANSWERS).values
    assert (values['limited_ticks'], values['limited.b.acceleration']) == (2, 2)
    assert values['limited.a.velocity'] == 1
    assert values['limited_most'] == "'b' by acceleration, 2 ticks"
