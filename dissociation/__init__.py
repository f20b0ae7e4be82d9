"""Ask what a network's function says about its representation.

Train many seeds of a network, rewrite its weights without changing its function, and measure what
changes. The names that most users need are here; all others are in the folders: `data`, `training`,
`models`, `rewrites`, `similarity`, `measures`, `bilinear`, `recipes`, `figures` and `plotting`. A
module is imported when one of its names is first used.
"""

from typing import TYPE_CHECKING

from dissociation._core.lazy import attach

__all__ = [
    "load", "fit_classifiers", "fit", "fit_grid", "Grid", "Epochs", "make_step", "member", "take",
    "map_members", "bmap", "member_mesh", "use_all_cores", "neuron_groups", "scale", "permute",
    "rotate", "duplicate", "add_nuisance", "null_perturb", "certify", "representations", "MEASURES",
    "compare", "pairwise", "linear_cka", "debiased_cka", "show", "save_results", "load_results",
]  # fmt: skip

if TYPE_CHECKING:
    from dissociation._core.datasets import load_results, save_results
    from dissociation.data._datasets import load
    from dissociation.models._representations import representations
    from dissociation.plotting._display import show
    from dissociation.recipes._mnist import fit_classifiers
    from dissociation.rewrites._certificate import certify
    from dissociation.rewrites._groups import neuron_groups
    from dissociation.rewrites._growth import add_nuisance, duplicate
    from dissociation.rewrites._rewrites import null_perturb, permute, rotate, scale
    from dissociation.similarity._kernels import debiased_cka, linear_cka
    from dissociation.similarity._measures import MEASURES
    from dissociation.similarity._pairs import compare, pairwise
    from dissociation.training._bmap import bmap
    from dissociation.training._fitting import fit
    from dissociation.training._grids import fit_grid
    from dissociation.training._machine import use_all_cores
    from dissociation.training._members import map_members, member, member_mesh, take
    from dissociation.training._samplers import Epochs
    from dissociation.training._state import make_step
    from dissociation.training._sweeps import Grid

    __version__: str
else:
    __getattr__, __dir__ = attach(__name__)
