"""Train stacked members: a pure step, samplers, a compiled loop, and a loop on the host around it.

A member is one seed or one setting of a sweep. `make_step` returns one optimiser step of one
network; a sampler chooses the batches. `train` is a whole training as a pure function. `fit` trains
many members in compiled chunks, between which the host shows progress, records, writes checkpoints
and can stop.
"""

from typing import TYPE_CHECKING

from dissociation._core.lazy import attach

__all__ = [
    "make_step", "State", "Epochs", "FullBatch", "HostBatches", "Online", "Sampler", "train", "fit",
    "FitResult", "Save", "History", "Callback", "Progress", "CsvLog", "EarlyStop", "FreezeDiverged",
    "log_spaced_steps", "fit_grid", "GridResult", "Grid",
]  # fmt: skip

if TYPE_CHECKING:
    from dissociation.training._fitting import FitResult, fit
    from dissociation.training._grids import GridResult, fit_grid
    from dissociation.training._loop import train
    from dissociation.training._progress import Progress
    from dissociation.training._records import (
        Callback,
        CsvLog,
        EarlyStop,
        FreezeDiverged,
        History,
        Save,
        log_spaced_steps,
    )
    from dissociation.training._samplers import Epochs, FullBatch, HostBatches, Online, Sampler
    from dissociation.training._state import State, make_step
    from dissociation.training._sweeps import Grid
else:
    __getattr__, __dir__ = attach(__name__)
