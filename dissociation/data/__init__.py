"""Load labelled images by name or from arrays, make tasks of them, and load weights."""

from typing import TYPE_CHECKING

from dissociation._core.lazy import attach

__all__ = [
    "load", "Dataset", "NAMES", "mnist_data", "glyph_data", "draw_glyphs", "Variation",
    "rotated_quarters", "coarse_grained", "load_state",
]  # fmt: skip

if TYPE_CHECKING:
    from dissociation.data._datasets import NAMES, Dataset, load
    from dissociation.data._glyphs import Variation, draw_glyphs, glyph_data
    from dissociation.data._mnist import mnist_data
    from dissociation.data._tasks import coarse_grained, rotated_quarters
    from dissociation.data._weights import load_state
else:
    __getattr__, __dir__ = attach(__name__)
