"""Table of growth, frequency and time scale of modes, with intervals and units."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xarray
from jaxtyping import Bool, Float, Int


class RateEstimates(NamedTuple):
    """Rates of modes, a conjugate pair once, in any order.

    Attributes:
        growth: Signed rate of growth per unit of time, [modes].
        growth_low: Lower ends of the intervals, NaN for modes that are not resolved: [modes].
        growth_high: Upper ends, [modes].
        frequency: Cycles per unit of time, 0 or more: [modes].
        frequency_low: Lower ends, [modes].
        frequency_high: Upper ends, [modes].
        share: Fraction of the variance, [modes].
        reason: Reason of every mode that is not resolved, "" for a resolved mode: [modes].
    """

    growth: Float[np.ndarray, " modes"]
    growth_low: Float[np.ndarray, " modes"]
    growth_high: Float[np.ndarray, " modes"]
    frequency: Float[np.ndarray, " modes"]
    frequency_low: Float[np.ndarray, " modes"]
    frequency_high: Float[np.ndarray, " modes"]
    share: Float[np.ndarray, " modes"]
    reason: Sequence[str]


def falling_order(
    share: Float[np.ndarray, " modes"], growth: Float[np.ndarray, " modes"]
) -> Int[np.ndarray, " modes"]:
    """Return the order of modes by falling share, and by falling growth where shares agree."""
    # Shares that differ by rounding alone must not decide.
    return np.lexsort((-growth, -np.round(share, 9)))


def rates_dataset(estimates: RateEstimates, unit: str, level: float) -> xarray.Dataset:
    """Return the table of rates over `mode`, by falling share.

    Args:
        estimates: Rates and ends of their intervals.
        unit: Unit of time, for example "day", or "step".
        level: Probability of the intervals.

    Returns:
        Variables `growth`, `frequency` and `time_scale`, and `_low` and `_high` of them; `share`;
        `resolved`; `reason`. The time scale is -1 / growth, and infinite for a mode that does not
        decay. Ends of intervals are NaN for modes that are not resolved.
    """
    order = falling_order(estimates.share, estimates.growth)
    reason = np.asarray(estimates.reason, str)[order]
    is_resolved = reason == ""
    per_time = {"units": f"1/{unit}"}
    variables = {}
    for name in RateEstimates._fields[:6]:
        values = np.asarray(getattr(estimates, name), float)[order]
        if name.endswith(("_low", "_high")):
            values = np.where(is_resolved, values, np.nan)
        variables[name] = ("mode", values, per_time)
    for end in ("", "_low", "_high"):
        time_scale = _time_scale(variables[f"growth{end}"][1])
        variables[f"time_scale{end}"] = ("mode", time_scale, {"units": unit})
    variables["share"] = ("mode", np.asarray(estimates.share, float)[order])
    variables["resolved"] = ("mode", is_resolved)
    variables["reason"] = ("mode", reason.astype(object))
    coords = {"mode": np.arange(len(order))}
    return xarray.Dataset(variables, coords, {"level": level, "unit": unit})


def _time_scale(growth: Float[np.ndarray, " modes"]) -> Float[np.ndarray, " modes"]:
    """Return -1 / growth, infinite where growth is 0 or more."""
    is_decaying = growth < 0
    decay = np.where(is_decaying, growth, -1.0)
    time_scale = np.where(is_decaying, -1.0 / decay, np.inf)
    return np.where(np.isnan(growth), np.nan, time_scale)


def rates_rows(rates: xarray.Dataset) -> list[list[str]]:
    """Return a table of rates: a head with units, and a row of words per mode."""
    unit = rates.attrs["unit"]
    heads = ["mode", f"growth (1/{unit})", f"frequency (1/{unit})", f"time scale ({unit})", "share"]
    rows = [heads]
    for index in range(rates.sizes["mode"]):
        mode = rates.isel(mode=index)
        cells = [str(index)]
        for name in ("growth", "frequency", "time_scale"):
            cells.append(_with_interval(mode, name))
        cells.append(f"{float(mode.share):.3f}")
        rows.append(cells)
    return rows


def rates_summary(rates: xarray.Dataset) -> str:
    """Return a table of rates as a string with units.

    Args:
        rates: Result of `rates_dataset`, without further dimensions.
    """
    level = rates.attrs["level"]
    rows = rates_rows(rates)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    reasons = ["", *rates.reason.values]
    lines = [f"Rates with {100 * level:.4g} % intervals; {_resolved_words(rates.resolved.values)}."]
    for cells, reason in zip(rows, reasons, strict=True):
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        if reason:
            padded.append(f"not resolved: {reason}")
        lines.append("  ".join(padded))
    return "\n".join(lines)


def _with_interval(mode: xarray.Dataset, name: str) -> str:
    """Return a rate with its interval, in four digits."""
    words = f"{float(mode[name]):.4g}"
    if bool(mode.resolved):
        low = float(mode[f"{name}_low"])
        high = float(mode[f"{name}_high"])
        words = f"{words} [{low:.4g}, {high:.4g}]"
    return words


def _resolved_words(is_resolved: Bool[np.ndarray, " modes"]) -> str:
    return f"{is_resolved.sum()} of {is_resolved.size} modes are resolved"
