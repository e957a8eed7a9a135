"""A robot in motion that is about to be stopped."""

from __future__ import annotations

from typing import Any

from execution_rig import Rig, holding

from vla_runtime.execution.command import CommandKind, Reason
from vla_runtime.execution.handover import HandoverParameters

RAMP = [0.01 * (row + 1) for row in range(30)]
SWITCH = HandoverParameters(mode='switch')
TWO = ('a', 'b')


def rig_of(**config: Any) -> Rig:
    return Rig(holding(replan_interval=20, handover=SWITCH), **config)


def moving(**config: Any) -> Rig:
    """A robot in the middle of a chunk."""
    rig = rig_of(**config).started()
    assert rig.submit(RAMP).accepted
    rig.tick(20)
    assert rig.command.kind is CommandKind.TRACK
    return rig


def assert_held(rig: Rig, reason: Reason) -> None:
    """The newest tick holds at the command of the one before it, at rest."""
    before, now = rig.ticks[-2].command, rig.command
    assert now.kind is CommandKind.HOLD and now.reason is reason
    assert (now.setpoints == before.setpoints).all()
    assert (now.velocities == 0.0).all()
