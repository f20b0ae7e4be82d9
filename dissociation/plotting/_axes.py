"""Style, statistics over members, curves, maps and files."""

import functools
import io
import os
import string
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float, Int, Real
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from scipy.special import stdtrit

from dissociation._core import checks
from dissociation._core.files import write_bytes

LEVEL = 0.95
"""Coverage of drawn intervals, as a fraction."""

FEW = 6
"""Number of members below which each member is drawn."""

MARKERS = "osD^vPX"
DASHES = (
    "solid",
    (0, (5, 1.5)),
    (0, (1, 1)),
    (0, (4, 1, 1, 1)),
    (0, (2, 1)),
    (0, (6, 1, 1, 1, 1, 1)),
    (0, (8, 2)),
)
"""Dashes that distinguish curves in a print without colour."""

MEASURE_WORDS = {
    word: word.upper() for word in ("cka", "cca", "svcca", "pwcca", "rsa", "rbf", "knn", "gulp")
}
MEASURE_WORDS |= {"procrustes": "Procrustes", "jaccard": "Jaccard"}
"""Parts of names of measures that figures write in another way."""


def style_path() -> Path:
    """Return the path of `style.mplstyle`, in the installed package or a checkout."""
    package = Path(__file__).parents[1]
    candidates = (package / "style.mplstyle", package.parent / "style.mplstyle")
    style = next((path for path in candidates if path.is_file()), None)
    if style is None:
        raise FileNotFoundError(
            f"style.mplstyle must be at one of {', '.join(map(str, candidates))}, got neither."
        )
    return style


@contextmanager
def house_style() -> Iterator[None]:
    """Apply the house style inside the block, and restore matplotlib's settings."""
    # A global style would change the user's figures.
    with mpl.rc_context(), plt.style.context(str(style_path())):
        yield


class Summary(NamedTuple):
    """Mean, standard deviation and number of finite values over members."""

    mean: Float[np.ndarray, "..."]
    deviation: Float[np.ndarray, "..."]
    finite: Int[np.ndarray, "..."]

    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """Return both ends of Student's interval at `LEVEL`, NaN for fewer than two members."""
        num_finite = np.maximum(self.finite, 1)
        num_degrees = np.maximum(self.finite - 1, 1)
        quantile = stdtrit(num_degrees, 0.5 + 0.5 * LEVEL)
        half = quantile * self.deviation / np.sqrt(num_finite)
        return self.mean - half, self.mean + half


def summarise(values: Real[np.ndarray, "members ..."]) -> Summary:
    """Summarise finite values over members.

    Args:
        values: Numbers, [members, ...].

    Returns:
        Float64 arrays without the first axis: mean (NaN without finite members), sample standard
        deviation with divisor n - 1 (NaN for fewer than two), and number of finite members.

    Example:
        >>> mean, deviation, count = summarise(np.array([1.0, 3.0, np.nan]))
        >>> float(mean), round(float(deviation), 3), int(count)
        (2.0, 1.414, 2)
    """
    values = np.asarray(values, float)
    is_finite = np.isfinite(values)
    # The NaN of a diverged member must not spread to the mean.
    count = is_finite.sum(0)
    total = np.where(is_finite, values, 0.0).sum(0)
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    squares = (np.where(is_finite, values - mean, 0.0) ** 2).sum(0)
    deviation = np.sqrt(squares / np.maximum(count - 1, 1))
    return Summary(mean, np.where(count > 1, deviation, np.nan), count)


def draws_each(curves: Real[np.ndarray, "members *points"]) -> bool:
    """Return True if `band` draws each member, because members are few or in two groups."""
    curves = np.asarray(curves, float).reshape(len(curves), -1)
    curves = curves[np.isfinite(curves).any(1)]
    if len(curves) < FEW:
        return True
    is_complete = np.isfinite(curves).all(0)
    ordered = np.sort(curves[:, is_complete], 0)
    if ordered.size == 0:
        return True
    # An interval would hide a gap between two groups of members.
    gaps = np.diff(ordered, axis=0)[1:-1]
    ranges = ordered[-1] - ordered[0]
    is_wide = (gaps > ranges * 2 / 3) & (gaps > 0.1 * np.ptp(ordered))
    return bool(is_wide.any())


def band(
    axes: Axes,
    x: Real[np.ndarray, " points"],
    curves: Float[np.ndarray, "members points"],
    *,
    label: str,
    within: tuple[float | int, float | int] = (-np.inf, np.inf),
    **line: Any,
) -> None:
    """Draw the mean over members with a band of Student's interval, or with a line per member.

    `draws_each` decides between band and lines.

    Args:
        axes: Axes to draw on.
        x: Positions, [points].
        curves: Curves, [members, points]. Values that are not finite are left out.
        label: Name in the legend.
        within: Limits of the band: the range of the quantity, or the lowest value on a logarithmic
            axis.
        line: Options of `Axes.plot`, for example `look(i)`.
    """
    checks.check_same_length("x", len(x), "curves", curves.shape[1], "points")
    summary = summarise(curves)
    if not np.isfinite(summary.mean).any():
        line.pop("markevery", None)  # it needs a finite point
    (mean_line,) = axes.plot(x, summary.mean, label=label, **line)
    line_color = mean_line.get_color()
    if not draws_each(curves):
        low, high = (np.clip(end, *within) for end in summary.interval())
        axes.fill_between(x, low, high, color=line_color, alpha=0.2, linewidth=0)
    elif len(curves) > 1:
        thin: dict[str, Any] = {"color": line_color, "linewidth": 0.35, "alpha": 0.7, "zorder": 1.5}
        marker = "." if len(x) == 1 else None
        axes.plot(x, np.asarray(curves).T, marker=marker, **thin)


def drawn_as(*curves: Real[np.ndarray, "..."], members: str = "seeds") -> str:
    """Return a sentence for a caption on how `band` draws curves.

    Example:
        >>> drawn_as(np.zeros((4, 9)))
        'Lines are means over 4 seeds, thin lines the seeds.'
    """
    counts = sorted({len(curve) for curve in curves})
    number = " to ".join(dict.fromkeys((str(counts[0]), str(counts[-1]))))
    lines = f"Lines are means over {number} {members}"
    if counts[-1] == 1:
        return f"Lines are of one of the {members}."
    num_with_lines = sum(map(draws_each, curves))
    if num_with_lines == len(curves):
        return f"{lines}, thin lines the {members}."
    student = f"{lines}, bands their {100 * LEVEL:g} % Student intervals"
    if num_with_lines == 0:
        return f"{student}."
    return f"{student}; where {members} are few or fall into two groups, thin lines are these."


def differences(
    axes: Axes,
    x: Real[np.ndarray, " points"],
    curves: Mapping[str, Float[np.ndarray, "members points"]],
    *,
    names: Mapping[str, str] | None = None,
    looks: Mapping[str, Mapping[str, Any]],
) -> None:
    """Draw each variant minus the first, member by member.

    Variants within 5 % of the largest difference are named in a text.

    Args:
        axes: Axes to draw on.
        x: Positions, [points].
        curves: Curves [members, points] by variant, with the same members.
        names: Names in the legend, by default the keys of `curves`.
        looks: Options of the lines, by variant.
    """
    first, *variants = curves
    if names is None:
        names = {name: name for name in curves}
    axes.axhline(0, color="black", linewidth=0.5)
    sizes = {}
    for name in variants:
        paired = curves[name] - curves[first]
        band(axes, x, paired, label=names[name], **looks[name])
        sizes[name] = float(np.nanmax(np.abs(paired), initial=0.0))

    # Curves near zero would coincide with the axis.
    flat = [name for name in variants if sizes[name] <= 0.05 * max(sizes.values())]
    if flat:
        largest = max(sizes[name] for name in flat)
        size = f"at most {largest:.1g}" if largest else "no difference"
        words = textwrap.fill(", ".join(names[name] for name in flat), 26)
        text = f"{words}:\n{size}"
        axes.text(0.98, 1.0, text, transform=axes.transAxes, ha="right", va="top", fontsize="small")
        low, high = axes.get_ylim()
        # The text needs room above the curves.
        axes.set_ylim(low, high + 0.25 * (high - low))


def look(index: int) -> dict[str, Any]:
    """Return the colour, dashes and sparse markers of curve `index`."""
    # Offsets by curve, so that markers of neighbouring curves do not coincide.
    kind = index % len(MARKERS)
    return {
        "color": color(index),
        "linestyle": DASHES[kind],
        "marker": MARKERS[kind],
        "markevery": (0.02 + 0.03 * kind, 0.25),
        "markersize": 2.2,
    }


@functools.cache
def _colors() -> list[str]:
    style = mpl.rc_params_from_file(style_path(), use_default_template=False)
    return style["axes.prop_cycle"].by_key()["color"]


def color(index: int) -> str:
    """Return the house style's colour of curve `index`."""
    # "C0" would depend on the style when the figure is shown.
    return _colors()[index % len(_colors())]


def log_height(axes: Axes) -> None:
    """Make the vertical axis logarithmic after drawing, with plain numbers over few decades."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high > 200 * low:
        return
    is_narrow = high < 5 * low
    locator = MaxNLocator(5) if is_narrow else LogLocator(subs=(1, 2, 5))
    axes.yaxis.set_major_locator(locator)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda height, _: f"{height:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    if is_narrow:
        axes.yaxis.set_minor_locator(NullLocator())


def looks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the options of `look` by curve name, with a broad first line."""
    look_of_name = {name: look(index) for index, name in enumerate(names)}
    # Curves that coincide with the first one stay visible on a broad line.
    first = next(iter(look_of_name.values()))
    first |= {"linewidth": 2.0, "alpha": 0.6}
    return look_of_name


def letter(*panels: Axes) -> None:
    """Write a, b, c, ..., A, B, ... in bold at the panels' upper left corners."""
    for mark, panel in zip(string.ascii_letters, panels, strict=False):
        panel.annotate(
            mark,
            (0, 1),
            xycoords="axes fraction",
            xytext=(-3, 3),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontweight="bold",
            fontsize=7,
        )


def title_of(name: str) -> str:
    """Return the name of a measure as figures show it: "debiased CKA" for "debiased_cka"."""
    return " ".join(MEASURE_WORDS.get(word, word) for word in name.split("_"))


def heat(
    axes: Axes,
    values: Real[np.ndarray, "rows columns"],
    shown: Sequence[Sequence[str]] | None = None,
) -> AxesImage:
    """Draw a map of numbers from 0 (dark) to 1 (bright), and return its image for a colour bar.

    Args:
        axes: Axes to draw on.
        values: Numbers; those below 0 are darkest.
        shown: Texts on the map.
    """
    image = axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for row, texts in enumerate(shown or ()):
        for column, text in enumerate(texts):
            shade = "black" if values[row, column] > 0.6 else "white"
            axes.text(column, row, text, ha="center", va="center", fontsize="x-small", color=shade)
    axes.tick_params(length=0)
    return image


def save_figure(figure: Figure, stem: str | os.PathLike[str]) -> list[Path]:
    """Write `<stem>.pdf` and `<stem>.png` atomically, and return both paths."""
    target = Path(stem)
    paths = [target.with_name(target.name + suffix) for suffix in (".pdf", ".png")]
    with house_style():
        for path in paths:
            # On a full disk, a PDF writer would raise again when it is closed.
            contents = io.BytesIO()
            figure.savefig(contents, format=path.suffix[1:])
            write_bytes(path, contents.getvalue())
    return paths
