"""Training, in four layers: a pure step, what it sees, a compiled loop, and the host's part around it.

A member is one seed or one setting of a sweep. `make_step` makes one optimiser step of one network; a sampler says what
it sees; `train` is a whole training as a pure function. `fit` trains many members at once, compiled in chunks: between
them the host shows progress, records, writes checkpoints and can stop; neither where chunks end nor where a run was
interrupted changes a single bit of it.
"""

from dissociation.schedule import log_spaced_steps, steps_per_epoch
from dissociation.training.callbacks import Callback, CsvLog, EarlyStop, FreezeDiverged, Progress
from dissociation.training.chunk import Layout
from dissociation.training.fitting import FitResult, fit
from dissociation.training.grids import GridResult, Plan, fit_grid
from dissociation.training.loop import train
from dissociation.training.records import History, Save
from dissociation.training.samplers import Epochs, FullBatch, HostBatches, Online, Sampler
from dissociation.training.state import Info, State, Step, make_step

__all__ = [
    "Callback", "CsvLog", "EarlyStop", "Epochs", "FitResult", "FreezeDiverged", "FullBatch", "GridResult", "History",
    "HostBatches", "Info", "Layout", "Online", "Plan", "Progress", "Sampler", "Save", "State", "Step", "fit",
    "fit_grid", "log_spaced_steps", "make_step", "steps_per_epoch", "train",
]  # fmt: skip
