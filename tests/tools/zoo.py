"""Small models of many kinds, to test the search for groups of neurons."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation._core.checks import is_traced
from dissociation.models import CNN, BilinearNetwork
from dissociation.models._program import called
from dissociation.rewrites import neuron_groups


class Kind(NamedTuple):
    """A model, its inputs, and its groups: their sizes, and the changes that they allow."""

    make: Callable[[jax.Array], Any]
    inputs: Callable[[jax.Array], jax.Array]
    groups: dict[str, tuple[int, str]]  # letters: s scale, g grow, r rotate
    copies: dict[str, int] = {}  # where there are several


def _generator(key):
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    with jax.ensure_compile_time_eval():
        return np.random.default_rng(np.asarray(jax.random.key_data(key) if typed else key))


def normal(*shape):
    return lambda key: jax.random.normal(key, shape)


@contextlib.contextmanager
def numpy_draws():
    """Draw by NumPy for known keys, because JAX compiles a program for each shape."""
    by_jax = jax.random.uniform, jax.random.normal

    def uniform(key, shape=(), dtype=float, minval=0.0, maxval=1.0):
        if is_traced(key) or is_traced(minval):
            return by_jax[0](key, shape, dtype, minval, maxval)
        return jnp.asarray(_generator(key).uniform(minval, maxval, shape), dtype)

    def normal(key, shape=(), dtype=float):
        if is_traced(key):
            return by_jax[1](key, shape, dtype)
        return jnp.asarray(_generator(key).normal(size=shape), dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "uniform", uniform)
        patch.setattr(jax.random, "normal", normal)
        yield


class ResidualMLP(eqx.Module):
    """Blocks x + W2 relu(W1 norm(x)), with or without layer normalisation."""

    embed: eqx.nn.Linear
    norms: list
    first: list
    second: list
    head: eqx.nn.Linear

    def __init__(self, width, hidden, *, normalise, key, inputs=5, outputs=3):
        keys = jax.random.split(key, 6)
        self.embed = eqx.nn.Linear(inputs, width, key=keys[0])
        self.first = [eqx.nn.Linear(width, hidden, key=k) for k in keys[1:3]]
        self.second = [eqx.nn.Linear(hidden, width, key=k) for k in keys[3:5]]
        self.norms = [
            eqx.nn.LayerNorm(width) if normalise else eqx.nn.Identity() for _ in self.first
        ]
        self.head = eqx.nn.Linear(width, outputs, key=keys[5])

    def __call__(self, x):
        x = self.embed(x)
        for norm, first, second in zip(self.norms, self.first, self.second, strict=True):
            x = x + second(jax.nn.relu(first(norm(x))))
        return self.head(x)


class ResidualCNN(eqx.Module):
    """Convolutions around an identity, with batch normalisation, max-pooling and flattening."""

    convolutions: list
    norms: list
    head: eqx.nn.Linear

    def __init__(self, key, mode="batch"):
        keys = jax.random.split(key, 4)
        sizes = ((1, 6), (6, 8), (8, 6))
        self.convolutions = [
            eqx.nn.Conv2d(*s, 3, padding=1, key=k) for s, k in zip(sizes, keys, strict=False)
        ]
        self.norms = [eqx.nn.BatchNorm(size, "batch", mode=mode) for _, size in sizes]
        self.head = eqx.nn.Linear(6 * 16, 3, key=keys[3])

    def __call__(self, x, state):
        x, state = self.norms[0](self.convolutions[0](x), state)
        x = jax.nn.relu(x)
        y, state = self.norms[1](self.convolutions[1](x), state)
        y, state = self.norms[2](self.convolutions[2](jax.nn.relu(y)), state)
        x = eqx.nn.MaxPool2d(2, 2)(jax.nn.relu(x + y))
        return self.head(x.reshape(-1)), state


class Normalised(eqx.Module):
    """A layer, batch normalisation with running statistics as state, and a layer."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        self.first, self.last = eqx.nn.Linear(5, 6, key=key), eqx.nn.Linear(6, 3, key=key)
        self.norm = eqx.nn.BatchNorm(6, axis_name="batch", mode="batch")

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.last(jax.nn.relu(x)), state


def residual_cnn(key, mode):
    """Return the network after a pass in training mode, so that running statistics differ between channels."""
    model, state = eqx.nn.make_with_state(ResidualCNN)(key, mode)
    images = normal(16, 1, 8, 8)(key)
    apply = jax.vmap(
        lambda *args: model(*args), in_axes=(0, None), out_axes=(0, None), axis_name="batch"
    )
    _, state = eqx.filter_jit(apply)(images, state)
    return model, state


class Block(eqx.Module):
    """Attention and a perceptron on a residual stream, each after a normalisation."""

    norms: list
    attention: eqx.nn.MultiheadAttention
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __init__(self, width, key):
        keys = jax.random.split(key, 3)
        self.norms = [eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)]
        biases = dict.fromkeys(
            ("use_query_bias", "use_key_bias", "use_value_bias", "use_output_bias"), True
        )
        self.attention = eqx.nn.MultiheadAttention(4, width, **biases, key=keys[0])
        self.first = eqx.nn.Linear(width, 24, key=keys[1])
        self.second = eqx.nn.Linear(24, width, key=keys[2])

    def __call__(self, x):
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))
        return x + jax.vmap(lambda t: self.second(jax.nn.gelu(self.first(self.norms[1](t)))))(x)


class Transformer(eqx.Module):
    """Transformer from tokens to logits."""

    embedding: eqx.nn.Embedding
    positions: jax.Array
    blocks: list
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key, width=16, depth=1, tokens=11, length=5):
        keys = jax.random.split(key, depth + 3)
        self.embedding = eqx.nn.Embedding(tokens, width, key=keys[0])
        self.positions = jax.random.normal(keys[1], (length, width))
        self.blocks = [Block(width, k) for k in keys[3:]]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, tokens, key=keys[2])

    def __call__(self, tokens):
        x = jax.vmap(self.embedding)(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return jax.vmap(lambda t: self.head(self.norm(t)))(x)


class Recurrent(eqx.Module):
    """A cell in a scan, and a head."""

    cell: eqx.Module
    head: eqx.nn.Linear

    def __init__(self, kind, key):
        keys = jax.random.split(key)
        self.cell = kind(4, 6, key=keys[0])
        self.head = eqx.nn.Linear(6, 3, key=keys[1])

    def __call__(self, xs):
        zeros = jnp.zeros(self.cell.hidden_size)
        pair = isinstance(self.cell, eqx.nn.LSTMCell)
        last, _ = jax.lax.scan(
            lambda h, x: (self.cell(x, h), None), (zeros, zeros) if pair else zeros, xs
        )
        return self.head(last[0] if pair else last)


class Depthwise(eqx.Module):
    """Convolutions with one group, with as many groups as channels, and with groups of two channels."""

    convolutions: list

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        sizes = zip((2, 8, 8, 12), (8, 8, 12, 3), (1, 8, 4, 1), keys, strict=True)
        self.convolutions = [eqx.nn.Conv1d(i, o, 3, groups=g, key=k) for i, o, g, k in sizes]

    def __call__(self, x):
        for convolution in self.convolutions[:-1]:
            x = jax.nn.relu(convolution(x))
        return self.convolutions[-1](x)


def stacked(make, keys):
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *map(make, keys))


class Stack(eqx.Module):
    """Residual perceptrons, stacked, in a scan."""

    embed: eqx.nn.Linear
    first: eqx.nn.Linear
    second: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key, layers=3, width=8, hidden=10):
        keys = jax.random.split(key, 4)
        self.embed = eqx.nn.Linear(5, width, key=keys[0])
        self.first = stacked(
            lambda key: eqx.nn.Linear(width, hidden, key=key), jax.random.split(keys[1], layers)
        )
        self.second = stacked(
            lambda key: eqx.nn.Linear(hidden, width, key=key), jax.random.split(keys[2], layers)
        )
        self.head = eqx.nn.Linear(width, 3, key=keys[3])

    def __call__(self, x):
        def layer(x, arrays):
            first, second = eqx.combine(arrays, static)
            return x + second(jax.nn.relu(first(x))), None

        arrays, static = eqx.partition((self.first, self.second), eqx.is_array)
        return self.head(jax.lax.scan(layer, self.embed(x), arrays)[0])


ZOO = {
    "perceptron": Kind(
        lambda key: eqx.nn.MLP(5, 3, 8, 2, key=key),
        normal(12, 5),
        {"layers[0]": (8, "sg"), "layers[1]": (8, "sg")},
    ),
    "tanh without biases": Kind(
        lambda key: eqx.nn.MLP(5, 3, 8, 2, activation=jnp.tanh, use_bias=False, key=key),
        normal(12, 5),
        {"layers[0]": (8, "g"), "layers[1]": (8, "g")},
    ),
    "linear": Kind(
        lambda key: eqx.nn.MLP(5, 3, 8, 1, activation=lambda x: x, key=key),
        normal(12, 5),
        {"layers[0]": (8, "sgr")},
    ),
    "convolutional": Kind(
        lambda key: CNN(10, key=key),
        normal(3, 784),
        {
            "encoder.convolutions[0]": (16, "sg"),
            "encoder.convolutions[1]": (32, "sg"),
            "encoder.head": (10, "sg"),
        },
    ),
    "bilinear": Kind(
        lambda key: BilinearNetwork(5, 8, 3, bias=True, key=key),
        normal(12, 5),
        {"embed": (8, "sgr"), "layers[0].left": (8, "sg")},
    ),
    "residual bilinear": Kind(
        lambda key: BilinearNetwork(5, 8, 3, num_layers=2, residual=True, key=key),
        normal(12, 5),
        {"embed": (8, "sg")},
    ),
    "residual": Kind(
        lambda key: ResidualMLP(8, 10, normalise=False, key=key),
        normal(12, 5),
        {"embed": (8, "sgr"), "first[0]": (10, "sg"), "first[1]": (10, "sg")},
    ),
    "residual normalised": Kind(
        lambda key: ResidualMLP(8, 10, normalise=True, key=key),
        normal(12, 5),
        {"embed": (8, "s"), "first[0]": (10, "sg"), "first[1]": (10, "sg")},
    ),
    "residual convolutional": Kind(
        lambda key: residual_cnn(key, "batch"),
        normal(6, 1, 8, 8),
        {"convolutions[0]": (6, "sg"), "convolutions[1]": (8, "sg")},
    ),
    "transformer": Kind(
        Transformer,
        lambda key: jnp.asarray(_generator(key).integers(0, 11, (6, 5))),
        {
            "embedding": (16, "s"),
            "blocks[0].attention.query_proj": (4, "sg"),  # heads
            "blocks[0].attention.query_proj:2": (
                4,
                "sgr",
            ),  # queries and keys; their number is in the program
            "blocks[0].attention.value_proj": (4, "sgr"),  # values and outputs
            "blocks[0].first": (24, "g"),
        },
        {"blocks[0].attention.query_proj:2": 4, "blocks[0].attention.value_proj": 4},
    ),
    "gated recurrent": Kind(
        lambda key: Recurrent(eqx.nn.GRUCell, key), normal(5, 7, 4), {"cell": (6, "g")}
    ),
    "long short-term memory": Kind(
        lambda key: Recurrent(eqx.nn.LSTMCell, key), normal(5, 7, 4), {"cell": (6, "g")}
    ),
    "grouped convolutions": Kind(
        Depthwise,
        normal(4, 2, 12),
        {
            "convolutions[0]": (4, "sg"),
            "convolutions[0]:2": (2, "sg"),
            "convolutions[2]": (3, "sg"),
        },
        {"convolutions[0]:2": 4, "convolutions[2]": 4},
    ),
    "stack in a scan": Kind(
        Stack, normal(12, 5), {"embed": (8, "sgr"), "first": (10, "sg")}, {"first": 3}
    ),
}


def made(name):
    """Return a model and inputs."""
    kind = ZOO[name]
    return kind.make(jax.random.key(0)), kind.inputs(jax.random.key(1))


def one(name):
    """Return a model, inputs, and groups."""
    model, inputs = made(name)
    return model, inputs, neuron_groups(model, inputs[0])


RUN = eqx.filter_jit(lambda model, inputs: jax.vmap(lambda x: called(model, x))(inputs))


def change(model, rewritten, inputs):
    """Return the largest change of an output, relative to the outputs' size."""
    before, after = (np.asarray(RUN(m, inputs)) for m in (model, rewritten))
    return np.abs(after - before).max() / np.abs(before).max()
