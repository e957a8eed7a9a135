"""The page of a replay needs nothing from outside, and draws what it holds."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from builtin_interfaces.msg import Time
from rclpy.serialization import serialize_message
from recorded_bag import START_NS, Turn, first_turns, record
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.cli import main as program
from vla_runtime.messages.diagnostics import Level, StatusItem, to_message
from vla_runtime.recording.bag_reader import BagReader
from vla_tools.replay.page import HoldEvent, read_events
from vla_tools.replay.recorded import read_run

_ARRAY = 'diagnostic_msgs/msg/DiagnosticArray'
CHROMIUM = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser'))), None)


@pytest.fixture(scope='module')
def page(tmp_path_factory, recording):
    path = tmp_path_factory.mktemp('page') / 'replay.html'
    assert program.main(['replay', str(recording), '--page', str(path)]) == 0
    return path


def data_of(page) -> dict:
    text = page.read_text(encoding='utf-8')
    return json.loads(re.search(r'application/json">(.*?)</script>', text)[1])


def test_the_page_holds_every_inference(page):
    data = data_of(page)
    assert data['joints'] == ['shoulder', 'elbow', 'gripper']
    assert data['units'] == ['deg', 'rad', 'rad']
    assert len(data['inferences']) == len(first_turns())
    for one in data['inferences']:
        assert one['identical'] is True
        assert one['recorded'] == one['replayed'] and len(one['recorded']) == 8
        assert set(one['images']) == {'top', 'wrist'}
        assert all(image.startswith('data:image/jpeg;base64,') for image in one['images'].values())
        assert set(one['ages']) == {'top', 'wrist', 'state'}
        assert one['cache'].count('prefix') == 1


def test_texts_of_a_recording_cannot_end_the_script(tmp_path, bundle, robot_file):
    folder = record(tmp_path / '<script>alert(1)<', bundle, robot_file, [Turn(lost=['/top/image'])])
    path = tmp_path / 'page.html'
    # Not one inference could be run again.
    assert program.main(['replay', str(folder), '--page', str(path)]) == 2
    text = path.read_text(encoding='utf-8')
    assert '<script>alert' not in text
    assert text.count('<script') == 2
    data = data_of(path)
    (one,) = data['inferences']
    assert one['note'].startswith('skipped: camera top')
    # What was recorded is shown all the same.
    assert data['joints'] == ['shoulder', 'elbow', 'gripper']
    assert len(one['recorded']) == 8 and one['replayed'] is None


def test_another_policy_is_drawn_by_the_names_of_its_joints(tmp_path, recording):
    spec = tiny_spec(advantage='task_newline')
    turned = replace(spec, actions=tuple(reversed(spec.actions)))
    other = write_tiny_policy(tmp_path / 'other', turned)
    path = tmp_path / 'page.html'
    words = ['replay', str(recording), '--bundle', str(other), '--page', str(path)]
    assert program.main(words) == 0
    data = data_of(path)
    assert data['joints'] == ['gripper', 'elbow', 'shoulder']
    assert data['units'] == ['rad', 'rad', 'deg']
    first = read_run(BagReader(recording)).inferences[0]
    shown = np.array(data['inferences'][0]['recorded'])
    names = first.chunk.names
    wanted = first.chunk.actions[:, [names.index(name) for name in data['joints']]]
    np.testing.assert_allclose(shown, wanted, atol=1e-5)


def test_a_page_is_of_one_recording(recording, tmp_path, capsys):
    again = shutil.copytree(recording, tmp_path / 'again')
    words = ['replay', str(recording), str(again), '--page', str(tmp_path / 'page.html')]
    assert program.main(words) == 2
    assert '--page shows the replay of one recording' in capsys.readouterr().err


# Headless Chromium makes no window below 500 px, so the page is shown in a frame of the width asked
# for; what became of it stands in an element of the page around it.
_AROUND = """<!doctype html><body style="margin: 0">
<iframe id="frame" style="border: 0; width: {width}px; height: 2000px" srcdoc="{page}"></iframe>
<script>
document.getElementById('frame').addEventListener('load', (event) => {{
  const shown = event.target.contentDocument.documentElement;
  const found = document.createElement('pre');
  found.id = 'found';
  const wide = event.target.contentWindow.innerWidth, over = shown.scrollWidth - shown.clientWidth;
  found.textContent = [wide, over, shown.outerHTML].join(' ');
  document.body.append(found);
}});
</script>"""


def drawn_by_chromium(tmp_path, page: str, width: int) -> str:
    """Width, overflow and the page as it is once its script has run, without a script error."""
    around = tmp_path / 'around.html'
    around.write_text(_AROUND.format(width=width, page=html.escape(page)), encoding='utf-8')
    done = subprocess.run(
        [
            CHROMIUM,
            *('--headless=new', '--no-sandbox', '--disable-gpu', '--enable-logging=stderr'),
            f'--user-data-dir={tmp_path}',
            *('--window-size=1400,2000', '--virtual-time-budget=4000', '--dump-dom'),
            around.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert [line for line in done.stderr.splitlines() if 'CONSOLE' in line] == []
    return html.unescape(done.stdout.rpartition('<pre id="found">')[2])


@pytest.mark.skipif(CHROMIUM is None, reason='chromium is not installed')
@pytest.mark.parametrize('width', [1280, 390])
def test_its_script_draws_without_an_error_and_fits_the_width(page, width, tmp_path):
    found = drawn_by_chromium(tmp_path, page.read_text(encoding='utf-8'), width)
    shown, overflow, drawn = found.split(' ', 2)
    assert (int(shown), int(overflow)) == (width, 0)
    # Two over time, and one a joint; lines and dots in each.
    plots = re.findall(r'<svg .*?</svg>', drawn, re.DOTALL)
    assert len(plots) == 5
    assert all(plot.count('<circle') >= 8 for plot in plots)
    assert 'bit-identical' in drawn
    assert drawn.count('<figure>') == 2


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason='chromium is not installed')
def test_numbers_of_hours_are_drawn(page, tmp_path):
    data = data_of(page)
    # A function of JavaScript takes some 100,000 arguments.
    data['inferences'] = [
        {**one, 't': one['t'] + hour, 'images': {}}
        for hour in range(2500)
        for one in data['inferences']
    ]
    text = page.read_text(encoding='utf-8')
    head, _, rest = text.partition('application/json">')
    text = head + 'application/json">' + json.dumps(data) + rest[rest.index('</script>') :]
    drawn = drawn_by_chromium(tmp_path, text, 1280).split(' ', 2)[2]
    assert drawn.count('<circle') > 2 * len(data['inferences'])
    assert 'bit-identical' in drawn


def test_handovers_and_holds_are_those_of_the_executor_beside_the_policy(tmp_path):
    types = get_typestore(Stores.ROS2_JAZZY)

    def status(name, text, **values):
        item = StatusItem(name, Level.OK, text, values)
        node = '/left/vla_executor'
        message = to_message([item], node=node, hardware='', stamp=Time())
        return serialize_message(message)

    with Writer(tmp_path / 'bag', version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        diagnostics = writer.add_connection('/diagnostics', _ARRAY, typestore=types)
        report = writer.add_connection('/left/vla_executor/report', _ARRAY, typestore=types)
        said = [('track', 'tracking'), ('hold', 'starved'), ('hold', 'starved'), ('track', 'x')]
        for number, (kind, reason) in enumerate(said):
            data = status('control', f'words {number}', kind=kind, reason=reason)
            writer.write(diagnostics, START_NS + number, data)
        seam = {
            'stamp_ns': START_NS + 1,
            'chunk': 3,
            'delay_steps': 2,
            'late': True,
            'from_hold': False,
            'position_jump': 0.25,
            'velocity_jump': 0.5,
        }
        cut = {name: value for name, value in seam.items() if name != 'chunk'}
        writer.write(report, START_NS, status('seam', 'damaged', **cut))
        writer.write(report, START_NS, status('seam', 'took over', **seam))
    events = read_events(BagReader(tmp_path / 'bag'), '/left/vla_policy')
    assert events.holds == (HoldEvent(START_NS + 1, START_NS + 3, 'starved', 'words 1'),)
    (found,) = events.handovers
    assert (found.chunk, found.late, found.position_jump) == (3, True, 0.25)
    assert read_events(BagReader(tmp_path / 'bag'), '/vla_policy').handovers == ()
