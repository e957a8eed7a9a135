"""All studies of a folder as one HTML page that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from vla_runtime.files.html_page import html_page, inline_svg

Json = dict[str, Any]

# What is drawn beside success, where a study has it: summary's field, title, factor.
_PANELS = (
    ('steps', 'steps to success (of the successes)', 1.0),
    ('position_jump', 'position jump at seams, mrad', 1e3),
    ('velocity_jump', 'velocity jump at seams, rad/s', 1.0),
    ('jerk_seams', 'jerk at seams, rad/s³', 1.0),
    ('jerk_elsewhere', 'jerk elsewhere, rad/s³', 1.0),
    ('jerk_overall', 'jerk overall, rad/s³', 1.0),
    ('starved_ticks', 'starved ticks an episode (10 ms each)', 1.0),
    ('images_saved', 'image tokens hit or reused, %', 100.0),
    ('prefixes_saved', 'prefixes hit or reused, %', 100.0),
)

_COLOURS = (
    '#1f77b4', '#ff7f0e', '#2ca02c', '#d62728', '#9467bd', '#8c564b', '#e377c2', '#7f7f7f',
    '#bcbd22', '#17becf',
)  # fmt: skip

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em;
       color: #222; overflow-wrap: break-word; }
table { border-collapse: collapse; font-size: 13px; margin: 1em 0; }
th, td { padding: .2em .7em; text-align: right; border-bottom: 1px solid #ddd; }
td { white-space: nowrap; }
th { text-align: right; border-bottom: 2px solid #888; vertical-align: bottom; }
td.name { text-align: left; }
tr.part td { color: #777; }
code { background: #f3f3f3; padding: .1em .3em; }
.note { color: #666; font-size: 13px; }
.scroll { overflow-x: auto; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(17em, 100%), 1fr)); }
svg { width: 100%; height: auto; }
.legend { font-size: 13px; } .legend span { white-space: nowrap; margin-right: 1.2em; }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 50%;
       margin-right: .4em; }
"""

_READING = """
<p class="note">Success is judged from the simulator's state within a time limit (touch 6 s, push
12 s; a touch of another block first is a failure). Intervals are 95%: Wilson's score interval for
shares, mean ± 1.96 standard errors over episodes for the rest. All conditions of a study run on
the same seeds; <i>against the reference</i> counts the seeds won and lost, with the p of McNemar's
exact test, not corrected for the number of comparisons, and in newer studies the 95% interval of
the paired difference of success (Agresti and Min). A step is 50 ms. Jumps are Euclidean norms
over the joints: of the disagreement between new chunk and old plan about the same step before
hand-over (position), and of the change of a step's mean velocity after it (velocity). Jerk is the
root mean square of the third difference of commanded positions, one a step; <i>elsewhere</i> takes
in what a blend spreads over the steps after its seam, and <i>overall</i> the setting out from
standstill (which is seen only where the first chunk comes two steps late or more). Steps to
success are those of the successes alone. Inference takes the simulated time that the condition
says. Of image tokens (one set a camera) and prefixes it is counted over all episodes how often they
were found in the cache unchanged (<i>hit</i>), reused though something had changed (<i>reused</i>)
and made by the network (<i>run</i>).</p>
"""


def study_page(studies: Sequence[Json]) -> str:
    """The page of some studies, in the order given."""
    links = ' · '.join(f'<a href="#{s["study"]}">{escape(s["study"])}</a>' for s in studies)
    sections = '\n'.join(_section(study) for study in studies)
    return html_page(
        'Closed-loop studies',
        _STYLE,
        f'<h1>Closed-loop studies</h1>\n<p>{links}</p>\n{_READING}{sections}',
    )


def _section(study: Json) -> str:
    first, after = study['seeds']
    return (
        f'<h2 id="{study["study"]}">{escape(study["title"])}</h2>\n'
        f'<p>{escape(study["question"])}</p>\n{_plot(study)}\n{_table(study)}\n'
        f'{_same(study)}'
        f'<p class="note"><code>{escape(study["command"])}</code><br>seeds {first} to {after - 1}; '
        f'bundle {escape(study["bundle"])} ({_digests(study)}); {_code(study)}'
        f'{escape(study["machine"])}</p>'
    )


def _digests(study: Json) -> str:
    return ' '.join(digest[:12] for digest in study['bundle_sha256'].split())


def _code(study: Json) -> str:
    """Version of the code that ran the study, or that the file does not say."""
    if 'code' in study:
        return f'code {escape(study["code"])}; '
    # A reader would take today's code for the one that these numbers are of.
    return '<b>code not noted: from before results named it, not from today’s code</b>; '


def _same(study: Json) -> str:
    """Write whether conditions that must not differ do."""
    # Studies written before there were such pairs have none.
    return ''.join(
        f'<p>{escape(" and ".join(", ".join(label.values()) for label in pair["labels"]))}: '
        f'{pair["equal"]} of {pair["of"]} trajectories are the same, bit for bit'
        f'{"" if pair["equal"] == pair["of"] else ", <b>and all of them should be</b>"}.</p>\n'
        for pair in study.get('same', ())
    )


def _table(study: Json) -> str:
    varied = study['varied']
    heads = [
        *(name.replace('_', ' ') for name in varied),
        'family',
        'success',
        '95%',
        'wrong block',
        'time out',
        'touched what it was told',
        'steps',
        'delay',
        'starved ticks',
        'position jump, mrad',
        'velocity jump, rad/s',
        'jerk at seams',
        'elsewhere',
        'overall',
    ]
    if _counts_cache_use(study):
        heads += ['image tokens hit, reused, run', 'prefixes hit, reused, run']
    if any(condition['is_reference'] for condition in study['conditions']):
        heads.append('against the reference')
    lines = [
        '<tr>' + ''.join(f'<th>{escape(head)}</th>' for head in heads) + '</tr>',
        *(
            _table_row(study, condition, group, len(heads))
            for condition in study['conditions']
            for group in condition['groups']
        ),
    ]
    return '<div class="scroll"><table>\n' + '\n'.join(lines) + '\n</table></div>'


def _table_row(study: Json, condition: Json, group: str, columns: int) -> str:
    summary, whole = condition['groups'][group], group == next(iter(condition['groups']))
    success, obeyed = summary['success'], summary['obeyed']
    names = [condition['label'][name] if whole else '' for name in study['varied']]
    cells = [
        f'{success["count"]}/{summary["episodes"]}',
        f'{100 * success["low"]:.0f} to {100 * success["high"]:.0f}',
        str(summary['wrong_block']),
        str(summary['timeout']),
        f'{obeyed["count"]}/{summary["episodes"]}',
        _number(summary['steps'], 1),
        _number(summary['delay_steps'], 1),
        _number(summary['starved_ticks'], 1),
        _number(summary['position_jump'], 0, 1e3),
        _number(summary['velocity_jump'], 3),
        *(_number(summary[name], 0) for name in ('jerk_seams', 'jerk_elsewhere', 'jerk_overall')),
    ]
    if _counts_cache_use(study):
        use = summary['cache_use']
        cells += [
            ', '.join(str(use[f'{level}_{what}']) for what in ('hit', 'reused', 'run'))
            for level in ('images', 'prefixes')
        ]
    if len(names) + 1 + len(cells) < columns:
        cells.append(_versus(condition) if whole else '')
    return (
        f'<tr{"" if whole else " class=part"}>'
        + ''.join(f'<td class="name">{escape(name)}</td>' for name in [*names, group])
        + ''.join(f'<td>{escape(cell)}</td>' for cell in cells)
        + '</tr>'
    )


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


def _plot(study: Json) -> str:
    """Success, then whatever else the study has, over x; a curve for each of the other fields."""
    panels = [('success', 'success, %', 100.0), *(p for p in _PANELS if _has(study, p[0]))]
    drawn = ''.join(_panel(study, *panel) for panel in panels)
    return f'<div class="panels">{drawn}</div>\n{_legend(study)}'


def _legend(study: Json) -> str:
    """Write the legend of the curves, under the names of the varied fields."""
    curves = _curves(study)
    if len(curves) < 2:
        return ''
    entries = ''.join(
        f'<span><i style="background: {_colour(number)}"></i>{escape(curve)}</span> '
        for number, curve in enumerate(curves)
    )
    return f'<p class="legend"><b>{escape(_legend_title(study))}:</b> {entries}</p>'


def _legend_title(study: Json) -> str:
    return ', '.join(name.replace('_', ' ') for name in study['varied'] if name != study['x'])


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _panel(study: Json, name: str, title: str, factor: float) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({'font.size': 9}):
        figure = Figure(figsize=(3.75, 3.2), layout='constrained')
        panel = figure.subplots()
        _draw(panel, study, name, title, factor)
        if name == 'success':
            panel.set_ylim(-3, 103)
        else:
            panel.set_ylim(bottom=0)
        return inline_svg(figure, salt=f'{study["study"]} {name}')


def _draw(panel: Any, study: Json, name: str, title: str, factor: float) -> None:
    """One measure over x, with its intervals; curves stand a little apart so that each can be seen.

    A line joins numbers; between categories there is nothing that it could stand for.
    """
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
                # A share of 1 may lie a rounding error above its own interval.
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
