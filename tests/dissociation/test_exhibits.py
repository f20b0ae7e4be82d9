"""A figure, its caption and its table: as text, as HTML, and as the SVG within."""

import html
import re

import matplotlib.pyplot as plt
import numpy as np
import pytest
from browser import Tags

from dissociation import exhibits
from dissociation.exhibits import Exhibit, aligned, image, table_html
from dissociation.plotting import house_style
from dissociation.report import report_html


@pytest.fixture
def figure():
    with house_style():
        drawn, axes = plt.subplots()
        axes.plot([0, 1], [0, 1], label="a < b & c")
        axes.legend()
    yield drawn
    plt.close(drawn)


def test_all_parts_are_there(figure):
    shown = Exhibit("2 < 3 seeds", figure, "Mean & band.", [["seed", "error"], ["0", "<1 %"]])
    assert shown.text() == "2 < 3 seeds\n\nseed  error\n0     <1 %\n\nMean & band."
    page = shown._repr_html_()
    seen = Tags.of(page)
    assert [seen.count(tag) for tag in ("figure", "svg", "figcaption", "table", "tr", "th", "td")] == [
        1,
        1,
        1,
        1,
        2,
        3,
        1,
    ]
    assert "<figcaption>Mean &amp; band.</figcaption>" in page
    assert "<td>&lt;1 %</td>" in page
    assert "2 &lt; 3 seeds" in page


def test_without_a_caption_there_is_none(figure):
    shown = Exhibit("", figure, "", [["a"], ["1"]])
    assert "figcaption" not in shown.html()
    assert shown.text() == "a\n1"


def test_tables_have_headers_for_readers_of_screens():
    assert table_html([["a", "b"], ["1", "2"]]).count('<th scope="col">') == 2
    assert table_html([["a", "b"], ["1", "2"]]).count('<th scope="row">') == 1
    assert "thead" not in table_html([["a", "b"]], header=False)
    assert aligned([["a", "bc"], ["def", "g"]]) == "a    bc\ndef  g"


def test_svg_has_no_address_and_no_date(figure):
    svg = image(figure, 'says "this"')
    assert svg.startswith("<svg viewBox=")
    assert not re.search(r"https?:|xmlns|metadata|<!DOCTYPE|<\?xml", svg)
    assert 'aria-label="says &quot;this&quot;"' in svg
    assert svg == image(figure, 'says "this"')  # the same figure is the same text
    Tags.of(svg)


def test_captions_hold_any_text(figure):
    for words in (r"\alpha \1 \g<0> \\", "a & <b>", "{0} %s"):
        label = f'aria-label="{html.escape(words)}"'
        assert label in image(figure, words)
        assert label in report_html(words, [Exhibit(words, figure, words, [[words]])], {words: words})


def test_pictures_are_told_from_lines(figure):
    assert 'class="lines"' in image(figure)
    figure.axes[0].imshow(np.eye(3))
    assert 'class="images"' in image(figure)


def test_what_is_dense_becomes_an_image_and_stays_as_it_was(figure):
    axes = figure.axes[0]
    few, many = len(image(figure)), np.random.default_rng(0).normal(size=(2, 50_000))
    (line,) = axes.plot(*many)
    dots = axes.scatter(*many)
    mesh = axes.pcolormesh(np.zeros((200, 200)))
    drawn = image(figure)
    assert "data:image/png;base64" in drawn
    assert len(drawn) < few + 500_000
    for artist in (line, dots, mesh):
        assert not artist.get_rasterized()


def test_what_is_too_large_becomes_a_png(figure, monkeypatch):
    monkeypatch.setattr(exhibits, "MAX_SVG", 1000)
    drawn = image(figure, "words")
    assert drawn.startswith('<img class="images"')
    assert 'alt="words" src="data:image/png;base64,' in drawn
