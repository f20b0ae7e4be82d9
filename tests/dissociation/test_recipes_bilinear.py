import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dissociation._core.keys import normal
from dissociation.data import load
from dissociation.models import BilinearNetwork
from dissociation.recipes import train_bilinear
from dissociation.recipes._bilinear import _optimizer, noisy_cross_entropy

SETTINGS = {"learning_rate": 1e-3, "weight_decay": 0.0, "num_epochs": 4.0, "epoch_steps": 10.0}


@pytest.fixture(scope="module")
def data():
    return load("glyphs", num_train=1100, num_test=300)


@pytest.mark.slow
def test_training_learns_digits(data):
    with pytest.raises(ValueError, match="`noise` must be non-negative"):
        train_bilinear(data, 20, key=jax.random.key(0), noise=-1.0)
    result = train_bilinear(
        data, 20, key=jax.random.key(0), num_seeds=2, num_epochs=15, batch_size=100
    )
    assert result.history.loss.shape == (2, 15 * 11)
    observed = result.history.observed
    assert set(observed) == {
        "train_loss",
        "train_accuracy",
        "validation_loss",
        "validation_accuracy",
    }
    assert observed["validation_accuracy"].shape == (2, 16)
    np.testing.assert_allclose(observed["validation_accuracy"][:, 0], 0.1, atol=0.1)
    assert (observed["validation_accuracy"][:, -1] > 0.5).all()
    assert (observed["train_loss"][:, -1] < observed["train_loss"][:, 0]).all()
    assert np.abs(result.models.head[0] - result.models.head[1]).max() > 0.01


def test_the_learning_rate_steps_down_once_per_epoch():
    optimizer = _optimizer(SETTINGS)
    params = jnp.ones(3)
    state, sizes = optimizer.init(params), []
    for _ in range(40):
        updates, state = optimizer.update(jnp.ones(3), state, params)
        sizes.append(-float(updates[0]))
    wanted = [0.5e-3 * (1 + np.cos(np.pi * epoch / 4)) for epoch in range(4) for _ in range(10)]
    np.testing.assert_allclose(sizes, wanted, rtol=1e-4)


def test_noise_is_added_and_decay_pulls():
    model = BilinearNetwork(8, 4, 3, key=jax.random.key(0))
    batch = jnp.ones((5, 8)), jnp.eye(3)[jnp.asarray([0, 1, 2, 0, 1])]
    logits = jax.vmap(model)(batch[0] + 0.3 * normal(jax.random.key(7), (5, 8)))
    wanted = optax.softmax_cross_entropy(logits, batch[1]).mean()
    np.testing.assert_allclose(
        noisy_cross_entropy(0.3)(model, batch, jax.random.key(7)), wanted, rtol=1e-6
    )
    assert noisy_cross_entropy(0.0)(model, batch, jax.random.key(7)) != wanted
    optimizer = _optimizer(SETTINGS | {"weight_decay": 0.5})
    updates, _ = optimizer.update(jnp.zeros(3), optimizer.init(jnp.ones(3)), jnp.ones(3))
    np.testing.assert_allclose(updates, -1e-3 * 0.5, rtol=1e-5)
