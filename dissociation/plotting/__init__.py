"""Draw figures in the house style, and show arrays, models and tables."""

from typing import TYPE_CHECKING

from dissociation._core.lazy import attach

__all__ = [
    "house_style", "style_path", "letter", "look", "color", "band", "differences", "heat",
    "log_height", "drawn_as", "summarise", "show", "table",
]  # fmt: skip

if TYPE_CHECKING:
    from dissociation.plotting._axes import (
        band,
        color,
        differences,
        drawn_as,
        heat,
        house_style,
        letter,
        log_height,
        look,
        style_path,
        summarise,
    )
    from dissociation.plotting._display import show, table
else:
    __getattr__, __dir__ = attach(__name__)
