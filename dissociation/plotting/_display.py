"""Models, arrays and tables in notebooks."""

import base64
import html
import io
import re
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np

from dissociation._core import checks

__all__ = ["Shown", "Table", "show", "table"]

_HEIGHT = 112


class Shown:
    """Text without the contents of arrays, and an image of arrays with two or three axes."""

    def __init__(self, value: Any):
        self._value = value
        self.text = re.sub(r" at 0x[0-9a-f]+", "", eqx.tree_pformat(value))
        self.png = None
        if _is_picture(value):
            self.png = _image(np.asarray(value))

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        # Imported late, because figures do not need it.
        import treescope

        text = html.escape(self.text)
        if self.png is None:
            still = f"<pre>{text}</pre>"
        else:
            # treescope needs JavaScript, so a still image or text comes first.
            encoded = base64.b64encode(self.png).decode()
            still = (
                f'<img alt="{text}" style="max-width: 100%" src="data:image/png;base64,{encoded}">'
            )
        with treescope.active_autovisualizer.set_scoped(treescope.ArrayAutovisualizer()):
            moving = treescope.render_to_html(self._value)
        return (
            f"{still}<details><summary>to look inside (needs "
            f"JavaScript)</summary>{moving}</details>"
        )


def show(value: Any) -> Shown:
    """Return a view for a notebook: a model as text, an array as an image.

    Both are also in treescope's interactive view.

    Args:
        value: A PyTree. An array of two axes is an image, one of three axes a row of images, in
            grey from 0 to the largest value, or with negative values in red and blue about 0.

    Raises:
        ValueError: If an array is empty.

    Example:
        >>> show(np.zeros((2, 28, 28), np.float32))
        f32[2,28,28](numpy)
    """
    if _is_array(value) and not np.size(value):
        checks.fail("value", "have elements", np.shape(value))
    return Shown(value)


def _is_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, jax.Array))


def _is_picture(value: Any) -> bool:
    return _is_array(value) and np.ndim(value) in (2, 3) and np.asarray(value).dtype.kind in "fiub"


def _image(array: np.ndarray) -> bytes:
    """Return a PNG of one image or a row of images."""
    import matplotlib as mpl
    from matplotlib.image import imsave

    images = np.atleast_3d(array.T).T.astype(float)
    # Gaps between images are NaN.
    padded = np.pad(images, ((0, 0), (0, 0), (0, 1)), constant_values=np.nan)
    row = np.hstack(list(padded))[:, :-1]
    largest = np.nanmax(np.abs(row), initial=0.0) or 1.0
    if (row < 0).any():
        colours = mpl.colormaps["RdBu_r"](0.5 + 0.5 * row / largest)
    else:
        colours = mpl.colormaps["gray"](row / largest)
    colours[np.isnan(row)] = 1.0  # white
    # An integer factor keeps pixels sharp.
    factor = max(1, _HEIGHT // len(row))
    pixel = np.ones((factor, factor, 1))
    buffer = io.BytesIO()
    imsave(buffer, np.kron(colours, pixel), format="png")
    return buffer.getvalue()


class Table:
    """Table that notebooks show as HTML and `print` writes in columns."""

    def __init__(self, rows: Sequence[Sequence[str]]):
        self.rows = [list(map(str, row)) for row in rows]

    def __repr__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        lines = []
        for row in self.rows:
            line = "  ".join(map(str.ljust, row, widths))
            lines.append(line.rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        names, *rows = self.rows
        head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in names)
        table_rows = []
        for first, *row in rows:
            cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
            table_rows.append(f'<tr><th scope="row">{html.escape(first)}</th>{cells}</tr>')
        body = "\n".join(table_rows)
        table = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"
        return f'<div style="overflow-x: auto">{table}</div>'


def table(rows: Sequence[Sequence[str]]) -> Table:
    """Return a table that notebooks show and `print` writes.

    Args:
        rows: Text cells in rows of equal length, names of columns first.

    Raises:
        ValueError: If there are no rows, or rows differ in length.

    Example:
        >>> table([["seed", "error"], ["0", "1.89 %"]])
        seed  error
        0     1.89 %
    """
    lengths = [len(row) for row in rows]
    if len(set(lengths)) != 1:
        checks.fail("rows", "be at least one row, all of the same length", f"row lengths {lengths}")
    return Table(rows)
