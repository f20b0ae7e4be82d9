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
    """Rendered figure with headline, caption and table. Notebooks show it as the last value of a cell.

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
        return "\n\n".join(
            part for part in (self.headline, repr(Table(self.table)), self.caption) if part
        )

    def _repr_html_(self) -> str:
        drawn = io.BytesIO()
        with house_style():
            self.figure.savefig(drawn, format="png", dpi=200)
        source = f"data:image/png;base64,{base64.b64encode(drawn.getvalue()).decode()}"
        headline, caption = html.escape(self.headline), html.escape(self.caption)
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
    spread = any("±" in cell for row in table for cell in row)
    caption = figure.caption(dataset) + (
        " In the table, ± is one standard deviation." if spread else ""
    )
    return Exhibit(figure.headline(dataset), figure.draw(dataset), caption, table)


def report_html(title: str, exhibits: Sequence[Exhibit], sections: Mapping[str, Any]) -> str:
    """Return a page of HTML that opens offline and is readable without JavaScript.

    Args:
        title: Heading of the page.
        exhibits: Figures in order.
        sections: Content by heading. A mapping becomes a table, with columns if its values are
            mappings of equal names; any other object, such as a model, becomes text and a tree.
    """
    parts = [each._repr_html_() for each in exhibits]
    for heading, content in sections.items():
        shown = _table(content) if isinstance(content, Mapping) else _tree(content)
        parts.append(f"<h2>{html.escape(heading)}</h2>\n{shown}")
    return _PAGE.substitute(title=html.escape(title), body="\n".join(parts))


def _table(content: Mapping[str, Any]) -> str:
    values = list(content.values())
    if values and all(
        isinstance(value, Mapping) and value.keys() == values[0].keys() for value in values
    ):
        rows = [
            ["", *values[0]],
            *([name, *map(_cell, value.values())] for name, value in content.items()),
        ]
    else:
        rows = [["name", "value"], *([name, _cell(value)] for name, value in content.items())]
    return Table(rows)._repr_html_()


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)


def _tree(value: Any) -> str:
    import treescope  # takes half a second

    text, view = html.escape(repr(show(value))), treescope.render_to_html(value, compressed=False)
    summary = "<summary>to look inside (needs JavaScript)</summary>"
    return f"<pre>{text}</pre>\n<details>{summary}<template>{view}</template></details>"


# Scripts of treescope fail before the page is complete, so the page's end fills their templates.
_PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; font-src data:; \
style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'">
<title>$title</title>
<style>
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: auto; padding: 1rem; background: Canvas; color: CanvasText; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #8884; text-align: left; vertical-align: top; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8rem; }
details { background: #fff; color: #000; color-scheme: light; overflow-x: auto; }
figure { margin: 0; }
</style>
<body>
<h1>$title</h1>
$body
<script>
for (const tree of document.querySelectorAll("template")) tree.replaceWith(document.importNode(tree.content, true));
</script>
</body></html>
""")
