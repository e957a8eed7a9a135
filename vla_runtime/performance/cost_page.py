"""The page of `vla_runtime bench --plot`: pictures and tables of cost, measured and on paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from vla_runtime.files.html_page import html_page, inline_svg
from vla_runtime.performance.cost_sweep import KINDS
from vla_runtime.performance.devices import DEVICES
from vla_runtime.performance.kernel_times import SECONDS_A_KERNEL

_TITLES = {
    'views': 'views with a new image',
    'tokens': 'tokens of the padded prompt',
    'horizon': 'actions of a chunk',
    'steps': 'denoise steps',
    'rows': 'prompt rows (2: guidance)',
    'samples': 'samples denoised together',
}
_COLOURS = {'miss': '#1f77b4', 'hit': '#d1495b'}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em;
       color: #222; overflow-wrap: break-word; }
table { border-collapse: collapse; font-size: 13px; margin: 1em 0; }
th, td { padding: .2em .7em; text-align: right; border-bottom: 1px solid #ddd;
         white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
tr.own td { font-weight: 600; }
.note { color: #666; font-size: 13px; }
.scroll { overflow-x: auto; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(19em, 100%), 1fr)); }
svg { width: 100%; height: auto; }
"""


def cost_page(result: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        result: result of `vla_runtime bench --plot`, as its `--json` has it.
    """
    figures = result['figures']
    cost, rates = figures['cost'], figures['rates']
    where = figures['device_name'] or result['machine']['cpu']
    title = f'Cost of {figures["policy"]}'
    facts = (
        f'{figures["backend"]} in {figures["precision"]} on {where}, {figures["threads"]} '
        f'thread(s); {figures["views"]} view(s), {figures["rows"]} row(s), {figures["steps"]} '
        f'denoise step(s) where nothing else is said; median of {figures["repeats"]}, whiskers to '
        'the 95th percentile'
    )
    least = (
        f'Dashed: the roofline, {rates["flops_per_s"] / 1e12:.3g} TFLOP/s and '
        f'{rates["bytes_per_s"] / 1e9:.3g} GB/s ({escape(rates["source"])}); no run is faster, '
        'unless its network fits into a cache.'
        if rates
        else 'No roofline: the rates of this device in this precision are not known.'
    )
    panels = ''.join(_panel(axis, points) for axis, points in cost['axes'].items())
    notes = ''.join(f'<li>{escape(note)}</li>' for note in cost['notes'])
    return html_page(
        title,
        _STYLE,
        f'<h1>{escape(title)}</h1>\n<p>{escape(facts)}. {least} Tokens and actions are in the '
        'shapes of the weights: their other values are on paper alone. A miss has new images and '
        'runs everything; a hit runs the denoise steps alone.</p>\n'
        f'<div class="panels">{panels}</div>\n{_points_table(cost["axes"])}'
        + (f'<ul class="note">{notes}</ul>\n' if notes else '')
        + _published_table(figures)
        + f'<p class="note"><code>{escape(result["command"])}</code>, {escape(result["date"])}</p>',
    )


def _panel(axis: str, points: Sequence[Mapping[str, Any]]) -> str:
    """Draw miss and hit over one axis."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({'font.size': 9}):
        figure = Figure(figsize=(4.2, 3.2), layout='constrained')
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
        return inline_svg(figure, salt=axis)


def _points_table(axes: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Write every point with its measured time, its roofline and their ratio."""
    heads = ['', *(f'{kind}, {what}' for kind in KINDS for what in ('ms', 'p95', 'least', 'times'))]
    rows = [
        _row(
            [f'{_TITLES[axis]}: {point["value"]}', *(c for k in KINDS for c in _cells(point, k))],
            point['as_is'],
        )
        for axis, points in axes.items()
        for point in points
    ]
    return (
        '<h2>Paper and measurement</h2>\n<p class="note">Bold: as the bundle is. Times: measured '
        f'over least.</p>\n{_table(heads, rows)}'
    )


def _cells(point: Mapping[str, Any], kind: str) -> list[str]:
    measured, least = point['measured_ms'].get(kind), point['least_ms'].get(kind)
    return [
        _ms(measured['median']) if measured else '',
        _ms(measured['p95']) if measured else '',
        _ms(least) if least else '',
        f'{measured["median"] / least:.1f}' if measured and least else '',
    ]


def _published_table(figures: Mapping[str, Any]) -> str:
    """Write the roofline of every published size on every device, and PyTorch's prediction."""
    if not figures['published']:
        return ''
    predicted = (
        '<h2>PyTorch on every GPU, predicted</h2>\n<p class="note">The same, and '
        f'{1e6 * SECONDS_A_KERNEL:g} µs for each kernel: with its own operators (torch), and with '
        'the layers of the expert in Triton kernels (triton). The kernels were counted on a '
        'CPU. Nothing in this table was measured.</p>\n'
        f'{_devices_table(figures["predicted"])}'
    )
    return (
        '<h2>Every family on every device, on paper</h2>\n<p class="note">Least times in bfloat16 '
        'from published rates (vla_runtime roofline --list), all views new at a miss, 10 denoise '
        'steps where the head has steps. Nothing in this table was measured.</p>\n'
        f'{_devices_table(figures["published"])}{predicted}'
    )


def _devices_table(columns: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Write miss and hit of each column on every device."""
    rows = [
        _row(
            [
                device.name,
                *(f'{_ms(of[key]["miss"])} / {_ms(of[key]["hit"])}' for of in columns.values()),
            ],
            False,
        )
        for key, device in DEVICES.items()
    ]
    return _table(['miss / hit, ms', *columns], rows)


def _table(heads: Sequence[str], rows: Sequence[str]) -> str:
    head = ''.join(f'<th>{escape(text)}</th>' for text in heads)
    return (
        f'<div class="scroll"><table>\n<tr>{head}</tr>\n' + '\n'.join(rows) + '\n</table></div>\n'
    )


def _row(cells: Sequence[str], own: bool) -> str:
    return (
        f'<tr{" class=own" if own else ""}>'
        + ''.join(f'<td>{escape(cell)}</td>' for cell in cells)
        + '</tr>'
    )


def _ms(value: float) -> str:
    return f'{value:.3g}' if value < 100 else f'{value:.0f}'
