import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from noisy import perturbed
from zoo import residual_cnn

from dissociation.measures import error_rate, input_noise_error, linear_head, parameter_noise_error
from dissociation.models import representations
from dissociation.rewrites import certify, layer_inputs, neuron_groups, parameter_noise

SCALES = jnp.array([0.0, 0.3, 1.0, 3.0])


def problem(key, samples=200):
    model = eqx.nn.MLP(6, 3, 16, 2, key=key)  # with biases
    images = jax.random.normal(jax.random.fold_in(key, 1), (samples, 6))
    labels = jax.nn.one_hot(jax.vmap(model)(images).argmax(1), 3)
    noise = jax.random.normal(jax.random.fold_in(key, 2), images.shape)
    return model, images, labels, noise


def direct(run, labels):
    """Error rates of the logits that `run` gives for each scale."""
    return jnp.stack([error_rate(run(scale), labels) for scale in SCALES])


def test_input_noise_against_direct_evaluation(key):
    model, images, labels, noise = problem(key)
    expected = direct(lambda s: jax.vmap(model)(images + s * noise), labels)
    assert expected[0] == 0
    assert expected[-1] > 0.1
    errors = input_noise_error(model, images, labels, SCALES, noise=noise, scales_per_batch=3)
    np.testing.assert_allclose(errors, expected, atol=1 / 200)  # a tie may fall either way
    general = input_noise_error(lambda x: model(x), images, labels, SCALES, noise=noise)
    np.testing.assert_allclose(general, expected, atol=1 / 200)


def test_parameter_noise_against_direct_evaluation(key):
    perceptron, images, labels, _ = problem(key)
    for model in (perceptron, eqx.nn.Linear(6, 3, key=key)):  # the latter the general way
        noise = parameter_noise(model, key=key)
        expected = direct(lambda s: jax.vmap(perturbed(model, noise, s))(images), labels)  # noqa: B023
        errors = parameter_noise_error(
            model, images, labels, SCALES, noise=noise, scales_per_batch=1
        )
        np.testing.assert_allclose(errors, expected, atol=1 / 200)


@pytest.mark.slow
@pytest.mark.usefixtures("drawn_by_numpy")
def test_networks_with_state_are_taken_for_the_functions_that_they_are(key):
    """Pairs (model, state), images of their own shape, and labels that are integers, wherever a model is evaluated."""
    (model, state), images = residual_cnn(key, "batch"), jax.random.normal(key, (60, 1, 8, 8))
    run = eqx.filter_jit(
        lambda model, x: jax.vmap(lambda row: eqx.nn.inference_mode(model)(row, state)[0])(x)
    )
    common = run(model, images).mean(0)  # without which all images are of one class
    pair = eqx.tree_at(lambda m: m.head.bias, model, model.head.bias - common), state
    function = lambda x: run(pair[0], x[None])[0]  # noqa: E731
    labels = run(pair[0], images).argmax(1)
    assert bool(certify(pair, function, images).kept(1e-5))
    draws = jax.random.normal(jax.random.fold_in(key, 1), images.shape)
    own, wanted = (
        input_noise_error(m, images, labels, SCALES, noise=draws) for m in (pair, function)
    )
    np.testing.assert_allclose(own, wanted, atol=1 / 60)
    assert wanted[-1] > 0.1
    for where in (None, lambda m: m[0].head):
        noise = parameter_noise(pair, key=key, where=where)
        own = parameter_noise_error(pair, images, labels, SCALES, noise=noise)
        wanted = direct(lambda s: run(perturbed(pair, noise, s)[0], images), labels)  # noqa: B023
        np.testing.assert_allclose(own, wanted, atol=1 / 60)
    np.testing.assert_array_equal(linear_head(pair)[0], pair[0].head.weight)
    features = representations(pair, images)["features"]
    np.testing.assert_allclose(jax.vmap(pair[0].head)(features), run(pair[0], images), atol=1e-5)


def test_a_stack_of_square_networks_is_no_network(key):
    """Their products have shapes that fit where there are as many members as neurons."""
    models = eqx.filter_vmap(lambda k: eqx.nn.MLP(4, 4, 4, 1, key=k))(jax.random.split(key, 4))
    x, labels = jnp.ones((2, 4)), np.asarray([0, 1])
    for call in (
        lambda m: certify(m, m, x),
        lambda m: input_noise_error(m, x, labels, SCALES, noise=x),
        lambda m: parameter_noise_error(m, x, labels, SCALES, noise=m),
        lambda m: neuron_groups(m, x[0]),
        lambda m: layer_inputs(m, x, "[0]" * isinstance(m, tuple) + ".layers[1].weight"),
    ):
        for stacked in (models, (eqx.nn.Sequential(models.layers), None)):
            with pytest.raises(TypeError, match="are those of stacked networks"):
                call(stacked)


def test_wrong_arguments_are_named(key):
    model, images, labels, noise = problem(key)
    with pytest.raises(ValueError, match="`scales` must be non-negative"):
        input_noise_error(model, images, labels, -SCALES, noise=noise)
    drawn = parameter_noise(model, key=key)
    for wrong in (
        parameter_noise(eqx.nn.MLP(6, 3, 16, 1, key=key), key=key),
        drawn.layers,
        eqx.tree_at(lambda n: n.layers[0].weight, drawn, jnp.ones((10, 1))),
    ):
        with pytest.raises(ValueError, match="`noise` must be shaped like the parameters"):
            parameter_noise_error(model, images, labels, SCALES, noise=wrong)
    stacked = eqx.filter_vmap(lambda key: eqx.nn.MLP(6, 3, 16, 2, key=key))(
        jax.random.split(key, 2)
    )
    for wrong, error, words in (
        (
            stacked,
            TypeError,
            r"`model` must take one example of shape \(6,\) \(a single model, no stacked ones\)",
        ),
        (
            eqx.nn.MLP(6, 2, 16, 2, key=key),
            ValueError,
            r"`model` must give an output for each of the 3 classes, got",
        ),
        (
            eqx.nn.MLP(6, 4, 16, 2, key=key),
            ValueError,
            r"`labels` must have 4 classes, .* got 3\..*one_hot",
        ),
    ):
        draws = parameter_noise(wrong, key=key)
        for run, own in ((input_noise_error, noise), (parameter_noise_error, draws)):
            with pytest.raises(error, match=words):
                run(wrong, images, labels, SCALES, noise=own)


@pytest.mark.parametrize(("bad", "label"), [(np.nan, 0), (np.inf, 2)])
def test_a_network_that_has_diverged_has_no_error_rate(bad, label, key):
    labels = jax.nn.one_hot(jnp.full(5, label), 3)
    logits = jnp.zeros((5, 3)).at[3, 1].set(bad)
    assert np.isnan(error_rate(logits, labels))
    assert np.isnan(jax.jit(error_rate)(logits, labels))
    # A class that is ruled out is a prediction.
    assert error_rate(labels.at[:, 1].set(-np.inf), labels) == 0


def test_noise_that_breaks_the_network_gives_nan(key):
    model, images, labels, noise = problem(key)
    broken = eqx.tree_at(
        lambda m: m.layers[1].weight, model, replace_fn=lambda w: w.at[0, 0].set(jnp.nan)
    )
    draws = parameter_noise(model, key=key)
    for call in (
        lambda: input_noise_error(broken, images, labels, SCALES, noise=noise),
        lambda: input_noise_error(lambda x: broken(x), images, labels, SCALES, noise=noise),
        lambda: parameter_noise_error(broken, images, labels, SCALES, noise=draws),
    ):
        with pytest.warns(
            RuntimeWarning, match=r"`model` gives outputs .* at `scales` \[0.  0.3 1.  3. \]"
        ):
            assert np.isnan(call()).all()
    huge = jax.tree.map(lambda draw: draw * 1e30, draws)
    with pytest.warns(RuntimeWarning, match=r"at `scales` \[0.3 1.  3. \]"):
        errors = parameter_noise_error(model, images, labels, SCALES, noise=huge)
    np.testing.assert_array_equal(np.isnan(errors), [False, True, True, True])
