"""Compute and draw the figures, one module each."""

from typing import TYPE_CHECKING

from dissociation._core.lazy import attach

__all__ = [
    "figures", "main",
]  # fmt: skip

if TYPE_CHECKING:
    from koopman.figures._cli import figures, main
else:
    __getattr__, __dir__ = attach(__name__)
