import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from koopman.networks import Autoencoder, FeatureMap

IMAGES = np.random.default_rng(0).uniform(size=(12, 28, 28)).astype(np.float32)


def test_feature_maps_have_norm_one_and_a_finite_slope_at_zero():
    model = FeatureMap(key=jax.random.key(0))
    features = jax.vmap(model)(IMAGES)
    np.testing.assert_allclose(jnp.linalg.norm(features, axis=1), 1, atol=1e-6)
    longer = FeatureMap(length=3.0, key=jax.random.key(0))
    np.testing.assert_allclose(jax.vmap(longer)(IMAGES), 3 * features, rtol=1e-5)
    np.testing.assert_allclose(model.lagged(IMAGES[0]), features[0] @ model.lag.weight, atol=1e-6)
    head = lambda m: (m.encoder.head.weight, m.encoder.head.bias)  # noqa: E731
    dead = eqx.tree_at(head, model, replace_fn=jnp.zeros_like)
    slopes = eqx.filter_grad(lambda m: jnp.sum(m(IMAGES[0])))(dead)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))


def test_orthogonal_dynamics():
    free, kept = (Autoencoder(orthogonal=o, key=jax.random.key(0)) for o in (False, True))
    matrix = kept.matrix()
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(5), atol=1e-6)
    assert np.abs(free.matrix() @ free.matrix().T - np.eye(5)).max() > 0.1
    assert kept(IMAGES[0]).shape == (28, 28)
