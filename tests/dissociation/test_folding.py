"""Operations on constants in NumPy, against JAX's."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compilations
from jax import lax

from dissociation.rewrites._folding import ELEMENTWISE, FOLDS, folded, is_foldable

INTS = np.array([[7, -7, 3], [-8, 5, 2]], np.int32)
FLOATS = np.array([[0.1, -2.5, 3.0], [np.nan, 0.0, 1e30]], np.float32)
FLAGS = np.array([[True, False, True], [False, False, True]])
CALLS = {
    "add": lambda x: lax.add(x, x),
    "sub": lambda x: lax.sub(x, x[::-1]),
    "mul": lambda x: lax.mul(x, x),
    "neg": lax.neg,
    "rem": lambda x: lax.rem(x, jnp.full_like(x, 3)),
    "max": lambda x: lax.max(x, x[::-1]),
    "min": lambda x: lax.min(x, x[::-1]),
    "and": lambda x: lax.bitwise_and(x, x[::-1]),
    "or": lambda x: lax.bitwise_or(x, x[::-1]),
    "not": lax.bitwise_not,
    "lt": lambda x: lax.lt(x, x[::-1]),
    "le": lambda x: lax.le(x, x[::-1]),
    "gt": lambda x: lax.gt(x, x[::-1]),
    "ge": lambda x: lax.ge(x, x[::-1]),
    "eq": lambda x: lax.eq(x, x[::-1]),
    "ne": lambda x: lax.ne(x, x[::-1]),
    "div": lambda x: lax.div(x, jnp.full_like(x, 2)),
    "select_n": lambda x: lax.select_n(x, INTS, 2 * INTS),
    "convert_element_type": lambda x: lax.convert_element_type(x, jnp.bfloat16),
    "concatenate": lambda x: lax.concatenate([x, x], 1),
    "iota": lambda x: lax.broadcasted_iota(np.int32, (2, 3), 1),
    "broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (2, 4, 3), (0, 2)),
    "reshape": lambda x: lax.reshape(x, (3, 2)),
    "squeeze": lambda x: lax.squeeze(x[None], (0,)),
    "slice": lambda x: lax.slice(x, (0, 1), (2, 3), (1, 2)),
    "transpose": lambda x: lax.transpose(x, (1, 0)),
    "rev": lambda x: lax.rev(x, (1,)),
}
"""A call of each operation on a known array of two rows and three columns."""


def test_each_operation_has_a_case():
    assert CALLS.keys() == {*ELEMENTWISE, *FOLDS}


@pytest.mark.parametrize("name", CALLS)
def test_operations_are_those_of_jax(name):
    logical = name in ("and", "or", "not", "select_n")
    for x in (FLAGS,) if logical else (INTS, FLOATS):
        closed = jax.make_jaxpr(CALLS[name])(x)
        equation = next(one for one in closed.jaxpr.eqns if one.primitive.name == name)
        assert is_foldable(equation)
        operands = []
        rng = np.random.default_rng(0)
        for atom in equation.invars:
            if hasattr(atom, "val"):
                operands.append(atom.val)
            else:
                operands.append(
                    rng.permuted(np.resize(x, atom.aval.shape), axis=-1).astype(atom.aval.dtype)
                )
        wanted = equation.primitive.bind(*map(jnp.asarray, operands), **equation.params)
        assert not compilations(partial(folded, equation, operands))
        result = folded(equation, operands)
        assert result.dtype == wanted.dtype
        np.testing.assert_array_equal(result.astype(float), np.asarray(wanted).astype(float))
