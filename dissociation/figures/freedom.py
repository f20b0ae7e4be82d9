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
    """Standard deviation of the noise in the null space of the data; for networks of images, of the last layer's
    inputs."""

    def __post_init__(self):
        super().__post_init__()
        self.check(num_seeds=2, num_samples=2, null_scale=(0.0, np.inf), spread=(0.0, 10.0))

    def quick(self) -> "Config":
        """Return the options of a smoke run."""
        return dataclasses.replace(
            self,
            num_seeds=3,
            num_epochs=3,
            num_train=2000,
            num_test=200,
            num_samples=100,
            width=32,
            num_zero=8,
        )


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
    train_key, rewrite_key = jax.random.split(key)
    trained = config.train(train_key, data, cache)
    images = jnp.asarray(data.test_images[: config.num_samples])
    layers = member_representations(trained.models, images)
    groups = rewritten_layers(config, trained.models, data.test_images[0])
    everything = jnp.asarray(data.test_images)
    jobs = {
        layer: partial(_freedom, trained.models, group, layers[layer], images, everything)
        for layer, group in groups.items()
    }
    *_, last = groups.values()
    jobs["moved"] = partial(
        _moved, config, trained.models, last, layers[last.name], data, rewrite_key
    )
    found = cache.get_all(jobs, "comparing")
    pairs = ("seeds", "other_seeds")
    variables = {
        name: (("layers", *pairs), np.stack([found[layer][name] for layer in groups]))
        for name in _INTERVALS
    }
    variables |= {
        kind: (
            ("ends", "layers", *pairs),
            np.stack([[found[layer][f"{kind}_{end}"] for layer in groups] for end in ENDS]),
        )
        for kind in ("approached", "change")
    }
    variables["moved"] = (
        ("rewrites", *pairs),
        np.stack([found["moved"][name] for name in REWRITES]),
    )
    same = np.eye(config.num_seeds, dtype=bool)
    apart = {
        name: (dims, np.where(same, np.nan, values)) for name, (dims, values) in variables.items()
    }
    others = np.arange(config.num_seeds)
    coords = {
        "layers": list(groups),
        "ends": list(ENDS),
        "rewrites": list(REWRITES),
        "other_seeds": others,
    }
    return trained.dataset(data, apart, coords)


def rewritten_layers(
    config: Config, models: Any, example: Array | np.ndarray
) -> dict[str, NeuronGroup]:
    """Return the groups of both hidden layers of the perceptron, else of the last one."""
    last = members.rewritten_group(models, example)
    groups = neuron_groups(take(models, 0), jnp.asarray(example)) if config.model == "mlp" else {}
    return groups | {last.name: last}


def _freedom(
    models: Any, group: NeuronGroup, represented: Array, images: Array, all_images: Array
) -> dict[str, np.ndarray]:
    """Return intervals of all pairs, and similarities of networks rewritten towards the ends: [seeds, seeds]."""
    count = len(represented)
    ends = [f"{kind}_{end}" for kind in ("approached", "change") for end in ENDS]
    tables = {name: np.full((count, count), np.nan) for name in (*_INTERVALS, *ends)}
    for i, j in itertools.permutations(range(count), 2):
        free, model = (
            cka_range(np.asarray(represented[i]), np.asarray(represented[j])),
            take(models, i),
        )
        for name in _INTERVALS:
            tables[name][i, j] = getattr(free, name)
        for end in ENDS:
            scaled = _rewritten(model, free.rewrite(group, end=end))
            value, change = _compared(model, scaled, group.name, images, all_images, represented[j])
            tables[f"approached_{end}"][i, j], tables[f"change_{end}"][i, j] = (
                float(value),
                float(change),
            )
    return tables


@eqx.filter_jit
def _rewritten(model: Any, rewrite: Rewrite) -> Any:
    # In a separate program, because fused weights would be rounded differently.
    return rewrite(model)


@eqx.filter_jit
def _compared(
    model: Any, rewritten: Any, layer: str, images: Array, all_images: Array, reference: Array
) -> tuple[Array, Array]:
    """Return the similarity after scaling, and the largest change of a logit."""
    with jax.default_matmul_precision("highest"):
        value = linear_cka(representations(rewritten, images)[layer], reference)
    return value, certify(model, rewritten, all_images).max_abs_change


def _moved(
    config: Config, models: Any, group: NeuronGroup, features: Array, data: Dataset, key: Array
) -> dict[str, np.ndarray]:
    """Return linear CKA of rewritten networks in rows with trained ones in columns, [seeds, seeds] per rewrite."""
    images = jnp.asarray(data.test_images[: config.num_samples])
    everything = np.concatenate([data.train_images, data.test_images])
    weights = moved_weights(config.model, models, group, everything[:1])
    bases = null_spaces(config.model, models, weights.path, everything, config.num_seeds)["basis"]

    def unevenly(model: Any, key: Array) -> Any:
        return scale(group, jnp.exp(config.spread * jax.random.normal(key, (group.size,))))(model)

    moved: dict[str, Any] = {
        "null-perturbed": null_perturbed(weights, config.null_scale),
        "unevenly": unevenly,
    }
    variants, found = config.rewrites(group) | moved, {}
    for index, name in enumerate(REWRITES):
        given: Any = jax.random.split(jax.random.fold_in(key, index), config.num_seeds)
        if name == "null-perturbed":
            given = given, jnp.broadcast_to(bases, (config.num_seeds, *bases.shape[1:]))
        each = ((take(models, seed), take(given, seed)) for seed in range(config.num_seeds))
        found[name] = np.stack(
            [np.asarray(_row(variants[name], *one, images, features)) for one in each]
        )
    return found


@eqx.filter_jit
def _row(rewrite: Any, model: Any, given: Any, images: Array, features: Array) -> Array:
    """Return linear CKA of a rewritten network with trained ones, [seeds]."""
    own = representations(rewrite(model, given), images)["features"]
    return jax.vmap(lambda reference: linear_cka(own, reference))(features)


@drawing
def draw(dataset: xarray.Dataset) -> Figure:
    """Draw the attainable interval of every layer, and the values of rewritten networks; 5.6 x 1.8 inches."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(5.6, 1.8), sharex=True)
    _intervals(left, dataset)
    _rewrites(right, dataset)
    left.set_xscale("logit")
    left.set_xlim(5e-4, 1 - 5e-4)
    left.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    left.xaxis.set_minor_locator(NullLocator())
    for panel in (left, right):
        panel.set_xlabel("linear CKA")
        panel.invert_yaxis()
    plotting.letter(left, right)
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def _known(values: xarray.DataArray) -> np.ndarray:
    """Return the finite entries of a matrix of pairs, flat; the diagonal and diverged networks are NaN."""
    return values.values[np.isfinite(values.values)]


def _dots(panel: Axes, row: int, values: np.ndarray, **options: Any) -> None:
    """Draw a dot for each pair beside the middle of a row."""
    heights = row + 0.24 * np.linspace(-1, 1, len(values) + 2)[1:-1]
    inside = np.clip(values, *np.array(TICKS)[[0, -1]])
    panel.plot(inside, heights, ".", markersize=2, color=plotting.color(0), **options)


def _intervals(panel: Axes, dataset: xarray.Dataset) -> None:
    """Draw a row for each layer: the mean interval with its ends in numbers, and the measured values of all pairs."""
    titles = LAYERS[-len(dataset.layers) :]
    for row, layer in enumerate(dataset.layers.values):
        numbers = dataset.sel(layers=layer)
        low, high = _known(numbers.low).mean(), _known(numbers.high).mean()
        first = row == 0
        ends = np.clip([low, high], *np.array(TICKS)[[0, -1]])
        panel.plot(
            ends,
            [row, row],
            color="0.75",
            linewidth=8,
            solid_capstyle="butt",
            label="same functions" * first,
        )
        _dots(
            panel,
            row,
            _known(numbers.measured),
            label="measured, a dot for each pair of seeds" * first,
        )
        panel.text(ends[0], row - 0.3, f"{low:.3f}", ha="left", va="bottom", fontsize="small")
        panel.text(ends[1], row - 0.3, f"{high:.3f}", ha="right", va="bottom", fontsize="small")
    panel.set_yticks(range(len(titles)), titles)
    panel.set_ylim(-0.7, len(titles) - 0.5)
    panel.set_title("attainable by scaling neurons")


def _rewrites(panel: Axes, dataset: xarray.Dataset) -> None:
    """Draw a row for each rewrite of the first network of a pair, below the last layer as trained."""
    rows = {"as trained": dataset.measured.isel(layers=-1)}
    rows |= {REWRITES[name]: dataset.moved.sel(rewrites=name) for name in dataset.rewrites.values}
    for row, values in enumerate(rows.values()):
        _dots(panel, row, _known(values))
    panel.set_yticks(range(len(rows)), list(rows))
    panel.set_title("last hidden layer, first network rewritten")


def caption(dataset: xarray.Dataset) -> str:
    """Return the caption."""
    return (
        f"Linear CKA of {_known(dataset.measured[0]).size} ordered pairs of seeds on "
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
    measured = _known(layer.measured)
    return (
        f"{members.headline(dataset)}; {config_of(dataset).num_samples} samples\n"
        f"Seeds measure a linear CKA of {measured.mean():.3f} in the last hidden layer "
        f"({measured.min():.3f} "
        f"to {measured.max():.3f}); the functions of a pair can show anything from "
        f"{_known(layer.low).mean():.4f} to {_known(layer.high).mean():.4f} (means over pairs)."
    )


def table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return a header and a row per layer: value, ends, distance of rewrites from them, change of the function."""
    header = [
        "layer",
        "measured",
        "least",
        "largest",
        "distance from ends",
        "change of a logit",
        "residual",
    ]
    shown = [header]
    for layer in dataset.layers.values:
        one = dataset.sel(layers=layer)
        distance = max(float(abs(one.approached.sel(ends=end) - one[end]).max()) for end in ENDS)
        cells = [cell(_known(one[name]), 4) for name in ("measured", "low", "high")]
        numbers = [
            f"{distance:.0e}",
            f"{float(one.change.max()):.0e}",
            f"{float(one.residual.max()):.0e}",
        ]
        shown.append([layer, *cells, *numbers])
    for name, values in zip(dataset.rewrites.values, dataset.moved, strict=True):
        title = f"last, {REWRITES[name]}"
        shown.append([title, cell(_known(values), 4), *[""] * (len(header) - 2)])
    return shown
