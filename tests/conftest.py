"""Strict settings for every test: four virtual CPU devices, no silent rank promotion, a clear random state."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import matplotlib as mpl
import pytest

mpl.use("Agg")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def key():
    return jax.random.key(20)
