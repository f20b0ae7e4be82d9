"""`train`: a whole training as a pure function."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads
from linear_regression import Linear, linear_members, noisy_error, regression, weights

from dissociation.training import Epochs, FullBatch, HostBatches, Online, fit, make_step, train

ADAM = make_step(noisy_error, optax.adam(0.05))


def samplers(data):
    def draw(source, key):
        return jax.tree.map(lambda leaf: leaf[jax.random.permutation(key, len(leaf))[:5]], source)

    return {
        "remainder": Epochs(data, 4, shared=False),
        "whole": FullBatch(data),
        "draws": Online(draw, data),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", samplers(np.ones((10, 1))))
def test_equals_fit_for_a_member_with_its_own_key_at_once_and_in_parts(key, name):
    models, sampler = linear_members(key), samplers(regression(key))[name]
    keys = jax.random.split(jax.random.key(5), 3)
    # The whole set has no order, and so `shared` means nothing to it: its members get keys that
    # follow from one.
    result = fit(models, ADAM, sampler, num_steps=17, key=key if name == "whole" else keys)
    if name == "whole":
        keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.split(key)[1], i))(jnp.arange(3))
    run = jax.jit(lambda state, key: train(state, ADAM, sampler, 17, key=key))
    for m in range(3):
        state, infos = run(ADAM.init(Linear(models.weight[m])), keys[m])
        np.testing.assert_allclose(infos.loss, result.history.loss[m], rtol=1e-5)
        np.testing.assert_allclose(state.model.weight, weights(result)[m], rtol=1e-5, atol=1e-6)
        assert state.step == 17
    first, early = train(
        ADAM.init(Linear(models.weight[2])), ADAM, sampler, 7, key=jax.random.key_data(keys[2])
    )
    second, late = train(first, ADAM, sampler, 10, key=keys[2], first_step=7)
    np.testing.assert_allclose(second.model.weight, weights(result)[2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        jnp.concatenate([early.loss, late.loss]), result.history.loss[2], rtol=1e-5
    )
    assert second.step == 17


@pytest.mark.slow
def test_the_gradient_through_training_is_that_of_finite_differences():
    with jax.enable_x64(True):
        key = jax.random.key(2)
        x, y = regression(key, samples=10)
        start = jax.random.normal(key, (2, 4))
        step = make_step(noisy_error, lambda rate: optax.adam(rate, eps_root=1e-8))

        def final(start, rate, y):
            state = step.init(Linear(start), hyperparams=rate)
            state, infos = train(state, step, Epochs((x, y), 4), 20, key=key)
            return jnp.sum(state.model.weight**2) + infos.loss.mean()

        arguments = start, jnp.asarray(0.03), y
        for i, slope in enumerate(jax.jit(jax.grad(final, (0, 1, 2)))(*arguments)):
            assert jnp.linalg.norm(slope) > 1e-3
            of_one = jax.jit(lambda leaf, i=i: final(*arguments[:i], leaf, *arguments[i + 1 :]))
            check_grads(of_one, arguments[i : i + 1], 1, modes=["rev"], eps=1e-6, rtol=1e-5)


def test_metrics_of_every_step_and_of_none(key):
    step = make_step(
        lambda w, batch, key: (w * jnp.mean(batch), {"batch": jnp.max(batch)}), optax.sgd(0.0)
    )
    start, sampler = step.init(jnp.asarray(1.0)), Epochs(jnp.arange(10.0), 4, shuffle=False)
    _, infos = train(start, step, sampler, 5, key=key)
    np.testing.assert_array_equal(infos.metrics["batch"], [3, 7, 9, 3, 7])
    state, infos = train(start, step, sampler, 0, key=key)
    jax.tree.map(np.testing.assert_array_equal, state, start)
    assert infos.loss.shape == infos.metrics["batch"].shape == (0,)


def test_what_cannot_be_is_refused(key):
    start, data = ADAM.init(Linear(jnp.ones((2, 4)))), regression(key)
    stacked = Epochs(jnp.ones((3, 10, 4)), 4, stacked=True)
    for change, words in (
        (
            {"sampler": HostBatches(lambda step: iter([]))},
            "`sampler` must draw its batches in .*`training.fit`",
        ),
        ({"num_steps": -1}, "`num_steps` must be at least 0, got -1"),
        ({"first_step": -1}, "`first_step` must be at least 0, got -1"),
        (
            {"step": make_step(noisy_error, optax.sgd(0.1, momentum=0.9))},
            "hold an `opt_state` of the step's optimiser",
        ),
        ({"sampler": stacked}, "`sampler` must hold the data of one member, got those of all"),
        (
            {"state": eqx.filter_vmap(ADAM.init)(linear_members(key))},
            r"be that of one member, got \(3,\) of them",
        ),
    ):
        call = {
            "state": start,
            "step": ADAM,
            "sampler": Epochs(data, 4),
            "num_steps": 3,
            "key": key,
        } | change
        with pytest.raises((TypeError, ValueError), match=words):
            train(**call)


def test_data_of_all_members_are_mapped_over(key):
    sampler = Epochs(jnp.arange(3.0)[:, None, None] + jnp.zeros((3, 10, 4)), 4, stacked=True)
    step = make_step(lambda w, batch, key: jnp.mean(batch) + 0 * w, optax.sgd(0.1))
    start = step.init(jnp.array(1.0))
    infos = eqx.filter_vmap(lambda sampler: train(start, step, sampler, 2, key=key)[1])(sampler)
    np.testing.assert_array_equal(infos.loss, [[0, 0], [1, 1], [2, 2]])
