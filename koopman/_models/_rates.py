"""Table of growth, frequency and time scale of modes, with intervals and units."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xarray


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

    growth: np.ndarray
    growth_low: np.ndarray
    growth_high: np.ndarray
    frequency: np.ndarray
    frequency_low: np.ndarray
    frequency_high: np.ndarray
    share: np.ndarray
    reason: Sequence[str]


def falling_order(share: np.ndarray, growth: np.ndarray) -> np.ndarray:
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


def _time_scale(growth: np.ndarray) -> np.ndarray:
    """Return -1 / growth, infinite where growth is 0 or more."""
    time_scale = np.full(growth.shape, np.inf)
    np.divide(-1.0, growth, out=time_scale, where=~(growth >= 0))
    return time_scale


def rates_rows(rates: xarray.Dataset) -> list[list[str]]:
    """Return a table of rates: a head with units, and a row of words per mode."""
    unit = rates.attrs["unit"]
    heads = ["mode", f"growth (1/{unit})", f"frequency (1/{unit})", f"time scale ({unit})", "share"]
    rows = [[*heads, "resolved"]]
    for index in range(rates.sizes["mode"]):
        mode = rates.isel(mode=index)
        is_resolved = bool(mode.resolved)
        words = "{:.4g} [{:.4g}, {:.4g}]" if is_resolved else "{:.4g}"
        cells = [str(index)]
        for name in ("growth", "frequency", "time_scale"):
            ends = [float(mode[f"{name}{end}"]) for end in ("", "_low", "_high")]
            cells.append(words.format(*ends))
        reason = "yes" if is_resolved else f"not resolved: {mode.reason.item()}"
        rows.append([*cells, f"{float(mode.share):.3f}", reason])
    return rows


def rates_summary(rates: xarray.Dataset) -> str:
    """Return a table of rates as a string with units.

    Args:
        rates: Result of `rates_dataset`, without further dimensions.
    """
    is_resolved = rates.resolved.values
    words = f"{is_resolved.sum()} of {is_resolved.size} modes are resolved"
    lines = [f"Rates with {100 * rates.attrs['level']:.4g} % intervals; {words}."]
    rows = rates_rows(rates)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for *cells, reason in rows:
        columns = list(map(str.rjust, cells, widths))
        lines.append("  ".join([*columns, reason]))
    return "\n".join(lines)
