"""The training's curves as one picture, a panel a stage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vla_runtime.files.atomic_write import atomic_write

_STAGE_TITLES = {
    'see': '1. where is each colour (vision)',
    'ground': '2. where is the named block (prefix)',
    'act': '3. chunks (all)',
}


def plot_losses(history: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw every metric of every stage over its steps; the path's ending tells the format.

    Rows have `stage`, `step` and any metrics.
    """
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(_STAGE_TITLES), figsize=(15, 4.5), layout='constrained', squeeze=False
    )
    for panel, (stage, title) in zip(panels[0], _STAGE_TITLES.items(), strict=True):
        rows = [row for row in history if row['stage'] == stage]
        names = {name: None for row in rows for name in row if name not in ('stage', 'step')}
        for name in names:
            points = [(row['step'], row[name]) for row in rows if name in row]
            panel.plot(*zip(*points, strict=True), label=name, linewidth=1)
        panel.set(title=title, xlabel='step', yscale='log')
        panel.grid(alpha=0.3)
        if names:
            panel.legend(fontsize=8, title='metric', title_fontsize=8)
    with atomic_write(path) as file:
        figure.savefig(file, dpi=110, format='png')
    pyplot.close(figure)
