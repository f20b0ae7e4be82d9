"""A fitted evolution operator: functions u of the state, and how their expectations move.

Every estimator here has the form G = U U^T C_xy with U^T (C_x + alpha I) U = I (Kostic et al. 2022), whether features
are explicit or a kernel's. It is known by its r latent functions u(x) = U^T phi(x) and a few r x r moments of them:

    E[u(x_{t+1}) | x_t]  =  u(x_t) M,                M = E[u(x_t) u(x_{t+1})^T],
    E[o(x_{t+s}) | x_t]  =  u(x_t) M^(s-1) D,        D = E[u(x_t) o(x_{t+1})^T].

What is computed from an operator are functions in `spectrum` and `forecast`.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dissociation.checks import fail
from dissociation.linalg import product
from dissociation.validation import validated


def _listed(values: Any) -> Any:
    """Lists as an array; what stands for an array in a transformation is left alone."""
    return jnp.asarray(values, float) if isinstance(values, list | tuple) else values


class LinearMap(eqx.Module):
    """x -> (x - offset) matrix, for explicit features.

    Attributes:
        offset: Mean of the features where they are centred, else zero: [d].
        matrix: [d, r].
    """

    offset: Float[Array, " d"] = eqx.field(converter=_listed)
    matrix: Float[Array, "d r"] = eqx.field(converter=_listed)

    @validated
    def __call__(self, x: Float[Array | np.ndarray, "n d"]) -> Float[Array, "n r"]:
        """Values at features x."""
        if x.shape[1] != self.matrix.shape[0]:
            fail("x", f"have shape [n, {self.matrix.shape[0]}], as the operator was fitted", np.shape(x))
        return product(jnp.asarray(x) - self.offset[None], self.matrix)


class KernelMap(eqx.Module):
    """x -> k(x, centres) coefficients, for the features of a kernel.

    Attributes:
        kernel: Function of two arrays of states to their matrix of kernel values.
        centres: [m, d].
        coefficients: [m, r].
    """

    kernel: Callable[[Array, Array], Array]
    centres: Float[Array, "m d"] = eqx.field(converter=_listed)
    coefficients: Float[Array, "m r"] = eqx.field(converter=_listed)

    @validated
    def __call__(self, x: Float[Array | np.ndarray, "n d"]) -> Float[Array, "n r"]:
        """Values at states x."""
        if x.shape[1] != self.centres.shape[1]:
            fail("x", f"have shape [n, {self.centres.shape[1]}], as the operator was fitted", np.shape(x))
        return product(self.kernel(jnp.asarray(x), self.centres), self.coefficients)


class Operator(eqx.Module):
    """A fitted evolution operator of rank r.

    Attributes:
        encode: u, from features (or states, for a kernel) [n, d] to [n, r].
        dual: phi -> <C_yx U, phi>, from features to [n, r]: what left eigenfunctions are made of.
        core: M = U^T C_xy U: [r, r].
        readout: D = U^T E[phi(x_t) o_{t+1}^T]: [r, o], for the observable's entries in one row.
        mean_observable: What is added to forecasts, zero unless centred: [o].
        gram_x: U^T C_x U, which is I - alpha U^T U: [r, r].
        gram_y: U^T C_y U: [r, r].
        dual_gram: U^T C_xy C_yx U: [r, r].
        basis_gram: U^T U: [r, r].
        singular_values: Of (C_x + alpha I)^(-1/2) C_xy for reduced rank, square roots of C_x's eigenvalues for
            principal components and ridge: [r].
        alpha: Tikhonov regularisation.
        effective_rank: Singular values above rounding; below the rank asked for if the data do not hold it.
        observable_shape: Shape of one observable.
    """

    encode: LinearMap | KernelMap
    dual: LinearMap | KernelMap
    core: Float[Array, "r r"]
    readout: Float[Array, "r o"]
    mean_observable: Float[Array, " o"]
    gram_x: Float[Array, "r r"]
    gram_y: Float[Array, "r r"]
    dual_gram: Float[Array, "r r"]
    basis_gram: Float[Array, "r r"]
    singular_values: Float[Array, " r"]
    alpha: Float[Array, ""]
    effective_rank: Int[Array, ""]
    observable_shape: tuple[int, ...] = eqx.field(static=True)
