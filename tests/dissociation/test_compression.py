import equinox as eqx
import jax
import numpy as np
import pytest

from dissociation.data import load
from dissociation.recipes import train_compression
from dissociation.recipes._compression import encode

pytestmark = pytest.mark.slow


def test_images_are_compressed():
    data = load("glyphs", num_train=300, num_test=70)
    model = train_compression(
        data.train_images, 4, key=jax.random.key(0), num_epochs=30, batch_size=40
    )
    test = np.asarray(data.test_images)
    error = np.mean(
        (np.asarray(eqx.filter_jit(lambda m, x: jax.vmap(m)(x))(model, test)) - test) ** 2
    )
    blank = np.mean((np.asarray(data.train_images).mean(0) - test) ** 2)
    assert error < 0.9 * blank  # better than the mean image
    codes = encode(model, test)
    assert codes.shape == (70, 4)
    np.testing.assert_allclose(
        codes, jax.vmap(model.encoder)(test.reshape(-1, 28, 28)), rtol=1e-4, atol=1e-5
    )


def test_bad_input_is_refused():
    for name in ("code", "num_epochs", "batch_size"):
        with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
            train_compression(np.zeros((10, 784), np.float32), key=jax.random.key(0), **{name: 0})
