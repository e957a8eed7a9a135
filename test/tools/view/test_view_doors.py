"""Who may open the page, and where its links lead."""

from __future__ import annotations

import re
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from pages import PAGES, anchors
from paths import ROOT
from view_page import open_page, served
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from vla_runtime.cli.main import main
from vla_runtime.nodes import robot_report
from vla_runtime.recording.bag_reader import BagReader
from vla_tools.view.bag import BagSource
from vla_tools.view.live import LiveSource
from vla_tools.view.source import ViewOptions

KEY = 'a' * 32


@pytest.fixture(scope='module')
def port(recording):
    options = ViewOptions(host='127.0.0.1')
    with served(BagSource(BagReader(recording), options), options) as found:
        yield found


def get(port: int, path: str, **headers: str) -> tuple[int, str]:
    request = Request(f'http://127.0.0.1:{port}{path}', headers=headers)
    try:
        with urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def test_the_page_needs_nothing_from_outside(port):
    code, text = get(port, '/')
    assert code == 200
    assert not re.search(r'(?:src|href)="(?!data:|#)[^"]*"|<link|@import', text)


def test_a_name_that_leads_here_from_another_site_is_refused(port):
    assert get(port, '/', Host='evil.example')[0] == 400
    with pytest.raises(InvalidStatus):
        connect(
            f'ws://127.0.0.1:{port}/live', additional_headers={'Origin': 'http://evil.example'}
        ).close()


def test_beyond_this_machine_a_key_is_needed(recording, tmp_path, capsys):
    assert main(['view', str(recording), '--host', '0.0.0.0', '--port', '0']) == 2
    assert '--key-file' in capsys.readouterr().err
    options = ViewOptions(host='0.0.0.0', keys=(KEY,))
    with served(BagSource(BagReader(recording), options), options) as port:
        for path in ('/', '/scene/', '/pages/index.md'):
            assert get(port, path)[0] == 401
            assert get(port, path, Authorization=f'Api-Key {KEY}')[0] != 401
        for path in ('live', 'scene'):
            with pytest.raises(InvalidStatus):
                connect(f'ws://127.0.0.1:{port}/{path}').close()
        with open_page(port, additional_headers={'Authorization': f'Api-Key {KEY}'}) as page:
            assert page.hello['robot'] == 'tiny'


def test_a_shape_that_cannot_be_read_is_named_before_anything_begins(recording, tmp_path, capsys):
    urdf = tmp_path / 'gone.urdf'
    said = f'--urdf {urdf}: No such file'
    assert main(['view', str(recording), '--port', '0', '--urdf', str(urdf)]) == 2
    assert said in capsys.readouterr().err
    # No graph is here: to join it would be another error.
    with pytest.raises(ValueError, match=re.escape(said)):
        LiveSource(None, '', ViewOptions(host='127.0.0.1', urdf=urdf))


def test_without_a_shape_the_scene_says_so_and_the_rest_is_shown(port):
    with open_page(port) as page:
        assert '--urdf' in page.hello['no_scene'] and page.hello['joints']
    assert get(port, '/scene/')[0] == 404


REMEDIES = sorted(
    {
        *robot_report._REMEDIES.values(),
        robot_report._NO_CHUNK,
        robot_report._DIED,
        f'{robot_report._WHY}#nothing-in-the-graph',
        f'{robot_report._WHY}#start-is-refused',
    }
)


@pytest.mark.parametrize('remedy', REMEDIES)
def test_the_link_beside_a_stop_leads_to_its_chapter(port, remedy):
    path, _, anchor = remedy.removeprefix('docs/').partition('#')
    code, text = get(port, f'/pages/{path}')
    assert code == 200 and (not anchor or f'id="{anchor}"' in text)


@pytest.mark.parametrize('page', [one for one in PAGES if one.startswith('docs/howto')])
def test_chapters_of_a_page_have_the_anchors_of_the_site(port, page):
    text = get(port, f'/pages/{page.removeprefix("docs/")}')[1]
    assert set(anchors(ROOT / page)) <= set(re.findall(r' id="([^"]+)"', text))


@pytest.mark.parametrize('path', ['../setup.py', '%2e%2e/setup.py', 'conf.py', 'nothing.md', ''])
def test_nothing_but_pages_is_given_out(port, path):
    assert get(port, f'/pages/{path}')[0] == 404
