"""Evaluate the soak's record: stalls, recoveries, and commands against the robot file's limits.

Pure; all times are nanoseconds of the one clock that stamps frames and commands too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla_runtime.execution.plausibility import DOUBT_NS

# A joint that moves less from tick to tick stands still, rad or m.
STILL = 1e-7
# A fault's effect on the ticks shows within this time.
_SHOWS_NS = 1_000_000_000
# Shorter than this between two ticks with motion is no stall.
_SHORTEST_NS = 50_000_000
# Ticks further apart than this were late, at 100 Hz.
_LATE_TICK_NS = 25_000_000
# Transport of frame, request, chunk and command, and ticks, on a machine with cores to spare.
ALLOWANCE_S = 0.15
# A command this near to the measured position counts as reset to it, rad or m.
SEATED = 0.05
# A stopped robot stays where it is: `hold_follows`, rad.
STAYS = 0.05
# Within this before it a stop is explained by a policy, or a machine, that stood still for as long
# as a person is needed after (`restart_after_outage_s`, less what the robot still executes).
_EXPLAINS_NS, _STOOD_STILL_S = 6_000_000_000, 1.0
# Rounding of stamps and numbers: a limit is exceeded from here on.
TOLERANCE = 1e-3
# What reading the clock twice may differ by.
STAMP_S = 1e-6
# `sync_tolerance_s` and `max_observation_age_s` of config/policy.yaml: frames further apart, or
# older, make no observation.
SYNC_TOLERANCE_NS = 50_000_000
MAX_AGE_NS = 500_000_000
# A participant of shared memory that is killed may leave locks, for which others then wait
# (docs/howto/cameras.md). They were seen to begin up to 3.3 s after it; killing a few takes a
# moment.
_BEFORE_KILL_NS, _AFTER_KILL_NS = 200_000_000, 5_000_000_000
# Within this a policy notices that the middleware has cut it off.
_NOTICED_NS = 2_000_000_000
_LOG_LINE = re.compile(r'\[\w+\] \[(\d+)\.(\d+)\] \[\w+\]: (.*)')
# Faults after which the executor waits before it trusts readings again.
_DOUBTED = ('joint_states_jump', 'glitch', 'bus_repeats', 'reading_stays_wrong')
# Inferences that count for a stall: within this time, else this many nearest.
_INFERENCES_BESIDE_NS = 1_000_000_000
_NEAREST = 3


@dataclass(frozen=True)
class Commands:
    """Commands that the robot was given.

    Attributes:
        stamps_ns: (n,) rising.
        arrivals_ns: (n,) when they came.
        positions: (n, joints) rad or m.
        measured: (n, joints) at their stamps; None where unknown.
    """

    stamps_ns: np.ndarray
    arrivals_ns: np.ndarray
    positions: np.ndarray
    measured: np.ndarray | None = None


@dataclass(frozen=True)
class Frames:
    """Frames of one camera: (n,) shutter stamps and times of publishing, rising."""

    stamps_ns: np.ndarray
    published_ns: np.ndarray


@dataclass
class Fault:
    """One fault, as it was played.

    Attributes:
        detail: parameters, in words.
        begin_ns: just before it.
        over_ns: just after it; where a person was needed, at the restart.
        stops: the robot may stand still.
        operator: a person was needed; the executor's words.
        recovery_s: from its end to the first motion or the next fault.
        longest_s: longest time without motion during it.
        longest_tick_s: longest time between commands, from its begin to `_SHOWS_NS` after its
            end.
        machine_s: part of that without a core for a ready thread.
    """

    kind: str
    detail: str
    begin_ns: int
    over_ns: int
    stops: bool
    operator: str = ''
    recovery_s: float = 0.0
    allowed_s: float = 0.0
    longest_s: float = 0.0
    longest_tick_s: float = 0.0
    machine_s: float = 0.0


@dataclass(frozen=True)
class Record:
    """Everything that a stall's bound is made of.

    Attributes:
        inferences: (n, 2) float64: report time, ns, and duration, s.
        pulse: (n, 2) int64: when a harness thread woke up late, and by how much, ns.
        held: (n, 2) int64: the same of the policy's interpreter.
    """

    commands: Commands
    cameras: Sequence[Frames]
    inferences: np.ndarray
    pulse: np.ndarray
    held: np.ndarray
    faults: Sequence[Fault]


@dataclass(frozen=True)
class Stall:
    """A time without motion that no fault excuses.

    Attributes:
        begin_ns: last tick with motion, or end of a fault.
        parts: of the allowed duration, s.
        after: fault directly before it, or empty.
        held_s: part in which the policy's interpreter stood still.
    """

    begin_ns: int
    seconds: float
    allowed_s: float
    parts: dict[str, float] = field(default_factory=dict)
    after: str = ''
    held_s: float = 0.0

    @property
    def beyond(self) -> bool:
        return self.seconds > self.allowed_s


def cut_offs(policy_log: str, faults: Sequence[Fault]) -> list[Fault]:
    """Find where Fast DDS cut off a stopped policy, whose process then started again.

    Returns a fault each, from the end of the SIGSTOP until a policy has loaded.
    """
    lines = [
        (int(match[1]) * 1_000_000_000 + int(match[2]), match[3])
        for match in map(_LOG_LINE.match, policy_log.splitlines())
        if match
    ]
    found = []
    for said_ns, text in lines:
        if not text.startswith('cut off: '):
            continue
        woken = [f.over_ns for f in faults if f.kind == 'policy_frozen' and f.over_ns <= said_ns]
        begin_ns = max([*woken[-1:], said_ns - _NOTICED_NS])
        since_s = (said_ns - max(woken, default=said_ns)) * 1e-9
        loaded = (at_ns for at_ns, line in lines if at_ns > said_ns and 'warmed up in' in line)
        # One that has not loaded by the end is excused until then.
        over_ns = next(loaded, max(said_ns, faults[-1].over_ns))
        detail = f'noticed {since_s:.2f} s after the last SIGCONT'
        found.append(Fault('policy_cut_off', detail, begin_ns, over_ns, True))
    return found


def motion_ns(commands: Commands) -> np.ndarray:
    """Stamps of the ticks that moved any joint."""
    step = np.abs(np.diff(commands.positions, axis=0)).max(axis=1, initial=0.0)
    return commands.stamps_ns[1:][step > STILL]


def allowed(record: Record, begin_ns: int, end_ns: int, *, inferences: int) -> dict[str, float]:
    """Longest accepted parts of a time without motion, seconds by part.

    The next frames of all cameras that belong together, so many inferences as long as those beside
    it, transport and ticks, and the time without a core for a ready thread; soon after a
    participant was killed, also the remaining time for which the policy stood still.
    """
    frame_ns = _next_together_ns(record.cameras, begin_ns) - begin_ns
    near = _inferences_beside(record, begin_ns, end_ns)
    return {
        'frame': frame_ns * 1e-9,
        'inference': inferences * float(near.max(initial=0.0)),
        'machine': _late_s(record.pulse, begin_ns, end_ns),
        'held': _held_s(record, begin_ns, end_ns),
        'allowance': ALLOWANCE_S,
    }


def _held_s(record: Record, begin_ns: int, end_ns: int) -> float:
    """Time for which the policy stood still, maybe because of a killed participant."""
    begins = record.held[:, 0] - record.held[:, 1]
    excused = np.zeros(len(begins), dtype=bool)
    for kill in _kills(record):
        excused |= (begins > kill - _BEFORE_KILL_NS) & (begins < kill + _AFTER_KILL_NS)
    inferences = record.inferences * (1.0, 1e9)
    known = np.concatenate([record.pulse, inferences.astype(np.int64)])
    together = np.concatenate([known, record.held[excused]])
    return _late_s(together, begin_ns, end_ns) - _late_s(known, begin_ns, end_ns)


def _kills(record: Record) -> list[int]:
    """Times at which processes had been killed, ns."""
    listeners = [fault.over_ns for fault in record.faults if fault.kind == 'participants']
    return listeners + [f.begin_ns for f in record.faults if f.kind == 'policy_killed']


def _next_together_ns(cameras: Sequence[Frames], begin_ns: int) -> int:
    """Time at which the cameras next have newer frames that belong together."""
    later = np.concatenate([one.published_ns[one.published_ns > begin_ns] for one in cameras])
    seen_ns = _newest_together_ns(cameras, begin_ns)
    at_ns = begin_ns
    for at_ns in np.sort(later).tolist():
        if _newest_together_ns(cameras, at_ns) > seen_ns:
            break
    return at_ns


def _newest_together_ns(cameras: Sequence[Frames], at_ns: int) -> int:
    """Stamp of the newest of the newest frames that belong together at a time; 0 for none."""
    places = [int(np.searchsorted(one.published_ns, at_ns, side='right')) - 1 for one in cameras]
    while min(places) >= 0:
        stamps = [int(one.stamps_ns[place]) for one, place in zip(cameras, places, strict=True)]
        if max(stamps) - min(stamps) <= SYNC_TOLERANCE_NS:
            return max(stamps) if at_ns - min(stamps) <= MAX_AGE_NS else 0
        places[stamps.index(max(stamps))] -= 1
    return 0


def _inferences_beside(record: Record, begin_ns: int, end_ns: int) -> np.ndarray:
    """Durations of the inferences around a time, seconds; those that were frozen do not count."""
    times, seconds = record.inferences[:, 0], record.inferences[:, 1]
    whole = np.ones(len(times), dtype=bool)
    for fault in record.faults:
        if fault.kind == 'policy_frozen':
            whole &= (times < fault.begin_ns) | (times - 1e9 * seconds > fault.over_ns)
    beside = (times > begin_ns - _INFERENCES_BESIDE_NS) & (times < end_ns + _INFERENCES_BESIDE_NS)
    if (whole & beside).any():
        return seconds[whole & beside]
    nearest = np.argsort(np.abs(times[whole] - (begin_ns + end_ns) / 2))[:_NEAREST]
    return seconds[whole][nearest]


def find_stalls(record: Record) -> list[Stall]:
    """Find times without motion outside faults; complete each fault's figures.

    One in the middle of the motion may take one inference. After a fault, or a late tick that
    dropped the plan, one more may be under way in vain.
    """
    motion = motion_ns(record.commands)
    stalls = []
    excuses = [fault for fault in record.faults if fault.stops]

    for fault in record.faults:
        _look_at(fault, motion, record)
    for fault in excuses:
        end_ns = _end_of_recovery(fault, excuses, motion, int(record.commands.stamps_ns[-1]))
        parts = allowed(record, fault.over_ns, end_ns, inferences=2)
        if fault.kind in _DOUBTED and not fault.operator:
            # The robot holds until its readings have made sense for so long.
            parts['doubt'] = DOUBT_NS * 1e-9
        fault.recovery_s = (end_ns - fault.over_ns) * 1e-9
        fault.allowed_s = sum(parts.values())
        held_s = _late_s(record.held, fault.over_ns, end_ns)
        stalls.append(
            Stall(fault.over_ns, fault.recovery_s, fault.allowed_s, parts, fault.kind, held_s)
        )
    late = _late_ticks(record.commands.stamps_ns)
    for begin_ns, end_ns in zip(motion[:-1].tolist(), motion[1:].tolist(), strict=True):
        if end_ns - begin_ns < _SHORTEST_NS:
            continue
        cuts = [f.begin_ns for f in excuses if f.begin_ns < end_ns and f.over_ns > begin_ns]
        end_ns = min([end_ns, *cuts])
        if end_ns <= begin_ns:
            continue
        dropped = bool(((late > begin_ns - _SHORTEST_NS) & (late <= end_ns)).any())
        # A chunk that a fault spoilt may be missed only when the plan has been executed.
        spoilt = any(0 <= begin_ns - fault.over_ns < _SHOWS_NS for fault in record.faults)
        inferences = 2 if dropped or spoilt else 1
        parts = allowed(record, begin_ns, end_ns, inferences=inferences)
        seconds, held_s = (end_ns - begin_ns) * 1e-9, _late_s(record.held, begin_ns, end_ns)
        stalls.append(Stall(begin_ns, seconds, sum(parts.values()), parts, held_s=held_s))
    return sorted(stalls, key=lambda stall: stall.begin_ns)


def _end_of_recovery(
    fault: Fault, excuses: Sequence[Fault], motion: np.ndarray, last_ns: int
) -> int:
    """The first motion after a fault, or the next fault or the end where that comes before it."""
    if any(other.begin_ns <= fault.over_ns < other.over_ns for other in excuses):
        return fault.over_ns
    place = np.searchsorted(motion, fault.over_ns, side='right')
    moves_ns = int(motion[place]) if place < len(motion) else last_ns
    others = [other.begin_ns for other in excuses if other.begin_ns >= fault.over_ns]
    return max(fault.over_ns, min([moves_ns, *others]))


def _late_ticks(stamps_ns: np.ndarray) -> np.ndarray:
    return stamps_ns[1:][np.diff(stamps_ns) > _LATE_TICK_NS]


def _look_at(fault: Fault, motion: np.ndarray, record: Record) -> None:
    """Set the fault's longest time without motion, and its longest tick."""
    inside = motion[(motion > fault.begin_ns) & (motion < fault.over_ns)]
    edges = np.concatenate([[fault.begin_ns], inside, [fault.over_ns]])
    fault.longest_s = float(np.diff(edges).max()) * 1e-9
    stamps = record.commands.stamps_ns
    near = stamps[(stamps >= fault.begin_ns) & (stamps <= fault.over_ns + _SHOWS_NS)]
    if len(near) > 1:
        place = int(np.diff(near).argmax())
        fault.longest_tick_s = float(near[place + 1] - near[place]) * 1e-9
        fault.machine_s = _late_s(record.pulse, int(near[place]), int(near[place + 1]))


def _late_s(pulse: np.ndarray, begin_ns: int, end_ns: int) -> float:
    """Return when (ns) a ready thread's waits ended, and their lengths (ns), as (n, 2)."""
    ends = np.clip(pulse[:, 0], begin_ns, end_ns)
    begins = np.clip(pulse[:, 0] - pulse[:, 1], begin_ns, end_ns)
    order = np.argsort(begins)
    ends = np.maximum.accumulate(ends[order])
    new = np.maximum(begins[order][1:], ends[:-1])
    first = int(ends[0] - begins[order][0]) if len(ends) else 0
    return (first + int((ends[1:] - new).sum())) * 1e-9


@dataclass(frozen=True)
class LimitUse:
    """Use of one limit by the commands, as a fraction: 1 is the limit.

    `at_even_ticks`: violations with both intervals within a fifth of each other.
    """

    worst: float
    violations: int
    at_even_ticks: int
    examples: list[dict[str, Any]]


def check_limits(
    record: Record,
    names: Sequence[str],
    lower: np.ndarray,
    upper: np.ndarray,
    velocity: np.ndarray,
    acceleration: np.ndarray,
) -> dict[str, LimitUse]:
    """Compare every command with the limits, by the stamps.

    Velocity is the difference of two commands by that of their stamps; acceleration that of two
    velocities by the time between the middles of their intervals: no motion within the limits
    exceeds either. A command after a pause may slow down more suddenly, but holds at most one and
    a half periods at top speed. A command reset to the measured position is no motion.

    Returns `position`, `velocity`, `acceleration`, `after a pause`, and `immediate stops`: ticks
    beyond the acceleration limit that only slow down, in faults that may stop the robot at once.

    `acceleration`: infinite where there is none; all limits are (joints,).
    """
    commands = record.commands
    stamps, positions = commands.stamps_ns, commands.positions
    seconds = np.diff(stamps)[:, None] * 1e-9
    longest_s = 1.5 * float(np.median(seconds)) if len(seconds) else np.inf
    ways = np.diff(positions, axis=0)
    most = np.minimum(seconds, longest_s) * velocity
    ways = np.where(_seated(commands, ways, seconds, most, acceleration), 0.0, ways)
    speeds = ways / seconds
    beyond = np.maximum(lower - positions, positions - upper) / (upper - lower)
    fast = np.abs(speeds) / velocity
    apart = (seconds[1:] + seconds[:-1]) / 2
    # A stamp that errs in the middle changes both velocities, and a short tick makes much of it.
    noise = 2.0 * STAMP_S * (np.abs(speeds[1:]) / seconds[1:] + np.abs(speeds[:-1]) / seconds[:-1])
    sudden = np.maximum(np.abs(np.diff(speeds, axis=0)) - noise, 0.0) / apart / acceleration
    braking = (np.abs(speeds[1:]) <= np.abs(speeds[:-1])) & (speeds[1:] * speeds[:-1] >= 0.0)
    late = seconds > longest_s
    excused = braking & _may_stop_at_once(record.faults, stamps[2:])[:, None]
    slowed = braking & late[1:]
    most = (longest_s + STAMP_S) * velocity
    uses = {
        'position': (1.0 + beyond, stamps),
        'velocity': (fast, stamps[1:]),
        'acceleration': (np.where(excused | slowed, 0.0, sudden), stamps[2:]),
        'after a pause': (
            np.where(late, np.abs(ways), 0.0) / most,
            stamps[1:],
        ),
        'immediate stops': (np.where(excused, sudden, 0.0), stamps[2:]),
    }
    return {kind: _use(record, names, *found) for kind, found in uses.items()}


def _seated(
    commands: Commands,
    ways: np.ndarray,
    seconds: np.ndarray,
    most: np.ndarray,
    acceleration: np.ndarray,
) -> np.ndarray:
    """Return which commands were set to the measured position, (n - 1, joints) bool."""
    if commands.measured is None:
        return np.zeros(ways.shape, dtype=bool)
    near = np.abs(commands.positions - commands.measured)[1:] <= SEATED
    rested = np.concatenate([np.ones((1, ways.shape[1]), bool), ways[:-1] == 0.0])
    apart = (seconds + np.concatenate([seconds[:1], seconds[:-1]])) / 2
    # Further than rounding beyond the first step of a motion, which the next one builds upon.
    out_of_rest = rested & (np.abs(ways) > 1.05 * acceleration * apart * seconds)
    return near & (out_of_rest | (np.abs(ways) > most))


def unexplained_stops(record: Record) -> list[Fault]:
    """Stops that neither a fault nor a stalled policy or machine explains."""
    return [
        fault
        for fault in record.faults
        if fault.kind == 'stopped by itself' and not _is_explained(fault, record)
    ]


def _is_explained(stop: Fault, record: Record) -> bool:
    begin_ns, end_ns = stop.begin_ns - _EXPLAINS_NS, stop.begin_ns
    cut_off = any(
        fault.kind == 'policy_cut_off' and fault.begin_ns < end_ns and fault.over_ns > begin_ns
        for fault in record.faults
    )
    stood = np.concatenate([record.pulse, record.held])
    return cut_off or _late_s(stood, begin_ns, end_ns) > _STOOD_STILL_S


def _may_stop_at_once(faults: Sequence[Fault], stamps: np.ndarray) -> np.ndarray:
    """Tracking error at which the command may freeze (`on_stop` of the robot file)."""
    there = np.zeros(len(stamps), dtype=bool)
    for fault in faults:
        if fault.kind in ('push', 'joint_states_jump', 'power_lost'):
            there |= (stamps > fault.begin_ns) & (stamps < fault.over_ns)
    return there


def _use(record: Record, names: Sequence[str], shares: np.ndarray, stamps: np.ndarray) -> LimitUse:
    by_tick = shares.max(axis=1, initial=0.0)
    beyond = np.flatnonzero(by_tick > 1.0 + TOLERANCE)
    worst = beyond[np.argsort(by_tick[beyond])[::-1][:10]]
    all_stamps = record.commands.stamps_ns
    examples = []
    for row in worst.tolist():
        at = int(stamps[row])
        place = int(np.searchsorted(all_stamps, at))
        around = all_stamps[max(0, place - 2) : place + 2]
        examples.append(
            {
                'stamp_ns': at,
                'joint': names[int(shares[row].argmax())],
                'share': round(float(by_tick[row]), 4),
                'ticks_ms': np.round(np.diff(around) * 1e-6, 3).tolist(),
                'fault': fault_at(record.faults, at),
            }
        )
    ratio = np.diff(all_stamps)[1:] / np.diff(all_stamps)[:-1]
    even = np.isin(stamps[beyond], all_stamps[2:][(ratio > 0.8) & (ratio < 1.25)])
    return LimitUse(float(by_tick.max(initial=0.0)), len(beyond), int(even.sum()), examples)


def fault_at(faults: Sequence[Fault], at_ns: int) -> str:
    """The fault in force at a time, or the last one before it and how long ago; empty for none."""
    before = [fault for fault in faults if fault.begin_ns <= at_ns]
    if not before:
        return ''
    fault = before[-1]
    if at_ns <= fault.over_ns:
        return f'{fault.kind}, {(at_ns - fault.begin_ns) * 1e-9:.3f} s after its begin'
    return f'{(at_ns - fault.over_ns) * 1e-9:.3f} s after {fault.kind}'
