"""Draws what the page on Meta-World shows of its studies: success over each study's x.

./run exec python docs/make_metaworld_figures.py
"""

from __future__ import annotations

from pathlib import Path

from vla_runtime.files.atomic_write import write_text
from vla_tabletop.study.page import success_figure
from vla_tabletop.study.results import read_studies

ROOT = Path(__file__).resolve().parents[1]
DRAWN = ('metaworld_replan', 'metaworld_handover', 'metaworld_delay', 'metaworld_denoise')


def main() -> None:
    """Write a picture of each study that has results."""
    for study in read_studies(ROOT / 'benchmark' / 'results'):
        if study['study'] in DRAWN:
            path = ROOT / 'docs' / 'howto' / f'{study["study"]}.svg'
            write_text(path, success_figure(study) + '\n')
            print(path.relative_to(ROOT))


if __name__ == '__main__':
    main()
