"""Words about stamps that are far from the node's clock, the same for cameras and joints."""

from __future__ import annotations

from vla_runtime.execution.state import clock_hint
from vla_runtime.execution.watchdog import WatchdogParameters

# The executor takes neither a chunk nor a state from further ahead of its clock.
AHEAD_NS = round(WatchdogParameters.future_tolerance_s * 1e9)

# What mends a driver whose clock cannot be set.
OWN_CLOCK = "give the topic 'stamp: receive' in the robot file"


def old_hint(age_s: float) -> str:
    """Return the hint to follow a stamp that is older than the node takes."""
    return clock_hint(age_s, f'; if the driver has a clock of its own, {OWN_CLOCK}')


def describe_future(ahead_s: float) -> str:
    """Describe why a stamp that lies so many seconds ahead of the node's clock is not used."""
    if hint := clock_hint(-ahead_s):
        return f'stamp is {ahead_s:.3f} s in the future{hint}'
    return (
        f'stamp is {ahead_s:.3f} s in the future: the clocks of driver and node differ '
        f'(synchronise them, check use_sim_time, or {OWN_CLOCK})'
    )


def describe_ahead(ahead_ns: int, consequence: str) -> str | None:
    """Describe a used stamp ahead of the clock, and its effect; None within the tolerance."""
    if ahead_ns <= AHEAD_NS:
        return None
    return (
        f'stamp is {ahead_ns * 1e-9:.3f} s in the future, {consequence}: synchronise the '
        f"driver's clock, check use_sim_time, or {OWN_CLOCK}"
    )
