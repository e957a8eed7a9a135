"""One self-contained HTML page about a session: no other file, no network, any browser."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_runtime.execution.command import ChunkRefusal
from vla_runtime.files.atomic_write import write_text
from vla_runtime.pages.page import render
from vla_runtime.recording.topics import IMAGE_RATE_HZ, JPEG_QUALITY, ImageMode
from vla_tabletop.demo import plots
from vla_tabletop.demo.telemetry import Attempt, Telemetry, Thumbnail

# --- Explanations of refused chunks

MEANINGS: dict[ChunkRefusal, str] = {
    ChunkRefusal.NOT_RUNNING: 'it came while the executor was not started; usual after a stop, '
    'when the answer to the last request is still on its way',
    ChunkRefusal.HOLDING: 'the robot was held by a fault that passes by itself, or coming to rest',
    ChunkRefusal.APPROACHING: 'the robot was still on its way to where a plan may begin',
    ChunkRefusal.PAUSED: 'a person had paused the robot, or it was on its way home',
    ChunkRefusal.LEADING: 'a leader led the robot',
    ChunkRefusal.OTHER_EPISODE: 'it answers a request of an episode that has ended',
    ChunkRefusal.DUPLICATE: 'the same chunk came before',
    ChunkRefusal.REQUEST_CLOSED: 'its request was given up after request_timeout_s, was answered '
    'before, or ended with a stop',
    ChunkRefusal.OUT_OF_ORDER: 'its observation is older than that of the chunk in force',
    ChunkRefusal.OBSERVATION_FROM_FUTURE: 'its observation is later than now: clocks differ',
    ChunkRefusal.OBSERVATION_TOO_OLD: 'its observation is older than max_observation_age_s',
    ChunkRefusal.OBSERVATION_UNKNOWN: 'its observation was made before the executor was started, '
    'so its step is not known; usual for the first one after a start',
    ChunkRefusal.MALFORMED: 'it is no table of numbers, a row a step',
    ChunkRefusal.WRONG_JOINTS: "its joints are not the robot's",
    ChunkRefusal.NOT_FINITE: 'it holds a number that is not finite',
    ChunkRefusal.NO_ROTATION: 'it holds a rotation that is none',
    ChunkRefusal.OUT_OF_REACH: 'the arm cannot reach a pose in it',
    ChunkRefusal.WRONG_STEP_TIME: 'its step time is not that of the chunks before',
    ChunkRefusal.INTERVAL_EXCEEDS_HORIZON: 'it has fewer steps than replan_interval asks for',
    ChunkRefusal.LIMIT: "it violates a limit that the robot file's on_violation refuses",
    ChunkRefusal.CLAMP_LATCH: 'too many chunks had to be clamped; ~/reset allows more',
    ChunkRefusal.USEFUL_PART_PAST: 'it came so late that the steps to execute were over',
    ChunkRefusal.START_TOO_FAR: 'it begins too far from where the robot is',
    ChunkRefusal.INTERNAL_ERROR: 'a fault in the executor; its log has more',
}

# Expected around a stop or a start.
_AT_A_START = frozenset(
    {
        ChunkRefusal.NOT_RUNNING,
        ChunkRefusal.OTHER_EPISODE,
        ChunkRefusal.REQUEST_CLOSED,
        ChunkRefusal.OBSERVATION_UNKNOWN,
        ChunkRefusal.APPROACHING,
    }
)


def in_order(reason: ChunkRefusal, count: int, starts: int) -> bool:
    """Return whether a run in which nothing is wrong may have so many of them."""
    return reason in _AT_A_START and count <= starts


_TEMPLATE = Path(__file__).with_name('report.html.j2')
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

    `facts` are for the table on top; `failure` says why the session ended early, '' if it did not;
    `images`: frames that the bag has.
    """
    start_ns = _start_ns(telemetry)
    page = render(
        _TEMPLATE,
        title=f'vla_runtime demo: {telemetry.score}',
        failure=failure,
        facts={**facts, **_summary(telemetry, joint_units)},
        refused=_refused(telemetry),
        refusals=telemetry.refusals,
        attempts=[_attempt(attempt, start_ns) for attempt in telemetry.attempts],
        joints=_plot(lambda sheet: plots.joints(telemetry, joint_units, start_ns, sheet)),
        tracking=_plot(lambda sheet: plots.tracking(telemetry, joint_units, start_ns, sheet)),
        latency=_plot(lambda sheet: plots.latency(telemetry, start_ns, sheet)),
        phases=_phases(telemetry),
        ages=_plot(lambda sheet: plots.ages(telemetry, start_ns, sheet)),
        ticks=_plot(lambda sheet: plots.ticks(telemetry, start_ns, sheet)),
        images=_IMAGES[images],
        pictures=_pictures(telemetry, start_ns),
        problems=telemetry.problems,
        parameters=parameters,
    )
    write_text(path, page)


def _start_ns(telemetry: Telemetry) -> int:
    if telemetry.attempts:
        return telemetry.attempts[0].start_ns
    first = [series.times_ns[0] for series in telemetry.measured.values() if series.times_ns]
    return min(first, default=0)


def _summary(telemetry: Telemetry, joint_units: Mapping[str, str]) -> dict[str, str]:
    jumps = [handover.position_jump for handover in telemetry.handovers if not handover.from_hold]
    delays = [handover.delay_steps for handover in telemetry.handovers]
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
    texts = (f'at most {error:.4f} {unit} ({name})' for unit, (error, name) in worst.items())
    return ', '.join(texts) or 'none'


def _limited_most(telemetry: Telemetry) -> str:
    """Name the joint and the limit that changed the command most often."""
    for cause, count in telemetry.limited.items():
        joint, limit = cause.rsplit('.', 1)
        return f': {joint} by {limit} most, {count}'
    return ''


def _refused(telemetry: Telemetry) -> list[dict[str, Any]]:
    """Return for each reason the number of refused chunks, its meaning and a verdict."""
    starts = len(telemetry.attempts)
    return [
        {
            'count': count,
            'reason': reason.replace('_', ' '),
            'meaning': MEANINGS[ChunkRefusal(reason)],
            'in_order': in_order(ChunkRefusal(reason), count, starts),
        }
        for reason, count in telemetry.refused.items()
    ]


def _attempt(attempt: Attempt, start_ns: int) -> dict[str, Any]:
    outcome = attempt.outcome
    return {
        'at_s': (attempt.start_ns - start_ns) * 1e-9,
        'instruction': attempt.instruction,
        'seed': attempt.seed,
        'outcome': outcome or 'cut off by the end of the demo',
        'mark': 'good' if outcome == 'success' else 'bad' if outcome else '',
        'took_s': (attempt.end_ns - attempt.start_ns) * 1e-9 if attempt.end_ns else None,
    }


def _phases(telemetry: Telemetry) -> list[tuple[str, list[float]]]:
    """Return median, 99th percentile and most of each phase's milliseconds."""
    rows = []
    for phase in _PHASES:
        spent = [
            one.milliseconds[phase] for one in telemetry.inferences if phase in one.milliseconds
        ]
        if spent:
            rows.append((phase, [*np.percentile(spent, (50, 99)), max(spent)]))
    return rows


def _pictures(telemetry: Telemetry, start_ns: int) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return a row for each instruction: each camera at its beginning, then each at its end."""
    rows = []
    for attempt in telemetry.attempts:
        during = [
            thumbnail
            for thumbnail in telemetry.thumbnails
            if attempt.start_ns <= thumbnail.time_ns
            and (not attempt.end_ns or thumbnail.time_ns <= attempt.end_ns)
        ]
        shown = [
            {
                'camera': one.camera,
                'at_s': (one.time_ns - start_ns) * 1e-9,
                'jpeg': base64.b64encode(one.jpeg).decode('ascii'),
            }
            for one in _first_and_last(during)
        ]
        if shown:
            rows.append((attempt.instruction, shown))
    return rows


def _first_and_last(thumbnails: Sequence[Thumbnail]) -> list[Thumbnail]:
    """Choose the first image of each camera by name, then the last of each."""
    cameras = sorted({thumbnail.camera for thumbnail in thumbnails})
    series = [[one for one in thumbnails if one.camera == camera] for camera in cameras]
    return [mine[0] for mine in series] + [mine[-1] for mine in series if len(mine) > 1]


def _plot(draw: Callable[[plots.Sheet], str]) -> dict[str, str]:
    """Draw a plot twice: a telephone shows the narrow one, in letters of the same size."""
    return {'wide': draw(plots.WIDE), 'narrow': draw(plots.NARROW)}
