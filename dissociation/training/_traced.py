"""Traced programs, which are equal if their operations are.

JAX compiles again for every function object, and `optax.adam(1e-3)` returns new functions at every
call. Equal traces share a compiled program, and identify the program of a checkpoint.
"""

import enum
import hashlib
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation._core._compat import jex
from dissociation._core.conversion import to_device
from dissociation.training import _checkpoint as checkpoints

IRRELEVANT = {
    # Names, and rules of derivatives, because nothing differentiates a traced program.
    "jit": {"name"},
    "custom_jvp_call": {"name", "jvp_jaxpr_fun", "symbolic_zeros"},
    "custom_vjp_call": {"name", "fwd_jaxpr_thunk", "bwd", "out_trees", "symbolic_zeros"},
}
"""Parameters of operations that do not change what a program computes."""


class Code:
    """Operations of a traced function, without its arrays. Two codes are equal if their operations are equal.

    `digest` is the same in every process. An object without canonical text, such as the function
    behind a callback, is in the digest by its name; equality compares the object itself.
    `primitives` holds the names of the operations, those in sub-jaxprs included.
    """

    def __init__(self, jaxpr: jex.Jaxpr, in_tree: Any, out_tree: Any):
        self.jaxpr, self.in_tree, self.out_tree = jaxpr, in_tree, out_tree
        description = _Description()
        self.digest = _digest(description.of_jaxpr(jaxpr))
        self.primitives, self._objects = frozenset(description.primitives), description.objects

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Code):
            return NotImplemented
        trees = (self.in_tree, self.out_tree) == (other.in_tree, other.out_tree)
        if self.digest != other.digest or not trees or len(self._objects) != len(other._objects):
            return False
        return all(a is b or a == b for a, b in zip(self._objects, other._objects, strict=True))


class Traced(eqx.Module):
    """Traced function of PyTrees of arrays; closed-over arrays, `consts`, are arguments of the program."""

    code: Code = eqx.field(static=True)
    consts: list[Array]

    def __call__(self, *args: Any) -> Any:
        """Return the function's result by evaluating its operations."""
        closed = jex.ClosedJaxpr(self.code.jaxpr, self.consts)
        results = zip(jex.jaxpr_as_fun(closed)(*jax.tree.leaves(args)), self._avals, strict=True)
        # A constant result is a number.
        outs = [
            out if isinstance(out, jax.Array) else jnp.asarray(out, aval.dtype)
            for out, aval in results
        ]
        return self.code.out_tree.unflatten(outs)

    @property
    def out(self) -> Any:
        """Return the shapes and dtypes of the result."""
        return self.code.out_tree.unflatten(
            [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in self._avals]
        )

    @property
    def weak(self) -> bool:
        """Return True if a result has a weak type, which a call makes strong."""
        return any(aval.weak_type for aval in self._avals)

    @property
    def _avals(self) -> list[Any]:
        return [var.aval for var in self.code.jaxpr.outvars]

    def fingerprint(self) -> str:
        """Return a digest of the operations and of `consts`, the same in all processes with one version of JAX."""
        return self.code.digest + checkpoints.fingerprint(self.consts)


def trace(function: Callable[..., Any], *example: Any) -> Traced:
    """Trace `function` on arguments like `example`."""
    closed, out = jax.make_jaxpr(function, return_shape=True)(*example)
    consts = [
        const if isinstance(const, jax.Array) else to_device(const, var.aval.dtype)
        for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True)
    ]
    return Traced(Code(closed.jaxpr, jax.tree.structure(example), jax.tree.structure(out)), consts)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class _Description:
    """Writer of programs in a canonical form; `objects` are those with only a name, in order."""

    def __init__(self):
        self.objects: list[Any] = []
        self.primitives: set[str] = set()
        self._known: dict[int, tuple[Any, str]] = {}

    def of_jaxpr(self, jaxpr: jex.Jaxpr) -> str:
        names: dict[Any, str] = {}

        def bound(variables: Any) -> str:
            names.update({var: f"v{number}" for number, var in enumerate(variables, len(names))})
            return " ".join(f"{names[var]}:{var.aval!r}" for var in variables)

        def used(atoms: Any) -> str:
            literal = lambda atom: f"{self.of(np.asarray(atom.val))}:{atom.aval!r}"  # noqa: E731
            return " ".join(
                literal(atom) if isinstance(atom, jex.Literal) else names[atom] for atom in atoms
            )

        lines = [bound(jaxpr.constvars), bound(jaxpr.invars)]
        for equation in jaxpr.eqns:
            operation = equation.primitive.name
            self.primitives.add(operation)
            arguments = used(equation.invars)  # first, because results get new names
            skipped = IRRELEVANT.get(operation, ())
            params = [
                f"{k}={self.of(v)}" for k, v in sorted(equation.params.items()) if k not in skipped
            ]
            setting = [
                getattr(equation.ctx, k, None) for k in ("compute_type", "threefry_partitionable")
            ]
            lines.append(
                f"{bound(equation.outvars)} = {operation} {arguments} [{', '.join(params)}] "
                f"{setting}"
            )
        return "\n".join([*lines, used(jaxpr.outvars)])

    def of(self, value: Any) -> str:
        if isinstance(value, jex.ClosedJaxpr):
            return f"{{{self._once(value.jaxpr)} {self.of(list(value.consts))}}}"
        if isinstance(value, jex.Jaxpr):
            return f"{{{self._once(value)}}}"
        if isinstance(value, jax.Array):
            return checkpoints.fingerprint(value)
        if hasattr(value, "__array__") and not isinstance(
            value, type
        ):  # NumPy's arrays, and JAX's kind of them
            return checkpoints.fingerprint(np.asarray(value))
        if value is None or isinstance(
            value, bool | int | float | complex | str | bytes | np.dtype | enum.Enum
        ):
            return f"{type(value).__name__}:{value!r}"
        if isinstance(value, type):
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, tuple | list):
            return f"{type(value).__name__}({', '.join(map(self.of, value))})"
        if isinstance(value, dict):
            return f"dict({', '.join(f'{self.of(k)}: {self.of(v)}' for k, v in value.items())})"
        self.objects.append(value)
        return re.sub(r" at 0x[0-9a-f]+", "", f"{type(value).__qualname__}:{value!r}")

    def _once(self, jaxpr: jex.Jaxpr) -> str:
        """Return the digest of a sub-jaxpr, which often occurs several times."""
        if id(jaxpr) not in self._known:
            self._known[id(jaxpr)] = (
                jaxpr,
                _digest(self.of_jaxpr(jaxpr)),
            )  # kept alive, so that its `id` stays unique
        return self._known[id(jaxpr)][1]
