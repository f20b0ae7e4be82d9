"""The compiled part of a run: some steps of every member, and observations of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from dissociation.member_map import map_members

MAX_CHUNK = 512
"""The longest chunk in steps: the length of the buffer that a compiled chunk writes its losses to."""


class MemberInputs(NamedTuple):
    """What belongs to a member and stays as it is; arrays carry members first until they are mapped."""

    frozen: Any
    hyperparams: Any
    loss_key: Array
    observe_key: Array


class Program(eqx.Module):
    """What one run's compiled functions share."""

    loss: Callable[..., Any]
    observe: Callable[..., Any] | None
    optimizer: Any
    data: Any
    static: Any
    members: MemberInputs
    member_map: str = eqx.field(static=True)
    members_per_batch: int | None = eqx.field(static=True)
    mesh: Mesh | None = eqx.field(static=True)


def _over_members(
    program: Program, function: Callable[..., Any], shared: Any, stacked: Any, *, ordered: bool = False
) -> Any:
    how = {"members_per_batch": program.members_per_batch, "mesh": program.mesh, "ordered": ordered}
    return map_members(function, shared, stacked, member_map=program.member_map, **how)


def _transformation(program: Program, member: MemberInputs) -> optax.GradientTransformation:
    if isinstance(program.optimizer, optax.GradientTransformation):
        return program.optimizer
    return program.optimizer(member.hyperparams)


@eqx.filter_jit
def initialise(program: Program, params: Any) -> Any:
    """The state to begin with: parameters and the optimiser's own, members first."""

    def one(program: Program, stacked: Any) -> Any:
        member, own_params = stacked
        return jax.tree.map(jnp.asarray, _transformation(program, member).init(own_params))

    return params, _over_members(program, one, program, (program.members, params))


@eqx.filter_jit(donate="all-except-first")
def run_chunk(inputs: Any, state: Any) -> Any:
    """Several steps of every member, or one where members are unrolled: the new state, and the steps' losses.

    `inputs` is the program, the order of samples (or one per member), `[first step, position in the order, steps]`, and
    the batch size. The state is donated.
    """
    program, order, place, batch_size = inputs
    own_orders, shared_order = (order, None) if order is not None and order.ndim == 2 else (None, order)

    def one(shared: Any, stacked: Any) -> Any:
        program, shared_order, (start, position, count) = shared
        member, own_state, own_order = stacked
        order = shared_order if own_order is None else own_order

        def step(i: Array | int, state: Any) -> Any:
            batch = program.data
            if batch_size is not None:
                chosen = jax.lax.dynamic_slice_in_dim(order, position + i * batch_size, batch_size)
                batch = jax.tree.map(lambda leaf: leaf.at[chosen].get(mode="promise_in_bounds"), program.data)
            return _step(program, member, state, batch, jax.random.fold_in(member.loss_key, start + i))

        def body(i: Array, carry: Any) -> Any:
            state, losses = carry
            state, value = step(i, state)
            return state, losses.at[i].set(value.astype(losses.dtype))

        if program.member_map == "unroll":
            own_state, value = step(0, own_state)
            return own_state, value[None]
        return jax.lax.fori_loop(0, count, body, (own_state, jnp.zeros(MAX_CHUNK)))

    return _over_members(program, one, (program, shared_order, place), (program.members, state, own_orders))


def _step(program: Program, member: MemberInputs, state: Any, batch: Any, key: Array) -> Any:
    """One optimiser step of one member: the new state, and the loss before it."""
    params, opt_state = state

    def objective(params: Any) -> Array:
        return program.loss(eqx.combine(params, member.frozen, program.static), batch, key)

    value, gradient = jax.value_and_grad(objective)(params)
    updates, opt_state = _transformation(program, member).update(gradient, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value


@eqx.filter_jit
def observe_members(inputs: Any, params: Any) -> Any:
    """What `program.observe` says of every member; `inputs` is the program and the step."""
    program, step = inputs

    def one(shared: Any, stacked: Any) -> Any:
        program, step = shared
        member, own_params = stacked
        model = eqx.combine(own_params, member.frozen, program.static)
        observed = program.observe(model, step, jax.random.fold_in(member.observe_key, step))
        return jax.tree.map(jnp.asarray, observed)

    return _over_members(program, one, (program, step), (program.members, params), ordered=True)


@eqx.filter_jit
def permutations(key: Array, epochs: Array, num_samples: int, kept: int) -> Array:
    """The order of the samples in every epoch, cut to the first `kept`, one epoch after the other: [epochs * kept]."""

    def one(epoch: Array) -> Array:
        return jax.random.permutation(jax.random.fold_in(key, epoch), num_samples)[:kept]

    return jax.vmap(one)(epochs).reshape(-1)
