"""Exact attainable range of linear CKA over rewrites that keep the function."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.linalg import eigh
from scipy.optimize import nnls

from dissociation._core.checks import check_choice, check_finite, check_known, fail
from dissociation._core.linalg import column_units, num_directions
from dissociation._core.results import printed
from dissociation._core.validation import validated
from dissociation.rewrites._certificate import Certificate, certify
from dissociation.rewrites._groups import NeuronGroup
from dissociation.rewrites._rewrites import Rewrite, rotate, scale

ENDS = ("low", "high")
SMALLEST = 1e-4
"""Length of the activity of unused neurons at an end, relative to the longest."""


class CkaRange(NamedTuple):
    """Attainable range of linear CKA with a reference over all positive scalings of the neurons.

    Attributes:
        measured: CKA of the representation as it is.
        low: Smallest value, approached as one neuron outgrows all others.
        high: Largest value.
        low_weights: Squared factors of the neurons that approach `low`, [neurons]; 0 for unused
            neurons.
        high_weights: Squared factors that attain `high`, [neurons]; 0 for unused neurons.
        residual: Relative residual of the Karush-Kuhn-Tucker conditions at `high`, which certifies
            the maximum.
        constant: Mask of neurons that are constant on the data, [neurons].
        lengths: Length of the centred activity of each neuron, [neurons].
    """

    measured: float
    low: float
    high: float
    low_weights: np.ndarray
    high_weights: np.ndarray
    residual: float
    constant: np.ndarray
    lengths: np.ndarray

    __repr__ = printed

    def rewrite(self, group: NeuronGroup, *, end: str) -> Rewrite:
        """Return the rewrite of the group's network that approaches an end, "low" or "high".

        See `rewrites.scale`.

        Raises:
            ValueError: If `end` is unknown, or the group does not have one scaling, of positive
                degree.
        """
        lengths = np.where(self.constant, 1.0, self.lengths)
        weights = at_end(end, self.low_weights, self.high_weights)
        target = np.sqrt(weights) * lengths
        # A rewrite needs positive factors, also for unused neurons.
        relative = np.maximum(target / target.max(), SMALLEST)
        factors = relative / lengths * np.median(lengths)
        # At the low end one neuron outgrows the others, whatever their exact factors.
        free = np.ones(len(target), bool)
        if end == "high":
            free = target == 0
        return scale_activity(group, np.where(self.constant, 1.0, factors), free)


def at_end(end: str, low: Any, high: Any) -> Any:
    """Return `low` or `high` for an end; raise if there is no such end."""
    check_choice("end", end, ENDS)
    if end == "low":
        return low
    return high


def scale_activity(group: NeuronGroup, factors: Any, free: np.ndarray | None = None) -> Rewrite:
    """Return the rewrite that multiplies activities by factors [neurons].

    Factors of the neurons `free` are rounded to powers of two.
    """
    if group.degree is None or group.degree <= 0 or len(group.scalings) != 1:
        fail("group", "be homogeneous of a positive degree, in one way", group)
    factors = factors ** (1 / group.degree)  # activities scale by factor^degree
    if free is not None:
        # Powers of two round no weight, so they are taken if any factor will do.
        powers = np.exp2(np.round(np.log2(factors)))
        factors = np.where(free, powers, factors)
    return scale(group, factors)


@validated
def cka_range(
    x: Float[Array | np.ndarray, "samples neurons *positions"],
    reference: Float[Array | np.ndarray, "samples features"],
) -> CkaRange:
    """Return the attainable range of linear CKA with a reference over positive scalings of neurons.

    If the activation is homogeneous, networks of one function fill the range and `CkaRange.rewrite`
    approaches both ends. Duplicated neurons do not change the range, neurons without effect may
    extend it. With squared factors w >= 0, centred activities h_i (a column per position) and the
    Gram matrix K0 of the reference,

        CKA(w) = b^T w / (|K0| sqrt(w^T G w)),   G_ij = |h_i^T h_j|^2,   b_i = tr(h_i^T K0 h_i).

    Computed on the host in float64.

    Args:
        x: The representation, [samples, neurons] or [samples, neurons, *positions]. Positions, as
            those of a channel, share the factor of the neuron.
        reference: Another representation of the same samples, not scaled.

    Raises:
        ValueError: If the numbers of samples differ, or all neurons or the reference are constant.
    """
    columns, is_constant_column, unit_of_x = _centred("x", x)
    features, _, _ = _centred("reference", reference)
    num_neurons = x.shape[1]
    neurons = columns.reshape(len(columns), num_neurons, -1)
    constant = np.asarray(is_constant_column.reshape(num_neurons, -1).all(1))
    varying = np.flatnonzero(~constant)
    norms = np.linalg.norm(neurons, axis=(0, 2))
    unit = neurons[:, varying] / norms[varying, None]  # weights are those of neurons of length 1
    products = np.tensordot(features, unit, (0, 0))
    size = np.linalg.norm(features.T @ features)
    gains = (products**2).sum((0, 2)) / size
    gram = _inner_squares(unit)

    # The maximum over w >= 0 is a non-negative least squares problem; the infimum lies at a single
    # neuron.
    best, residual = _largest(gram, gains)
    alone = gains / np.sqrt(np.diag(gram))
    single = int(np.argmin(alone))
    weights = norms[varying] ** 2  # of the representation as it is
    outgrowing = varying[single]
    low_weights = np.zeros(num_neurons)
    low_weights[outgrowing] = 1 / weights[single]
    high_weights = np.zeros(num_neurons)
    high_weights[varying] = best / weights
    return CkaRange(
        measured=float(gains @ weights / np.sqrt(weights @ gram @ weights)),
        low=float(alone[single]),
        high=float(gains @ best / np.sqrt(best @ gram @ best)),
        low_weights=low_weights,
        high_weights=high_weights,
        residual=residual,
        constant=constant,
        lengths=norms * unit_of_x,
    )


class LinearCkaRange(NamedTuple):
    """Attainable range of linear CKA with a reference over all invertible maps of the neurons.

    Attributes:
        measured: Value of the representation as it is.
        low: Smallest value.
        high: Largest value.
        low_matrix: M, [neurons, neurons], for which x M^T approaches `low`.
        high_matrix: M for which x M^T approaches `high`.
    """

    measured: float
    low: float
    high: float
    low_matrix: np.ndarray
    high_matrix: np.ndarray

    __repr__ = printed

    def rewrite(self, group: NeuronGroup, *, end: str) -> Rewrite:
        """Return the rewrite of the group's network that approaches an end, "low" or "high".

        See `rewrites.rotate`.

        Raises:
            ValueError: If `end` is unknown, or the neurons are not linear.
        """
        return rotate(group, at_end(end, self.low_matrix, self.high_matrix))


@validated
def linear_cka_range(
    x: Float[Array | np.ndarray, "samples neurons"],
    reference: Float[Array | np.ndarray, "samples features"],
) -> LinearCkaRange:
    """Return the attainable range of linear CKA with a reference over invertible maps of neurons.

    Such maps keep the function of a linear network. With an orthonormal basis U of the centred
    columns and A = U^T K0 U,

        least eigenvalue of A / |K0| <= CKA <= |A| / |K0|.

    With network inputs as `x`, the range holds for all linear networks of one function whose hidden
    layer is at least as wide as the rank of the inputs. Unused directions at an end have lengths of
    5e-3: ends are missed by about its square, and rounding of the function grows as its inverse.
    Computed on the host in float64.

    Args:
        x: The representation.
        reference: Another representation of the same samples, not mapped.

    Raises:
        ValueError: If the numbers of samples differ, or all neurons or the reference are constant.

    References:
        Braun, Grant and Saxe (2025), on which representations linear networks of one function may
        have.
    """
    columns, _, _ = _centred("x", x)
    features, _, _ = _centred("reference", reference)
    basis, sizes, rows = np.linalg.svd(columns, full_matrices=False)
    rounding = min(max(columns.shape), 300) * float(jnp.finfo(x.dtype).eps)
    rank = num_directions(columns / column_units(columns), rounding)
    sizes = sizes[:rank]
    rows = rows[:rank]
    size = np.linalg.norm(features.T @ features)
    products = features.T @ basis[:, :rank]
    # X M^T has any Gram matrix U Q U^T, with Q positive definite: only A = U^T K0 U limits CKA.
    values, vectors = np.linalg.eigh(products.T @ products / size)
    values = np.maximum(values, 0.0)
    low_lengths = np.eye(rank)[0]
    high_lengths = np.sqrt(values / values[-1])

    def matrix(lengths):
        """Return M that gives `vectors` these lengths and is the identity on other directions."""
        stretch = vectors * np.maximum(lengths, 5e-3) @ vectors.T
        whitened = stretch @ (rows / sizes[:, None]) * np.median(sizes)
        identity = np.eye(rows.shape[1])
        return rows.T @ whitened + identity - rows.T @ rows

    return LinearCkaRange(
        measured=float(np.linalg.norm(products * sizes) ** 2 / size / np.linalg.norm(sizes**2)),
        low=float(values[0]),
        high=float(np.linalg.norm(values)),
        low_matrix=matrix(low_lengths),
        high_matrix=matrix(high_lengths),
    )


@validated
def approached(
    found: CkaRange | LinearCkaRange, model: Any, group: NeuronGroup, inputs: Any, *, end: str
) -> tuple[Any, Certificate]:
    """Return the network that approaches an end of a range, and the certificate of its function.

    Args:
        found: Attainable range of a representation of the model.
        model: The network.
        group: Group of the neurons.
        inputs: Examples, samples first, to compare the functions on.
        end: "low" or "high".

    Raises:
        ValueError: If `end` is unknown, or the group has no such rewrite.
    """
    rewritten = found.rewrite(group, end=end)(model)
    return rewritten, certify(model, rewritten, inputs)


def _inner_squares(unit: np.ndarray) -> np.ndarray:
    """Return |h_i^T h_j|^2 of neurons [samples, neurons, positions]."""
    samples, number, positions = unit.shape
    if positions == 1:
        columns = unit[:, :, 0]
        return (columns.T @ columns) ** 2
    if samples <= positions:  # Gram matrices are smaller then
        grams = np.matmul(unit.transpose(1, 0, 2), unit.transpose(1, 2, 0))
        flat = grams.reshape(number, -1)
        return flat @ flat.T
    flat = unit.reshape(samples, -1)
    rows = []
    for i in range(number):
        # One neuron against all at a time, which bounds the memory.
        squares = (unit[:, i].T @ flat) ** 2
        rows.append(squares.reshape(positions, number, -1).sum((0, 2)))
    return np.stack(rows)


def _centred(name: str, x: Any) -> tuple[np.ndarray, np.ndarray, float]:
    """Return centred columns over their largest absolute entry, constant columns, and this entry.

    Constant columns are True in a mask.
    """
    check_known("freedom is a step of the host", **{name: x})
    columns = np.asarray(x, np.float64).reshape(len(x), -1)
    check_finite(name, columns)
    unit = float(np.abs(columns).max(initial=0.0)) or 1.0
    # Squares of very large or small activities would overflow or vanish.
    columns = columns / unit
    sizes = np.abs(columns).max(0)
    columns = columns - columns.mean(0)
    lengths = np.linalg.norm(columns, axis=0)
    # The mean of n numbers in the precision of the representation is right up to one rounding.
    rounding = 8 * float(jnp.finfo(x.dtype).eps)
    is_constant = lengths <= rounding * sizes * np.sqrt(len(columns))
    if is_constant.all():
        fail(name, "differ between samples", "constant columns alone")
    return np.where(is_constant, 0.0, columns), is_constant, unit


def _largest(gram: np.ndarray, gains: np.ndarray) -> tuple[np.ndarray, float]:
    """Return w >= 0 that maximises b^T w / sqrt(w^T G w), and its relative residual.

    It minimises w^T G w / 2 - b^T w.
    """
    eigenvalues, vectors = eigh(gram)
    # Duplicated neurons make G singular.
    is_positive = eigenvalues > eigenvalues[-1] * len(gram) * np.finfo(float).eps
    vectors = vectors[:, is_positive]
    roots = np.sqrt(eigenvalues[is_positive])
    root = vectors * roots
    best = nnls(root.T, (vectors.T @ gains) / roots)[0]
    is_used = best > 0
    for _ in range(3):  # refinement by G itself, because the root of G loses about one digit
        errors = gains - gram @ best
        gram_of_used = gram[np.ix_(is_used, is_used)]
        step = np.linalg.lstsq(gram_of_used, errors[is_used], rcond=None)[0]
        moved = best.copy()
        moved[is_used] += step
        if (moved < 0).any():
            break
        best = moved
    slack = gram @ best - gains
    excess = np.abs(slack[best > 0]).max(initial=0.0)
    residual = max(0.0, float(-slack.min()), float(excess))
    scale = np.abs(gains).max()
    return best, residual / scale
