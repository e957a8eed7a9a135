"""Schedules used last by an engine: its data for given times of the denoise steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from vla_runtime.engines.closing import close_all

SCHEDULES_KEPT = 4
Schedule = TypeVar('Schedule')


def schedule_key(times: np.ndarray, dt: float, updates: np.ndarray | None) -> Hashable:
    """Key of the schedule that `PolicyEngine.set_schedule` describes."""
    return (*map(float, times), float(dt)), None if updates is None else updates.tobytes()


class Schedules(Generic[Schedule]):
    """Schedules by key; the newest are kept.

    Args:
        drop: frees one that gives way to a newer one, or to `clear`.

    Attributes:
        current: the schedule in use; None before the first. Any thread may read it.
    """

    def __init__(self, drop: Callable[[Schedule], object] = lambda schedule: None) -> None:
        self._kept: dict[Hashable, Schedule] = {}
        self._drop = drop
        self.current: Schedule | None = None

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def kept(self) -> tuple[Schedule, ...]:
        """Schedules that are kept. Any thread may read it."""
        return tuple(self._kept.values())

    def require(self) -> Schedule:
        """Return the schedule in use; RuntimeError where none was set."""
        if self.current is None:
            raise RuntimeError('set_schedule must be called before denoising')
        return self.current

    def use(self, key: Hashable, make: Callable[[], Schedule]) -> Schedule:
        """Use the schedule of this key, made if it is not kept; the oldest one may be dropped."""
        schedule = self._kept[key] if key in self._kept else make()
        kept = {**{k: v for k, v in self._kept.items() if k != key}, key: schedule}
        dropped = [kept.pop(next(iter(kept)))] if len(kept) > SCHEDULES_KEPT else []
        # In one assignment: `kept` may be read by another thread.
        self._kept, self.current = kept, schedule
        for old in dropped:
            self._drop(old)
        return schedule

    def clear(self) -> None:
        # Forgotten first: one that cannot be freed is not freed again.
        kept, self._kept, self.current = self._kept, {}, None
        close_all(partial(self._drop, schedule) for schedule in kept.values())
