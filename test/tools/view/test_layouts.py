"""Layouts for RViz and Foxglove name topics that the nodes have, and come with the package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml
from paths import ROOT

from vla_runtime.robot.file import load_robot
from vla_tools.view import wire

FOLDER = ROOT / 'config' / 'layouts'
ROBOT = load_robot(ROOT / 'config' / 'robots' / 'tabletop.yaml')
KNOWN = {
    '/diagnostics',
    '/vla_view/markers',
    *(f'/{topic.name}' for topic in wire.TOPICS.values()),
    *(f'/{camera.topic}' for camera in ROBOT.cameras),
    *(f'/{source.topic}' for source in ROBOT.joint_states),
}


def test_the_layout_of_rviz_shows_topics_of_the_nodes() -> None:
    layout = yaml.safe_load((FOLDER / 'vla_runtime.rviz').read_text(encoding='utf-8'))
    displays = layout['Visualization Manager']['Displays']
    topics = {
        one[key]['Value']
        for one in displays
        for key in ('Topic', 'Description Topic')
        if key in one
    }
    assert topics == KNOWN & topics and '/vla_view/markers' in topics
    (markers,) = (one for one in displays if one['Class'].endswith('/MarkerArray'))
    source = (ROOT / 'vla_tools' / 'view' / 'markers.py').read_text(encoding='utf-8')
    assert all(f"'{name}'" in source for name in markers['Namespaces'])


def leaves(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    else:
        yield from leaves(part['first'])
        yield from leaves(part['second'])


def texts(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict | list):
        for one in part.values() if isinstance(part, dict) else part:
            yield from texts(one)
        if isinstance(part, dict):
            yield from (key for key in part if key.startswith('/'))


def test_the_layout_of_foxglove_has_every_panel_and_topics_of_the_nodes() -> None:
    layout = json.loads((FOLDER / 'foxglove.json').read_text(encoding='utf-8'))
    assert sorted(leaves(layout['layout'])) == sorted(layout['configById'])
    named = {re.split(r'[.\[]', text)[0] for text in texts(layout['configById']) if text[:1] == '/'}
    services = {'/vla_executor/start', '/vla_executor/stop'}
    assert named - services <= KNOWN and services <= named
