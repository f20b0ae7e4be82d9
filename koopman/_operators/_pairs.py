"""Pairs (x_t, x_{t+lag}) of trajectories, and second moments that merge."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Real

from dissociation._core.checks import check_count, check_finite, fail, fail_kind, is_traced, warn
from dissociation._core.conversion import common_dtype, to_device
from dissociation._core.linalg import product
from dissociation._core.types import Count, InTime
from dissociation._core.validation import validated
from koopman._operators._findings import lost_variance, warn_float32, warn_of

Trajectories = Annotated[
    Real[Array | np.ndarray, "..."] | Sequence[Real[Array | np.ndarray, "..."]], InTime()
]
Placed = TypeVar("Placed")
Given = Array | np.ndarray
Rows = Float[Given, "n d"]

_QUICK_QR = 2**27  # rows times columns squared of a QR in about 0.1 s, as compiling takes


class Pairs(NamedTuple):
    """States and their successors.

    Attributes:
        x: States, [n, ...].
        y: States one lag later, [n, ...].
    """

    x: Array
    y: Array


@validated(empty=("trajectories",))
def lagged_pairs(
    trajectories: Trajectories,
    lag: Count = 1,
    *,
    max_lag: int | None = None,
    trajectory_axis: int | None = None,
    time: Any = None,
    run: Any = None,
    columns: Any = None,
) -> Pairs:
    """Return pairs (x_t, x_{t+lag}) of one or many trajectories.

    Noise on the states makes decay too fast: pass what `delay_embed` returns.

    Args:
        trajectories: One trajectory, [time] or [time, d]; a list of trajectories [time, ...] of any
            lengths and one state shape, such as `[images]`; or with `trajectory_axis` one array of
            equally long ones. Lists of numbers or of rows of numbers are one trajectory. A frame is
            one trajectory if its index has even steps, and one per run if its index is (run, time).
            Columns that rise as clocks do, or that may label runs, raise an error. An array of
            xarray has a dimension "time".
        lag: Steps from x to y, at least 1.
        max_lag: Largest lag. With it `lag` may be traced, as in a `jax.vmap` over lags, and each
            trajectory gives the pairs of its first time - max_lag states. Successors, then floating
            point, are NaN at a lag out of range.
        trajectory_axis: Axis of trajectories in the array, 0 for `koopman.datasets`; the first
            other axis is time.
        time: Column, index level or dimension of times of a frame. Rows are sorted by it within
            runs.
        run: Column, index level or dimension that labels runs, or a list of them.
        columns: Columns that are states; by default all that are not named.

    Returns:
        All pairs, by trajectory and time.

    Warns:
        UserWarning: If trajectories without a pair at this lag are skipped.

    Raises:
        ValueError: If an array has three axes or more and no `trajectory_axis`, no trajectory has a
            pair at this lag, or known data are not finite.

    References:
        Wu and Noe (2020), see `vamp_loss`, section 2.

    >>> lagged_pairs([jnp.arange(4.0), jnp.arange(10.0, 12.0)]).y
    Array([ 1.,  2.,  3., 11.], dtype=float32)
    >>> lagged_pairs(jnp.arange(6.0).reshape(2, 3), trajectory_axis=0).y
    Array([1., 2., 4., 5.], dtype=float32)
    >>> jax.vmap(lambda lag: lagged_pairs(jnp.arange(5.0), lag, max_lag=3).y)(jnp.asarray([1, 3]))
    Array([[1., 2.],
           [3., 4.]], dtype=float32)
    """
    if max_lag is None:
        steps = longest = check_count("lag", lag, minimum=1)
    else:
        longest = check_count("max_lag", max_lag, minimum=1)
        steps = lag if is_traced(lag) else check_count("lag", lag, minimum=1, maximum=longest)
    stacks = _stacked(
        "trajectories",
        trajectories,
        trajectory_axis,
        longest,
        f"the lag ({longest})",
        "Shorten the lag",
    )
    x, y = cut(stacks, steps, longest)
    if is_traced(steps):
        if not jnp.issubdtype(y.dtype, jnp.floating):
            fail_kind("trajectories", "be floating point where `lag` is traced", y.dtype)
        y = jnp.where((steps >= 1) & (steps <= longest), y, jnp.nan)
    return Pairs(x, y)


def cut(stacks: list[Any], steps: Any, longest: int) -> Pairs:
    """Return pairs at a lag `steps` of at most `longest` of stacked trajectories [trajectories, time, ...]."""
    if is_traced(steps) or not all(isinstance(stack, np.ndarray) for stack in stacks):
        return Pairs(*_cut_all(stacks, steps, longest))
    parts = (
        [_joined(s[:, at : at + s.shape[1] - longest]) for s in stacks] for at in (0, int(steps))
    )
    return Pairs(*(_placed(np.concatenate(part)) for part in parts))


@partial(jax.jit, static_argnames="longest")
def _cut_all(stacks: list[Array], steps: Array, longest: int) -> tuple[Array, Array]:
    """Return x and y of pairs at a traced lag `steps` of at most `longest`."""
    seconds = [_joined(lax.dynamic_slice_in_dim(s, steps, s.shape[1] - longest, 1)) for s in stacks]
    return jnp.concatenate([_joined(stack[:, :-longest]) for stack in stacks]), jnp.concatenate(
        seconds
    )


@validated(empty=("trajectory",))
def delay_embed(
    trajectory: Trajectories,
    num_delays: int,
    *,
    stride: int = 1,
    trajectory_axis: int | None = None,
    time: Any = None,
    run: Any = None,
    columns: Any = None,
) -> Real[Array, "*trajectories rows features"] | list[Real[Array, "_ features"]]:
    """Return the rows (x_t, x_{t - s}, ..., x_{t - (q - 1) s}): the Hankel matrix of each trajectory.

    Args:
        trajectory: States in the order of time, in the forms of `lagged_pairs`.
        num_delays: q, states in a row, 1 or more.
        stride: s, steps between them, 1 or more.
        trajectory_axis: Axis of trajectories in the array.
        time: Times of a frame, as in `lagged_pairs`.
        run: Runs of a frame, as in `lagged_pairs`.
        columns: States of a frame, as in `lagged_pairs`.

    Returns:
        [time - (q - 1) s, q d]; row i ends at time i + (q - 1) s. A list of arrays for a list of
        trajectories, and a further first axis with `trajectory_axis`.

    Warns:
        UserWarning: If trajectories too short for one row are skipped.

    Raises:
        ValueError: If every trajectory is too short.

    References:
        Takens (1981), Detecting strange attractors in turbulence. Brunton et al. (2017), Chaos as
        an intermittently forced linear system.

    >>> delay_embed(jnp.arange(4.0), 3)
    Array([[2., 1., 0.],
           [3., 2., 1.]], dtype=float32)
    """
    count, step = (
        check_count("num_delays", num_delays, minimum=1),
        check_count("stride", stride, minimum=1),
    )
    reach = (count - 1) * step
    stacks = _stacked(
        "trajectory", trajectory, trajectory_axis, reach, f"(num_delays - 1) * stride ({reach})"
    )
    # One gather with static indices: slices compile a program for each start and length.
    places = [
        np.arange(reach, stack.shape[1])[:, None] - step * np.arange(count) for stack in stacks
    ]
    rows = [
        stack[:, at].reshape(len(stack), len(at), -1)
        for stack, at in zip(stacks, places, strict=True)
    ]
    rows = [_placed(row if trajectory_axis is not None else row[0]) for row in rows]
    return rows[0] if isinstance(trajectory, Array | np.ndarray) else rows


def _stacked(
    name: str, trajectories: Any, axis: int | None, longest: int, reach: str, advice: str = ""
) -> list[Any]:
    """Return checked trajectories in stacks of equal length, [trajectories, time, ...] each, of one dtype."""
    several = not isinstance(trajectories, Array | np.ndarray)
    arrays = list(trajectories) if several else [trajectories]
    if several and axis is not None:
        fail("trajectory_axis", "be None for a list of trajectories", axis)
    names = [f"{name}[{index}]" for index in range(len(arrays))]
    for which, array in zip(names if several else [name], arrays, strict=True):
        check_finite(which, array)
    warn_float32(*arrays)
    dtype, known = common_dtype(names, arrays), all(map(_on_host, arrays))
    # NumPy if possible: slices of JAX's arrays compile a program per start and length.
    arrays = [(np if known else jnp).asarray(array, dtype) for array in arrays]
    stacks = [array[None] for array in arrays] if several else [_one_stack(name, arrays[0], axis)]
    for which, stack in zip(names if len(stacks) > 1 else [name], stacks, strict=True):
        if stack.ndim < 2:
            fail(which, "have a time axis", f"shape {stack.shape[1:]}")
        if stack.shape[2:] != stacks[0].shape[2:]:
            fail(which, f"have states of shape {stacks[0].shape[2:]}", stack.shape[2:])
    kept = [stack for stack in stacks if stack.shape[1] > longest]
    if not kept:
        most = max(stack.shape[1] for stack in stacks)
        fail(
            name,
            f"be longer than {reach}",
            f"{most} samples{' at most' if len(stacks) > 1 else ''}",
            advice,
        )
    if len(kept) < len(stacks):
        skipped = len(stacks) - len(kept)
        warn(
            f"Skipped {skipped} of {len(stacks)} trajectories that are not longer than {reach}.",
            UserWarning,
        )
    return kept


def _on_host(array: Array | np.ndarray) -> bool:
    """Return True if NumPy can read an array and the result may be placed by default, without changing the device."""
    if is_traced(array):
        return False
    known = isinstance(array, np.ndarray)
    return known or (
        not array.committed and all(device.platform == "cpu" for device in array.devices())
    )


def _placed(array: Array | np.ndarray) -> Array:
    """Return a host array as a JAX array."""
    # `jnp.asarray` would compile a program for each shape.
    return jax.device_put(array) if isinstance(array, np.ndarray) else array


def _one_stack(name: str, array: Any, axis: int | None) -> Any:
    if axis is None:
        if array.ndim > 2:
            advice = (
                "Pass trajectory_axis=0 for [trajectories, time, ...], or [array] for one "
                "trajectory [time, ...]"
            )
            fail(
                name, "name the axis of trajectories if of three axes or more", array.shape, advice
            )
        return array[None]
    if array.ndim < 2 or not -array.ndim <= axis < array.ndim:
        fail(
            "trajectory_axis",
            f"be an axis of `{name}`, with another for time",
            f"{axis} of {array.shape}",
        )
    return (np if isinstance(array, np.ndarray) else jnp).moveaxis(array, axis, 0)


def _joined(stack: Any) -> Any:
    return stack.reshape(-1, *stack.shape[2:])


def checked_pairs(
    x: Given, y: Given, observable: Given | None, place: Callable[[Any], Placed]
) -> tuple[Placed, Placed, Placed, tuple[int, ...]]:
    """Return checked x [n, d], y [n, d], the observable (default: y) as [n, o], and the shape of one observable."""
    for name, array in (("x", x), ("y", y), ("observable", observable)):
        if array is not None:
            check_finite(name, array)
    observable = y if observable is None else observable
    if x.shape[0] < 2:
        fail(
            "x",
            "hold at least two pairs",
            f"shape {x.shape}",
            "Use a longer trajectory or a shorter lag",
        )
    warn_float32(x, y, observable)
    return (
        place(x),
        place(y),
        place(observable.reshape(x.shape[0], -1)),
        tuple(observable.shape[1:]),
    )


def as_known(array: Array | np.ndarray) -> Array | np.ndarray:
    """Return an array on the host as NumPy's, in JAX's dtype, to avoid compilation."""
    return (
        np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
        if _on_host(array)
        else to_device(array)
    )


def few_rows(*parts: Array | np.ndarray) -> tuple[Array, ...]:
    """Return as many rows as columns with the same products x^T x, x^T y, ...; JAX's or large arrays unchanged."""
    # Every number of rows then runs the same compiled programs. The QR of large arrays takes longer
    # than compiling.
    number, width = len(parts[0]), sum(part.shape[1] for part in parts)
    if (
        not all(isinstance(part, np.ndarray) for part in parts)
        or max(number, width) * width**2 > _QUICK_QR
    ):
        return tuple(map(to_device, parts))
    rows = np.zeros((max(number, width), width))
    np.concatenate(parts, 1, out=rows[:number])
    rows = np.linalg.qr(rows, mode="r") if number > width else rows
    columns = np.split(rows, np.cumsum([part.shape[1] for part in parts])[:-1], 1)
    return tuple(
        _placed(some.astype(part.dtype)) for some, part in zip(columns, parts, strict=True)
    )


def default_alpha(trace: Float[Array, ""], rank: Array | int) -> Float[Array, ""]:
    """Return the default regularisation of explicit features, max((k eps)^2, k 2^-52) tr(C_x) with k = `rank`."""
    # In float64 (k eps)^2 alone would let forecasts diverge if few pairs have nearly dependent
    # features. In float32 k eps would suppress directions that predict.
    return jnp.maximum((rank * jnp.finfo(trace.dtype).eps) ** 2, rank * 2.0**-52) * trace


def check_square(name: str, square: float, what: str, dtype: Any) -> None:
    """Raise unless a known second moment and its inverse are in the dtype's range."""
    limits = jnp.finfo(dtype)
    low, high = float(limits.tiny / limits.eps), float(limits.max) * float(limits.eps) ** 0.75
    if not low < square < high:
        wanted = (
            f"have {what} from {low:.0e} to {high:.0e}, with an inverse in the range of "
            f"{limits.dtype}"
        )
        fail(name, wanted, f"{square:.3g}", "Scale the data")


class Moments(eqx.Module):
    """Means and second moments of pairs and of an observable of the successors.

    Attributes:
        count: Number of pairs.
        mean_x: Mean of the states, [d], with or without `center`.
        mean_y: Mean of the successors, [dy].
        mean_observable: Mean of the observable, [o].
        rest: Rounding errors of the count and of the means, joined: [1 + d + dy + o].
        root: R with R^T R = sum_i z_i z_i^T for z = (x, y, o) joined, upper triangular: [d + dy +
            o, d + dy + o].
        center: If True, moments are about the means, else about zero.
    """

    count: Float[Array, ""]
    mean_x: Float[Array, " d"]
    mean_y: Float[Array, " dy"]
    mean_observable: Float[Array, " o"]
    rest: Float[
        Array, " numbers"
    ]  # float32 counts only to 2^24, and a mean far from zero stops at its rounding
    root: Float[Array, "all all"]
    center: bool = eqx.field(static=True)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths d, dy and o."""
        return self.mean_x.shape[0], self.mean_y.shape[0], self.mean_observable.shape[0]

    @property
    def total(self) -> tuple[Array, Array]:
        """Count and means, joined as `rest` is, and `rest`."""
        return jnp.concatenate(
            [self.count[None], self.mean_x, self.mean_y, self.mean_observable]
        ), self.rest


@validated(finite=("x", "y", "observable"))
def moments(
    x: Rows,
    y: Float[Given, "n dy"],
    *,
    observable: Float[Given, "n o"] | None = None,
    center: bool = False,
) -> Moments:
    """Return the moments of pairs in memory.

    Args:
        x: Features of the states, [n, d].
        y: Features of the successors, [n, dy].
        observable: Quantities to predict, at the successors' times, [n, o]. Default: `y`.
        center: If True, moments are about the means.

    Raises:
        ValueError: If known data are not finite (the error names the row).
    """
    return _compiled_moments(*_parts(x, y, observable, center), center)


def _parts(
    x: Given, y: Given, observable: Given | None, center: bool
) -> tuple[Array, Array, Array]:
    """Return x, y and the observable (default: y) as JAX arrays, and warn of rounding."""
    observable = y if observable is None else observable
    warn_float32(x, y, observable)
    if not center:
        warn_of(lost_variance(x))
    return to_device(x), to_device(y), to_device(observable)


def _moments(x: Array, y: Array, observable: Array, center: bool) -> Moments:
    joint = jnp.concatenate([x, y, observable], 1)
    mean, rest = mean_of(joint)
    if center:
        joint = (joint - mean[None]) - rest[None]
    total = jnp.concatenate([jnp.asarray([x.shape[0]], x.dtype), mean])
    rest = jnp.concatenate([jnp.zeros(1, x.dtype), rest])
    return _of_total(total, rest, gram_root(joint), (x.shape[1], y.shape[1]), center)


_compiled_moments = jax.jit(_moments, static_argnames="center")


def _of_total(
    total: Array, rest: Array, root: Array, widths: tuple[int, ...], center: bool
) -> Moments:
    start, middle = 1 + widths[0], 1 + widths[0] + widths[1]
    return Moments(
        total[0], total[1:start], total[start:middle], total[middle:], rest, root, center
    )


def mean_of(x: Rows) -> tuple[Float[Given, " d"], Float[Given, " d"]]:
    """Return the mean of every column, and its rounding error."""
    # The first mean carries the rounding of a large offset; the mean of the remainder does not.
    if isinstance(x, np.ndarray):
        mean = x.mean(0)
        return _sum_of_two(mean, (x - mean[None]).mean(0))
    # By products, because XLA would fuse a division into `_sum_of_two`, and its rounding error
    # would be wrong.
    shares = jnp.full((1, x.shape[0]), 1 / x.shape[0], x.dtype)
    mean = product(shares, x)[0]
    return _sum_of_two(mean, product(shares, x - mean[None])[0])


def _sum_of_two(a: Any, b: Any) -> tuple[Any, Any]:
    """Return a sum and its exact rounding error (Knuth 1969, section 4.2.2, theorem B)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


@validated
def merge_moments(first: Moments, second: Moments) -> Moments:
    """Return the joint moments of two sets of pairs.

    About means, R of both is the factor of [R_1; R_2; sqrt(n_1 n_2 / n) (mean_1 - mean_2)].

    Args:
        first: Moments of some pairs.
        second: Moments of others, of the same widths and `center`.

    References:
        Chan, Golub and LeVeque (1983), Algorithms for computing the sample variance, eq. 2.1.
    """
    if first.center != second.center:
        fail("second", f"be {'' if first.center else 'un'}centred as `first` is", "the other kind")
    if first.widths != second.widths:
        fail("second", f"have the widths of `first`, {first.widths}", second.widths)
    return _merged(first, second)


@jax.jit
def _merged(first: Moments, second: Moments) -> Moments:
    (total, rest), (other, other_rest) = first.total, second.total
    step = (other - total) + (other_rest - rest)
    share = second.count / (first.count + second.count)
    # Means move by a share of their difference, the count by the second count.
    is_count = jnp.arange(total.shape[0]) == 0
    total, lost = _sum_of_two(total, jnp.where(is_count, second.count, share * step))
    total, rest = _sum_of_two(total, lost + rest + jnp.where(is_count, other_rest, 0.0))
    weight = jnp.sqrt(first.count * share) if first.center else jnp.zeros_like(share)
    root = gram_root(jnp.concatenate([first.root, second.root, weight * step[None, 1:]]))
    return _of_total(total, rest, root, first.widths, first.center)


@validated(finite=("x", "y", "observable"))
def scan_moments(
    x: Float[Array | np.ndarray, "batches n d"],
    y: Float[Array | np.ndarray, "batches n dy"],
    *,
    observable: Float[Array | np.ndarray, "batches n o"] | None = None,
    center: bool = False,
) -> Moments:
    """Return the `moments` of stacked batches, one batch at a time in a compiled loop.

    Args:
        x: Features of the states, [batches, n, d].
        y: Features of the successors, [batches, n, dy].
        observable: Quantities to predict, [batches, n, o]. Default: `y`.
        center: If True, moments are about the means.

    Raises:
        ValueError: If known data are not finite (the error names the batch and the row).
    """
    return _scan_moments(_parts(x, y, observable, center), center)


@partial(jax.jit, static_argnames="center")
def _scan_moments(data: tuple[Array, Array, Array], center: bool) -> Moments:
    first = _moments(data[0][0], data[1][0], data[2][0], center)
    others = jax.tree.map(lambda leaf: leaf[1:], data)

    def add(so_far: Moments, batch: tuple[Array, Array, Array]) -> tuple[Moments, None]:
        return _merged(so_far, _moments(*batch, center)), None

    return lax.scan(add, first, others)[0]


@jax.custom_jvp
def gram_root(x: Float[Array, "n d"]) -> Float[Array, "d d"]:
    """Return the upper triangular R with R^T R = x^T x, by QR."""
    return jnp.linalg.qr(jnp.pad(x, ((0, max(0, x.shape[1] - x.shape[0])), (0, 0))), mode="r")


# The tangent dR has R^T dR + dR^T R = d(x^T x), and is finite if x is rank-deficient, unlike that
# of QR.
@gram_root.defjvp
def _gram_root_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    root = gram_root(x)
    left, sizes, right = jnp.linalg.svd(root)
    half = product(product(right, product(x.T, dx)), right.T)
    squares = sizes[:, None] ** 2 + sizes[None] ** 2
    kept = squares > (sizes.shape[0] * jnp.finfo(x.dtype).eps * sizes[0]) ** 2
    factor = jnp.where(kept, sizes[:, None] / jnp.where(kept, squares, 1.0), 0.0)
    return root, product(left, product((half + half.T) * factor, right))
