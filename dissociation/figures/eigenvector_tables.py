"""Tables of the figure `eigenvectors`: similarity with its intervals, masks, certified accuracy."""

import numpy as np

from dissociation.bilinear._certificate import certified_accuracy
from dissociation.figures._results import Results


def similarity_table(results: Results, ranks: tuple[int, ...] = (1, 5, 20)) -> list[list[str]]:
    """Return the similarity within the reference size, by order and rank, with two 90 % intervals and chance.

    Args:
        results: Value of `eigenvectors.compute`.
        ranks: Ranks from 1; those above `num_ranks` are left out.
    """
    rows = [["components", "rank", "similarity", "members resampled", "Student over pairs x classes", "chance"]]
    chance = (2 / (np.pi * results.leading.shape[-1])) ** 0.5
    for measure in ("magnitude", "positive", "negative"):
        honest, published = results.intervals[results.config.reference][measure]
        for rank in ranks:
            if rank > honest.shape[1]:
                continue
            mean, *ends = honest[:, rank - 1]
            bounds = [f"{low:.3f} to {high:.3f}" for low, high in (ends, published[1:, rank - 1])]
            rows.append([measure, str(rank), f"{mean:.3f}", *bounds, f"{chance:.3f}"])
    return rows


def accuracy_table(results: Results) -> list[list[str]]:
    """Return test accuracy by size: mean, smallest and largest over seeds."""
    rows = [["size", "seeds", "accuracy", "lowest", "highest"]]
    for size, errors in results.full_error.items():
        right = 1 - errors[np.isfinite(errors)]  # without networks that diverged
        count = str(len(errors)) if len(right) == len(errors) else f"{len(right)} of {len(errors)}"
        rows.append([str(size), count, *(f"{v:.4f}" for v in (right.mean(), right.min(), right.max()))])
    return rows


def mask_table(results: Results) -> list[list[str]]:
    """Return accuracy under a mask from the weights, its negative, and random masks of the same norm."""
    masks = results.masks
    rows = [["norm", "mask", "negative", "taken for the digit", "negative", "random masks"]]
    columns = (*masks["mask_accuracy"], *masks["mask_share"], masks["random_accuracy"])
    for norm, *values in zip(results.config.mask_norms, *columns, strict=True):
        rows.append([f"{norm:g}", *(f"{value:.3f}" for value in values)])
    return rows


def certified_table(
    results: Results, levels: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
) -> list[list[str]]:
    """Return certified accuracy by the norm of the perturbation and the components kept per class.

    Args:
        results: Value of `eigenvectors.compute`.
        levels: Norms.
    """
    rows = [["components", *(f"{level:g}" for level in levels), "median radius"]]
    for kept, radii in sorted(results.radii.items(), key=lambda item: item[0] or np.inf):
        shares = np.asarray(certified_accuracy(radii, np.asarray(levels, radii.dtype)))
        rows.append([str(kept) if kept else "all", *(f"{share:.2f}" for share in shares), f"{np.median(radii):.3f}"])
    return rows
