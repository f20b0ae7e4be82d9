"""Figure `compare`: every layer of one network with every layer of another, from files.

A file holds the activations of a network on samples, an array for each layer.
"""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import matplotlib.figure
import numpy as np
import tyro
import xarray
from jaxtyping import Array

from dissociation._core.checks import fail
from dissociation._core.memory import host_budget
from dissociation.figures import _compare_files as files
from dissociation.figures import _compare_measures as measures
from dissociation.figures._cache import AnyMeter, Cache, CacheFolder
from dissociation.figures._harness import Settings, config_of, drawing, run
from dissociation.plotting import _axes as plotting
from dissociation.plotting import _matches as matches
from dissociation.similarity._base import check_size
from dissociation.similarity._functional import disagreement
from dissociation.similarity._measures import MEASURES

__all__ = ["Config", "compute", "draw"]

STEM = "compare"
SHOWS = "Similarity of all layers of two networks, from files of their activations."

HAS_MARKDOWN = True
"""True if the table is written to a file as well."""

QUICK_SAMPLES = 200
"""Number of samples of a smoke run."""

SMALL_BIAS = 0.005
"""Largest difference of values and estimates that a figure does not show."""

COPIES = 3
"""Number of copies of all layers that a comparison in memory holds."""

if TYPE_CHECKING:
    MeasureName = str
    Positions = str
    Channels = str
else:
    MeasureName = Literal[tuple(MEASURES)]
    Positions = Literal[files.POSITIONS]
    Channels = Literal[files.CHANNELS]


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    """Settings of a comparison of two files."""

    a: tyro.conf.Positional[str] = ""
    """File of the first network: .npz or .safetensors with an array [samples, ...] per layer, or
    .npy with one layer. "ids" aligns samples, "mask" marks positions that count, "logits" are
    outputs."""
    b: tyro.conf.Positional[str] = ""
    """File of the second network, on the same samples."""
    measure: MeasureName = "debiased_cka"
    """Measure of similarity, see docs/similarity.md."""
    positions: Positions | None = None
    """Meaning of positions (pixels, tokens) of layers of more than two axes: samples, neurons, or
    their mean, first or last."""
    channels: Channels | None = None
    """Axis of features of these layers: last, as [n, h, w, c], or first, as [n, c, h, w]."""
    num_blocks: int = 20
    """Blocks of samples for the jackknife's 90 % intervals."""
    num_orders: int = 999
    """Orders of samples for p-values and chance values that are not known exactly."""
    max_samples: int | None = None
    """Largest number of samples; a fixed subset if there are more."""
    memory_budget: int | None = None
    """Bytes of memory; default half of what is free. Larger layers are read in batches."""

    def __post_init__(self):
        self.check(measure=tuple(MEASURES), num_blocks=2, num_orders=1)
        if self.positions is not None:
            self.check(positions=files.POSITIONS)
        if self.channels is not None:
            self.check(channels=files.CHANNELS)
        if self.max_samples is not None:
            self.check(max_samples=2)
        if self.memory_budget is not None and self.memory_budget < 1:
            fail("memory_budget", "be at least 1 byte", self.memory_budget)

    def quick(self) -> "Config":
        """Return the options of a smoke run."""
        return dataclasses.replace(self, max_samples=QUICK_SAMPLES)

    def command(self) -> str:
        """Return the command with the settings that differ from the defaults, but for axes."""
        words = ["python", "-m", "dissociation", "compare", self.a, self.b]
        for field in dataclasses.fields(self)[2:]:
            setting = getattr(self, field.name)
            if setting != field.default and field.name not in ("positions", "channels"):
                words += ["--" + field.name.replace("_", "-"), str(setting)]
        return shlex.join(words)


class Data(NamedTuple):
    """Two networks on the same samples.

    Attributes:
        digest: Hash of the contents of all layers.
        networks: Both networks.
        sentences: Sentences on the samples and the rows.
        logits: Outputs of both networks, or none.
        is_in_memory: True if all layers are in memory.
    """

    digest: np.ndarray
    networks: Any
    sentences: str
    logits: tuple[np.ndarray, ...]
    is_in_memory: bool


def source(config: Config) -> Data:
    """Return the networks of two files, after checks of all numbers.

    Raises:
        RefusedFile: If a file is broken.
        OSError: If a file cannot be read.
        WrongValue: If the files do not hold layers of the same samples, or an option does not fit.
    """
    for name in ("a", "b"):
        if not getattr(config, name):
            advice = "python -m dissociation compare A.npz B.npz"
            fail(name, "name a file of activations", "none", advice)
    networks = []
    for name in ("a", "b"):
        path = getattr(config, name)
        network = files.read_network(
            name, path, config.positions, config.channels, config.command()
        )
        networks.append(network)
    first, second = networks
    sentences = files.align(first, second, config.max_samples)
    budget = host_budget() if config.memory_budget is None else config.memory_budget
    needed = COPIES * sum(map(files.feature_bytes, networks))
    _check_measure(config, networks)
    is_in_memory = needed <= budget
    if not is_in_memory:
        measures.check_streamed(config, networks, budget, needed)
        sentences.append("Layers exceed the memory budget: batches, without p-values.")
    digest = files.read_layers(networks, in_memory=is_in_memory)
    logits, sentence = _read_logits(networks)
    sentences += sentence
    return Data(digest, tuple(networks), " ".join(sentences), logits, is_in_memory)


def _check_measure(config: Config, networks: list[files.Network]) -> None:
    """Raise unless the layers have shapes that the measure can compare."""
    measure = MEASURES[config.measure]
    form = measure.with_options()
    num_rows = files.num_rows_of(networks[0])
    if num_rows % measure.repeats:
        requirement = f"have samples in {measure.repeats} repeats of the same conditions"
        fail("measure", requirement, f"{config.measure} of {num_rows} samples")
    num_blocks = measures.num_blocks_of(config, networks)
    num_kept = num_rows
    if num_blocks is not None:
        num_kept -= -(-num_rows // num_blocks)
    widths = set()
    for network in networks:
        for name, layer in network.layers.items():
            width = network.width(layer)
            widths.add(width)
            sides = ("x", "y")[: len(form.sides)]
            if network.name == "a" or "y" in sides:
                check_size(form, network.name, num_kept, width, condition=f" in {name}")
    if measure.same_width and len(widths) > 1:
        received = f"{config.measure} of widths {', '.join(map(str, sorted(widths)))}"
        fail("measure", "suit layers of different widths", received)


def _read_logits(networks: list[files.Network]) -> tuple[tuple[np.ndarray, ...], list[str]]:
    """Return the outputs of both networks if they have the same classes, and a sentence if not."""
    logits = []
    for network in networks:
        if network.logits is not None:
            stored = network.logits
            if len(stored.shape) != 2 or stored.dtype.kind not in "biuf":
                sentence = f"Logits of shape {stored.shape} in {network.path} are left out."
                return (), [sentence]
            blocks = network.batches(stored, files.rows_per_block(stored))
            logits.append(np.concatenate(list(blocks)))
    if len(logits) == 1:
        return (), ["Logits of one file alone are left out."]
    if not logits:
        return (), []
    num_classes = [array.shape[1] for array in logits]
    if num_classes[0] != num_classes[1] or num_classes[0] < 2:
        return (), [f"Logits of {num_classes[0]} and {num_classes[1]} classes are left out."]
    return tuple(logits), []


def compute(
    config: Config,
    *,
    key: Array,
    data: Data | None = None,
    cache: CacheFolder = None,
    progress: AnyMeter = None,
) -> xarray.Dataset:
    """Read, align and compare; see `figures.Figure.compute`.

    Returns:
        By layer of A and of B: `values`; `estimate`, the same without their bias; `low` and `high`,
        90 % intervals about the estimates; `baseline`, the values by chance; `p_values`, and
        `corrected` for the number of pairs. `best` [layers] is the index of the best match of each
        layer of A among those of B, `best_other` [other_layers] that of each layer of B; -1 if
        there is none. `disagreement` is the share of samples to which the networks assign different
        classes. Numbers that were not computed are NaN.
    """
    data = source(config) if data is None else data
    return run(_computed, config, key=key, data=data, cache=cache, progress=progress)


def _computed(config: Config, key: Array, data: Data, cache: Cache) -> xarray.Dataset:
    """Return the dataset of `compute`."""
    networks = list(data.networks)
    if data.is_in_memory:
        tables = measures.compare_in_memory(config, key, networks, cache)
    else:
        tables = measures.compare_in_batches(config, networks, cache)
    coords = {}
    for axis, network in zip(("layers", "other_layers"), networks, strict=True):
        coords[axis] = list(network.layers)
    shape = tables["values"].shape
    variables: dict[str, Any] = {}
    for name in measures.TABLES:
        table = tables.get(name, np.full(shape, np.nan))
        variables[name] = (("layers", "other_layers"), table)
    share = np.nan
    if data.logits:
        share = float(disagreement(*data.logits))
    variables["disagreement"] = ((), share)
    facts = {
        "num_samples": len(networks[0].rows),
        "networks": _names(config),
        "sentences": data.sentences,
        "is_in_memory": data.is_in_memory,
    }
    dataset = xarray.Dataset(variables, coords, {"data": json.dumps(facts)})
    table = _tables_of(dataset, config)
    dataset["best"] = ("layers", table.best())
    dataset["best_other"] = ("other_layers", table.transposed().best())
    return dataset


def _names(config: Any) -> list[str]:
    """Return names of both networks: those of the files, or their paths if these are the same."""
    names = [Path(path).stem for path in (config.a, config.b)]
    return names if names[0] != names[1] else [config.a, config.b]


def _tables_of(dataset: xarray.Dataset, config: Any) -> matches.Tables:
    """Return the tables that a figure needs."""
    values = dataset["values"].values
    tables: dict[str, Any] = {name: dataset[name].values for name in ("estimate", "low", "high")}
    tables = {name: None if np.isnan(table).all() else table for name, table in tables.items()}
    if tables["estimate"] is None:
        tables["estimate"] = values
    is_unbiased = np.allclose(tables["estimate"], values, atol=SMALL_BIAS, equal_nan=True)
    first, second = _names(config)
    return matches.Tables(
        **tables,
        values=None if is_unbiased else values,
        chance=dataset.baseline.values,
        rows=dataset.layers.values.tolist(),
        columns=dataset.other_layers.values.tolist(),
        measure=config.measure,
        larger_is_closer=MEASURES[config.measure].larger_is_closer,
        networks=(first, second),
    )


@drawing
def draw(dataset: xarray.Dataset) -> matplotlib.figure.Figure:
    """Draw the matrix of all pairs, and the best match of each layer, 6.6 x 2.9 inches."""
    return matches.draw_matches(_tables_of(dataset, config_of(dataset)))


def caption(dataset: xarray.Dataset) -> str:
    """Return the caption."""
    config = config_of(dataset)
    facts = json.loads(dataset.attrs["data"])
    first, second = facts["networks"]
    title = plotting.title_of(config.measure)
    has_intervals = not np.isnan(dataset.low.values).all()
    interval = ""
    if has_intervals:
        interval = ", with 90 % intervals over blocks of samples"
    text = (
        f"{title} of all pairs of {len(dataset.layers)} layers of {first} and "
        f"{len(dataset.other_layers)} layers of {second}, on {facts['num_samples']} samples. "
        f"(a) Estimates; dots: best match of a layer of {first} (row), squares: of a layer of "
        f"{second} (column). (b) Best match of each layer of {first}, (c) of {second}{interval}; "
        "dashes: values by chance. "
    )
    if _tables_of(dataset, config_of(dataset)).values is not None:
        text += "Estimates are without bias; circles and dashes have it. "
    corrected = dataset.corrected.values
    if np.isfinite(corrected).any():
        smallest = np.nanmin(corrected)
        largest = np.nanmax(corrected)
        text += f"P-values, corrected for all pairs, are {smallest:.2g} to {largest:.2g}. "
    if config.max_samples is not None:
        text += f"At most {config.max_samples} samples, a fixed subset. "
    share = dataset.disagreement.item()
    if np.isfinite(share):
        text += f"The networks classify {100 * share:.1f} % of the samples differently. "
    return text.rstrip()


def headline(dataset: xarray.Dataset) -> str:
    """Return lines with both networks, how samples are aligned, and a doubt about their order."""
    facts = json.loads(dataset.attrs["data"])
    first, second = facts["networks"]
    lines = [
        f"A: {first}, {len(dataset.layers)} layers. B: {second}, {len(dataset.other_layers)} "
        f"layers. {facts['num_samples']} samples. {facts['sentences']}"
    ]
    corrected = dataset.corrected.values
    if np.isfinite(corrected).any() and np.nanmin(corrected) > 0.05:
        lines.append(
            f"No pair is more similar than by chance (smallest p {np.nanmin(corrected):.2g}): are "
            "the rows of both files in the same order?"
        )
    return "\n".join(lines)


def table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return a header and a row per layer of A and of B with its best match."""
    config = config_of(dataset)
    first, second = json.loads(dataset.attrs["data"])["networks"]
    title = plotting.title_of(config.measure)
    names = [f"{title} without bias", "90 % interval", title, "chance", "p"]
    rows = [["layer", "best match", *names]]
    for index, best in enumerate(dataset.best.values.tolist()):
        layer = dataset.layers.values[index]
        match = dataset.other_layers.values[best]
        rows.append(_row(dataset, f"{first}: {layer}", f"{second}: {match}", index, best))
    for index, best in enumerate(dataset.best_other.values.tolist()):
        layer = dataset.other_layers.values[index]
        match = dataset.layers.values[best]
        rows.append(_row(dataset, f"{second}: {layer}", f"{first}: {match}", best, index))
    return rows


def _row(dataset: xarray.Dataset, layer: str, match: str, row: int, column: int) -> list[str]:
    """Return the cells of a layer and its best match."""
    if min(row, column) < 0:
        return [layer, "none: all samples are the same", *[""] * 5]
    numbers = {}
    for name in measures.TABLES:
        numbers[name] = float(dataset[name].values[row, column])
    estimate = numbers["estimate"]
    if np.isnan(estimate):
        estimate = numbers["values"]
    interval = "not computed"
    if np.isfinite(numbers["low"]):
        interval = f"{numbers['low']:.3f} to {numbers['high']:.3f}"
    p_value = "not computed"
    if np.isfinite(numbers["corrected"]):
        p_value = f"{numbers['corrected']:.2g}"
    by_chance = [f"{numbers[name]:.3f}" for name in ("values", "baseline")]
    return [layer, match, f"{estimate:.3f}", interval, *by_chance, p_value]
