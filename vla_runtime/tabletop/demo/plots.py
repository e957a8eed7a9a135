"""The report's plots, as SVG text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vla_runtime.files.html_page import inline_svg
from vla_runtime.tabletop.demo.telemetry import Attempt, Series, Telemetry

_MEASURED, _COMMANDED, _SEAM, _LATE = '#1f6f8b', '#d1495b', '#b8b8b8', '#e09f3e'
_OUTCOME = {'success': '#4f9d69', '': '#9a9a9a'}
_FAILED = '#d1495b'
# Beside the axes' top right corner, outside.
_ABOVE: dict[str, Any] = {'loc': 'lower right', 'bbox_to_anchor': (1.0, 1.0), 'frameon': False}
# Points a curve keeps, about: more would not be seen.
_POINTS = 1500
# So many times the usual distance of the samples around it is a gap in a curve, and so long at
# least. Usual is the median of so many distances on one side.
_GAP_FACTOR = 5.0
_LEAST_GAP_S = 0.08
_AROUND = 11
# A curve of so few samples shows each of them.
_FEW = 200


def joints(telemetry: Telemetry, units: Mapping[str, str], start_ns: int) -> str:
    """Commanded and measured positions, with every hand-over and every instruction marked.

    Args:
        telemetry: telemetry of the session.
        units: unit of each joint to plot, in order.
        start_ns: time at which the time axis begins.
    """
    rows = max(len(units), 1)
    figure = Figure(figsize=(12, 1.7 * rows + 0.7), layout='constrained')
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, unit) in zip(axes, units.items(), strict=False):
        for seam in telemetry.seams:
            colour = _LATE if seam.late else _SEAM
            axis.axvline(_seconds(seam.time_ns, start_ns), color=colour, linewidth=0.5)
        _curve(axis, telemetry.measured.get(name), start_ns, _MEASURED, 'measured', 1.4)
        _curve(axis, telemetry.commanded.get(name), start_ns, _COMMANDED, 'commanded', 0.9)
        _attempts(axis, telemetry.attempts, start_ns)
        axis.set_ylabel(f'{name}, {unit}')
        axis.margins(x=0.01)
    if telemetry.measured or telemetry.commanded:
        axes[0].legend(title='position', ncols=2, **_ABOVE)
    axes[-1].set_xlabel('time, s')
    axes[-1].set_xlim(left=0.0)
    return inline_svg(figure)


def latency(telemetry: Telemetry, start_ns: int) -> str:
    """Milliseconds of every inference, phase upon phase, and what the node adds."""
    figure = Figure(figsize=(12, 3.2), layout='constrained')
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
        axis.legend(title='phase', ncols=7, **_ABOVE)
    axis.set_xlabel('time, s')
    axis.set_ylabel('duration, ms')
    return inline_svg(figure)


def ages(telemetry: Telemetry, start_ns: int) -> str:
    """Plot the age of each input when its inference began."""
    figure = Figure(figsize=(12, 2.6), layout='constrained')
    axis = figure.subplots()
    sources = sorted({name for one in telemetry.inferences for name in one.ages_ms})
    for source in sources:
        having = [one for one in telemetry.inferences if source in one.ages_ms]
        times, values = plotted_curve(
            np.array([_seconds(one.time_ns, start_ns) for one in having]),
            np.array([one.ages_ms[source] for one in having]),
        )
        axis.plot(times, values, '.-', linewidth=0.6, markersize=4, label=source)
    if sources:
        axis.legend(title='input', ncols=7, **_ABOVE)
    axis.set_xlabel('time, s')
    axis.set_ylabel('age, ms')
    axis.set_ylim(bottom=0.0)
    return inline_svg(figure)


def ticks(telemetry: Telemetry, start_ns: int) -> str:
    """Lateness of the control loop over time."""
    figure = Figure(figsize=(12, 2.4), layout='constrained')
    axis = figure.subplots()
    _curve(axis, telemetry.tick_p99_ms, start_ns, _MEASURED, 'p99 of the newest 1024 ticks', 1.2)
    if telemetry.tick_p99_ms.times_ns:
        axis.legend(title='lateness', ncols=1, **_ABOVE)
    axis.set_xlabel('time, s')
    axis.set_ylabel('late, ms')
    axis.set_ylim(bottom=0.0)
    return inline_svg(figure)


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


def _curve(
    axis: Axes, series: Series | None, start_ns: int, colour: str, label: str, width: float
) -> None:
    if series is None or not series.times_ns:
        return
    times_ns, rows = series.arrays()
    times, values = plotted_curve((times_ns - start_ns) * 1e-9, rows[:, 0].astype(float))
    marker = '.' if len(times_ns) < _FEW else ''
    axis.plot(times, values, marker=marker, color=colour, linewidth=width, label=label)


def plotted_curve(times: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Prepare a curve for plotting: NaN where no sample came for a while, thinned in between.

    A gap is found from the samples before any is left out, so that a long curve is as connected as
    a short one, and from those around it, so that the rate may change. Of every stretch that is
    thinned the lowest and the highest value stay.

    Args:
        times: (n,) seconds, rising.
        values: (n,)

    Returns:
        (m,) seconds and (m,) values.
    """
    steps = np.diff(times)
    gaps = steps > np.maximum(_LEAST_GAP_S, _GAP_FACTOR * _usual(steps))
    pieces = np.split(np.arange(len(times)), np.flatnonzero(gaps) + 1)
    every = -(-2 * len(times) // _POINTS)
    kept_times, kept_values = [], []
    for piece in pieces:
        kept = _thinned(piece, values, every)
        kept_times += [times[kept], times[kept[-1:]]]
        kept_values += [values[kept], [np.nan]]
    return np.concatenate(kept_times), np.concatenate(kept_values)


def _usual(steps: np.ndarray) -> np.ndarray:
    """Usual length of a step at each one: the larger of the medians before and after it.

    The larger, because the first step at a lower rate is as long as those that follow.

    Args:
        steps: (n,) seconds.

    Returns:
        (n,) seconds.
    """
    count = len(steps)
    if count == 0:
        return steps
    # Mirrored at the ends, where one side has too few.
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
