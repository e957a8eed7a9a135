"""All studies of a folder as one HTML page that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vla_runtime.pages.page import render, svg_plot

Json = dict[str, Any]

# What is drawn beside success, where a study has it: summary's field, title, factor.
_PANELS = (
    ('steps', 'steps to success (of the successes)', 1.0),
    ('starved_ticks', 'starved ticks an episode', 1.0),
    ('images_saved', 'image tokens hit or reused, %', 100.0),
    ('prefixes_saved', 'prefixes hit or reused, %', 100.0),
)
# In the units of the tabletop, whose commands are positions of joints.
_JOINT_PANELS = (
    ('position_jump', 'position jump at seams, mrad', 1e3),
    ('velocity_jump', 'velocity jump at seams, rad/s', 1.0),
    ('jerk_seams', 'jerk at seams, rad/s³', 1.0),
    ('jerk_elsewhere', 'jerk elsewhere, rad/s³', 1.0),
    ('jerk_overall', 'jerk overall, rad/s³', 1.0),
)

_JERKS = ('seams', 'elsewhere', 'overall')

_COLOURS = (
    '#1f77b4', '#ff7f0e', '#2ca02c', '#d62728', '#9467bd', '#8c564b', '#e377c2', '#7f7f7f',
    '#bcbd22', '#17becf',
)  # fmt: skip

_TEMPLATE = Path(__file__).with_name('page.html.j2')


def study_page(studies: Sequence[Json]) -> str:
    """The page of some studies, in the order given."""
    return render(
        _TEMPLATE, title='Closed-loop studies', studies=[_section(study) for study in studies]
    )


def _section(study: Json) -> Json:
    first, after = study['seeds']
    return {
        'name': study['study'],
        'title': study['title'],
        'question': study['question'],
        'panels': _panels(study),
        'legend': _legend(study),
        'heads': _heads(study),
        'rows': _rows(study),
        'same': _same(study),
        'command': study['command'],
        'seeds': f'{first} to {after - 1}',
        'bundle': study['bundle'],
        'digests': _digests(study),
        # Studies written before it was noted have none.
        'code': study.get('code'),
        'machine': study['machine'],
    }


def _digests(study: Json) -> str:
    return ' '.join(digest[:12] for digest in study['bundle_sha256'].split())


def _same(study: Json) -> list[tuple[str, int, int]]:
    """Conditions that must not differ, with the trajectories that agree and all of them."""
    return [
        (
            ' and '.join(', '.join(label.values()) for label in pair['labels']),
            pair['equal'],
            pair['of'],
        )
        for pair in study.get('same', ())
    ]


def _heads(study: Json) -> list[str]:
    varied = study['varied']
    heads = [
        *(name.replace('_', ' ') for name in varied),
        'family',
        'success',
        '95%',
        'time out',
        'steps',
        'delay',
        'steps a chunk',
        'starved ticks',
    ]
    if _of_joints(study):
        heads += ['wrong block', 'touched what it was told']
        heads += ['position jump, mrad', 'velocity jump, rad/s']
        heads += ['jerk at seams', 'elsewhere', 'overall']
    if _counts_cache_use(study):
        heads += ['image tokens hit, reused, run', 'prefixes hit, reused, run']
    if any(condition['is_reference'] for condition in study['conditions']):
        heads.append('against the reference')
    return heads


def _rows(study: Json) -> list[tuple[str, list[str], list[str]]]:
    """Class, names and figures of each group of each condition."""
    return [
        _row(study, condition, group, len(_heads(study)))
        for condition in study['conditions']
        for group in condition['groups']
    ]


def _row(
    study: Json, condition: Json, group: str, columns: int
) -> tuple[str, list[str], list[str]]:
    summary, whole = condition['groups'][group], group == next(iter(condition['groups']))
    success, obeyed = summary['success'], summary['obeyed']
    names = [condition['label'][name] if whole else '' for name in study['varied']]
    cells = [
        f'{success["count"]}/{summary["episodes"]}',
        f'{100 * success["low"]:.0f} to {100 * success["high"]:.0f}',
        str(summary['timeout']),
        _number(summary['steps'], 1),
        _number(summary['delay_steps'], 1),
        # Studies written before it was counted have none.
        _number(summary.get('steps_per_chunk', {'value': None}), 1),
        _number(summary['starved_ticks'], 1),
    ]
    if _of_joints(study):
        cells += [
            str(summary['wrong_block']),
            f'{obeyed["count"]}/{summary["episodes"]}',
            _number(summary['position_jump'], 0, 1e3),
            _number(summary['velocity_jump'], 3),
        ]
        cells += [_number(summary[f'jerk_{where}'], 0) for where in _JERKS]
    if _counts_cache_use(study):
        use = summary['cache_use']
        cells += [
            ', '.join(str(use[f'{level}_{what}']) for what in ('hit', 'reused', 'run'))
            for level in ('images', 'prefixes')
        ]
    if len(names) + 1 + len(cells) < columns:
        cells.append(_versus(condition) if whole else '')
    return '' if whole else 'part', [*names, group], cells


def _of_joints(study: Json) -> bool:
    """Return whether commands are positions of joints, and blocks what an episode is about."""
    # Studies written before there was another world do not name theirs.
    return study['conditions'][0]['settings'].get('world', 'tabletop') == 'tabletop'


def _counts_cache_use(study: Json) -> bool:
    """Return whether a study has a record of its cache use."""
    counted = all('cache_use' in g for c in study['conditions'] for g in c['groups'].values())
    return counted and any(name.startswith('cache') for name in study['varied'])


def _versus(condition: Json) -> str:
    if condition['is_reference']:
        return 'reference'
    versus = condition['versus_reference']
    if versus is None:
        return ''
    found = f'+{versus["won"]} -{versus["lost"]}, p {versus["p"]:.2g}'
    # Studies written before it was noted have no interval.
    return found + (
        f', {100 * versus["low"]:+.1f} to {100 * versus["high"]:+.1f}%' if 'low' in versus else ''
    )


def _number(mean: Json, digits: int, factor: float = 1.0) -> str:
    return '' if mean['value'] is None else f'{mean["value"] * factor:.{digits}f}'


def success_figure(study: Json) -> str:
    """Draw success over a study's x, with 95% intervals and names of the curves, as SVG."""

    def draw(figure: Any) -> None:
        panel = figure.subplots()
        _draw(panel, study, 'success', 'success, %', 100.0)
        panel.set_ylim(-3, 103)
        curves = list(_curves(study))
        if len(curves) > 1:
            handles = [
                panel.plot([], [], color=_colour(number), label=curve)[0]
                for number, curve in enumerate(curves)
            ]
            panel.legend(handles=handles, title=_legend_title(study), fontsize=8)

    return svg_plot(draw, 4.5, 3.2, salt=study['study'])


def _panels(study: Json) -> list[str]:
    """Success, then whatever else the study has, over x; a curve for each of the other fields."""
    others = (*_PANELS, *_JOINT_PANELS) if _of_joints(study) else _PANELS
    panels = [('success', 'success, %', 100.0), *(p for p in others if _has(study, p[0]))]
    return [_panel(study, *panel) for panel in panels]


def _legend(study: Json) -> Json | None:
    """Colours of the curves, under the names of the varied fields; None for a single curve."""
    curves = _curves(study)
    if len(curves) < 2:
        return None
    entries = [(_colour(number), curve) for number, curve in enumerate(curves)]
    return {'title': _legend_title(study), 'entries': entries}


def _legend_title(study: Json) -> str:
    return ', '.join(name.replace('_', ' ') for name in study['varied'] if name != study['x'])


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _panel(study: Json, name: str, title: str, factor: float) -> str:
    def draw(figure: Any) -> None:
        panel = figure.subplots()
        _draw(panel, study, name, title, factor)
        if name == 'success':
            panel.set_ylim(-3, 103)
        else:
            panel.set_ylim(bottom=0)

    return svg_plot(draw, 3.75, 3.2, salt=f'{study["study"]} {name}')


def _draw(panel: Any, study: Json, name: str, title: str, factor: float) -> None:
    """One measure over x, with intervals; curves are offset to stay visible."""
    ticks = list(dict.fromkeys(c['label'][study['x']] for c in study['conditions']))
    curves = _curves(study)
    for number, conditions in enumerate(curves.values()):
        points = []
        for condition in conditions:
            found = next(iter(condition['groups'].values()))[name]
            value = found['rate'] if name == 'success' else found['value']
            if value is not None:
                low = value if found['low'] is None else found['low']
                high = value if found['high'] is None else found['high']
                place = ticks.index(condition['label'][study['x']])
                points.append((place, value * factor, low * factor, high * factor))
        if not points:
            continue
        x, y, low, high = (list(column) for column in zip(*points, strict=True))
        shift = (number - (len(curves) - 1) / 2) * 0.08
        panel.errorbar(
            [place + shift for place in x],
            y,
            yerr=[
                # A rate of 1 may lie a rounding error above its own interval.
                [max(a - b, 0.0) for a, b in zip(y, low, strict=True)],
                [max(b - a, 0.0) for a, b in zip(y, high, strict=True)],
            ],
            marker='o',
            markersize=4,
            linestyle='none',
            color=_colour(number),
            capsize=2,
        )
        joined = [at for at, place in enumerate(x) if _is_number(ticks[place])]
        panel.plot(
            [x[at] + shift for at in joined],
            [y[at] for at in joined],
            linewidth=1.2,
            color=_colour(number),
        )
    panel.set_title(title, fontsize=9)
    panel.set_xlabel(study['x'].replace('_', ' '))
    panel.set_xticks(range(len(ticks)), ticks, rotation=20 if max(map(len, ticks)) > 6 else 0)
    panel.set_xlim(-0.5, len(ticks) - 0.5)
    panel.grid(alpha=0.3)


def _is_number(label: str) -> bool:
    try:
        float(label)
    except ValueError:
        return False
    return True


def _curves(study: Json) -> dict[str, list[Json]]:
    """Conditions that differ in nothing but x, by what they share."""
    others = [name for name in study['varied'] if name != study['x']]
    curves: dict[str, list[Json]] = {}
    for condition in study['conditions']:
        shared = ', '.join(condition['label'][name] for name in others)
        curves.setdefault(shared, []).append(condition)
    return curves


def _has(study: Json, name: str) -> bool:
    """Return whether a measure is there, and not zero throughout."""
    # Studies written before something was measured do not have it.
    return any(
        next(iter(condition['groups'].values())).get(name, {}).get('value')
        for condition in study['conditions']
    )
