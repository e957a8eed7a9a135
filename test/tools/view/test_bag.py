"""A recording on the page: its time line, what was known when, and what cannot be shown."""

from __future__ import annotations

import pytest
from recorded_bag import TASK, first_turns
from view_page import open_page, served

from vla_runtime.cli.main import main
from vla_runtime.recording.bag_reader import BagReader
from vla_tools.view.bag import BagSource
from vla_tools.view.source import ViewOptions

OPTIONS = ViewOptions(host='127.0.0.1')


@pytest.fixture
def source(recording):
    return BagSource(BagReader(recording), OPTIONS)


def test_every_inference_is_in_the_strips_and_the_robot_in_the_head(source):
    hello = source.hello()
    assert (hello['robot'], hello['live'], hello['read_only']) == ('tiny', False, True)
    assert len(hello['history']['latency']) == len(first_turns())
    assert [camera['name'] for camera in hello['cameras']] == ['overhead', 'wrist']
    assert [joint['unit'] for joint in hello['joints']] == ['deg', 'rad', 'rad']


def test_a_page_goes_through_the_time_line(source):
    with served(source, OPTIONS) as port, open_page(port) as page:
        length_s = page.hello['length_s']
        page.wait_for(lambda: page.now)
        begin_s = page.now['t']
        assert page.ask(do='seek', at=length_s)['ok']
        page.wait_for(lambda: page.now['t'] - begin_s >= length_s - 0.2)
        assert all(joint['at'] is not None for joint in page.now['joints'])
        page.wait_for(lambda: set(page.pictures) == {0, 1})
        assert all(jpeg.startswith(b'\xff\xd8') for jpeg in page.pictures.values())
        # From the end it begins anew.
        assert page.ask(do='play')['ok']
        page.wait_for(lambda: page.now['playing'] and page.now['t'] - begin_s < length_s)
        assert page.ask(do='pause')['ok']
        page.wait_for(lambda: not page.now['playing'])


def test_the_newest_chunk_at_a_time_is_the_one_before_it(source):
    times = [(one.time_ns, one.chunks[-1].stamp_ns) for one in source._moments if one.chunks]
    assert times and all(stamp_ns <= time_ns for time_ns, stamp_ns in times)
    assert len({stamp_ns for _, stamp_ns in times}) > 1


@pytest.mark.parametrize(
    'command',
    [
        '{"do": "stop"}',
        '{"do": "seek", "at": "x"}',
        '{"do": "seek", "at": Infinity}',
        '[]',
        pytest.param('[' * 4000, id='brackets'),
        'no json',
        '{"do": 1}',
    ],
)
def test_what_a_recording_cannot_do_is_refused_and_the_page_goes_on(source, command):
    with served(source, OPTIONS) as port, open_page(port) as page:
        page.replies = []
        page.send(command)
        page.wait_for(lambda: page.replies)
        assert page.replies[0]['ok'] is False and page.replies[0]['text']
        assert page.ask(do='seek', at=0)['ok']


def test_a_namespace_that_is_not_in_it_is_refused_with_those_that_are(recording, capsys):
    assert main(['view', str(recording), '--namespace', '/left', '--port', '0']) == 2
    assert '/left' in capsys.readouterr().err


def test_a_path_that_is_no_recording_is_refused_by_name(tmp_path, capsys):
    path = tmp_path / 'nothing'
    assert main(['view', str(path), '--port', '0']) == 2
    assert str(path) in capsys.readouterr().err


def test_the_instruction_of_a_moment_is_shown(source):
    assert {one.page['instruction'] for one in source._moments} <= {'', TASK}
