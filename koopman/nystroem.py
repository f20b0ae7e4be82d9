"""Evolution operators in the space of a kernel: exact Gram matrices, and Nystroem features for many samples.

With K = k(X, X) / n and L = k(Y, Y) / n an estimator is U = sum_i c_i phi(x_i) / sqrt(n), so that its latent functions
are u(x) = k(x, X) c / sqrt(n):

- principal components (kernel extended dynamic mode decomposition): c = P Lambda^(-1/2) (Lambda + alpha)^(-1/2) with
  the leading eigenpairs of K; ridge regression is the case of all of them;
- reduced rank: c = (K + alpha I)^(-1) v with the leading eigenvectors of L T v = sigma^2 v, T = K (K + alpha I)^(-1),
  normalised to v^T T v = 1.

Gram matrices hold the squares of what feature matrices hold: eigenvalues of C_x below n times the rounding unit of the
largest (6e-4 for 5000 samples in float32) count as zero in the dense routes, and `alpha` has to lie above rounding in
the one that factors K + alpha I. Use x64 for smaller ones.

Nystroem's features k(x, Z) k(Z, Z)^(-1/2) of some centres Z are explicit, so the estimators of `operators` apply, and
cost falls from n^3 to n m^2.
"""

from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, UInt32

from dissociation.checks import check_choice, check_count, check_ndim, check_non_negative, fail, is_traced
from dissociation.linalg import product, psd_power
from koopman.fitted import KernelMap, LinearMap, Operator
from koopman.operators import fit_pcr, fit_reduced_rank, fit_ridge
from koopman.pairs import checked_pairs
from koopman.solvers import leading_eigenpairs

Scalar = float | int | Float[Array | np.ndarray, ""]
AnyKey = Key[Array, ""] | UInt32[Array, "2"]
Kernel = Callable[[Array, Array], Array]
States = Float[Array | np.ndarray, "n d"]


def fit_kernel_ridge(
    x: States,
    y: States,
    kernel: Kernel,
    *,
    alpha: Scalar = 1e-6,
    observable: Float[Array | np.ndarray, "n *o"] | None = None,
) -> Operator:
    """Kernel ridge regression, G = (C_x + alpha I)^{-1} C_xy on the span of the samples: an operator of rank n.

    Args:
        x: States.
        y: Their successors, see `lagged_pairs`.
        kernel: A module of `koopman.kernels`, or any function of two arrays of states to their kernel matrix.
        alpha: Tikhonov regularisation, in the units of k(x, x). Traced.
        observable: What forecasts return, at the successors' times: [n, ...]. Default: the states.

    Returns:
        The fitted operator.

    Raises:
        ValueError: If shapes disagree, data are not finite, or `alpha` is negative.

    References:
        Kostic et al. (2022), Learning dynamical systems via Koopman operator regression in RKHS, eq. 7.
    """
    return _fit("pcr", x, y, kernel, None, alpha, observable, "dense")


def fit_kernel_pcr(
    x: States,
    y: States,
    kernel: Kernel,
    *,
    rank: int,
    alpha: Scalar = 1e-6,
    observable: Float[Array | np.ndarray, "n *o"] | None = None,
    solver: str = "auto",
) -> Operator:
    """Kernel principal component regression; at alpha = 0 this is kernel extended dynamic mode decomposition.

    Args:
        x: States.
        y: Their successors.
        kernel: The kernel.
        rank: Principal directions kept, from 1 to n.
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


def fit_kernel_reduced_rank(
    x: States,
    y: States,
    kernel: Kernel,
    *,
    rank: int,
    alpha: Scalar = 1e-6,
    observable: Float[Array | np.ndarray, "n *o"] | None = None,
    solver: str = "auto",
) -> Operator:
    """Reduced rank regression in the space of a kernel.

    Args:
        x: States.
        y: Their successors.
        kernel: The kernel.
        rank: Rank, from 1 to n.
        alpha: Tikhonov regularisation; above zero for the "krylov" solver, which factors K + alpha I.
        observable: What forecasts return.
        solver: "dense" (two whole eigendecompositions), "krylov" (one Cholesky factor per `alpha`, and the leading
            eigenvectors), "spectral" (one eigendecomposition of K and the leading eigenvectors: dearer once, but a
            `vmap` over `alpha` shares it) or "auto": "krylov" above 1000 samples.

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
    rank: int | None,
    alpha: Scalar,
    observable: Array | np.ndarray | None,
    solver: str,
) -> Operator:
    x, y, flat, shape = checked_pairs(x, y, observable, "dimensions")
    check_non_negative("alpha", alpha)
    check_choice("solver", solver, ("auto", "dense", "krylov", *(("spectral",) if kind == "reduced_rank" else ())))
    number = x.shape[0]
    size = number if rank is None else check_count("rank", rank, minimum=1)
    if size > number:
        fail("rank", f"be at most the number of samples ({number})", rank)
    if solver == "auto":
        solver = "krylov" if number > 1000 and size <= number // 16 else "dense"
    gram_x, gram_y = kernel(x, x) / number, kernel(y, y) / number
    alpha = jnp.asarray(alpha, x.dtype)
    find = {("pcr", "dense"): _pcr_dense, ("pcr", "krylov"): _pcr_krylov}
    find |= {("reduced_rank", "dense"): _reduced_dense, ("reduced_rank", "krylov"): _reduced_krylov}
    find |= {("reduced_rank", "spectral"): _reduced_spectral}
    weights, values = find[kind, solver](gram_x, gram_y, alpha, size)
    coefficients = weights * number**-0.5
    latent_x = product(gram_x, coefficients) * number
    latent_y = product(kernel(y, x), coefficients)
    return Operator(
        encode=KernelMap(kernel, x, coefficients),
        dual=KernelMap(kernel, y, latent_x / number),
        core=product(latent_x.T, latent_y) / number,
        readout=product(latent_x.T, flat) / number,
        mean_observable=jnp.zeros(flat.shape[1:], flat.dtype),
        gram_x=product(latent_x.T, latent_x) / number,
        gram_y=product(latent_y.T, latent_y) / number,
        dual_gram=product(latent_x.T, product(gram_y, latent_x)) / number,
        basis_gram=product(coefficients.T, latent_x),
        singular_values=values,
        alpha=alpha,
        effective_rank=jnp.sum(values > _cutoff(gram_x) ** 0.5 * jnp.max(values)),
        observable_shape=shape,
    )


def _cutoff(gram: Array) -> float:
    return gram.shape[0] * float(jnp.finfo(gram.dtype).eps)


def _pcr_weights(values: Array, vectors: Array, alpha: Array, cutoff: float) -> tuple[Array, Array]:
    kept = values > cutoff * values[0]
    safe = jnp.where(kept, values, 1.0)
    scale = jnp.where(kept, jax.lax.rsqrt(safe * (safe + alpha)), 0.0)
    return vectors * scale[None], jnp.sqrt(jnp.maximum(values, 0.0))


def _pcr_dense(gram_x: Array, gram_y: Array, alpha: Array, size: int) -> tuple[Array, Array]:
    values, vectors = jnp.linalg.eigh(gram_x)
    return _pcr_weights(values[::-1][:size], vectors[:, ::-1][:, :size], alpha, _cutoff(gram_x))


def _pcr_krylov(gram_x: Array, gram_y: Array, alpha: Array, size: int) -> tuple[Array, Array]:
    vectors, values = leading_eigenpairs(partial(product, gram_x), gram_x.shape[0], size, dtype=gram_x.dtype)
    return _pcr_weights(values, vectors, alpha, _cutoff(gram_x))


def _reduced_dense(gram_x: Array, gram_y: Array, alpha: Array, size: int) -> tuple[Array, Array]:
    return _reduced_turned(gram_x, gram_y, alpha, size, krylov=False)


def _reduced_spectral(gram_x: Array, gram_y: Array, alpha: Array, size: int) -> tuple[Array, Array]:
    return _reduced_turned(gram_x, gram_y, alpha, size, krylov=True)


def _reduced_turned(gram_x: Array, gram_y: Array, alpha: Array, size: int, *, krylov: bool) -> tuple[Array, Array]:
    """In the eigenbasis P of K: T = P diag(g)^2 P^T, and P^T L P does without `alpha`."""
    values, vectors = jnp.linalg.eigh(gram_x)
    kept = values > _cutoff(gram_x) * values[-1]
    safe = jnp.where(kept, values, 1.0)
    gain = jnp.where(kept, jnp.sqrt(safe / (safe + alpha)), 0.0)[:, None]
    turned = product(vectors.T, product(gram_y, vectors))
    if krylov:
        turn, squares = leading_eigenpairs(
            lambda block: gain * product(turned, gain * block), values.shape[0], size, dtype=gram_x.dtype
        )
    else:
        squares, turn = jnp.linalg.eigh(gain * turned * gain.T)
        squares, turn = squares[::-1][:size], turn[:, ::-1][:, :size]
    scale = jnp.where(kept, jax.lax.rsqrt(safe * (safe + alpha)), 0.0)[:, None]
    return product(vectors, scale * turn), jnp.sqrt(jnp.maximum(squares, 0.0))


def _reduced_krylov(gram_x: Array, gram_y: Array, alpha: Array, size: int) -> tuple[Array, Array]:
    number = gram_x.shape[0]
    factor = jnp.linalg.cholesky(gram_x + alpha * jnp.eye(number, dtype=gram_x.dtype))
    if not is_traced(factor) and not bool(jnp.isfinite(factor[-1, -1])):
        raise ValueError(
            f"`alpha` must make K + alpha I positive definite in {gram_x.dtype}, got {float(alpha):.3g}. Raise it "
            f"above {_cutoff(gram_x) * float(jnp.trace(gram_x)):.1g}, use solver='dense', or enable x64."
        )

    def solve(block: Array) -> Array:
        return jax.scipy.linalg.cho_solve((factor, True), block)

    def shrink(block: Array) -> Array:
        return block - alpha * solve(block)  # T

    vectors, squares = leading_eigenpairs(partial(product, gram_y), number, size, dtype=gram_x.dtype, inner=shrink)
    return solve(vectors), jnp.sqrt(jnp.maximum(squares, 0.0))


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
        return product(self.kernel(jnp.asarray(x), self.centres), self.whitening)


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

    References:
        Williams and Seeger (2001), Using the Nystroem method to speed up kernel machines.
    """
    check_ndim("centres", centres, 2, "[centres, dimensions]")
    centres = jnp.asarray(centres)
    return NystroemMap(kernel, centres, psd_power(kernel(centres, centres), -0.5, rtol=rtol))


def choose_centres(
    x: States,
    num_centres: int,
    *,
    key: AnyKey,
    method: str = "uniform",
    kernel: Kernel | None = None,
    alpha: Scalar = 1e-6,
) -> Int[Array, " m"]:
    """Which samples serve as centres, without repetition.

    Args:
        x: States.
        num_centres: m, from 1 to n.
        key: Draws them.
        method: "uniform", or "leverage": with probabilities that follow the ridge leverage scores of the samples,
            [K (K + alpha I)^{-1}]_ii, themselves estimated from m uniform centres.
        kernel: For "leverage".
        alpha: For "leverage".

    Returns:
        Indices into x.

    Raises:
        ValueError: If `num_centres` is out of range, the method is unknown, or "leverage" has no kernel.

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
    check_non_negative("alpha", alpha)
    features = nystroem_map(kernel, jnp.asarray(x)[uniform])(x) * number**-0.5
    gram = product(features.T, features) + alpha * jnp.eye(count, dtype=features.dtype)
    scores = jnp.sum(features * product(features, psd_power(gram, -1.0)), 1)
    noise = jax.random.gumbel(second, (number,), features.dtype)
    return jax.lax.top_k(jnp.log(jnp.maximum(scores, jnp.finfo(scores.dtype).tiny)) + noise, count)[1]


def fit_nystroem(
    x: States,
    y: States,
    kernel: Kernel,
    centres: Float[Array | np.ndarray, "m d"],
    *,
    kind: str = "reduced_rank",
    rank: int | None = None,
    alpha: Scalar = 1e-6,
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
        rank: For the latter two.
        alpha: Tikhonov regularisation.
        observable: What forecasts return; default the states.
        solver: For "reduced_rank", as in `fit_reduced_rank`.
        route: "qr" or "covariance", as in `fit_ridge`.

    Returns:
        The fitted operator.

    Raises:
        ValueError: As `fit_reduced_rank`, or if `kind` is unknown.

    References:
        Meanti et al. (2023), Estimating Koopman operators with sketching to provably learn large scale dynamical
        systems.
    """
    check_choice("kind", kind, ("ridge", "pcr", "reduced_rank"))
    x, y, flat, shape = checked_pairs(x, y, observable, "dimensions")
    features = nystroem_map(kernel, centres)
    options = {"alpha": alpha, "observable": flat.reshape(x.shape[0], *shape), "route": route}
    if kind != "ridge":
        if rank is None:
            fail("rank", f"be given for {kind!r}", "None")
        options["rank"] = rank
    if kind == "reduced_rank":
        options["solver"] = solver
    fit = {"ridge": fit_ridge, "pcr": fit_pcr, "reduced_rank": fit_reduced_rank}[kind]
    fitted = fit(features(x), features(y), **options)

    def lifted(linear: LinearMap | KernelMap) -> KernelMap:
        matrix = linear.matrix if isinstance(linear, LinearMap) else linear.coefficients
        return KernelMap(kernel, features.centres, product(features.whitening, matrix))

    return eqx.tree_at(lambda o: (o.encode, o.dual), fitted, (lifted(fitted.encode), lifted(fitted.dual)))
