"""Rendered figures for notebooks, and the HTML report of a run."""

import base64
import html
import io
from collections.abc import Mapping, Sequence
from string import Template
from typing import Any, NamedTuple

import matplotlib.figure
import numpy as np
import xarray

from dissociation.figures._harness import Figure
from dissociation.plotting._axes import house_style
from dissociation.plotting._display import Table, show


class Exhibit(NamedTuple):
    """Rendered figure with headline, caption and table.

    Notebooks show it as the last value of a cell.

    Attributes:
        headline: Data and number of networks, in a line or two.
        figure: Matplotlib's figure.
        caption: Explanation of panels, numbers of samples, bands and errors.
        table: Header and rows of cells.
    """

    headline: str
    figure: matplotlib.figure.Figure
    caption: str
    table: Sequence[Sequence[str]]

    def text(self) -> str:
        """Return headline, table and caption for a terminal."""
        paragraphs = (self.headline, repr(Table(self.table)), self.caption)
        return "\n\n".join(filter(None, paragraphs))

    def _repr_html_(self) -> str:
        buffer = io.BytesIO()
        with house_style():
            self.figure.savefig(buffer, format="png", dpi=200)
        encoded = base64.b64encode(buffer.getvalue()).decode()
        source = f"data:image/png;base64,{encoded}"
        headline = html.escape(self.headline)
        caption = html.escape(self.caption)
        image = f'<img style="max-width: 100%" alt="{caption}" src="{source}">'
        figure = f"<figure>{image}\n<figcaption>{caption}</figcaption></figure>"
        return f"<p>{headline}</p>\n{figure}\n{Table(self.table)._repr_html_()}"


def exhibit_of(figure: Figure, dataset: xarray.Dataset) -> Exhibit:
    """Return a figure, drawn, with headline, caption and table.

    Args:
        figure: Module of the figure.
        dataset: Value of its `compute`.
    """
    table = figure.table(dataset)
    caption = figure.caption(dataset)
    if any("±" in cell for row in table for cell in row):
        caption += " In the table, ± is one standard deviation."
    return Exhibit(figure.headline(dataset), figure.draw(dataset), caption, table)


def report_html(title: str, exhibits: Sequence[Exhibit], sections: Mapping[str, Any]) -> str:
    """Return a page of HTML that opens offline and is readable without JavaScript.

    Args:
        title: Heading of the page.
        exhibits: Figures in order.
        sections: Content by heading. A mapping becomes a table, with columns if its values are
            mappings of equal names; any other object, such as a model, becomes text and a tree.
    """
    elements = [exhibit._repr_html_() for exhibit in exhibits]
    for heading, content in sections.items():
        element = _table(content) if isinstance(content, Mapping) else _tree(content)
        elements.append(f"<h2>{html.escape(heading)}</h2>\n{element}")
    return _PAGE.substitute(title=html.escape(title), body="\n".join(elements))


def _table(content: Mapping[str, Any]) -> str:
    """Return a table in HTML with a row per name; equal mappings become columns."""
    values = list(content.values())
    is_grid = bool(values) and all(
        isinstance(value, Mapping) and value.keys() == values[0].keys() for value in values
    )
    rows = [["", *values[0]]] if is_grid else [["name", "value"]]
    for name, value in content.items():
        cells = value.values() if is_grid else [value]
        rows.append([name, *map(_cell, cells)])
    return Table(rows)._repr_html_()


def _cell(value: Any) -> str:
    """Return a number or text for a table."""
    if isinstance(value, float | np.floating):
        return f"{value:.4g}"
    return str(value)


def _tree(model: Any) -> str:
    """Return a model in HTML, as text and as an interactive tree."""
    import treescope  # takes half a second

    text = html.escape(repr(show(model)))
    view = treescope.render_to_html(model, compressed=False)
    summary = "<summary>to look inside (needs JavaScript)</summary>"
    return f"<pre>{text}</pre>\n<details>{summary}<template>{view}</template></details>"


# Scripts of treescope fail before the page is complete, so the page's end fills their templates.
_PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
font-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'">
<title>$title</title>
<style>
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: auto; padding: 1rem; background: Canvas; color: CanvasText; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #8884; text-align: left; \
vertical-align: top; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8rem; }
details { background: #fff; color: #000; color-scheme: light; overflow-x: auto; }
figure { margin: 0; }
</style>
<body>
<h1>$title</h1>
$body
<script>
for (const tree of document.querySelectorAll("template")) \
tree.replaceWith(document.importNode(tree.content, true));
</script>
</body></html>
""")
