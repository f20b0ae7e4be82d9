"""Conversion of NumPy arrays to JAX's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compilations

from dissociation._core.conversion import to_device
from dissociation._core.linalg import centre, positive_inverse
from dissociation.similarity import linear_cka


def test_arrays_go_to_the_device_without_a_program():
    for array in (
        np.arange(6.0).reshape(2, 3),
        np.arange(5),
        np.ones(3, bool),
        np.float32(2),
        np.zeros((0, 2)),
    ):
        wanted = jnp.asarray(array)
        assert not compilations(lambda array=array: to_device(array)), array
        found = to_device(array)
        assert found.dtype == wanted.dtype
        assert found.weak_type == wanted.weak_type
        np.testing.assert_array_equal(found, wanted)
    assert to_device(np.arange(3), jnp.float32).dtype == jnp.float32
    assert compilations(lambda: jnp.asarray(np.ones((2, 3, 4))))  # negative control


@pytest.mark.parametrize(
    "function",
    [centre, positive_inverse, lambda x: linear_cka(x, x)],
    ids=["centre", "positive_inverse", "linear_cka"],
)
def test_a_change_of_the_callers_array_after_the_call_changes_no_result(function):
    rows = np.random.default_rng(0).standard_normal((400, 400)).astype(np.float32)
    rows = rows @ rows.T + np.eye(400, dtype=np.float32)
    wanted = np.asarray(function(rows.copy()))
    result = function(rows)
    rows[:] = 0
    np.testing.assert_array_equal(result, wanted)


def test_known_arrays_stay_known_under_a_trace_that_does_not_read_them():
    def function(x):
        with jax.ensure_compile_time_eval():
            assert isinstance(to_device(np.ones(3)), jax.Array)
            assert not isinstance(to_device(np.ones(3)), jax.core.Tracer)
        return x

    jax.jit(function)(1.0)
