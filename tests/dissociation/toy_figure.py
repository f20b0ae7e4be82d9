"""A figure that costs nothing: three parts, each of which may wait for a file to appear."""

import dataclasses
import os
import time
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import xarray

from dissociation._core.checks import check_count, fail
from dissociation.figures import run

STEM, SHOWS = "toy", "A toy."
NETWORK = None


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes."""

    num_seeds: int = 3
    """Rows."""
    num_steps: int = 4
    """Columns."""
    gate: str = ""
    """A folder: part i waits for its file i."""

    def __post_init__(self):
        check_count("num_seeds", self.num_seeds, minimum=1)

    def quick(self):
        return dataclasses.replace(self, num_seeds=2, num_steps=2)


def source(config):
    if config.num_steps > 100:
        fail("num_steps", "be at most 100, which is all of the data", config.num_steps)
    if "TOY_DATA" in os.environ:
        raise FileNotFoundError(f"`TOY_DATA` must name a folder,\ngot {os.environ['TOY_DATA']}")
    return np.arange(config.num_steps)


def compute(config, *, key, data=None, cache=None, progress=None):
    return run(
        _computed, config, key=key, data=source(config) if data is None else data, cache=cache
    )


def _computed(config, key, data, cache):
    cache.network = NETWORK
    found = {
        f"part{i}": cache.get(f"part{i}", lambda i=i: _part(config, key, i))["part"]
        for i in range(3)
    }
    return xarray.Dataset(
        {name: (("seeds", "steps"), part) for name, part in found.items()}, attrs={"nan": np.nan}
    )


def _part(config, key, i):
    if config.gate:
        (Path(config.gate) / f"waiting{i}").touch()
        while not (Path(config.gate) / str(i)).exists():
            time.sleep(0.01)
    return {
        "part": jax.random.normal(jax.random.fold_in(key, i), (config.num_seeds, config.num_steps))
    }


def draw(dataset):
    figure = plt.figure(figsize=(1, 1))
    figure.add_artist(plt.Line2D([0, 1], dataset.part0.values[0][:2]))
    plt.close(figure)
    return figure


def caption(dataset):
    return f"A line (a) of {len(dataset)} parts."


def headline(dataset):
    return "a toy"


def table(dataset):
    return [
        ["part", "mean"],
        *([str(i), f"{part.values.mean():.3f}"] for i, part in enumerate(dataset.values())),
    ]


if __name__ == "__main__":
    import sys

    import matplotlib as mpl

    from dissociation.training import _interrupts as interrupts

    mpl.use("Agg")
    interrupts.listen("toy")
    from dissociation.figures import run_command

    status = run_command({"toy": sys.modules[__name__]}, None, program="toy", description="Toys.")
    interrupts.end()
    sys.exit(status)
