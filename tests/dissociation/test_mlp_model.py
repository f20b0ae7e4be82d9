import jax
import jaxtyping
import numpy as np
import pytest

from dissociation.models import MLP, BilinearNetwork

X = np.random.default_rng(0).normal(size=(5, 12)).astype(np.float32)


@pytest.fixture
def unchecked():
    """As users run it: our own errors, not the type checker's."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("last_activation", [True, False])
def test_by_hand(last_activation):
    model = MLP(12, 8, 2, 3, last_activation=last_activation, key=jax.random.key(0))
    (a, first), (b, second), (c, third) = (
        [np.asarray(p) for p in (layer.weight, layer.bias)] for layer in model.layers
    )
    hidden = np.maximum(X @ a.T + first, 0)
    features = hidden @ b.T + second
    features = np.maximum(features, 0) if last_activation else features
    found = jax.vmap(model.representations)(X)
    assert set(found) == {"hidden0", "features", "logits"}
    np.testing.assert_allclose(found["hidden0"], hidden, atol=1e-6)
    np.testing.assert_allclose(found["features"], features, atol=1e-6)
    np.testing.assert_allclose(found["logits"], features @ c.T + third, atol=1e-6)
    np.testing.assert_array_equal(jax.vmap(model)(X), found["logits"])


def test_initialisation_is_pytorchs():
    model = MLP(784, 200, 2, 10, key=jax.random.key(0))
    for layer, fan_in in zip(model.layers, (784, 200, 200), strict=True):
        for part in (layer.weight, layer.bias):
            assert np.abs(part).max() <= fan_in**-0.5
        np.testing.assert_allclose(layer.weight.std(), fan_in**-0.5 / 3**0.5, rtol=0.05)
        assert np.abs(layer.bias).max() > 0.5 * fan_in**-0.5  # biases too


@pytest.mark.parametrize(
    ("options", "words"),
    [({"depth": 0}, "`depth` must be"), ({"activation": "swish"}, "'relu', 'tanh', 'gelu', 'none'")],
)
def test_bad_input_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        MLP(**options, key=jax.random.key(0))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("model", [MLP, BilinearNetwork])
def test_a_batch_is_refused(model):
    # A square batch would pass through the bilinear network as columns.
    for batch in (X, X.T, np.zeros((12, 12), np.float32), np.float32(1)):
        with pytest.raises(ValueError, match=r"`x` must be one example of shape"):
            model(12, 8, key=jax.random.key(0))(batch)
