"""Linear maps to train in tests, with or without batch normalisation, their data and losses."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dissociation.training import FullBatch, fit, make_step


class Linear(eqx.Module):
    weight: jax.Array
    name: str = eqx.field(static=True, default="linear")

    def __call__(self, x):
        return self.weight @ x


class Normalised(eqx.Module):
    norm: eqx.nn.BatchNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch", momentum=0.75)
        self.head = eqx.nn.Linear(4, 2, key=key)

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return self.head(x), state


@eqx.filter_jit
def linear_members(key, members=3, out=2, inputs=4):
    return eqx.filter_vmap(lambda k: Linear(jax.random.normal(k, (out, inputs))))(
        jax.random.split(key, members)
    )


@eqx.filter_jit
def regression(key, samples=10, inputs=4, out=2):
    x_key, y_key = jax.random.split(key)
    return jax.random.normal(x_key, (samples, inputs)), jax.random.normal(y_key, (samples, out))


def squared_error(model, batch, key):
    x, y = batch
    return 0.5 * jnp.mean(jnp.sum((jax.vmap(model)(x) - y) ** 2, axis=1))


def noisy_error(model, batch, key):
    x, y = batch
    return squared_error(model, (x + jax.random.normal(key, x.shape), y), key)


def normalised_error(model, state, batch, key):
    x, y = batch
    out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
    return jnp.mean((out - y) ** 2), state


def mean_of_batch(model, batch, key):
    """Return the mean of the batch, for any model."""
    return jnp.mean(batch) + 0 * sum(jnp.sum(leaf) for leaf in jax.tree.leaves(model))


def weights(result):
    return np.asarray(result.models.weight)


def trained(
    key, models=None, *, loss=squared_error, optimizer=None, sampler=None, keys=None, **options
):
    """Return `fit` of three linear members by gradient descent on ten samples, or of the given arguments."""
    return fit(
        linear_members(key) if models is None else models,
        make_step(loss, optax.sgd(0.1) if optimizer is None else optimizer),
        FullBatch(regression(key)) if sampler is None else sampler,
        key=key if keys is None else keys,
        **options,
    )
