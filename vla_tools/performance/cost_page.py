"""The page of `vla_runtime bench --plot`: pictures and tables of cost, measured and on paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_runtime.pages.page import render, svg_plot
from vla_tools.performance.cost_sweep import KINDS
from vla_tools.performance.devices import DEVICES
from vla_tools.performance.roofline import SECONDS_A_KERNEL

_TITLES = {
    'views': 'views with a new image',
    'tokens': 'tokens of the padded prompt',
    'horizon': 'actions of a chunk',
    'steps': 'denoise steps',
    'rows': 'prompt rows (2: guidance)',
}
_COLUMNS = ('ms', 'p95', 'least', 'times')
_COLOURS = {'miss': '#1f77b4', 'hit': '#d1495b'}

_TEMPLATE = Path(__file__).with_name('cost_page.html.j2')


def cost_page(result: Mapping[str, Any]) -> str:
    """Return the page of a result, as in `vla_runtime bench --json`."""
    figures = result['figures']
    cost = figures['cost']
    return render(
        _TEMPLATE,
        title=f'Cost of {figures["policy"]}',
        of=figures,
        where=figures['device_name'] or result['machine']['cpu'],
        panels=[_panel(axis, points) for axis, points in cost['axes'].items()],
        heads=['', *(f'{kind}, {what}' for kind in KINDS for what in _COLUMNS)],
        points=_points(cost['axes']),
        notes=cost['notes'],
        published=_on_devices(figures['published']),
        predicted=_on_devices(figures['predicted']),
        seconds_a_kernel=SECONDS_A_KERNEL,
        command=result['command'],
        date=result['date'],
    )


def _panel(axis: str, points: Sequence[Mapping[str, Any]]) -> str:
    """Draw miss and hit over one axis."""

    def draw(figure: Any) -> None:
        panel = figure.subplots()
        for kind in KINDS:
            colour = _COLOURS[kind]
            paper = [(p['value'], p['least_ms'][kind]) for p in points if p['least_ms']]
            if paper:
                panel.plot(*zip(*paper, strict=True), '--', color=colour, label=f'{kind}, least')
            found = [(p['value'], p['measured_ms'][kind]) for p in points if p['measured_ms']]
            if found:
                median = [one['median'] for _, one in found]
                panel.errorbar(
                    [value for value, _ in found],
                    median,
                    yerr=[[0.0] * len(found), [one['p95'] - one['median'] for _, one in found]],
                    marker='o',
                    markersize=4,
                    capsize=2,
                    color=colour,
                    label=f'{kind}, measured',
                )
        panel.set(xlabel=_TITLES[axis], ylabel='ms', ylim=(0, None))
        panel.set_xticks([point['value'] for point in points])
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8, title='inference', title_fontsize=8)

    return svg_plot(draw, 4.2, 3.2, salt=axis)


# A row of figures: its class, names and numbers.
_Row = tuple[str, list[str], list[str]]


def _points(axes: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[_Row]:
    """Return every point with its measured time, its roofline and their ratio."""
    return [
        (
            'own' if point['as_is'] else '',
            [f'{_TITLES[axis]}: {point["value"]}'],
            [cell for kind in KINDS for cell in _cells(point, kind)],
        )
        for axis, points in axes.items()
        for point in points
    ]


def _cells(point: Mapping[str, Any], kind: str) -> list[str]:
    measured, least = point['measured_ms'].get(kind), point['least_ms'].get(kind)
    return [
        _ms(measured['median']) if measured else '',
        _ms(measured['p95']) if measured else '',
        _ms(least) if least else '',
        f'{measured["median"] / least:.1f}' if measured and least else '',
    ]


def _on_devices(
    columns: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> tuple[list[str], list[_Row]]:
    """Return heads, and miss and hit of each column on every device."""
    rows = [
        (
            '',
            [device.name],
            [f'{_ms(of[key]["miss"])} / {_ms(of[key]["hit"])}' for of in columns.values()],
        )
        for key, device in DEVICES.items()
    ]
    return ['miss / hit, ms', *columns], rows if columns else []


def _ms(value: float) -> str:
    return f'{value:.3g}' if value < 100 else f'{value:.0f}'
