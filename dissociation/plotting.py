"""Drawing on plain arrays: the house style, bands over seeds, saving."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float, Real
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dissociation import checks


def style_path() -> Path:
    """Where `style.mplstyle` is: in the installed package, or at the top of a checkout."""
    package = Path(__file__).parent
    candidates = (package / "style.mplstyle", package.parent / "style.mplstyle")
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise FileNotFoundError(f"style.mplstyle must be at one of {', '.join(map(str, candidates))}, got neither.")
    return found


@contextmanager
def house_style() -> Iterator[None]:
    """Draws what is inside in the house style, and leaves matplotlib's settings as they were."""
    with mpl.rc_context(), plt.style.context(str(style_path())):
        yield


def band(
    axes: Axes,
    x: Real[np.ndarray, " points"],
    curves: Float[np.ndarray, "members points"],
    *,
    label: str,
    floor: float | None = None,
    **line: Any,
) -> None:
    """Draws the mean over members as a line and one (population) standard deviation to both sides as a band.

    Args:
        axes: Where to draw.
        x: [points].
        curves: One curve per member, [members, points]; members that are not finite at a point are left out there.
        label: The line's name in the legend.
        floor: The least height of the band's lower edge, for logarithmic axes.
        line: Handed to `Axes.plot`, for example `color` or `linestyle`.
    """
    checks.check_same_length("x", len(x), "curves", curves.shape[1], "points")
    finite = np.ma.masked_invalid(curves)
    mean, deviation = (np.ma.filled(part.astype(float), np.nan) for part in (finite.mean(axis=0), finite.std(axis=0)))
    lower = mean - deviation if floor is None else np.maximum(mean - deviation, floor)
    (drawn,) = axes.plot(x, mean, label=label, **line)
    axes.fill_between(x, lower, mean + deviation, color=drawn.get_color(), alpha=0.2, linewidth=0)


def save_figure(figure: Figure, stem: str | os.PathLike[str]) -> list[Path]:
    """Writes `<stem>.pdf` and `<stem>.png` in the figure's own size and returns both paths."""
    target = Path(stem)
    target.parent.mkdir(parents=True, exist_ok=True)
    paths = [target.with_name(target.name + suffix) for suffix in (".pdf", ".png")]
    with house_style():
        for path in paths:
            figure.savefig(path)
    return paths
