"""Derivatives of eigenpairs, which end where eigenvalues coincide.

First-order perturbation theory couples eigenvectors i and j by l_i^T dM w_j / (lambda_j - lambda_i). Where the gap is
below rounding there is no derivative, and whatever the division gives is noise that looks like a number. Here such a
coupling is infinite unless it is exactly zero, so that what depends on it is not finite, and nothing else is touched.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact


def refused(tangent: Inexact[Array, "..."], unresolved: Bool[Array, "..."]) -> Inexact[Array, "..."]:
    """The tangent, infinite where it is unresolved and not zero.

    It is linear in the tangent, and so is its transpose: two factors overflow where one NaN would reach, as 0 * NaN,
    the gradients of outputs that do not depend on it.
    """
    factor = jnp.where(unresolved, jnp.finfo(tangent.dtype).max, 1.0)
    return tangent * factor * factor


def couplings(
    perturbation: Inexact[Array, "k r"], gap: Inexact[Array, "k r"], unresolved: Bool[Array, "k r"]
) -> Inexact[Array, "k r"]:
    """What eigenvectors j (columns) take up of eigenvectors i (rows): perturbation / gap, nothing of themselves."""
    itself = jnp.eye(*gap.shape, dtype=bool)
    divided = perturbation / jnp.where(itself | unresolved, 1.0, gap)
    return jnp.where(itself, 0.0, refused(divided, unresolved))


def slopes(perturbation: Inexact[Array, "k r"], unresolved: Bool[Array, "k r"]) -> Inexact[Array, " r"]:
    """Derivatives of eigenvalues j: the diagonal, not finite where coinciding ones are coupled."""
    coupled = jnp.where(unresolved, refused(perturbation, unresolved), 0.0)
    return jnp.diagonal(perturbation)[: perturbation.shape[1]] + jnp.sum(coupled, 0)
