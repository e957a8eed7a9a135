"""A plot is an SVG element that is the same in every run."""

from __future__ import annotations

from xml.etree import ElementTree

from matplotlib.figure import Figure

from vla_runtime.pages.page import svg_plot

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
