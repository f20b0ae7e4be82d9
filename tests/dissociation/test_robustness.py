import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation.measures import error_rate, input_noise_error, linear_head, parameter_noise_error
from dissociation.models import BilinearNetwork, representations
from dissociation.recipes._bilinear import loss_and_accuracy
from dissociation.recipes._mnist import HeldOutPerformance
from dissociation.rewrites import certify, layer_inputs, neuron_groups, parameter_noise
from dissociation.rewrites._noise import perturb_parameters

SCALES = jnp.array([0.0, 0.3, 1.0, 3.0])


def problem(key, samples=200):
    model = eqx.nn.MLP(6, 3, 16, 2, key=key)  # with biases
    images = jax.random.normal(jax.random.fold_in(key, 1), (samples, 6))
    labels = jax.nn.one_hot(jax.vmap(model)(images).argmax(1), 3)
    noise = jax.random.normal(jax.random.fold_in(key, 2), images.shape)
    return model, images, labels, noise


def direct_input_errors(model, images, labels, noise):
    return jnp.stack([error_rate(jax.vmap(model)(images + s * noise), labels) for s in SCALES])


def test_input_noise_against_direct_evaluation(key):
    model, images, labels, noise = problem(key)
    expected = direct_input_errors(model, images, labels, noise)
    assert expected[0] == 0
    assert expected[-1] > 0.1
    for scales_per_batch in (3, None):
        errors = input_noise_error(model, images, labels, SCALES, noise=noise, scales_per_batch=scales_per_batch)
        np.testing.assert_allclose(errors, expected, atol=1 / 200)  # a tie may fall either way
    general = input_noise_error(lambda x: model(x), images, labels, SCALES, noise=noise)
    np.testing.assert_allclose(general, expected, atol=1 / 200)


def test_parameter_noise_against_direct_evaluation(key):
    model, images, labels, _ = problem(key)
    noise = parameter_noise(model, key=key)
    expected = [error_rate(jax.vmap(perturb_parameters(model, noise, s))(images), labels) for s in SCALES]
    for scales_per_batch in (1, None):
        errors = parameter_noise_error(model, images, labels, SCALES, noise=noise, scales_per_batch=scales_per_batch)
        np.testing.assert_allclose(errors, jnp.stack(expected), atol=1 / 200)


class Convolutional(eqx.Module):
    """A network of images [1, 4, 4] with batch normalisation and dropout."""

    convolution: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key):
        self.convolution = eqx.nn.Conv2d(1, 2, 3, key=key)
        self.norm = eqx.nn.BatchNorm(2, axis_name="batch", mode="batch")
        self.dropout, self.head = eqx.nn.Dropout(0.5), eqx.nn.Linear(8, 3, key=key)

    def __call__(self, x, state):
        x, state = self.norm(self.convolution(x), state)
        return self.head(self.dropout(jax.nn.relu(x).ravel())), state


def stateful(key):
    """A pair, images, labels, and the function of one image that the pair computes, of the convolution and the head."""
    model, state = eqx.nn.make_with_state(Convolutional)(key)
    means, variances = jnp.asarray([0.3, -0.2]), jnp.asarray([0.02, 2.0])
    state = state.set(model.norm.batch_state_index, (means, variances))

    def plain(parts, x):
        x = parts.convolution(x)
        x = (x - means[:, None, None]) / jnp.sqrt(variances + model.norm.eps)[:, None, None]
        x = parts.norm.weight[:, None, None] * x + parts.norm.bias[:, None, None]
        return parts.head(jax.nn.relu(x).ravel())

    images = jax.random.normal(jax.random.fold_in(key, 1), (60, 1, 4, 4))
    return (model, state), images, jax.vmap(plain, (None, 0))(model, images).argmax(1), plain


def test_networks_with_state_are_taken_for_the_functions_that_they_are(key):
    """Pairs (model, state), images of their own shape, and labels that are integers, wherever a model is evaluated."""
    pair, images, labels, plain = stateful(key)
    function = lambda x: plain(pair[0], x)  # noqa: E731
    same = certify(pair, function, images)
    assert bool(same.kept(1e-5))
    draws = jax.random.normal(key, images.shape)
    own, wanted = (input_noise_error(m, images, labels, SCALES, noise=draws) for m in (pair, function))
    np.testing.assert_allclose(own, wanted, atol=1 / 60)
    assert wanted[-1] > 0.1
    for where in (None, lambda m: m[0].head):
        noise = parameter_noise(pair, key=key, where=where)
        own = parameter_noise_error(pair, images, labels, SCALES, noise=noise)
        logits = [jax.vmap(plain, (None, 0))(perturb_parameters(pair, noise, s)[0], images) for s in SCALES]
        np.testing.assert_allclose(own, [error_rate(each, labels) for each in logits], atol=1 / 60)
    np.testing.assert_array_equal(linear_head(pair)[0], pair[0].head.weight)
    features = representations(pair, images)["features"]
    np.testing.assert_allclose(jax.vmap(pair[0].head)(features.reshape(60, 8)), jax.vmap(function)(images), atol=1e-5)


LAST = ".layers[1].weight"


class Own(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __call__(self, x):
        return self.second(jax.nn.relu(self.first(x)))


def test_a_stack_of_square_networks_is_no_network(key):
    """Their products have shapes that fit where there are as many members as neurons."""
    models = eqx.filter_vmap(lambda k: eqx.nn.MLP(4, 4, 4, 1, key=k))(jax.random.split(key, 4))
    x, labels = jnp.ones((2, 4)), np.asarray([0, 1])
    for call in (
        lambda m: certify(m, m, x),
        lambda m: input_noise_error(m, x, labels, SCALES, noise=x),
        lambda m: parameter_noise_error(m, x, labels, SCALES, noise=m),
        lambda m: neuron_groups(m, x[0]),
        lambda m: layer_inputs(m, x, ".second.weight" if isinstance(m, Own) else "[0]" * isinstance(m, tuple) + LAST),
    ):
        for stacked in (models, (eqx.nn.Sequential(models.layers), None), Own(*models.layers)):
            with pytest.raises(TypeError, match="are those of stacked networks"):
                call(stacked)


def test_wrong_arguments_are_named(key):
    model, images, labels, noise = problem(key)
    with pytest.raises(ValueError, match="`scales` must be non-negative"):
        input_noise_error(model, images, labels, -SCALES, noise=noise)
    for other in (eqx.nn.MLP(6, 3, 1, 2, key=key), eqx.nn.MLP(6, 3, 16, 1, key=key)):
        with pytest.raises(ValueError, match="`noise` must be shaped like the parameters"):
            parameter_noise_error(model, images, labels, SCALES, noise=parameter_noise(other, key=key))
    stacked = eqx.filter_vmap(lambda key: eqx.nn.MLP(6, 3, 16, 2, key=key))(jax.random.split(key, 2))
    wide, other = eqx.nn.MLP(7, 3, 16, 2, key=key), eqx.nn.MLP(6, 2, 16, 2, key=key)
    for wrong, error, words in (
        (stacked, TypeError, r"`model` must take one example of shape \(6,\) \(a single model, no stacked ones\)"),
        (wide, TypeError, r"`model` must take one example of shape \(6,\)"),
        (other, ValueError, r"`model` must give an output for each of the 3 classes, got shape \(2,\)"),
    ):
        with pytest.raises(error, match=words):
            input_noise_error(wrong, images, labels, SCALES, noise=noise)
        with pytest.raises(error, match=words):
            parameter_noise_error(wrong, images, labels, SCALES, noise=parameter_noise(wrong, key=key))


@pytest.mark.parametrize(("bad", "label"), [(np.nan, 0), (np.inf, 2)])
def test_a_network_that_has_diverged_has_no_error_rate(bad, label, key):
    labels = jax.nn.one_hot(jnp.full(5, label), 3)
    logits = jnp.zeros((5, 3)).at[3, 1].set(bad)
    assert np.isnan(error_rate(logits, labels))
    assert np.isnan(jax.jit(error_rate)(logits, labels))
    members = jax.vmap(error_rate, (0, None))(jnp.stack([labels, logits]), labels)
    np.testing.assert_array_equal(members, [0, np.nan])
    # A class that is ruled out is a prediction.
    assert error_rate(labels.at[:, 1].set(-np.inf), labels) == 0


def test_noise_that_breaks_the_network_gives_nan(key):
    model, images, labels, noise = problem(key)
    broken = eqx.tree_at(lambda m: m.layers[1].weight, model, replace_fn=lambda w: w.at[0, 0].set(jnp.nan))
    draws = parameter_noise(model, key=key)
    for call in (
        lambda: input_noise_error(broken, images, labels, SCALES, noise=noise),
        lambda: input_noise_error(lambda x: broken(x), images, labels, SCALES, noise=noise),
        lambda: parameter_noise_error(broken, images, labels, SCALES, noise=draws),
    ):
        with pytest.warns(RuntimeWarning, match=r"`model` gives outputs .* at `scales` \[0.  0.3 1.  3. \]"):
            assert np.isnan(call()).all()
    huge = jax.tree.map(lambda draw: draw * 1e30, draws)
    with pytest.warns(RuntimeWarning, match=r"at `scales` \[0.3 1.  3. \]"):
        errors = parameter_noise_error(model, images, labels, SCALES, noise=huge)
    np.testing.assert_array_equal(np.isnan(errors), [False, True, True, True])


def test_observers_of_a_network_that_has_diverged_say_nan():
    images, labels = jnp.ones((4, 3)), jnp.eye(2)[jnp.array([0, 0, 1, 0])]
    model = eqx.nn.MLP(3, 2, 4, 1, use_bias=False, key=jax.random.key(0))

    def broken(model):
        return jax.tree.map(lambda leaf: leaf * np.nan if eqx.is_array(leaf) else leaf, model)

    observe = HeldOutPerformance(images, labels)
    sound, lost = (observe(m, jnp.asarray(0), jax.random.key(0))["test_error"] for m in (model, broken(model)))
    assert 0 <= sound <= 1
    assert np.isnan(lost)  # and not 0.25, the share of other classes than 0
    network = BilinearNetwork(3, 4, 2, key=jax.random.key(0))
    assert np.isnan(loss_and_accuracy(broken(network), images, labels)[1])
