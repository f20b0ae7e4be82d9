"""`State` and `make_step`: one optimiser step of one network, as a pure function."""

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int

from dissociation._core import checks
from dissociation._core.conversion import as_array, as_numbers, check_fits, to_device
from dissociation._core.types import PRNGKey, PyTree, Size, parameter_mask
from dissociation._core.validation import validated


class Static(NamedTuple):
    """Leaves of a model that are not arrays; equal if all pairs are identical or compare equal."""

    leaves: list[Any]
    treedef: Any

    def __hash__(self) -> int:
        return hash(self.treedef)


class State(eqx.Module):
    """State of a network's training, a PyTree for `jax.jit`, `vmap`, `grad` and `lax.scan`.

    Stacked states carry members on the leading axis of every array.

    Attributes:
        arrays: Arrays of the model; the inexact ones are trained.
        aux: PyTree carried beside the model: an `eqx.nn.State`, multipliers, averages; or None.
        opt_state: State of the optimiser.
        hyperparams: Constant arguments of an optimiser function; None for a transformation.
        step: Number of updates.
        static: Leaves of the model that are not arrays, see `model`.
    """

    arrays: PyTree
    aux: PyTree
    opt_state: PyTree
    hyperparams: PyTree
    step: Int[Array, "..."]
    static: Static = eqx.field(static=True)

    @property
    def model(self) -> Any:
        """Return the model, or stacked models."""
        return eqx.combine(self.arrays, self.static.treedef.unflatten(self.static.leaves))

    def replace(self, **changes: Any) -> "State":
        """Return the state with changed `model`, `aux`, `opt_state`, `hyperparams` or `step`."""
        for name in changes:
            checks.check_choice(
                "changes", name, ("model", "aux", "opt_state", "hyperparams", "step")
            )
        if "model" in changes:
            arrays, static = eqx.partition(changes.pop("model"), eqx.is_array)
            changes |= {"arrays": arrays, "static": Static(*jax.tree.flatten(static))}
        return dataclasses.replace(self, **changes)


class Info(NamedTuple):
    """Records of one step: loss before the update, and metrics or None."""

    loss: Any
    metrics: PyTree


class Step(eqx.Module):
    """Optimiser step, see `make_step`."""

    loss: Callable[..., Any]
    optimizer: Any
    after_update: Callable[[State], State] | None
    micro_batches: int = eqx.field(static=True)

    def init(self, model: Any, *, aux: Any = None, hyperparams: Any = None) -> State:
        """Return the state before training.

        Args:
            model: One network, any PyTree with at least one array; half-precision floats become
                float32. `eqx.filter_vmap(step.init)` returns stacked states of stacked models.
            aux: PyTree that the loss gets and returns beside the model.
            hyperparams: PyTree of numbers or arrays, the argument of an `optimizer` that is a
                function.

        Raises:
            TypeError: If the optimiser is a function and `hyperparams` is None, or the reverse, or
                the model holds complex numbers.
        """
        arrays, static = eqx.partition(checked_models(model), eqx.is_array)
        aux, hyperparams = jax.tree.map(jnp.asarray, (aux, hyperparams))
        if not jax.tree.leaves(arrays):
            checks.fail("model", "hold at least one array", "none")
        opt_state = first_opt_state(self.optimizer, arrays, hyperparams)
        static = Static(*jax.tree.flatten(static))
        return State(arrays, aux, opt_state, hyperparams, jnp.asarray(0, int), static)

    def __call__(self, state: State, batch: PyTree, key: PRNGKey) -> tuple[State, Info]:
        """Return the state after one update, and the `Info`; `key` goes to the loss."""
        carried = [] if state.aux is None else ["aux"]
        advice = (
            "With an `aux` it is loss(model, aux, batch, key), without one loss(model, batch, key)"
        )
        checks.check_call("loss", self.loss, ("model", *carried, "batch", "key"), advice)

        arrays, untrained = eqx.partition(state.model, parameter_mask(state.model))
        objective = partial(self._evaluate, untrained)
        evaluate = jax.value_and_grad(objective, has_aux=True)
        if self.micro_batches > 1:
            evaluate = partial(self._accumulate, evaluate)
        (loss, (aux, metrics)), gradient = evaluate(arrays, state.aux, batch, key)

        def loss_of(arrays: Any) -> Array:  # for line searches
            if self.micro_batches == 1:
                return objective(arrays, state.aux, batch, key)[0]
            return evaluate(arrays, state.aux, batch, key)[0][0]

        update = transformation(self.optimizer, state.hyperparams).update
        updates, opt_state = update(
            gradient, state.opt_state, arrays, value=loss, grad=gradient, value_fn=loss_of
        )
        model = eqx.combine(optax.apply_updates(arrays, updates), untrained)
        new_state = state.replace(model=model, aux=aux, opt_state=opt_state, step=state.step + 1)
        if self.after_update is not None:
            final = self.after_update(new_state)
            new_state = _same_structure(final, new_state, "after_update", "the state")
        return new_state, Info(loss, metrics)

    def _evaluate(self, untrained: Any, arrays: Any, aux: Any, batch: Any, key: Any) -> Any:
        """Return (scalar, (aux, metrics)) of a loss in any of its forms."""
        model = eqx.combine(arrays, untrained)
        metrics = None
        if aux is None:
            loss = self.loss(model, batch, key)
            if isinstance(loss, tuple) and len(loss) == 2:
                loss, metrics = loss
        else:
            # A copy, because an `eqx.nn.State` can be used only once and the caller still needs it.
            out = self.loss(model, jax.tree.map(lambda leaf: leaf, aux), batch, key)
            if not isinstance(out, tuple) or len(out) not in (2, 3):
                requirement = (
                    "return a scalar and the new `aux`, or these and metrics, if a state "
                    "has an `aux`"
                )
                checks.fail("loss", requirement, type(out).__name__)
            loss, new_aux = out[:2]
            if len(out) == 3:
                metrics = out[2]
            aux = _same_structure(new_aux, aux, "loss", "aux")

        if getattr(loss, "shape", None) != ():
            description = loss
            if hasattr(loss, "shape"):
                description = f"shape {np.shape(loss)}"
            requirement = (
                "return a scalar for one member and one batch, or a tuple that begins with it"
            )
            checks.fail("loss", requirement, description)
        return loss, (aux, jax.tree.map(jnp.asarray, metrics))

    def _accumulate(
        self, evaluate: Callable[..., Any], arrays: Any, aux: Any, batch: Any, key: Any
    ) -> Any:
        """Return means of the results of `evaluate` over micro-batches.

        Every micro-batch gets the `aux` of the previous one.
        """
        count = self.micro_batches
        for leaf in jax.tree.leaves(batch):
            if not leaf.ndim or leaf.shape[0] % count:
                checks.fail(
                    "micro_batches",
                    f"divide every batch (shape {leaf.shape})",
                    count,
                    "Give a batch size that `micro_batches` divides, and drop the remainder",
                )
        micro_batches = jax.tree.map(lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:]), batch)

        def evaluate_next(aux: Any, batch_and_key: Any) -> Any:
            (loss, (aux, metrics)), gradient = evaluate(arrays, aux, *batch_and_key)
            return aux, (loss, metrics, gradient)

        keys = jax.random.split(key, count)
        aux, outputs = jax.lax.scan(evaluate_next, aux, (micro_batches, keys))
        loss, metrics, gradient = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), outputs)
        return (loss, (aux, metrics)), gradient


@validated
def make_step(
    loss: Callable[..., Any],
    optimizer: optax.GradientTransformation | optax.MultiSteps | Callable[..., Any],
    *,
    after_update: Callable[[State], State] | None = None,
    micro_batches: Size = 1,
) -> Step:
    """Return one optimiser step as a pure function `step(state, batch, key) -> (state, info)`.

    The gradient is with respect to every inexact array of the model; other arrays do not change.

    Args:
        loss: `loss(model, batch, key)` of one network: a scalar, or a scalar and metrics (any
            PyTree of arrays). If the state has an `aux`, `loss(model, aux, batch, key)`: a scalar
            and the new `aux`, or these and metrics.
        optimizer: Optax transformation, or a function from a state's `hyperparams` to one. The
            update also gets `value`, `grad` and `value_fn`, as `optax.lbfgs` and
            `optax.contrib.reduce_on_plateau` need: the loss, its gradient, and the loss of other
            parameters on the same batch with the same key.
        after_update: Function from the updated state to the final one, by `State.replace`: a
            projection of the model on a constraint, an ascent of multipliers in `aux`, an average
            of weights.
        micro_batches: Number of parts of every batch, each with its own key, over which gradients,
            losses and metrics are averaged: for batches too large for the memory.

    Returns:
        The step; `step.init(model)` returns the state before training.

    Example:
        >>> step = make_step(lambda w, batch, key: (w - batch) ** 2, optax.sgd(0.25))
        >>> state = step.init(jnp.array(1.0))
        >>> state, info = jax.jit(step)(state, jnp.array(3.0), jax.random.key(0))
        >>> float(state.model), float(info.loss)
        (2.0, 4.0)
    """
    optimizer = _one_transformation(optimizer)
    return Step(loss, optimizer, after_update, micro_batches)


def _one_transformation(optimizer: Any) -> Any:
    """Return a transformation whose update takes further arguments; others stay unchanged."""
    multi_steps = getattr(getattr(optimizer, "update", None), "__self__", None)
    if isinstance(multi_steps, optax.MultiSteps):
        # Its `gradient_transformation` drops further arguments.
        update: Any = multi_steps.update
        return optax.GradientTransformationExtraArgs(multi_steps.init, update)
    if not isinstance(optimizer, optax.GradientTransformation):
        return optimizer
    try:
        inspect.signature(optimizer.update).bind(None, None, None, value=0, grad=0, value_fn=0)
    except TypeError:  # in spite of the type, as for `optax.contrib.sam`
        optimizer = optax.GradientTransformation(*optimizer)
    return optax.with_extra_args_support(optimizer)


def transformation(optimizer: Any, hyperparams: Any) -> Any:
    """Return the optimiser, called with hyperparameters if it is a function.

    Raises:
        TypeError: If the optimiser cannot use the hyperparameters, or lacks them.
    """
    if isinstance(optimizer, optax.GradientTransformation):
        if hyperparams is not None:
            checks.fail_kind(
                "optimizer",
                "be a function of one member's hyperparameters if `hyperparams` is given",
                f"{optimizer!r}, which does not use them",
            )
        return optimizer
    if hyperparams is None:
        checks.fail_kind(
            "optimizer",
            "be an optax.GradientTransformation if `hyperparams` is None",
            repr(optimizer),
            "Call it, as in optax.adam(1e-3), or pass its `hyperparams`",
        )
    called = _one_transformation(optimizer(hyperparams))
    if not isinstance(called, optax.GradientTransformation):
        checks.fail_kind(
            "optimizer",
            "return an optax.GradientTransformation for one member's `hyperparams`",
            repr(called),
        )
    return called


def first_opt_state(optimizer: Any, arrays: Any, hyperparams: Any) -> Any:
    """Return the optimiser's initial state for one member's arrays."""
    trained = eqx.filter(arrays, parameter_mask(arrays))
    opt_state = transformation(optimizer, hyperparams).init(trained)
    return jax.tree.map(jnp.asarray, opt_state)


def checked_models(models: Any) -> Any:
    """Return models with arrays of real numbers that JAX keeps, none in half precision."""
    named_leaves, structure = jax.tree_util.tree_flatten_with_path(
        models, is_leaf=lambda leaf: isinstance(leaf, eqx.nn.State)
    )
    leaves = []
    for path, leaf in named_leaves:
        if isinstance(leaf, eqx.nn.State):
            advice = (
                "Pass models alone and their states as `aux`: the optimiser would change "
                "running statistics"
            )
            checks.fail_kind("models", "hold parameters", "an eqx.nn.State among them", advice)
        if isinstance(leaf, np.ndarray) or eqx.is_inexact_array(leaf):
            name = f"models{jax.tree_util.keystr(path)}"
            array = as_array(name, leaf, "real numbers", may_be_empty=True)
            check_fits(name, array)
            leaf = to_device(as_numbers(name, array, frozenset({"bool", "int", "float"})))
        leaves.append(leaf)
    return structure.unflatten(leaves)


def _same_structure(new: Any, old: Any, name: str, subject: str) -> Any:
    """Return `new`; raise unless its arrays have the shapes and dtypes of `old`.

    The message calls `old` the `subject` that the function `name` returns.
    """
    new_shapes, old_shapes = map(_shapes_and_dtypes, (new, old))
    if jax.tree.structure(new) != jax.tree.structure(old) or new_shapes != old_shapes:
        description = type(new).__name__
        if type(new) is type(old):
            description = f"arrays of {str(new_shapes)[:200]}"
        requirement = (
            f"return {subject} as it was: a {type(old).__name__}, arrays of {str(old_shapes)[:200]}"
        )
        checks.fail(name, requirement, description)
    return new


def _shapes_and_dtypes(tree: Any):
    leaves = map(jnp.asarray, jax.tree.leaves(tree))
    return [(leaf.shape, leaf.dtype) for leaf in leaves]
