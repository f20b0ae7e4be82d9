"""Training many members at once: optimiser steps compiled in chunks, members mapped inside, the host in between.

A member is one seed or one setting of a sweep. Between chunks the host shows progress, records observations, writes
checkpoints and can stop; neither where the chunks end nor where a run was interrupted changes a single bit of it.
"""

from dissociation.schedule import log_spaced_steps, steps_per_epoch
from dissociation.training.fitting import FitResult, fit
from dissociation.training.run import History

__all__ = ["FitResult", "History", "fit", "log_spaced_steps", "steps_per_epoch"]
