"""Tables of the figure `eigenvectors`: similarity with its intervals, masks, certified accuracy."""

import numpy as np
import xarray

from dissociation.bilinear._certificate import certified_accuracy
from dissociation.figures._eigenvector_measures import RANKINGS, of_size
from dissociation.figures._harness import config_of


def similarity_table(
    dataset: xarray.Dataset, ranks: tuple[int, ...] = (1, 5, 20)
) -> list[list[str]]:
    """Return the similarity within the reference size, by order and rank.

    Two 90 % intervals and the similarity by chance follow.

    Args:
        dataset: Value of `eigenvectors.compute`.
        ranks: Ranks from 1; those above `num_ranks` are left out.
    """
    header = [
        "components",
        "rank",
        "similarity",
        "members resampled",
        "Student over pairs x classes",
        "chance",
    ]
    rows = [header]
    chance = (2 / (np.pi * len(dataset.pixels))) ** 0.5
    interval = of_size(dataset, config_of(dataset).reference).interval
    for measure in RANKINGS:
        resampled, student = interval.sel(measures=measure).values
        for rank in ranks:
            if rank > resampled.shape[1]:
                continue
            mean, low, high = resampled[:, rank - 1]
            _, student_low, student_high = student[:, rank - 1]
            rows.append(
                [
                    measure,
                    str(rank),
                    f"{mean:.3f}",
                    f"{low:.3f} to {high:.3f}",
                    f"{student_low:.3f} to {student_high:.3f}",
                    f"{chance:.3f}",
                ]
            )
    return rows


def accuracy_table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return test accuracy by size: mean, smallest and largest over seeds."""
    rows = [["size", "seeds", "accuracy", "lowest", "highest"]]
    for size in dataset.hidden_sizes.values.tolist():
        errors = of_size(dataset, size).full_error.values
        accuracy = 1 - errors[np.isfinite(errors)]  # without networks that diverged
        count = str(len(errors))
        if len(accuracy) < len(errors):
            count = f"{len(accuracy)} of {count}"
        row = [str(size), count]
        for summary in (accuracy.mean(), accuracy.min(), accuracy.max()):
            row.append(f"{summary:.4f}")
        rows.append(row)
    return rows


def mask_table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return accuracy under a mask from the weights, its negative, and random masks of its norm."""
    rows = [["norm", "mask", "negative", "taken for the digit", "negative", "random masks"]]
    columns = (
        *dataset.mask_accuracy.values,
        *dataset.mask_share.values,
        dataset.random_accuracy.values,
    )
    for norm, *fractions in zip(dataset.norms.values, *columns, strict=True):
        row = [f"{norm:g}"]
        row += [f"{fraction:.3f}" for fraction in fractions]
        rows.append(row)
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
    for name, radii in zip(dataset.kept.values, dataset.radii.values, strict=True):
        norms = np.asarray(levels, radii.dtype)
        row = [str(name)]
        row += [f"{accuracy:.2f}" for accuracy in np.asarray(certified_accuracy(radii, norms))]
        row.append(f"{np.median(radii):.3f}")
        rows.append(row)
    return rows
