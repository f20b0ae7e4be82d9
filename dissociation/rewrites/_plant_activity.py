"""Move a layer's activity towards a pattern while predictions stay."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Int

from dissociation._core.checks import check_known, fail
from dissociation._core.conversion import to_device
from dissociation._core.linalg import product
from dissociation._core.results import printed
from dissociation._core.types import Positive, PRNGKey, Size
from dissociation._core.validation import validated
from dissociation.models._program import function_of
from dissociation.models._representations import representations
from dissociation.rewrites._groups import NeuronGroup, Slot, parameters_of
from dissociation.rewrites._growth import incoming, made_by
from dissociation.rewrites._rewrites import current
from dissociation.training._fitting import fit
from dissociation.training._progress import MeterFactory, Progress
from dissociation.training._records import Save
from dissociation.training._samplers import Epochs
from dissociation.training._state import make_step

OTHER_BATCH = 777
"""Second batch size in which predictions are counted, because rounding differs between sizes."""


class PlantedActivity(NamedTuple):
    """Network whose predictions stay, and whose activity is close to a pattern; see `plant_activity`.

    Attributes:
        model: The network.
        activity: Activity of the group on the shown inputs, [stages, shown, neurons]: before,
            after, and the best one found without the constraint on predictions.
        correlation: Pearson correlation of each with the pattern over all entries, [stages].
        along: Correlation before training and after every pass, [passes + 1].
        changed: Number of changed predictions at these times, [passes + 1].
        kept: Fraction of the change of weights that `model` has: the largest of 1, .99, ... without
            a changed prediction. Below 1 a warning is raised.
    """

    model: Any
    activity: Float[Array, "stages shown neurons"]
    correlation: Float[Array, " stages"]
    along: Float[np.ndarray, " times"]
    changed: Int[np.ndarray, " times"]
    kept: float

    __repr__ = printed


@validated(finite=("inputs", "pattern"))
def plant_activity(
    group: NeuronGroup,
    model: Any,
    inputs: Float[Array | np.ndarray, "inputs ..."],
    pattern: Float[Array | np.ndarray, "shown neurons"],
    *,
    num_passes: Size = 40,
    batch_size: Size = 1000,
    learning_rate: Positive = 3e-3,
    margin: Positive = 0.1,
    penalty: Positive = 0.05,
    key: PRNGKey,
    checkpoint: str | Path | None = None,
    progress: str | MeterFactory | None = None,
) -> PlantedActivity:
    """Move a layer's activity on the first inputs towards a pattern, while the predictions on all inputs stay.

    Incoming weights of the group change, all others stay. Adam maximises the correlation of
    activity and pattern, by an augmented Lagrangian: each input has a multiplier for the constraint
    that its margin, the largest logit minus the next one, is at least half of its first value, but
    no less than .4 and no more than 1 times `margin`. Every step takes a batch, and half as many
    inputs with the largest multipliers. Weights are in whitened coordinates of the layer's inputs.
    The learning rate decays to 2 % by a cosine. If predictions are changed then, up to as many
    passes follow, and at last the change is reduced until no prediction is changed, counted in two
    batch sizes. It is driven by the host, as `training.fit` is.

    Args:
        group: Group of ReLU neurons, made by one matrix and at most one bias, once per input.
        model: Classifier.
        inputs: Examples whose predictions stay, samples first.
        pattern: Pattern on the first inputs, one column per neuron.
        num_passes: Passes over the inputs, before those in which the rate stays at 2 %.
        batch_size: Inputs per step.
        learning_rate: Rate of Adam in whitened coordinates, in units of the root mean square of
            preactivations.
        margin: Largest margin asked for, in units of the mean margin.
        penalty: Weight of squared violations, in units of `margin`.
        key: Random key of the order of inputs.
        checkpoint: File with weights, multipliers and state of the optimiser, from which a run
            resumes; see `training.fit`.
        progress: Meter: "auto", "terminal", a function that opens one, or None.

    Raises:
        ValueError: If the group is not such a one, is never active or was found by a `call`, the
            pattern is constant or has another shape, the model does not return one vector of at
            least two finite logits, or weights overflow.
        TypeError: If an argument is traced.

    References:
        Braun, Grant and Saxe (2025), figure 5. Nocedal and Wright (2006), Numerical Optimization,
        section 17.4.
    """
    check_known(
        "planting is driven by the host", model=model, inputs=inputs, pattern=pattern, key=key
    )
    if group.call is not None:
        fail("group", "be found without `call`", group.name)
    examples = to_device(inputs)
    number, group = len(examples), current(group, model)
    batch_size = min(batch_size, number)
    planting = _planting(group, model, examples, np.asarray(pattern, float))
    labels, margins = planting.predicted(planting.none, examples, batch_size)
    unit = margin * jnp.mean(margins)
    if not unit > 0:
        fail(
            "model",
            "tell classes apart by finite logits",
            f"a mean margin of {float(unit / margin):.3g}",
        )
    if not jnp.any(planting.activity(planting.none) > 0):
        fail(
            "group",
            "have an active neuron on the shown inputs",
            "zeros alone",
            "Gradients are zero there",
        )
    data = examples, labels, jnp.clip(0.5 * margins / unit, 0.4, 1.0), unit
    num_steps = num_passes * -(-number // batch_size)
    rate = optax.cosine_decay_schedule(learning_rate * planting.size, num_steps, alpha=0.02)

    def observe(change: Array, _: Any, step: Array, key: Array) -> dict[str, Array]:
        changed = jnp.sum(planting.predicted(change, examples, batch_size)[0] != labels)
        return {"correlation": planting.correlation(planting.activity(change)), "changed": changed}

    def ended(step: int, records: dict[str, Any]) -> bool:
        return step >= num_steps and int(records["observed"]["changed"][0]) == 0

    found = fit(
        planting.none[None],
        make_step(partial(planting.lagrangian, data, penalty), optax.adam(rate)),
        Epochs(jnp.arange(number), batch_size),
        num_epochs=2 * num_passes,
        aux=jnp.zeros_like(margins)[None],
        save=Save(observe),
        callbacks=[Progress(progress), ended],
        key=key,
        checkpoint=checkpoint,
    )
    fraction, change = 1.0, found.models[0]
    if not jnp.isfinite(change).all():
        fail("learning_rate", "keep the weights finite", learning_rate)
    while fraction and any(
        jnp.any(planting.predicted(fraction * change, examples, size)[0] != labels)
        for size in (batch_size, OTHER_BATCH)
    ):
        fraction = round(fraction - 0.01, 2)
    if fraction < 1:
        told = (
            f"{fraction:g} of the change is kept, because all of it changes predictions. Take "
            "more passes."
        )
        warnings.warn(told, stacklevel=3)
    after, planted = planting.activity(fraction * change), planting.changed(fraction * change)
    _check_activity(group, planted, examples[: len(pattern)], after)
    activity = jnp.stack([planting.activity(planting.none), after, planting.best(after)])
    along, changed = (
        np.asarray(found.history.observed[name])[0] for name in ("correlation", "changed")
    )
    return PlantedActivity(
        planted, activity, jax.vmap(planting.correlation)(activity), along, changed, fraction
    )


def _check_activity(group: NeuronGroup, model: Any, shown: Array, activity: Array) -> None:
    """Raise unless the activity of a group is the one that ReLUs have."""
    known = representations(model, shown).get(group.name, activity[:0])
    if known.shape != activity.shape or not np.allclose(
        known, activity, atol=1e-4 * float(jnp.max(jnp.abs(known)))
    ):
        fail("group", "be of ReLU neurons", group.name)


def _planting(group: NeuronGroup, model: Any, inputs: Array, pattern: np.ndarray) -> "_Planting":
    """Return the problem in whitened coordinates, after checks."""
    if pattern.shape[1] != group.size or len(pattern) > len(inputs):
        fail("pattern", f"have at most {len(inputs)} rows, and {group.size} columns", pattern.shape)
    low, high = pattern.min(), pattern.max()
    if low == high:
        fail("pattern", "not be constant", f"{low} alone")
    # On the host, so that no unit and no constant matters to float32.
    pattern = (pattern - low) / (high - low)
    rows = incoming(group, model, inputs)
    if len(rows) != len(inputs):
        fail("group", "be made once per input", f"{len(rows)} times by {len(inputs)} inputs")
    host = np.asarray(rows, float)
    values, vectors = np.linalg.eigh(host.T @ host / len(host))
    kept = values > 1e-8 * values[-1]
    # Directions of little variance are not magnified in full: they would carry rounding errors.
    whitened = vectors[:, kept] / np.sqrt(values[kept] + 1e-5 * values[-1])
    shown, own = rows[: len(pattern)], parameters_of(model)[0]
    weights = jnp.concatenate(
        [slot.rows(jnp.asarray(own[slot.leaf])) for slot in made_by(group) if slot], 1
    )
    basis = jnp.asarray(whitened, rows.dtype)
    planting = _Planting(
        model, group, basis, shown, product(shown, weights.T), jnp.asarray(pattern, rows.dtype)
    )
    _check_activity(group, model, inputs[: len(pattern)], planting.activity(planting.none))
    return planting


class _Planting(eqx.Module):
    """Network whose incoming weights change by `change` in whitened coordinates, [neurons, coordinates]."""

    model: Any
    group: NeuronGroup = eqx.field(static=True)
    basis: Array  # [features, coordinates]
    shown: Array  # inputs of the layer, [shown, features]
    before: Array  # preactivations, [shown, neurons]
    pattern: Array

    @property
    def slots(self) -> list[Slot]:
        return [slot for slot in made_by(self.group) if slot is not None]

    @property
    def size(self) -> float:
        return float(jnp.sqrt(jnp.mean(self.before**2)))

    @property
    def none(self) -> Array:
        return jnp.zeros((self.before.shape[1], self.basis.shape[1]), self.basis.dtype)

    def changed(self, change: Array) -> Any:
        leaves, tree, rest = parameters_of(self.model)
        step = product(change, self.basis.T)
        slots = self.slots
        for slot, part in zip(
            slots, [step] if len(slots) < 2 else [step[:, :-1], step[:, -1]], strict=True
        ):
            array = jnp.asarray(leaves[slot.leaf])
            blocks = slot.blocks(array)
            leaves[slot.leaf] = slot.with_blocks(array, blocks + part.reshape(blocks.shape))
        return eqx.combine(jax.tree.unflatten(tree, leaves), rest)

    def activity(self, change: Array) -> Array:
        return jax.nn.relu(self.before + product(product(self.shown, self.basis), change.T))

    def correlation(self, activity: Array) -> Array:
        one, other = (array - jnp.mean(jnp.mean(array, 1)) for array in (activity, self.pattern))
        # Sums of rows first: one sum over all entries would be rounded in the fourth digit.
        both, first, second = (
            jnp.sum(jnp.sum(part, 1)) for part in (one * other, one**2, other**2)
        )
        return both / jnp.maximum(jnp.sqrt(first * second), 1e-30)

    @eqx.filter_jit
    def predicted(self, change: Array, inputs: Array, batch_size: int) -> tuple[Array, Array]:
        """Return predictions and margins."""
        model = function_of("model", self.changed(change))
        outputs = lax.map(model, inputs, batch_size=min(batch_size, len(inputs)))
        if outputs.ndim != 2 or outputs.shape[1] < 2:
            fail(
                "model",
                "return one vector of at least two logits",
                f"outputs of shape {outputs.shape[1:]}",
            )
        labels = jnp.argmax(outputs, 1)
        return labels, _margins(outputs, labels)

    def lagrangian(
        self, data: Any, penalty: float, change: Array, multipliers: Array, batch: Array, key: Array
    ) -> tuple[Array, Array]:
        """Return the augmented Lagrangian of a batch and of the active set, and the multipliers after it."""
        active = lax.top_k(multipliers, (len(batch) + 1) // 2)[1]
        place = jnp.concatenate([active, batch])
        *known, unit = data
        x, labels, wanted = (part[place] for part in known)
        # Active inputs come in every step, and count as much in a pass as two visits.
        weight = jnp.ones(len(place)).at[: len(active)].set(2 * len(batch) / len(multipliers))
        outputs = jax.vmap(function_of("model", self.changed(change)))(x)
        force, missed = multipliers[place], penalty * (wanted - _margins(outputs, labels) / unit)
        cost = jnp.sum(weight * jax.nn.relu(force + missed) ** 2) / (2 * penalty * len(batch))
        later = lax.stop_gradient(jax.nn.relu(force + weight * missed))
        return cost - self.correlation(self.activity(change)), multipliers.at[place].set(later)

    def best(self, planted: Array) -> Array:
        """Return the activity of largest correlation that was found without a constraint.

        Preactivations p that minimise |p - pattern|^2 where the pattern is positive, plus
        |relu(p)|^2 where it is zero, are found by accelerated gradients; this is convex. With a
        bias, the projection of the pattern plus a large constant is another candidate, and
        `planted` is a third. Adam improves the correlation of the best one.
        """
        left, values, _ = np.linalg.svd(np.asarray(self.shown, float), full_matrices=False)
        cut = max(self.shown.shape) * float(jnp.finfo(self.shown.dtype).eps) * values[0]
        span, one = jnp.asarray(left[:, values > cut], planted.dtype), jnp.ones((), planted.dtype)

        def step(_: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            last, point, weight = state
            wanted = jnp.where(self.pattern > 0, self.pattern, jnp.minimum(point, 0))
            now, then = product(span, product(span.T, wanted)), 0.5 + jnp.sqrt(0.25 + weight**2)
            return now, now + (weight - 1) / then * (now - last), then

        linear = product(span, product(span.T, self.pattern))
        starts = [lax.fori_loop(0, 300, step, (linear, linear, one))[0]]
        # A projection on the span: dead neurons of the planted activity would have no gradient.
        starts += [
            product(span, product(span.T, planted)),
            linear - jnp.min(linear) * (len(self.slots) > 1),
        ]
        start = max(starts, key=lambda point: float(self.correlation(jax.nn.relu(point))))
        weights = product(span.T, start)
        rule = optax.adam(
            optax.cosine_decay_schedule(0.03 * float(jnp.sqrt(jnp.mean(weights**2))), 300)
        )

        @jax.jit
        def climbed(weights: Array) -> Array:
            def climb(_: Array, state: Any) -> Any:
                weights, moments = state
                slope = jax.grad(lambda at: -self.correlation(jax.nn.relu(product(span, at))))(
                    weights
                )
                moves, moments = rule.update(slope, moments)
                return optax.apply_updates(weights, moves), moments

            return lax.fori_loop(0, 300, climb, (weights, rule.init(weights)))[0]

        found = [*starts, product(span, climbed(weights)), planted]
        return max(map(jax.nn.relu, found), key=lambda activity: float(self.correlation(activity)))


def _margins(outputs: Array, labels: Array) -> Array:
    """Return the logit of each label minus the largest other one."""
    own = jnp.arange(outputs.shape[1])[None] == labels[:, None]
    return jnp.sum(jnp.where(own, outputs, 0), 1) - jnp.max(jnp.where(own, -jnp.inf, outputs), 1)
