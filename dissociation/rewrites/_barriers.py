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
from dissociation.rewrites._network_matching import Matching, check_alike, match_weights
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
    arrays, static = eqx.partition(a, eqx.is_inexact_array)
    arrays_of_b = eqx.filter(b, eqx.is_inexact_array)
    share = jnp.asarray(share, float)

    def between(x, y):
        weight = share.astype(jnp.asarray(x).dtype)
        return (1 - weight) * x + weight * y

    return eqx.combine(jax.tree.map(between, arrays, arrays_of_b), static)


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
    output = eqx.filter_eval_shape(loss, a)
    is_number = hasattr(output, "dtype") and output.shape == ()
    if not is_number or jnp.issubdtype(output.dtype, jnp.complexfloating):
        fail_kind("loss", "return a single real number", output)

    def loss_at(share):
        return jnp.asarray(loss(interpolate(a, b, share)), float)

    # One point after another bounds the memory.
    losses = jax.lax.map(loss_at, shares)
    line = (1 - shares) * losses[0] + shares * losses[-1]
    return Barrier(jnp.max(losses - line), losses, shares)


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
        before = self.before[pairs].mean()
        after = self.after[pairs].mean()
        return (
            f"Barriers({len(pairs[0])} pairs of {len(self.after)} members, "
            f"means before={before:.4g}, after={after:.4g})"
        )

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
    num_members = count(models)
    if num_members < 2:
        fail("models", "be two members or more", num_members)
    members = [member(models, index) for index in range(num_members)]
    before, after = np.zeros((2, num_members, num_members))
    matchings = {}
    for i, j in combinations(range(num_members), 2):
        first = members[i]
        second = members[j]
        matching = match_weights(first, second, groups, num_starts=num_starts, key=key)
        matchings[i, j] = matching
        before[i, j] = before[j, i] = _height(loss, first, second, num_points)
        matched = matching.apply(second, groups)
        after[i, j] = after[j, i] = _height(loss, first, matched, num_points)
    return Barriers(before, after, matchings)


# Compiled once for all pairs.
@eqx.filter_jit
def _height(loss: Callable[[Any], Array], a: Any, b: Any, num_points: int) -> Array:
    return barrier(loss, a, b, num_points=num_points).height


@validated
def renormalised(model: Any, state: Any, inputs: Any) -> Any:
    """Return a network's state with batch normalisation statistics recomputed on all examples.

    Interpolated weights need new means and variances. All examples are one batch. Other layers run
    in inference mode.

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

    def is_norm(node):
        return isinstance(node, eqx.nn.BatchNorm)

    norms = list(filter(is_norm, jax.tree.leaves(model, is_leaf=is_norm)))
    if not norms:
        fail("model", "have batch normalisations", "none")
    leaves, tree = jax.tree.flatten(state)
    state = jax.tree.unflatten(tree, leaves)  # the caller's state stays usable
    for norm in norms:
        # A first batch sets running statistics instead of averaging with old ones.
        if norm.ema_state_index is not None:
            state = state.set(norm.ema_first_time_index, jnp.array(True))
            continue
        zeros = jax.tree.map(jnp.zeros_like, state.get(norm.batch_state_index))
        state = state.set(norm.batch_counter, jnp.zeros_like(state.get(norm.batch_counter)))
        state = state.set(norm.batch_state_index, zeros)

    def in_training(node):
        if not is_norm(node):
            return node
        node = eqx.nn.inference_mode(node, False)
        # The name of the axis of `vmap` below, whatever the model was trained with.
        return eqx.tree_at(lambda norm: norm.axis_name, node, "samples")

    training = jax.tree.map(in_training, eqx.nn.inference_mode(model), is_leaf=is_norm)
    inputs = as_examples("inputs", inputs, finite=True)
    example = jax.tree.map(lambda array: array[0], inputs)
    check_takes("model", lambda x: called((model, state), x), example)
    run = jax.vmap(
        lambda x, s: training(x, s)[1], in_axes=(0, None), out_axes=None, axis_name="samples"
    )
    return eqx.filter_jit(run)(inputs, state)
