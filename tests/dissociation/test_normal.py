"""Normal numbers from all the bits of threefry: their statistics, and that nothing but the key decides on them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from scipy import special

from dissociation._core.keys import normal


def test_both_words_serve(key):
    """The inverse distribution function of the upper 23 bits of every word, first words first."""
    words = np.asarray(
        threefry_2x32(
            jax.random.key_data(key),
            jnp.concatenate([jnp.zeros(50, "uint32"), jnp.arange(50, dtype="uint32")]),
        )
    )
    uniform = 2.0 * (words >> 9) / 2**23 - 1
    expected = np.sqrt(2) * special.erfinv(
        np.maximum(uniform, np.nextafter(np.float32(-1), np.float32(0)))
    )
    for size in (99, 100):
        np.testing.assert_allclose(normal(key, (size,)), expected[:size], rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(
        words[:50] ^ words[50:], jax.random.bits(key, (50,))
    )  # what JAX makes of them


def test_without_the_primitive_it_draws_as_jax_does(key, monkeypatch):
    monkeypatch.delattr("jax.extend.random.threefry2x32_p")
    with pytest.warns(
        RuntimeWarning, match="lacks jax.extend.random.threefry2x32_p.*draws other numbers"
    ):
        drawn = normal(key, (5,))
    np.testing.assert_array_equal(drawn, jax.random.normal(key, (5,)))


@pytest.mark.parametrize("shape", [(), (7,), (0, 4), (2, 3, 4)])
def test_shapes_and_dtypes(key, shape):
    for dtype in ("float32", "float16"):
        drawn = normal(key, shape, dtype)
        assert (drawn.shape, drawn.dtype) == (shape, dtype)
        assert np.isfinite(np.asarray(drawn, np.float32)).all()


def test_other_generators_and_float64_are_jaxs_own(key):
    other = jax.random.key(3, impl="rbg")
    np.testing.assert_array_equal(normal(other, (4,)), jax.random.normal(other, (4,)))
    with jax.enable_x64(True):
        np.testing.assert_array_equal(
            normal(key, (4,), jnp.float64), jax.random.normal(key, (4,), jnp.float64)
        )
    with pytest.raises(ValueError, match="dtype"):
        normal(key, (4,), jnp.int32)


def test_the_key_alone_decides(key):
    keys = jax.random.split(key, 3)
    alone = np.stack([normal(k, (33, 5)) for k in keys])
    np.testing.assert_array_equal(alone, jax.jit(jax.vmap(lambda k: normal(k, (33, 5))))(keys))
    np.testing.assert_array_equal(alone, jax.lax.map(lambda k: normal(k, (33, 5)), keys))
    np.testing.assert_array_equal(alone[0], normal(jax.random.key_data(keys[0]), (33, 5)))
