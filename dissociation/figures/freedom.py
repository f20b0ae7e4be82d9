"""Figure `freedom`: attainable range of the similarity of two networks, for the same two functions.

Networks of several seeds are compared in pairs by linear CKA, layer by layer. Each pair's value is
drawn in the interval that scaling the first network's neurons can reach; certified rewrites
approach the ends.
"""

import dataclasses
import itertools
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import xarray
from jaxtyping import Array
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from dissociation.data._datasets import Dataset
from dissociation.figures import _members as members
from dissociation.figures._cache import AnyMeter, Cache, CacheFolder
from dissociation.figures._harness import config_of, drawing, run
from dissociation.figures._members import source as source
from dissociation.figures._null_spaces import moved_weights, null_perturbed, null_spaces
from dissociation.figures._seeds import cell
from dissociation.models._representations import member_representations, representations
from dissociation.plotting import _axes as plotting
from dissociation.rewrites._certificate import certify
from dissociation.rewrites._freedom import ENDS, cka_range
from dissociation.rewrites._groups import NeuronGroup, neuron_groups
from dissociation.rewrites._rewrites import Rewrite, scale
from dissociation.similarity._kernels import linear_cka
from dissociation.training._members import take

__all__ = ["Config", "compute", "draw"]

STEM = "freedom"
SHOWS = "Linear CKA between seeds, within the attainable range of networks with the same functions."

_INTERVALS = ("measured", "low", "high", "residual")
LAYERS = ("first hidden layer", "last hidden layer")
REWRITES = {
    "scaled": "scaled",
    "unevenly": "scaled unevenly",
    "duplicated": "duplicated",
    "nuisance": "nuisance",
    "null-perturbed": "null-perturbed",
}
"""Rewrites of the last layer, by their names in the figure."""

TICKS = (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
"""Ticks of linear CKA; values beyond the first and the last are drawn there."""


@dataclasses.dataclass(frozen=True)
class Config(members.Config):
    """Settings of training, comparison and rewrites."""

    num_seeds: int = 5
    """Networks trained from scratch, at least 2."""
    num_samples: int = 1000
    """Number of represented test images, the first ones."""
    width: int = 256
    """Units in each of the two hidden layers; of networks of images, in the last."""
    scale_factor: float = 20.0
    """Factor on all incoming weights; outgoing ones are divided by it."""
    spread: float = 1.0
    """Standard deviation of the logarithm of the factors of unevenly scaled neurons."""
    duplicate_multiplier: float = 2.0
    """Copies of each neuron in the duplicated network."""
    num_zero: int = 64
    """Nuisance neurons, one per group."""
    null_scale: float = 0.1
    """Standard deviation of the noise in the null space of the data;
    for networks of images, of the last layer's inputs."""

    def __post_init__(self):
        super().__post_init__()
        self.check(num_seeds=2, num_samples=2, null_scale=(0.0, np.inf), spread=(0.0, 10.0))

    def quick(self) -> "Config":
        """Return the options of a smoke run."""
        return dataclasses.replace(
            self, num_seeds=3, num_epochs=3, num_train=2000, num_test=200, num_samples=100,
            width=32, num_zero=8,
        )  # fmt: skip


def compute(
    config: Config,
    *,
    key: Array,
    data: Dataset | None = None,
    cache: CacheFolder = None,
    progress: AnyMeter = None,
) -> xarray.Dataset:
    """Train, compare and rewrite; see `figures.Figure.compute`.

    Returns:
        By layer and pair of seeds, the first network of a pair in rows: `measured` linear CKA;
        `low` and `high`, the smallest and largest for networks of the first one's function;
        `residual`, the relative one of the conditions that certify the largest; by end,
        `approached`, linear CKA of the first network rewritten towards it, and `change`, the
        largest change of a logit on all test images. By rewrite, `moved`, linear CKA of the last
        layer after it. Numbers are NaN on the diagonal and for diverged networks. Along training,
        `test_error`.
    """
    return run(
        _computed, config, key=key, data=source(config, data), cache=cache, progress=progress
    )


def _computed(config: Config, key: Array, data: Dataset, cache: Cache) -> xarray.Dataset:
    """Return the dataset of `compute`."""
    train_key, rewrite_key = jax.random.split(key)
    trained = config.train(train_key, data, cache)
    models = trained.models
    images = jnp.asarray(data.test_images[: config.num_samples])
    all_images = jnp.asarray(data.test_images)
    layers = member_representations(models, images)
    groups = rewritten_layers(config, models, data.test_images[0])

    jobs = {}
    for name, group in groups.items():
        jobs[name] = partial(_freedom, models, group, layers[name], images, all_images)
    *_, last = groups.values()
    jobs["moved"] = partial(_moved, config, models, last, layers[last.name], data, rewrite_key)
    tables = cache.get_all(jobs, "comparing")

    is_same_seed = np.eye(config.num_seeds, dtype=bool)

    def stacked(arrays: list[np.ndarray]) -> np.ndarray:
        return np.where(is_same_seed, np.nan, np.stack(arrays))

    pair_axes = ("seeds", "other_seeds")
    variables = {}
    for name in _INTERVALS:
        intervals = stacked([tables[layer][name] for layer in groups])
        variables[name] = (("layers", *pair_axes), intervals)
    for kind in ("approached", "change"):
        ends = []
        for end in ENDS:
            ends.append(stacked([tables[layer][f"{kind}_{end}"] for layer in groups]))
        variables[kind] = (("ends", "layers", *pair_axes), np.stack(ends))
    moved = stacked([tables["moved"][name] for name in REWRITES])
    variables["moved"] = (("rewrites", *pair_axes), moved)

    coords = {
        "layers": list(groups),
        "ends": list(ENDS),
        "rewrites": list(REWRITES),
        "other_seeds": np.arange(config.num_seeds),
    }
    return trained.dataset(data, variables, coords)


def rewritten_layers(
    config: Config, models: Any, example: Array | np.ndarray
) -> dict[str, NeuronGroup]:
    """Return the groups of both hidden layers of the perceptron, else of the last one."""
    groups = {}
    if config.model == "mlp":
        groups = neuron_groups(take(models, 0), jnp.asarray(example))
    last = members.rewritten_group(models, example)
    return groups | {last.name: last}


def _freedom(
    models: Any, group: NeuronGroup, represented: Array, images: Array, all_images: Array
) -> dict[str, np.ndarray]:
    """Return intervals of all pairs, and similarities of networks rewritten towards the ends.

    Each table is [seeds, seeds].
    """
    count = len(represented)
    ends = ["_".join(pair) for pair in itertools.product(("approached", "change"), ENDS)]
    tables = {name: np.full((count, count), np.nan) for name in (*_INTERVALS, *ends)}
    for i, j in itertools.permutations(range(count), 2):
        interval = cka_range(np.asarray(represented[i]), np.asarray(represented[j]))
        for name in _INTERVALS:
            tables[name][i, j] = getattr(interval, name)

        model = take(models, i)
        for end in ENDS:
            scaled = _rewritten(model, interval.rewrite(group, end=end))
            value, change = _compared(model, scaled, group.name, images, all_images, represented[j])
            tables[f"approached_{end}"][i, j] = float(value)
            tables[f"change_{end}"][i, j] = float(change)
    return tables


@eqx.filter_jit
def _rewritten(model: Any, rewrite: Rewrite) -> Any:
    """Return the rewritten model."""
    # In a separate program, because fused weights would be rounded differently.
    return rewrite(model)


@eqx.filter_jit
def _compared(
    model: Any, rewritten: Any, layer: str, images: Array, all_images: Array, reference: Array
) -> tuple[Array, Array]:
    """Return the similarity after scaling, and the largest change of a logit."""
    with jax.default_matmul_precision("highest"):
        activity = representations(rewritten, images)[layer]
        value = linear_cka(activity, reference)
    return value, certify(model, rewritten, all_images).max_abs_change


def _moved(
    config: Config, models: Any, group: NeuronGroup, features: Array, data: Dataset, key: Array
) -> dict[str, np.ndarray]:
    """Return linear CKA of rewritten networks with trained ones by rewrite, [seeds, seeds].

    Rewritten networks are in rows, trained ones in columns.
    """
    images = jnp.asarray(data.test_images[: config.num_samples])
    all_images = np.concatenate([data.train_images, data.test_images])
    num_seeds = config.num_seeds
    weights = moved_weights(config.model, models, group, all_images[:1])
    bases = null_spaces(config.model, models, weights.path, all_images, num_seeds)["basis"]

    def unevenly(model: Any, key: Array) -> Any:
        logarithms = config.spread * jax.random.normal(key, (group.size,))
        return scale(group, jnp.exp(logarithms))(model)

    rewrites: dict[str, Any] = config.rewrites(group)
    rewrites["null-perturbed"] = null_perturbed(weights, config.null_scale)
    rewrites["unevenly"] = unevenly
    tables = {}
    for index, name in enumerate(REWRITES):
        rewrite_key = jax.random.fold_in(key, index)
        inputs: Any = jax.random.split(rewrite_key, num_seeds)
        if name == "null-perturbed":
            inputs = (inputs, jnp.broadcast_to(bases, (num_seeds, *bases.shape[1:])))
        rows = []
        for seed in range(num_seeds):
            row = _row(rewrites[name], take(models, seed), take(inputs, seed), images, features)
            rows.append(np.asarray(row))
        tables[name] = np.stack(rows)
    return tables


@eqx.filter_jit
def _row(rewrite: Any, model: Any, inputs: Any, images: Array, features: Array) -> Array:
    """Return linear CKA of a rewritten network with trained ones, [seeds].

    `inputs` are those of the rewrite: a key, or a key and a basis.
    """
    activity = representations(rewrite(model, inputs), images)["features"]
    return jax.vmap(lambda reference: linear_cka(activity, reference))(features)


@drawing
def draw(dataset: xarray.Dataset) -> Figure:
    """Draw attainable intervals of layers, and values of rewritten networks, 5.6 x 1.8 inches."""
    figure, axes = plt.subplots(1, 2, figsize=(5.6, 1.8), sharex=True)
    intervals = axes[0]
    _intervals(intervals, dataset)
    _rewrites(axes[1], dataset)
    intervals.set_xscale("logit")
    intervals.set_xlim(5e-4, 1 - 5e-4)
    intervals.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    intervals.xaxis.set_minor_locator(NullLocator())
    for panel in axes:
        panel.set_xlabel("linear CKA")
        panel.invert_yaxis()
    plotting.letter(*axes)
    figure.legend(*intervals.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def _finite(values: xarray.DataArray) -> np.ndarray:
    """Return the finite entries of a matrix of pairs, flat.

    The diagonal and diverged networks are NaN.
    """
    return values.values[np.isfinite(values.values)]


def _dots(panel: Axes, row: int, pairs: xarray.DataArray, **options: Any) -> None:
    """Draw a dot for each finite pair beside the middle of a row."""
    values = _finite(pairs)
    heights = row + 0.24 * np.linspace(-1, 1, len(values) + 2)[1:-1]
    x = np.clip(values, *np.array(TICKS)[[0, -1]])
    panel.plot(x, heights, ".", markersize=2, color=plotting.color(0), **options)


def _intervals(panel: Axes, dataset: xarray.Dataset) -> None:
    """Draw a row for each layer: mean interval with its ends, and measured values of all pairs."""
    titles = LAYERS[-len(dataset.layers) :]
    bar_label = "same functions"
    dot_label = "measured, a dot for each pair of seeds"
    for row, name in enumerate(dataset.layers.values):
        layer = dataset.sel(layers=name)
        low = _finite(layer.low).mean()
        high = _finite(layer.high).mean()
        left_end, right_end = np.clip([low, high], TICKS[0], TICKS[-1])
        panel.plot(
            [left_end, right_end], [row, row], color="0.75", linewidth=8, solid_capstyle="butt",
            label=bar_label,
        )  # fmt: skip
        _dots(panel, row, layer.measured, label=dot_label)
        panel.text(left_end, row - 0.3, f"{low:.3f}", ha="left", va="bottom", fontsize="small")
        panel.text(right_end, row - 0.3, f"{high:.3f}", ha="right", va="bottom", fontsize="small")
        # The legend has the first row alone.
        bar_label = dot_label = ""
    panel.set_yticks(range(len(titles)), titles)
    panel.set_ylim(-0.7, len(titles) - 0.5)
    panel.set_title("attainable by scaling neurons")


def _rewrites(panel: Axes, dataset: xarray.Dataset) -> None:
    """Draw a row for each rewrite of the first network, below the last layer as trained."""
    _dots(panel, 0, dataset.measured.isel(layers=-1))
    titles = ["as trained"]
    for row, name in enumerate(dataset.rewrites.values, 1):
        _dots(panel, row, dataset.moved.sel(rewrites=name))
        titles.append(REWRITES[name])
    panel.set_yticks(range(len(titles)), titles)
    panel.set_title("last hidden layer, first network rewritten")


def caption(dataset: xarray.Dataset) -> str:
    """Return the caption."""
    return (
        f"Linear CKA of {_finite(dataset.measured[0]).size} ordered pairs of seeds on "
        f"{config_of(dataset).num_samples} "
        "test images, on a logit axis. (a) Dots are pairs; bars are the attainable range when "
        "the first network's "
        "neurons are scaled and its function stays, mean of the pairs' ends. (b) The last hidden "
        "layer of the same "
        "pairs after rewrites of the first network, a dot for each pair. Data: "
        f"{members.headline(dataset)}."
    )


def headline(dataset: xarray.Dataset) -> str:
    """Return a line with the data, the measure, and the attainable range."""
    layer = dataset.isel(layers=-1)
    measured = _finite(layer.measured)
    return (
        f"{members.headline(dataset)}; {config_of(dataset).num_samples} samples\n"
        f"Seeds measure a linear CKA of {measured.mean():.3f} in the last hidden layer "
        f"({measured.min():.3f} "
        f"to {measured.max():.3f}); the functions of a pair can show anything from "
        f"{_finite(layer.low).mean():.4f} to {_finite(layer.high).mean():.4f} (means over pairs)."
    )


def table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return a header and a row per layer, then a row per rewrite.

    Columns are the value, the ends, the distance of rewrites from them, and the function's change.
    """
    header = [
        "layer",
        "measured",
        "least",
        "largest",
        "distance from ends",
        "change of a logit",
        "residual",
    ]
    rows = [header]
    for name in dataset.layers.values:
        layer = dataset.sel(layers=name)
        cells = [cell(_finite(layer[field]), 4) for field in ("measured", "low", "high")]
        distances = [abs(layer.approached.sel(ends=end) - layer[end]).max() for end in ENDS]
        for number in (max(map(float, distances)), layer.change.max(), layer.residual.max()):
            cells.append(f"{float(number):.0e}")
        rows.append([name, *cells])
    for name, pairs in zip(dataset.rewrites.values, dataset.moved, strict=True):
        title = f"last, {REWRITES[name]}"
        rows.append([title, cell(_finite(pairs), 4), *[""] * (len(header) - 2)])
    return rows
