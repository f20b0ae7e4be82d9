"""Derivatives of eigenpairs, by first-order perturbation theory: l_i^T dM w_j / (lambda_j - lambda_i)."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact


def refused(tangent: Inexact[Array, "..."], unresolved: Bool[Array, "..."]) -> Inexact[Array, "..."]:
    """Return the tangent, infinite if it is unresolved and not zero."""
    # Without a gap there is no derivative, and a wrong finite one would go unnoticed. A product is linear in the
    # tangent, so it has a transpose. NaN would spread to other gradients, as 0 * NaN.
    factor = jnp.where(unresolved, jnp.finfo(tangent.dtype).max, 1.0)
    return tangent * factor * factor


def couplings(
    perturbation: Inexact[Array, "k r"], gap: Inexact[Array, "k r"], unresolved: Bool[Array, "k r"]
) -> Inexact[Array, "k r"]:
    """Return perturbation / gap, the change of eigenvectors j (columns) along i (rows), zero for i = j."""
    itself = jnp.eye(*gap.shape, dtype=bool)
    return jnp.where(itself, 0.0, refused(perturbation / jnp.where(itself | unresolved, 1.0, gap), unresolved))


def slopes(perturbation: Inexact[Array, "k r"], unresolved: Bool[Array, "k r"]) -> Inexact[Array, " r"]:
    """Return derivatives of eigenvalues j, the diagonal; not finite if coinciding ones are coupled."""
    coupled = jnp.where(unresolved, refused(perturbation, unresolved), 0.0)
    return jnp.diagonal(perturbation)[: perturbation.shape[1]] + jnp.sum(coupled, 0)
