"""Report of the soak: figures by phase and by fault, what did not hold, and the tables of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from measurement import percentiles
from soak_checks import Fault, Record, Stall, check_limits, motion_ns, unexplained_stops
from soak_rig import Rig

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
    """Print the tables."""
    print(
        '\n| steps | S | cameras | s | chunks | moving | stalls | longest, s | allowed | beyond |'
    )
    print('|---|---:|---|---:|---:|---:|---:|---:|---:|---:|')
    for one in (phase for session in figures for phase in session['phases']):
        print(
            f'| {one["step_rate_hz"]:g} Hz | {one["replan_interval"]} | {one["cameras"]} '
            f'| {one["seconds"]:.0f} | {one["chunks"]} | {one["moving_percent"]:.0f}% '
            f'| {one["stalls"]} | {one["longest_stall_s"]:.3f} | {one["allowed_s"]:.3f} '
            f'| {one["beyond"]} |'
        )
    print(
        '\n| steps | fault | count | person | still meanwhile, s | recovery, s | most | beyond '
        '| longest tick, ms | machine |'
    )
    print('|---|---|---:|---:|---:|---:|---:|---:|---:|---:|')
    for session in figures:
        for kind, one in session['faults'].items():
            print(
                f'| {session["phases"][0]["step_rate_hz"]:g} Hz | {kind} | {one["count"]} '
                f'| {one["operator_needed"]} | {one["longest_without_motion_s"]:.2f} '
                f'| {one["recovery_s"]["median"]:.3f} | {one["recovery_s"]["max"]:.3f} '
                f'| {one["beyond"]} | {one["longest_tick_ms"]:.0f} '
                f'| {one["machine_in_it_ms"]:.0f} |'
            )
    for session in figures:
        uses = ', '.join(
            f'{kind} {use["worst"]:.4f} ({use["violations"]}, {use["at_even_ticks"]} of them even)'
            for kind, use in session['limits'].items()
        )
        growth = ', '.join(
            f'{name} {max((p["growth_mib"] for p in processes), default=0.0):+.1f} MiB'
            for name, processes in session['memory'].items()
        )
        print(f'\nlargest share of each limit (ticks beyond): {uses}\nmemory: {growth}')
        print(f'a stopped robot moved by {session["stopped_robot_moved_rad"]:.4f} rad at most')
        print(f'excused by a policy held after a kill: {len(session["excused_after_a_kill"])}')
        for failure in session['failures']:
            print(f'FAILED: {failure}')
