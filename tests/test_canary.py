"""The type checker must be at work in both packages: a wrong shape or kind must raise there."""

import jax.numpy as jnp
import jaxtyping
import pytest

from dissociation import checks
from koopman.pairs import lagged_pairs


def test_dissociation_is_checked():
    with pytest.raises(jaxtyping.TypeCheckError):
        checks.check_choice(3, "a", ["a"])  # pyright: ignore[reportArgumentType]
    assert jnp.ones(1).shape == (1,)


def test_koopman_is_checked():
    with pytest.raises(jaxtyping.TypeCheckError):
        lagged_pairs(jnp.ones((3, 1)), 1.0)  # pyright: ignore[reportArgumentType]
    assert lagged_pairs(jnp.ones((3, 1))).x.shape == (2, 1)
