"""Fit an operator with a kernel, by exact Gram matrices K = k(X, X) / n and L = k(Y, Y) / n."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation._core.checks import is_traced
from dissociation._core.linalg import product, scale_of
from koopman._operators._diagnostics import refuse_large_gram, warn_constant, warn_directions, warn_large_alpha
from koopman._operators._estimators import Estimator, check_factor, refuse_singular, span
from koopman._operators._kernels import Linear, as_module, gram, kernel_alpha, own_gram
from koopman._operators._nystroem import Kernel
from koopman._operators._operator import KernelMap, Operator, unshrinking
from koopman._operators._pairs import check_square, checked_pairs
from koopman._operators._subspaces import Basis, KernelRegression, latent


def fit_with_kernel(
    estimator: Estimator,
    x: Array | np.ndarray,
    y: Array | np.ndarray,
    kernel: Kernel,
    observable: Array | np.ndarray | None,
) -> Operator:
    """Fit an operator with a kernel and no centres, see `koopman.fit`."""
    x, y, flat, shape = checked_pairs(x, y, observable, jnp.asarray)
    refuse_large_gram(x, 7 if estimator.rank is None else 3)  # measured: a full eigendecomposition takes more
    kernel, number = as_module(kernel), x.shape[0]
    solver, solvers = estimator.solver or "auto", estimator.kernel_solvers
    size, active, solver = latent(estimator.rank, number, "samples", solver, solvers)
    gram_x, gram_y = own_gram(kernel, x) / number, own_gram(kernel, y) / number
    if not is_traced(gram_x):
        check_square("kernel", float(jnp.trace(gram_x)), "a mean of k(x, x)", gram_x.dtype)
        warn_constant(x, gram_x)
    gram_x, gram_y, unit, trace = _in_units(gram_x, gram_y)
    given = estimator.alpha is not None
    alpha = jnp.asarray(estimator.alpha, x.dtype) / unit / unit if given else kernel_alpha(kernel, trace)
    known = not (is_traced(alpha) or is_traced(gram_x) or is_traced(gram_y))
    if solver == "auto":
        solver = estimator.choose_kernel_solver(gram_x, alpha, size)
        if solver == "krylov" and estimator.inverts_all and isinstance(kernel, Linear) and not given:
            solver = "spectral"  # the default `alpha` of rounding is too small for a factor
    problem = KernelRegression(gram_x, gram_y, alpha, active, size, solver)
    basis = span(estimator, problem)
    if known and estimator.inverts_all and solver == "krylov":
        check_factor(problem, basis)
    elif known and given and float(alpha) == 0.0:
        # Principal components have the leading eigenvalues of K in their basis, and ridge all.
        whole = estimator.inverts_all
        squares = np.linalg.eigvalsh(np.asarray(gram_x))[::-1] if whole else np.asarray(basis.values) ** 2
        refuse_singular(estimator, problem, squares, problem.cutoff, "the kernel matrix of `x`", "K")
    coefficients, dual, moments = _moments(problem, basis, gram(kernel, y, x), flat, unit)
    operator = Operator(
        encode=KernelMap(kernel, x, coefficients),
        dual=KernelMap(kernel, y, dual),
        mean_observable=jnp.zeros(flat.shape[1:], flat.dtype),
        observable_shape=shape,
        given=given,
        **moments,
    )
    if known and not is_traced(estimator.rank):
        which = "the mean of k(x, x)" if estimator.rank is None else f"eigenvalue {size} of k(X, X) / n"
        warn_large_alpha(alpha, basis.variance, trace, which, unit)
        warn_directions(operator, basis, problem.cutoff**0.5, estimator.rank)
    return operator


@jax.jit
def _in_units(gram_x: Array, gram_y: Array) -> tuple[Array, Array, Array, Array]:
    """Return both matrices in a unit of features, the unit, and the trace of K."""
    # In this unit squares neither overflow nor vanish.
    unit = scale_of(jnp.sqrt(jnp.trace(gram_x)))
    gram_x, gram_y = gram_x / unit / unit, gram_y / unit / unit
    return gram_x, gram_y, unit, jnp.trace(gram_x)


@jax.jit
def _moments(
    problem: KernelRegression, basis: Basis, across: Array, flat: Array, unit: Array
) -> tuple[Array, Array, dict[str, Array]]:
    """Return coefficients of the latent functions and of their duals, and the other fields of the operator."""
    gram_x, gram_y, number = problem.x, problem.y, problem.x.shape[0]
    # U = sum_i c_i phi(x_i) / sqrt(n), with latent functions u(x) = k(x, X) c / sqrt(n).
    latent_x = product(gram_x, basis.vectors) * number**0.5
    coefficients = basis.vectors / unit / unit * number**-0.5
    latent_y = product(across, coefficients)
    basis_gram = product(basis.vectors.T, latent_x) * number**-0.5
    penalty = problem.alpha * basis_gram
    weights = product(latent_x, unshrinking(penalty)) / number
    moments = {
        "core": product(weights.T, latent_y),
        "drift": jnp.zeros(latent_x.shape[1], latent_x.dtype),
        "readout": product(weights.T, flat),
        "mean_latent": jnp.mean(latent_x, 0),
        "gram_x": product(latent_x.T, latent_x) / number,
        "gram_y": product(latent_y.T, latent_y) / number,
        "cross_gram": product(latent_x.T, latent_y) / number,
        "dual_gram": product(weights.T, product(gram_y, weights)) * number * unit * unit,
        "basis_gram": basis_gram / unit / unit,
        "penalty": penalty,
        "singular_values": basis.values * unit,
        "alpha": problem.alpha * unit * unit,
        "effective_rank": jnp.sum(basis.values > problem.cutoff**0.5 * jnp.max(basis.values)),
    }
    return coefficients, weights, moments
