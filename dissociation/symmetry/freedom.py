"""How far a measure of similarity can be moved without changing a function: linear CKA over scalings of the neurons.

A network whose hidden neurons are positively homogeneous computes the same function with each of them scaled. Its
representation X diag(s) has the Gram matrix K(w) = sum_i w_i h_i h_i^T, w = s^2, h_i the centred columns, and with a
reference K0

    CKA(w) = b^T w / (|K0| sqrt(w^T G w)),   G_ij = (h_i^T h_j)^2,   b_i = h_i^T K0 h_i.

Its maximum over w >= 0 is a non-negative least squares problem, its minimum lies at a single neuron.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.linalg import eigh
from scipy.optimize import nnls

from dissociation.checks import check_choice, check_finite, check_same_length, fail
from dissociation.validation import validated
from dissociation.weights.groups import NeuronGroup
from dissociation.weights.rewrites import Scale, scale

ENDS = ("low", "high")
SMALLEST = 1e-4
"""Length of the activity of neurons that the extreme network has no use for, of the longest: they hardly count."""


class Freedom(NamedTuple):
    """What linear CKA with a reference may be, over all positive scalings of the neurons.

    Attributes:
        measured: Of the representation as it is.
        low: The least, approached as one neuron outgrows all others.
        high: The largest.
        low_weights: Squared factors of the neurons that approach it, [neurons]; 0 for neurons without use.
        high_weights: The same for the largest.
        residual: Of the conditions of Karush, Kuhn and Tucker at the largest, relative: it certifies that.
        constant: Neurons that are constant on the data, whose scale no measure sees: [neurons].
        lengths: Of the centred activity of each neuron as it is, [neurons].
    """

    measured: float
    low: float
    high: float
    low_weights: np.ndarray
    high_weights: np.ndarray
    residual: float
    constant: np.ndarray
    lengths: np.ndarray

    def rewrite(self, group: NeuronGroup, *, end: str) -> Scale:
        """The rewrite of the network that approaches an end: see `weights.rewrites.scale`.

        Args:
            group: Of the neurons.
            end: "low" or "high".
        """
        check_choice("end", end, ENDS)
        factors = np.sqrt(self.low_weights if end == "low" else self.high_weights)
        lengths = np.where(self.constant, 1.0, self.lengths)
        wanted = factors * lengths
        factors = np.maximum(wanted / wanted.max(), SMALLEST) / lengths * np.median(lengths)
        if group.degree is None or group.degree <= 0 or len(group.scalings) != 1:
            fail("group", "be homogeneous of a positive degree, in one way", group)
        return scale(group, np.where(self.constant, 1.0, factors ** (1 / group.degree)))


@validated
def cka_freedom(
    x: Float[Array | np.ndarray, "samples neurons"], reference: Float[Array | np.ndarray, "samples features"]
) -> Freedom:
    """The interval of linear CKA with a reference over all positive scalings of the neurons of a representation.

    Scaling neurons is a rewrite where their activation is homogeneous, so networks of one function fill the interval:
    both ends are approached by `Freedom.rewrite`. Duplicated neurons add nothing to it, since copies are parallel;
    neurons without effect open it further, to any direction that they may have. On the host, in float64.

    Args:
        x: The representation.
        reference: Another one of the same samples, kept as it is.

    Returns:
        The interval, and what approaches its ends.

    Raises:
        ValueError: If the numbers of samples differ, or all neurons or the reference are constant.
    """
    check_same_length("x", x.shape[0], "reference", reference.shape[0])
    columns, other = (np.asarray(part, np.float64) for part in (x, reference))
    for name, part in (("x", columns), ("reference", other)):
        check_finite(name, part)
    columns, constant, unit_of_x = _centred(columns, x.dtype)
    other, still, _ = _centred(other, reference.dtype)
    norms = np.linalg.norm(columns, axis=0)
    for name, gone in (("x", constant.all()), ("reference", still.all())):
        if gone:
            fail(name, "differ between samples", "constant columns alone")
    unit = columns[:, ~constant] / norms[~constant]  # of neurons of length 1: weights are in their units
    size = np.linalg.norm(other.T @ other)
    gains = ((other.T @ unit) ** 2).sum(0) / size
    gram = (unit.T @ unit) ** 2
    own = norms[~constant] ** 2
    best, residual = _largest(gram, gains)
    single = int(np.argmin(gains))
    weights = np.zeros((2, len(norms)))
    weights[0, np.flatnonzero(~constant)[single]] = 1 / own[single]
    weights[1, ~constant] = best / own
    return Freedom(
        measured=float(gains @ own / np.sqrt(own @ gram @ own)),
        low=float(gains[single]),
        high=float(gains @ best / np.sqrt(best @ gram @ best)),
        low_weights=weights[0],
        high_weights=weights[1],
        residual=residual,
        constant=constant,
        lengths=norms * unit_of_x,
    )


def _centred(columns: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray, float]:
    """Centred columns in units of their largest entry, which of them are constant but for rounding, and the unit."""
    unit = float(np.abs(columns).max(initial=0.0)) or 1.0
    columns = columns / unit
    sizes = np.abs(columns).max(0)
    columns = columns - columns.mean(0)
    # A mean of n numbers in the representation's own precision is right to a rounding.
    rounding = 8 * float(jnp.finfo(dtype if jnp.issubdtype(dtype, jnp.floating) else float).eps)
    constant = np.linalg.norm(columns, axis=0) <= rounding * sizes * np.sqrt(len(columns))
    return np.where(constant, 0.0, columns), constant, unit


def _largest(gram: np.ndarray, gains: np.ndarray) -> tuple[np.ndarray, float]:
    """W >= 0 that maximises b^T w / sqrt(w^T G w), by min w^T G w / 2 - b^T w, and the residual of its conditions."""
    values, vectors = eigh(gram)
    kept = values > values[-1] * len(gram) * np.finfo(float).eps
    root = vectors[:, kept] * np.sqrt(values[kept])
    best = nnls(root.T, (vectors[:, kept].T @ gains) / np.sqrt(values[kept]))[0]
    used = best > 0
    for _ in range(3):  # the normal equations of what is used, refined
        step = np.linalg.lstsq(gram[np.ix_(used, used)], (gains - gram @ best)[used], rcond=None)[0]
        moved = best.copy()
        moved[used] += step
        if (moved < 0).any():
            break
        best = moved
    slack = gram @ best - gains
    scale = np.abs(gains).max()
    residual = max(float(-slack.min()), float(np.abs(slack[best > 0]).max(initial=0.0)), 0.0)
    return best, residual / scale
