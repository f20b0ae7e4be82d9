"""Loss along the line between two networks."""

from collections.abc import Callable
from itertools import combinations
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import check_choice, check_count, check_takes, fail, fail_kind
from dissociation._core.conversion import as_examples
from dissociation._core.results import printed
from dissociation._core.types import PRNGKey, Scalar
from dissociation._core.validation import validated
from dissociation.models._program import called
from dissociation.rewrites._groups import NeuronGroup
from dissociation.rewrites._matching import Matching, check_alike, match_weights
from dissociation.similarity._inference import MemberInterval, member_interval
from dissociation.training._members import count, member


@validated
def interpolate(a: Any, b: Any, share: Scalar) -> Any:
    """Return (1 - share) a + share b, array by array.

    Args:
        a: A network.
        b: A network with its neurons in the order of a (`Matching.apply`).
        share: Weight of b, from 0 to 1; may be traced.

    Returns:
        The interpolated network. Recompute statistics of batch normalisation with `renormalised`.
    """
    check_alike(a, b)
    arrays, rest = eqx.partition(a, eqx.is_inexact_array)
    others = eqx.filter(b, eqx.is_inexact_array)
    share = jnp.asarray(share, float)

    def between(one: Array, other: Array) -> Array:
        own = share.astype(jnp.asarray(one).dtype)
        return (1 - own) * one + own * other

    return eqx.combine(jax.tree.map(between, arrays, others), rest)


class Barrier(NamedTuple):
    """Loss along the line between two networks.

    Attributes:
        height: Largest excess over the line between the losses at both ends, not negative.
        losses: Loss at each point, [points].
        shares: Weight of the second network at each point, from 0 to 1, [points].
    """

    height: Float[Array, ""]
    losses: Float[Array, " points"]
    shares: Float[Array, " points"]

    __repr__ = printed


@validated
def barrier(loss: Callable[[Any], Array], a: Any, b: Any, *, num_points: int = 11) -> Barrier:
    """Return max_t L((1 - t) a + t b) - ((1 - t) L(a) + t L(b)), with the losses along the line.

    Args:
        loss: Function from a network to a real number.
        a: A network.
        b: A network of the same structure.
        num_points: Points on the line, ends included; at least 3.

    References:
        Frankle et al. (2020), Linear mode connectivity and the lottery ticket hypothesis.
    """
    shares = jnp.linspace(0.0, 1.0, check_count("num_points", num_points, minimum=3))
    found = eqx.filter_eval_shape(loss, a)
    if (
        not hasattr(found, "dtype")
        or found.shape != ()
        or jnp.issubdtype(found.dtype, jnp.complexfloating)
    ):
        fail_kind("loss", "return a single real number", found)
    # One point after another bounds the memory.
    losses = jax.lax.map(lambda share: jnp.asarray(loss(interpolate(a, b, share)), float), shares)
    excess = losses - ((1 - shares) * losses[0] + shares * losses[-1])
    return Barrier(jnp.max(excess), losses, shares)


class Barriers(NamedTuple):
    """Barriers between all pairs of members; both matrices are symmetric with zero diagonal.

    Attributes:
        before: Barriers of the networks as they are, [members, members].
        after: Barriers after matching, [members, members].
        matchings: Matching of j with i, for every pair i < j.
    """

    before: np.ndarray
    after: np.ndarray
    matchings: dict[tuple[int, int], Matching]

    def __repr__(self) -> str:
        pairs = np.triu_indices(len(self.after), 1)
        means = ", ".join(
            f"{name}={getattr(self, name)[pairs].mean():.4g}" for name in ("before", "after")
        )
        return f"Barriers({len(pairs[0])} pairs of {len(self.after)} members, means {means})"

    def interval(self, of: str = "after", *, level: float = 0.9) -> MemberInterval:
        """Return the mean barrier over all pairs of members, with its jackknife interval.

        The interval is that of `similarity.member_interval`, which leaves out one member at a time.

        Args:
            of: Barriers to average: "after" matching, "before" matching, or "fall", by which
                matching lowers each pair's barrier.
            level: Coverage, between 0 and 1.

        Raises:
            ValueError: If there are fewer than three members, `of` is unknown or `level` is out of
                range.
        """
        check_choice("of", of, ("after", "before", "fall"))
        if len(self.after) < 3:
            fail("models", "be at least 3 members for an interval", len(self.after))
        if of == "fall":
            return member_interval(self.before - self.after, level=level)
        return member_interval(getattr(self, of), level=level, bounds=(0.0, np.inf))


@validated
def barriers(
    loss: Callable[[Any], Array],
    models: Any,
    groups: dict[str, NeuronGroup],
    *,
    num_points: int = 11,
    num_starts: int = 1,
    key: PRNGKey | None = None,
) -> Barriers:
    """Return barriers between all pairs of members, before and after weight matching.

    Args:
        loss: Function from one network to a number.
        models: Stacked networks, members first.
        groups: Groups of one member.
        num_points: See `barrier`.
        num_starts: See `match_weights`.
        key: See `match_weights`.

    Raises:
        ValueError: If there are fewer than two members.
    """
    number = count(models)
    if number < 2:
        fail("models", "be two members or more", number)
    parts = [member(models, index) for index in range(number)]
    before, after = np.zeros((2, number, number))
    matchings = {}
    for i, j in combinations(range(number), 2):
        found = matchings[i, j] = match_weights(
            parts[i], parts[j], groups, num_starts=num_starts, key=key
        )
        before[i, j] = before[j, i] = _height(loss, parts[i], parts[j], num_points)
        after[i, j] = after[j, i] = _height(
            loss, parts[i], found.apply(parts[j], groups), num_points
        )
    return Barriers(before, after, matchings)


# Compiled once for all pairs.
@eqx.filter_jit
def _height(loss: Callable[[Any], Array], a: Any, b: Any, num_points: int) -> Array:
    return barrier(loss, a, b, num_points=num_points).height


@validated
def renormalised(model: Any, state: Any, inputs: Any) -> Any:
    """Return the state of a network with batch normalisation statistics recomputed on all examples at once.

    Interpolated weights need new means and variances. Other layers run in inference mode.

    Args:
        model: A network with `eqx.nn.BatchNorm`, in any mode.
        state: `eqx.nn.State` of the network, not changed.
        inputs: Examples, samples first.

    Raises:
        TypeError: If the network does not accept the examples.
        ValueError: If the network has no batch normalisation.

    References:
        Jordan et al. (2023), REPAIR: renormalizing permuted activations for interpolation repair.
    """
    is_norm = lambda part: isinstance(part, eqx.nn.BatchNorm)  # noqa: E731
    norms = [part for part in jax.tree.leaves(model, is_leaf=is_norm) if is_norm(part)]
    if not norms:
        fail("model", "have batch normalisations", "none")
    leaves, tree = jax.tree.flatten(state)
    state = jax.tree.unflatten(tree, leaves)  # the caller's state stays usable
    for norm in norms:
        # A first batch sets running statistics instead of averaging with old ones.
        if norm.ema_state_index is not None:
            state = state.set(norm.ema_first_time_index, jnp.array(True))
        else:
            zeros = jax.tree.map(jnp.zeros_like, state.get(norm.batch_state_index))
            state = state.set(norm.batch_counter, jnp.zeros_like(state.get(norm.batch_counter)))
            state = state.set(norm.batch_state_index, zeros)

    def trained(part: Any) -> Any:
        if not is_norm(part):
            return part
        # The name of the axis of `vmap` below, whatever the model was trained with.
        return eqx.tree_at(
            lambda norm: norm.axis_name, eqx.nn.inference_mode(part, False), "samples"
        )

    training = jax.tree.map(trained, eqx.nn.inference_mode(model), is_leaf=is_norm)
    inputs = as_examples("inputs", inputs, finite=True)
    run = jax.vmap(
        lambda x, s: training(x, s)[1], in_axes=(0, None), out_axes=None, axis_name="samples"
    )
    check_takes(
        "model", lambda x: called((model, state), x), jax.tree.map(lambda part: part[0], inputs)
    )
    return eqx.filter_jit(run)(inputs, state)
