"""Evolution operators in the space of a kernel: exact Gram matrices, and Nystroem features for many samples.

With K = k(X, X) / n and L = k(Y, Y) / n an estimator is U = sum_i c_i phi(x_i) / sqrt(n), so that its latent functions
are u(x) = k(x, X) c / sqrt(n):

- principal components (kernel extended dynamic mode decomposition): c = P Lambda^(-1/2) (Lambda + alpha)^(-1/2) with
  the leading eigenpairs of K; ridge regression is the case of all of them;
- reduced rank: c = (K + alpha I)^(-1) v with the leading eigenvectors of L T v = sigma^2 v, T = K (K + alpha I)^(-1),
  normalised to v^T T v = 1.

Gram matrices hold the squares of what feature matrices hold: eigenvalues of C_x below 8 times the rounding unit of the
largest (1e-6 in float32) count as zero in the dense routes, and `alpha` has to lie well above rounding in the one that
factors K + alpha I. Use x64 for smaller ones.

Nystroem's features k(x, Z) k(Z, Z)^(-1/2) of some centres Z are explicit, so the estimators of `operators` apply, and
cost falls from n^3 to n m^2.
"""

import warnings
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dissociation.checks import check_choice, check_count, check_non_negative, fail, is_traced
from dissociation.linalg import product, psd_power
from dissociation.types import PRNGKey, Scalar
from dissociation.validation import validated
from koopman.diagnostics import warn_constant, warn_inexact, warn_large_alpha, warn_narrowed, warn_tied
from koopman.fitted import KernelMap, LinearMap, Operator
from koopman.kernel_subspaces import GramMethod, cholesky_floor, gram_cutoff, gram_weights
from koopman.kernels import as_module, gram, own_gram
from koopman.operators import fit_pcr, fit_reduced_rank, fit_ridge
from koopman.pairs import check_square, checked_pairs, default_alpha, scale_of
from koopman.subspaces import Rank, latent_size, refuse_singular

Kernel = Callable[[Array, Array], Array]
States = Float[Array | np.ndarray, "n d"]


@validated
def fit_kernel_ridge(
    x: States,
    y: States,
    kernel: Kernel,
    *,
    alpha: Scalar | None = None,
    observable: Float[Array | np.ndarray, "n *o"] | None = None,
) -> Operator:
    """Kernel ridge regression, G = (C_x + alpha I)^{-1} C_xy on the span of the samples: an operator of rank n.

    Args:
        x: States.
        y: Their successors, see `lagged_pairs`.
        kernel: A module of `koopman.kernels`, or any function of two arrays of states to their kernel matrix.
        alpha: Tikhonov regularisation, in units of k(x, x); None is 1e-6 times the mean of k(x, x). Traced.
        observable: What forecasts return, at the successors' times: [n, ...]. Default: the states.

    Returns:
        The fitted operator.

    Warns:
        UserWarning: Where values are known, if `alpha` exceeds the mean of k(x, x), rounding outweighs `alpha`, or
            k(x, x) varies by less than its rounding. The other two estimators compare `alpha` with eigenvalue number
            `rank` of k(X, X) / n, and warn if singular values `rank` and `rank` + 1 agree to rounding.

    Raises:
        ValueError: If shapes disagree, data are not finite, `alpha` is negative, it is zero and K is singular (the
            error names its rank), or the kernel's values are no symmetric [n, n], not finite, negative for a state
            with itself, or out of the dtype's range.
        TypeError: If the kernel does not give an array of real numbers.

    References:
        Kostic et al. (2022), Learning dynamical systems via Koopman operator regression in RKHS, eq. 7.
    """
    return _fit("pcr", x, y, kernel, None, alpha, observable, "dense")


@validated
def fit_kernel_pcr(
    x: States,
    y: States,
    kernel: Kernel,
    *,
    rank: Rank,
    alpha: Scalar | None = None,
    observable: Float[Array | np.ndarray, "n *o"] | None = None,
    solver: str = "auto",
) -> Operator:
    """Kernel principal component regression; at alpha = 0 this is kernel extended dynamic mode decomposition.

    Args:
        x: States.
        y: Their successors.
        kernel: The kernel.
        rank: Principal directions kept, from 1 to n. If it is traced, all shapes are those of rank n and latent
            functions beyond `rank` are zero, as in `fit_pcr`; then the solver is the dense one.
        alpha: Tikhonov regularisation.
        observable: What forecasts return.
        solver: "dense" (all eigenpairs), "krylov" (the leading ones) or "auto": "krylov" above 1000 samples.

    Returns:
        The fitted operator.

    Raises:
        ValueError: As `fit_kernel_ridge`, or if `rank` or `solver` is out of range.

    References:
        Williams, Rowley and Kevrekidis (2015), A kernel-based method for data-driven Koopman spectral analysis.
    """
    return _fit("pcr", x, y, kernel, rank, alpha, observable, solver)


@validated
def fit_kernel_reduced_rank(
    x: States,
    y: States,
    kernel: Kernel,
    *,
    rank: Rank,
    alpha: Scalar | None = None,
    observable: Float[Array | np.ndarray, "n *o"] | None = None,
    solver: str = "auto",
) -> Operator:
    """Reduced rank regression in the space of a kernel.

    Args:
        x: States.
        y: Their successors.
        kernel: The kernel.
        rank: Rank, from 1 to n; may be traced, as in `fit_kernel_pcr`.
        alpha: Tikhonov regularisation; above zero for the "krylov" solver, which factors K + alpha I.
        observable: What forecasts return.
        solver: "dense" (two whole eigendecompositions), "krylov" (one Cholesky factor per `alpha`, and the leading
            eigenvectors), "spectral" (one eigendecomposition of K and the leading eigenvectors: slower once, but a
            `vmap` over `alpha` shares it) or "auto": above 1000 samples "krylov" where `alpha` is known to lie above
            rounding, 100 times the rounding unit times the mean of k(x, x), or the dtype is float64; else "spectral".

    Returns:
        The fitted operator.

    Raises:
        ValueError: As `fit_kernel_pcr`, or if K + alpha I is not positive definite in the dtype's precision.

    References:
        Kostic et al. (2022), eq. 9 and appendix.
    """
    return _fit("reduced_rank", x, y, kernel, rank, alpha, observable, solver)


def _fit(
    kind: str,
    x: Array | np.ndarray,
    y: Array | np.ndarray,
    kernel: Kernel,
    rank: Rank | None,
    alpha: Scalar | None,
    observable: Array | np.ndarray | None,
    solver: str,
) -> Operator:
    x, y, flat, shape = checked_pairs(x, y, observable)
    if alpha is not None:
        check_non_negative("alpha", alpha)
    check_choice("solver", solver, ("auto", "dense", "krylov", *(("spectral",) if kind == "reduced_rank" else ())))
    kernel = as_module(kernel)
    number = x.shape[0]
    size, active = latent_size(rank, number, "samples")
    if active is not None and solver not in ("auto", "dense"):
        fail("solver", "be 'dense' for a traced `rank`", repr(solver))
    gram_x, gram_y = own_gram(kernel, x) / number, own_gram(kernel, y) / number
    if not is_traced(gram_x):
        check_square("kernel", float(jnp.trace(gram_x)), "a mean of k(x, x)", gram_x.dtype)
        warn_constant(x, gram_x)
    # In units in which the squares of kernel values neither overflow nor vanish.
    unit = scale_of(jnp.sqrt(jnp.trace(gram_x)))
    gram_x, gram_y = gram_x / unit / unit, gram_y / unit / unit
    given, trace = alpha is not None, jnp.trace(gram_x)
    alpha = jnp.asarray(alpha, x.dtype) / unit / unit if given else default_alpha(trace)
    known = not (is_traced(alpha) or is_traced(gram_x) or is_traced(gram_y))
    if solver == "auto":
        solver = _solver(kind, gram_x, alpha, size)
    found = gram_weights(GramMethod(kind, size, solver), gram_x, gram_y, alpha, active)
    weights, values = found.vectors, found.values
    if known and given and float(alpha) == 0.0 and (kind, solver) != ("reduced_rank", "krylov"):
        _check_regular("ridge" if rank is None else kind, gram_x, values, size)
    latent_x = product(gram_x, weights) * number**0.5
    coefficients = weights / unit / unit * number**-0.5
    latent_y = product(gram(kernel, y, x), coefficients)
    operator = Operator(
        encode=KernelMap(kernel, x, coefficients),
        dual=KernelMap(kernel, y, latent_x / number),
        core=product(latent_x.T, latent_y) / number,
        readout=product(latent_x.T, flat) / number,
        mean_observable=jnp.zeros(flat.shape[1:], flat.dtype),
        gram_x=product(latent_x.T, latent_x) / number,
        gram_y=product(latent_y.T, latent_y) / number,
        dual_gram=product(latent_x.T, product(gram_y, latent_x)) / number * unit * unit,
        basis_gram=product(coefficients.T, latent_x),
        singular_values=values * unit,
        alpha=alpha * unit * unit,
        effective_rank=jnp.sum(values > gram_cutoff(gram_x) ** 0.5 * jnp.max(values)),
        observable_shape=shape,
    )
    if known and active is None:
        which = "the mean of k(x, x)" if rank is None else f"eigenvalue {size} of k(X, X) / n"
        variance = trace if rank is None else found.variance
        warn_large_alpha(alpha, variance, trace, which, unit)
        if rank is not None:
            warn_tied(np.asarray(values), np.asarray(found.rest), gram_cutoff(gram_x) ** 0.5)
        warn_inexact(operator)
    return operator


def _solver(kind: str, gram_x: Array, alpha: Array, size: int) -> str:
    """What "auto" stands for: an iterative solver for a few directions of many samples, where rounding allows it."""
    number = gram_x.shape[0]
    if number <= 1000 or size > number // 16:
        return "dense"
    if kind == "pcr":
        return "krylov"
    if is_traced(alpha) or is_traced(gram_x):  # float64 has room enough below any usual `alpha`
        return "krylov" if jnp.finfo(gram_x.dtype).eps < 1e-12 else "spectral"
    return "krylov" if float(alpha) > float(cholesky_floor(gram_x)) else "spectral"


def _check_regular(kind: str, gram_x: Array, values: Array, size: int) -> None:
    """As `operators` at alpha = 0; principal components have the eigenvalues of K at hand."""
    reduced = kind == "reduced_rank"
    squares = np.linalg.eigvalsh(np.asarray(gram_x))[::-1] if reduced else np.asarray(values) ** 2
    number = gram_x.shape[0]
    needed = number if reduced else size
    refuse_singular(kind, squares, gram_cutoff(gram_x), needed, number, ("the kernel matrix of `x`", "K"))


class NystroemMap(eqx.Module):
    """Features k(x, Z) k(Z, Z)^{-1/2}: their products are the kernel's best approximation from the centres.

    Attributes:
        kernel: The kernel.
        centres: Z, [m, d].
        whitening: k(Z, Z)^{-1/2}, [m, m].
    """

    kernel: Kernel
    centres: Float[Array, "m d"]
    whitening: Float[Array, "m m"]

    def __call__(self, x: States) -> Float[Array, "n m"]:
        """Features of states."""
        return product(gram(self.kernel, jnp.asarray(x), self.centres), self.whitening)


@validated(finite=("centres",))
def nystroem_map(
    kernel: Kernel, centres: Float[Array | np.ndarray, "m d"], *, rtol: float | None = None
) -> NystroemMap:
    """Nystroem features of some centres.

    Args:
        kernel: The kernel.
        centres: States, for instance of `choose_centres`.
        rtol: Relative size below which an eigenvalue of k(Z, Z) counts as zero; default m times rounding.

    Returns:
        The feature map, for the estimators of `koopman.operators` and for streaming moments.

    Warns:
        UserWarning: If k(Z, Z) varies by less than its rounding.

    Raises:
        ValueError: If centres are not finite, or the kernel's values are not those of a kernel, as `fit_kernel_ridge`.
        TypeError: As `fit_kernel_ridge`.

    References:
        Williams and Seeger (2001), Using the Nystroem method to speed up kernel machines.
    """
    warn_narrowed(centres)
    centres = jnp.asarray(centres)
    kernel = as_module(kernel)
    values = own_gram(kernel, centres)
    if not is_traced(values):
        warn_constant(centres, values)
    return NystroemMap(kernel, centres, psd_power(values, -0.5, rtol=rtol))


@validated(finite=("x",))
def choose_centres(
    x: States,
    num_centres: int,
    *,
    key: PRNGKey,
    method: str = "uniform",
    kernel: Kernel | None = None,
    alpha: Scalar | None = None,
) -> Int[Array, " m"]:
    """Which samples serve as centres, without repetition.

    Args:
        x: States.
        num_centres: m, from 1 to n.
        key: Draws them.
        method: "uniform", or "leverage": with probabilities that follow the ridge leverage scores of the samples,
            [K (K + alpha I)^{-1}]_ii, themselves estimated from m uniform centres.
        kernel: For "leverage".
        alpha: For "leverage"; None is 1e-6 times the mean of k(x, x) on the span of the centres.

    Returns:
        Indices into x.

    Raises:
        ValueError: If `num_centres` is out of range, known states are not finite, the method is unknown, or "leverage"
            has no kernel.

    References:
        Rudi, Calandriello, Carratino and Rosasco (2018), On fast leverage score sampling and optimal learning.
    """
    check_choice("method", method, ("uniform", "leverage"))
    count, number = check_count("num_centres", num_centres, minimum=1), x.shape[0]
    if count > number:
        fail("num_centres", f"be at most the number of samples ({number})", num_centres)
    first, second = jax.random.split(key)
    uniform = jax.random.permutation(first, number)[:count]
    if method == "uniform":
        return uniform
    if kernel is None:
        fail("kernel", "be given for leverage scores", "None")
    warn_narrowed(x)
    features = nystroem_map(kernel, jnp.asarray(x)[uniform])(x) * number**-0.5
    if alpha is None:
        alpha = default_alpha(jnp.sum(features**2))
    check_non_negative("alpha", alpha)
    gram = product(features.T, features) + alpha * jnp.eye(count, dtype=features.dtype)
    scores = jnp.sum(features * product(features, psd_power(gram, -1.0)), 1)
    noise = jax.random.gumbel(second, (number,), features.dtype)
    return jax.lax.top_k(jnp.log(jnp.maximum(scores, jnp.finfo(scores.dtype).tiny)) + noise, count)[1]


@validated
def fit_nystroem(
    x: States,
    y: States,
    kernel: Kernel,
    centres: Float[Array | np.ndarray, "m d"],
    *,
    kind: str = "reduced_rank",
    rank: Rank | None = None,
    alpha: Scalar | None = None,
    observable: Float[Array | np.ndarray, "n *o"] | None = None,
    solver: str = "auto",
    route: str = "qr",
) -> Operator:
    """An estimator of `koopman.operators` on Nystroem features; the operator takes states.

    States and successors share one set of centres, so the operator acts on one space of functions. (Meanti et al. 2023
    project successors on centres of their own, and estimate M and D at these alone; here all samples serve.)

    Args:
        x: States.
        y: Their successors.
        kernel: The kernel.
        centres: Z, for instance `x[choose_centres(...)]`.
        kind: "ridge", "pcr" or "reduced_rank".
        rank: For the latter two; may be traced.
        alpha: Tikhonov regularisation; None is 1e-6 times the mean of k(x, x) on the span of the centres.
        observable: What forecasts return; default the states.
        solver: For the latter two, as in `fit_reduced_rank`.
        route: "qr" or "covariance", as in `fit_ridge`.

    Returns:
        The fitted operator.

    Warns:
        UserWarning: As `fit_reduced_rank` on the features, and as `nystroem_map`.

    Raises:
        ValueError: As `fit_reduced_rank` and `nystroem_map`, or if `kind` is unknown.
        TypeError: As `nystroem_map`.

    References:
        Meanti et al. (2023), Estimating Koopman operators with sketching to provably learn large scale dynamical
        systems.
    """
    check_choice("kind", kind, ("ridge", "pcr", "reduced_rank"))
    x, y, flat, shape = checked_pairs(x, y, observable)
    features = nystroem_map(kernel, centres)
    kernel, features_x = features.kernel, features(x)
    if alpha is None:
        alpha = default_alpha(jnp.sum(features_x**2) / x.shape[0])
    options = {"alpha": alpha, "observable": flat.reshape(x.shape[0], *shape), "route": route}
    if kind != "ridge":
        if rank is None:
            fail("rank", f"be given for {kind!r}", "None")
        options |= {"rank": rank, "solver": solver}
    fit = {"ridge": fit_ridge, "pcr": fit_pcr, "reduced_rank": fit_reduced_rank}[kind]
    with warnings.catch_warnings():  # columns of features are none of the caller's; `nystroem_map` has warned
        warnings.filterwarnings("ignore", "Column .* varies by", module="koopman")
        fitted = fit(features_x, features(y), **options)

    def lifted(linear: LinearMap | KernelMap) -> KernelMap:
        matrix = linear.matrix if isinstance(linear, LinearMap) else linear.coefficients
        return KernelMap(kernel, features.centres, product(features.whitening, matrix))

    return eqx.tree_at(lambda o: (o.encode, o.dual), fitted, (lifted(fitted.encode), lifted(fitted.dual)))
