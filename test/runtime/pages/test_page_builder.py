"""Pages have one layout and one style sheet, and what is written into them is text."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from jinja2 import UndefinedError
from matplotlib.figure import Figure
from paths import PACKAGES, ROOT

from vla_runtime import __version__
from vla_runtime.pages.page import render, svg_plot

PAGES = ROOT / 'vla_runtime' / 'pages'


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / 'some.html.j2'
    path.write_text(
        "{% extends 'base.html.j2' %}\n"
        "{% from 'parts.html.j2' import figures, table %}\n"
        '{% block body %}\n'
        '<h1>{{ title }}</h1>\n{{ table(heads, rows) }}\n{{ figures(heads, numbers) }}\n'
        '{% endblock %}\n',
        encoding='utf-8',
    )
    return path


def page_of(template: Path, **more: object) -> str:
    values: dict[str, object] = {
        'title': 'One & <two>',
        'heads': ['<head>', 'n'],
        'rows': [['a', '<b>']],
        'numbers': [('own', ['name'], ['<1>'])],
    }
    return render(template, **{**values, **more})


def test_a_page_is_whole_and_needs_nothing_from_outside(template: Path) -> None:
    page = page_of(template)
    assert page.startswith('<!doctype html>')
    assert page.rstrip().endswith('</html>')
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert page.count('<style>') == 1 and (PAGES / 'style.css').read_text().strip() in page
    assert not re.search(r'(?:src|href)="|<link|@import|url\(', page)
    assert f'vla_runtime {__version__}' in page


def test_values_are_text(template: Path) -> None:
    page = page_of(template)
    assert page.count('One &amp; &lt;two&gt;') == 2
    assert '<td>&lt;b&gt;</td>' in page and '<td>&lt;1&gt;</td>' in page
    assert page.count('<th>&lt;head&gt;</th>') == 2


def test_tables_scroll_in_a_box_of_their_own(template: Path) -> None:
    page = page_of(template)
    assert page.count('<div class="scroll"><table') == page.count('<table') == 2
    assert '<tr class="own"><td class="name">name</td>' in page
    assert '<th>' not in page_of(template, heads=[]).partition('class="figures"')[0]


def test_a_value_that_is_missing_is_an_error(template: Path) -> None:
    with pytest.raises(UndefinedError):
        render(template, title='of nothing else')


def test_pages_are_written_by_templates_that_need_nothing_from_outside() -> None:
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob('*')):
        if path.suffix == '.py':
            text = path.read_text(encoding='utf-8')
            assert not re.search(r'<(?:table|style|body|h1)\b', text), path
        if path.suffix == '.j2' and path.name != 'base.html.j2':
            text = path.read_text(encoding='utf-8')
            assert '<style' not in text and '<html' not in text, path
            # Of what is outside a page refers to nothing.
            assert not re.search(r'(?:src|href)="(?!data:|#|\{)|<link|@import', text), path
    sheets = {path for package in PACKAGES for path in (ROOT / package).rglob('*.css')}
    assert sheets == {PAGES / 'style.css'}


def test_every_class_of_a_page_is_in_the_style_sheet() -> None:
    sheet = (PAGES / 'style.css').read_text(encoding='utf-8')
    known = set(re.findall(r'\.([a-z]+)', sheet)) | {'plot'}
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob('*.j2')):
        text = re.sub(r'\{\{.*?\}\}|\{%.*?%\}', ' ', path.read_text(encoding='utf-8'))
        named = set(' '.join(re.findall(r'class="([^"]*)"', text)).split())
        assert named <= known, path


SVG = '{http://www.w3.org/2000/svg}'


def draw(figure: Figure) -> None:
    axis = figure.subplots()
    axis.plot([0.0, 1.0], [1.0, 2.0], marker='o')
    axis.set_xlabel('time, s')


def test_its_words_are_text_and_its_size_is_as_asked() -> None:
    svg = ElementTree.fromstring(svg_plot(draw, 4.0, 2.0))
    assert (svg.get('width'), svg.get('height')) == ('288pt', '144pt')
    assert 'time, s' in [text.text for text in svg.iter(f'{SVG}text')]


def test_letters_are_as_large_as_asked() -> None:
    small, large = (svg_plot(draw, 4.0, 2.0, font_size=size) for size in (9.0, 12.0))
    assert '9px' in small and '12px' in large and '12px' not in small


def test_with_a_salt_it_is_the_same_in_every_run() -> None:
    assert svg_plot(draw, 4.0, 2.0, salt='one') == svg_plot(draw, 4.0, 2.0, salt='one')
    assert svg_plot(draw, 4.0, 2.0, salt='one') != svg_plot(draw, 4.0, 2.0, salt='two')
