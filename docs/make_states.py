"""Writes the executor's states into executor.md: ./run exec python docs/make_states.py"""

from __future__ import annotations

import re
from pathlib import Path

from vla_runtime.execution.states import RUNNING, TRAITS, TRANSITIONS, Event, State

PAGE = Path(__file__).with_name('explanation') / 'executor.md'
PICTURE = Path(__file__).with_name('executor_states.svg')
# Middle of each state's box, in pixels.
PLACES = {
    State.IDLE: (90, 60),
    State.RELEASED: (90, 190),
    State.RELEASING: (90, 320),
    State.STOPPED: (290, 120),
    State.STOPPING: (290, 320),
    State.WAITING: (560, 60),
    State.TRACKING: (840, 60),
    State.APPROACHING: (840, 190),
    State.JOINING: (700, 190),
    State.HOLDING: (560, 320),
    State.BRAKING: (840, 320),
    State.LATCHED: (700, 400),
    State.PAUSED: (560, 400),
    State.LEADING: (545, 190),
}
WIDTH, HEIGHT, HALF = 960, 480, (62, 18)
BOX = (460, 20, 480, 440)
COLORS = {Event.TICK: '#888', Event.START: '#2a7', Event.CHUNK: '#27c'}
OTHER = '#c52'


def tables() -> str:
    """Write the states, and what leads from one to another, as two Markdown tables."""
    lines = ['| state | what is sent | a chunk |', '|---|---|---|']
    for state, traits in TRAITS.items():
        chunk = f'`{traits.refusal.value}`' if traits.refusal else 'is asked for, and judged'
        lines.append(f'| **{state.value}** | {traits.sent.value} | {chunk} |')
    lines += ['', '| event | if | from | to |', '|---|---|---|---|']
    merged: dict[tuple[Event, str, State], list[State]] = {}
    for row in TRANSITIONS:
        merged.setdefault((row.event, row.when, row.to), []).append(row.state)
    events: dict[tuple[str, State, tuple[State, ...]], list[Event]] = {}
    for (event, when, to), states in merged.items():
        events.setdefault((when, to, tuple(states)), []).append(event)
    for (when, to, states), called in events.items():
        running = [state.value for state in states if state in RUNNING]
        if len(running) == len(RUNNING):
            running = ['any that runs']
        names = ', '.join([*running, *(state.value for state in states if state not in RUNNING)])
        codes = [f'`{one.value}`' if one.value.startswith('~') else one.value for one in called]
        lines.append(f'| {", ".join(codes)} | {when} | {names} | {to.value} |')
    return '\n'.join(lines)


def edges() -> dict[tuple[State | None, State | None], str]:
    """Return the arrows of the picture and their colours; None stands for the box that runs."""
    result: dict[tuple[State | None, State | None], str] = {}
    for row in TRANSITIONS:
        start, end = row.state in RUNNING, row.to in RUNNING
        crosses = start != end
        key = (None if start and crosses else row.state, None if end and crosses else row.to)
        # What ticks and chunks lead to comes first: a reset, say, leads there as well.
        result.setdefault(key, COLORS.get(row.event, OTHER))
    return result


def picture() -> str:
    """Draw the states as boxes, and an arrow for each pair that some event leads through."""
    x, y, width, height = BOX
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="14">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="12" fill="#f4f6f8"/>',
        f'<text x="{x + 12}" y="{y + height - 12}" fill="#666">started</text>',
    ]
    for (start, end), color in edges().items():
        if start is None:
            assert end is not None
            parts += _arrow((x, PLACES[end][1]), PLACES[end], color)
        elif end is None:
            parts += _arrow(PLACES[start], (x + HALF[0], PLACES[start][1]), color)
        else:
            parts += _arrow(PLACES[start], PLACES[end], color)
    for state, (middle_x, middle_y) in PLACES.items():
        parts += [
            f'<rect x="{middle_x - HALF[0]}" y="{middle_y - HALF[1]}" width="{2 * HALF[0]}" '
            f'height="{2 * HALF[1]}" rx="6" fill="#fff" stroke="#333"/>',
            f'<text x="{middle_x}" y="{middle_y + 5}" text-anchor="middle">{state.value}</text>',
        ]
    words = [('#2a7', '~/start'), ('#27c', 'a chunk'), ('#888', 'a tick'), (OTHER, 'other calls')]
    for turn, (color, word) in enumerate(words):
        parts.append(f'<text x="{30 + 95 * turn}" y="{HEIGHT - 16}" fill="{color}">{word}</text>')
    return '\n'.join([*parts, '</svg>', ''])


def _arrow(start: tuple[float, float], end: tuple[float, float], color: str) -> list[str]:
    """Draw an arrow from box to box, a little to its left, so that two ways are two lines."""
    way_x, way_y = end[0] - start[0], end[1] - start[1]
    length = (way_x**2 + way_y**2) ** 0.5
    along_x, along_y = way_x / length, way_y / length
    start_x, start_y = start[0] + 5 * along_y, start[1] - 5 * along_x
    reach = min(
        (half + 3) / abs(part) if part else length
        for half, part in zip(HALF, (along_x, along_y), strict=True)
    )
    tip_x, tip_y = end[0] + 5 * along_y - reach * along_x, end[1] - 5 * along_x - reach * along_y
    left_x, left_y = tip_x - 9 * along_x, tip_y - 9 * along_y
    return [
        f'<path d="M{start_x:.0f} {start_y:.0f}L{left_x:.0f} {left_y:.0f}" stroke="{color}" '
        'stroke-width="1.5"/>',
        f'<path d="M{tip_x:.0f} {tip_y:.0f}L{left_x + 4 * along_y:.0f} '
        f'{left_y - 4 * along_x:.0f}L{left_x - 4 * along_y:.0f} {left_y + 4 * along_x:.0f}Z" '
        f'fill="{color}"/>',
    ]


def with_tables(page: str) -> str:
    """Put the code's tables between the two marks of the page."""
    begin, end = '<!-- states -->\n', '<!-- end of the states -->'
    pattern = re.escape(begin) + '.*?' + re.escape(end)
    return re.sub(pattern, lambda _: f'{begin}\n{tables()}\n\n{end}', page, flags=re.DOTALL)


if __name__ == '__main__':
    PAGE.write_text(with_tables(PAGE.read_text()))
    PICTURE.write_text(picture())
