"""Tables of the figure `eigenvectors`: similarity with its intervals, masks, certified accuracy."""

import numpy as np
import xarray

from dissociation.bilinear._certificate import certified_accuracy
from dissociation.figures._eigenvector_measures import RANKINGS, of_size
from dissociation.figures._harness import config_of


def similarity_table(
    dataset: xarray.Dataset, ranks: tuple[int, ...] = (1, 5, 20)
) -> list[list[str]]:
    """Return the similarity within the reference size, by order and rank, with two 90 % intervals and chance.

    Args:
        dataset: Value of `eigenvectors.compute`.
        ranks: Ranks from 1; those above `num_ranks` are left out.
    """
    rows = [
        [
            "components",
            "rank",
            "similarity",
            "members resampled",
            "Student over pairs x classes",
            "chance",
        ]
    ]
    chance = (2 / (np.pi * len(dataset.pixels))) ** 0.5
    interval = of_size(dataset, config_of(dataset).reference).interval
    for measure in RANKINGS:
        honest, published = interval.sel(measures=measure).values
        for rank in ranks:
            if rank > honest.shape[1]:
                continue
            mean, *ends = honest[:, rank - 1]
            bounds = [f"{low:.3f} to {high:.3f}" for low, high in (ends, published[1:, rank - 1])]
            rows.append([measure, str(rank), f"{mean:.3f}", *bounds, f"{chance:.3f}"])
    return rows


def accuracy_table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return test accuracy by size: mean, smallest and largest over seeds."""
    rows = [["size", "seeds", "accuracy", "lowest", "highest"]]
    for size in dataset.hidden_sizes.values.tolist():
        errors = of_size(dataset, size).full_error.values
        right = 1 - errors[np.isfinite(errors)]  # without networks that diverged
        count = str(len(errors)) if len(right) == len(errors) else f"{len(right)} of {len(errors)}"
        rows.append(
            [str(size), count, *(f"{v:.4f}" for v in (right.mean(), right.min(), right.max()))]
        )
    return rows


def mask_table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return accuracy under a mask from the weights, its negative, and random masks of the same norm."""
    rows = [["norm", "mask", "negative", "taken for the digit", "negative", "random masks"]]
    columns = (
        *dataset.mask_accuracy.values,
        *dataset.mask_share.values,
        dataset.random_accuracy.values,
    )
    for norm, *values in zip(dataset.norms.values, *columns, strict=True):
        rows.append([f"{norm:g}", *(f"{value:.3f}" for value in values)])
    return rows


def certified_table(
    dataset: xarray.Dataset, levels: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
) -> list[list[str]]:
    """Return certified accuracy by the norm of the perturbation and the components kept per class.

    Args:
        dataset: Value of `eigenvectors.compute`.
        levels: Norms.
    """
    rows = [["components", *(f"{level:g}" for level in levels), "median radius"]]
    for kept, radii in zip(dataset.kept.values, dataset.radii.values, strict=True):
        shares = np.asarray(certified_accuracy(radii, np.asarray(levels, radii.dtype)))
        rows.append([str(kept), *(f"{share:.2f}" for share in shares), f"{np.median(radii):.3f}"])
    return rows
