"""A figure with its headline, caption and table: what the command line, notebooks and reports show."""

import base64
import html
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.collections import Collection, QuadMesh
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from dissociation.plotting import house_style

MAX_SVG = 1_500_000
"""Characters of a figure as SVG; a larger one becomes a PNG."""

_LONG = 12
"""Rows of names and values from which on they stand in columns."""

_DENSE = 4000
"""Points from which on an artist is an image within the SVG."""


class Exhibit(NamedTuple):
    """A figure and what belongs to it. Notebooks show it as it is the last value of a cell.

    Attributes:
        headline: What was computed on, in a line or two.
        figure: Drawn.
        caption: What it shows, of how many, and what bands and errors are.
        table: A header and rows of cells.
    """

    headline: str
    figure: Figure
    caption: str
    table: Sequence[Sequence[str]]

    def text(self) -> str:
        """Headline, table and caption for a terminal."""
        return "\n\n".join(part for part in (self.headline, aligned(self.table), self.caption) if part)

    def html(self) -> str:
        """Figure, caption and table as HTML that needs no other file."""
        words = f"\n<figcaption>{html.escape(self.caption)}</figcaption>" if self.caption else ""
        shown = table_html(self.table) if self.table else ""
        return f"<figure>\n{image(self.figure, self.caption)}{words}\n</figure>\n{shown}"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.headline)}</p>\n{self.html()}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table as text, columns as wide as their widest cell.

    Example:
        >>> print(aligned([["seed", "error"], ["0", "12.5 %"]]))
        seed  error
        0     12.5 %
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def table_html(rows: Sequence[Sequence[str]], *, header: bool = True) -> str:
    """A table as HTML: the first row its header, if it has one, the first cell of every other the row's."""

    def row(cells: Sequence[str], first: str, other: str) -> str:
        kinds = (first, *[other] * (len(cells) - 1))
        parts = (f"<{kind}>{html.escape(str(cell))}</{kind[:2]}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(parts)}</tr>"

    scope = 'th scope="{}"'.format
    head = f"<thead>{row(rows[0], scope('col'), scope('col'))}</thead>\n" if header and rows else ""
    body = "\n".join(row(cells, scope("row"), "td") for cells in rows[header:])
    kind = "cells" if header else "long" if len(rows) > _LONG else "pairs"
    return f'<div class="table {kind}"><table>\n{head}<tbody>\n{body}\n</tbody></table></div>'


def image(figure: Figure, words: str = "") -> str:
    """A figure as an element of HTML, transparent: SVG, what is dense in it as images; a PNG if that is too large.

    Args:
        figure: Drawn.
        words: What it shows, for readers who do not see it.
    """
    with house_style(), mpl.rc_context({"svg.hashsalt": words or "figure"}), _dense_as_images(figure):
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg, width = drawn.getvalue(), f'style="max-width:{200 * figure.get_figwidth():.0f}px"'
    if len(svg) <= MAX_SVG:
        # Lines and text can be inverted where the page is dark; what is drawn on images could not be read then.
        kind = "images" if "<image" in svg else "lines"
        return _inline(svg, f'class="{kind}" {width} role="img" aria-label="{html.escape(words)}"')
    encoded = base64.b64encode(_png(figure)).decode()
    return f'<img class="images" {width} alt="{html.escape(words)}" src="data:image/png;base64,{encoded}">'


def _inline(svg: str, attributes: str) -> str:
    """SVG as a part of HTML: without prologue, metadata, and names of namespaces, which are addresses."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]*"', svg)
    opening = f"<svg {box.group() if box else ''} {attributes}>"
    svg = re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1)  # as text, `re` would interpret its backslashes
    return svg.replace("xlink:href", "href").strip()


def _png(figure: Figure) -> bytes:
    for dpi in (200, 100, 50):
        drawn = io.BytesIO()
        with house_style():
            figure.savefig(drawn, format="png", transparent=True, dpi=dpi)
        if len(drawn.getvalue()) <= MAX_SVG:
            break
    return drawn.getvalue()


@contextmanager
def _dense_as_images(figure: Figure) -> Iterator[None]:
    """Artists of many points as images inside of the block, as they were afterwards."""
    dense = [artist for artist in figure.findobj(_is_dense) if not artist.get_rasterized()]
    for artist in dense:
        artist.set_rasterized(True)
    try:
        yield
    finally:
        for artist in dense:
            artist.set_rasterized(False)


def _is_dense(artist: Artist) -> bool:
    if isinstance(artist, QuadMesh):  # beside colour bars, which are images
        return True
    if isinstance(artist, Line2D):
        return np.size(artist.get_xdata()) > _DENSE
    return isinstance(artist, Collection) and np.size(artist.get_offsets()) > 2 * _DENSE
