"""The type checker must be at work in both packages: a wrong kind must raise in functions without a gate."""

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from dissociation._core import checks
from koopman.datasets._trajectories import step_keys


def test_dissociation_is_checked():
    with pytest.raises(jaxtyping.TypeCheckError):
        checks.check_choice(3, "a", ["a"])  # pyright: ignore[reportArgumentType]
    assert jnp.ones(1).shape == (1,)


def test_koopman_is_checked():
    with pytest.raises(jaxtyping.TypeCheckError):
        step_keys(jax.random.key(0), 1.0)  # pyright: ignore[reportArgumentType]
    assert step_keys(jax.random.key(0), 2).shape == (2,)
