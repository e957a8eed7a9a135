"""Options of the demo: what is refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from paths import ROOT

from vla_tabletop.demo.options import DemoOptions, check_options

pytestmark = pytest.mark.skipif(
    not (ROOT / 'engines' / 'demo' / 'policy.yaml').is_file(), reason='no engines/demo here'
)


def options(out: Path, backend: str = 'torch') -> DemoOptions:
    return DemoOptions(
        seconds=1.0,
        out=out,
        bundle=ROOT / 'engines' / 'demo',
        robot='tabletop',
        backend=backend,
        replan_interval=None,
        cfg_beta=None,
        seed=0,
        namespace='',
    )


@pytest.mark.parametrize('left', ['bag', 'report.html', 'parameters.yaml'])
def test_a_folder_of_an_earlier_demo_is_refused_whatever_is_left_of_it(
    tmp_path: Path, left: str
) -> None:
    (tmp_path / left).write_text('earlier')
    with pytest.raises(ValueError, match='--out'):
        check_options(options(tmp_path))
    assert (tmp_path / left).read_text() == 'earlier'


def test_the_choice_of_a_backend_may_be_left_to_the_machine(tmp_path: Path) -> None:
    check_options(options(tmp_path, 'auto'))
    with pytest.raises(ValueError, match="'jax'"):
        check_options(options(tmp_path, 'jax'))
