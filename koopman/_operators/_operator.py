"""Fitted evolution operators: latent functions u(x) = U^T phi(x) and the map of their expectations."""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dissociation._core.checks import fail, is_traced
from dissociation._core.linalg import product
from dissociation._core.validation import validated
from koopman._operators._kernels import gram


class LinearMap(eqx.Module):
    """Map x -> (x - offset) matrix of features. `offset` is their mean if they are centred, else zero."""

    offset: Float[Array, " d"]
    matrix: Float[Array, "d r"]

    @validated
    def __call__(self, x: Float[Array | np.ndarray, "n d"]) -> Float[Array, "n r"]:
        if x.shape[1] != self.matrix.shape[0]:
            fail("x", f"have shape [n, {self.matrix.shape[0]}], as the operator was fitted", np.shape(x))
        return product(jnp.asarray(x) - self.offset[None], self.matrix)


class KernelMap(eqx.Module):
    """Map x -> k(x, centres) coefficients of states."""

    kernel: Callable[[Array, Array], Array]
    centres: Float[Array, "m d"]
    coefficients: Float[Array, "m r"]

    @validated
    def __call__(self, x: Float[Array | np.ndarray, "n d"]) -> Float[Array, "n r"]:
        if x.shape[1] != self.centres.shape[1]:
            fail("x", f"have shape [n, {self.centres.shape[1]}], as the operator was fitted", np.shape(x))
        return product(gram(self.kernel, jnp.asarray(x), self.centres), self.coefficients)


# M = U^T C_xy U loses a fraction b = alpha / (c + alpha) per step of a function with mean square c. Four steps of
# iterated Tikhonov regularisation, by F, leave b^4 (Engl, Hanke and Neubauer 1996, Regularization of inverse problems,
# section 5.1).
class Operator(eqx.Module):
    """Fitted evolution operator of rank r, U^T (C_x + alpha I) U = I (Kostic et al. 2022).

        B = alpha U^T U,   F = I + B + B^2 + B^3,   M = U^T C_xy U,   K = F M,   D = F E[u(x_t) o(x_{t+1})^T],
        E[o(x_{t+s}) | x_t]  =  [1, u(x_t)] T^(s-1) [mean of o; D],   T = [[1, m], [0, K]],
        m = (mean of y - mean of x) U if centred, else m and the mean of o are zero.

    Attributes:
        encode: u, from features (or states, for a kernel) [n, d] to [n, r].
        dual: phi -> <C_yx U F, phi>, from features to [n, r].
        core: K: [r, r].
        drift: m: [r].
        readout: D, for the flattened observable: [r, o].
        mean_observable: Mean of the observable, zero unless centred: [o].
        mean_latent: E[u(x)], zero if centred: [r].
        gram_x: U^T C_x U, which is I - B: [r, r].
        gram_y: U^T C_y U: [r, r].
        cross_gram: M: [r, r].
        dual_gram: F U^T C_xy C_yx U F: [r, r].
        basis_gram: U^T U: [r, r].
        penalty: B: [r, r].
        singular_values: Singular values of (C_x + alpha I)^(-1/2) C_xy for reduced rank, square roots of C_x's
            eigenvalues for principal components and ridge: [r]. A full-rank fit with `alpha` None or zero first divides
            columns by powers of two near their sizes.
        alpha: Tikhonov regularisation.
        effective_rank: Number of singular values above rounding; the other latent functions are zero or rounding.
        observable_shape: Shape of one observable.
        given: If False, `alpha` is the default.
    """

    encode: LinearMap | KernelMap
    dual: LinearMap | KernelMap
    core: Float[Array, "r r"]
    drift: Float[Array, " r"]
    readout: Float[Array, "r o"]
    mean_observable: Float[Array, " o"]
    mean_latent: Float[Array, " r"]
    gram_x: Float[Array, "r r"]
    gram_y: Float[Array, "r r"]
    cross_gram: Float[Array, "r r"]
    dual_gram: Float[Array, "r r"]
    basis_gram: Float[Array, "r r"]
    penalty: Float[Array, "r r"]
    singular_values: Float[Array, " r"]
    alpha: Float[Array, ""]
    effective_rank: Int[Array, ""]
    observable_shape: tuple[int, ...] = eqx.field(static=True)
    given: bool = eqx.field(static=True, default=True)

    def __repr__(self) -> str:
        if is_traced(self.alpha) or jnp.ndim(self.alpha):
            return eqx.tree_pformat(self)
        rank, held = self.core.shape[0], int(self.effective_rank)
        dropped = f", {rank - held} of {rank} directions dropped" if held < rank else ""
        said = "given" if self.given else "default"
        return f"Operator(rank={rank}, alpha={float(self.alpha):.3g} ({said}){dropped}, {self.core.dtype})"


def unshrinking(penalty: Float[Array, "r r"]) -> Float[Array, "r r"]:
    """Return F = I + B + B^2 + B^3: F (I - B) = I - B^4."""
    eye = jnp.eye(penalty.shape[0], dtype=penalty.dtype)
    return product(eye + penalty, eye + product(penalty, penalty))
