"""Results of a sweep through grokking and collapse: series, and steps of threshold crossings."""

from typing import Any, NamedTuple

import numpy as np

from dissociation._core.checks import fail
from dissociation.figures._results import Results
from dissociation.measures._crossing import Median, Slope, first_cross, log_slope, median_crossing


class Crossings(NamedTuple):
    """Steps at which the networks of a sweep crossed the thresholds.

    Medians are over the seeds that did not diverge, with 90 % intervals, [decay, 3]; of "delay" over seeds that fitted.
    """

    first: dict[str, np.ndarray]  # [decay, seed], or NaN, see `first_crossings`
    median: dict[str, np.ndarray]  # or NaN
    line: np.ndarray  # slope and intercept of log collapse time on log weight decay; NaN if too few networks crossed
    slope: str  # a sentence on the slopes of collapse time and of delay


def crossings(config: Any, series: dict[str, np.ndarray], time_step: np.ndarray) -> Crossings:
    """Return the crossings of `series` at `time_step`, with the thresholds of `config`."""
    first, end = first_crossings(config, series, time_step), int(time_step[-1])
    names = [name for name in first if name != "diverged"]
    median: dict[str, np.ndarray] = {name: np.full((len(config.weight_decays), 3), np.nan) for name in names}
    for index, diverged in enumerate(first["diverged"]):
        if diverged.all():
            continue
        times = {name: first[name][index, ~diverged] for name in names}
        for name in names:
            fitted, step = times["fitted"], times[name]
            median[name][index] = median_delay(fitted, step, end) if name == "delay" else median_crossing(step, end)
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
    return Crossings(first, median, line, "; ".join(sentences))


def first_crossings(config: Any, series: dict[str, np.ndarray], time_step: np.ndarray) -> dict[str, np.ndarray]:
    """Return the first steps beyond the thresholds, [decay, seed]; NaN if a network never crossed or diverged.

    "collapsed" is searched from "fitted" on, because features may be close to each other at the start too; "delay" is
    the difference.
    """
    times = np.asarray(time_step, np.float32)
    generalised = np.asarray(first_cross(times, series["test_accuracy"], config.test_threshold))
    fitted = np.asarray(first_cross(times, series["train_accuracy"], config.accuracy_threshold))
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


def crossing_table(weight_decays: tuple[float, ...], crossings: Crossings) -> list[list[str]]:
    """Return a header, and a row per weight decay: medians with 90 % intervals."""
    rows = [
        ["weight decay", "fitted at", "generalised", "collapsed", "90 % interval", "never", "delay", "90 % interval"]
    ]
    for index, (decay, diverged) in enumerate(zip(weight_decays, crossings.first["diverged"], strict=True)):
        if diverged.all():
            rows.append([f"{decay:g}", *["all diverged", "", "", "", "", "", ""]])
            continue
        shown = {name: f"{median[index, 0]:.0f}" for name, median in crossings.median.items()}
        # No time is negative.
        spread = {name: f"{max(m[index, 1], 0.0):.0f} to {m[index, 2]:.0f}" for name, m in crossings.median.items()}
        never = f"{int(np.isnan(crossings.first['collapsed'][index, ~diverged]).sum())} of {int((~diverged).sum())}"
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
    seconds: dict[str, float],
    member: Any = None,
) -> Results:
    """Return results of flat series [members, time]; `diverged_at` is None for a running sweep."""
    grid, steps = (len(config.weight_decays), len(config.seeds)), np.asarray(steps)
    # Numbers of a network that is not finite may look plausible, such as the accuracy of the first class.
    finite = np.isfinite(flat["train_loss"])
    if diverged_at is None:  # the first observation that is not finite
        diverged_at = np.where(finite.all(-1), -1, steps[np.argmin(finite, -1)])
    flat = {name: np.where(finite, values, np.nan) for name, values in flat.items()}
    shaped = {name: leaf.reshape(*grid, -1) for name, leaf in flat.items()}
    expensive = {name for name in shaped if name.startswith(("nhsic", "mi_"))}
    series = {name: leaf for name, leaf in shaped.items() if name not in expensive}
    measured = np.isin(steps, config.information_steps())
    return Results(
        config=config,
        data=data,
        series=series,
        time_step=steps,
        information={name: leaf[:, :, measured] for name, leaf in shaped.items() if name in expensive},
        information_step=steps[measured],
        margins={name: np.asarray(leaf).reshape(*grid, *leaf.shape[1:]) for name, leaf in margins.items()},
        crossings=crossings(config, series, steps),
        diverged_at=np.asarray(diverged_at).reshape(grid),
        seconds=seconds,
        member=member,
    )


def series_of(results: Results, name: str, weight_decay: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and the values of one curve.

    Args:
        results: Value of `compute`.
        name: A name in `series` or `information`.
        weight_decay: A weight decay of the configuration.
        seed: A seed of the configuration.

    Returns:
        Two arrays [time].

    Raises:
        ValueError: If there is no such series or network.
    """
    known = {**results.series, **results.information}
    if name not in known:
        fail("name", f"be one of {', '.join(sorted(known))}", name)
    decays, seeds = results.config.weight_decays, results.config.seeds
    if weight_decay not in decays or seed not in seeds:
        wanted = f"be of a network that was trained: weight decay in {decays}, seed in {seeds}"
        fail("weight_decay, seed", wanted, f"weight decay {weight_decay:g}, seed {seed}")
    steps = results.time_step if name in results.series else results.information_step
    return steps, known[name][decays.index(weight_decay), seeds.index(seed)]
