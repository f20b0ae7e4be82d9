"""Functional similarity: comparisons of the outputs of two networks."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.conversion import to_device
from dissociation._core.types import Classes
from dissociation._core.validation import validated
from dissociation.similarity._base import Form, Prepared, Score, evaluate, in_common_dtype

Logits = Float[Array | np.ndarray, "n classes"]


def _both_logits(x: Array) -> Array:
    """Return logits of two classes for one column, which is the logit of the second."""
    if x.shape[1] != 1:
        return x
    return jnp.concatenate([jnp.zeros_like(x), x], 1)


def _predictions(x: Array) -> Prepared:
    x = _both_logits(x)
    largest = jnp.argmax(x, 1)
    classes = jax.nn.one_hot(largest, x.shape[1], dtype=x.dtype)
    return Prepared(classes, jnp.mean(classes, 0))


def _agreement(a: Prepared, b: Prepared) -> Array:
    """Return the fraction of samples with different classes."""
    number = len(a.entries)
    # Counts are exact, while a fraction near 1 may round.
    num_equal = jnp.sum(a.entries * b.entries)
    return (number - num_equal) / number


def _log_probabilities(x: Array) -> Array:
    return jax.nn.log_softmax(_both_logits(x), axis=1)


def _divergence(a: Array, b: Array) -> Array:
    """Return the mean Jensen-Shannon divergence of logarithms of probabilities."""
    two = jnp.asarray(2, a.dtype)
    middle = jnp.logaddexp(a, b) - jnp.log(two)

    def relative_entropy(logs):
        terms = jnp.exp(logs) * (logs - middle)
        return jnp.sum(jnp.where(logs > -jnp.inf, terms, 0.0), 1)

    divergences = 0.5 * (relative_entropy(a) + relative_entropy(b))
    return jnp.maximum(jnp.mean(divergences), 0.0)


DISAGREEMENT = Form(_predictions, _agreement, lambda a, b: 1 - jnp.sum(a.mean * b.mean), minimum=1)

JENSEN_SHANNON = Form(_log_probabilities, _divergence, minimum=1)


@validated(finite=("x", "y"))
def disagreement(x: Logits, y: Logits) -> Score:
    """Return the fraction of samples to which two networks assign different classes.

    Args:
        x: Logits or probabilities of one network, [n, classes]. One column is the logit of the
            second of two classes.
        y: Logits or probabilities of the other for the same samples.

    Returns:
        Metric from 0 to 1, at most 2 e for two networks of error e. Its derivative is zero.

    Raises:
        ValueError: If shapes differ.

    References:
        Madani, Pennock and Flake (2004), Co-validation: using model disagreement on unlabeled data
        to validate classification algorithms.
    """
    return evaluate(DISAGREEMENT, x, y)


@validated(finite=("x", "y"))
def jensen_shannon(x: Logits, y: Logits) -> Score:
    """Return the mean over samples of the Jensen-Shannon divergence of predicted distributions.

    (KL(a | m) + KL(b | m)) / 2 with the softmax a and b of logits and m = (a + b) / 2.

    Args:
        x: Logits of one network, [n, classes]. One column is the logit of the second of two
            classes.
        y: Logits of the other for the same samples.

    Returns:
        Divergence from 0 to log 2, in nats.

    Raises:
        ValueError: If shapes differ.

    References:
        Lin (1991), Divergence measures based on the Shannon entropy, eq. 4.1.
    """
    return evaluate(JENSEN_SHANNON, x, y)


@validated
def min_max_disagreement(x: Logits, y: Logits, labels: Classes) -> Score:
    """Return the disagreement d relative to its bounds.

        (d - |e_x - e_y|) / (min(e_x + e_y, 1) - |e_x - e_y|)

    e_x and e_y are the error rates of the two networks.

    Args:
        x: Logits of one network, [n, classes]. One column is the logit of the second of two
            classes.
        y: Logits of the other.
        labels: True classes.

    Returns:
        Ratio from 0 to 1, NaN if the bounds coincide, as for a network without errors. With more
        than two classes, 1 needs errors that never agree.

    Raises:
        ValueError: If shapes differ, or known labels are out of range.

    References:
        Klabunde, Schumacher, Strohmaier and Lemmerich (2023), Similarity of neural network models:
        a survey of functional and representational measures, section 4.
    """
    distance = disagreement(x, y)
    x, y = in_common_dtype(x, y)
    return _within_bounds(distance, x, y, to_device(labels))


@jax.jit
def _within_bounds(distance: Array, x: Array, y: Array, labels: Array) -> Array:
    """Return a disagreement relative to its bounds by the error rates."""

    def error_rate(x):
        logits = _both_logits(x)
        return jnp.mean(jnp.argmax(logits, 1) != labels, dtype=x.dtype)

    error_x = error_rate(x)
    error_y = error_rate(y)
    # Networks that differ in error must disagree on the difference, and agree wherever both are
    # right.
    low = jnp.abs(error_x - error_y)
    room = jnp.minimum(error_x + error_y, 1.0) - low
    ratio = (distance - low) / jnp.where(room > 0, room, 1.0)
    return jnp.where(room > 0, ratio, jnp.nan)
