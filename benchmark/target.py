"""Figure that a measurement may reach at most, and whether a run kept to it."""

from __future__ import annotations

from typing import NamedTuple


class Target(NamedTuple):
    """A figure that a run may reach at most.

    Attributes:
        name: for people.
        most: the figure, at most.
        found: the figure that was found; None where it was not measured.
        samples: measurements behind it, where their number matters.
    """

    name: str
    most: float
    found: float | None
    samples: int | None = None

    @property
    def line(self) -> str:
        """Line for a person."""
        if self.found is None:
            return f'{self.name}: not measured (at most {self.most:.3g})'
        met = 'met' if self.found <= self.most else 'NOT MET'
        over = '' if self.samples is None else f' over {self.samples:,} samples'
        return f'{self.name}: {self.found:.3g}{over} (at most {self.most:.3g}): {met}'
