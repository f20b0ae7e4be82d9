"""One optimiser step as a pure function: `make_step`, `State`."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from linear_regression import (
    Linear,
    Normalised,
    linear_members,
    noisy_error,
    normalised_error,
    regression,
    squared_error,
    weights,
)

from dissociation.training import Epochs, FullBatch, Save, fit, make_step, train


def with_metrics(model, batch, key):
    value = squared_error(model, batch, key)
    return value, {"twice": 2 * value, "draw": jax.random.normal(key)}


def test_a_state_survives_transformations_and_compiles_once(key):
    models, data = linear_members(key), regression(key)
    step = make_step(noisy_error, optax.adam(0.05))
    start = eqx.filter_jit(eqx.filter_vmap(step.init))(models)
    mapped = jax.jit(jax.vmap(lambda state: step(state, data, key)[0]))(start)
    assert (mapped.model.name, mapped.step.tolist()) == ("linear", [1, 1, 1])
    traces = []
    run = jax.jit(lambda state: traces.append(1) or step(state, data, key)[0])
    for m in range(3):
        alone = run(step.init(Linear(models.weight[m])))
        np.testing.assert_allclose(mapped.model.weight[m], alone.model.weight, rtol=1e-5, atol=1e-6)
    assert len(traces) == 1


def test_replace_changes_what_it_is_told(key):
    step = make_step(squared_error, lambda rate: optax.sgd(rate, momentum=0.9))
    state = step.init(Linear(jnp.ones((2, 4))), aux={"mean": 1.0}, hyperparams=0.5)
    other = state.replace(model=Linear(jnp.zeros((2, 4)), "other"), hyperparams=jnp.asarray(0.25))
    assert (other.model.name, state.model.name) == ("other", "linear")
    assert (other.hyperparams, other.aux) == (0.25, state.aux)
    jax.tree.map(np.testing.assert_array_equal, other.opt_state, state.opt_state)
    with pytest.raises(
        ValueError, match="'model', 'aux', 'opt_state', 'hyperparams', 'step', got 'weight'"
    ):
        state.replace(weight=1)


def test_hyperparameters_are_numbers_of_the_state(key):
    data = regression(key)
    step = make_step(
        squared_error,
        lambda settings: optax.adamw(settings["rate"], weight_decay=settings["decay"]),
    )
    state = step.init(Linear(jnp.ones((2, 4))), hyperparams={"rate": 0.1, "decay": 0.5})
    plain = make_step(squared_error, optax.adamw(0.1, weight_decay=0.5))
    wanted, _ = plain(plain.init(Linear(jnp.ones((2, 4)))), data, key)
    found, _ = step(state, data, key)
    np.testing.assert_allclose(found.model.weight, wanted.model.weight, rtol=1e-6)
    assert found.hyperparams == state.hyperparams


def test_batch_statistics_are_carried_by_every_member(key):
    member_keys = jax.random.split(key, 3)
    models, aux = eqx.filter_jit(eqx.filter_vmap(eqx.nn.make_with_state(Normalised)))(member_keys)
    x, y = map(np.asarray, regression(key, samples=12))
    x = 2 * x + 1
    optimizer = optax.adam(0.05)
    step, sampler = make_step(normalised_error, optimizer), Epochs((x, y), 4, shuffle=False)
    result = fit(models, step, sampler, num_steps=9, key=key, aux=aux)
    state, losses = result.state, result.history.loss
    slopes = eqx.filter_value_and_grad(normalised_error, has_aux=True)

    @eqx.filter_jit
    def start(key):
        model, carried = eqx.nn.make_with_state(Normalised)(key)
        return model, carried, optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def one_step(model, carried, opt_state, batch):
        (value, carried), slope = slopes(model, carried, batch, None)
        updates, opt_state = optimizer.update(slope, opt_state)
        return eqx.apply_updates(model, updates), carried, opt_state, value

    for m in range(3):
        model, carried, opt_state = start(member_keys[m])
        for at, i in enumerate([0, 4, 8] * 3):
            batch = x[i : i + 4], y[i : i + 4]
            model, carried, opt_state, value = one_step(model, carried, opt_state, batch)
            np.testing.assert_allclose(losses[m, at], value, rtol=1e-4)
        found = jax.tree.map(lambda leaf, m=m: leaf[m], (state.model.head.weight, state.aux))
        close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
        jax.tree.map(close, jax.tree.leaves(found), jax.tree.leaves((model.head.weight, carried)))


def test_the_callers_aux_outlives_the_call(key):
    model, aux = eqx.filter_jit(eqx.nn.make_with_state(Normalised))(key)
    step = make_step(normalised_error, optax.sgd(0.1))
    state = step.init(model, aux=aux)
    first, second = (step(state, regression(key), key)[0] for _ in range(2))
    np.testing.assert_array_equal(first.model.head.weight, second.model.head.weight)


def test_multipliers_ascend_while_the_model_descends_and_is_projected():
    """min w^2 with w = 1 by a Lagrangian: w = 1, multiplier -2; w is kept below 1.2."""

    def lagrangian(w, multiplier, batch, key):
        return w**2 + multiplier * (w - 1) + 0.5 * (w - 1) ** 2 + 0 * jnp.sum(batch), multiplier

    def ascend(state):
        w = jnp.minimum(state.model, 1.2)
        return state.replace(model=w, aux=state.aux + 0.1 * (w - 1))

    step = make_step(lagrangian, optax.sgd(0.1), after_update=ascend)
    w, multiplier, clipped, values = 3.0, 0.0, 0, []
    for _ in range(300):
        values.append(w**2 + multiplier * (w - 1) + 0.5 * (w - 1) ** 2)
        w -= 0.1 * (2 * w + multiplier + (w - 1))
        clipped += w > 1.2
        w = min(w, 1.2)
        multiplier += 0.1 * (w - 1)
    result = fit(
        jnp.full(2, 3.0),
        step,
        FullBatch(jnp.ones(1)),
        num_steps=300,
        key=jax.random.key(0),
        aux=jnp.zeros(2),
    )
    np.testing.assert_allclose(result.models, w, rtol=1e-5)
    np.testing.assert_allclose(result.state.aux, multiplier, rtol=1e-5)
    np.testing.assert_allclose(result.history.loss[0], values, rtol=1e-4)
    np.testing.assert_allclose([w, multiplier], [1, -2], rtol=1e-3)
    assert clipped


def test_micro_batches_average_to_the_whole(key):
    models, data = linear_members(key), regression(key, samples=24)
    whole, parts = (
        fit(
            models,
            make_step(with_metrics, optax.sgd(0.1), micro_batches=count),
            Epochs(data, 8),
            num_steps=6,
            key=key,
        )
        for count in (1, 4)
    )
    np.testing.assert_allclose(weights(parts), weights(whole), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(parts.history.loss, whole.history.loss, rtol=1e-5)
    np.testing.assert_allclose(
        parts.history.metrics["twice"], whole.history.metrics["twice"], rtol=1e-5
    )
    # A part draws with a key of its own: the mean of four draws, not one draw.
    step = make_step(
        lambda w, batch, key: jax.random.normal(key) + 0 * w, optax.sgd(0.1), micro_batches=4
    )
    _, info = jax.jit(lambda w, key: step(step.init(w), jnp.ones(8), key))(1.0, key)
    draws = np.asarray(
        jax.jit(lambda key: jax.vmap(jax.random.normal)(jax.random.split(key, 4)))(key)
    )
    assert info.loss == pytest.approx(float(draws.mean()), rel=1e-5)
    assert np.std(draws) > 0.1


def test_micro_batches_see_the_samples_in_order_and_divide_the_batch(key):
    """They hand what they carry from one to the next."""

    def loss(w, seen, batch, key):
        return w * jnp.mean(batch), 10 * seen + batch[0]

    step = make_step(loss, optax.sgd(1.0), micro_batches=3)
    state, info = step(step.init(jnp.asarray(1.0), aux=0.0), jnp.arange(1.0, 7.0), key)
    assert state.aux == 135  # the parts begin at 1, 3 and 5
    assert info.loss == pytest.approx(3.5)
    assert state.model == pytest.approx(1 - 3.5)
    with pytest.raises(
        ValueError,
        match=r"`micro_batches` must divide every batch \(shape \(7,\)\), got 3.*drop the",
    ):
        step(state, jnp.ones(7), key)


def test_an_optimiser_and_its_hyperparameters_belong_together(key):
    model, made, sgd = Linear(jnp.ones((2, 4))), partial(make_step, squared_error), optax.sgd(0.1)
    for call, error, words in (
        (
            lambda: made(optax.adam).init(model),
            TypeError,
            "be an optax.GradientTransformation if .* is None",
        ),
        (
            lambda: made(sgd).init(model, hyperparams=0.1),
            TypeError,
            "be a function .*which does not use them",
        ),
        (
            lambda: made(lambda rate: rate).init(model, hyperparams=0.1),
            TypeError,
            "return an optax.GradientTransform",
        ),
        (
            lambda: made(None),
            TypeError,
            "`optimizer` must be of type GradientTransformation .* a function, got None",
        ),
        (lambda: made(sgd, micro_batches=0), ValueError, "`micro_batches` must"),
        (lambda: made(sgd, micro_batches=2.0), TypeError, "`micro_batches` must"),
        (lambda: made(sgd).init(Linear(jnp.ones((2, 4), complex))), TypeError, "complex64"),
        (
            lambda: made(sgd).init(jnp.tanh),
            ValueError,
            "`model` must hold at least one array, got none",
        ),
    ):
        with pytest.raises(error, match=words):
            call()


CURVATURE = jnp.array([[1.0, 3.0, 10.0], [2.0, 0.5, 7.0]])


def quadratic(weights, batch, key):
    return 0.5 * jnp.sum(batch.mean(0) * weights**2) - weights.sum()


LBFGS, PLATEAU = optax.lbfgs(), optax.contrib.reduce_on_plateau(patience=1, factor=0.5)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (LBFGS, {}),
        (optax.chain(optax.adam(0.3), PLATEAU), {"hyperparams": jnp.ones(2)}),
        (optax.MultiSteps(optax.chain(optax.sgd(0.05), PLATEAU), 2), {}),
        (optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), {}),
    ],
    ids=["lbfgs", "hyperparameters", "several steps", "their transformation"],
)
def test_optimisers_get_the_value(optimizer, options, key):
    """As in a loop of Optax by hand, which gives them the loss, its gradient, and the function."""
    start = jnp.array([3.0, -2.0, 1.0])
    step = make_step(quadratic, (lambda _: optimizer) if options else optimizer)
    result = fit(
        jnp.stack([start, start]), step, FullBatch(CURVATURE), num_steps=8, key=key, **options
    )
    multi = isinstance(optimizer, optax.MultiSteps)
    update = optimizer.update if multi else optax.with_extra_args_support(optimizer).update
    loss = lambda weights: quadratic(weights, CURVATURE, key)  # noqa: E731

    @jax.jit
    def one(weights, state):
        value, slope = jax.value_and_grad(loss)(weights)
        more = {"value": value, "grad": slope, "value_fn": loss}
        updates, state = update(slope, state, weights, **more)
        return optax.apply_updates(weights, updates), state, value

    weights, state, values = start, jax.jit(optimizer.init)(start), []
    for _ in range(8):
        weights, state, value = one(weights, state)
        values.append(value)
    np.testing.assert_allclose(result.history.loss, [values, values], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result.models[1], weights, rtol=1e-4, atol=1e-5)
    if optimizer is LBFGS:
        np.testing.assert_allclose(weights, 1 / CURVATURE.mean(0), rtol=1e-3)


def test_an_optimiser_that_takes_no_value_gets_none(key):
    optimizer, weights = (
        optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2),
        jnp.array([3.0, -2.0, 1.0]),
    )
    result = fit(
        weights[None], make_step(quadratic, optimizer), FullBatch(CURVATURE), num_steps=4, key=key
    )
    state = optimizer.init(weights)
    for _ in range(4):
        slope = jax.grad(quadratic)(weights, CURVATURE, key)
        updates, state = optimizer.update(slope, state, weights)
        weights = optax.apply_updates(weights, updates)
    np.testing.assert_allclose(result.models[0], weights, rtol=1e-5)


def test_functions_of_other_arguments_are_named(key):
    data, models = FullBatch(CURVATURE), jnp.ones((2, 3))
    four, three = (
        make_step(lambda m, aux, b, k: (0.0, aux), optax.sgd(0.1)),
        make_step(quadratic, optax.sgd(0.1)),
    )
    for step, aux, words in (
        (four, None, "model, batch, key"),
        (three, jnp.ones(2), "model, aux, batch, key"),
    ):
        for call in (
            lambda step=step, aux=aux: fit(models, step, data, num_steps=1, key=key, aux=aux),
            lambda step=step, aux=aux: step(step.init(models[0], aux=aux), CURVATURE, key),
            lambda step=step, aux=aux: train(step.init(models[0], aux=aux), step, data, 1, key=key),
        ):
            with pytest.raises(
                TypeError, match=rf"`loss` must take \d arguments \({words}\), .*With an `aux`"
            ):
                call()
    for observe in (lambda model, step: 0.0, lambda model, aux, step, key: 0.0):
        with pytest.raises(
            TypeError, match=r"`observe` must take 3 arguments \(model, step, key\), got"
        ):
            fit(models, three, data, num_steps=1, key=key, save=Save(observe))


def test_what_is_returned_must_be_what_a_loop_can_carry(key):
    model, data = Linear(jnp.ones((2, 4))), regression(key)

    def run(loss, after_update=None, aux=None):
        step = make_step(loss, optax.sgd(0.1), after_update=after_update)
        return step(step.init(model, aux=aux), data, key)

    with pytest.raises(
        ValueError, match="`after_update` must return the state as it was: a State, arrays of"
    ):
        run(squared_error, lambda state: state.replace(model=Linear(jnp.ones((2, 3)))))
    with pytest.raises(ValueError, match="`loss` must return aux as it was"):
        run(lambda m, aux, b, k: (squared_error(m, b, k), {"other": aux}), aux=jnp.ones(()))
    with pytest.raises(ValueError, match="`loss` must return a scalar and the new `aux`"):
        run(lambda m, aux, b, k: squared_error(m, b, k), aux=jnp.ones(()))
