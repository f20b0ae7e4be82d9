"""Dataset of a sweep through grokking and collapse: series, and steps of threshold crossings."""

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from dissociation.figures._harness import padded
from dissociation.measures._crossing import Median, Slope, first_cross, log_slope, median_crossing

if TYPE_CHECKING:
    import xarray

EVENTS = ("fitted", "generalised", "collapsed", "delay")
"""Crossings of thresholds; "delay" is the time from "fitted" to "collapsed"."""


def crossings(config: Any, series: dict[str, np.ndarray], time_step: np.ndarray) -> tuple[dict[str, Any], str]:
    """Return variables on the steps at which networks crossed the thresholds, and a sentence on slopes.

    `first_crossing` [events, weight_decays, seeds], see `first_crossings`; `median_crossing` [events, weight_decays,
    bounds] with 90 % intervals, over the seeds that did not diverge and for "delay" fitted; `collapse_line`, slope and
    intercept of log collapse time on log weight decay, NaN if too few networks crossed; `diverged` [weight_decays,
    seeds].
    """
    first, end = first_crossings(config, series, time_step), int(time_step[-1])
    median = np.full((len(EVENTS), len(config.weight_decays), 3), np.nan)
    for index, diverged in enumerate(first["diverged"]):
        if diverged.all():
            continue
        times = {name: first[name][index, ~diverged] for name in EVENTS}
        for place, name in enumerate(EVENTS):
            fitted, step = times["fitted"], times[name]
            delayed = name == "delay"
            median[place, index] = median_delay(fitted, step, end) if delayed else median_crossing(step, end)
    line, sentences = np.full(2, np.nan), []
    for name, words in (("collapsed", "collapse time"), ("delay", "delay after fitting")):
        try:
            slope = crossing_line(config.weight_decays, first, end, name)
        except ValueError:
            crossed = f"{np.isfinite(first[name]).sum()} of {first[name].size} networks"
            sentences.append(f"{words}: no slope, which takes three crossings at two weight decays, of {crossed}")
            continue
        sentences.append(f"{words} goes as (weight decay)^({slope.slope:.2f} \u00b1 {slope.error:.2f})")
        if name == "collapsed":
            line = np.asarray([slope.slope, slope.intercept])
    steps = {"units": "steps"}
    variables = {
        "first_crossing": (("events", "weight_decays", "seeds"), np.stack([first[name] for name in EVENTS]), steps),
        "median_crossing": (("events", "weight_decays", "bounds"), median, steps),
        "collapse_line": ("coefficients", line),
        "diverged": (("weight_decays", "seeds"), first["diverged"]),
    }
    return variables, "; ".join(sentences)


def first_crossings(config: Any, series: dict[str, np.ndarray], time_step: np.ndarray) -> dict[str, np.ndarray]:
    """Return the first steps beyond the thresholds, [decay, seed]; NaN if a network never crossed or diverged.

    "collapsed" is the first such step from "fitted" on, "delay" their difference.
    """
    times = np.asarray(time_step, np.float32)
    generalised = np.asarray(first_cross(times, series["test_accuracy"], config.test_threshold))
    fitted = np.asarray(first_cross(times, series["train_accuracy"], config.accuracy_threshold))
    # Features may be close to each other at the start too.
    after = np.where(times >= fitted[..., None], series["rnc1_score"], np.nan)
    collapsed = np.asarray(first_cross(times, after, config.collapse_threshold, "below"))
    diverged = np.asarray(~np.isfinite(series["train_loss"]).all(-1))
    first = {"fitted": fitted, "generalised": generalised, "collapsed": collapsed, "delay": collapsed - fitted}
    return {name: np.where(diverged, np.nan, step) for name, step in first.items()} | {"diverged": diverged}


def median_delay(fitted: np.ndarray, delay: np.ndarray, end: int) -> Median:
    """Return the median steps from fitting to collapse over the seeds that fitted; NaN if none did."""
    chosen = ~np.isnan(fitted)
    if not chosen.any():
        return Median(np.nan, np.nan, np.nan)
    return median_crossing(delay[chosen], end - fitted[chosen])


def crossing_table(dataset: "xarray.Dataset") -> list[list[str]]:
    """Return a header, and a row per weight decay: medians with 90 % intervals."""
    header = [
        "weight decay",
        "fitted at",
        "generalised",
        "collapsed",
        "90 % interval",
        "never",
        "delay",
        "90 % interval",
    ]
    rows = [header]
    for decay in dataset.weight_decays.values:
        one = dataset.sel(weight_decays=decay)
        alive = ~one.diverged.values
        if not alive.any():
            rows.append([f"{decay:g}", *["all diverged", "", "", "", "", "", ""]])
            continue
        ends = {name: one.median_crossing.sel(events=name).values for name in EVENTS}
        shown = {name: f"{median:.0f}" for name, (median, _, _) in ends.items()}
        # No time is negative.
        spread = {name: f"{max(low, 0.0):.0f} to {high:.0f}" for name, (_, low, high) in ends.items()}
        never = f"{int(np.isnan(one.first_crossing.sel(events='collapsed').values[alive]).sum())} of {int(alive.sum())}"
        row = [f"{decay:g}", *(shown[name] for name in ("fitted", "generalised", "collapsed"))]
        rows.append([*row, spread["collapsed"], never, shown["delay"], spread["delay"]])
    return rows


def crossing_line(
    weight_decays: tuple[float, ...], first: dict[str, np.ndarray], end: int, name: str = "collapsed"
) -> Slope:
    """Return the line of log time `name` against log weight decay, over positive decays."""
    decays, times = np.asarray(weight_decays, float), np.asarray(first[name], float)
    places = np.repeat(decays, times.shape[1])
    ends = np.full(times.shape, float(end)) - (first["fitted"] if name == "delay" else 0.0)
    # A network that fitted at the last step has no time for a delay.
    kept = (places > 0) & (ends.reshape(-1) > 0) & ~first["diverged"].reshape(-1)
    return log_slope(times.reshape(-1)[kept], places[kept], ends.reshape(-1)[kept])


def assemble(
    config: Any,
    data: dict[str, Any],
    steps: np.ndarray,
    flat: dict[str, np.ndarray],
    margins: dict[str, np.ndarray],
    diverged_at: np.ndarray | None,
) -> "xarray.Dataset":
    """Return the dataset of flat series [members, time]; `diverged_at` is None for a running sweep."""
    import xarray

    grid, steps = (len(config.weight_decays), len(config.seeds)), np.asarray(steps)
    # Accuracy by argmax of NaN is that of the first class, so it looks plausible.
    finite = np.isfinite(flat["train_loss"])
    if diverged_at is None:  # the first observation that is not finite
        diverged_at = np.where(finite.all(-1), -1, steps[np.argmin(finite, -1)])
    series = {name: np.where(finite, values, np.nan).reshape(*grid, -1) for name, values in flat.items()}
    crossed, slope = crossings(config, series, steps)
    networks, measured = ("weight_decays", "seeds"), np.isin(steps, config.information_steps())
    variables: dict[str, Any] = {"diverged_at": (networks, np.asarray(diverged_at).reshape(grid)), **crossed}
    for name, values in series.items():
        expensive = name.startswith(("nhsic", "mi_"))
        axis, kept = ("information_step", values[..., measured]) if expensive else ("time_step", values)
        variables[name] = ((*networks, axis), kept, {"units": "nats"} if name.startswith("mi_") else {})
    coords = {
        "weight_decays": list(config.weight_decays),
        "seeds": list(config.seeds),
        "time_step": ("time_step", steps, {"units": "steps"}),
        "information_step": ("information_step", steps[measured], {"units": "steps"}),
        "events": list(EVENTS),
        "bounds": ["median", "low", "high"],
        "coefficients": ["slope", "intercept"],
    }
    if margins:
        variables |= _margins(config, margins, grid)
        coords |= {"classes": list(config.classes), "splits": list(SPLITS)}
    return xarray.Dataset(variables, coords, {"data": json.dumps(data), "slope": slope})


SPLITS = ("train", "test")


def _margins(config: Any, margins: dict[str, np.ndarray], grid: tuple[int, int]) -> dict[str, Any]:
    """Return the arrays of `margins_of` as variables, padded to the largest number of images."""
    axes, found = ("classes", "splits", "weight_decays", "seeds", "images"), {}
    for kind, dims in (("margin", axes), ("plane", (*axes, "coordinates"))):
        parts = [margins[f"{kind}_{label}_{split}"] for label in config.classes for split in SPLITS]
        values = padded(parts)
        found[kind] = (dims, values.reshape(len(config.classes), len(SPLITS), *grid, *values.shape[2:]))
    boundary = np.asarray(margins["plane_boundary"]).reshape(grid)
    return found | {"plane_boundary": (("weight_decays", "seeds"), boundary)}
