"""Drawing on plain arrays: the style, bands over seeds, saving."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float, Int, Real
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dissociation import checks
from dissociation.files import write_bytes


def style_path() -> Path:
    """Where `style.mplstyle` is: in the installed package, or at the top of a checkout."""
    package = Path(__file__).parent
    candidates = (package / "style.mplstyle", package.parent / "style.mplstyle")
    style = next((path for path in candidates if path.is_file()), None)
    if style is None:
        raise FileNotFoundError(f"style.mplstyle must be at one of {', '.join(map(str, candidates))}, got neither.")
    return style


@contextmanager
def house_style() -> Iterator[None]:
    """Draws what is inside in the style, and leaves matplotlib's settings as they were."""
    with mpl.rc_context(), plt.style.context(str(style_path())):
        yield


class Summary(NamedTuple):
    """What several members say of one number, or of many.

    Attributes:
        mean: Over the members that are finite there; NaN if none is.
        deviation: The sample's standard deviation (n - 1 below the sum of squares); NaN for less than two.
        finite: How many are.
    """

    mean: Float[np.ndarray, "..."]
    deviation: Float[np.ndarray, "..."]
    finite: Int[np.ndarray, "..."]


def summarise(values: Real[np.ndarray, "members ..."]) -> Summary:
    """Mean, standard deviation and number over the members, those left out that are not finite.

    Args:
        values: Members first.

    Returns:
        Three arrays without the first axis, in float64.

    Example:
        >>> mean, deviation, count = summarise(np.array([1.0, 3.0, np.nan]))
        >>> float(mean), round(float(deviation), 3), int(count)
        (2.0, 1.414, 2)
    """
    values = np.asarray(values, float)
    finite = np.isfinite(values)
    count = finite.sum(0)
    known = np.where(finite, values, 0.0)
    mean = np.where(count > 0, known.sum(0) / np.maximum(count, 1), np.nan)
    squares = (np.where(finite, values - mean, 0.0) ** 2).sum(0)
    return Summary(mean, np.where(count > 1, np.sqrt(squares / np.maximum(count - 1, 1)), np.nan), count)


def band(
    axes: Axes,
    x: Real[np.ndarray, " points"],
    curves: Float[np.ndarray, "members points"],
    *,
    label: str,
    floor: float | None = None,
    **line: Any,
) -> None:
    """Draws the mean over members as a line and one standard deviation (see `summarise`) to both sides as a band.

    Args:
        axes: Where to draw.
        x: [points].
        curves: One curve per member, [members, points]; members that are not finite at a point are left out there.
        label: The line's name in the legend.
        floor: The least height of the band's lower edge, for logarithmic axes.
        line: Handed to `Axes.plot`, for example `color` or `linestyle`.
    """
    checks.check_same_length("x", len(x), "curves", curves.shape[1], "points")
    mean, deviation, _ = summarise(curves)
    lower = mean - deviation if floor is None else np.maximum(mean - deviation, floor)
    (drawn,) = axes.plot(x, mean, label=label, **line)
    axes.fill_between(x, lower, mean + deviation, color=drawn.get_color(), alpha=0.2, linewidth=0)


def save_figure(figure: Figure, stem: str | os.PathLike[str]) -> list[Path]:
    """Writes `<stem>.pdf` and `<stem>.png` in the figure's own size, whole or not at all, and returns both paths."""
    target = Path(stem)
    paths = [target.with_name(target.name + suffix) for suffix in (".pdf", ".png")]
    with house_style():
        for path in paths:
            drawn = io.BytesIO()  # a writer of PDF that meets a full disk fails a second time while it closes
            figure.savefig(drawn, format=path.suffix[1:])
            write_bytes(path, drawn.getvalue())
    return paths
