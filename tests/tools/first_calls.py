"""First calls of public functions, for the counts of a test and for `benchmarks/first_calls.py`.

Each function prepares data and yields the names of calls and the calls, in order.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from zoo import Transformer

import koopman
from dissociation import rewrites, similarity, training
from dissociation.models import representations
from dissociation.similarity import compare, pairwise


def _normal(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def trajectories():
    """Fit five runs of a noisy rotation in four coordinates."""
    turn = np.array([[0.9, -0.3], [0.3, 0.9]], np.float32)
    runs = []
    for length in (60, 70, 80, 90, 100):
        states = [np.ones(2, np.float32)]
        for noise in 0.1 * _normal(length, 2):
            states.append(turn @ states[-1] + noise)
        runs.append((np.array(states) @ _normal(2, 4)).astype(np.float32))
    pairs, found = koopman.lagged_pairs(runs), {}
    yield "koopman.fit", lambda: found.update(operator=koopman.fit(koopman.Ridge(1e-6), *pairs))
    yield "koopman.modes", lambda: koopman.modes(found["operator"])
    yield "koopman.predict", lambda: koopman.predict(found["operator"], pairs.x, [1, 2, 5])
    yield "koopman.score", lambda: koopman.score(found["operator"], runs)


def delays():
    """Fit a rank to delays of one series."""
    series = (np.sin(0.3 * np.arange(400)) + 0.1 * _normal(400)).astype(np.float32)
    rows, found = koopman.delay_embed(series, 20), {}
    estimator = koopman.ReducedRank(rank=4, alpha=1e-4)
    yield (
        "koopman.fit of delays",
        lambda: found.update(operator=koopman.fit(estimator, rows[:-1], rows[1:])),
    )
    yield "koopman.decompose", lambda: koopman.decompose(found["operator"])
    yield "koopman.modes of delays", lambda: koopman.modes(found["operator"], time_step=0.1)


def _transformer():
    tokens = np.random.default_rng(0).integers(0, 11, (64, 5)).astype(np.int32)
    return eqx.filter_jit(Transformer)(jax.random.key(0), depth=2), tokens


def transformer():
    """Find and rewrite the groups of a transformer of two blocks, width 16."""
    model, tokens = _transformer()
    key, found = jax.random.key(1), {}
    yield "neuron_groups", lambda: found.update(rewrites.neuron_groups(model, tokens[0]))

    def hidden():
        return found["blocks[0].first"]

    yield "permute", lambda: found.update(moved=rewrites.permute(hidden(), key=key)(model))
    yield "duplicate", lambda: rewrites.duplicate(hidden(), 1.5)(model)
    yield "add_nuisance", lambda: rewrites.add_nuisance(hidden(), 3, key=key)(model)

    def linear():
        return next(group for group in found.values() if getattr(group, "linear", None) is not None)

    yield "scale", lambda: rewrites.scale(linear(), 3.0)(model)
    yield "rotate", lambda: rewrites.rotate(linear(), key=key)(model)
    yield (
        "layer_inputs",
        lambda: found.update(
            inputs=rewrites.layer_inputs(model, tokens, ".blocks[0].first.weight")
        ),
    )
    yield (
        "null_perturb",
        lambda: rewrites.null_perturb(rewrites.null_space(found["inputs"]), 0.1, key=key)(model),
    )
    yield "certify", lambda: rewrites.certify(model, found["moved"], tokens)

    def twice():
        return rewrites.duplicate(hidden(), 2) | rewrites.permute(hidden(), key=key)

    yield "compose", lambda: twice()(model)


def layers():
    """Return the representations of a transformer of two blocks, width 16."""
    model, tokens = _transformer()
    yield "representations", lambda: representations(model, tokens)


def checks():
    """Permute all groups of a transformer of two blocks, width 16."""
    model, tokens = _transformer()
    key = jax.random.key(1)
    yield "check_groups", lambda: rewrites.check_groups(model, tokens, key=key)


def perceptrons():
    """Compare two perceptrons by canonical form and by matching."""
    make = eqx.filter_jit(lambda key: eqx.nn.MLP(6, 3, 16, 2, key=key))
    one, other = make(jax.random.key(0)), make(jax.random.key(1))
    inputs = _normal(64, 6)
    found = {}
    yield "canonical", lambda: rewrites.canonical(one, inputs[0])
    yield "fingerprint", lambda: rewrites.fingerprint(one, inputs[0])

    def groups():
        return found.setdefault("groups", rewrites.neuron_groups(one, inputs[0]))

    yield (
        "match_weights",
        lambda: found.update(matching=rewrites.match_weights(one, other, groups())),
    )
    yield "Matching.apply", lambda: found["matching"].apply(other, groups())
    yield "match_activations", lambda: rewrites.match_activations(one, other, groups(), inputs)


def similarities():
    """Compare representations, at first and at another shape."""
    yield "linear_cka", lambda: similarity.linear_cka(_normal(40, 7), _normal(40, 5))
    yield "linear_cka, another shape", lambda: similarity.linear_cka(_normal(41, 8), _normal(41, 6))
    yield "compare", lambda: compare(_normal(40, 7), _normal(40, 5))
    yield "compare, another shape", lambda: compare(_normal(41, 8), _normal(41, 6))
    yield "pairwise", lambda: pairwise(_normal(3, 40, 7), members=True, progress=None)
    yield (
        "pairwise, another shape",
        lambda: pairwise(_normal(3, 41, 8), members=True, progress=None),
    )


def sweep():
    """Train two widths, two rates and two seeds."""
    grid = training.Grid(width=[4, 8], rate=[0.1, 0.01], seed=[0, 1])

    def init(key, width):
        return eqx.nn.MLP(5, 1, width, 1, key=key)

    def loss(model, batch, key):
        return jnp.mean(jax.vmap(model)(batch[0]) ** 2)

    step = training.make_step(loss, lambda values: optax.sgd(values["rate"]))
    sampler = training.Epochs((_normal(20, 5),), 10)
    key, found = jax.random.key(0), {}
    options = {"key": key, "num_epochs": 2, "progress": None}
    yield (
        "fit_grid",
        lambda: found.update(sweep=training.fit_grid(init, step, sampler, grid, **options)),
    )
    yield "GridResult.models_of", lambda: found["sweep"].models_of(np.arange(4))


JOBS = (trajectories, delays, transformer, layers, checks, perceptrons, similarities, sweep)
