"""Figure `freedom`: what the similarity of two networks could have been, for the same two functions.

Networks are trained from several seeds, and every pair is compared by linear CKA on some test images, layer by layer.
Scaling neurons changes none of the functions, but it moves the similarity: each pair's number stands in the interval
of all that the first network's function can show, whose ends are approached by rewritten networks, certified as such.
"""

import dataclasses
import os
from typing import Any, NamedTuple

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
from dissociation.figures._artifacts import Parts, identity_of
from dissociation.figures._members import (
    DataName,
    ModelName,
    check_members,
    check_neurons,
    check_samples,
    members_headline,
    neuron_rewrites,
    rewritten_group,
    train_members,
)
from dissociation.figures._members import (
    source as members_source,
)
from dissociation.figures._null_spaces import moved_weights, null_perturbed, null_spaces, of_members
from dissociation.figures._seeds import cell
from dissociation.models._representations import member_representations, representations
from dissociation.plotting import _axes as plotting
from dissociation.rewrites._certificate import certify
from dissociation.rewrites._freedom import ENDS, cka_freedom
from dissociation.rewrites._groups import NeuronGroup, neuron_groups
from dissociation.rewrites._rewrites import scale
from dissociation.similarity._kernels import linear_cka
from dissociation.training._members import take
from dissociation.training._progress import MeterFactory, open_meter

__all__ = ["Config", "compute", "draw"]

STEM = "freedom"
SHOWS = "Linear CKA between seeds, within all that networks of the same functions can show."

_PAIRS = ("seeds", "seeds")
AXES = {
    "measured": _PAIRS,
    "low": _PAIRS,
    "high": _PAIRS,
    "residual": _PAIRS,
    "approached_low": _PAIRS,
    "approached_high": _PAIRS,
    "change_low": _PAIRS,
    "change_high": _PAIRS,
    "moved": _PAIRS,
    "test_error": ("seeds", "epochs"),
    "diverged_at": ("seeds",),
}

LAYERS = {"hidden0": "first hidden layer", "features": "last hidden layer"}
REWRITES = {
    "scaled": "all scaled",
    "unevenly": "scaled\nunevenly",
    "duplicated": "duplicated",
    "zero": "zero\nneurons",
    "null_perturbed": "null space",
}
"""Rewrites whose effect on the last layer's similarity is shown, by their names in the figure."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of training, comparison and rewrites."""

    data: DataName = "glyphs"
    """Data set, by its name in `_datasets.SOURCES`."""
    model: ModelName = "mlp"
    """The architecture; of networks of images the last hidden layer is compared, of the perceptron both."""
    num_seeds: int = 5
    """Networks trained from scratch, at least 2."""
    num_epochs: int = 10
    """Passes over the training images."""
    num_train: int | None = None
    """Training images; None takes the data set's own number."""
    num_test: int | None = None
    """Test images; None takes the data set's own number."""
    num_samples: int = 1000
    """Test images that are represented, the first ones."""
    width: int = 256
    """Units in each of the two hidden layers; of networks of images, in the last."""
    scale_factor: float = 20.0
    """Factor on all incoming weights (outgoing ones are divided by it)."""
    spread: float = 1.0
    """Standard deviation of the logarithm of the factors of neurons that are scaled unevenly."""
    duplicate_multiplier: float = 2.0
    """Copies of each neuron in the duplicated network."""
    num_zero: int = 64
    """Neurons without effect, one per group."""
    null_scale: float = 0.1
    """Standard deviation of the noise in the null space of the data, or, for networks of images, of what their last
    layer sees."""

    def __post_init__(self):
        check_count("num_seeds", self.num_seeds, minimum=2)
        check_members(self)
        check_count("num_samples", self.num_samples, minimum=2)
        check_count("num_zero", self.num_zero)
        check_neurons("num_zero", self.num_zero, self.num_zero, self)
        check_non_negative("null_scale", self.null_scale)
        if not 0 <= self.spread <= 10:
            fail("spread", "lie from 0 to 10", self.spread)

    def quick(self) -> "Config":
        """A small run that shows that everything works: seconds, no science."""
        return dataclasses.replace(
            self, num_seeds=3, num_epochs=3, num_train=2000, num_test=200, num_samples=100, width=32, num_zero=8
        )


class Results(NamedTuple):
    """Everything the figure shows.

    Tables are of the network that may be rewritten in rows and the one that it is compared with in columns, [seeds,
    seeds]; NaN on the diagonal and for networks that diverged.

    Attributes:
        config: What was asked for.
        data: The data set's name and sizes.
        measured: Per layer, linear CKA.
        low: Per layer, the least that networks of the row's function show.
        high: Per layer, the largest.
        residual: Per layer, of the conditions that certify the largest, relative.
        approached: Per end and layer, linear CKA of the network that was rewritten towards it.
        change: Per end and layer, its largest change of a logit on all test images.
        moved: Per rewrite, linear CKA of the last layer after it.
        test_error: Test error along training, [seeds, epochs + 1].
        diverged_at: The step at which a network diverged, or -1: [seeds].
        seconds: Wall time of every part.
        member: One of the networks, as a report shows it; None for results of another making.
    """

    config: Config
    data: dict[str, Any]
    measured: dict[str, np.ndarray]
    low: dict[str, np.ndarray]
    high: dict[str, np.ndarray]
    residual: dict[str, np.ndarray]
    approached: dict[str, dict[str, np.ndarray]]
    change: dict[str, dict[str, np.ndarray]]
    moved: dict[str, np.ndarray]
    test_error: np.ndarray
    diverged_at: np.ndarray
    seconds: dict[str, float]
    member: Any = None


def source(config: Config) -> Dataset:
    """The data set that the configuration names."""
    data = members_source(config)
    check_samples(config, data)
    return data


def compute(
    config: Config,
    *,
    key: Array,
    dataset: Dataset | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: str | MeterFactory | None = None,
) -> Results:
    """Trains, compares and rewrites; see `figures.Figure.compute`."""
    data = source(config) if dataset is None else dataset
    check_samples(config, data)
    with Parts(folder, identity_of(config, key, data)) as parts:
        return _computed(config, key, data, parts, progress)


def _computed(config: Config, key: Array, data: Dataset, parts: Parts, progress: str | MeterFactory | None) -> Results:
    train_key, rewrite_key = jax.random.split(key)
    trained = train_members(config, key=train_key, data=data, parts=parts, progress=progress)
    images = jnp.asarray(data.test_images[: config.num_samples])
    layers = member_representations(trained.models, images)
    groups = rewritten_layers(config, trained.models, data.test_images[0])
    meter = open_meter(progress, len(groups) + 1, "comparing")
    found: dict[str, dict[str, np.ndarray]] = {}
    try:
        for done, (layer, group) in enumerate(groups.items()):
            meter.advance(done, LAYERS[layer])
            found[layer] = parts.get(
                layer,
                lambda layer=layer, group=group: _freedom(
                    trained.models, group, layer, layers[layer], images, jnp.asarray(data.test_images)
                ),
            )
        meter.advance(len(groups), "rewrites")
        moved = parts.get(
            "moved",
            lambda: _moved(config, trained.models, groups["features"], layers["features"], data, rewrite_key),
        )
        meter.advance(len(groups) + 1, "done")
    finally:
        meter.close()
    off = trained.alive[:, None] & trained.alive & ~np.eye(config.num_seeds, dtype=bool)
    of = lambda name: {layer: np.where(off, part[name], np.nan) for layer, part in found.items()}  # noqa: E731
    return Results(
        config=config,
        data={"name": data.name, "num_train": len(data.train_images), "num_test": len(data.test_images)},
        measured=of("measured"),
        low=of("low"),
        high=of("high"),
        residual=of("residual"),
        approached={end: of(f"approached_{end}") for end in ENDS},
        change={end: of(f"change_{end}") for end in ENDS},
        moved={name: np.where(off, table, np.nan) for name, table in moved.items()},
        test_error=trained.test_error,
        diverged_at=trained.diverged_at,
        seconds={"training": trained.seconds, **parts.seconds},
        member=take(trained.models, 0),
    )


def rewritten_layers(config: Config, models: Any, example: Array | np.ndarray) -> dict[str, NeuronGroup]:
    """Layers that are vectors of neurons, each with its group: both of the perceptron, of others the last."""
    groups = {"features": rewritten_group(models, example)}
    if config.model == "mlp":
        first = neuron_groups(take(models, 0), jnp.asarray(example))["layers[0]"]
        groups = {"hidden0": first} | groups
    return groups


def _freedom(
    models: Any, group: NeuronGroup, layer: str, represented: Array, images: Array, all_images: Array
) -> dict[str, np.ndarray]:
    """Intervals of all pairs, and networks rewritten towards their ends: tables [seeds, seeds]."""
    count = len(represented)
    tables = {name: np.full((count, count), np.nan) for name in AXES if AXES[name] == _PAIRS and name != "moved"}
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    found = [cka_freedom(np.asarray(represented[i]), np.asarray(represented[j])) for i, j in pairs]
    for pair, free in zip(pairs, found, strict=True):
        for name in ("measured", "low", "high", "residual"):
            tables[name][pair] = getattr(free, name)
    for end in ENDS:
        factors = jnp.stack([free.rewrite(group, end=end).factor for free in found])
        for (i, j), own in zip(pairs, factors, strict=True):
            model = take(models, i)
            value, change = _compared(model, _scaled(model, group, own), layer, images, all_images, represented[j])
            tables[f"approached_{end}"][i, j], tables[f"change_{end}"][i, j] = float(value), float(change)
    return tables


@eqx.filter_jit
def _scaled(model: Any, group: NeuronGroup, factors: Array) -> Any:
    """In a program of its own: fused with what follows, it would be rounded otherwise than the weights are."""
    return scale(group, factors)(model)


@eqx.filter_jit
def _compared(
    model: Any, rewritten: Any, layer: str, images: Array, all_images: Array, reference: Array
) -> tuple[Array, Array]:
    """Similarity after scaling, and the largest change of a logit."""
    with jax.default_matmul_precision("highest"):
        value = linear_cka(representations(rewritten, images)[layer], reference)
    return value, certify(model, rewritten, all_images).max_abs_change


def _moved(
    config: Config, models: Any, group: NeuronGroup, features: Array, data: Dataset, key: Array
) -> dict[str, np.ndarray]:
    """Linear CKA of rewritten networks in rows with trained ones in columns, [seeds, seeds] per rewrite."""
    images = jnp.asarray(data.test_images[: config.num_samples])
    everything = np.concatenate([data.train_images, data.test_images])
    weights = moved_weights(config.model, models, group, everything[:1])
    bases = null_spaces(config.model, models, weights.path, everything, config.num_seeds)["basis"]
    variants: dict[str, Any] = {**neuron_rewrites(config, config.num_zero, group)}
    variants["null_perturbed"] = null_perturbed(weights, config.null_scale)

    def unevenly(model: Any, key: Array) -> Any:
        return scale(group, jnp.exp(config.spread * jax.random.normal(key, (group.size,))))(model)

    variants["unevenly"] = unevenly
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
    """A panel per layer with every pair's number in its interval, and one of the rewrites. 1.7 inches each, by 1.7."""
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
    plt.close(figure)  # out of pyplot's hands: a notebook shows what it is given
    return figure


def _intervals(panel: Axes, results: Results, layer: str) -> None:
    """Pairs from left to right by what they measure."""
    there = np.isfinite(results.measured[layer])
    own = [tables[layer][there] for tables in (results.measured, results.low, results.high)]
    measured, low, high = (part[np.argsort(own[0])] for part in own)
    places = np.arange(len(measured))
    panel.vlines(places, low, high, color="0.75", linewidth=min(3.0, 80 / max(len(places), 1)), label="same function")
    panel.plot(places, measured, ".", markersize=3, color=plotting.color(0), label="measured")
    panel.set(xticks=[], xlabel="pairs of seeds", title=LAYERS[layer])
    panel.set_xlim(-1, len(places))


def _rewrites(panel: Axes, results: Results) -> None:
    """Draw the similarity that rewrites of the last layer leave."""
    there = np.isfinite(results.measured["features"])
    panel.axhline(float(results.measured["features"][there].mean()), color="0.5", linestyle=":", linewidth=0.8)
    for place, table in enumerate(results.moved.values()):
        values = table[there]
        offsets = np.linspace(-0.25, 0.25, len(values)) if len(values) > 1 else np.zeros(1)
        panel.plot(place + offsets, values, ".", markersize=2, color=plotting.color(0))
    panel.set_xticks(range(len(results.moved)), [REWRITES[name] for name in results.moved], fontsize=4.5, rotation=45)
    panel.set_title("first one rewritten")


def arrays(results: Results) -> dict[str, np.ndarray]:
    """The arrays of the figure under flat names, for an `.npz` file."""
    kinds = {"measured": results.measured, "low": results.low, "high": results.high, "residual": results.residual}
    kinds |= {f"approached_{end}": results.approached[end] for end in ENDS}
    kinds |= {f"change_{end}": results.change[end] for end in ENDS}
    named = {f"{kind}_{layer}": table for kind, tables in kinds.items() for layer, table in tables.items()}
    named |= {f"moved_{name}": table for name, table in results.moved.items()}
    return named | {"test_error": results.test_error, "diverged_at": results.diverged_at}


def families(results: Results) -> dict[str, Any]:
    """Return the endings of array names, by the axes that they make; see `figures`."""
    layers = {"layers": tuple(results.measured)}
    plain = dict.fromkeys(("measured", "low", "high", "residual"), layers)
    ends = dict.fromkeys(("approached", "change"), {"ends": ENDS, **layers})
    return plain | ends | {"moved": {"rewrites": tuple(results.moved)}}


def caption(results: Results) -> str:
    """See `figures.Figure.caption`."""
    there = np.isfinite(results.measured["features"])
    layers = [f"({'ab'[index]}) {LAYERS[layer]}" for index, layer in enumerate(results.measured)]
    rewritten = "bc"[len(layers) - 1]
    return (
        f"Linear CKA of {there.sum()} ordered pairs of seeds on {results.config.num_samples} test images: "
        f"{', '.join(layers)}. Dots are what each pair measures, from left to right, bars all that scaling the first "
        f"one's neurons can make of it for the same functions. ({rewritten}) The same pairs' last hidden layer with "
        "the first one rewritten, a dot a pair, the dotted line the mean as trained. Data: "
        f"{members_headline(results.config, results.data, results.diverged_at)}."
    )


def headline(results: Results) -> str:
    """Return a line that names the data, the measure, and the range that every pair of functions can show."""
    layer = "features"
    measured = results.measured[layer]
    return (
        f"{members_headline(results.config, results.data, results.diverged_at)}; {results.config.num_samples} samples\n"
        f"Seeds measure a linear CKA of {np.nanmean(measured):.3f} in the last hidden layer ({np.nanmin(measured):.3f} "
        f"to {np.nanmax(measured):.3f}); the functions of a pair can show anything from "
        f"{np.nanmean(results.low[layer]):.4f} to {np.nanmean(results.high[layer]):.4f} (means over pairs)."
    )


def describe(results: Results) -> dict[str, Any]:
    """Return the settings and numbers for the JSON beside the figure."""
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
    """A header and a row per layer: measured, ends, how far rewrites came, and what they did to the function."""
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
