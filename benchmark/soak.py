"""Drive the graph for half an hour through faults, and show that nothing but them stops it.

Both nodes as they are shipped, a robot of 14 joints that follows with a lag, four raw 480x640
cameras, a small policy of random weights. Steps of 50 and of 20 Hz; replan intervals 1, 4, 8 and
25 by turns; cameras at 30 Hz, at 12 Hz and with jitter; hand-over, interpolation, guidance and
cache changed while it moves; and faults of every kind one after the other in a seeded order: a
policy that freezes or dies, cameras and joint states that stop, slow down, jump or are malformed,
stray chunks, participants that are killed, a push against the arm, the operator's services, a
second publisher of the joints, one to fifty false readings, readings that stay wrong until a person
calls ~/start, stamps of the future, a servo bus that repeats old positions, joint states at 10 Hz,
power that is lost for 0.2 to 30 s or an arm that is guided while it is stopped, another node that
commands the robot, and a second launch of the same robot.

What must hold: the robot stands still no longer than the next frames of all cameras that belong
together and one inference take (after a fault: one more, which may be under way; after a
participant was killed: and the time for which Fast DDS held the policy), no command is
outside position, velocity and acceleration limits by the header stamps, no joint of a stopped robot
is moved by more than 0.05 rad, no traceback, every process ends with 0. A policy that Fast DDS has
cut off after a SIGSTOP is a fault of its own, until its process has started again.

    python benchmark/soak.py --minutes 30 --seed 1
    python benchmark/soak.py --minutes 2 --only push policy_killed --json soak.json --logs logs

Returns 0 when all of it held.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from parts.graph_rig import PACKAGES, keep_others_out
from parts.measurement import RESULTS, percentiles, write_result
from parts.soak_checks import (
    Fault,
    Record,
    Stall,
    check_limits,
    find_stalls,
    motion_ns,
    unexplained_stops,
)
from parts.soak_faults import FaultKind, fault_kinds
from parts.soak_rig import CameraSetup, Rig, robot_graph

# Stalls that are reported in full.
_LONGEST = 8


@dataclass
class Phase:
    """A stretch of a session with one replan interval and one camera set-up."""

    step_rate_hz: float
    replan_interval: int
    cameras: str
    begin_ns: int
    end_ns: int = 0
    settings: list[str] = field(default_factory=list)


@dataclass
class Session:
    """Records of a rig that has ended."""

    rig: Rig
    record: Record
    phases: list[Phase]
    stalls: list[Stall]
    limits: dict[str, Any]


def limits_of(rig: Rig, record: Record) -> dict[str, Any]:
    """Use of every limit, by kind."""
    joints = rig.robot_file.joints
    uses = check_limits(
        record,
        [joint.name for joint in joints],
        np.array([joint.lower for joint in joints]),
        np.array([joint.upper for joint in joints]),
        np.array([joint.velocity for joint in joints]),
        np.array([joint.acceleration or np.inf for joint in joints]),
    )
    return {kind: asdict(use) for kind, use in uses.items()}


def phase_figures(session: Session, phase: Phase) -> dict[str, Any]:
    """One row of the table by phase."""
    record = session.record
    stalls = [s for s in session.stalls if phase.begin_ns <= s.begin_ns < phase.end_ns]
    plain = [stall for stall in stalls if not stall.after]
    longest = max(plain, key=lambda stall: stall.seconds, default=None)
    motion = motion_ns(record.commands)
    moved = np.diff(motion[(motion >= phase.begin_ns) & (motion < phase.end_ns)])
    chunks = record.inferences[:, 0]
    return {
        'step_rate_hz': phase.step_rate_hz,
        'replan_interval': phase.replan_interval,
        'cameras': phase.cameras,
        'seconds': round((phase.end_ns - phase.begin_ns) * 1e-9, 1),
        'chunks': int(((chunks >= phase.begin_ns) & (chunks < phase.end_ns)).sum()),
        'moving_percent': round(
            100 * float(moved[moved < 25_000_000].sum()) / (phase.end_ns - phase.begin_ns), 1
        ),
        'stalls': len(plain),
        'longest_stall_s': round(longest.seconds, 3) if longest else 0.0,
        'allowed_s': round(longest.allowed_s, 3) if longest else 0.0,
        'beyond': sum(stall.beyond for stall in stalls),
        'settings': phase.settings,
    }


def fault_figures(faults: Sequence[Fault]) -> dict[str, Any]:
    """One row of the table by fault."""
    worst = max(faults, key=lambda fault: fault.recovery_s - fault.allowed_s)
    longest = max(faults, key=lambda fault: fault.longest_tick_s)
    return {
        'count': len(faults),
        'stops': faults[0].stops,
        'longest_without_motion_s': round(max(fault.longest_s for fault in faults), 3),
        'recovery_s': {
            'median': round(float(np.median([fault.recovery_s for fault in faults])), 3),
            'max': round(max(fault.recovery_s for fault in faults), 3),
        },
        'beyond': sum(fault.recovery_s > fault.allowed_s for fault in faults if fault.stops),
        'nearest_to_bound': {
            'recovery_s': round(worst.recovery_s, 3),
            'allowed_s': round(worst.allowed_s, 3),
        },
        'longest_tick_ms': round(1e3 * longest.longest_tick_s, 1),
        'machine_in_it_ms': round(1e3 * longest.machine_s, 1),
        'operator_needed': sum(bool(fault.operator) for fault in faults),
    }


def failures(session: Session) -> list[str]:
    """Describe the conditions that did not hold."""
    rig = session.rig
    found = [
        f'no motion for {stall.seconds:.3f} s, at most {stall.allowed_s:.3f} s expected, '
        f'{f"after {stall.after}" if stall.after else "without a fault"} at {stall.begin_ns}, '
        f'{stall.held_s:.3f} s of it with a policy that stood still'
        for stall in session.stalls
        if stall.beyond
    ]
    for kind in ('position', 'velocity', 'acceleration', 'after a pause'):
        use = session.limits[kind]
        if use['violations']:
            found.append(
                f'{use["violations"]} commands beyond the {kind} limit, at most '
                f'{use["worst"]:.4g} of it'
            )
    found += [
        f'the robot stopped by itself: {fault.detail}'
        for fault in unexplained_stops(session.record)
    ]
    found += rig.strayed
    found += [
        f'a traceback in {name}.log' for name, text in rig.logs().items() if 'Traceback' in text
    ]
    found += [
        f'{name} ended with {code}'
        for name, codes in rig.exit_codes.items()
        for code in codes
        if code != 0
    ]
    found += [f'the simulated robot failed: {problem}' for problem in rig.robot.problems]
    return found + rig.problems


def session_figures(session: Session) -> dict[str, Any]:
    """Everything about one session."""
    rig, record = session.rig, session.record
    by_kind: dict[str, list[Fault]] = {}
    for fault in rig.faults:
        by_kind.setdefault(fault.kind, []).append(fault)
    stamps = record.commands.stamps_ns
    return {
        'commands': len(stamps),
        'chunks': len(record.inferences),
        'inference_ms': percentiles(1e3 * record.inferences[:, 1]),
        'tick_ms': percentiles(np.diff(stamps) * 1e-6),
        'tick_to_robot_ms': percentiles((record.commands.arrivals_ns - stamps) * 1e-6),
        'machine_waited_s': round(float(record.pulse[:, 1].sum()) * 1e-9, 3),
        # Beyond their bound but for the time in which the policy stood still after a kill.
        'excused_after_a_kill': [
            asdict(stall)
            for stall in session.stalls
            if not stall.beyond and stall.seconds > stall.allowed_s - stall.parts['held']
        ],
        'longest_stalls': [
            asdict(stall)
            for stall in sorted(session.stalls, key=lambda stall: -stall.seconds)[:_LONGEST]
        ],
        'phases': [phase_figures(session, phase) for phase in session.phases],
        'played': [
            f'{fault.kind}: {fault.detail}; {fault.recovery_s:.3f} of {fault.allowed_s:.3f} s'
            for fault in rig.faults
        ],
        'faults': {kind: fault_figures(played) for kind, played in sorted(by_kind.items())},
        'limits': session.limits,
        'stalls_beyond': [asdict(stall) for stall in session.stalls if stall.beyond],
        'memory': {name: memory.figures() for name, memory in rig.memory.items()},
        'stopped_robot_moved_rad': round(rig.most_stopped, 4),
        'exit_codes': rig.exit_codes,
        'failures': failures(session),
    }


def show(figures: Sequence[dict[str, Any]]) -> None:
    """Print what a person looks for first; the file has the rest."""
    for session in figures:
        print(f'\n{session["chunks"]} chunks, {session["commands"]} commands')
        for kind, one in session['faults'].items():
            print(
                f'{kind}: {one["count"]} times, recovered in {one["recovery_s"]["max"]:.3f} s at '
                f'most, {one["beyond"]} beyond what is allowed'
            )
        uses = ', '.join(
            f'{kind} {use["worst"]:.4f} ({use["violations"]}, {use["at_even_ticks"]} of them even)'
            for kind, use in session['limits'].items()
        )
        growth = ', '.join(
            f'{name} {max((p["growth_mib"] for p in processes), default=0.0):+.1f} MiB'
            for name, processes in session['memory'].items()
        )
        print(f'largest share of each limit (ticks beyond): {uses}\nmemory: {growth}')
        print(f'a stopped robot moved by {session["stopped_robot_moved_rad"]:.4f} rad at most')
        print(f'excused by a policy held after a kill: {len(session["excused_after_a_kill"])}')
        for failure in session['failures']:
            print(f'FAILED: {failure}')


STEP_RATES_HZ = (50.0, 20.0)
INTERVALS = (1, 4, 8, 25)
CAMERAS = (
    CameraSetup('30 Hz', 30.0),
    CameraSetup('12 Hz', 12.0),
    CameraSetup('25 Hz, jitter', 25.0, 0.01),
)
QUIET_S = (2.0, 4.0)
SHORTEST_PHASE_S = 10.0
# Live parameters that are drawn, one at a time.
DRAWN: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    (Rig.EXECUTOR, 'handover_mode', ('switch', 'blend', 'ensemble', 'rtc')),
    (Rig.EXECUTOR, 'interpolation', ('linear', 'cubic')),
    (Rig.EXECUTOR, 'overrun', ('hold', 'continue')),
    (Rig.POLICY, 'cfg_enabled', (False, True)),
    (Rig.POLICY, 'cfg_beta', (1.0, 1.5, 2.5)),
    (Rig.POLICY, 'cache_mode', ('off', 'exact', 'bounded')),
    (Rig.POLICY, 'real_time_chunking', (False, True)),
    (Rig.POLICY, 'rtc_mode', ('guided', 'hard_prefix')),
)


def deck(random: np.random.Generator, kinds: Sequence[str]) -> Iterator[str]:
    """Kinds without end: all of them in a drawn order, then all again in another one."""
    while True:
        yield from random.permutation(list(kinds)).tolist()


def play_fault(rig: Rig, name: str, kind: FaultKind, random: np.random.Generator) -> None:
    """One fault from its begin to its end, the operator's part in it included."""
    begin_ns = time.time_ns()
    detail = kind.play(rig, random)
    over_ns = time.time_ns()
    reason = rig.start_as_operator()
    if reason:
        over_ns = time.time_ns()
    rig.faults.append(Fault(name, detail, begin_ns, over_ns, kind.stops, reason))


def note_stop(rig: Rig) -> None:
    """Start a robot that stopped without a fault, and note that it did."""
    begin_ns = time.time_ns()
    reason = rig.start_as_operator()
    if reason:
        rig.faults.append(
            Fault('stopped by itself', reason, begin_ns, time.time_ns(), True, reason)
        )


class Player:
    """Plays one session's phases on its rig."""

    def __init__(
        self, rig: Rig, random: np.random.Generator, kinds: dict[str, FaultKind], show: Any
    ) -> None:
        self.rig = rig
        self._random = random
        self._kinds = kinds
        self._show = show
        self._deck = deck(random, list(kinds))
        self.phases: list[Phase] = []

    def start(self) -> None:
        begin_ns = time.time_ns()
        self.rig.start_as_operator()
        self.rig.faults.append(Fault('start', '', begin_ns, time.time_ns(), True))

    def play(self, replan_interval: int, setup: CameraSetup, seconds: float) -> None:
        """A phase of so many seconds; the fault that is under way at its end is played out."""
        rig, random = self.rig, self._random
        rig.set(rig.EXECUTOR, replan_interval=replan_interval)
        rig.set_up_cameras(setup)
        phase = Phase(rig.step_rate_hz, replan_interval, setup.name, time.time_ns())
        self.phases.append(phase)
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self._rest(min(end_s, time.monotonic() + random.uniform(*QUIET_S)))
            if random.random() < 0.5:
                node, name, words = DRAWN[int(random.integers(len(DRAWN)))]
                value = words[int(random.integers(len(words)))]
                rig.set(node, **{name: value})
                phase.settings.append(f'{name}={value}')
            if time.monotonic() < end_s and self._kinds:
                name = next(self._deck)
                self._show(f'{len(rig.faults)} faults, now {name}')
                play_fault(rig, name, self._kinds[name], random)
        phase.end_ns = time.time_ns()

    def _rest(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            time.sleep(max(0.0, min(0.2, until_s - time.monotonic())))
            self.rig.look_at_memory()
            if not self.rig.runs:
                note_stop(self.rig)


def play_session(player: Player, seconds: float) -> None:
    """Every replan interval and camera set-up by turns; what ends it early is noted."""
    turns = len(INTERVALS) * len(CAMERAS)
    phase_s = max(SHORTEST_PHASE_S, seconds / turns)
    end_s = time.monotonic() + seconds
    try:
        for turn in itertools.count():
            left_s = end_s - time.monotonic()
            if left_s <= 0.0:
                return
            setup = CAMERAS[(turn + turn // len(INTERVALS)) % len(CAMERAS)]
            player.play(INTERVALS[turn % len(INTERVALS)], setup, min(phase_s, left_s))
    except (Exception, KeyboardInterrupt) as error:
        # What was recorded until then is worth its report.
        player.rig.problems.append(f'ended before time: {type(error).__name__} {error}')
        if player.phases:
            player.phases[-1].end_ns = time.time_ns()


def run_session(
    folder: Path, step_rate_hz: float, seconds: float, arguments: argparse.Namespace
) -> Session:
    """One policy, every replan interval and camera set-up by turns."""
    random = np.random.default_rng([arguments.seed, round(step_rate_hz)])
    kinds = fault_kinds()
    if arguments.only is not None:
        kinds = {name: kinds[name] for name in arguments.only}
    with robot_graph(folder) as (graph, profiles):
        rig = Rig(graph, profiles, folder, step_rate_hz, arguments.seed)
        player = Player(rig, random, kinds, Progress(f'{step_rate_hz:g} Hz', seconds))
        try:
            rig.begin()
            player.start()
            play_session(player, seconds)
        finally:
            rig.end()
        record = rig.record()
    return Session(rig, record, player.phases, find_stalls(record), limits_of(rig, record))


class Progress:
    """One line that is written over, on a terminal; a line now and then elsewhere."""

    def __init__(self, title: str, seconds: float) -> None:
        self._title, self._seconds = title, seconds
        self._begin_s = self._said_s = time.monotonic()

    def __call__(self, text: str) -> None:
        now_s = time.monotonic()
        line = f'{self._title}: {now_s - self._begin_s:.0f} of {self._seconds:.0f} s, {text}'
        if sys.stderr.isatty():
            print(f'\r\033[K{line}', end='', file=sys.stderr, flush=True)
        elif now_s - self._said_s > 30.0:
            self._said_s = now_s
            print(line, file=sys.stderr, flush=True)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--minutes', type=float, default=30.0, help='in all (default: 30)')
    parser.add_argument('--seed', type=int, default=0, help='of faults and weights (default: 0)')
    parser.add_argument(
        '--steps',
        type=float,
        nargs='+',
        default=STEP_RATES_HZ,
        metavar='HZ',
        help='step rates, each for its share of the time (default: 50 20)',
    )
    parser.add_argument(
        '--only',
        nargs='*',
        choices=list(fault_kinds()),
        metavar='FAULT',
        help='these faults only; none after a bare --only: %(choices)s',
    )
    parser.add_argument('--json', type=Path, help='write here instead of benchmark/results/')
    parser.add_argument('--logs', type=Path, help='keep logs and record in this folder')
    parser.add_argument('--realtime', action='store_true', help='run before everything else')
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    if arguments.realtime:
        keep_others_out()
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for rate_hz in arguments.steps:
            place = Path(folder) / f'{rate_hz:g}_hz'
            place.mkdir()
            seconds = 60.0 * arguments.minutes / len(arguments.steps)
            try:
                session = run_session(place, rate_hz, seconds, arguments)
            finally:
                if arguments.logs:
                    shutil.copytree(place, arguments.logs / place.name, dirs_exist_ok=True)
            figures.append(session_figures(session))
            if any('KeyboardInterrupt' in problem for problem in session.rig.problems):
                break
    show(figures)
    path = write_result(
        'soak', {'sessions': figures}, PACKAGES, arguments.json or RESULTS / 'soak.json'
    )
    print('wrote', path)
    return int(any(session['failures'] for session in figures))


if __name__ == '__main__':
    sys.exit(main())
