"""Figure that a measurement may reach at most, and whether a run kept to it."""

from __future__ import annotations

from typing import NamedTuple


class Target(NamedTuple):
    """A figure that a run may reach at most; None where it was not measured."""

    name: str
    most: float
    found: float | None

    @property
    def line(self) -> str:
        """Line for a person."""
        if self.found is None:
            return f'{self.name}: not measured (at most {self.most:.3g})'
        met = 'met' if self.found <= self.most else 'NOT MET'
        return f'{self.name}: {self.found:.3g} (at most {self.most:.3g}): {met}'
