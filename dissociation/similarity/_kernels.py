"""Centred kernel alignment and distance correlation."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from dissociation._core.checks import check_positive
from dissociation._core.conversion import to_device
from dissociation._core.distances import root, squared_distances, typical
from dissociation._core.linalg import product
from dissociation._core.types import Scalar
from dissociation._core.validation import validated
from dissociation.similarity import _base as base
from dissociation.similarity._base import Features, Form, OtherFeatures, Prepared, Score
from dissociation.similarity._leave_outs import without_blocks

BLOCKS = 4
"""Number of blocks of rows of a symmetric matrix.

With 4 blocks, 5 / 8 of the entries are computed.
"""

LONG = 8
"""Number of longest samples that debiased products over features separate."""


Gram = Callable[..., Array]
"""Function of features [n, p], and perhaps of flags of pairs [n, n], to a matrix over samples."""

Centring = Callable[..., Array]
"""Function of a matrix over samples, and perhaps of flags of pairs [n, n], to its centred form."""


def _times(matrix: Array, vector: Array) -> Array:
    """Return the product of a matrix and a vector."""
    columns = product(matrix, vector[:, None])
    return columns[:, 0]


def _without_diagonal(matrix: Array) -> Array:
    is_diagonal = jnp.eye(len(matrix), dtype=bool)
    return jnp.where(is_diagonal, 0.0, matrix)


def double_centred(gram: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """Return H K H with H = I - 1 1^T / n."""
    rows = gram - jnp.mean(gram, 1, keepdims=True)
    return rows - jnp.mean(rows, 0, keepdims=True)


def u_centred(gram: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """Return the matrix centred so that its off-diagonal rows sum to zero, with a zero diagonal.

    With K~ = K without its diagonal, A_ij = K~_ij - (r_i + r_j) / (n - 2) + s / ((n - 1)(n - 2)), r
    = K~ 1, s = 1^T r. HSIC_u(K, L) = <A, B> / (n (n - 3)). Source: Szekely and Rizzo (2014).
    """
    number = len(gram)
    off = 1 - jnp.eye(number, dtype=gram.dtype)
    gram = gram * off
    rows = jnp.sum(gram, 1) / (number - 2)
    shift = rows - 0.5 * jnp.sum(rows) / (number - 1)
    return (gram - shift[:, None] - shift[None]) * off


def u_centred_apart(gram: Float[Array, "n n"], apart: Bool[Array, "n n"]) -> Float[Array, "n n"]:
    """Return the matrix of pairs `apart`, of two groups, less the nearest a_i + a_j, and else zero.

    Its rows sum to zero. With one sample in each group it is `u_centred`, and copies of samples
    change no inner product of two such matrices of norm 1.
    """
    number = len(gram)
    gram = jnp.where(apart, gram, 0.0)
    weights = apart.astype(gram.dtype)
    sizes = number - jnp.sum(weights, 1)
    rows = jnp.sum(gram, 1)

    # Sums of r_i = (n - m_i) a_i + sum_j a_j - (sum over the group of i) over all samples, and over
    # a group.
    spare = number - 2 * sizes
    total = jnp.sum(rows / spare) / (1 + jnp.sum(1 / spare))
    rows_outside = _times(weights, rows)
    of_group = (jnp.sum(rows) - rows_outside - sizes * total) / spare
    shift = (rows - total + of_group) / (number - sizes)
    return jnp.where(apart, gram - shift[:, None] - shift[None], 0.0)


def double_centred_apart(
    gram: Float[Array, "n n"], apart: Bool[Array, "n n"]
) -> Float[Array, "n n"]:
    """Return H K H, with samples of one group as similar as a sample is to itself."""
    lengths = jnp.diagonal(gram)
    return double_centred(jnp.where(apart, gram, lengths[:, None]))


def linear_gram(x: Array, apart: Array | None = None) -> Array:
    """Return Xc Xc^T, up to a power of four."""
    x, _ = base.centred(x)
    return product(x, x.T)


def distance_gram(x: Array, apart: Array | None = None) -> Array:
    """Return distances, up to a power of two."""
    x, _ = base.scaled(x)
    return root(squared_distances(x))


def rbf_gram(x: Array, apart: Array | None = None, *, scale: Scalar) -> Array:
    """Return exp(-d^2 / (2 sigma^2)), with sigma `scale` times the median distance of pairs.

    With `apart`, the median is over those pairs.
    """
    x, _ = base.scaled(x)
    square = squared_distances(x)
    distance = typical(root(square), apart)
    sigma = jnp.asarray(scale, x.dtype) * distance
    return jnp.exp(-square / (2 * sigma**2))


def _unit_gram(gram: Gram, centring: Centring, x: Array) -> Prepared:
    """Return a centred matrix over samples, of norm 1."""
    matrix = gram(x)
    centred = base.apart_from_rounding(centring(matrix), matrix)
    entries = base.unit(centred)
    mean = _mean_part(jnp.trace(entries), len(x))
    return Prepared(entries, mean)


def _gram_apart(gram: Gram, centring: Centring, x: Array, groups: Array) -> Prepared:
    """Return a centred matrix over pairs of samples of two groups, of norm 1."""
    apart = groups[:, None] != groups[None]
    matrix = gram(x, apart)
    centred = base.apart_from_rounding(centring(matrix, apart), matrix)
    mean = jnp.zeros((), x.dtype)
    return Prepared(base.unit(centred), mean)


def _form_apart(
    gram: Gram,
    centring: Centring,
    compare: Callable[..., Array] = base.inner,
    minimum: int = 2,
) -> Form:
    """Return the form for samples in groups."""
    prepare = eqx.Partial(_gram_apart, gram, centring)
    return Form(prepare, compare, minimum=minimum, labels=np.arange, outside=1)


def _half_gram(debiased: bool, x: Array) -> Prepared:
    """Return the blocks of K on and above the diagonal.

    By their weights, `inner` of blocks equals that of whole matrices.
    """
    x, _ = base.centred(x)
    number = len(x)
    width = -(-number // BLOCKS)
    lengths = jnp.sum(x**2, 1)
    # As in `u_centred`, where rows sum to zero.
    shift = (0.5 * jnp.sum(lengths) / (number - 1) - lengths) / (number - 2)

    blocks = []
    for start in range(0, number, width):
        rows = slice(start, start + width)
        count = number - start
        weights = jnp.where(jnp.arange(count) < width, 1, 2**0.5)
        weighted = x[start:] * weights[:, None]
        block = product(x[rows], weighted.T)
        if debiased:
            is_diagonal = jnp.eye(len(block), count, dtype=bool)
            shifts = shift[rows, None] + shift[None, start:]
            block = jnp.where(is_diagonal, 0, block - shifts * weights[None])
        blocks.append(block)

    sizes = jnp.stack([jnp.max(jnp.abs(block)) for block in blocks])
    size = base.apart_from_rounding(sizes, lengths)[0]
    squares = sum(jnp.sum(block**2) for block in blocks)
    norm = jnp.sqrt(squares) + 0 * size  # NaN if only rounding remains
    trace = 0 if debiased else jnp.sum(lengths)
    mean = _mean_part(trace / norm, number)
    return Prepared([block / norm for block in blocks], mean)


def _mean_part(trace: Array, number: int) -> Array:
    # Kazi-Aoual, Hitier, Sabatier and Lebreton (1995): the mean of <A, P B P^T> over permutations
    # P, rows of A and B summing to zero, is tr A tr B / (n - 1).
    return trace / (number - 1) ** 0.5


def _plain_features(x: Array) -> Prepared:
    """Return centred features, divided so that |Xc^T Xc| is 1."""
    x, _ = base.centred(x)
    covariance = product(x.T, x)
    norm = jnp.sqrt(jnp.sum(covariance**2))
    trace = jnp.sum(x**2) / norm
    mean = _mean_part(trace, len(x))
    return Prepared(x / jnp.sqrt(norm), mean)


class _Debiased(NamedTuple):
    """Representation about the mean of all but its longest samples."""

    entries: Array
    lengths: Array  # squared, of samples
    sums: Array  # of rows of K without its diagonal: x_i . (sum of the other x)


def _longest(lengths: Array) -> tuple[Array, Array]:
    """Return indices of the longest samples, and flags of all but these, [n, 1]."""
    number = len(lengths)
    count = min(LONG, number // 4)
    # Long samples would cancel what all others have in common.
    _, longest = lax.top_k(lax.stop_gradient(lengths), count)
    is_short = jnp.ones(number, bool).at[longest].set(False)
    return longest, is_short[:, None]


def _debiased_features(x: Array) -> _Debiased:
    """Return features whose debiased product with themselves is 1."""
    x, _ = base.centred(x)
    longest, is_short = _longest(jnp.sum(x**2, 1))
    num_short = len(x) - len(longest)
    short_mean = jnp.sum(jnp.where(is_short, x, 0.0), 0) / num_short
    x = x - short_mean[None]

    lengths = jnp.sum(x**2, 1)
    short_sum = jnp.sum(jnp.where(is_short, x, 0.0), 0)
    x_long = x[longest]
    sums = _times(x, short_sum + jnp.sum(x_long, 0)) - lengths
    among = _without_diagonal(product(x_long, x_long.T))
    long_sums = _times(x_long, short_sum) + jnp.sum(among, 1)
    sums = sums.at[longest].set(long_sums)

    features = _Debiased(x, lengths, sums)
    square, terms = _debiased_product(features, features)
    norm = jnp.sqrt(base.apart_from_rounding(square, terms))
    return _Debiased(x / jnp.sqrt(norm), lengths / norm, sums / norm)


def _debiased_product(a: _Debiased, b: _Debiased) -> tuple[Array, Array]:
    """Return the product, and the sizes of its terms, whose rounding it carries."""
    n = float(len(a.entries))  # products of integers are soon beyond 32 bits
    squares = a.lengths * b.lengths
    longest, is_short = _longest(squares)
    x_long = a.entries[longest]
    y_long = b.entries[longest]
    x = jnp.where(is_short, a.entries, 0.0)
    y = jnp.where(is_short, b.entries, 0.0)

    crossed = product(x.T, y)
    long_products = product(x_long, x_long.T) * product(y_long, y_long.T)
    among = _without_diagonal(long_products)
    short_squares = jnp.where(is_short[:, 0], squares, 0.0)
    long_crossed = product(x_long, crossed)
    sums = jnp.sum(a.sums) * jnp.sum(b.sums)
    terms = [
        jnp.sum(crossed**2),
        -jnp.sum(short_squares),
        jnp.sum(among),
        2 * jnp.sum(long_crossed * y_long),
        -2 / (n - 2) * jnp.sum(a.sums * b.sums),
        sums / ((n - 1) * (n - 2)),
    ]
    total = sum(terms, jnp.zeros_like(terms[0]))
    return total, jnp.stack([jnp.abs(term) for term in terms])


def _linear_product(a: Prepared, b: Prepared) -> Array:
    crossed = product(a.entries.T, b.entries)
    return jnp.sum(crossed**2)


def _no_mean(a: _Debiased, b: _Debiased) -> Array:
    lengths = a.lengths[0] * b.lengths[0]
    return jnp.zeros_like(lengths)


def _clipped_product(a: _Debiased, b: _Debiased) -> Array:
    total, _ = _debiased_product(a, b)
    return jnp.clip(total, -1.0, 1.0)


# Products over features are cheaper for few features, and products over samples for many features
# or pairs. The moments of the null distribution need the matrix over samples.
LINEAR_CKA = Form(
    _plain_features,
    _linear_product,
    base.inner_mean,
    eqx.Partial(_unit_gram, linear_gram, lambda gram: gram),  # of centred features
    half=eqx.Partial(_half_gram, False),
    leave_outs=partial(without_blocks, False),
)

DEBIASED_CKA = Form(
    _debiased_features,
    _clipped_product,
    _no_mean,
    eqx.Partial(_unit_gram, linear_gram, u_centred),
    half=eqx.Partial(_half_gram, True),
    minimum=4,
    leave_outs=partial(without_blocks, True),
    apart=_form_apart(linear_gram, u_centred_apart, minimum=4),
)


def _root_inner(a: Prepared, b: Prepared) -> Array:
    return root(base.inner(a, b))  # not negative but for rounding


DISTANCE_CORRELATION = Form(
    eqx.Partial(_unit_gram, distance_gram, double_centred),
    _root_inner,
    apart=_form_apart(distance_gram, double_centred_apart, _root_inner),
)


@validated
def rbf_form(
    centring: Centring, centring_apart: Centring, minimum: int, *, scale: Scalar = 1.0
) -> Form:
    check_positive("scale", scale)
    kernel = eqx.Partial(rbf_gram, scale=to_device(scale, float))
    gram = eqx.Partial(_unit_gram, kernel, centring)
    apart = _form_apart(kernel, centring_apart, minimum=minimum)
    return Form(gram, base.inner, base.inner_mean, gram, minimum=minimum, apart=apart)


rbf_cka_form = partial(rbf_form, double_centred, double_centred_apart, 2)
debiased_rbf_cka_form = partial(rbf_form, u_centred, u_centred_apart, 4)


@validated(finite=("x", "y"))
def linear_cka(x: Features, y: OtherFeatures) -> Score:
    """Return linear centred kernel alignment, |Xc^T Yc|^2 / (|Xc^T Xc| |Yc^T Yc|).

    It is biased: independent isotropic representations score about sqrt(p q / ((n + p)(n + q))).
    See `debiased_cka`.

    Args:
        x: Features, [n, p].
        y: Features, [n, q].

    Returns:
        Similarity from 0 to 1; 1 for representations that differ by rotation, scale and
        translation.

    Raises:
        ValueError: If the numbers of samples differ, there is only one, or known samples are all
            equal.

    References:
        Kornblith, Norouzi, Lee and Hinton (2019), Similarity of neural network representations
        revisited, eq. 4.

    Example:
        >>> x = jnp.eye(3)
        >>> round(float(linear_cka(x, 2 * x + 1)), 3)
        1.0
    """
    return base.evaluate(LINEAR_CKA, x, y)


@validated(finite=("x", "y"))
def debiased_cka(x: Features, y: OtherFeatures) -> Score:
    r"""Return linear CKA from unbiased estimates, zero on average for independent representations.

        HSIC_u(K, L) / sqrt(HSIC_u(K, K) HSIC_u(L, L)),
        HSIC_u(K, L) = [sum K~ * L~ + 1'K~1 1'L~1 / ((n-1)(n-2)) - 2 1'K~L~1 / (n-2)] / (n (n-3)),

    with K = X X^T, and K~ without its diagonal. The ratio is not itself unbiased.

    Args:
        x: Features, [n, p], at least 4 samples.
        y: Features, [n, q].

    Returns:
        Similarity up to 1, negative if there is less in common than by chance.

    References:
        Song, Smola, Gretton, Borgwardt and Bedo (2012), Feature selection via dependence
        maximization, theorem 2. Nguyen, Raghu and Kornblith (2021), Do wide and deep networks learn
        the same things?, eq. 3.
    """
    return base.evaluate(DEBIASED_CKA, x, y)


@validated(finite=("x", "y"))
def rbf_cka(x: Features, y: OtherFeatures, *, scale: Scalar = 1.0) -> Score:
    """Return CKA with kernels exp(-d^2 / (2 sigma^2)), sigma = `scale` times the median distance.

    The median is over pairs i < j of each representation, replaced by the mean if more than half of
    the pairs coincide.

    Args:
        x: Features, [n, p].
        y: Features, [n, q].
        scale: Positive bandwidth in median distances.

    Returns:
        Similarity from 0 to 1.

    References:
        Kornblith et al. (2019), section 3.
    """
    return base.evaluate(rbf_cka_form(scale=scale), x, y)


@validated(finite=("x", "y"))
def debiased_rbf_cka(x: Features, y: OtherFeatures, *, scale: Scalar = 1.0) -> Score:
    """Return `rbf_cka` from unbiased estimates, as `debiased_cka`.

    Args:
        x: Features, [n, p], at least 4 samples.
        y: Features, [n, q].
        scale: Positive bandwidth in median distances.

    Returns:
        Similarity up to 1, perhaps negative.

    References:
        Song et al. (2012), theorem 2.
    """
    return base.evaluate(debiased_rbf_cka_form(scale=scale), x, y)


@validated(finite=("x", "y"))
def distance_correlation(x: Features, y: OtherFeatures) -> Score:
    """Return distance correlation, sqrt(<A, B> / (|A| |B|)).

    A and B are doubly centred matrices of Euclidean distances.

    In the limit it is zero if and only if x and y are independent. At finite n it is biased
    upwards: independent normal features score 0.41 at n = 1000 and p = q = 50.

    Args:
        x: Features, [n, p].
        y: Features, [n, q].

    Returns:
        Correlation from 0 to 1.

    References:
        Szekely, Rizzo and Bakirov (2007), Measuring and testing dependence by correlation of
        distances, eq. 2.10.
    """
    return base.evaluate(DISTANCE_CORRELATION, x, y)
