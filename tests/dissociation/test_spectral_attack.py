import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation.data.datasets import load
from dissociation.recipes.bilinear import train_bilinear
from dissociation.spectral.attack import projected_attack
from dissociation.spectral.certificate import certified_radius, margins


def test_a_linear_model_is_beaten_exactly_at_its_distance():
    weights = jnp.asarray([[1.0, 2.0, 0.0], [0.0, -1.0, 1.0]])
    x = jnp.asarray([1.0, 1.0, 0.5])
    difference = weights[0] - weights[1]
    distance = difference @ x / jnp.linalg.norm(difference)
    attack = eqx.filter_jit(lambda radius: projected_attack(lambda p: weights @ p, x, 0, radius, key=jax.random.key(0)))
    assert not attack(0.99 * distance).found
    beaten = attack(1.01 * distance)
    assert beaten.found
    np.testing.assert_allclose(jnp.linalg.norm(beaten.step), 1.01 * distance, rtol=1e-5)
    # The lowest margin of the ball is the distance's excess times the slope.
    np.testing.assert_allclose(beaten.margin, -0.01 * distance * jnp.linalg.norm(difference), rtol=1e-2)


@pytest.mark.slow
def test_certificates_of_a_trained_network_hold():
    data = load("glyphs", num_train=2000, num_test=200)
    trained = train_bilinear(data, 24, key=jax.random.key(0), num_seeds=1, num_epochs=20, batch_size=100)
    model = jax.tree.map(lambda leaf: leaf[0], trained.models)
    images, labels = jnp.asarray(data.test_images), jnp.asarray(data.test_labels.argmax(1))
    right = np.flatnonzero(jax.vmap(model)(images).argmax(1) == labels)[:24]
    assert len(right) == 24
    images, labels = images[right], labels[right]
    forms = margins(model)
    found = eqx.filter_jit(jax.vmap(lambda x, y: certified_radius(forms, x, y)))(images, labels)
    # The first image lies 3e-4 from the boundary: a thousandth beyond is less than the rounding of a logit.
    factor = 1.001 + found.allowance / jnp.linalg.norm(found.step, axis=1)
    beyond = jax.vmap(model)(images + factor[:, None] * found.step)
    assert (beyond.argmax(1) != labels).all()
    keys = jax.random.split(jax.random.key(1), 24)
    attack = eqx.filter_jit(jax.vmap(lambda x, y, r, k: projected_attack(model, x, y, r, key=k, num_restarts=10)))
    assert not attack(images, labels, 0.999 * found.radius, keys).found.any()
    # The control: just beyond the certified distance the same attack succeeds on most images.
    assert attack(images, labels, 1.02 * found.radius, keys).found.mean() > 0.5


def test_bad_input_is_refused():
    options = {"key": jax.random.key(0)}
    with pytest.raises(ValueError, match="`num_restarts` must be"):
        projected_attack(lambda x: x, np.ones(3, np.float32), 0, 1.0, num_restarts=0, **options)
    with pytest.raises(ValueError, match="`radius` must be positive"):
        projected_attack(lambda x: x, np.ones(3, np.float32), 0, 0.0, **options)
