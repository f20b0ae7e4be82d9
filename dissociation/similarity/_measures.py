"""All measures of similarity with their properties."""

from collections.abc import Callable
from functools import partial, wraps
from math import inf, log, pi
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation._core.checks import check_call, check_choice, fail, fail_kind
from dissociation._core.conversion import describe
from dissociation._core.validation import validated
from dissociation.similarity import _dissimilarity as dissimilarity
from dissociation.similarity import _functional as functional
from dissociation.similarity import _kernels as kernels
from dissociation.similarity import _matched_correlation as matching
from dissociation.similarity import _predictivity as predictivity
from dissociation.similarity import _shapes as shapes
from dissociation.similarity._base import Form, Measure

TRACING_ERRORS = (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError)
"""Errors of functions that leave JAX under a trace."""


SIGNED = (-1.0, 1.0)
"""Range of correlations."""

ACUTE = (0.0, 0.5 * pi)
"""Range of angles between shapes."""

_ALL: list[Measure] = []
"""Measures in the order of the table."""


def _add(function: Callable[..., Array], form: Any, **properties: Any) -> None:
    """Append a measure to `_ALL`."""
    _ALL.append(Measure(function, form, **properties))


_add(
    kernels.debiased_cka,
    kernels.DEBIASED_CKA,
    equation="HSIC_u(K, L) / sqrt(HSIC_u(K, K) HSIC_u(L, L))",
    invariances="OSTP",
    range=SIGNED,
    cost="n p q or n^2 (p + q)",
    reference="Song et al. (2012); Nguyen, Raghu and Kornblith (2021)",
)
_add(
    kernels.linear_cka,
    kernels.LINEAR_CKA,
    equation="|Xc^T Yc|^2 / (|Xc^T Xc| |Yc^T Yc|)",
    invariances="OSTP",
    cost="n p q or n^2 (p + q)",
    reference="Kornblith et al. (2019)",
)
_add(
    shapes.procrustes_distance,
    shapes.PROCRUSTES,
    equation="sqrt(|Xc|^2 + |Yc|^2 - 2 nuc(Xc^T Yc))",
    invariances="OTP",
    metric=True,
    range=(0.0, inf),
    identical=0.0,
    population=False,
    cost="n p q + p q min(p, q)",
    reference="Williams et al. (2021); Ding et al. (2021)",
)
_add(
    shapes.angular_similarity,
    shapes.ANGULAR_SIMILARITY,
    equation="nuc(Xc^T Yc) / (|Xc| |Yc|)",
    invariances="OSTP",
    cost="n p q + p q min(p, q)",
    reference="Tang et al. (2020); Harvey et al. (2024)",
)
_add(
    shapes.angular_distance,
    shapes.ANGULAR_DISTANCE,
    equation="arccos(nuc(Xc^T Yc) / (|Xc| |Yc|))",
    invariances="OSTP",
    metric=True,
    range=ACUTE,
    identical=0.0,
    cost="n p q + p q min(p, q)",
    reference="Williams et al. (2021)",
)
_add(
    shapes.partial_whitening_distance,
    shapes.partial_whitening_form,
    equation="the angle between Z = Xc (a I + (1 - a) |Xc| / sqrt(p) (Xc^T Xc)^(-1/2)), of x and "
    "of y",
    invariances="OSTP",
    metric=True,
    range=ACUTE,
    identical=0.0,
    cost="n p^2 + n p q + p q min(p, q)",
    reference="Williams et al. (2021)",
)
_add(
    dissimilarity.rsa,
    dissimilarity.rsa_form,
    equation="corr(RDM(x), RDM(y)), of Euclidean distances",
    invariances="OSTP",
    range=SIGNED,
    cost="n^2 (p + q)",
    reference="Kriegeskorte et al. (2008); Nili et al. (2014)",
)
_add(
    dissimilarity.crossnobis_rsa,
    dissimilarity.crossnobis_rsa_form,
    equation="cos of RDMs (a_i - a_j)^T (b_i - b_j) / p, a and b the two halves of the rows",
    invariances="OSTP",
    range=SIGNED,
    repeats=2,
    cost="n^2 (p + q)",
    reference="Walther et al. (2016)",
)
_add(
    dissimilarity.mutual_knn,
    dissimilarity.mutual_knn_form,
    equation="mean_i |N_x(i) & N_y(i)| / k, N the k of the largest cosines",
    invariances="OSP",
    population=False,
    cost="n^2 (p + q)",
    reference="Huh et al. (2024)",
)
_add(
    dissimilarity.knn_jaccard,
    dissimilarity.knn_jaccard_form,
    equation="mean_i |N_x(i) & N_y(i)| / |N_x(i) | N_y(i)|",
    invariances="OSP",
    population=False,
    cost="n^2 (p + q)",
    reference="Klabunde et al. (2024)",
)
_add(
    shapes.cca,
    shapes.CCA,
    equation="sum_i rho_i / min(rank Xc, rank Yc), rho the singular values of Qx^T Qy",
    invariances="OSTPLD",
    cost="n p^2 + n p q + p q min(p, q)",
    reference="Hotelling (1936); Raghu et al. (2017)",
)
_add(
    shapes.cca_squared,
    shapes.CCA_SQUARED,
    equation="sum_i rho_i^2 / min(rank Xc, rank Yc)",
    invariances="OSTPLD",
    cost="n p^2 + n p q",
    reference="Ramsay et al. (1984)",
)
_add(
    shapes.svcca,
    shapes.svcca_form,
    equation="cca of the fewest principal components that hold 99 % of the variance",
    invariances="OSTP",
    cost="n p^2 + n p q + p q min(p, q)",
    reference="Raghu et al. (2017)",
)
_add(
    shapes.pwcca,
    shapes.PWCCA,
    equation="sum_i w_i rho_i, w_i proportional to sum_j |<h_i, x_j>|",
    invariances="STP",
    invariances_of_y="OSTPLD",
    symmetric=False,
    cost="n p^2 + n p q + p q min(p, q)",
    reference="Morcos et al. (2018)",
)
_add(
    shapes.gulp_distance,
    shapes.gulp_form,
    equation="sqrt(tr((Sxl^-1 Sx)^2) + tr((Syl^-1 Sy)^2) - 2 tr(Sxl^-1 Sxy Syl^-1 Syx)), "
    "Sxl = Sx + 0.01 tr(Sx) I",
    invariances="OSTP",
    metric=True,
    range=(0.0, inf),
    identical=0.0,
    cost="n p^2 + n p q",
    reference="Boix-Adsera et al. (2022)",
)
_add(
    predictivity.linear_predictivity,
    predictivity.predictivity_form,
    equation="1 - sum |y - prediction|^2 / sum |y - mean y|^2, least squares on the other of 5 "
    "folds",
    invariances="OSTPLD",
    invariances_of_y="OSTP",
    invariances_if_narrow="LD",
    symmetric=False,
    range=(-inf, 1.0),
    cost="5 n p^2 + 5 n p q",
    reference="Yamins et al. (2014)",
)
_add(
    kernels.rbf_cka,
    kernels.rbf_cka_form,
    equation="<HKH, HLH> / (|HKH| |HLH|), K = exp(-d^2 / (2 sigma^2)), sigma the median distance",
    invariances="OSTP",
    cost="n^2 (p + q)",
    reference="Kornblith et al. (2019)",
)
_add(
    kernels.debiased_rbf_cka,
    kernels.debiased_rbf_cka_form,
    equation="debiased_cka of K = exp(-d^2 / (2 sigma^2)), sigma the median distance",
    invariances="OSTP",
    range=SIGNED,
    cost="n^2 (p + q)",
    reference="Song et al. (2012)",
)
_add(
    kernels.distance_correlation,
    kernels.DISTANCE_CORRELATION,
    equation="sqrt(<A, B> / (|A| |B|)), A and B doubly centred distances",
    invariances="OSTP",
    cost="n^2 (p + q)",
    reference="Szekely, Rizzo and Bakirov (2007)",
)
_add(
    matching.hard_matching,
    matching.HARD_MATCHING,
    equation="max over matchings of the mean corr(x_i, y_j)",
    invariances="STPD",
    range=SIGNED,
    host=True,
    cost="n p q + max(p, q)^3 on the host",
    reference="Li et al. (2015)",
)
_add(
    matching.soft_matching,
    matching.SOFT_MATCHING,
    equation="max over T of sum_ij T_ij corr(x_i, y_j), marginals 1 / p and 1 / q",
    invariances="STPD",
    range=SIGNED,
    host=True,
    cost="n p q + lcm(p, q)^3 on the host",
    reference="Khosla and Williams (2024)",
)
_add(
    functional.disagreement,
    functional.DISAGREEMENT,
    equation="mean_i [argmax x_i is not argmax y_i]",
    metric=True,
    identical=0.0,
    same_width=True,
    cost="n classes",
    reference="Madani et al. (2004)",
)
_add(
    functional.jensen_shannon,
    functional.JENSEN_SHANNON,
    equation="mean_i (KL(a_i | m_i) + KL(b_i | m_i)) / 2, m = (a + b) / 2, a and b the softmax of "
    "x and y",
    range=(0.0, log(2.0)),
    identical=0.0,
    same_width=True,
    cost="n classes",
    reference="Lin (1991)",
)


MEASURES: dict[str, Measure] = {measure.name: measure for measure in _ALL}
"""Measures by name, with invariances, range, cost and source."""


def as_measure(measure: str | Measure | Callable[..., Array]) -> Measure:
    """Return the measure of a name or a function."""
    if isinstance(measure, Measure):
        return measure
    if isinstance(measure, str):
        check_choice("measure", measure, MEASURES)
        return MEASURES[measure]
    # A function of the table keeps its range, invariances and form.
    for listed in _ALL:
        if listed.function is measure:
            return listed
    return custom_measure(measure)


@validated
def custom_measure(
    function: Callable[..., Array],
    *,
    identical: float = inf,
    range: tuple[float, float] = (-inf, inf),
    symmetric: bool = False,
    population: bool = False,
    rows: bool = False,
) -> Measure:
    """Return a function of two representations as a measure.

    A function that divides the samples at random, as into folds, must decide by row numbers: an
    interval leaves samples out, and a division that changes with their number adds its own noise.
    With `groups`, row numbers are numbers of groups, so that a group is not divided.

    Args:
        function: Function f(x, y, **options) of JAX's operations, from [n, p] and [n, q] to one
            real number.
        identical: Value for a representation with itself, the largest of its range for a
            similarity, the smallest for a distance. Tests against chance depend on it.
        range: Smallest and largest value.
        symmetric: If True, x and y may be exchanged.
        population: If True, it converges as 1 / n with the number n of samples, and intervals
            remove its bias.
        rows: If True, `function` is f(x, y, rows, **options), with the numbers [n] of the samples
            among all samples.

    Returns:
        A measure for `pairwise`, `compare` and `permutation_test`.

    Raises:
        TypeError: If `function` is not callable.
    """
    form = partial(_opaque, function)
    if rows:
        form = partial(_of_rows, function)
        function = _with_all_rows(function)
    return Measure(
        function,
        form,
        range=range,
        identical=identical,
        symmetric=symmetric,
        population=population,
    )


def _opaque(function: Callable[..., Array], **options: Any) -> Form:
    """Return the form of a function of two representations."""
    check_call("measure", partial(function, **options), ("x", "y"))
    compare = eqx.Partial(_one_number, function, **options)
    return Form(jnp.asarray, compare)


def _with_all_rows(function: Callable[..., Array]) -> Callable[..., Array]:
    """Return a function of two representations that passes the numbers of all rows."""

    @wraps(function)
    def of_all(x, y, **options):
        rows = jnp.arange(len(x))
        return function(x, y, rows, **options)

    return of_all


def _of_rows(function: Callable[..., Array], **options: Any) -> Form:
    """Return the form of a function of two representations and their row numbers."""
    check_call("measure", partial(function, **options), ("x", "y", "rows"))
    compare = eqx.Partial(_number_of_rows, function, **options)
    return Form(_beside_rows, compare, labels=np.arange)


def _beside_rows(x: Array, rows: Array) -> tuple[Array, Array]:
    return x, rows


def _number_of_rows(
    function: Callable[..., Array], a: tuple[Array, Array], b: tuple[Array, Array], **options: Any
) -> Array:
    x, rows = a
    y, _ = b
    return _one_number(function, x, y, rows, **options)


def _one_number(function: Callable[..., Array], *arrays: Array, **options: Any) -> Array:
    """Return the value of a user's function, or raise unless it is one real number."""
    try:
        value = function(*arrays, **options)
    except TRACING_ERRORS as error:
        advice = f"It is compiled, and {type(error).__name__} came"
        fail_kind("measure", "be a function of JAX's operations", describe(function), advice)

    requirement = "return one real number for two representations"
    if not isinstance(value, (jax.Array, np.ndarray, np.generic, int, float)):
        fail("measure", requirement, describe(value))
    array = jnp.asarray(value)
    if array.shape or not jnp.issubdtype(array.dtype, jnp.floating):
        fail("measure", requirement, f"{array.dtype} of shape {array.shape}")
    return array
