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
from dissociation.similarity import _matching as matching
from dissociation.similarity import _predictivity as predictivity
from dissociation.similarity import _shapes as shapes
from dissociation.similarity._base import Form, Measure

_ALL = (
    Measure(
        kernels.debiased_cka, kernels.DEBIASED_CKA,
        equation="HSIC_u(K, L) / sqrt(HSIC_u(K, K) HSIC_u(L, L))",
        invariances="OSTP", range=(-1.0, 1.0), cost="n p q or n^2 (p + q)",
        reference="Song et al. (2012); Nguyen, Raghu and Kornblith (2021)",
    ),
    Measure(
        kernels.linear_cka, kernels.LINEAR_CKA,
        equation="|Xc^T Yc|^2 / (|Xc^T Xc| |Yc^T Yc|)",
        invariances="OSTP", cost="n p q or n^2 (p + q)", reference="Kornblith et al. (2019)",
    ),
    Measure(
        shapes.procrustes_distance, shapes.PROCRUSTES,
        equation="sqrt(|Xc|^2 + |Yc|^2 - 2 nuc(Xc^T Yc))",
        invariances="OTP", metric=True, range=(0.0, inf), identical=0.0, population=False, cost="n p q + p q min(p, q)",
        reference="Williams et al. (2021); Ding et al. (2021)",
    ),
    Measure(
        shapes.angular_similarity, shapes.ANGULAR_SIMILARITY,
        equation="nuc(Xc^T Yc) / (|Xc| |Yc|)",
        invariances="OSTP", cost="n p q + p q min(p, q)", reference="Tang et al. (2020); Harvey "
                                                                    "et al. (2024)",
    ),
    Measure(
        shapes.angular_distance, shapes.ANGULAR_DISTANCE,
        equation="arccos(nuc(Xc^T Yc) / (|Xc| |Yc|))",
        invariances="OSTP", metric=True, range=(0.0, 0.5 * pi), identical=0.0, cost="n p q + p q "
                                                                                    "min(p, q)",
        reference="Williams et al. (2021)",
    ),
    Measure(
        shapes.partial_whitening_distance, shapes.partial_whitening_form,
        equation="the angle between Z = Xc (a I + (1 - a) |Xc| / sqrt(p) (Xc^T Xc)^(-1/2)), of x "
                 "and of y",
        invariances="OSTP", metric=True, range=(0.0, 0.5 * pi), identical=0.0, cost="n p^2 + n p "
                                                                                    "q + p q "
                                                                                    "min(p, q)",
        reference="Williams et al. (2021)",
    ),
    Measure(
        dissimilarity.rsa, dissimilarity.rsa_form,
        equation="corr(RDM(x), RDM(y)), of Euclidean distances",
        invariances="OSTP", range=(-1.0, 1.0), cost="n^2 (p + q)",
        reference="Kriegeskorte et al. (2008); Nili et al. (2014)",
    ),
    Measure(
        dissimilarity.crossnobis_rsa, dissimilarity.crossnobis_rsa_form,
        equation="cos of RDMs (a_i - a_j)^T (b_i - b_j) / p, a and b the two halves of the rows",
        invariances="OSTP", range=(-1.0, 1.0), repeats=2, cost="n^2 (p + q)", reference="Walther "
                                                                                        "et al. "
                                                                                        "(2016)",
    ),
    Measure(
        dissimilarity.mutual_knn, dissimilarity.mutual_knn_form,
        equation="mean_i |N_x(i) & N_y(i)| / k, N the k of the largest cosines",
        invariances="OSP", population=False, cost="n^2 (p + q)", reference="Huh et al. (2024)",
    ),
    Measure(
        dissimilarity.knn_jaccard, dissimilarity.knn_jaccard_form,
        equation="mean_i |N_x(i) & N_y(i)| / |N_x(i) | N_y(i)|",
        invariances="OSP", population=False, cost="n^2 (p + q)", reference="Klabunde et al. (2024)",
    ),
    Measure(
        shapes.cca, shapes.CCA,
        equation="sum_i rho_i / min(rank Xc, rank Yc), rho the singular values of Qx^T Qy",
        invariances="OSTPLD", cost="n p^2 + n p q + p q min(p, q)", reference="Hotelling (1936); "
                                                                              "Raghu et al. (2017)",
    ),
    Measure(
        shapes.cca_squared, shapes.CCA_SQUARED,
        equation="sum_i rho_i^2 / min(rank Xc, rank Yc)",
        invariances="OSTPLD", cost="n p^2 + n p q", reference="Ramsay et al. (1984)",
    ),
    Measure(
        shapes.svcca, shapes.svcca_form,
        equation="cca of the fewest principal components that hold 99 % of the variance",
        invariances="OSTP", cost="n p^2 + n p q + p q min(p, q)", reference="Raghu et al. (2017)",
    ),
    Measure(
        shapes.pwcca, shapes.PWCCA,
        equation="sum_i w_i rho_i, w_i proportional to sum_j |<h_i, x_j>|",
        invariances="STP", invariances_of_y="OSTPLD", symmetric=False, cost="n p^2 + n p q + p q "
                                                                            "min(p, q)",
        reference="Morcos et al. (2018)",
    ),
    Measure(
        shapes.gulp_distance, shapes.gulp_form,
        equation="sqrt(tr((Sxl^-1 Sx)^2) + tr((Syl^-1 Sy)^2) - 2 tr(Sxl^-1 Sxy Syl^-1 Syx)), Sxl "
                 "= Sx + 0.01 tr(Sx) I",
        invariances="OSTP", metric=True, range=(0.0, inf), identical=0.0, cost="n p^2 + n p q",
        reference="Boix-Adsera et al. (2022)",
    ),
    Measure(
        predictivity.linear_predictivity, predictivity.predictivity_form,
        equation="1 - sum |y - prediction|^2 / sum |y - mean y|^2, least squares on the other of "
                 "5 folds",
        invariances="OSTPLD", invariances_of_y="OSTP", invariances_if_narrow="LD", symmetric=False, range=(-inf, 1.0),
        cost="5 n p^2 + 5 n p q", reference="Yamins et al. (2014)",
    ),
    Measure(
        kernels.rbf_cka, partial(kernels.rbf_form, kernels.double_centred, kernels.double_centred_apart, 2),
        equation="<HKH, HLH> / (|HKH| |HLH|), K = exp(-d^2 / (2 sigma^2)), sigma the median "
                 "distance",
        invariances="OSTP", cost="n^2 (p + q)", reference="Kornblith et al. (2019)",
    ),
    Measure(
        kernels.debiased_rbf_cka, partial(kernels.rbf_form, kernels.u_centred, kernels.u_centred_apart, 4),
        equation="debiased_cka of K = exp(-d^2 / (2 sigma^2)), sigma the median distance",
        invariances="OSTP", range=(-1.0, 1.0), cost="n^2 (p + q)", reference="Song et al. (2012)",
    ),
    Measure(
        kernels.distance_correlation, kernels.DISTANCE_CORRELATION,
        equation="sqrt(<A, B> / (|A| |B|)), A and B doubly centred distances",
        invariances="OSTP", cost="n^2 (p + q)", reference="Szekely, Rizzo and Bakirov (2007)",
    ),
    Measure(
        matching.hard_matching, matching.HARD_MATCHING,
        equation="max over matchings of the mean corr(x_i, y_j)",
        invariances="STPD", range=(-1.0, 1.0), host=True, cost="n p q + max(p, q)^3 on the host",
        reference="Li et al. (2015)",
    ),
    Measure(
        matching.soft_matching, matching.SOFT_MATCHING,
        equation="max over T of sum_ij T_ij corr(x_i, y_j), marginals 1 / p and 1 / q",
        invariances="STPD", range=(-1.0, 1.0), host=True, cost="n p q + lcm(p, q)^3 on the host",
        reference="Khosla and Williams (2024)",
    ),
    Measure(
        functional.disagreement, functional.DISAGREEMENT,
        equation="mean_i [argmax x_i is not argmax y_i]",
        invariances="", metric=True, identical=0.0, same_width=True, cost="n classes", reference="Madani et al. (2004)",
    ),
    Measure(
        functional.jensen_shannon, functional.JENSEN_SHANNON,
        equation="mean_i (KL(a_i | m_i) + KL(b_i | m_i)) / 2, m = (a + b) / 2, a and b the "
                 "softmax of x and y",
        invariances="", range=(0.0, log(2.0)), identical=0.0, same_width=True, cost="n classes", reference="Lin (1991)",
    ),
)  # fmt: skip

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
    known = (one for one in MEASURES.values() if one.function is measure)
    return next(known, None) or custom_measure(measure)


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
    return Measure(
        _with_all_rows(function) if rows else function,
        partial(_of_rows if rows else _opaque, function),
        range=range,
        identical=identical,
        symmetric=symmetric,
        population=population,
    )


def _opaque(function: Callable[..., Array], **options: Any) -> Form:
    check_call("measure", partial(function, **options), ("x", "y"))
    return Form(jnp.asarray, eqx.Partial(_one_number, function, **options))


def _with_all_rows(function: Callable[..., Array]) -> Callable[..., Array]:
    @wraps(function)
    def of_all(x: Any, y: Any, **options: Any) -> Array:
        return function(x, y, jnp.arange(len(x)), **options)

    return of_all


def _of_rows(function: Callable[..., Array], **options: Any) -> Form:
    check_call("measure", partial(function, **options), ("x", "y", "rows"))
    return Form(_beside_rows, eqx.Partial(_number_of_rows, function, **options), labels=np.arange)


def _beside_rows(x: Array, rows: Array) -> tuple[Array, Array]:
    return x, rows


def _number_of_rows(
    function: Callable[..., Array], a: tuple[Array, Array], b: tuple[Array, Array], **options: Any
) -> Array:
    x, rows = a
    return _one_number(function, x, b[0], rows, **options)


def _one_number(function: Callable[..., Array], *arrays: Array, **options: Any) -> Array:
    try:
        value = function(*arrays, **options)
    except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError) as error:
        advice = f"It is compiled, and {type(error).__name__} came"
        fail_kind("measure", "be a function of JAX's operations", describe(function), advice)
    array = (
        jnp.asarray(value)
        if isinstance(value, (jax.Array, np.ndarray, np.generic, int, float))
        else None
    )
    if array is None or array.shape or not jnp.issubdtype(array.dtype, jnp.floating):
        got = describe(value) if array is None else f"{array.dtype} of shape {array.shape}"
        fail("measure", "return one real number for two representations", got)
    return array
