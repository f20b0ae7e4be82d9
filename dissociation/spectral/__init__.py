"""What the weights of bilinear networks say: quadratic forms, their eigenvectors, and how alike they are."""

from dissociation.spectral.forms import Spectrum, decompose, interaction_tensor, truncate

__all__ = ["Spectrum", "decompose", "interaction_tensor", "truncate"]
