"""Networks with a given noise on their parameters."""

import equinox as eqx
import jax

from dissociation.models._program import parameters_in, with_draws


def perturbed(model, noise, scale):
    """Return a model with `scale * noise` added to its parameters."""
    added = jax.tree.map(
        lambda weight, draw: weight + scale * draw, parameters_in(model), with_draws(model, noise)
    )
    return eqx.combine(added, model)
