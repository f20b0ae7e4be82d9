"""Figure `eigenvectors`: what bilinear networks of several sizes and seeds see, from their weights alone.

Every class of a bilinear network is a quadratic form of the picture, whose eigenvectors are its features. Do networks
of other seeds and sizes have the same ones, and how many of them carry the classification?
"""

import os
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Array
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dissociation import plotting
from dissociation.bmap import bmap
from dissociation.data.datasets import Dataset
from dissociation.figures.artifacts import Parts, identity_of
from dissociation.figures.eigenvector_measures import (
    ORDERS,
    Config,
    compared_pairs,
    details,
    leading_components,
    masking,
    similarities,
    top_similarity,
    truncations,
)
from dissociation.figures.members import source as source
from dissociation.figures.seeds import cell, check_some_left, masked_part, named_diverged, stand_ins
from dissociation.keys import named_key
from dissociation.members import take
from dissociation.plotting import summarise
from dissociation.progress import MeterFactory
from dissociation.recipes.bilinear import train_bilinear
from dissociation.spectral import decompose
from dissociation.spectral.similarity import bootstrap_interval, pair_mean, student_interval
from dissociation.training import Progress

STEM = "eigenvectors"
SHOWS = "Eigenvectors of bilinear networks, compared across seeds and sizes."

AXES = {
    "top": ("sizes", "sizes"),
    "values": ("components",),
    "leading": ("ends", "ranks", "pixels"),
    "image": ("pixels",),
    "contributions": ("components",),
    "vectors": ("components", "pixels"),
    "component_values": ("components",),
    "mask": ("pixels",),
    "mask_accuracy": ("signs", "norms"),
    "mask_share": ("signs", "norms"),
    "random_accuracy": ("norms",),
    "train": ("seeds", "epochs"),
    "validation": ("seeds", "epochs"),
    "similarity": ("pairs", "classes", "ranks"),
    "error": ("seeds", "components"),
    "pairs": ("members", "pairs"),
    "full_error": ("seeds",),
    "diverged_at": ("seeds",),
    "radii": ("images",),
}


class Results(NamedTuple):
    """Everything the figure shows; dictionaries by size.

    Attributes:
        config: What was asked for.
        data: The data set's name and sizes.
        history: "train_loss", "train_accuracy", "validation_loss", "validation_accuracy", [seeds, epochs + 1] each.
        similarity: Per measure, with networks of the reference size: [pairs, classes, ranks] (forms: one rank).
        pairs: First and second member of every pair, [2, pairs].
        top: Mean similarity of the leading component between all sizes, [sizes, sizes].
        with_self: The reference size's with every network also compared with itself, as published.
        error: Per order, test error from the leading 0, 1, ... components, [seeds, components + 1].
        full_error: Test error of the whole networks, [seeds].
        values: Eigenvalues of the first network of the reference size for one class, [components].
        leading: Its three most positive and three most negative eigenvectors, most extreme first, [2, 3, pixels].
        explained: One test picture of that class ("image"), and its components' contributions to the class's logit
            ("contributions"), their eigenvectors ("vectors") and values ("component_values"), the largest first.
        radii: Distance to the nearest picture of another class, by components kept (0 stands for all): [pictures].
        masks: See `eigenvector_measures.masking`.
        diverged_at: The step at which a network diverged, or -1: [seeds]. Its numbers, and those of its pairs, are NaN.
        seconds: Wall time of every part.
    """

    config: Config
    data: dict[str, Any]
    history: dict[int, dict[str, np.ndarray]]
    similarity: dict[int, dict[str, np.ndarray]]
    pairs: dict[int, np.ndarray]
    top: np.ndarray
    with_self: float
    error: dict[int, dict[str, np.ndarray]]
    full_error: dict[int, np.ndarray]
    values: np.ndarray
    leading: np.ndarray
    explained: dict[str, np.ndarray]
    radii: dict[int, np.ndarray]
    masks: dict[str, np.ndarray]
    diverged_at: dict[int, np.ndarray]
    seconds: dict[str, float]


def compute(
    config: Config,
    *,
    key: Array,
    dataset: Dataset | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: str | MeterFactory | None = None,
) -> Results:
    """Trains, decomposes and compares.

    Args:
        config: What to do.
        key: Everything random follows from it.
        dataset: In place of the one that `config.data` names.
        folder: Where finished parts are kept; a second call with the same arguments goes on from there.
        progress: See `dissociation.progress`.

    Returns:
        The results.

    Raises:
        RefusedFile: If `folder` holds parts of another run, or broken ones.
        WrongValue: If an option does not fit the data, or all networks of a size diverged.
    """
    data = source(config) if dataset is None else dataset
    with Parts(folder, identity_of(config, key, data)) as parts:
        return _computed(config, key, data, parts, progress)


def _computed(config: Config, key: Array, data: Dataset, parts: Parts, progress: str | MeterFactory | None) -> Results:
    images, labels = jnp.asarray(data.test_images), jnp.asarray(data.test_labels.argmax(1))
    history: dict[int, dict[str, np.ndarray]] = {}
    error: dict[int, dict[str, np.ndarray]] = {}
    full_error, leading, forms, reference = {}, {}, {}, ()
    diverged_at, alive = {}, {}
    for size in config.sizes:
        trained = train_bilinear(
            data,
            size,
            key=jax.random.fold_in(key, size),
            num_seeds=config.seeds(size),
            num_epochs=config.num_epochs,
            batch_size=config.batch_size,
            weight_decay=config.weight_decay,
            noise=config.noise,
            callbacks=[Progress(progress)],
            checkpoint=parts.path(f"size_{size}.ckpt"),
        )
        parts.seconds[f"training size {size}"] = trained.seconds
        history[size] = _finite_history(trained.history.observed)
        diverged_at[size] = trained.diverged_at
        alive[size] = check_some_left(trained.diverged_at, f"networks of size {size}")
        models = stand_ins(trained.models, alive[size])
        run = eqx.filter_jit(bmap(decompose, batch_size=1))
        spectra = run(models)
        forms[size] = spectra
        leading[size] = leading_components(spectra, min(config.num_ranks, spectra.values.shape[2]))
        job = partial(truncations, config, spectra, images, labels)
        part = masked_part(parts, f"truncation_{size}", alive[size], job)
        error[size], full_error[size] = {order: part[order] for order in ORDERS}, part["full"]
        if size == config.reference:
            reference = take((models, spectra), 0)
    similarity, pairs = {}, {}
    for size in config.sizes:
        pairs[size] = np.stack(compared_pairs(config, size, config.reference))
        both = alive[size][pairs[size][0]] & alive[config.reference][pairs[size][1]]
        job = partial(similarities, leading, forms, size, config.reference, pairs[size])
        similarity[size] = masked_part(parts, f"similarity_{size}", both, job)
    own = _pooled(similarity[config.reference]["magnitude"])[0]
    count = int(alive[config.reference].sum())
    part = parts.get("details", partial(details, config, *reference, images, labels))
    return Results(
        config=config,
        data={"name": data.name, "num_train": len(data.train_images), "num_test": len(data.test_images)},
        history=history,
        similarity=similarity,
        pairs=pairs,
        top=parts.get("top", partial(top_similarity, config, leading, alive))["top"],
        # Pairs i <= j: n (n - 1) / 2 true ones and n of a network with itself.
        with_self=float((own * (count - 1) / 2 + 1) / ((count - 1) / 2 + 1)),
        error=error,
        full_error=full_error,
        values=part["values"],
        leading=part["leading"],
        explained={name: part[name] for name in ("image", "contributions", "vectors", "component_values")},
        radii={int(name.removeprefix("radii_")): array for name, array in part.items() if name.startswith("radii_")},
        masks=parts.get("masks", partial(masking, config, *reference, images, labels, key=jax.random.fold_in(key, 0))),
        diverged_at=diverged_at,
        seconds=parts.seconds,
    )


def _finite_history(observed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """NaN from where a network diverged: its accuracy would be that of the first class."""
    finite = np.isfinite(observed["train_loss"]) & np.isfinite(observed["validation_loss"])
    return {name: np.where(finite, values, np.nan) for name, values in observed.items()}


def _pooled(similarity: np.ndarray) -> np.ndarray:
    """Mean over pairs and classes of networks that did not diverge: [ranks]."""
    return summarise(similarity.reshape(-1, similarity.shape[2])).mean


def components_needed(results: Results, order: str = "magnitude", drop: float = 1e-3) -> dict[int, float]:
    """By size, the least number of components per class that costs less than `drop` of accuracy, mean over seeds.

    Infinite where no number up to `num_components` does.
    """
    found = {}
    for size, errors in results.error.items():
        lost = summarise(errors[order] - results.full_error[size][:, None]).mean
        enough = np.flatnonzero(lost < drop)
        found[size] = float(enough[0]) if len(enough) else np.inf
    return found


def intervals(results: Results, size: int, measure: str = "magnitude", *, resample: bool = True) -> np.ndarray:
    """Mean over pairs and classes by rank, and a 90 % interval: [3, ranks].

    Args:
        results: What `compute` returned.
        size: Hidden size, compared with the reference.
        measure: One of `eigenvector_measures.MEASURES`.
        resample: Whether members are resampled; else Student's interval over pairs and classes, as published, which
            takes pairs that share a network, and classes of one pair, for independent.

    Returns:
        Mean, lower and upper end.
    """
    values = results.similarity[size][measure]
    known = np.isfinite(values).all((1, 2))
    values, (first, second) = values[known].astype(np.float32), results.pairs[size][:, known]
    same = size == results.config.reference
    # Members are numbered anew, those that diverged left out.
    mine, others = (np.flatnonzero(results.diverged_at[which] < 0) for which in (size, results.config.reference))
    groups = len(mine) if same else (len(mine), len(others))
    if len(values) == 0 or min(len(mine), len(others)) < 2:
        mean = _pooled(values)
        return np.stack([mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)])
    if not resample:
        return np.stack(student_interval(values.reshape(-1, values.shape[2])))
    offset = 0 if same else len(mine)
    statistic = pair_mean(values.mean(1), np.searchsorted(mine, first), np.searchsorted(others, second) + offset)
    return np.stack(bootstrap_interval(statistic, groups, key=named_key("bootstrap of intervals")))


def draw(results: Results) -> Figure:
    """Six panels: similarity by rank and between sizes, truncation, the spectrum of a class, and an explanation.

    Args:
        results: What `compute` returned.

    Returns:
        A figure of 7.2 x 6.8 inches.
    """
    with plotting.house_style():
        figure = plt.figure(figsize=(7.2, 6.8))
        rows: Any = figure.subfigures(3, 1, height_ratios=[1.0, 1.0, 1.05])
        upper, middle, lower = rows
        _draw_similarity(upper, results)
        _draw_truncation(middle, results)
        _draw_details(lower, results)
    plt.close(figure)  # out of pyplot's hands: a notebook shows what it is given
    return figure


def _draw_similarity(panel: Any, results: Results) -> None:
    left, right = panel.subplots(1, 2, width_ratios=[1.6, 1])
    for index, size in enumerate(results.config.sizes):
        for resample, alpha in ((True, 0.15), (False, 0.35)):
            mean, low, high = intervals(results, size, resample=resample)
            ranks = np.arange(1, len(mean) + 1)
            left.fill_between(ranks, low, high, alpha=alpha, color=f"C{index}", linewidth=0)
        left.plot(ranks, mean, color=f"C{index}", label=str(size))
    chance = (2 / (np.pi * results.leading.shape[-1])) ** 0.5
    left.axhline(chance, color="black", linestyle=":", linewidth=0.8, label="chance")
    left.set(
        xlabel="eigenvector rank", ylabel="similarity", ylim=(0, 1.01), title=f"with size {results.config.reference}"
    )
    left.legend(title="size", fontsize="x-small", ncols=2, title_fontsize="x-small")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    names = [str(size) for size in results.config.sizes]
    shown = right.imshow(results.top, vmin=0, vmax=1, cmap="RdBu")
    for (i, j), value in np.ndenumerate(results.top):
        right.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize="x-small")
    right.set(xticks=range(len(names)), yticks=range(len(names)), xticklabels=names, yticklabels=names)
    right.set(xlabel="size", ylabel="size", title="leading eigenvector")
    panel.colorbar(shown, ax=right)


def _draw_truncation(panel: Any, results: Results) -> None:
    left, *drops = panel.subplots(1, 3)
    drops[1].sharey(drops[0])
    for index, size in enumerate(results.config.sizes):
        errors = results.error[size]
        components = np.arange(errors["magnitude"].shape[1])
        style = {"color": f"C{index}", "label": str(size)}
        _student_band(left, components, 100 * errors["magnitude"], **style)
        for axis, order in zip(drops, ORDERS, strict=True):
            lost = 100 * (errors[order] - results.full_error[size][:, None])
            _student_band(axis, components[1:], lost[:, 1:], **style)
    left.set(yscale="log", ylim=(1, 100), xlabel="eigenvector rank (per digit)", ylabel="classification error (%)")
    ticks = (1, 2, 5, 10, 20, 50, 100)
    left.set_yticks(ticks, [str(tick) for tick in ticks])
    left.minorticks_off()
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis, title in zip(drops, ORDERS.values(), strict=True):
        axis.axhline(0, color="black", linewidth=0.5)
        axis.set_yscale("symlog", linthresh=0.1)
        axis.set(xlabel="eigenvector rank (per digit)", title=title)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    drops[0].set(ylabel="accuracy drop (%)")
    left.legend(title="size", fontsize="x-small", title_fontsize="x-small")


def _student_band(axis: Any, x: np.ndarray, curves: np.ndarray, *, color: str, label: str) -> None:
    known = curves[np.isfinite(curves).all(1)].astype(np.float32)
    axis.plot(x, summarise(known).mean, color=color, label=label)
    if len(known) < 2:
        return
    _, low, high = (np.asarray(part) for part in student_interval(known))
    axis.fill_between(
        x, np.maximum(low, 1e-3) if axis.get_yscale() == "log" else low, high, color=color, alpha=0.2, lw=0
    )


def _draw_details(panel: Any, results: Results) -> None:
    halves: Any = panel.subfigures(1, 2)
    left, right = halves
    shape = (round(results.leading.shape[-1] ** 0.5), -1)
    grid = left.subplots(2, 4, width_ratios=[1.8, 1, 1, 1])
    for axis in grid[:, 0]:
        axis.remove()
    axis = left.add_subplot(grid[0, 0].get_gridspec()[:, 0])
    axis.plot(results.values, np.arange(len(results.values)), ".", markersize=2)
    axis.set(xlabel="eigenvalue", yticks=[], title=f"digit {results.config.digit}")
    axis.axvline(0, color="black", linewidth=0.5)
    for row, vectors, name in zip(grid, results.leading, ("positive", "negative"), strict=True):
        for place, vector in zip(row[1:], vectors, strict=True):
            _picture(place, vector.reshape(shape))
        row[1].set_ylabel(name, fontsize="small")
    top = right.subplots(2, 3)
    top[0, 0].imshow(results.explained["image"].reshape(shape), cmap="gray")
    top[0, 0].set(xticks=[], yticks=[], title="picture")
    parts = zip(top.flat[1:], *(results.explained[n] for n in ("contributions", "vectors")), strict=False)
    for place, contribution, vector in parts:
        _picture(place, vector.reshape(shape))
        place.set_title(f"{contribution:+.2f}")


def _picture(axis: Any, image: np.ndarray) -> None:
    limit = np.abs(image).max()
    axis.imshow(image, cmap="RdBu", vmin=-limit, vmax=limit)
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(False)


def arrays(results: Results) -> dict[str, np.ndarray]:
    """The arrays of the figure under flat names, for an `.npz` file."""
    flat = {"top": results.top, "values": results.values, "leading": results.leading, **results.explained}
    flat |= results.masks
    for size in results.config.sizes:
        flat |= {f"{name}_{size}": part for name, part in results.history[size].items()}
        flat |= {f"similarity_{name}_{size}": part for name, part in results.similarity[size].items()}
        flat |= {f"error_{name}_{size}": part for name, part in results.error[size].items()}
        flat |= {f"pairs_{size}": results.pairs[size], f"full_error_{size}": results.full_error[size]}
        flat |= {f"diverged_at_{size}": results.diverged_at[size]}
    return flat | {f"radii_{kept}": part for kept, part in results.radii.items()}


def describe(results: Results) -> dict[str, Any]:
    """What the JSON beside the figure says."""
    return {
        "figure": STEM,
        "config": results.config,
        "data": results.data,
        "similarity of the leading component with every network compared with itself too": results.with_self,
        "components per class that cost less than 0.1 %": {
            order: components_needed(results, order) for order in ORDERS
        },
    }


def headline(results: Results) -> str:
    """What was computed on, in a line."""
    sizes = f"{results.data['num_train']} training and {results.data['num_test']} test pictures"
    names = [f"size {size} seed {i}" for size, steps in results.diverged_at.items() for i in range(len(steps))]
    gone = named_diverged(names, np.concatenate(list(results.diverged_at.values())))
    return (
        f"{results.data['name']}: {sizes}, {results.config.num_epochs} epochs; similarities with size "
        f"{results.config.reference}, pairs of different networks only{gone}"
    )


def table(results: Results) -> list[list[str]]:
    """A header and a row per size: accuracy, similarity of some ranks in three orders, components needed."""
    shown = [rank for rank in (1, 5, 20) if rank <= results.config.num_ranks]
    rows = [["size", "seeds", "accuracy"]]
    rows[0] += [f"rank {rank}, {by}" for by in ("magnitude", "positive", "negative") for rank in shown]
    rows[0] += ["matched", "form", "needed", "needed, by contribution"]
    needed = [components_needed(results, order) for order in ORDERS]
    for size in results.config.sizes:
        accuracy = 100 * (1 - results.full_error[size])
        row = [str(size), str(len(accuracy)), cell(accuracy, unit=" %")]
        for by in ("magnitude", "positive", "negative"):
            means = _pooled(results.similarity[size][by])
            row += [f"{means[rank - 1]:.3f}" if rank <= len(means) else "" for rank in shown]
        pooled = (_pooled(results.similarity[size][measure]) for measure in ("matched", "form"))
        row += [f"{mean.mean():.3f}" for mean in pooled]
        rows.append(row + [f"{found[size]:g}" for found in needed])
    return rows
