"""Figure `freedom`: attainable range of the similarity of two networks, for the same two functions.

Networks of several seeds are compared in pairs by linear CKA, layer by layer. Scaling neurons keeps the functions and
moves the similarity. Each pair's value is drawn in the interval that the first network's function can show; certified
rewrites approach the ends.
"""

import dataclasses
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Array
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dissociation._core.checks import check_count, check_non_negative, fail
from dissociation.data._datasets import Dataset
from dissociation.figures import _members as members
from dissociation.figures._artifacts import AnyMeter, Folder, Parts
from dissociation.figures._members import source as source
from dissociation.figures._null_spaces import moved_weights, null_perturbed, null_spaces, of_members
from dissociation.figures._results import Results
from dissociation.figures._seeds import cell
from dissociation.models._representations import member_representations, representations
from dissociation.plotting import _axes as plotting
from dissociation.rewrites._certificate import certify
from dissociation.rewrites._freedom import ENDS, cka_freedom
from dissociation.rewrites._groups import NeuronGroup, neuron_groups
from dissociation.rewrites._rewrites import Rewrite, scale
from dissociation.similarity._kernels import linear_cka
from dissociation.training._members import take

__all__ = ["Config", "compute", "draw"]

STEM = "freedom"
SHOWS = "Linear CKA between seeds, within the attainable range of networks with the same functions."

_PAIRS = ("layers", "seeds", "seeds")
AXES = {
    "measured": _PAIRS,  # linear CKA
    "low": _PAIRS,  # the smallest for networks of the first one's function
    "high": _PAIRS,  # the largest
    "residual": _PAIRS,  # of the conditions that certify the largest, relative
    "approached": ("ends", *_PAIRS),  # linear CKA of the first network rewritten towards an end
    "change": ("ends", *_PAIRS),  # its largest change of a logit on all test images
    "moved": ("rewrites", "seeds", "seeds"),  # linear CKA of the last layer after a rewrite
    "test_error": ("seeds", "epochs"),  # along training
    "diverged_at": ("seeds",),
}
"""Axes of the results: first network of a pair in rows, second in columns; NaN on the diagonal and for diverged
networks."""

_INTERVALS = ("measured", "low", "high", "residual")
LAYERS = {"hidden0": "first hidden layer", "features": "last hidden layer"}
REWRITES = {
    "scaled": "all scaled",
    "unevenly": "scaled\nunevenly",
    "duplicated": "duplicated",
    "zero": "zero\nneurons",
    "null_perturbed": "null space",
}
"""Rewrites of the last layer, by their names in the figure."""


@dataclasses.dataclass(frozen=True)
class Config(members.Config):
    """Settings of training, comparison and rewrites."""

    num_seeds: int = 5
    """Networks trained from scratch, at least 2."""
    num_samples: int = 1000
    """Test images that are represented, the first ones."""
    width: int = 256
    """Units in each of the two hidden layers; of networks of images, in the last."""
    scale_factor: float = 20.0
    """Factor on all incoming weights (outgoing ones are divided by it)."""
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
        check_count("num_seeds", self.num_seeds, minimum=2)
        super().__post_init__()
        check_count("num_samples", self.num_samples, minimum=2)
        check_non_negative("null_scale", self.null_scale)
        if not 0 <= self.spread <= 10:
            fail("spread", "lie from 0 to 10", self.spread)

    def quick(self) -> "Config":
        """Return the options of a smoke run."""
        return dataclasses.replace(
            self, num_seeds=3, num_epochs=3, num_train=2000, num_test=200, num_samples=100, width=32, num_zero=8
        )


def compute(
    config: Config, *, key: Array, dataset: Dataset | None = None, folder: Folder = None, progress: AnyMeter = None
) -> Results:
    """Train, compare and rewrite; see `figures.Figure.compute`."""
    return members.run(_computed, config, key, dataset, folder, progress)


def _computed(config: Config, key: Array, data: Dataset, parts: Parts) -> Results:
    train_key, rewrite_key = jax.random.split(key)
    trained = members.train_members(config, key=train_key, data=data, parts=parts)
    images = jnp.asarray(data.test_images[: config.num_samples])
    layers = member_representations(trained.models, images)
    groups = rewritten_layers(config, trained.models, data.test_images[0])
    everything = jnp.asarray(data.test_images)
    jobs = {
        layer: partial(_freedom, trained.models, group, layer, layers[layer], images, everything)
        for layer, group in groups.items()
    }
    features = groups["features"], layers["features"]
    jobs["moved"] = partial(_moved, config, trained.models, *features, data, rewrite_key)
    found = parts.get_all(jobs, "comparing")
    off = trained.alive[:, None] & trained.alive & ~np.eye(config.num_seeds, dtype=bool)
    found = {job: {name: np.where(off, table, np.nan) for name, table in part.items()} for job, part in found.items()}
    of = lambda name: {layer: found[layer][name] for layer in groups}  # noqa: E731
    return trained.results(
        config,
        data,
        parts,
        **{name: of(name) for name in _INTERVALS},
        approached={end: of(f"approached_{end}") for end in ENDS},
        change={end: of(f"change_{end}") for end in ENDS},
        moved=found["moved"],
    )


def rewritten_layers(config: Config, models: Any, example: Array | np.ndarray) -> dict[str, NeuronGroup]:
    """Return the groups of layers that are vectors of neurons: both of the perceptron, else the last one."""
    groups = {"features": members.rewritten_group(models, example)}
    if config.model == "mlp":
        groups = {"hidden0": neuron_groups(take(models, 0), jnp.asarray(example))["layers[0]"]} | groups
    return groups


def _freedom(
    models: Any, group: NeuronGroup, layer: str, represented: Array, images: Array, all_images: Array
) -> dict[str, np.ndarray]:
    """Return intervals of all pairs, and similarities of networks rewritten towards the ends: [seeds, seeds]."""
    count = len(represented)
    ends = [f"{kind}_{end}" for kind in ("approached", "change") for end in ENDS]
    tables = {name: np.full((count, count), np.nan) for name in (*_INTERVALS, *ends)}
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    found = [cka_freedom(np.asarray(represented[i]), np.asarray(represented[j])) for i, j in pairs]
    for pair, free in zip(pairs, found, strict=True):
        for name in _INTERVALS:
            tables[name][pair] = getattr(free, name)
    for end in ENDS:
        for (i, j), free in zip(pairs, found, strict=True):
            model = take(models, i)
            scaled = _rewritten(model, free.rewrite(group, end=end))
            value, change = _compared(model, scaled, layer, images, all_images, represented[j])
            tables[f"approached_{end}"][i, j], tables[f"change_{end}"][i, j] = float(value), float(change)
    return tables


@eqx.filter_jit
def _rewritten(model: Any, rewrite: Rewrite) -> Any:
    """Rewrite in a separate program, because fused weights would be rounded differently."""
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

    moved: dict[str, Any] = {"null_perturbed": null_perturbed(weights, config.null_scale), "unevenly": unevenly}
    variants = members.neuron_rewrites(config, group) | moved
    found = {}
    for index, name in enumerate(REWRITES):

        @eqx.filter_jit
        def row(model: Any, given: Any, images: Array, features: Array, name: str = name) -> Array:
            own = representations(variants[name](model, given), images)["features"]
            return jax.vmap(lambda reference: linear_cka(own, reference))(features)

        given: Any = jax.random.split(jax.random.fold_in(key, index), config.num_seeds)
        if name == "null_perturbed":
            given = given, of_members(bases, config.num_seeds)
        rows = [row(take(models, seed), take(given, seed), images, features) for seed in range(config.num_seeds)]
        found[name] = np.stack([np.asarray(each) for each in rows])
    return found


def draw(results: Results) -> Figure:
    """Draw a panel per layer with every pair's value in its interval, and one of rewrites; 1.7 inches each."""
    layers = list(results.measured)
    with plotting.house_style():
        figure, axes = plt.subplots(1, len(layers) + 1, figsize=(1.75 * (len(layers) + 1), 1.7), sharey=True)
        for panel, layer in zip(axes, layers, strict=False):
            _intervals(panel, results, layer)
        axes[0].set_ylabel("linear CKA")
        axes[0].set_ylim(-0.03, 1.03)
        _rewrites(axes[-1], results)
        plotting.letter(*axes)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    plt.close(figure)  # pyplot forgets it, so that a notebook shows it once
    return figure


def _intervals(panel: Axes, results: Results, layer: str) -> None:
    """Draw pairs from left to right by similarity."""
    there = np.isfinite(results.measured[layer])
    own = [tables[layer][there] for tables in (results.measured, results.low, results.high)]
    measured, low, high = (part[np.argsort(own[0])] for part in own)
    places = np.arange(len(measured))
    panel.vlines(places, low, high, color="0.75", linewidth=min(3.0, 80 / max(len(places), 1)), label="same function")
    panel.plot(places, measured, ".", markersize=3, color=plotting.color(0), label="measured")
    panel.set(xticks=[], xlabel="pairs of seeds", title=LAYERS[layer])
    panel.set_xlim(-1, len(places))


def _rewrites(panel: Axes, results: Results) -> None:
    """Draw the similarity after rewrites of the last layer."""
    there = np.isfinite(results.measured["features"])
    panel.axhline(float(results.measured["features"][there].mean()), color="0.5", linestyle=":", linewidth=0.8)
    for place, table in enumerate(results.moved.values()):
        values = table[there]
        offsets = np.linspace(-0.25, 0.25, len(values)) if len(values) > 1 else np.zeros(1)
        panel.plot(place + offsets, values, ".", markersize=2, color=plotting.color(0))
    panel.set_xticks(range(len(results.moved)), [REWRITES[name] for name in results.moved], fontsize=4.5, rotation=45)
    panel.set_title("first one rewritten")


def arrays(results: Results) -> dict[str, Any]:
    """Return the arrays of the figure by name."""
    return {name: getattr(results, name) for name in AXES}


def caption(results: Results) -> str:
    """Return the caption."""
    there = np.isfinite(results.measured["features"])
    layers = [f"({'ab'[index]}) {LAYERS[layer]}" for index, layer in enumerate(results.measured)]
    rewritten = "bc"[len(layers) - 1]
    return (
        f"Linear CKA of {there.sum()} ordered pairs of seeds on {results.config.num_samples} test images: "
        f"{', '.join(layers)}. Dots are the pairs in ascending order; bars are the attainable ranges when the first "
        f"network's neurons are scaled, with the same functions. ({rewritten}) The last hidden layer of the same pairs "
        "after rewrites of the first network, a dot per pair; the dotted line is the mean as trained. Data: "
        f"{members.headline(results)}."
    )


def headline(results: Results) -> str:
    """Return a line with the data, the measure, and the attainable range."""
    layer = "features"
    measured = results.measured[layer]
    return (
        f"{members.headline(results)}; {results.config.num_samples} samples\n"
        f"Seeds measure a linear CKA of {np.nanmean(measured):.3f} in the last hidden layer ({np.nanmin(measured):.3f} "
        f"to {np.nanmax(measured):.3f}); the functions of a pair can show anything from "
        f"{np.nanmean(results.low[layer]):.4f} to {np.nanmean(results.high[layer]):.4f} (means over pairs)."
    )


def describe(results: Results) -> dict[str, Any]:
    """Return settings and numbers for the JSON beside the figure."""
    return {
        "figure": "freedom",
        "config": results.config,
        "data": results.data,
        "largest change of a logit": {
            end: {layer: float(np.nanmax(table)) for layer, table in results.change[end].items()} for end in ENDS
        },
        "largest residual": {layer: float(np.nanmax(table)) for layer, table in results.residual.items()},
    }


def table(results: Results) -> list[list[str]]:
    """Return a header and a row per layer: value, ends, distance of rewrites from them, change of the function."""
    header = ["layer", "measured", "least", "largest", "distance from ends", "change of a logit", "residual"]
    rows = [header]
    for layer, measured in results.measured.items():
        ends = (results.low[layer], results.high[layer])
        tables = zip(ENDS, ends, strict=True)
        distance = max(float(np.nanmax(np.abs(results.approached[end][layer] - value))) for end, value in tables)
        change = max(float(np.nanmax(results.change[end][layer])) for end in ENDS)
        cells = [cell(values[np.isfinite(values)], 4) for values in (measured, *ends)]
        numbers = [f"{distance:.0e}", f"{change:.0e}", f"{np.nanmax(results.residual[layer]):.0e}"]
        rows.append([LAYERS[layer], *cells, *numbers])
    for name, values in results.moved.items():
        shown = f"last, {REWRITES[name]}".replace("\n", " ")
        rows.append([shown, cell(values[np.isfinite(values)], 4), *[""] * (len(header) - 2)])
    return rows
