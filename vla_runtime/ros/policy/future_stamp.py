"""Words about a stamp of the future, the same for cameras and joints."""

from __future__ import annotations

from vla_runtime.execution.state import clock_hint


def describe_future(ahead_s: float) -> str:
    """Describe a stamp that lies so many seconds ahead of the node's clock."""
    if hint := clock_hint(-ahead_s):
        return f'stamp is {ahead_s:.3f} s in the future{hint}'
    return (
        f'stamp is {ahead_s:.3f} s in the future: the clocks of driver and node differ '
        '(synchronise them, or check use_sim_time)'
    )
