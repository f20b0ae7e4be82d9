"""Figure `transfer`: linear probes on the representations of networks of one function.

Softmax probes learn quarter turns or coarser classes from the last hidden layer of networks,
trained on digits and rewritten. A converged probe measures the content of a representation, and a
fixed number of gradient steps learning in limited time, at a rate by its curvature, or at the
largest one that is stable for all networks of a seed.
"""

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import xarray
from jaxtyping import Array
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from dissociation._core.checks import fail
from dissociation.data._datasets import Dataset
from dissociation.data._tasks import NUM_QUARTERS, coarse_grained, rotated_quarters
from dissociation.figures import _members as members
from dissociation.figures._cache import AnyMeter, Cache, CacheFolder
from dissociation.figures._harness import config_of, drawing, rows, run
from dissociation.figures._members import headline
from dissociation.figures._members import source as source
from dissociation.figures._seeds import cell
from dissociation.measures._probes import stable_step_size, transfer_errors
from dissociation.plotting import _axes as plotting

__all__ = ["Config", "compute", "draw"]

STEM = "transfer"
SHOWS = "Transfer error of function-preserving rewrites against the sample budget."

TASKS = {"rotation": "quarter turns", "coarse": "least prime factor"}
"""Titles of the probes' tasks in figure, caption and table."""

PROBES = {
    "converged": "converged probe",
    "gradient": "{} gradient steps",
    "one_rate": "{} steps, one rate",
}
"""Titles of the learners in the figure."""


@dataclasses.dataclass(frozen=True)
class Config(members.Config):
    """Settings of training, rewrites and probes."""

    num_seeds: int = 3
    """Networks trained from scratch."""
    width: int = 1024
    """Units in each of the two hidden layers; of networks of images, in the last."""
    num_budgets: int = 20
    """Number of sample budgets, in equal steps up to all test images."""
    num_splits: int = 10
    """Folds of the cross-validation."""
    gradient_steps: int = 200
    """Steps of the probe with limited time."""
    scale_factor: float = 20.0
    """Factor on incoming weights; outgoing ones are divided by it."""
    duplicate_multiplier: float = 1.2
    """Copies of each neuron in the duplicated network."""
    num_zero: int = 128
    """Nuisance neurons, one per group."""
    probes: tuple[str, ...] = ("converged", "gradient")
    """Learners; a third is "one_rate", whose gradient steps have one rate for all networks of a
    seed."""

    def __post_init__(self):
        super().__post_init__()
        self.check(num_budgets=1, gradient_steps=1, num_splits=2, probes=PROBES)

    def check_data(self, data: Dataset) -> None:
        """Raise if there are too few test images for quarter turns, or for the folds."""
        count = len(data.test_images)
        if count < NUM_QUARTERS:
            requirement = f"be at least {NUM_QUARTERS}: a quarter of the images is turned each way"
            fail("num_test", requirement, count)
        if count // self.num_budgets < self.num_splits:
            requirement = (
                f"leave each of the `num_splits` folds ({self.num_splits}) a sample of the "
                "smallest budget"
            )
            fail("num_budgets", requirement, f"{self.num_budgets} budgets of {count} test images")

    def fractions(self) -> tuple[float, ...]:
        """Return sample budgets as fractions of the test images."""
        budgets = np.arange(1, self.num_budgets + 1)
        return tuple((budgets / self.num_budgets).tolist())

    def quick(self) -> "Config":
        """Return the options of a smoke run."""
        return dataclasses.replace(
            self, num_seeds=2, num_epochs=5, num_train=2000, num_test=200, width=64,
            num_budgets=2, num_zero=8, num_splits=5,
        )  # fmt: skip


def compute(
    config: Config,
    *,
    key: Array,
    data: Dataset | None = None,
    cache: CacheFolder = None,
    progress: AnyMeter = None,
) -> xarray.Dataset:
    """Train, rewrite and probe; see `figures.Figure.compute`.

    Returns:
        `transfer_error` [tasks, probes, variants, seeds, budgets], 1 - accuracy on held-out folds;
        `clean_error` [variants, seeds], test error on the digits themselves; along training,
        `test_error` [seeds, epochs]. Over all seeds, the certificate of each variant on the test
        images, see `rewrites.Certificate`.
    """
    data = source(config, data)
    return run(_computed, config, key=key, data=data, cache=cache, progress=progress)


def _computed(config: Config, key: Array, data: Dataset, cache: Cache) -> xarray.Dataset:
    train_key, rewrite_key, rotation_key, coarse_key = jax.random.split(key, 4)
    trained = config.train(train_key, data, cache)
    keys = jax.random.split(rewrite_key, config.num_seeds)
    images = jnp.asarray(data.test_images)
    labels = jnp.asarray(data.test_labels)
    models = trained.models
    tasks = {
        "rotation": rotated_quarters(images, key=rotation_key),
        "coarse": coarse_grained(images, labels, key=coarse_key),
    }
    variants = config.rewrites(members.rewritten_group(models, data.test_images[0]))

    certify = eqx.Partial(members.certify_members, images, labels)
    jobs = {}
    for name, rewrite in variants.items():
        job = partial(members.measure_members, rewrite, certify, models, keys, keys)
        jobs[f"{name}_certificate"] = job
    names = []
    for task, probe, name in itertools.product(TASKS, config.probes, variants):
        job = partial(_curves, config, probe, tasks[task], variants, name, models, keys)
        jobs[f"{name}_{task}_{probe}"] = job
        names.append(f"{name}_{task}_{probe}")
    arrays = cache.get_all(jobs, "probing")

    errors = np.stack([arrays[name]["error"] for name in names])
    shape = (len(TASKS), len(config.probes), len(variants), *errors.shape[1:])
    dims = ("tasks", "probes", "variants", "seeds", "budgets")
    variables = {"transfer_error": (dims, errors.reshape(shape))}
    variables |= members.certified(arrays, variants, trained.alive)
    budgets = np.array(config.fractions()) * len(images)
    budgets = (budgets + 1e-6).astype(int)
    coords = {
        "tasks": list(TASKS),
        "probes": list(config.probes),
        "variants": list(variants),
        "budgets": ("budgets", budgets, {"units": "samples"}),
    }
    return trained.dataset(data, variables, coords)


@drawing
def draw(dataset: xarray.Dataset) -> Figure:
    """Draw transfer error by sample budget, and the error that rewrites add.

    A task has two rows, a probe a column of 1.62 inches.
    """
    budgets = dataset.budgets.values
    steps = config_of(dataset).gradient_steps
    probes = dataset.probes.values
    looks = plotting.looks(dataset.variants.values)
    size = (1.62 * len(probes), 4.6)
    figure, axes = plt.subplots(2 * len(TASKS), len(probes), figsize=size, squeeze=False)
    for row, (task, title) in enumerate(TASKS.items()):
        total_axes = axes[2 * row]
        added_axes = axes[2 * row + 1]
        for total, added, probe in zip(total_axes, added_axes, probes, strict=True):
            curves = rows(dataset.transfer_error.sel(tasks=task, probes=probe), "variants")
            for name, errors in curves.items():
                plotting.band(total, budgets, errors, label=name, within=(1e-4, 1.0), **looks[name])
            plotting.differences(added, budgets, curves, looks=looks)
            total.set_title(f"{title},\n{PROBES[probe].format(steps)}")
            plotting.log_height(total)
        total_axes[0].set_ylabel("transfer error")
        added_axes[0].set_ylabel("added transfer error")

    last = budgets[-1]
    low = last / 10
    ticks = [tick for tick in (low, 2 * low, 5 * low, last) if tick >= budgets[0]]
    if len(budgets) > 1:
        low = max(low, budgets[0])
    for panel in axes.flat:
        panel.set(xscale="log", xlim=(low, last))
        panel.xaxis.set_major_locator(FixedLocator(ticks))
        panel.xaxis.set_major_formatter(ScalarFormatter())
        panel.xaxis.set_minor_locator(NullLocator())
    for panel in axes[-1]:
        panel.set_xlabel("sample budget")
    plotting.letter(*axes.flat)
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        *handles, loc="outside upper center", ncols=4, columnspacing=1.2, handlelength=3.0
    )
    return figure


def caption(dataset: xarray.Dataset) -> str:
    """Return the caption."""
    count = len(dataset.probes)
    rows_of_letters = []
    for first in range(0, 4 * count, count):
        rows_of_letters.append(", ".join("abcdefghijkl"[first : first + count]))
    a, c, e, g = rows_of_letters
    errors = dataset.transfer_error
    curves = errors.values.reshape(-1, *errors.shape[-2:])
    return (
        "Error of linear probes on the last hidden layer of trained networks, and of rewrites "
        "that keep the "
        f"function, by the number of test images (up to {dataset.budgets.values[-1]}) from which "
        "the probes learn: "
        f"{TASKS['rotation']} ({a}) and {TASKS['coarse']} ({e}). Below ({c}, {g}), the error "
        "that a rewrite adds to "
        f"the same seed's trained network. {plotting.drawn_as(*curves)} Data: {headline(dataset)}."
    )


def table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return a header and a row per variant.

    Cells are transfer errors (%) with all samples, and changes of the function.
    """
    columns = list(itertools.product(TASKS, dataset.probes.values))
    titles = [f"{TASKS[task]}, {probe}" for task, probe in columns]
    table_rows = [["variant", *titles, "largest change of a logit", "flips"]]
    for name in dataset.variants.values:
        networks = dataset.sel(variants=name)
        row = [name]
        for task, probe in columns:
            errors = networks.transfer_error.sel(tasks=task, probes=probe).values
            row.append(cell(errors[:, -1], factor=100, unit=" %"))
        row.append(f"{networks.max_abs_change.item():.1e}")
        row.append(f"{networks.changed_predictions.item():.0f}")
        table_rows.append(row)
    return table_rows


def _curves(
    config: Config,
    probe: str,
    task: tuple[Array, Array],
    variants: dict[str, Callable[[Any, Array], Any]],
    name: str,
    models: Any,
    keys: Array,
) -> dict[str, Array]:
    """Return the probe's errors on each member's rewritten features, [members, budgets]."""
    images, labels = task
    represent = eqx.Partial(members.represent, images)
    features = members.measure_members(variants[name], represent, models, keys, keys)
    steps = None
    if probe == "one_rate":
        stable_step = eqx.Partial(_stable_step, images)
        stable_steps = []
        for rewrite in variants.values():
            stable_steps.append(members.measure_members(rewrite, stable_step, models, keys, keys))
        steps = jnp.min(jnp.stack(stable_steps), 0)
    # In a separate program, which variants of one width share, because it compiles slowly.
    measure = eqx.Partial(_errors, config, probe, labels)
    return members.measure_members(_unchanged, measure, (features, steps), keys, keys)


def _stable_step(images: Array, model: Any, rewritten: Any, key: Array) -> Array:
    """Return the largest stable step of gradient descent on the features of one rewrite."""
    return stable_step_size(members.represent(images, model, rewritten, key))


def _unchanged(features_and_step: Any, key: Array) -> Any:
    return features_and_step


def _errors(
    config: Config,
    probe: str,
    labels: Array,
    features_and_step: tuple[Array, Array | None],
    unchanged: Any,
    key: Array,
) -> dict[str, Array]:
    features, step = features_and_step
    # As published: rows in the order of the test set, contiguous folds.
    options: dict[str, Any] = {"key": None, "folds": "contiguous", "num_splits": config.num_splits}
    if probe != "converged":
        options |= {"probe": "gradient", "num_steps": config.gradient_steps, "step_size": step}
    return {"error": transfer_errors(features, labels, fractions=config.fractions(), **options)}
