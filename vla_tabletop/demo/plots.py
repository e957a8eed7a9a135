"""The report's plots, as SVG text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vla_runtime.pages.page import svg_plot
from vla_tabletop.demo.telemetry import Attempt, Series, Telemetry

_MEASURED, _COMMANDED, _SEAM, _LATE = '#1f6f8b', '#d1495b', '#b8b8b8', '#e09f3e'
_OUTCOME = {'success': '#4f9d69', '': '#9a9a9a'}
_FAILED = '#d1495b'
# Outside the axes' top right corner.
_ABOVE: dict[str, Any] = {'loc': 'lower right', 'bbox_to_anchor': (1.0, 1.0), 'frameon': False}
_RESET: dict[str, Any] = {'color': '#1d1d1f', 'linewidth': 0.9, 'linestyle': (0, (1, 2))}
# Points a curve keeps, about: more would not be seen.
_POINTS = 1500
# So many times the usual distance of the samples around it is a gap in a curve, and so long at
# least. Usual is the median of so many distances on one side.
_GAP_FACTOR = 5.0
_LEAST_GAP_S = 0.08
_AROUND = 11
# Curves this short show every sample.
_FEW = 200
# A joint follows the newest command, up to this age.
_FOLLOWED_NS = 200_000_000


@dataclass(frozen=True)
class Sheet:
    """Size of the plots, legible on a screen; `width` in inches."""

    width: float
    columns: int

    def plot(self, draw: Callable[[Figure], None], height: float) -> str:
        """Draw a figure so many inches high, as SVG text."""
        return svg_plot(draw, self.width, height, font_size=10.0)


WIDE = Sheet(12.0, 7)
# Phones in portrait.
NARROW = Sheet(4.8, 3)


def joints(
    telemetry: Telemetry, units: Mapping[str, str], start_ns: int, sheet: Sheet = WIDE
) -> str:
    """Plot commanded and measured positions, with hand-overs, instructions and resets."""
    rows = max(len(units), 1)

    def draw(figure: Figure) -> None:
        axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
        for axis, (name, unit) in zip(axes, units.items(), strict=False):
            for handover in telemetry.handovers:
                colour = _LATE if handover.late else _SEAM
                axis.axvline(_seconds(handover.time_ns, start_ns), color=colour, linewidth=0.5)
            for kept, colour, label, width in (
                (telemetry.measured, _MEASURED, 'measured', 1.4),
                (telemetry.commanded, _COMMANDED, 'commanded', 0.9),
            ):
                _curve(axis, kept.get(name), start_ns, colour, label, width, telemetry.resets)
            _attempts(axis, telemetry.attempts, start_ns)
            _resets(axis, telemetry, start_ns)
            axis.set_ylabel(f'{name}, {unit}')
            axis.margins(x=0.01)
        if telemetry.measured or telemetry.commanded:
            axes[0].legend(title='position', ncols=3, **_ABOVE)
        axes[-1].set_xlabel('time, s')
        axes[-1].set_xlim(left=0.0)

    return sheet.plot(draw, 1.7 * rows + 0.7)


def tracking(
    telemetry: Telemetry, units: Mapping[str, str], start_ns: int, sheet: Sheet = WIDE
) -> str:
    """Plot how far each joint is from the newest command; a panel for each unit."""
    kinds = list(dict.fromkeys(units.values())) or ['']

    def draw(figure: Figure) -> None:
        axes = figure.subplots(len(kinds), 1, sharex=True, squeeze=False)[:, 0]
        for axis, kind in zip(axes, kinds, strict=True):
            for name in (name for name, unit in units.items() if unit == kind):
                times_ns, errors = tracking_error(telemetry, name)
                if len(times_ns):
                    times, values = plotted_curve((times_ns - start_ns) * 1e-9, errors)
                    axis.plot(times, values, linewidth=0.9, label=name)
            _resets(axis, telemetry, start_ns)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(title='joint', ncols=sheet.columns, **_ABOVE)
            axis.set_ylabel(f'error, {kind}')
            axis.margins(x=0.01)
        axes[-1].set_xlabel('time, s')
        axes[-1].set_xlim(left=0.0)

    return sheet.plot(draw, 2.4 * len(kinds) + 0.4)


def tracking_error(telemetry: Telemetry, joint: str) -> tuple[np.ndarray, np.ndarray]:
    """Return times (n,) ns and a joint's measured position less its newest command (n,)."""
    measured, commanded = telemetry.measured.get(joint), telemetry.commanded.get(joint)
    if not (measured and commanded and measured.times_ns and commanded.times_ns):
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    times_ns, positions = measured.arrays()
    told_ns, commands = commanded.arrays()
    newest = np.searchsorted(told_ns, times_ns, side='right') - 1
    follows = (newest >= 0) & (times_ns - told_ns[newest] < _FOLLOWED_NS)
    for begin_ns, end_ns in telemetry.resets:
        # Earlier commands were for the arm's old position.
        follows &= (times_ns < begin_ns) | (told_ns[newest] > end_ns)
    errors = positions[follows, 0] - commands[newest[follows], 0]
    return times_ns[follows], errors.astype(float)


def latency(telemetry: Telemetry, start_ns: int, sheet: Sheet = WIDE) -> str:
    """Milliseconds of every inference, phase upon phase, and what the node adds."""

    def draw(figure: Figure) -> None:
        axis = figure.subplots()
        inferences = telemetry.inferences
        times = [_seconds(one.time_ns, start_ns) for one in inferences]
        base = np.zeros(len(inferences))
        phases = [
            phase
            for phase in ('tokens', 'images', 'vision', 'prefix', 'denoise', 'actions')
            if any(phase in one.milliseconds for one in inferences)
        ]
        for phase in phases:
            part = np.array([one.milliseconds.get(phase, 0.0) for one in inferences])
            axis.bar(times, part, bottom=base, width=0.12, label=phase)
            base += part
        axis.plot(
            times,
            [one.overhead_ms for one in inferences],
            '.',
            color='black',
            markersize=4,
            label='node, on top',
        )
        if phases:
            axis.legend(title='phase', ncols=sheet.columns, **_ABOVE)
        axis.set_xlabel('time, s')
        axis.set_ylabel('duration, ms')

    return sheet.plot(draw, 3.2)


def ages(telemetry: Telemetry, start_ns: int, sheet: Sheet = WIDE) -> str:
    """Plot input ages at each inference, a panel each, as cameras triggered together coincide."""
    sources = sorted({name for one in telemetry.inferences for name in one.ages_ms})
    rows = max(len(sources), 1)

    def draw(figure: Figure) -> None:
        axes = figure.subplots(rows, 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axis, source in zip(axes, sources, strict=False):
            having = [one for one in telemetry.inferences if source in one.ages_ms]
            times, values = plotted_curve(
                np.array([_seconds(one.time_ns, start_ns) for one in having]),
                np.array([one.ages_ms[source] for one in having]),
            )
            axis.plot(times, values, '.-', color=_MEASURED, linewidth=0.6, markersize=4)
            axis.set_ylabel(f'{source}, ms')
        axes[-1].set_xlabel('time, s')
        axes[-1].set_ylim(bottom=0.0)

    return sheet.plot(draw, 1.3 * rows + 0.6)


def ticks(telemetry: Telemetry, start_ns: int, sheet: Sheet = WIDE) -> str:

    def draw(figure: Figure) -> None:
        axis = figure.subplots()
        _curve(
            axis, telemetry.tick_p99_ms, start_ns, _MEASURED, 'p99 of the newest 1024 ticks', 1.2
        )
        if telemetry.tick_p99_ms.times_ns:
            axis.legend(title='lateness', ncols=1, **_ABOVE)
        axis.set_xlabel('time, s')
        axis.set_ylabel('late, ms')
        axis.set_ylim(bottom=0.0)

    return sheet.plot(draw, 2.4)


def _attempts(axis: Axes, attempts: Sequence[Attempt], start_ns: int) -> None:
    """Shade the time span of each instruction."""
    for attempt in attempts:
        if attempt.end_ns:
            colour = _OUTCOME.get(attempt.outcome, _FAILED)
            axis.axvspan(
                _seconds(attempt.start_ns, start_ns),
                _seconds(attempt.end_ns, start_ns),
                color=colour,
                alpha=0.10,
                linewidth=0,
            )


def _resets(axis: Axes, telemetry: Telemetry, start_ns: int) -> None:
    """Mark resets of the scene."""
    for number, (_, end_ns) in enumerate(telemetry.resets):
        label = '' if number else 'reset'
        axis.axvline(_seconds(end_ns, start_ns), label=label, **_RESET)


def _curve(
    axis: Axes,
    series: Series | None,
    start_ns: int,
    colour: str,
    label: str,
    width: float,
    resets: Sequence[tuple[int, int]] = (),
) -> None:
    if series is None or not series.times_ns:
        return
    times_ns, rows = series.arrays()
    # The robot is put elsewhere by a reset; it does not move there.
    breaks = [_seconds(begin_ns, start_ns) for begin_ns, _ in resets]
    still = np.ones(len(times_ns), dtype=bool)
    for begin_ns, end_ns in resets:
        still &= (times_ns < begin_ns) | (times_ns > end_ns)
    times, values = plotted_curve(
        (times_ns[still] - start_ns) * 1e-9, rows[still, 0].astype(float), breaks
    )
    marker = '.' if len(times_ns) < _FEW else ''
    axis.plot(times, values, marker=marker, color=colour, linewidth=width, label=label)


def plotted_curve(
    times: np.ndarray, values: np.ndarray, breaks: Sequence[float] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Thin a curve (times (n,) s, rising; values (n,)) for plotting, with NaN in gaps.

    Gaps are found before thinning, relative to the samples around them. Lowest and highest value
    of every thinned stretch stay. `breaks` (s) always interrupt the curve.
    """
    steps = np.diff(times)
    gaps = steps > np.maximum(_LEAST_GAP_S, _GAP_FACTOR * _usual(steps))
    places = np.searchsorted(times, breaks)
    gaps[places[(places > 0) & (places < len(times))] - 1] = True
    pieces = np.split(np.arange(len(times)), np.flatnonzero(gaps) + 1)
    every = -(-2 * len(times) // _POINTS)
    kept_times, kept_values = [], []
    for piece in pieces:
        kept = _thinned(piece, values, every)
        kept_times += [times[kept], times[kept[-1:]]]
        kept_values += [values[kept], [np.nan]]
    return np.concatenate(kept_times), np.concatenate(kept_values)


def _usual(steps: np.ndarray) -> np.ndarray:
    """Usual length of a step at each one: the larger of the medians before and after it."""
    count = len(steps)
    if count == 0:
        return steps
    # Mirrored at the ends.
    padded = np.pad(steps, _AROUND, mode='reflect')
    medians = np.median(np.lib.stride_tricks.sliding_window_view(padded, _AROUND), axis=1)
    return np.maximum(medians[:count], medians[-count:])


def _thinned(piece: np.ndarray, values: np.ndarray, every: int) -> np.ndarray:
    """Indices of the first and the last sample, and of both extremes of every so many."""
    if every <= 2:
        return piece
    kept = {int(piece[0]), int(piece[-1])}
    for first in range(0, len(piece), every):
        some = piece[first : first + every]
        kept |= {int(some[values[some].argmin()]), int(some[values[some].argmax()])}
    return np.array(sorted(kept))


def _seconds(time_ns: int, start_ns: int) -> float:
    return (time_ns - start_ns) * 1e-9
