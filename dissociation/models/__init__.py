"""Networks that take one example, and named representations of any model."""

from typing import TYPE_CHECKING

from dissociation._core.lazy import attach

__all__ = [
    "MLP", "CNN", "Encoder", "ResNet", "Transformer", "BilinearNetwork", "wrap_bilinear",
    "Affine", "Convolution", "FunctionModel", "representations", "member_representations", "named",
    "representations_of_example", "layer_shapes", "intervene",
]  # fmt: skip

if TYPE_CHECKING:
    from dissociation.models._bilinear import BilinearNetwork, wrap_bilinear
    from dissociation.models._function import FunctionModel
    from dissociation.models._images import CNN, Encoder, ResNet, Transformer
    from dissociation.models._intervention import intervene
    from dissociation.models._layers import Affine, Convolution
    from dissociation.models._mlp import MLP
    from dissociation.models._representations import (
        layer_shapes,
        member_representations,
        named,
        representations,
        representations_of_example,
    )
else:
    __getattr__, __dir__ = attach(__name__)
