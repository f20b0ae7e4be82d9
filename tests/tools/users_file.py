"""A user's code of both packages, for a strict type checker and a test."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs]
from jax import Array

import dissociation as ds
import koopman
from dissociation.rewrites import Certificate, NeuronGroup, add_parameter_noise, match_weights
from dissociation.similarity import debiased_cka
from dissociation.training import FitResult


class Network(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __init__(self, key: Array):
        one, two = jax.random.split(key)
        self.first = eqx.nn.Linear(8, 32, key=one)
        self.second = eqx.nn.Linear(32, 2, key=two)

    def __call__(self, x: Array) -> Array:
        return self.second(jax.nn.relu(self.first(x)))


def loss(model: Network, batch: tuple[Array, Array], key: Array) -> Array:
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def networks() -> dict[str, float]:
    key = jax.random.key(0)
    x = jax.random.normal(key, (64, 8))
    y = jnp.stack([x[:, 0], x[:, 1] ** 2], axis=1)
    models = eqx.filter_vmap(Network)(jax.random.split(key, 2))  # pyright: ignore[reportUnknownMemberType]
    step = ds.make_step(loss, optax.adam(1e-3))
    trained: FitResult = ds.fit(
        models, step, ds.Epochs((x, y), batch_size=32), num_epochs=2, key=key
    )
    one: Any = ds.member(trained.models, 0)
    two: Any = ds.member(trained.models, 1)
    groups: dict[str, NeuronGroup] = ds.neuron_groups(one, x[0])
    hidden = groups["first"]
    rewrite = ds.duplicate(hidden, 1.5) | ds.scale(hidden, 10.0) | ds.permute(hidden, key=key)
    proof: Certificate = ds.certify(one, rewrite(one), x)
    before, after = (ds.representations(network, x)["features"] for network in (one, two))
    cka = debiased_cka(before, after)
    matched = match_weights(one, two, groups).apply(two, groups)
    noisy = add_parameter_noise(matched, 0.1, key=key)
    return {
        "loss": float(trained.history.loss[0, -1]),
        "change": float(proof.max_abs_change),
        "cka": float(cka),
        "distance": float(jnp.abs(jax.vmap(noisy)(x) - jax.vmap(two)(x)).max()),
    }


def operators() -> dict[str, float]:
    states = np.random.default_rng(0).standard_normal((200, 3)).cumsum(axis=0).astype(np.float32)
    x, y = koopman.lagged_pairs(states, lag=1)
    operator: koopman.Operator = koopman.fit(koopman.Ridge(alpha=1e-3), x, y)
    largest: Array = koopman.eigenvalues(operator)[0]
    ahead: Array = koopman.predict(operator, x[:4], [1, 2])
    return {"largest": float(jnp.abs(largest)), "ahead": float(jnp.abs(ahead).max())}
