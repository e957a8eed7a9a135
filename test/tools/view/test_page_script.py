"""The page's script without a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from paths import ROOT

SCRIPT = ROOT / 'vla_tools' / 'view' / 'page.js'
NODE = shutil.which('node') or shutil.which('nodejs')


def test_the_scene_has_the_key_of_the_stop_as_the_page_has() -> None:
    text = SCRIPT.read_text(encoding='utf-8')
    loaded = text.partition('frame.onload = () => {')[2].partition('\n  };')[0]
    assert "frame.contentWindow.addEventListener('keydown', stopByKey, true)" in loaded
    assert "\ndocument.addEventListener('keydown', stopByKey, true)" in text


@pytest.mark.skipif(NODE is None, reason='node is not installed')
def test_escape_stops_in_the_page_and_in_the_scene() -> None:
    assert NODE is not None
    harness = Path(__file__).with_name('page_script.js')
    done = subprocess.run(
        [NODE, str(harness), str(SCRIPT)], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == {
        'a in the page': [],
        'Escape in the page': ['stop'],
        'a in the scene': [],
        'Escape in the scene': ['stop'],
    }
