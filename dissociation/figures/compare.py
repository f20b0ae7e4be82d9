"""Figure `compare`: every layer of one network with every layer of another, from files.

A file holds the activations of a network on samples, an array for each layer.
"""

import dataclasses
import json
import shlex
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import matplotlib.figure
import numpy as np
import tyro
import xarray
from jaxtyping import Array

from dissociation._core.checks import fail
from dissociation._core.memory import host_budget
from dissociation.figures import _compare_measures as measures
from dissociation.figures import _compare_networks as files
from dissociation.figures._cache import AnyMeter, Cache, CacheFolder
from dissociation.figures._harness import Settings, config_of, drawing, run
from dissociation.plotting import _axes as plotting
from dissociation.plotting import _matches as matches
from dissociation.similarity._functional import disagreement
from dissociation.similarity._inference import LEAST_P_VALUE
from dissociation.similarity._measures import MEASURES

__all__ = ["Config", "compute", "draw"]

STEM = "compare"
SHOWS = "Similarity of all layers of two networks, from files of their activations."

HAS_MARKDOWN = True
"""True if the table is written to a file as well."""

QUICK_SAMPLES = 200
"""Number of samples of a smoke run."""

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
        limits = {
            "measure": tuple(MEASURES),
            "num_blocks": 2,
            "num_orders": 1,
            "positions": files.POSITIONS,
            "channels": files.CHANNELS,
            "max_samples": 2,
            "memory_budget": (1, None),
        }
        stated = {name: limit for name, limit in limits.items() if getattr(self, name) is not None}
        self.check(**stated)

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
        networks: Both networks.
        sentences: Sentences on the samples and the rows.
        logits: Outputs of both networks, or none.
        comparison: Comparison of all layers in memory, or None.
        digest: Hash of the contents of all layers that are not in memory, or None.
    """

    networks: Any
    sentences: str
    logits: tuple[np.ndarray, ...]
    comparison: Any = None
    digest: np.ndarray | None = None


def source(config: Config) -> Data:
    """Return the networks of two files, after checks of all numbers.

    Raises:
        RefusedFile: If a file is broken.
        OSError: If a file cannot be read.
        WrongValue: If the files do not hold layers of the same samples, or an option does not fit.
    """
    networks = []
    for name in ("a", "b"):
        path = getattr(config, name)
        if not path:
            advice = "python -m dissociation compare A.npz B.npz"
            fail(name, "name a file of activations", "none", advice)
        network = files.read_network(
            name, path, config.positions, config.channels, config.command()
        )
        networks.append(network)
    sentences = files.align(networks, config.max_samples)
    logits = _read_logits(networks)
    if not logits and any(network.logits for network in networks):
        sentences.append(
            "Logits are left out: they must be real numbers, [samples, classes], in both files."
        )
    budget = host_budget() if config.memory_budget is None else config.memory_budget
    num_bytes = _bytes_in_memory(networks)
    if num_bytes > budget:
        measures.check_streamed(config, networks, budget, num_bytes)
        sentences.append("Layers exceed the memory budget: batches, without p-values.")
        digest = files.digest_of(networks)
        return Data(networks, " ".join(sentences), logits, digest=digest)
    with warnings.catch_warnings(action="ignore"):
        comparison = measures.planned(config, networks)
    return Data(networks, " ".join(sentences), logits, comparison)


def _bytes_in_memory(networks: Sequence[files.Network]) -> int:
    """Return the bytes that a comparison in memory takes."""
    return COPIES * sum(map(files.feature_bytes, networks))


def _read_logits(networks: Sequence[files.Network]) -> tuple[np.ndarray, ...]:
    """Return the outputs of both networks if they have the same classes, or none."""
    logits = []
    shapes = set()
    for network in networks:
        stored = network.logits
        if stored is None or len(stored.shape) != 2:
            continue
        if stored.shape[1] > 1 and stored.dtype.kind in "biuf":
            shapes.add(stored.shape[1])
            logits.append(np.concatenate(list(network.batches(stored))))
    return tuple(logits) if len(logits) == 2 and len(shapes) == 1 else ()


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
    networks = data.networks
    if data.comparison is not None:
        num_bytes = _bytes_in_memory(networks)
        with warnings.catch_warnings(action="ignore"):  # of large biases: the figure shows them
            tables = measures.compare_in_memory(config, key, data.comparison, num_bytes, cache)
    else:
        tables = measures.compare_in_batches(config, networks, cache)
    dims = ("layers", "other_layers")
    coords = {}
    for axis, network in zip(dims, networks, strict=True):
        coords[axis] = list(network.layers)
    shape = tables["values"].shape
    variables: dict[str, Any] = {}
    for name in measures.TABLES:
        variables[name] = (dims, tables.get(name, np.full(shape, np.nan)))
    share = np.nan
    if data.logits:
        share = float(disagreement(*data.logits))
    variables["disagreement"] = ((), share)
    names = [Path(path).stem for path in (config.a, config.b)]
    facts = {
        "num_samples": len(networks[0].rows),
        "networks": names if names[0] != names[1] else [config.a, config.b],
        "sentences": data.sentences,
    }
    dataset = xarray.Dataset(variables, coords, {"data": json.dumps(facts)})
    tables = _tables_of(dataset, config)
    dataset["best"] = ("layers", tables.best())
    dataset["best_other"] = ("other_layers", tables.transposed().best())
    return dataset


def _tables_of(dataset: xarray.Dataset, config: Any) -> matches.Tables:
    """Return the tables that a figure needs."""
    arrays = {name: dataset[name].values for name in matches.NAMES}
    return matches.Tables(
        {name: array for name, array in arrays.items() if not np.isnan(array).all()}
        | {"values": arrays["values"]},
        dataset.layers.values.tolist(),
        dataset.other_layers.values.tolist(),
        config.measure,
        larger_is_closer=MEASURES[config.measure].larger_is_closer,
        networks=json.loads(dataset.attrs["data"])["networks"],
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
    tables = _tables_of(dataset, config)
    interval = ", with 90 % intervals over blocks of samples" if "low" in tables.arrays else ""
    text = (
        f"{plotting.title_of(config.measure)} of all pairs of {_layers(dataset.layers)} of {first} "
        f"and {_layers(dataset.other_layers)} of {second}, on {facts['num_samples']} samples. "
        f"(a) Estimates; dots: best match of a layer of {first} (row), squares: of a layer of "
        f"{second} (column). (b) Best match of each layer of {first}, (c) of {second}{interval}; "
        "dashes: values by chance. "
    )
    if tables.is_biased:
        text += "Estimates are without bias; circles and dashes have it. "
    if np.isfinite(dataset.corrected).any():
        ends = (dataset.corrected.min().item(), dataset.corrected.max().item())
        words = [_p_value(dataset, dataset.corrected.values == end) for end in ends]
        p_values = " to ".join(dict.fromkeys(words))
        text += f"P-values, corrected for all pairs, are {p_values}. "
    if config.max_samples is not None:
        text += f"At most {config.max_samples} samples, a fixed subset. "
    share = dataset.disagreement.item()
    if np.isfinite(share):
        text += f"The networks classify {100 * share:.1f} % of the samples differently. "
    return text.rstrip()


def _layers(names: xarray.DataArray) -> str:
    return "1 layer" if len(names) == 1 else f"{len(names)} layers"


def _p_value(dataset: xarray.Dataset, index: Any) -> str:
    """Return the corrected p-value of the first pair of an index; a bound for the smallest."""
    corrected = np.ravel(dataset.corrected.values[index])[0]
    if not np.isfinite(corrected):
        return "not computed"
    is_bound = np.ravel(dataset.p_values.values[index])[0] <= LEAST_P_VALUE
    return f"{'< ' if is_bound else ''}{corrected:.2g}"


def headline(dataset: xarray.Dataset) -> str:
    """Return lines with both networks, how samples are aligned, and a doubt about their order."""
    facts = json.loads(dataset.attrs["data"])
    first, second = facts["networks"]
    line = (
        f"A: {first}, {_layers(dataset.layers)}. B: {second}, {_layers(dataset.other_layers)}. "
        f"{facts['num_samples']} samples. {facts['sentences']}"
    )
    corrected = dataset.corrected.values
    smallest = np.min(corrected, initial=np.inf, where=np.isfinite(corrected))
    if 0.05 < smallest < np.inf:
        line += (
            f"\nNo pair is more similar than by chance (smallest p {smallest:.2g}): are the rows "
            "of both files in the same order?"
        )
    return line


def table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return a header and a row per layer of A and of B with its best match."""
    config = config_of(dataset)
    title = plotting.title_of(config.measure)
    names = [f"{title} without bias", "90 % interval", title, "chance", "p"]
    rows = [["layer", "best match", *names]]
    tables = _tables_of(dataset, config)
    for sided, is_transposed in ((tables, False), (tables.transposed(), True)):
        first, second = sided.networks
        for index, best in enumerate(sided.best()):
            layer = f"{first}: {sided.rows[index]}"
            if best < 0:
                rows.append([layer, "none: all samples are the same", *[""] * 5])
                continue
            numbers = {name: f"{array[index, best]:.3f}" for name, array in sided.arrays.items()}
            interval = "not computed"
            if "low" in numbers:
                interval = f"{numbers['low']} to {numbers['high']}"
            pair = (best, index) if is_transposed else (index, best)
            rows.append(
                [
                    layer,
                    f"{second}: {sided.columns[best]}",
                    numbers.get("estimate", numbers["values"]),
                    interval,
                    numbers["values"],
                    numbers.get("baseline", ""),
                    _p_value(dataset, pair),
                ]
            )
    return rows
