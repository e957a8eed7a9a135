"""A controller that is off while the arm moves, and comes back: the control loop beside its rules.

The controller's rules are those of `trajectory_controller`; nothing of ROS 2 runs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import pytest
from thorough import thorough_but
from trajectory_controller import TrajectoryController as Rules

from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import Reason
from vla_runtime.execution.config import ExecutorConfig, Mode
from vla_runtime.execution.executor import ChunkExecutor
from vla_runtime.execution.limits import ColumnLimits, make_limits
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.nodes.executor.control_loop import ControlLoop
from vla_runtime.nodes.executor.controller_watch import Verdict
from vla_runtime.nodes.executor.outputs import OutputWriter
from vla_runtime.nodes.executor.silences import Silence
from vla_runtime.nodes.executor.trajectory_message import TrajectoryController
from vla_runtime.robot.match import MatchedOutput
from vla_runtime.robot.schema import RobotOutput
from vla_runtime.types import ActionChunk, ChunkHeader

JOINTS = ('a', 'b')
VELOCITY, SPEED = 1.5, 0.8
CYCLE_NS, TICK_NS = 4_000_000, 10_000_000
# From the moment of a switch until the executor's look has seen it.
SEEN_S = 0.1


@dataclass
class Watch:
    """What a `ControllerWatch` knows a moment later."""

    now: dict[str, bool] = field(default_factory=dict)
    held: np.ndarray = field(default_factory=lambda: np.full(2, np.nan))
    knows_trajectories: bool = True
    ended: Silence | None = None

    @property
    def verdicts(self):
        return tuple(
            Verdict(topic, topic, (column,), active, refusal='' if active else f'{topic} is off')
            for column, (topic, active) in enumerate(self.now.items())
        )

    def scaling(self):
        return 1.0

    def newest_silence(self):
        return self.ended

    def references(self, count):
        return self.held

    def trajectory_controllers(self):
        known = TrajectoryController(CYCLE_NS * 1e-9, True) if self.knows_trajectories else None
        return dict.fromkeys(self.now, known)


class Bench:
    """An arm of one or two controllers, a joint each; time passes with `run`.

    Attributes:
        steps: largest way of a joint in each cycle, rad.
    """

    def __init__(self, hold=None, sag=0.0, *, knows_trajectories=True) -> None:
        limits = make_limits(
            JOINTS,
            {
                name: ColumnLimits(-9.0, 9.0, VELOCITY, 8.0, step_from_measured=0.3)
                for name in JOINTS
            },
        )
        columns = tuple(Column(name) for name in JOINTS)
        self.core = ChunkExecutor(
            ExecutorConfig(columns, limits=limits, control_period_s=0.01),
            ExecutorParameters(replan_interval=20),
        )
        self.now_ns, self.sag = 10**18, sag
        self.watch = Watch({f'{name}/joint_trajectory': True for name in JOINTS})
        self.watch.knows_trajectories = knows_trajectories
        self.rules = [Rules([name], CYCLE_NS * 1e-9, np.zeros(1)) for name in JOINTS]
        self.heard = [0, 0]
        self.seen: list[tuple[int, str, bool]] = []
        self.steps: list[float] = []
        self.sent: list[list[float]] = [[], []]
        writers = [
            OutputWriter(
                MatchedOutput(
                    RobotOutput('joint_trajectory', f'{name}/joint_trajectory', (name,), hold=hold),
                    (column,),
                    (name,),
                ),
                Wire(self, column),
                0.01,
            )
            for column, name in enumerate(JOINTS)
        ]
        self.loop = ControlLoop(
            self.core, writers, lambda: self.now_ns, lambda _: None, ros_time_of_ns=self._time_of
        )

    def _time_of(self, now_s: float) -> int:
        return self.now_ns

    @property
    def now_s(self) -> float:
        return (self.now_ns - 10**18) * 1e-9

    @property
    def measured(self) -> np.ndarray:
        return np.array([float(one.output[0]) for one in self.rules]) - self.sag

    def switch(self, joint: int, *, on: bool) -> None:
        rules = self.rules[joint]
        rules.measured = rules.output.copy()
        rules.switch(on=on)
        seen_ns = 0 if on else round(SEEN_S * 1e9)
        self.seen.append((self.now_ns + seen_ns, f'{JOINTS[joint]}/joint_trajectory', on))

    def run(self, seconds: float) -> None:
        end_ns = self.now_ns + round(seconds * 1e9)
        while self.now_ns < end_ns:
            self.now_ns += 2_000_000
            if self.now_ns % CYCLE_NS == 0:
                before = self.measured
                for rules in self.rules:
                    rules.update(self.now_ns * 1e-9, CYCLE_NS * 1e-9)
                self.steps.append(float(np.abs(self.measured - before).max()))
                self.loop.observe_state(JOINTS, self.measured.tolist(), self.now_ns, 'states#1')
            if self.now_ns % TICK_NS == 0:
                self._look()
                self.loop.tick(self.now_s)

    def _look(self) -> None:
        for one in [one for one in self.seen if one[0] <= self.now_ns]:
            self.seen.remove(one)
            self.watch.now[one[1]] = one[2]
        active = list(self.watch.now.values())
        held = [float(rules.reference[0]) for rules in self.rules]
        self.watch.held = np.where(active, held, np.nan)
        self.loop.apply_controller_state(self.watch)

    def move(self) -> None:
        """Start, and be at full speed."""
        self.run(0.7)
        result = self.loop.start(self.now_s)
        assert result.started, result.text
        self.run(0.05)
        rows = self.measured + np.outer(np.arange(1, 41) * 0.05 * SPEED, [1.0, 1.0])
        chunk = ActionChunk(rows, JOINTS, ('position',) * 2, 0.05, np.zeros((40, 0), np.float32))
        header = ChunkHeader(self.now_ns, self.core.episode, self.core.counters.received)
        assert self.loop.submit(chunk, header, self.now_s).accepted
        self.run(0.6)
        assert np.mean(self.steps[-20:]) == pytest.approx(SPEED * CYCLE_NS * 1e-9, rel=0.1)

    def largest_step(self) -> float:
        """Largest way of a cycle since the last call, as a share of what the velocity allows."""
        steps, self.steps = self.steps, []
        return max(steps) / (VELOCITY * CYCLE_NS * 1e-9)


class Wire:
    def __init__(self, bench: Bench, joint: int) -> None:
        self._bench, self._joint = bench, joint

    def publish(self, message) -> None:
        bench = self._bench
        bench.sent[self._joint].append(float(message.points[-1].positions[0]))
        bench.rules[self._joint].take(message, bench.now_ns * 1e-9)


@pytest.mark.parametrize(
    'off_s', thorough_but([0.12, 0.4, 2.0], [0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 2.0])
)
@pytest.mark.parametrize('hold', ['silent', 'send'])
@pytest.mark.parametrize('knows_trajectories', [True, False])
def test_an_arm_whose_controller_comes_back_stays_where_it_is(off_s, hold, knows_trajectories):
    bench = Bench(hold, knows_trajectories=knows_trajectories)
    bench.move()
    bench.switch(0, on=False)
    bench.run(off_s)
    bench.largest_step()
    at = bench.measured[0]
    bench.switch(0, on=True)
    bench.run(2.0)
    assert bench.loop.status().executor.reason is Reason.CONTROLLER
    assert bench.measured[0] == pytest.approx(at, abs=1e-3)
    # The other arm comes to rest within its limits meanwhile.
    assert bench.largest_step() <= 1.2
    assert bool(bench.sent[0]) and bench.core.mode is Mode.STOPPED
    bench.move()
    # A line that begins on arrival ripples by half.
    assert bench.largest_step() <= (1.2 if knows_trajectories else 1.6)
    assert bench.measured[0] > at + 0.2


def test_an_arm_that_sags_is_not_dropped_when_its_controller_comes_back():
    bench = Bench('send', sag=0.03)
    bench.move()
    bench.switch(0, on=False)
    bench.run(0.5)
    at = float(bench.rules[0].output[0])
    bench.switch(0, on=True)
    bench.run(1.0)
    assert float(bench.rules[0].output[0]) == pytest.approx(at, abs=1e-3)


def test_another_controller_leads_the_arm_away_in_between_and_nothing_leads_it_back():
    bench = Bench()
    bench.move()
    bench.switch(0, on=False)
    bench.run(0.3)
    for _ in range(50):
        bench.rules[0].output = bench.rules[0].output + 0.004
        bench.run(0.008)
    bench.largest_step()
    at = bench.measured[0]
    bench.switch(0, on=True)
    bench.run(2.0)
    assert bench.measured[0] == pytest.approx(at, abs=1e-3)
    bench.move()
    assert bench.largest_step() <= 1.2


def test_when_one_controller_is_off_the_arm_of_the_other_brakes_within_its_limits():
    bench = Bench()
    bench.move()
    speeds = []
    bench.switch(0, on=False)
    for _ in range(100):
        before = bench.measured[1]
        bench.run(0.012)
        speeds.append((bench.measured[1] - before) / 0.012)
    assert speeds[-1] == 0.0
    assert np.abs(np.diff(speeds)).max() <= 1.5 * 8.0 * 0.012


def test_a_jump_after_a_silence_of_all_is_a_stall_of_controller_manager_and_no_second_publisher():
    bench = Bench()
    bench.move()
    silent_s = 0.15
    bench.loop._silences['states#1']._heard_s = time.monotonic() - silent_s
    bench.now_ns += round(silent_s * 1e9)
    measured = bench.measured

    def states(ahead: float) -> None:
        bench.now_ns += CYCLE_NS
        positions = (measured + ahead).tolist()
        bench.loop.observe_state(JOINTS, positions, bench.now_ns, 'states#1')

    for _ in range(3):
        states(0.0)
    # The newest of what was sent meanwhile, in one cycle.
    states(0.117)
    bench.watch.ended = Silence(time.monotonic(), silent_s)
    details = []
    for _ in range(10):
        states(0.117)
        bench.loop.tick(bench.now_s)
        bench.loop.apply_controller_state(bench.watch)
        status = bench.loop.status().executor
        details.append(status.detail)
    assert bench.core.doubts_state and bench.core.counters.states_implausible
    assert 'controller_manager stood still for 0.15 s' in details[-1]
    assert not any('second node' in detail for detail in details)
