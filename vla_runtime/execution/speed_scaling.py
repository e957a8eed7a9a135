"""Speed scaling: how fast plan time passes, as the person at the robot's slider wants it."""

from __future__ import annotations

# From standstill to full speed; the limits of acceleration come on top.
_RISE_S = 0.5
# Below this nothing visible moves: plan time stands still.
_NEGLIGIBLE = 1e-3


class SpeedScaling:
    """Plan time per time, which follows the wanted factor as fast as the robot may brake.

    `wanted` 0.0 holds the robot, 1.0 is full speed.
    """

    def __init__(self) -> None:
        self.wanted = 1.0
        self.factor = 1.0

    def advance(self, dt_s: float, slower: float) -> None:
        """Bring the factor nearer to the wanted one.

        `slower` is the share of its velocity that the robot keeps after a tick of braking.
        """
        if self.wanted < self.factor:
            self.factor = max(self.wanted, self.factor * slower)
            if self.factor < _NEGLIGIBLE:
                self.factor = 0.0
        elif self.wanted > self.factor:
            self.factor = min(self.wanted, self.factor + dt_s / _RISE_S)
