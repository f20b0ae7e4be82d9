"""Random keys, fixed keys of names, and normal numbers from all bits of a key."""

import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from dissociation._core import _compat
from dissociation._core.checks import warn
from dissociation._core.types import PRNGKey, PRNGKeys


def named_key(name: str) -> Key[Array, ""]:
    """Return a key of JAX's default generator for `name`, which no seed below 2^32 gives."""
    digest = hashlib.sha256(name.encode()).digest()
    words = np.frombuffer(digest[:8], ">u4").astype(np.uint32)
    key_data = jnp.asarray(words | np.array([1, 0], np.uint32))
    return jax.random.wrap_key_data(key_data, impl="threefry2x32")


def typed(key: PRNGKey | PRNGKeys) -> Array:
    """Return a key, or keys, in the form of `jax.random.key`."""
    array = jnp.asarray(key)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return array
    return jax.random.wrap_key_data(array)


def normal(
    key: PRNGKey, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
) -> Float[Array, "..."]:
    """Return standard normal numbers, which differ from those of `jax.random.normal`.

    Source: Salmon et al. (2011), Parallel random numbers: as easy as 1, 2, 3.
    """
    key = typed(key)
    number_type = jnp.dtype(dtype)
    size = math.prod(shape)
    is_narrow = jnp.issubdtype(number_type, jnp.floating) and number_type.itemsize <= 4
    if not is_narrow or size == 0 or str(jax.random.key_impl(key)) != "threefry2x32":
        return jax.random.normal(key, shape, dtype)
    try:
        generator = _compat.threefry2x32_p
    except ImportError as error:
        warn(f"{error} Until then it draws other numbers.")
        return jax.random.normal(key, shape, dtype)

    # Threefry makes two words of 32 bits per call, of which `jax.random.bits` returns the exclusive
    # or. Both used, half of the calls suffice.
    words = jax.random.key_data(key)
    half = -(-size // 2)
    counts = lax.iota(jnp.uint32, half)
    bits = generator.bind(words[0], words[1], jnp.zeros_like(counts), counts)
    first, second = map(_normal_of_bits, bits)
    # XLA on a CPU would compute halves joined end to end element by element, inside the loop that
    # joins them.
    halves = jnp.zeros((2, half), jnp.float32).at[0].set(first).at[1].set(second)
    return halves.reshape(-1)[:size].reshape(shape).astype(number_type)


def _normal_of_bits(bits: Array) -> Array:
    """Return standard normal numbers by the inverse of the distribution function."""
    # 23 bits as the fraction of a number in [1, 2), brought to (-1, 1).
    fraction = (bits >> 9) | np.uint32(0x3F800000)
    uniform = lax.bitcast_convert_type(fraction, jnp.float32) - 1.0
    smallest = np.nextafter(np.float32(-1.0), np.float32(0.0))
    uniform = jnp.maximum(uniform * (1.0 - smallest) + smallest, smallest)
    return np.float32(np.sqrt(2.0)) * lax.erf_inv(uniform)
