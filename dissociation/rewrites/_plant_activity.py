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

MARGIN = 0.1
"""Largest margin asked for, in units of the mean margin."""
PENALTY = 0.05
"""Weight of squared violations, in units of `MARGIN`."""


class PlantedActivity(NamedTuple):
    """Network whose predictions stay, and whose activity is close to a pattern.

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
    key: PRNGKey,
    checkpoint: str | Path | None = None,
    progress: str | MeterFactory | None = None,
) -> PlantedActivity:
    """Move a layer's activity on the first inputs towards a pattern, while predictions stay.

    Predictions stay on all inputs. Incoming weights of the group change, all others stay. Adam
    maximises the correlation of activity and pattern, by an augmented Lagrangian: each input has a
    multiplier for the constraint that its margin, the largest logit minus the next one, is at least
    half of its first value, but no less than .4 and no more than 1 times a tenth of the mean
    margin. Every step takes a batch, and half as many inputs with the largest multipliers. Weights
    are in whitened coordinates of the layer's inputs. The learning rate decays to 2 % by a cosine.
    If predictions are changed then, up to as many passes follow, and at last the change is reduced
    until no prediction is changed, counted in two batch sizes. It is driven by the host, as
    `training.fit` is.

    Args:
        group: Group of ReLU neurons, made by one matrix and at most one bias, once per input.
        model: Classifier.
        inputs: Examples whose predictions stay, samples first.
        pattern: Pattern on the first inputs, one column per neuron.
        num_passes: Passes over the inputs, before those in which the rate stays at 2 %.
        batch_size: Inputs per step.
        learning_rate: Rate of Adam in whitened coordinates, in units of the root mean square of
            preactivations.
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
    group = current(group, model)
    num_inputs = len(examples)
    batch_size = min(batch_size, num_inputs)
    planting = _planting(group, model, examples, np.asarray(pattern, float))
    labels, margins = planting.predicted(planting.none, examples, batch_size)
    unit = MARGIN * jnp.mean(margins)
    if not unit > 0:
        mean_margin = f"a mean margin of {float(unit / MARGIN):.3g}"
        fail("model", "tell classes apart by finite logits", mean_margin)
    if not jnp.any(planting.activity(planting.none) > 0):
        wanted_neuron = "have an active neuron on the shown inputs"
        fail("group", wanted_neuron, "zeros alone", "Gradients are zero there")
    targets = jnp.clip(0.5 * margins / unit, 0.4, 1.0)
    loss = partial(planting.lagrangian, (examples, labels, targets, unit))
    num_batches = -(-num_inputs // batch_size)
    num_steps = num_passes * num_batches
    rate = optax.cosine_decay_schedule(learning_rate * planting.size, num_steps, alpha=0.02)

    def observe(change, _, step, key):
        correlation = planting.correlation(planting.activity(change))
        num_changed = planting.num_changed(change, examples, labels, batch_size)
        return {"correlation": correlation, "changed": num_changed}

    def ended(step, records):
        num_changed = records["observed"]["changed"]
        return step >= num_steps and int(num_changed[0]) == 0

    run = fit(
        planting.none[None],
        make_step(loss, optax.adam(rate)),
        Epochs(jnp.arange(num_inputs), batch_size),
        num_epochs=2 * num_passes,
        aux=jnp.zeros_like(margins)[None],
        save=Save(observe),
        callbacks=[Progress(progress), ended],
        key=key,
        checkpoint=checkpoint,
    )
    change = run.models[0]
    if not jnp.isfinite(change).all():
        fail("learning_rate", "keep the weights finite", learning_rate)

    sizes = (batch_size, OTHER_BATCH)
    fraction = 1.0
    while fraction and any(
        planting.num_changed(fraction * change, examples, labels, size) for size in sizes
    ):
        fraction = round(fraction - 0.01, 2)
    if fraction < 1:
        message = (
            f"{fraction:g} of the change is kept, because all of it changes predictions. Take "
            "more passes."
        )
        warnings.warn(message, stacklevel=3)
    change = fraction * change
    planted = planting.changed(change)
    after = planting.activity(change)
    _check_activity(group, planted, examples[: len(pattern)], after)
    activity = jnp.stack([planting.activity(planting.none), after, planting.best(after)])
    correlation = jax.vmap(planting.correlation)(activity)
    observed = run.history.observed
    along = np.asarray(observed["correlation"])[0]
    num_changed = np.asarray(observed["changed"])[0]
    return PlantedActivity(planted, activity, correlation, along, num_changed, fraction)


def _check_activity(group: NeuronGroup, model: Any, inputs: Array, activity: Array) -> None:
    """Raise unless the activity of a group is the one that ReLUs have."""
    actual = representations(model, inputs).get(group.name, activity[:0])
    if actual.shape == activity.shape:
        tolerance = 1e-4 * float(jnp.max(jnp.abs(actual)))
        if np.allclose(actual, activity, atol=tolerance):
            return
    fail("group", "be of ReLU neurons", group.name)


def _planting(group: NeuronGroup, model: Any, inputs: Array, pattern: np.ndarray) -> "_Planting":
    """Return the problem in whitened coordinates, after checks."""
    num_shown = len(pattern)
    if pattern.shape[1] != group.size or num_shown > len(inputs):
        fail("pattern", f"have at most {len(inputs)} rows, and {group.size} columns", pattern.shape)
    low = pattern.min()
    high = pattern.max()
    if low == high:
        fail("pattern", "not be constant", f"{low} alone")
    rows = incoming(group, model, inputs)
    if len(rows) != len(inputs):
        fail("group", "be made once per input", f"{len(rows)} times by {len(inputs)} inputs")

    host_rows = np.asarray(rows, float)
    eigenvalues, vectors = np.linalg.eigh(host_rows.T @ host_rows / len(rows))
    is_kept = eigenvalues > 1e-8 * eigenvalues[-1]
    # Directions of little variance are not magnified in full: they would carry rounding errors.
    stretch = np.sqrt(eigenvalues[is_kept] + 1e-5 * eigenvalues[-1])
    basis = jnp.asarray(vectors[:, is_kept] / stretch, rows.dtype)

    leaves, _, _ = parameters_of(model)
    weights = [slot.rows(jnp.asarray(leaves[slot.leaf])) for slot in _incoming_slots(group)]
    rows = rows[:num_shown]
    matrix = jnp.concatenate(weights, 1)
    preactivations = product(rows, matrix.T)
    # On the host, so that no unit and no constant matters to float32.
    pattern = (pattern - low) / (high - low)
    target = jnp.asarray(pattern, rows.dtype)
    planting = _Planting(model, group, basis, rows, preactivations, target)
    activity = planting.activity(planting.none)
    _check_activity(group, model, inputs[:num_shown], activity)
    return planting


def _incoming_slots(group: NeuronGroup) -> list[Slot]:
    """Return the incoming matrix of a group, and its bias if there is one."""
    return [slot for slot in made_by(group) if slot is not None]


class _Planting(eqx.Module):
    """Network whose incoming weights change by `change` in whitened coordinates.

    A change has shape [neurons, coordinates].
    """

    model: Any
    group: NeuronGroup = eqx.field(static=True)
    basis: Array  # [features, coordinates]
    rows: Array  # inputs of the layer, [shown, features]
    preactivations: Array  # [shown, neurons]
    pattern: Array

    @property
    def size(self) -> float:
        return float(jnp.sqrt(jnp.mean(self.preactivations**2)))

    @property
    def none(self) -> Array:
        num_neurons = self.preactivations.shape[1]
        num_coordinates = self.basis.shape[1]
        return jnp.zeros((num_neurons, num_coordinates), self.basis.dtype)

    def changed(self, change: Array) -> Any:
        leaves, tree, static = parameters_of(self.model)
        slots = _incoming_slots(self.group)
        step = product(change, self.basis.T)
        steps = [step]
        if len(slots) > 1:  # the last column is of the bias
            steps = [step[:, :-1], step[:, -1]]
        for slot, slot_step in zip(slots, steps, strict=True):
            array = jnp.asarray(leaves[slot.leaf])
            blocks = slot.blocks(array)
            blocks = blocks + slot_step.reshape(blocks.shape)
            leaves[slot.leaf] = slot.with_blocks(array, blocks)
        return eqx.combine(jax.tree.unflatten(tree, leaves), static)

    def activity(self, change: Array) -> Array:
        coordinates = product(self.rows, self.basis)
        step = product(coordinates, change.T)
        return jax.nn.relu(self.preactivations + step)

    def correlation(self, activity: Array) -> Array:
        x = activity - jnp.mean(jnp.mean(activity, 1))
        y = self.pattern - jnp.mean(jnp.mean(self.pattern, 1))
        # Sums of rows first: one sum over all entries would be rounded in the fourth digit.
        covariance = jnp.sum(jnp.sum(x * y, 1))
        variance_of_x = jnp.sum(jnp.sum(x**2, 1))
        variance_of_y = jnp.sum(jnp.sum(y**2, 1))
        return covariance / jnp.maximum(jnp.sqrt(variance_of_x * variance_of_y), 1e-30)

    @eqx.filter_jit
    def predicted(self, change: Array, inputs: Array, batch_size: int) -> tuple[Array, Array]:
        """Return predictions and margins."""
        model = function_of("model", self.changed(change))
        outputs = lax.map(model, inputs, batch_size=min(batch_size, len(inputs)))
        if outputs.ndim != 2 or outputs.shape[1] < 2:
            shape = f"outputs of shape {outputs.shape[1:]}"
            fail("model", "return one vector of at least two logits", shape)
        labels = jnp.argmax(outputs, 1)
        return labels, _margins(outputs, labels)

    def num_changed(self, change: Array, inputs: Array, labels: Array, batch_size: int) -> Array:
        """Return the number of predictions that differ from `labels`."""
        predictions, _ = self.predicted(change, inputs, batch_size)
        return jnp.sum(predictions != labels)

    def lagrangian(
        self, data: Any, change: Array, multipliers: Array, batch: Array, key: Array
    ) -> tuple[Array, Array]:
        """Return the augmented Lagrangian of a batch and the active set, and new multipliers."""
        inputs, labels, targets, unit = data
        batch_size = len(batch)
        active = lax.top_k(multipliers, (batch_size + 1) // 2)[1]
        indices = jnp.concatenate([active, batch])
        # Active inputs come in every step, and count as much in a pass as two visits.
        visits = 2 * batch_size / len(multipliers)
        weight = jnp.ones(len(indices)).at[: len(active)].set(visits)
        model = function_of("model", self.changed(change))
        outputs = jax.vmap(model)(inputs[indices])
        margins = _margins(outputs, labels[indices]) / unit
        force = multipliers[indices]
        missed = PENALTY * (targets[indices] - margins)
        cost = jnp.sum(weight * jax.nn.relu(force + missed) ** 2) / (2 * PENALTY * batch_size)
        updated = lax.stop_gradient(jax.nn.relu(force + weight * missed))
        correlation = self.correlation(self.activity(change))
        return cost - correlation, multipliers.at[indices].set(updated)

    def best(self, planted: Array) -> Array:
        """Return the activity of largest correlation that was found without a constraint.

        Preactivations p that minimise |p - pattern|^2 where the pattern is positive, plus
        |relu(p)|^2 where it is zero, are found by accelerated gradients; this is convex. With a
        bias, the projection of the pattern plus a large constant is another candidate, and
        `planted` is a third. Adam improves the correlation of the best one.
        """
        host_rows = np.asarray(self.rows, float)
        left_vectors, values, _ = np.linalg.svd(host_rows, full_matrices=False)
        eps = float(jnp.finfo(self.rows.dtype).eps)
        cut = max(host_rows.shape) * eps * values[0]
        span = jnp.asarray(left_vectors[:, values > cut], planted.dtype)

        def projected(point):
            return product(span, product(span.T, point))

        def score(point):
            return float(self.correlation(jax.nn.relu(point)))

        def step(_, state):
            previous, point, weight = state
            target = jnp.where(self.pattern > 0, self.pattern, jnp.minimum(point, 0))
            position = projected(target)
            next_weight = 0.5 + jnp.sqrt(0.25 + weight**2)
            point = position + (weight - 1) / next_weight * (position - previous)
            return position, point, next_weight

        linear = projected(self.pattern)
        weight = jnp.ones((), planted.dtype)
        accelerated = lax.fori_loop(0, 300, step, (linear, linear, weight))[0]
        has_bias = len(_incoming_slots(self.group)) > 1
        shifted = linear - jnp.min(linear) * has_bias
        # A projection on the span: dead neurons of the planted activity would have no gradient.
        starts = [accelerated, projected(planted), shifted]
        weights = product(span.T, max(starts, key=score))
        size = float(jnp.sqrt(jnp.mean(weights**2)))
        rate = optax.cosine_decay_schedule(0.03 * size, 300)
        rule = optax.adam(rate)

        def loss(weights):
            return -self.correlation(jax.nn.relu(product(span, weights)))

        def climb(_, state):
            weights, moments = state
            slope = jax.grad(loss)(weights)
            moves, moments = rule.update(slope, moments)
            return optax.apply_updates(weights, moves), moments

        @jax.jit
        def climbed(weights):
            start = (weights, rule.init(weights))
            return lax.fori_loop(0, 300, climb, start)[0]

        candidates = [*starts, product(span, climbed(weights)), planted]
        return jax.nn.relu(max(candidates, key=score))


def _margins(outputs: Array, labels: Array) -> Array:
    """Return the logit of each label minus the largest other one."""
    is_label = jnp.arange(outputs.shape[1])[None] == labels[:, None]
    logits = jnp.sum(jnp.where(is_label, outputs, 0), 1)
    return logits - jnp.max(jnp.where(is_label, -jnp.inf, outputs), 1)
