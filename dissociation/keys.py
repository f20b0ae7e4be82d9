"""Random keys: fixed ones, for what is random but belongs to no seed (a built-in data set), and both kinds as one."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from dissociation.types import PRNGKey, PRNGKeys


def named_key(name: str) -> Key[Array, ""]:
    """The key of a name, which no seed below 2^32 makes: a caller's draws never meet those made from it.

    It is of JAX's default generator whatever generator is configured, so that it stands for the same draws everywhere.

    Args:
        name: What is drawn.

    Returns:
        The key.

    Example:
        >>> bool(jax.random.key_data(named_key("glyphs"))[0] > 0)
        True
    """
    words = np.frombuffer(hashlib.sha256(name.encode()).digest()[:8], ">u4").astype(np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words | np.array([1, 0], np.uint32)), impl="threefry2x32")


def typed(key: PRNGKey | PRNGKeys) -> Array:
    """A key, or keys, as `jax.random.key` makes them."""
    array = jnp.asarray(key)
    return array if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(array)
