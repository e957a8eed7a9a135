"""One self-contained HTML page about a session: no other file, no network, any browser."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_runtime import __version__
from vla_runtime.execution.command import ChunkRefusal
from vla_runtime.files.atomic_write import write_text
from vla_runtime.files.html_page import html_page
from vla_runtime.recording.image_modes import IMAGE_RATE_HZ, JPEG_QUALITY, ImageMode
from vla_tabletop.demo import plots
from vla_tabletop.demo.refusals import MEANINGS, in_order
from vla_tabletop.demo.telemetry import Attempt, Telemetry, Thumbnail

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
       color: #1d1d1f; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
h3 { font-size: .95rem; margin: 1.2rem 0 .4rem; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .2rem .9rem .2rem 0;
       border-bottom: 1px solid #e4e4e7; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.row { display: flex; flex-wrap: wrap; gap: .8rem; align-items: flex-start; }
figure { margin: 0; width: 12.5rem; } figure img { width: 100%; display: block; }
figcaption { font-size: .8rem; color: #55555a; }
.scroll { overflow-x: auto; } .plot svg { width: 100%; height: auto; } .narrow { display: none; }
pre { background: #f4f4f5; padding: .8rem; overflow-x: auto; }
.success { color: #2d7a46; } .failed { color: #b3283b; }
@media (max-width: 44rem) {
  .wide { display: none; } .narrow { display: block; }
  table { font-size: .85rem; } td, th { padding-right: .5rem; }
  td { overflow-wrap: anywhere; } td.number, td.success, td.failed { overflow-wrap: normal; }
  td.seed { overflow-wrap: anywhere; min-width: 4rem; }
  figure { width: calc(50% - .4rem); }
}
"""
_PHASES = ('tokens', 'images', 'vision', 'prefix', 'denoise', 'actions', 'total')

_REDUCED = (
    f'at most {IMAGE_RATE_HZ} a second of each camera, raw ones as JPEG of quality {JPEG_QUALITY}. '
)
_IMAGES: Mapping[ImageMode, str] = {
    'reduced': f'Images are reduced, here and in the bag: {_REDUCED}The policy had what the '
    'cameras published.',
    'used': f'Images are reduced here: {_REDUCED}The bag has every frame that an inference used, '
    'bit for bit.',
    'all': f'Images are reduced here: {_REDUCED}The bag has every frame, bit for bit.',
}


def write_report(
    path: Path,
    telemetry: Telemetry,
    parameters: Mapping[str, Mapping[str, Any]],
    facts: Mapping[str, str],
    joint_units: Mapping[str, str],
    failure: str,
    images: ImageMode = 'reduced',
) -> None:
    """Write the page.

    Args:
        path: path of the file.
        telemetry: recorded telemetry; may be empty.
        parameters: parameters of each node.
        facts: facts of the run, for the table on top.
        joint_units: unit of each joint to plot, in order.
        failure: reason why the session ended early; '' when it did not.
        images: frames that the bag has.
    """
    start_ns = _start_ns(telemetry)
    parts = [
        f'<h1>vla_runtime demo: {telemetry.score}</h1>',
        f'<p class="failed"><b>Ended early.</b></p><pre>{html.escape(failure)}</pre>'
        if failure
        else '',
        _table({**facts, **_summary(telemetry, joint_units)}),
        _refused(telemetry),
        '<h2>Instructions</h2><p>Whether one was carried out is decided by the state of the '
        'simulator, within a time limit.</p>',
        _attempts(telemetry.attempts, start_ns),
        '<h2>Joints: commanded and measured</h2><p>A grey line is a hand-over from one chunk to '
        'the next, an orange one a chunk that came late. Green bands: an instruction that was '
        'completed, red ones: one that was not. A dotted line: the simulator was reset, which puts '
        'the arm elsewhere without a motion.</p>',
        _plot(lambda sheet: plots.joints(telemetry, joint_units, start_ns, sheet)),
        '<h2>Tracking error</h2><p>The measured position less the newest command, while there is '
        'one.</p>',
        _plot(lambda sheet: plots.tracking(telemetry, joint_units, start_ns, sheet)),
        '<h2>Latency of each inference, by phase</h2>',
        _plot(lambda sheet: plots.latency(telemetry, start_ns, sheet)),
        _phases(telemetry),
        '<h2>Age of what each inference saw</h2>',
        _plot(lambda sheet: plots.ages(telemetry, start_ns, sheet)),
        '<h2>Control loop</h2>',
        _plot(lambda sheet: plots.ticks(telemetry, start_ns, sheet)),
        f'<h2>What the cameras saw</h2><p>{_IMAGES[images]}</p>',
        _thumbnails(telemetry, start_ns),
        _problems(telemetry.problems),
        '<h2>Parameters</h2>',
        *(
            f'<details><summary>{html.escape(node)}</summary>{_table(values)}</details>'
            for node, values in parameters.items()
        ),
    ]
    body = '\n'.join(part for part in parts if part)
    body += f'\n<p>vla_runtime {__version__}</p>'
    write_text(path, html_page('vla_runtime demo', _STYLE, body))


def _start_ns(telemetry: Telemetry) -> int:
    if telemetry.attempts:
        return telemetry.attempts[0].start_ns
    first = [series.times_ns[0] for series in telemetry.measured.values() if series.times_ns]
    return min(first, default=0)


def _summary(telemetry: Telemetry, joint_units: Mapping[str, str]) -> dict[str, str]:
    jumps = [seam.position_jump for seam in telemetry.seams if not seam.from_hold]
    delays = [seam.delay_steps for seam in telemetry.seams]
    totals = [one.milliseconds['total'] for one in telemetry.inferences]
    p99 = [row[0] for row in telemetry.tick_p99_ms.rows]
    return {
        'chunks': telemetry.chunks,
        'inference': f'median {np.median(totals):.1f} ms, p99 {np.percentile(totals, 99):.1f} ms'
        if totals
        else 'none',
        'delay': f'median {np.median(delays):g} steps, at most {max(delays)}' if delays else 'none',
        'chunks disagreeing at hand-over': f'median {np.median(jumps):.4f}, at most '
        f'{max(jumps):.4f} (rad or m, before blending)'
        if jumps
        else 'none',
        'ticks': f'{telemetry.total("ticks")}, of which starved {telemetry.total("starved_ticks")},'
        f' overrun {telemetry.total("overrun_ticks")}, limited {telemetry.total("limited_ticks")}'
        f' (the motion limiter changed the command{_limited_most(telemetry)})',
        'tick lateness': f'p99 of 1024 ticks: median {np.median(p99):.2f} ms, at most '
        f'{max(p99):.2f} ms'
        if p99
        else 'none',
        'tracking error': _tracking(telemetry, joint_units),
    }


def _tracking(telemetry: Telemetry, joint_units: Mapping[str, str]) -> str:
    """Name for each unit the joint that was furthest from its command."""
    worst: dict[str, tuple[float, str]] = {}
    for name, unit in joint_units.items():
        errors = np.abs(plots.tracking_error(telemetry, name)[1])
        if len(errors):
            worst[unit] = max(worst.get(unit, (0.0, '')), (float(errors.max()), name))
    said = (f'at most {error:.4f} {unit} ({name})' for unit, (error, name) in worst.items())
    return ', '.join(said) or 'none'


def _limited_most(telemetry: Telemetry) -> str:
    """Name the joint and the limit that changed the command most often."""
    for cause, count in telemetry.limited.items():
        joint, limit = cause.rsplit('.', 1)
        return f': {joint} by {limit} most, {count}'
    return ''


def _refused(telemetry: Telemetry) -> str:
    """Write the number of refused chunks, each reason's meaning, and the executor's words."""
    if not telemetry.refused:
        return ''
    starts = len(telemetry.attempts)
    rows = ''.join(
        f'<tr><td class="number">{count}</td><td>{html.escape(reason.replace("_", " "))}</td>'
        f'<td>{html.escape(MEANINGS[ChunkRefusal(reason)])}</td>'
        f'{_verdict(ChunkRefusal(reason), count, starts)}</tr>'
        for reason, count in telemetry.refused.items()
    )
    said = ''.join(f'<li>{html.escape(text)}</li>' for text in telemetry.refusals)
    head = '<tr><th>chunks</th><th>reason</th><th>what it means</th><th>verdict</th></tr>'
    return (
        '<h2>Chunks that the executor refused</h2><p>None of them moved the robot: the plan before '
        f'was executed on, or the robot held.</p>{_scroll(f"<table>{head}{rows}</table>")}'
        + (f'<p>In its words:</p><ul>{said}</ul>' if said else '')
    )


def _verdict(reason: ChunkRefusal, count: int, starts: int) -> str:
    if in_order(reason, count, starts):
        return f'<td class="success">in order, with {starts} starts</td>'
    return '<td class="failed">look into it</td>'


def _attempts(attempts: Sequence[Attempt], start_ns: int) -> str:
    if not attempts:
        return '<p>None was given.</p>'
    rows = []
    for attempt in attempts:
        outcome = attempt.outcome or 'cut off by the end of the demo'
        mark = 'success' if attempt.outcome == 'success' else 'failed' if attempt.outcome else ''
        took = f'{(attempt.end_ns - attempt.start_ns) * 1e-9:.1f}' if attempt.end_ns else ''
        rows.append(
            f'<tr><td class="number">{(attempt.start_ns - start_ns) * 1e-9:.1f}</td>'
            f'<td>{html.escape(attempt.instruction)}</td>'
            f'<td class="number seed">{attempt.seed}</td>'
            f'<td class="{mark}">{html.escape(outcome)}</td>'
            f'<td class="number">{took}</td></tr>'
        )
    head = '<tr><th>at, s</th><th>instruction</th><th>scene</th><th>outcome</th><th>took, s</th>'
    return _scroll(f'<table>{head}</tr>{"".join(rows)}</table>')


def _phases(telemetry: Telemetry) -> str:
    rows = []
    for phase in _PHASES:
        values = [
            one.milliseconds[phase] for one in telemetry.inferences if phase in one.milliseconds
        ]
        if values:
            numbers = [*np.percentile(values, (50, 99)), max(values)]
            cells = ''.join(f'<td class="number">{number:.2f}</td>' for number in numbers)
            rows.append(f'<tr><td>{phase}</td>{cells}</tr>')
    if not rows:
        return ''
    head = '<tr><th>phase</th><th>median, ms</th><th>p99</th><th>most</th></tr>'
    return _scroll(f'<table>{head}{"".join(rows)}</table>')


def _thumbnails(telemetry: Telemetry, start_ns: int) -> str:
    """Write a row for each instruction: each camera at its beginning, then each at its end."""
    rows = []
    for attempt in telemetry.attempts:
        during = [
            thumbnail
            for thumbnail in telemetry.thumbnails
            if attempt.start_ns <= thumbnail.time_ns
            and (not attempt.end_ns or thumbnail.time_ns <= attempt.end_ns)
        ]
        figures = []
        for shown in _first_and_last(during):
            picture = base64.b64encode(shown.jpeg).decode('ascii')
            at_s = (shown.time_ns - start_ns) * 1e-9
            camera = html.escape(shown.camera)
            figures.append(
                f'<figure><img alt="{camera}" src="data:image/jpeg;base64,{picture}">'
                f'<figcaption>{at_s:.1f} s, {camera}</figcaption></figure>'
            )
        if figures:
            rows.append(
                f'<h3>{html.escape(attempt.instruction)}</h3>'
                f'<div class="row">{"".join(figures)}</div>'
            )
    return ''.join(rows) or '<p>No image was recorded.</p>'


def _first_and_last(thumbnails: Sequence[Thumbnail]) -> list[Thumbnail]:
    """Choose the first image of each camera by name, then the last of each."""
    cameras = sorted({thumbnail.camera for thumbnail in thumbnails})
    series = [[one for one in thumbnails if one.camera == camera] for camera in cameras]
    return [mine[0] for mine in series] + [mine[-1] for mine in series if len(mine) > 1]


def _problems(problems: Sequence[str]) -> str:
    if not problems:
        return ''
    items = ''.join(f'<li>{html.escape(problem)}</li>' for problem in problems)
    return f'<h2>What went wrong on the way</h2><ul>{items}</ul>'


def _table(values: Mapping[str, Any]) -> str:
    rows = ''.join(
        f'<tr><td>{html.escape(str(key))}</td><td>{html.escape(str(value))}</td></tr>'
        for key, value in values.items()
    )
    return _scroll(f'<table>{rows}</table>')


def _plot(draw: Callable[[plots.Sheet], str]) -> str:
    """Draw a plot twice: a telephone shows the narrow one, in letters of the same size."""
    return (
        f'<div class="plot wide">{draw(plots.WIDE)}</div>'
        f'<div class="plot narrow">{draw(plots.NARROW)}</div>'
    )


def _scroll(wide: str) -> str:
    """Wrap an element that may be wider than the page."""
    return f'<div class="scroll">{wide}</div>'
