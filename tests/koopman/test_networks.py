import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation.models import Affine
from koopman import Autoencoder, FeatureMap
from koopman._encoders._networks import build_network

pytestmark = pytest.mark.usefixtures("drawn_by_numpy")

IMAGES = np.random.default_rng(0).uniform(size=(3, 28, 28)).astype(np.float32)
STATES = np.random.default_rng(1).normal(size=(12, 3)).astype(np.float32)


def test_feature_maps_have_norm_one_and_a_finite_slope_at_zero():
    model = FeatureMap(key=jax.random.key(0))
    run = eqx.filter_jit(lambda model: jax.vmap(model)(IMAGES))
    features = np.asarray(run(model))
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1, atol=1e-6)
    longer = FeatureMap(feature_norm=3.0, key=jax.random.key(0))
    np.testing.assert_allclose(run(longer), 3 * features, rtol=1e-5)
    head = lambda m: (m.encoder.head.weight, m.encoder.head.bias)  # noqa: E731
    dead = eqx.tree_at(head, model, replace_fn=jnp.zeros_like)
    slopes = eqx.filter_jit(eqx.filter_grad(lambda m: jnp.sum(m(IMAGES[0]))))(dead)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))


def test_orthogonal_dynamics():
    free, kept = (Autoencoder(orthogonal=o, key=jax.random.key(0)) for o in (False, True))
    matrix = kept.matrix()
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(5), atol=1e-6)
    assert np.abs(free.matrix() @ free.matrix().T - np.eye(5)).max() > 0.1
    assert kept(IMAGES[0]).shape == (28, 28)


def test_networks_of_your_own():
    make = lambda key: Affine(3, 2, key=key)  # noqa: E731
    layer = make(jax.random.key(7))
    raw = FeatureMap(2, encoder=layer, feature_norm=None, key=jax.random.key(0))
    np.testing.assert_allclose(jax.vmap(raw)(STATES), jax.vmap(layer)(STATES), rtol=1e-6)
    unit = FeatureMap(2, encoder=layer, key=jax.random.key(0))
    np.testing.assert_allclose(jnp.linalg.norm(jax.vmap(unit)(STATES), axis=1), 1, atol=1e-6)
    first, second = (
        FeatureMap(2, encoder=make, key=jax.random.key(seed)).encoder.weight for seed in (0, 1)
    )
    assert np.abs(first - second).max() > 0.01

    model = Autoencoder(
        2, encoder=make, decoder=lambda key: Affine(2, 3, key=key), key=jax.random.key(0)
    )
    np.testing.assert_allclose(
        model(STATES[0]), model.decoder(model.encoder(jnp.asarray(STATES[0]))), rtol=1e-6
    )
    # Arrays of a module may be NumPy's; they come out as JAX's, which training takes.
    plain = eqx.tree_at(lambda m: m.weight, layer, np.asarray(layer.weight))
    assert isinstance(build_network("encoder", plain, key=jax.random.key(0)).weight, jax.Array)


@pytest.mark.parametrize("network", [FeatureMap, Autoencoder])
def test_what_is_no_network_is_named(network):
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="`features`"):
        network(0, key=key)
    for encoder, came in (
        (eqx.nn.MLP, "the class"),
        (eqx.Module(), "Module"),
        (lambda s: s * 2, "a function that fails"),
        (lambda key: None, "a function to "),
    ):
        with pytest.raises(TypeError, match=f"`encoder` must be an Equinox module .*, got {came}"):
            network(2, encoder=encoder, key=key)


def test_an_encoder_of_another_width_is_named():
    model = FeatureMap(7, encoder=eqx.nn.Linear(4, 3, key=jax.random.key(1)), key=jax.random.key(0))
    with pytest.raises(
        ValueError, match=r"`encoder` must make a vector of 7 features, .*got shape \(3,\)"
    ):
        model(jnp.ones(4))
    norm = FeatureMap(3, encoder=model.encoder, feature_norm=np.float32(2), key=jax.random.key(0))
    assert type(norm.feature_norm) is float
    with pytest.raises(TypeError, match="`orthogonal`"):
        Autoencoder(3, orthogonal="yes", key=jax.random.key(0))
