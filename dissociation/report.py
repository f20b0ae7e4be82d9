"""A report: one file of HTML with all in it, that opens offline, in dark and light, and prints."""

import dataclasses
import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import treescope
from treescope.external import jax_support

from dissociation.exhibits import Exhibit, table_html
from dissociation.files import write_bytes

__all__ = ["MAX_BYTES", "Tree", "report_html", "write_report"]

MAX_BYTES = 5_000_000

_MAX_TREE = 300_000
"""Characters of a tree that can be folded; a larger one is text, and ends there."""

_MAX_SUMMARY = 10_000_000
"""Entries up to which an array's mean and spread are shown; treescope's own limit leaves out a layer of 784 x 200."""


_WAITING = "<template data-tree>{}</template>"
_FILL = """<script>
for (const waiting of document.querySelectorAll("template[data-tree]"))
  waiting.replaceWith(document.importNode(waiting.content, true));
</script>"""
"""Treescope's scripts fail where a browser has read half of one, as of a large file: they wait for the page's end."""


class Tree(NamedTuple):
    """An object that a report shows as a tree to be folded: a model, a configuration."""

    value: Any

    def _repr_html_(self) -> str:
        return tree_html(self.value)


def tree_html(value: Any, wrap: str = "{}") -> str:
    """A tree by treescope, which a browser folds without any server; as text where it runs no scripts, or prints."""
    with jax_support.summarization_threshold.set_scoped({"default": _MAX_SUMMARY}):
        text = treescope.render_to_text(value, ignore_exceptions=True)
        folded = treescope.render_to_html(value, ignore_exceptions=True, compressed=False)
    text = f"<pre>{html.escape(text if len(text) <= _MAX_TREE else text[:_MAX_TREE] + ' ...')}</pre>"
    if len(folded) > _MAX_TREE:
        return text
    return (
        f'<div class="tree">{wrap.format(folded)}</div>\n<noscript>{text}</noscript>\n<div class="printed">{text}</div>'
    )


def report_html(
    title: str,
    exhibits: Sequence[Exhibit],
    sections: Mapping[str, Any],
    *,
    table: Sequence[Sequence[str]] | None = None,
) -> str:
    """A report as text.

    Args:
        title: Of the page.
        exhibits: Figures with headlines, captions and tables, in order.
        sections: By heading: mappings and dataclasses become tables, a `Tree` is folded, text stands as it is.
        table: A header and rows of cells, above the figures.

    Returns:
        A page of HTML without any address outside of it.
    """
    parts = [f"<h1>{html.escape(title)}</h1>", *([] if table is None else [table_html(table)])]
    for exhibit in exhibits:
        parts.append(f'<p class="headline">{html.escape(exhibit.headline)}</p>\n{exhibit.html()}')
    for heading, content in sections.items():
        parts.append(f"<section>\n<h2>{html.escape(heading)}</h2>\n{_content(content)}\n</section>")
    body = "\n".join(parts)
    head = _HEAD.format(title=html.escape(title), style=_STYLE)
    return f"{head}<body>\n<main>\n{body}\n</main>\n{_FILL}\n</body>\n</html>\n"


def write_report(
    path: str | os.PathLike[str], title: str, exhibits: Sequence[Exhibit], sections: Mapping[str, Any]
) -> Path:
    """Writes a report, whole or not at all, see `report_html`.

    Raises:
        OSError: If it cannot be written.
    """
    write_bytes(path, report_html(title, exhibits, sections).encode())
    return Path(path)


def _content(content: Any) -> str:
    if isinstance(content, Tree):
        return tree_html(content.value, _WAITING)
    if dataclasses.is_dataclass(content) and not isinstance(content, type):
        content = {field.name: getattr(content, field.name) for field in dataclasses.fields(content)}
    if isinstance(content, Mapping):
        return mapping_html(content)
    return f"<pre>{html.escape(str(content))}</pre>"


def mapping_html(mapping: Mapping[str, Any]) -> str:
    """Names and values as a table; mappings of equal names within it as one with a column per name."""
    inner = [value for value in mapping.values() if isinstance(value, Mapping)]
    names = list(inner[0]) if inner else []
    if inner and len(inner) == len(mapping) and all(list(value) == names for value in inner):
        rows = [[str(name), *map(_cell, value.values())] for name, value in mapping.items()]
        return table_html([["", *map(str, names)], *rows])
    flat = [[str(name), _cell(value)] for name, value in mapping.items() if not isinstance(value, Mapping)]
    parts = [table_html(flat, header=False)] if flat else []
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            parts.append(f"<h3>{html.escape(str(name))}</h3>\n{mapping_html(value)}")
    return "\n".join(parts)


def _cell(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, str) or value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, list | tuple) and not all(isinstance(item, int | float | np.generic) for item in value):
        return ", ".join(map(_cell, value))
    array = np.asarray(value)
    if array.dtype.kind == "f" and array.ndim == 0:
        return f"{array:.0f}" if abs(array) < 2**53 and array == np.round(array) else f"{array:.4g}"
    if array.dtype.kind not in "biufc":
        return str(value)
    return np.array2string(array, precision=4, threshold=20, edgeitems=3, separator=", ", max_line_width=10**6)


_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; font-src data:; \
style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'">
<title>{title}</title>
<style>{style}</style>
</head>
"""

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c1e21; --quiet: #5b6169; --line: #d9dce0; --shade: #f5f6f8; }
body { margin: 0; background: var(--back); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .75rem; padding-top: 1rem; border-top: 1px solid var(--line); }
h3 { font-size: .95rem; margin: 1.25rem 0 .4rem; }
.headline { color: var(--quiet); margin: 0 0 1.5rem; white-space: pre-line; }
figure { margin: 1.5rem 0; }
figure svg, figure img { display: block; width: 100%; height: auto; margin: 0 auto; }
figcaption { color: var(--quiet); font-size: .9rem; margin-top: .75rem; white-space: pre-line; }
.table { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line); }
thead th { color: var(--quiet); font-weight: 600; vertical-align: bottom; }
.cells td { white-space: nowrap; }
tbody th { font-weight: 500; white-space: nowrap; }
pre { background: var(--shade); padding: .75rem 1rem; border-radius: 6px; overflow-x: auto; font-size: .8rem; }
.tree { background: #fff; color: #000; color-scheme: light; border: 1px solid #d9dce0; border-radius: 6px;
  padding: .75rem 1rem; overflow-x: auto; font-size: .8rem; }
.long { columns: 22rem; column-gap: 2rem; }
.long table { border-collapse: separate; border-spacing: 0; }
.printed { display: none; }
@media screen and (prefers-color-scheme: dark) {
  :root { --back: #16181c; --text: #e6e8eb; --quiet: #a0a7b0; --line: #33373d; --shade: #1f2227; }
  figure .lines { filter: invert(1) hue-rotate(180deg); }
  figure .images { background: #fff; border-radius: 6px; padding: .75rem; box-sizing: border-box; }
  .tree { filter: invert(.9) hue-rotate(180deg); }
}
@media print {
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  figure, tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  table { font-size: 7.5pt; }
  th, td { padding-right: .6rem; }
  .table, pre { overflow: visible; }
  .cells td, tbody th { white-space: normal; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 7.5pt; }
  figure svg, figure img { max-height: 19cm; }
  .tree { display: none; }
  .printed { display: block; }
}
"""
