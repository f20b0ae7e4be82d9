"""Fitted operator, and the facts of its fit that `diagnose` reads."""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dissociation._core.checks import is_traced
from dissociation._core.linalg import product
from koopman._operators._kernels import KernelMap, LinearMap


class FitSettings(NamedTuple):
    """Static facts of a fit that `diagnose` reads.

    Attributes:
        compared: Words for `Fitting.variance`; empty if `alpha` is not compared with it.
        has_rank: True if the estimator has a rank.
        inverts_all: True if the estimator inverts C_x in all directions.
        is_centred: True if features are taken about their mean.
    """

    compared: str
    has_rank: bool
    inverts_all: bool
    is_centred: bool


class Fitting(eqx.Module):
    """Facts of a fit that `diagnose` reads.

    Attributes:
        trailing_values: Singular values beyond the rank, in the units of `singular_values`: [k].
        variance: Eigenvalue of C_x or K, or their mean, that `alpha` should not exceed.
        trace: Trace of C_x or K.
        squares: Mean squares of the columns, if the default `alpha` can suppress small ones, else
            None: [d].
        cutoff: Relative size below which a singular value counts as zero.
        residual: Relative residual of an iterative solver, or None.
        settings: Static facts.
    """

    trailing_values: Float[Array, " k"]
    variance: Float[Array, ""]
    trace: Float[Array, ""]
    squares: Float[Array, " d"] | None
    cutoff: Float[Array, ""]
    residual: Float[Array, ""] | None
    settings: FitSettings = eqx.field(static=True)


class Operator(eqx.Module):
    """Fitted evolution operator of rank r, U^T (C_x + alpha I) U = I (Kostic et al. 2022).

        B = alpha U^T U,   F = I + B + B^2 + B^3,   M = U^T C_xy U,
        K = F M,   D = F E[u(x_t) o(x_{t+1})^T],   S = [[1, m], [0, K]],
        E[o(x_{t+s}) | x_t] = [1, u(x_t)] S^(s-1) [mean of o; D].

    ^T is the transpose. If features are centred, m = (mean of y - mean of x) U; else m and the mean
    of the observable o are zero.

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
        singular_values: Singular values of (C_x + alpha I)^(-1/2) C_xy for reduced rank, square
            roots of C_x's eigenvalues for principal components and ridge: [r]. A full-rank fit with
            `alpha` None or zero first divides columns by powers of two near their sizes.
        alpha: Tikhonov regularisation.
        effective_rank: Number of singular values above rounding; the other latent functions are
            zero or rounding.
        observable_shape: Shape of one observable.
        given: If False, `alpha` is the default.
        fitting: Facts that `diagnose` reads beside these.
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
    fitting: Fitting | None = None

    def __repr__(self) -> str:
        if is_traced(self.alpha) or jnp.ndim(self.alpha):
            return eqx.tree_pformat(self)
        rank = self.core.shape[0]
        num_dropped = rank - int(self.effective_rank)
        dropped = ""
        if num_dropped > 0:
            dropped = f", {num_dropped} of {rank} directions dropped"
        origin = "given" if self.given else "default"
        return (
            f"Operator(rank={rank}, alpha={float(self.alpha):.3g} ({origin}){dropped}, "
            f"{self.core.dtype})"
        )


def unshrinking(penalty: Float[Array, "r r"]) -> Float[Array, "r r"]:
    """Return F = I + B + B^2 + B^3: F (I - B) = I - B^4."""
    # M = U^T C_xy U loses a fraction b = alpha / (c + alpha) per step of a function with mean
    # square c. Four steps of iterated Tikhonov regularisation, by F, leave b^4 (Engl, Hanke and
    # Neubauer 1996, Regularization of inverse problems, section 5.1).
    eye = jnp.eye(penalty.shape[0], dtype=penalty.dtype)
    return product(eye + penalty, eye + product(penalty, penalty))
