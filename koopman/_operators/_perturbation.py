"""Derivatives of eigenpairs, by first-order perturbation theory.

Eigenvectors i and j are coupled by l_i^T dM w_j / (lambda_j - lambda_i). If the gap is below rounding, there is no
derivative: such a coupling is infinite unless it is exactly zero.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact


def refused(tangent: Inexact[Array, "..."], unresolved: Bool[Array, "..."]) -> Inexact[Array, "..."]:
    """Return the tangent, infinite where it is unresolved and not zero."""
    # Linear in the tangent, as is the transpose. A NaN would reach, as 0 * NaN, gradients that do not depend on it.
    factor = jnp.where(unresolved, jnp.finfo(tangent.dtype).max, 1.0)
    return tangent * factor * factor


def couplings(
    perturbation: Inexact[Array, "k r"], gap: Inexact[Array, "k r"], unresolved: Bool[Array, "k r"]
) -> Inexact[Array, "k r"]:
    """Return perturbation / gap, the change of eigenvectors j (columns) along i (rows), and zero along themselves."""
    itself = jnp.eye(*gap.shape, dtype=bool)
    return jnp.where(itself, 0.0, refused(perturbation / jnp.where(itself | unresolved, 1.0, gap), unresolved))


def slopes(perturbation: Inexact[Array, "k r"], unresolved: Bool[Array, "k r"]) -> Inexact[Array, " r"]:
    """Return derivatives of eigenvalues j: the diagonal, not finite if coinciding ones are coupled."""
    coupled = jnp.where(unresolved, refused(perturbation, unresolved), 0.0)
    return jnp.diagonal(perturbation)[: perturbation.shape[1]] + jnp.sum(coupled, 0)
