"""Wrist camera with another frame rate than the front camera, as on real robots."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vla_runtime.types import Observation
from vla_tabletop.sim.world import Tabletop
from vla_tabletop.training.dataset import IMAGE_HEIGHT, IMAGE_WIDTH

_CAMERA = 'wrist'


class SlowWrist:
    """Keeps the wrist camera's frame for a period, the first at time 0."""

    def __init__(self, world: Tabletop, period_ns: int) -> None:
        self._world, self._period_ns = world, period_ns
        self._frame: np.ndarray | None = None
        self._stamp_ns = 0

    def tick(self, elapsed_ns: int) -> None:
        """Take a frame if one is due; call at every tick of the world, before `put_into`."""
        if elapsed_ns % self._period_ns == 0:
            self._frame = self._world.render(_CAMERA, IMAGE_WIDTH, IMAGE_HEIGHT)
            self._stamp_ns = round(self._world.sim_time_s * 1e9)

    def put_into(self, observation: Observation) -> Observation:
        """The observation with the latest frame and its stamp instead of the wrist camera now."""
        return replace(
            observation,
            images={**observation.images, _CAMERA: self._frame},
            stamps_ns={**observation.stamps_ns, _CAMERA: self._stamp_ns},
        )
