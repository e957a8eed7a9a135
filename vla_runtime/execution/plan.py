"""A plan is setpoints at step times; sampling it is a pure function of the plan and the time.

Knot k is the setpoint at step time `first_step + k`; interval k, from knot k to knot k+1, is a
cubic polynomial in the fraction of the step that has gone by. Times are counted in steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Interpolation = Literal['linear', 'cubic']


@dataclass(frozen=True)
class Plan:
    """Setpoints at consecutive step times and the curve through them.

    Attributes:
        knots: (n + 1, columns) setpoints.
        slopes: (n + 1, columns) derivative at the knots, per step; meaningless when linear.
        coefficients: (n, 4, columns); interval k at fraction u is `[1, u, u², u³] @ c[k]`.
    """

    first_step: int
    knots: np.ndarray
    slopes: np.ndarray
    coefficients: np.ndarray


def monotone_slopes(knots: np.ndarray) -> np.ndarray:
    """Slopes, per step, of the cubic that does not overshoot its knots, both (n + 1, columns).

    Harmonic mean of the neighbouring secants, zero at an extremum (Fritsch and Butland 1984,
    equally spaced knots); one-sided three-point slopes at the ends, limited in the same way.
    """
    slopes = np.zeros_like(knots)
    if len(knots) < 2:
        return slopes
    secants = np.diff(knots, axis=0)
    if len(knots) == 2:
        slopes[:] = secants[0]
        return slopes
    before, after = secants[:-1], secants[1:]
    same_way = before * after > 0.0
    total = np.where(same_way, before + after, 1.0)
    # Divide before multiplying: the product of two tiny secants would underflow.
    slopes[1:-1] = np.where(same_way, 2.0 * before * (after / total), 0.0)
    slopes[0] = _end_slope(secants[0], secants[1])
    slopes[-1] = _end_slope(secants[-1], secants[-2])
    return slopes


def _end_slope(near: np.ndarray, far: np.ndarray) -> np.ndarray:
    """Three-point slope at an end, kept monotone: (columns,) secants nearest and next to it."""
    slope = 1.5 * near - 0.5 * far
    slope = np.where(slope * near <= 0.0, 0.0, slope)
    turns = (near * far < 0.0) & (np.abs(slope) > 3.0 * np.abs(near))
    return np.where(turns, 3.0 * near, slope)


def make_plan(
    knots: np.ndarray,
    first_step: int = 0,
    interpolation: Interpolation = 'cubic',
    slopes: np.ndarray | None = None,
) -> Plan:
    """The curve through the knots.

    Args:
        knots: (n + 1, columns) float64, finite; n >= 0.
        first_step: step time of knot 0.
        interpolation: `linear` (velocity jumps at knots) or `cubic` (velocity is continuous).
        slopes: (n + 1, columns) for `cubic`; the monotone ones when not given.
    """
    knots = np.asarray(knots, dtype=np.float64)
    if knots.ndim != 2 or len(knots) < 1:
        raise ValueError(f'plan: knots have shape {knots.shape}, expected (1 or more, columns)')
    if slopes is None:
        slopes = monotone_slopes(knots)
    coefficients = np.zeros((len(knots) - 1, 4, knots.shape[1]))
    rise = np.diff(knots, axis=0)
    coefficients[:, 0] = knots[:-1]
    if interpolation == 'linear':
        coefficients[:, 1] = rise
    elif interpolation == 'cubic':
        coefficients[:, 1] = slopes[:-1]
        coefficients[:, 2] = 3.0 * rise - 2.0 * slopes[:-1] - slopes[1:]
        coefficients[:, 3] = -2.0 * rise + slopes[:-1] + slopes[1:]
    else:
        raise ValueError(f"plan: interpolation '{interpolation}', expected 'linear' or 'cubic'")
    return Plan(first_step, knots, slopes, coefficients)


class Sampler:
    """Samples a plan at one time into arrays that already exist."""

    def __init__(self) -> None:
        self._powers = np.zeros(4)
        self._derivative = np.zeros(4)
        self._powers[0] = 1.0
        self._derivative[1] = 1.0

    def sample_into(
        self,
        plan: Plan,
        interval: int,
        fraction: float,
        positions: np.ndarray,
        velocities: np.ndarray,
    ) -> None:
        """Write setpoints and derivatives (per step) into `positions` and `velocities`.

        The time is `fraction`, 0 to 1, of the plan's interval; both arrays are (columns,) float64.
        """
        square = fraction * fraction
        powers, derivative = self._powers, self._derivative
        powers[1] = fraction
        powers[2] = square
        powers[3] = square * fraction
        derivative[2] = 2.0 * fraction
        derivative[3] = 3.0 * square
        coefficients = plan.coefficients[interval]
        np.dot(powers, coefficients, out=positions)
        np.dot(derivative, coefficients, out=velocities)
