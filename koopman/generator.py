"""The generator of reversible overdamped Langevin dynamics, from samples of its equilibrium alone.

For dX = -grad V dt / gamma + sqrt(2 D) dW the generator L is self-adjoint in L2 of the invariant measure, and its
quadratic form needs gradients only: -<f, L g> = D E[grad f . grad g]. No lag, and no pairs: samples in any order serve.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation.checks import (
    check_count,
    check_finite,
    check_ndim,
    check_non_negative,
    check_positive,
    check_same_length,
    fail,
)
from dissociation.linalg import product
from koopman.pairs import gram_root

Scalar = float | int | Float[Array | np.ndarray, ""]


class Generator(NamedTuple):
    """Eigenpairs of a generator.

    Attributes:
        eigenvalues: Rates, non-positive and falling from the slowest: [r].
        coefficients: Eigenfunctions are features times these columns, of mean square 1 on the samples up to `alpha`:
            [d, r].
    """

    eigenvalues: Float[Array, " r"]
    coefficients: Float[Array, "d r"]


def fit_generator(
    x: Float[Array | np.ndarray, "n d"],
    jac: Float[Array | np.ndarray, "n d m"],
    *,
    rank: int,
    diffusion: Scalar = 1.0,
    alpha: Scalar = 1e-6,
) -> Generator:
    """Rayleigh and Ritz for the generator: E c = -lambda (C + alpha I) c with E = D E[J J^T] and C = E[phi phi^T].

    By the variational principle eigenvalues of the exact moments lie at or below the true ones.

    Args:
        x: Features phi of samples of the invariant measure.
        jac: Their derivatives with respect to the state's m coordinates.
        rank: Slowest eigenpairs returned, at most d.
        diffusion: D, in units of length^2 / time: k_B T / gamma; s^2 / 2 for dynamics with noise s dW, which is
            sigma^2 / (2 friction^2) for `datasets.langevin.overdamped_langevin`.
        alpha: Tikhonov regularisation of C, non-negative.

    Returns:
        The slowest eigenpairs; the constant function, if it is among the features' span, comes first with rate 0.

    Raises:
        ValueError: If shapes disagree, data are not finite, or an option is out of range.

    References:
        Kostic et al. (2024), Learning the infinitesimal generator of stochastic diffusion processes, section 3.
    """
    check_ndim("x", x, 2, "[samples, features]")
    check_ndim("jac", jac, 3, "[samples, features, coordinates]")
    check_same_length("x", x.shape[0], "jac", jac.shape[0])
    check_same_length("x", x.shape[1], "jac", jac.shape[1], "features")
    check_finite("x", x)
    check_finite("jac", jac)
    check_positive("diffusion", diffusion)
    check_non_negative("alpha", alpha)
    size = check_count("rank", rank, minimum=1)
    if size > x.shape[1]:
        fail("rank", f"be at most the number of features ({x.shape[1]})", rank)
    number, width = x.shape
    x, flat = jnp.asarray(x), jnp.moveaxis(jnp.asarray(jac), 2, 1).reshape(-1, width)
    _, values, right = jnp.linalg.svd(gram_root(x * number**-0.5))
    kept = values > width * jnp.finfo(x.dtype).eps * values[0]
    whiten = right.T * jnp.where(kept, jax.lax.rsqrt(jnp.where(kept, values**2 + alpha, 1.0)), 0.0)[None]
    slopes = product(flat, whiten) * jnp.sqrt(diffusion / number)
    # Directions that the samples do not hold come last, not first: as if they decayed at once.
    energy = product(slopes.T, slopes) + jnp.diag(jnp.where(kept, 0.0, jnp.finfo(x.dtype).max ** 0.5))
    rates, turn = jnp.linalg.eigh(energy)
    return Generator(-rates[:size], product(whiten, turn[:, :size]))
