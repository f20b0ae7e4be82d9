"""The compiled part of a run: some steps of every member, and observations of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from dissociation import checks
from dissociation.member_map import map_members
from dissociation.training.traced import Traced, trace

MAX_CHUNK = 512
"""The longest chunk in steps: the length of the buffer that a compiled chunk writes its losses to."""


class MemberInputs(NamedTuple):
    """What belongs to a member and stays as it is; arrays carry members first until they are mapped."""

    frozen: Any
    hyperparams: Any
    loss_key: Array
    observe_key: Array


class Program(eqx.Module):
    """What one run's compiled functions share.

    Attributes:
        init: From hyperparameters and parameters of one member to the optimiser's state.
        update: From hyperparameters, gradient, the optimiser's state and parameters to the new parameters and state.
        observe: From parameters, other arrays, step and key of one member to its observation.
        data: Samples first.
        members: What every member brings.
        member_map: How members are mapped.
        members_per_batch: See `fit`.
        mesh: See `fit`.
    """

    init: Traced
    update: Traced
    observe: Traced | None
    data: Any
    members: MemberInputs
    member_map: str = eqx.field(static=True)
    members_per_batch: int | None = eqx.field(static=True)
    mesh: Mesh | None = eqx.field(static=True)


def trace_gradient(loss: Callable[..., Any], static: Any, params: Any, frozen: Any, batch: Any, key: Any) -> Traced:
    """From parameters, other arrays, batch and key of one member to (loss, gradient); the arguments are examples."""

    def gradient(params: Any, frozen: Any, batch: Any, key: Array) -> Any:
        def objective(params: Any) -> Array:
            value = loss(eqx.combine(params, frozen, static), batch, key)
            if getattr(value, "shape", None) != ():
                checks.fail("loss", "return a scalar for one member and one batch", value)
            return value

        return jax.value_and_grad(objective)(params)

    return trace(gradient, params, frozen, batch, key)


def trace_optimizer(optimizer: Any, hyperparams: Any, params: Any) -> tuple[Traced, Traced]:
    """`Program.init` and `Program.update`; the arguments are examples of one member."""

    def init(hyperparams: Any, params: Any) -> Any:
        return jax.tree.map(jnp.asarray, _transformation(optimizer, hyperparams).init(params))

    def update(hyperparams: Any, gradient: Any, opt_state: Any, params: Any) -> Any:
        updates, opt_state = _transformation(optimizer, hyperparams).update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    traced = trace(init, hyperparams, params)
    return traced, trace(update, hyperparams, params, jax.eval_shape(traced, hyperparams, params), params)


def trace_observation(observe: Callable[..., Any], static: Any, params: Any, frozen: Any, key: Any) -> Traced:
    """`Program.observe`; the arguments are examples of one member."""

    def observation(params: Any, frozen: Any, step: Array, key: Array) -> Any:
        return jax.tree.map(jnp.asarray, observe(eqx.combine(params, frozen, static), step, key))

    return trace(observation, params, frozen, jnp.asarray(0), key)


def _transformation(optimizer: Any, hyperparams: Any) -> optax.GradientTransformation:
    if isinstance(optimizer, optax.GradientTransformation):
        return optimizer
    made = optimizer(hyperparams)
    if not isinstance(made, optax.GradientTransformation):
        raise TypeError(
            f"`optimizer` must return an optax.GradientTransformation for one member's `hyperparams`, got {made!r}."
        )
    return made


def _over_members(
    program: Program, function: Callable[..., Any], shared: Any, stacked: Any, *, ordered: bool = False
) -> Any:
    how = {"members_per_batch": program.members_per_batch, "mesh": program.mesh, "ordered": ordered}
    return map_members(function, shared, stacked, member_map=program.member_map, **how)


@eqx.filter_jit
def initialise(program: Program, params: Any) -> Any:
    """The state to begin with: parameters and the optimiser's own, members first."""

    def one(init: Traced, stacked: Any) -> Any:
        hyperparams, own_params = stacked
        return init(hyperparams, own_params)

    return params, _over_members(program, one, program.init, (program.members.hyperparams, params))


@eqx.filter_jit(donate="all-except-first")
def run_chunk(inputs: Any, state: Any) -> Any:
    """Several steps of every member, or one where members are unrolled: the new state, and the steps' losses.

    `inputs` is the program, the order of samples (or one per member), `[first step, position in the order, steps]`, the
    batch size, and the traced gradient of a batch of that size. The state is donated.
    """
    program, order, place, batch_size, gradient = inputs
    own_orders, shared_order = (order, None) if order is not None and order.ndim == 2 else (None, order)

    def one(shared: Any, stacked: Any) -> Any:
        program, gradient, shared_order, (start, position, count) = shared
        member, own_state, own_order = stacked
        order = shared_order if own_order is None else own_order

        def step(i: Array | int, state: Any) -> Any:
            batch = program.data
            if batch_size is not None:
                chosen = jax.lax.dynamic_slice_in_dim(order, position + i * batch_size, batch_size)
                batch = jax.tree.map(lambda leaf: leaf.at[chosen].get(mode="promise_in_bounds"), program.data)
            params, opt_state = state
            value, slope = gradient(params, member.frozen, batch, jax.random.fold_in(member.loss_key, start + i))
            return program.update(member.hyperparams, slope, opt_state, params), value

        def body(i: Array, carry: Any) -> Any:
            state, losses = carry
            state, value = step(i, state)
            return state, losses.at[i].set(value.astype(losses.dtype))

        if program.member_map == "unroll":
            own_state, value = step(0, own_state)
            return own_state, value[None]
        return jax.lax.fori_loop(0, count, body, (own_state, jnp.zeros(MAX_CHUNK)))

    shared = program, gradient, shared_order, place
    return _over_members(program, one, shared, (program.members, state, own_orders))


@eqx.filter_jit
def observe_members(inputs: Any, params: Any) -> Any:
    """What `program.observe` says of every member; `inputs` is the program and the step."""
    program, step = inputs

    def one(shared: Any, stacked: Any) -> Any:
        observe, step = shared
        member, own_params = stacked
        return observe(own_params, member.frozen, step, jax.random.fold_in(member.observe_key, step))

    return _over_members(program, one, (program.observe, step), (program.members, params), ordered=True)


@eqx.filter_jit
def permutations(key: Array, epochs: Array, num_samples: int, kept: int) -> Array:
    """The order of the samples in every epoch, cut to the first `kept`, one epoch after the other: [epochs * kept]."""

    def one(epoch: Array) -> Array:
        return jax.random.permutation(jax.random.fold_in(key, epoch), num_samples)[:kept]

    return jax.vmap(one)(epochs).reshape(-1)
