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
from koopman._operators._numerics import ratio_or_zero, rounding_unit

Trajectories = Annotated[
    Real[Array | np.ndarray, "..."] | Sequence[Real[Array | np.ndarray, "..."]], InTime()
]
Converted = TypeVar("Converted")
AnyArray = Array | np.ndarray
Rows = Float[AnyArray, "n d"]

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
    steps = lag
    if max_lag is None:
        steps = check_count("lag", lag, minimum=1)
        longest = steps
    else:
        longest = check_count("max_lag", max_lag, minimum=1)
        if not is_traced(lag):
            steps = check_count("lag", lag, minimum=1, maximum=longest)
    reach = f"the lag ({longest})"
    stacks = _stacked(
        "trajectories", trajectories, trajectory_axis, longest, reach, "Shorten the lag"
    )
    pairs = cut(stacks, steps, longest)
    if not is_traced(steps):
        return pairs
    x, y = pairs
    if not jnp.issubdtype(y.dtype, jnp.floating):
        fail_kind("trajectories", "be floating point where `lag` is traced", y.dtype)
    is_in_range = (steps >= 1) & (steps <= longest)
    return Pairs(x, jnp.where(is_in_range, y, jnp.nan))


def cut(stacks: list[Any], steps: Any, longest: int) -> Pairs:
    """Return pairs at a lag `steps` of stacked trajectories [trajectories, time, ...].

    `longest`: Largest lag.
    """
    if is_traced(steps) or not all(isinstance(stack, np.ndarray) for stack in stacks):
        x, y = _cut_all(stacks, steps, longest)
    else:
        x = _cut_on_host(stacks, 0, longest)
        y = _cut_on_host(stacks, int(steps), longest)
    return Pairs(x, y)


def _cut_on_host(stacks: list[np.ndarray], start: int, longest: int) -> Array:
    """Return the joined states from time `start`, all but `longest` states of each trajectory."""
    states = []
    for stack in stacks:
        stop = start + stack.shape[1] - longest
        states.append(_joined(stack[:, start:stop]))
    return _placed(np.concatenate(states))


@partial(jax.jit, static_argnames="longest")
def _cut_all(stacks: list[Array], steps: Array, longest: int) -> tuple[Array, Array]:
    """Return x and y of pairs at a traced lag `steps` of at most `longest`."""
    x = [_joined(stack[:, :-longest]) for stack in stacks]
    y = []
    for stack in stacks:
        length = stack.shape[1] - longest
        y.append(_joined(lax.dynamic_slice_in_dim(stack, steps, length, 1)))
    return jnp.concatenate(x), jnp.concatenate(y)


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
    """Return the rows (x_t, x_{t - s}, ..., x_{t - (q - 1) s}), a trajectory's Hankel matrix.

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
    num_delays = check_count("num_delays", num_delays, minimum=1)
    stride = check_count("stride", stride, minimum=1)
    span = (num_delays - 1) * stride
    reach = f"(num_delays - 1) * stride ({span})"
    stacks = _stacked("trajectory", trajectory, trajectory_axis, span, reach)

    # One gather with static indices: slices compile a program for each start and length.
    embedded = []
    for stack in stacks:
        indices = np.arange(span, stack.shape[1])[:, None] - stride * np.arange(num_delays)
        rows = stack[:, indices].reshape(len(stack), len(indices), -1)
        if trajectory_axis is None:
            rows = rows[0]
        embedded.append(_placed(rows))
    return embedded[0] if isinstance(trajectory, Array | np.ndarray) else embedded


def _stacked(
    name: str, trajectories: Any, axis: int | None, longest: int, reach: str, advice: str = ""
) -> list[Any]:
    """Return checked trajectories in stacks of equal length, of one dtype.

    The shape of a stack is [trajectories, time, ...]. `reach` are words for `longest`.
    """
    is_list = not isinstance(trajectories, Array | np.ndarray)
    arrays = [trajectories]
    names = [name]
    if is_list:
        if axis is not None:
            fail("trajectory_axis", "be None for a list of trajectories", axis)
        arrays = list(trajectories)
        names = [f"{name}[{index}]" for index in range(len(arrays))]
    for array_name, array in zip(names, arrays, strict=True):
        check_finite(array_name, array)
    warn_float32(*arrays)

    # NumPy if possible: slices of JAX's arrays compile a program per start and length.
    dtype = common_dtype(names, arrays)
    numpy = np if all(map(_on_host, arrays)) else jnp
    arrays = [numpy.asarray(array, dtype) for array in arrays]
    stacks = [array[None] for array in arrays] if is_list else [one_stack(name, arrays[0], axis)]
    num_stacks = len(stacks)
    if num_stacks == 1:
        names = [name]
    _check_states(names, stacks)

    long_stacks = [stack for stack in stacks if stack.shape[1] > longest]
    if not long_stacks:
        received = f"{max(stack.shape[1] for stack in stacks)} samples"
        if num_stacks > 1:
            received = f"{received} at most"
        fail(name, f"be longer than {reach}", received, advice)
    num_skipped = num_stacks - len(long_stacks)
    if num_skipped:
        message = f"Skipped {num_skipped} of {num_stacks} trajectories that are not longer than"
        warn(f"{message} {reach}.", UserWarning)
    return long_stacks


def _check_states(names: list[str], stacks: list[Any]) -> None:
    """Raise unless all stacks have a time axis and states of one shape."""
    state_shape = stacks[0].shape[2:]
    for name, stack in zip(names, stacks, strict=True):
        if stack.ndim < 2:
            fail(name, "have a time axis", f"shape {stack.shape[1:]}")
        if stack.shape[2:] != state_shape:
            fail(name, f"have states of shape {state_shape}", stack.shape[2:])


def _on_host(array: AnyArray) -> bool:
    """Return True if NumPy can read an array and its result may have the default device."""
    if is_traced(array):
        return False
    if isinstance(array, np.ndarray):
        return True
    return not array.committed and all(device.platform == "cpu" for device in array.devices())


def _placed(array: AnyArray) -> Array:
    """Return a host array as a JAX array."""
    # `jnp.asarray` would compile a program for each shape.
    return jax.device_put(array) if isinstance(array, np.ndarray) else array


def one_stack(name: str, array: Any, axis: int | None) -> Any:
    if axis is None:
        if array.ndim > 2:
            expected = "name the axis of trajectories if of three axes or more"
            advice = (
                "Pass trajectory_axis=0 for [trajectories, time, ...], or [array] for one "
                "trajectory [time, ...]"
            )
            fail(name, expected, array.shape, advice)
        return array[None]
    if array.ndim < 2 or not -array.ndim <= axis < array.ndim:
        expected = f"be an axis of `{name}`, with another for time"
        fail("trajectory_axis", expected, f"{axis} of {array.shape}")
    numpy = np if isinstance(array, np.ndarray) else jnp
    return numpy.moveaxis(array, axis, 0)


def _joined(stack: Any) -> Any:
    return stack.reshape(-1, *stack.shape[2:])


def checked_pairs(
    x: AnyArray, y: AnyArray, observable: AnyArray | None, convert: Callable[[Any], Converted]
) -> tuple[Converted, Converted, Converted, tuple[int, ...]]:
    """Return checked x [n, d], y [n, d], the observable as [n, o], and its shape without n.

    The observable is y if it is None.
    """
    check_finite("x", x)
    check_finite("y", y)
    if observable is None:
        observable = y
    else:
        check_finite("observable", observable)
    num_pairs = x.shape[0]
    if num_pairs < 2:
        advice = "Use a longer trajectory or a shorter lag"
        fail("x", "hold at least two pairs", f"shape {x.shape}", advice)
    warn_float32(x, y, observable)
    flat = observable.reshape(num_pairs, -1)
    return convert(x), convert(y), convert(flat), tuple(observable.shape[1:])


def as_known(array: AnyArray) -> AnyArray:
    """Return an array on the host as NumPy's, in JAX's dtype, to avoid compilation."""
    if not _on_host(array):
        return to_device(array)
    return np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))


def few_rows(*arrays: AnyArray) -> tuple[Array, ...]:
    """Return as many rows as columns with the same products x^T x, x^T y, ...

    JAX's arrays and large arrays are returned unchanged.
    """
    # Every number of rows then runs the same compiled programs. The QR of large arrays takes longer
    # than compiling.
    num_rows = len(arrays[0])
    widths = [array.shape[1] for array in arrays]
    width = sum(widths)
    size = max(num_rows, width)
    if not all(isinstance(array, np.ndarray) for array in arrays) or size * width**2 > _QUICK_QR:
        return tuple(map(to_device, arrays))

    rows = np.zeros((size, width))
    np.concatenate(arrays, 1, out=rows[:num_rows])
    if num_rows > width:
        rows = np.linalg.qr(rows, mode="r")
    columns = np.split(rows, np.cumsum(widths)[:-1], 1)
    blocks = zip(columns, arrays, strict=True)
    return tuple(_placed(block.astype(array.dtype)) for block, array in blocks)


def default_alpha(trace: Float[Array, ""], rank: Array | int) -> Float[Array, ""]:
    """Return the default regularisation of explicit features.

    It is max((k eps)^2, k 2^-52) tr(C_x) with k = `rank`.
    """
    # In float64 (k eps)^2 alone would let forecasts diverge if few pairs have nearly dependent
    # features. In float32 k eps would suppress directions that predict.
    square = (rank * jnp.finfo(trace.dtype).eps) ** 2
    return jnp.maximum(square, rank * 2.0**-52) * trace


def check_square(name: str, square: float, words: str, dtype: Any) -> None:
    """Raise unless a known second moment and its inverse are in the dtype's range."""
    limits = jnp.finfo(dtype)
    low = float(limits.tiny / limits.eps)
    high = float(limits.max) * float(limits.eps) ** 0.75
    if not low < square < high:
        expected = (
            f"have {words} from {low:.0e} to {high:.0e}, with an inverse in the range of "
            f"{limits.dtype}"
        )
        fail(name, expected, f"{square:.3g}", "Scale the data")


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
    # Float32 counts only to 2^24, and a mean far from zero stops at its rounding.
    rest: Float[Array, " numbers"]
    root: Float[Array, "all all"]
    center: bool = eqx.field(static=True)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths d, dy and o."""
        return self.mean_x.shape[0], self.mean_y.shape[0], self.mean_observable.shape[0]

    @property
    def total(self) -> tuple[Array, Array]:
        """Count and means, joined as `rest` is, and `rest`."""
        sums = [self.count[None], self.mean_x, self.mean_y, self.mean_observable]
        return jnp.concatenate(sums), self.rest


@validated(finite=("x", "y", "observable"))
def moments(
    x: Rows,
    y: Float[AnyArray, "n dy"],
    *,
    observable: Float[AnyArray, "n o"] | None = None,
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
    return _compiled_moments(*_prepared(x, y, observable, center), center)


def _prepared(
    x: AnyArray, y: AnyArray, observable: AnyArray | None, center: bool
) -> tuple[Array, Array, Array]:
    """Return x, y and the observable (default: y) as JAX arrays, and warn of rounding."""
    if observable is None:
        observable = y
    warn_float32(x, y, observable)
    if not center:
        warn_of(lost_variance(x))
    return to_device(x), to_device(y), to_device(observable)


def _moments(x: Array, y: Array, observable: Array, center: bool) -> Moments:
    joint = jnp.concatenate([x, y, observable], 1)
    mean, mean_error = mean_of(joint)
    if center:
        joint = (joint - mean[None]) - mean_error[None]
    count = jnp.asarray([x.shape[0]], x.dtype)
    total = jnp.concatenate([count, mean])
    error = jnp.concatenate([jnp.zeros(1, x.dtype), mean_error])
    widths = (x.shape[1], y.shape[1])
    return _of_total(total, error, gram_root(joint), widths, center)


_compiled_moments = jax.jit(_moments, static_argnames="center")


def _of_total(
    total: Array, error: Array, root: Array, widths: tuple[int, ...], center: bool
) -> Moments:
    end_x = 1 + widths[0]
    end_y = end_x + widths[1]
    return Moments(total[0], total[1:end_x], total[end_x:end_y], total[end_y:], error, root, center)


def mean_of(x: Rows) -> tuple[Float[AnyArray, " d"], Float[AnyArray, " d"]]:
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
    rounded_b = total - a
    error_a = a - (total - rounded_b)
    return total, error_a + (b - rounded_b)


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
        kind = "centred" if first.center else "uncentred"
        fail("second", f"be {kind} as `first` is", "the other kind")
    if first.widths != second.widths:
        fail("second", f"have the widths of `first`, {first.widths}", second.widths)
    return _merged(first, second)


@jax.jit
def _merged(first: Moments, second: Moments) -> Moments:
    total, error = first.total
    second_total, second_error = second.total
    step = (second_total - total) + (second_error - error)
    share = second.count / (first.count + second.count)
    # Means move by a share of their difference, the count by the second count.
    is_count = jnp.arange(total.shape[0]) == 0
    change = jnp.where(is_count, second.count, share * step)
    total, change_error = _sum_of_two(total, change)
    error = change_error + error + jnp.where(is_count, second_error, 0.0)
    total, error = _sum_of_two(total, error)

    weight = jnp.sqrt(first.count * share) if first.center else jnp.zeros_like(share)
    rows = jnp.concatenate([first.root, second.root, weight * step[None, 1:]])
    return _of_total(total, error, gram_root(rows), first.widths, first.center)


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
    return _scan_moments(_prepared(x, y, observable, center), center)


@partial(jax.jit, static_argnames="center")
def _scan_moments(batches: tuple[Array, Array, Array], center: bool) -> Moments:
    x, y, observable = batches
    first = _moments(x[0], y[0], observable[0], center)
    remaining = jax.tree.map(lambda leaf: leaf[1:], batches)

    def add(total: Moments, batch: tuple[Array, Array, Array]) -> tuple[Moments, None]:
        return _merged(total, _moments(*batch, center)), None

    total, _ = lax.scan(add, first, remaining)
    return total


@jax.custom_jvp
def gram_root(x: Float[Array, "n d"]) -> Float[Array, "d d"]:
    """Return the upper triangular R with R^T R = x^T x, by QR."""
    num_missing = max(0, x.shape[1] - x.shape[0])
    padded = jnp.pad(x, ((0, num_missing), (0, 0)))
    return jnp.linalg.qr(padded, mode="r")


# The tangent dR has R^T dR + dR^T R = d(x^T x), and is finite if x is rank-deficient, unlike that
# of QR.
@gram_root.defjvp
def _gram_root_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,) = primals
    (d_x,) = tangents
    root = gram_root(x)
    left_vectors, sizes, right_vectors = jnp.linalg.svd(root)
    half = product(right_vectors, product(x.T, d_x))
    half = product(half, right_vectors.T)
    squares = sizes[:, None] ** 2 + sizes[None] ** 2
    is_kept = squares > (sizes.shape[0] * rounding_unit(x) * sizes[0]) ** 2
    factor = ratio_or_zero(sizes[:, None], squares, is_kept)
    d_root = product((half + half.T) * factor, right_vectors)
    return root, product(left_vectors, d_root)
