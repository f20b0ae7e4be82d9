"""Traced programs, which are equal if their operations are.

JAX compiles again for every function object, and `optax.adam(1e-3)` returns new functions at every
call. Equal traces share a compiled program, and identify the program of a checkpoint.
"""

import enum
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation._core._compat import jex
from dissociation._core.conversion import to_device
from dissociation.training import _checkpoint_file as checkpoints

IRRELEVANT = {
    # Names, and rules of derivatives, because nothing differentiates a traced program.
    "jit": {"name"},
    "custom_jvp_call": {"name", "jvp_jaxpr_fun", "symbolic_zeros"},
    "custom_vjp_call": {"name", "fwd_jaxpr_thunk", "bwd", "out_trees", "symbolic_zeros"},
}
"""Parameters of operations that do not change what a program computes."""

CONTEXT = ("compute_type", "threefry_partitionable")
"""Settings of an operation's context that change what it computes."""


@dataclass(frozen=True, eq=False)
class Code:
    """Operations of a traced function, without its arrays.

    Two codes are equal if their operations are equal. An object without canonical text, such as the
    function behind a callback, is in the digest by its name; equality compares the object itself.
    """

    jaxpr: Any
    in_tree: Any
    out_tree: Any

    @cached_property
    def _writer(self) -> "_Writer":
        writer = _Writer()
        writer.digest_of(self.jaxpr)
        return writer

    @property
    def digest(self) -> str:
        """Return a digest of the operations, which is the same in every process."""
        return self._writer.digest_of(self.jaxpr)

    @property
    def primitives(self) -> frozenset[str]:
        """Return the names of the operations, those in sub-jaxprs included."""
        return frozenset(self._writer.primitives)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Code):
            return NotImplemented
        if (self.in_tree, self.out_tree) != (other.in_tree, other.out_tree):
            return False
        return self.digest == other.digest and self._writer.objects == other._writer.objects


class Traced(eqx.Module):
    """Traced function of PyTrees of arrays.

    Closed-over arrays, `consts`, are arguments of the program.
    """

    code: Code = eqx.field(static=True)
    consts: list[Array]

    def __call__(self, *args: Any) -> Any:
        """Return the function's result by evaluating its operations."""
        closed = jex.ClosedJaxpr(self.code.jaxpr, self.consts)
        results = jex.jaxpr_as_fun(closed)(*jax.tree.leaves(args))
        arrays = []
        for result, var in zip(results, self.code.jaxpr.outvars, strict=True):
            if not isinstance(result, jax.Array):  # a constant result is a number
                result = jnp.asarray(result, var.aval.dtype)
            arrays.append(result)
        return self.code.out_tree.unflatten(arrays)

    @property
    def out(self) -> Any:
        """Return the shapes and dtypes of the result."""
        avals = [var.aval for var in self.code.jaxpr.outvars]
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        return self.code.out_tree.unflatten(shapes)

    @property
    def weak(self) -> bool:
        """Return True if a result has a weak type, which a call makes strong."""
        return any(var.aval.weak_type for var in self.code.jaxpr.outvars)

    def fingerprint(self) -> str:
        """Return a digest of the operations and of `consts`.

        It is the same in all processes with one version of JAX.
        """
        return self.code.digest + checkpoints.fingerprint(self.consts)


def trace(function: Callable[..., Any], *example: Any) -> Traced:
    """Trace `function` on arguments like `example`, which are arrays or their shapes and dtypes.

    Arrays and numbers that `function` closes over become `Traced.consts`.
    """
    closed, out = jax.make_jaxpr(function, return_shape=True)(*example)
    consts = []
    for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        # The caller may change a NumPy array later, and a number has no dtype.
        if not isinstance(const, jax.Array):
            const = to_device(const, var.aval.dtype)
        consts.append(const)
    code = Code(closed.jaxpr, jax.tree.structure(example), jax.tree.structure(out))
    return Traced(code, consts)


class _Writer:
    """Writer of programs in a canonical form; `objects` are those with only a name, in order."""

    def __init__(self):
        self.objects: list[Any] = []
        self.primitives: set[str] = set()
        # Digests by `id`; the jaxpr is stored as well, so that its `id` stays unique.
        self._digests: dict[int, tuple[Any, str]] = {}

    def digest_of(self, jaxpr: jex.Jaxpr) -> str:
        """Return the digest of a jaxpr, written once, whose variables are numbered."""
        if id(jaxpr) in self._digests:
            return self._digests[id(jaxpr)][1]
        names: dict[Any, str] = {}

        def bound(variables: Any) -> str:
            names.update({var: f"v{number}" for number, var in enumerate(variables, len(names))})
            return " ".join(f"{names[var]}:{var.aval!r}" for var in variables)

        def used(atoms: Any) -> str:
            texts = []
            for atom in atoms:
                if isinstance(atom, jex.Literal):
                    texts.append(f"{self.of(np.asarray(atom.val))}:{atom.aval!r}")
                else:
                    texts.append(names[atom])
            return " ".join(texts)

        lines = [bound(jaxpr.constvars), bound(jaxpr.invars)]
        for equation in jaxpr.eqns:
            operation = equation.primitive.name
            self.primitives.add(operation)
            arguments = used(equation.invars)  # first, because results get new names
            params = []
            for name, param in sorted(equation.params.items()):
                if name not in IRRELEVANT.get(operation, ()):
                    params.append(f"{name}={self.of(param)}")
            settings = [getattr(equation.ctx, name, None) for name in CONTEXT]
            results = bound(equation.outvars)
            lines.append(f"{results} = {operation} {arguments} [{', '.join(params)}] {settings}")
        text = "\n".join([*lines, used(jaxpr.outvars)])
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self._digests[id(jaxpr)] = (jaxpr, digest)
        return digest

    def of(self, value: Any) -> str:
        """Return the text of a parameter of an operation."""
        if isinstance(value, jex.ClosedJaxpr):
            return f"{{{self.digest_of(value.jaxpr)} {self.of(list(value.consts))}}}"
        if isinstance(value, jex.Jaxpr):
            return f"{{{self.digest_of(value)}}}"
        if isinstance(value, jax.Array):
            return checkpoints.fingerprint(value)
        if hasattr(value, "__array__") and not isinstance(value, type):
            # NumPy's arrays, and JAX's kind of them.
            return checkpoints.fingerprint(np.asarray(value))
        plain = bool | int | float | complex | str | bytes | np.dtype | enum.Enum | None
        if isinstance(value, plain):
            return f"{type(value).__name__}:{value!r}"
        if isinstance(value, type):
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, tuple | list):
            return f"{type(value).__name__}({', '.join(map(self.of, value))})"
        if isinstance(value, dict):
            pairs = [f"{self.of(key)}: {self.of(entry)}" for key, entry in value.items()]
            return f"dict({', '.join(pairs)})"
        self.objects.append(value)
        return re.sub(r" at 0x[0-9a-f]+", "", f"{type(value).__qualname__}:{value!r}")
