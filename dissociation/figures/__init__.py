"""Compute and draw the figures, one module each."""

from typing import TYPE_CHECKING

from dissociation._core.lazy import attach

__all__ = [
    "figures", "main", "run_command", "Figure", "run", "config_of", "rows", "padded", "exhibit_of",
    "Exhibit", "report_html", "Cache", "CacheFolder", "AnyMeter", "DataName", "cell",
    "check_some_left", "named_diverged",
]  # fmt: skip

if TYPE_CHECKING:
    from dissociation.figures._cache import AnyMeter, Cache, CacheFolder
    from dissociation.figures._cli import figures, main
    from dissociation.figures._command import run_command
    from dissociation.figures._harness import Figure, config_of, padded, rows, run
    from dissociation.figures._members import DataName
    from dissociation.figures._report import Exhibit, exhibit_of, report_html
    from dissociation.figures._seeds import cell, check_some_left, named_diverged
else:
    __getattr__, __dir__ = attach(__name__)
