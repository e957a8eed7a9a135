"""Every family's closed loop: chunks of a tiny policy drive the simulated arm by the executor.

Random weights reach no block. What is tried is the loop: observations of the world, chunks, the
executor and its commands, episode after episode. `test_families_success` has trained policies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from family_contracts import contracts
from family_contracts.robot import CAMERAS, JOINTS
from made_once import made_once
from thorough import thorough_but
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.execution.columns import Column
from vla_runtime.execution.limits import ColumnLimits, make_limits
from vla_runtime.types import Observation
from vla_tabletop.study.chunk_sources import PolicySource
from vla_tabletop.study.condition import Condition
from vla_tabletop.study.episode import run_episode
from vla_tabletop.study.tabletop_world import TabletopWorld
from vla_tabletop.study.world import Asked

FAMILIES = [name for name, contract in contracts().items() if contract.gives_chunks]
# Joints and cameras of the tabletop that the tiny policies' robot has under names of its own.
PLACES = [0, 3, 4]
SEEN = dict(zip(CAMERAS, ('front', 'wrist'), strict=True))
STEPS_EXECUTED = 4


class SmallArm(TabletopWorld):
    """The tabletop's arm as the tiny policies' robot: three of its joints, the others at rest.

    Attributes:
        commands: all commands so far.
    """

    def __init__(self) -> None:
        super().__init__()
        lower, upper = self.lower_rad[PLACES], self.upper_rad[PLACES]
        self.columns = tuple(Column(name) for name in JOINTS)
        self.limits = make_limits(
            JOINTS,
            {
                name: ColumnLimits(lower=float(least), upper=float(most))
                for name, least, most in zip(JOINTS, lower, upper, strict=True)
            },
        )
        self.commands: list[np.ndarray] = []

    def begin(self, condition: Condition, seed: int, index: int, sees: bool) -> Asked:
        asked = super().begin(condition, seed, index, sees)
        self._rest = self.joint_positions.copy()
        return asked

    def measured(self) -> np.ndarray:
        return self.joint_positions[PLACES]

    proprioception = measured

    def observe(self, instruction: str) -> Observation:
        seen = super().observe(instruction)
        images = {ours: seen.images[theirs] for ours, theirs in SEEN.items()}
        return replace(seen, images=images, state=self.measured())

    def step(self, command_rad: np.ndarray) -> None:
        self.commands.append(command_rad.copy())
        whole = self._rest.copy()
        whole[PLACES] = command_rad
        super().step(whole)


@pytest.fixture(scope='module')
def arm() -> Iterator[SmallArm]:
    small = SmallArm()
    yield small
    small.close()


def source_of(family: str) -> PolicySource:
    """A policy whose chunks stay near the measured joints."""
    spec = tiny_spec(family, delta=True)
    bundle = made_once(
        f'loop_{family}', lambda target: write_tiny_policy(target, spec, action_scale=0.005)
    )
    return PolicySource(bundle)


@pytest.mark.usefixtures('short_tasks')
# One of each head.
@pytest.mark.parametrize('family', thorough_but(['pi05', 'act', 'openvla'], FAMILIES))
def test_its_chunks_drive_the_arm_and_follow_from_what_it_sees(family, arm):
    source = source_of(family)
    # A chunk of one row leaves nothing to execute while the next is made.
    executed = min(STEPS_EXECUTED, source.horizon)
    often = Condition(replan_interval=executed, delay_steps=float(executed > 1))
    first, blind, again = (
        run_episode(arm, source, replace(often, cache=cache), seed)
        for cache, seed in (('exact', 3), ('image_blind', 3), ('exact', 3))
    )
    # An episode leaves nothing behind for the next.
    assert repr(again) == repr(first)  # NaN is not equal to itself
    assert blind.trajectory != first.trajectory
    assert first.inferences > 4 and first.refused == 0 and not first.halted
    assert first.delay_steps == often.delay_steps and first.starved_ticks == 0
    commands = np.array(arm.commands)
    assert (np.ptp(commands, axis=0) > 1e-3).all()
    assert (commands >= arm.lower_rad[PLACES]).all() and (commands <= arm.upper_rad[PLACES]).all()
