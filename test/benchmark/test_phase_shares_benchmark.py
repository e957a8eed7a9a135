"""benchmark/phase_shares.py: its figures are those of `vla_runtime roofline`."""

from __future__ import annotations

import json
import sys

import pytest
from paths import ROOT

from vla_runtime.cli.main import main

sys.path.insert(0, str(ROOT / 'benchmark'))

import phase_shares


@pytest.mark.parametrize('model', ['pi05', 'evo1'])
def test_the_least_time_is_that_of_the_roofline_with_as_many_cameras(model, tmp_path):
    out = tmp_path / 'roofline.json'
    arguments = [model, '--device', 'agx-orin', '--views', '2', '--json', str(out)]
    assert main(['roofline', *arguments]) == 0
    device = json.loads(out.read_text())['devices']['agx-orin']
    found = phase_shares.shares(model, 2, 'bfloat16')['devices']['agx-orin']
    assert found['least_ms'] == pytest.approx(device['floors_ms']['1_rows']['miss']['milliseconds'])
    assert found['least'] == pytest.approx(device['miss_shares']['1_rows'])
