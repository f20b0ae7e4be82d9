"""Panels of one measure between the layers of two networks, with best matches."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dissociation._core.rounding_ties import ROUNDINGS
from dissociation.plotting import _axes as plotting

MAX_NAMES = 16
"""Largest number of names of layers along an axis."""

MAX_LETTERS = 22
"""Largest number of letters of a name along an axis."""

Table = Float[np.ndarray, "rows columns"]


class Tables(NamedTuple):
    """Tables of one measure between two networks.

    Attributes:
        estimate: Values of all pairs of layers, without their bias.
        low: Lower ends of intervals, or None.
        high: Upper ends of intervals, or None.
        chance: Values by chance, or None.
        rows: Names of the layers of the first network.
        columns: Names of the layers of the second network.
        measure: Name of the measure.
        larger_is_closer: False for a distance.
        networks: Names of both networks.
        values: Values with the bias that `chance` has, or None if it is small.
    """

    estimate: Table
    low: Table | None
    high: Table | None
    chance: Table | None
    rows: Sequence[str]
    columns: Sequence[str]
    measure: str
    larger_is_closer: bool
    networks: tuple[str, str] = ("A", "B")
    values: Table | None = None

    def transposed(self) -> "Tables":
        """Return the tables with both networks exchanged."""
        transposes = {}
        for name in ("estimate", "low", "high", "chance", "values"):
            table = getattr(self, name)
            if table is not None:
                transposes[name] = table.T
        second_first = (self.networks[1], self.networks[0])
        return self._replace(
            rows=self.columns, columns=self.rows, networks=second_first, **transposes
        )

    def best(self) -> Int[np.ndarray, " rows"]:
        """Return the column of the best match of each row, see `best_matches`."""
        return best_matches(self.estimate, larger_is_closer=self.larger_is_closer)


def best_matches(table: Table, *, larger_is_closer: bool) -> Int[np.ndarray, " rows"]:
    """Return the column with the closest value of each row, -1 for rows without values.

    Of values that differ by rounding the first column is returned.
    """
    sign = 1.0 if larger_is_closer else -1.0
    closeness = np.where(np.isfinite(table), sign * table, -np.inf)
    closest = closeness.max(1, keepdims=True)
    rounding = ROUNDINGS * np.finfo(np.float32).eps * np.abs(closest)
    columns = np.argmax(closeness >= closest - rounding, 1)
    return np.where(np.isfinite(closest[:, 0]), columns, -1)


def draw_matches(tables: Tables) -> Figure:
    """Draw the table of all pairs, and the best match of each layer of both networks."""
    figure = plt.figure(figsize=(6.6, 2.9), layout="constrained")
    left, right = np.asarray(figure.subfigures(1, 2, width_ratios=(1, 1.25)))
    matrix_panel = left.subplots()
    _matrix(matrix_panel, tables)
    panels = right.subplots(2, 1, sharey=True)
    _matches(panels[0], tables)
    _matches(panels[1], tables.transposed())
    plotting.letter(matrix_panel, *panels)
    handles, labels = panels[0].get_legend_handles_labels()
    right.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _matrix(panel: Axes, tables: Tables) -> None:
    """Draw values of all pairs, with dots and squares on the best matches of rows and columns."""
    estimate = tables.estimate
    low = 0.0
    high = 1.0
    if not tables.larger_is_closer or np.nanmin(estimate, initial=0) < -1:
        low = np.nanmin(estimate, initial=np.inf)
        high = np.nanmax(estimate, initial=-np.inf)
    colors = "viridis" if tables.larger_is_closer else "viridis_r"
    image = panel.imshow(estimate, vmin=low, vmax=high, cmap=colors, aspect="auto")
    panel.tick_params(length=0)
    panel.figure.colorbar(image, ax=panel, shrink=0.8, pad=0.02)

    size = float(np.clip(60 / max(estimate.shape), 0.8, 4))
    style: dict[str, Any] = {"linestyle": "none", "clip_on": False}
    best = tables.best()
    rows = np.flatnonzero(best >= 0)
    dot: dict[str, Any] = {"marker": "o", "markerfacecolor": "white", "markeredgecolor": "black"}
    panel.plot(best[rows], rows, markersize=size, markeredgewidth=0.4, **dot, **style)
    best_of_columns = tables.transposed().best()
    columns = np.flatnonzero(best_of_columns >= 0)
    square: dict[str, Any] = {"marker": "s", "markerfacecolor": "none", "markeredgecolor": "red"}
    edge = 0.2 * size
    markers = {"markersize": 2.4 * size, "markeredgewidth": edge}
    panel.plot(columns, best_of_columns[columns], **markers, **square, **style)
    _name_ticks(panel, tables.columns, vertical=False)
    _name_ticks(panel, tables.rows, vertical=True)
    panel.set(xlabel=tables.networks[1], ylabel=tables.networks[0])
    panel.set_title(plotting.title_of(tables.measure))


def _matches(panel: Axes, tables: Tables) -> None:
    """Draw the best match of each row with its interval and chance value."""
    best = tables.best()
    rows = np.flatnonzero(best >= 0)
    pairs = (rows, best[rows])
    estimate = tables.estimate[pairs]
    color = plotting.color(0)
    bars = None
    label = "best match"
    if tables.low is not None and tables.high is not None:
        below = np.maximum(estimate - tables.low[pairs], 0)
        above = np.maximum(tables.high[pairs] - estimate, 0)
        bars = np.stack([below, above])
        label = "best match, 90 % interval"
    line: dict[str, Any] = {"color": color, "markersize": 1.6, "elinewidth": 0.7}
    panel.errorbar(rows, estimate, bars, fmt="o", capsize=1.5, label=label, **line)
    if tables.values is not None:
        style: dict[str, Any] = {"markerfacecolor": "none", "markersize": 3, "color": "0.3"}
        panel.plot(rows, tables.values[pairs], "o", label="with bias", **style)
    if tables.chance is not None:
        chance = tables.chance[pairs]
        panel.plot(rows, chance, "_", color="0.3", markersize=5, label="chance")
    panel.set_xlim(-0.6, len(tables.rows) - 0.4)
    _name_ticks(panel, tables.rows, vertical=False)
    first, second = tables.networks
    panel.set_title(f"layers of {shortened(first)} in {shortened(second)}")
    panel.set_ylabel(plotting.title_of(tables.measure))


def _name_ticks(panel: Axes, names: Sequence[str], *, vertical: bool) -> None:
    """Name all layers along an axis, or evenly spaced ones."""
    step = -(-len(names) // MAX_NAMES)
    ticks = range(0, len(names), step)
    distinct = distinct_names(names)
    texts = [distinct[tick] for tick in ticks]
    if vertical:
        panel.set_yticks(ticks, texts)
    else:
        panel.set_xticks(ticks, texts, rotation=40, ha="right", rotation_mode="anchor")


def distinct_names(names: Sequence[str]) -> list[str]:
    """Return names of at most `MAX_LETTERS` letters, without the modules that all begin with.

    Example:
        >>> distinct_names(["transformer.h.10.mlp.c_fc", "transformer.h.11.mlp.c_fc"])
        ['10.mlp.c_fc', '11.mlp.c_fc']
    """
    num_shared = 0
    if max(map(len, names)) > MAX_LETTERS:
        prefix = os.path.commonprefix(list(names))
        num_shared = max(prefix.rfind(separator) for separator in "./") + 1
    return [shortened(name[num_shared:]) for name in names]


def shortened(name: str) -> str:
    """Return a name of at most `MAX_LETTERS` letters, without its middle.

    Example:
        >>> shortened("encoder.blocks[11].attention.output")
        'encoder.bl...on.output'
    """
    if len(name) <= MAX_LETTERS:
        return name
    half = (MAX_LETTERS - 3 + 1) // 2
    return f"{name[:half]}...{name[half + 3 - MAX_LETTERS :]}"
