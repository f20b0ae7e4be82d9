"""From trajectories to what the estimators read: pairs (x_t, x_{t+lag}), and second moments that merge.

`lagged_pairs` never makes a pair across the boundary of two trajectories. `Moments` hold everything that a linear
estimator needs from data larger than memory; covariances are kept as their QR factors, which do not square the
condition number.
"""

from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from dissociation.checks import check_count, check_finite, check_ndim, check_same_length, fail, is_traced
from dissociation.linalg import product


class Pairs(NamedTuple):
    """States and their successors.

    Attributes:
        x: What the state was: [n, ...].
        y: What it became, one lag later: [n, ...].
    """

    x: Array
    y: Array


def lagged_pairs(
    trajectories: Array | np.ndarray | Sequence[Array | np.ndarray],
    lag: int | Int[Array | np.ndarray, ""] = 1,
    *,
    max_lag: int | None = None,
) -> Pairs:
    """Pairs (x_t, x_{t+lag}) of one or of many trajectories.

    Args:
        trajectories: One trajectory [time, ...], or a list of them, of any lengths but of one state shape. For
            trajectories of equal length in one array [trajectories, time, ...] pass `list(array)`, or map over the
            first axis with `jax.vmap` to fit one operator to each.
        lag: Steps between the two members of a pair, at least 1.
        max_lag: With it `lag` may be traced, up to this number (beyond it means as much as it), so that lags can be
            swept by `jax.vmap`: every trajectory gives the pairs of its first time - max_lag states, whatever the lag.

    Returns:
        All pairs, trajectory after trajectory, each in the order of time.

    Raises:
        ValueError: If a trajectory has no pair at this lag, `lag` is known and out of range, state shapes differ, or
            known data are not finite.
        TypeError: If `lag` is no Python integer and there is no `max_lag`.

    References:
        Wu and Noe (2020), Variational approach for learning Markov processes from time series data, section 2.

    >>> lagged_pairs([np.arange(4.0), np.arange(10.0, 12.0)]).y
    Array([ 1.,  2.,  3., 11.], dtype=float32)
    >>> jax.vmap(lambda lag: lagged_pairs(np.arange(5.0), lag, max_lag=3).y)(jnp.asarray([1, 3]))
    Array([[1., 2.],
           [3., 4.]], dtype=float32)
    """
    if max_lag is None:
        steps = longest = check_count("lag", lag, minimum=1)
    else:
        longest = check_count("max_lag", max_lag, minimum=1)
        steps = lag if is_traced(lag) else check_count("lag", np.asarray(lag).item(), minimum=1)
        if not is_traced(lag) and steps > longest:
            fail("lag", f"be at most `max_lag` ({longest})", lag)
    many = [trajectories] if isinstance(trajectories, Array | np.ndarray) else list(trajectories)
    if not many:
        fail("trajectories", "hold at least one trajectory", "none")
    for index, trajectory in enumerate(many):
        which = f"trajectories[{index}]" if len(many) > 1 else "trajectories"
        if np.ndim(trajectory) < 1:
            fail(which, "have a time axis", f"shape {np.shape(trajectory)}")
        if np.shape(trajectory)[0] <= longest:
            fail(which, f"be longer than the lag ({longest})", f"{np.shape(trajectory)[0]} samples", "Shorten the lag")
        if np.shape(trajectory)[1:] != np.shape(many[0])[1:]:
            fail(which, f"have states of shape {np.shape(many[0])[1:]}", np.shape(trajectory)[1:])
        check_finite(which, trajectory)
    arrays = [jnp.asarray(trajectory) for trajectory in many]
    later = [lax.dynamic_slice_in_dim(a, steps, a.shape[0] - longest) for a in arrays]
    return Pairs(jnp.concatenate([a[:-longest] for a in arrays]), jnp.concatenate(later))


class Observed(NamedTuple):
    """Pairs and an observable of the successors, checked.

    Attributes:
        x: [n, d].
        y: [n, d].
        observable: Its entries in one row, [n, o].
        shape: The shape of one observable.
    """

    x: Array
    y: Array
    observable: Array
    shape: tuple[int, ...]


def checked_pairs(
    x: Array | np.ndarray, y: Array | np.ndarray, observable: Array | np.ndarray | None, columns: str
) -> Observed:
    """What every estimator asks of its data.

    Args:
        x: The states, or features of them.
        y: Their successors.
        observable: What is to be predicted, [n, ...]; default `y`.
        columns: What the second axis holds, for error messages.

    Returns:
        The data as arrays.

    Raises:
        ValueError: If shapes disagree, there are fewer than two pairs, or known data are not finite.
        TypeError: If data are not floating point.
    """
    check_ndim("x", x, 2, f"[samples, {columns}]")
    check_ndim("y", y, 2, f"[samples, {columns}]")
    observable = y if observable is None else observable
    for name, array in (("x", x), ("y", y), ("observable", observable)):
        check_same_length("x", x.shape[0], name, array.shape[0])
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"`{name}` must be floating point, got {array.dtype}.")
        check_finite(name, array)
    if y.shape[1] != x.shape[1]:
        fail("y", f"have the {columns} of `x` ({x.shape[1]})", y.shape[1], "See koopman.pairs.lagged_pairs")
    if x.shape[0] < 2:
        fail("x", "hold at least two pairs", f"shape {x.shape}", "Use a longer trajectory or a shorter lag")
    flat = jnp.asarray(observable).reshape(x.shape[0], -1)
    return Observed(jnp.asarray(x), jnp.asarray(y), flat, tuple(observable.shape[1:]))


class Moments(eqx.Module):
    """Means and second moments of pairs and of an observable of the successors.

    With `center`, moments are about the means and merging accounts for their difference; without, about zero.

    Attributes:
        count: Pairs seen.
        mean_x: [d]. The means are kept either way.
        mean_y: [dy].
        mean_observable: [o].
        root: R with R^T R = sum_i z_i z_i^T for z = (x, y, o) joined, upper triangular: [d + dy + o, d + dy + o].
        center: Whether moments are about the means.
    """

    count: Float[Array, ""]
    mean_x: Float[Array, " d"]
    mean_y: Float[Array, " dy"]
    mean_observable: Float[Array, " o"]
    root: Float[Array, "all all"]
    center: bool = eqx.field(static=True)

    @property
    def widths(self) -> tuple[int, int, int]:
        """d, dy and o."""
        return self.mean_x.shape[0], self.mean_y.shape[0], self.mean_observable.shape[0]


def moments(
    x: Float[Array | np.ndarray, "n d"],
    y: Float[Array | np.ndarray, "n dy"],
    *,
    observable: Float[Array | np.ndarray, "n o"] | None = None,
    center: bool = False,
) -> Moments:
    """Moments of pairs that are in memory.

    Args:
        x: Features of the states.
        y: Features of their successors.
        observable: What is to be predicted, at the successors' times; default `y`.
        center: Whether moments are about the means.

    Returns:
        The moments. `merge_moments` adds those of more pairs, `scan_moments` goes through batches.

    Raises:
        ValueError: If lengths disagree, there is no pair, or known data are not finite (the error names the row).
    """
    observable = y if observable is None else observable
    for name, array in (("x", x), ("y", y), ("observable", observable)):
        check_same_length("x", x.shape[0], name, array.shape[0])
        check_finite(name, array)
    if x.shape[0] < 1:
        fail("x", "hold at least one pair", f"shape {x.shape}")
    x, y, observable = jnp.asarray(x), jnp.asarray(y), jnp.asarray(observable)
    mean_x, mean_y, mean_o = jnp.mean(x, 0), jnp.mean(y, 0), jnp.mean(observable, 0)
    if center:
        x, y, observable = x - mean_x[None], y - mean_y[None], observable - mean_o[None]
    return Moments(
        count=jnp.asarray(x.shape[0], x.dtype),
        mean_x=mean_x,
        mean_y=mean_y,
        mean_observable=mean_o,
        root=gram_root(jnp.concatenate([x, y, observable], 1)),
        center=center,
    )


def merge_moments(first: Moments, second: Moments) -> Moments:
    """The moments of two sets of pairs together.

    About means, R of both is the factor of [R_1; R_2; sqrt(n_1 n_2 / n) (mean_1 - mean_2)] (Chan et al. 1983).

    Args:
        first: Moments of some pairs.
        second: Moments of others, of the same widths.

    Returns:
        Moments of all.

    Raises:
        ValueError: If only one of the two is centred, or widths differ.

    References:
        Chan, Golub and LeVeque (1983), Algorithms for computing the sample variance, eq. 2.1.
    """
    if first.center != second.center:
        fail("second", f"be {'' if first.center else 'un'}centred as `first` is", "the other kind")
    if first.widths != second.widths:
        fail("second", f"have the widths of `first`, {first.widths}", second.widths)
    count = first.count + second.count
    share = second.count / count
    weight = jnp.sqrt(first.count * share) if first.center else jnp.zeros_like(count)
    steps = [getattr(second, name) - getattr(first, name) for name in ("mean_x", "mean_y", "mean_observable")]
    row = weight * jnp.concatenate(steps)
    return Moments(
        count=count,
        mean_x=first.mean_x + share * steps[0],
        mean_y=first.mean_y + share * steps[1],
        mean_observable=first.mean_observable + share * steps[2],
        root=gram_root(jnp.concatenate([first.root, second.root, row[None]])),
        center=first.center,
    )


def scan_moments(
    x: Float[Array | np.ndarray, "batches n d"],
    y: Float[Array | np.ndarray, "batches n dy"],
    *,
    observable: Float[Array | np.ndarray, "batches n o"] | None = None,
    center: bool = False,
) -> Moments:
    """Moments of stacked batches, one batch at a time in a compiled loop.

    Args:
        x: Features of the states.
        y: Features of their successors.
        observable: What is to be predicted; default `y`.
        center: Whether moments are about the means.

    Returns:
        The same as `moments` of all rows, up to rounding. Beside the stacked rows themselves it takes the memory of one
        batch; for data that do not fit in memory, merge `moments` of what is read with `merge_moments`.

    Raises:
        ValueError: As `moments`; the error names the batch and the row.
    """
    observable = y if observable is None else observable
    for name, array in (("x", x), ("y", y), ("observable", observable)):
        check_finite(name, array)
    data = jnp.asarray(x), jnp.asarray(y), jnp.asarray(observable)

    def one(batch: tuple[Array, Array, Array]) -> Moments:
        return moments(batch[0], batch[1], observable=batch[2], center=center)

    first = one(jax.tree.map(lambda leaf: leaf[0], data))
    rest = jax.tree.map(lambda leaf: leaf[1:], data)
    return lax.scan(lambda so_far, batch: (merge_moments(so_far, one(batch)), None), first, rest)[0]


@jax.custom_jvp
def gram_root(x: Float[Array, "n d"]) -> Float[Array, "d d"]:
    """The upper triangular R with R^T R = x^T x, by QR.

    Only R^T R has a meaning, so the tangent dR is any with R^T dR + dR^T R = d(x^T x); the one taken here stays finite
    where the rank of x falls short.
    """
    missing = max(0, x.shape[1] - x.shape[0])
    return jnp.linalg.qr(jnp.pad(x, ((0, missing), (0, 0))), mode="r")


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
