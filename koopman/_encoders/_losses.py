"""Losses for learning features of a dynamical system, to minimise.

C_x = x^T x / n and C_xy = x^T y / n, about the column means if `center_covariances` is True.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from dissociation._core.checks import check_choice, check_count, check_non_negative, fail
from dissociation._core.linalg import centre, nuclear_norm, product, psd_power
from dissociation._core.types import PRNGKey, Scalar
from dissociation._core.validation import validated
from koopman._operators._findings import lost_variance, warn_of
from koopman._operators._numerics import positive_or_one, ratio_or_zero, rounding_unit

Features = Float[Array | np.ndarray, "n d"]
Loss = Float[Array, ""]


@validated
def vamp_loss(
    x: Features, y: Features, *, schatten_norm: int = 2, center_covariances: bool = True
) -> Loss:
    """Return minus the VAMP-p score, a measure of linear prediction of the next features.

        -sum_i s_i^p,     s_i the singular values of C_x^{-1/2} C_xy C_y^{-1/2},     p in {1, 2}

    The s_i are the canonical correlations of x and y, invariant to linear maps of the features.
    Uncentred, a constant function in their span counts. Centred and with p = 2, n independent pairs
    score d^2 / (n - 1) on average. Directions of a covariance below a relative cut-off (3e-6 in
    float32) are omitted, with finite gradients.

    Args:
        x: Features of the states, [n, d].
        y: Features one lag later, [n, d].
        schatten_norm: Power p, 1 or 2.
        center_covariances: If True, the means are subtracted.

    Returns:
        Number from -d to 0.

    Warns:
        UserWarning: As the other losses of uncentred features: if the variance of a known feature
            is below the rounding of its squared mean.

    Raises:
        ValueError: If n <= d + 1 (n <= d uncentred).

    References:
        Wu and Noe (2020), Variational approach for learning Markov processes from time series data,
        VAMP-r score.

    >>> states = jnp.tile(jnp.eye(5), (2, 1))
    >>> vamp_loss(states, jnp.roll(states, 1, axis=0), center_covariances=False).round(4)
    Array(-5., dtype=float32)
    """
    _check_schatten_norm(schatten_norm)
    _check_enough("x", x, x.shape[1], center_covariances)
    _warn_offsets(center_covariances, x=x, y=y)
    return _vamp(x, y, schatten_norm, center_covariances)


@partial(jax.jit, static_argnames=("schatten_norm", "center"))
def _vamp(x: Array, y: Array, schatten_norm: int, center: bool) -> Array:
    _, cross = _whitened(x, y, center)
    if schatten_norm == 1:
        return -nuclear_norm(cross)
    return -jnp.sum(cross**2)


def _warn_offsets(center: bool, **features: Array | np.ndarray) -> None:
    if center:
        return
    for name, array in features.items():
        warn_of(lost_variance(array, name, advice="pass center_covariances=True"))


@validated
def vamp_score(
    x: Features,
    y: Features,
    x_test: Float[Array | np.ndarray, "m d"],
    y_test: Float[Array | np.ndarray, "m d"],
    *,
    schatten_norm: int = 2,
    center_covariances: bool = True,
    rank: int | None = None,
) -> Loss:
    """Return the cross-validated VAMP-p score of functions fitted on `x, y`, on test data.

    With u, v the leading `rank` pairs of singular functions (linear in the features) on the
    training pairs,

        | (u^T C_x u)^{-1/2} (u^T C_xy v) (v^T C_y v)^{-1/2} |_p^p,
        C the covariances of the test pairs.

    At full rank and with regular training covariances this is minus `vamp_loss` of the test data:
    pass a rank below d to test the fit.

    Args:
        x: Training features, [n, d].
        y: Training features one lag later, [n, d].
        x_test: Test features, [m, d].
        y_test: Test features one lag later, [m, d].
        schatten_norm: Power p, 1 or 2.
        center_covariances: If True, each set's means are subtracted.
        rank: Number of singular functions, from 1 to d; None for d.

    Returns:
        Number from 0 to the rank. Its derivative is in the test features, at fixed functions.

    Raises:
        ValueError: If there are too few samples, as in `vamp_loss`, or too few test data for `rank`
            features.

    References:
        Wu and Noe (2020), see `vamp_loss`, eq. 33 of arXiv:1707.04659.
    """
    _check_schatten_norm(schatten_norm)
    num_features: int = x.shape[1]
    if rank is None:
        rank = num_features
    rank = check_count("rank", rank, minimum=1)
    if rank > num_features:
        fail("rank", f"be at most the number of features ({num_features})", rank)

    _check_enough("x", x, num_features, center_covariances)
    _check_enough("x_test", x_test, rank, center_covariances)
    _warn_offsets(center_covariances, x=x, y=y, x_test=x_test, y_test=y_test)
    return _score(x, y, x_test, y_test, schatten_norm, center_covariances, rank)


@partial(jax.jit, static_argnames=("schatten_norm", "center", "rank"))
def _score(
    x: Array, y: Array, x_test: Array, y_test: Array, schatten_norm: int, center: bool, rank: int
) -> Array:
    maps, cross = _whitened(x, y, center)
    left_vectors, correlations, right_vectors = jnp.linalg.svd(cross)
    # If covariances are deficient, functions without correlation are rounding.
    is_correlated = correlations > x.shape[1] * rounding_unit(cross)
    rotations = jnp.stack([left_vectors, right_vectors.T])[..., :rank]
    rotations = rotations * is_correlated[None, None, :rank]
    functions = lax.stop_gradient(product(maps, rotations))

    if center:
        x_test = centre(x_test)
        y_test = centre(y_test)
    values_x = product(x_test, functions[0])
    values_y = product(y_test, functions[1])
    return -_vamp(values_x, values_y, schatten_norm, center)


@validated
def dpnets_loss(
    x: Features,
    y: Features,
    *,
    relaxed: bool = False,
    metric_deformation: Scalar = 1.0,
    center_covariances: bool = True,
) -> Loss:
    """Return minus the score of deep projection networks: VAMP-2 with a metric regulariser.

        -|C_x^{-1/2} C_xy C_y^{-1/2}|_F^2 + metric_deformation / (2 d) (R(C_x) + R(C_y)),
        R(C) = tr(C^2 - C - log C) >= 0,   zero only for C = I

    Args:
        x: Features of the states, [n, d].
        y: Features one lag later, [n, d].
        relaxed: If True, take the lower bound |C_xy|_F^2 / (|C_x| |C_y|) of the score, with
            operator norms, which needs no inverse.
        metric_deformation: Weight of R, 2 d times the paper's, non-negative, perhaps traced.
        center_covariances: If True, the means are subtracted.

    Returns:
        At least -d. Eigenvalues of a covariance below its cut-off count as d times rounding and
        have no gradient.

    Raises:
        ValueError: If the score is not relaxed and there are too few samples, as in `vamp_loss`.

    References:
        Kostic, Novelli, Grazzi, Lounici and Pontil (2024), Learning invariant representations of
        time-homogeneous stochastic dynamical systems, section 3.
    """
    check_non_negative("metric_deformation", metric_deformation)
    if not relaxed:
        _check_enough("x", x, x.shape[1], center_covariances)
    _warn_offsets(center_covariances, x=x, y=y)
    return _dpnets(x, y, metric_deformation, relaxed, center_covariances)


@partial(jax.jit, static_argnames=("relaxed", "center"))
def _dpnets(x: Array, y: Array, metric_deformation: Scalar, relaxed: bool, center: bool) -> Array:
    if center:
        x = centre(x)
        y = centre(y)
    loss = jnp.zeros((), x.dtype)
    if not relaxed:
        loss = _vamp(x, y, 2, center=False)

    covariance_x = _after(loss, _covariance(x))
    eigenvalues_x = jnp.linalg.eigvalsh(covariance_x)
    covariance_y = _after(eigenvalues_x[-1], _covariance(y))
    eigenvalues_y = jnp.linalg.eigvalsh(covariance_y)

    if relaxed:
        cross = product(x.T, y) / x.shape[0]
        norms = eigenvalues_x[-1] * eigenvalues_y[-1]
        loss = -jnp.sum(cross**2) / positive_or_one(norms)
    weight = metric_deformation / (2 * x.shape[1])
    return loss + weight * (_deformation(eigenvalues_x) + _deformation(eigenvalues_y))


@validated
def spectral_contrastive_loss(x: Features, y: Features) -> Loss:
    """Return the spectral contrastive loss: true pairs are aligned and all others orthogonal.

        1 / (n (n - 1)) sum_{i != j} <x_i, y_j>^2  -  2 / n sum_i <x_i, y_i>

    For independent pairs it is an unbiased estimate of |K - x y^T|^2 - |K|^2, K the kernel of the
    evolution operator. Its minimum is minus the sum of the d largest squared singular values of K,
    at their singular functions, among which the constant one counts. If one pair has a very large
    inner product, digits are lost.

    Args:
        x: Features of the states, [n, d], n at least 2.
        y: Features one lag later, [n, d].

    References:
        HaoChen, Wei, Gaidon and Ma (2021), Provable guarantees for self-supervised deep learning
        with spectral contrastive loss, section 3. Jeong, Ryu, Yun and Wornell (2025), Efficient
        parametric SVD of Koopman operator for stochastic dynamical systems.
    """
    if x.shape[0] < 2:
        fail("x", "hold at least two pairs", f"shape {x.shape}")
    advice = "take features about their mean"
    warn_of(lost_variance(x, advice=advice))
    warn_of(lost_variance(y, "y", advice=advice))
    return _contrastive(x, y)


@jax.jit
def _contrastive(x: Array, y: Array) -> Array:
    n = x.shape[0]
    mismatched = _off_diagonal_squares(x, y) / float(n * (n - 1))
    matched = (2.0 / n) * jnp.sum(x * y)
    return mismatched - matched


@validated
def autoencoder_loss(
    x: Float[Array | np.ndarray, "n *state"],
    y: Float[Array | np.ndarray, "n *state"],
    x_rec: Float[Array | np.ndarray, "n *state"],
    y_enc: Float[Array | np.ndarray, "n *latent"],
    x_evo: Float[Array | np.ndarray, "n *latent"],
    y_pred: Float[Array | np.ndarray, "n *state"],
    *,
    alpha_rec: Scalar = 1.0,
    alpha_lin: Scalar = 1.0,
    alpha_pred: Scalar = 1.0,
) -> Loss:
    """Return the loss of an autoencoder with a linear map K of its latent state.

    Means are over samples and entries:

        alpha_rec mean (x - dec(enc(x)))^2  +  alpha_lin mean (enc(y) - K enc(x))^2
            +  alpha_pred mean (y - dec(K enc(x)))^2

    Args:
        x: States, [n, ...] of any shape.
        y: Their successors, in the shape of `x`.
        x_rec: dec(enc(x)), in the shape of `x`.
        y_enc: enc(y), [n, ...].
        x_evo: K enc(x), in the shape of `y_enc`.
        y_pred: dec(K enc(x)), in the shape of `x`.
        alpha_rec: Weight of the reconstruction, like the others non-negative, perhaps traced.
        alpha_lin: Weight of the latent step.
        alpha_pred: Weight of the prediction.

    References:
        Lusch, Kutz and Brunton (2018), Deep learning for universal linear embeddings of nonlinear
        dynamics.
    """
    check_non_negative("alpha_rec", alpha_rec)
    check_non_negative("alpha_lin", alpha_lin)
    check_non_negative("alpha_pred", alpha_pred)
    reconstruction = alpha_rec * _mean_square(x, x_rec)
    latent_step = alpha_lin * _mean_square(y_enc, x_evo)
    prediction = alpha_pred * _mean_square(y, y_pred)
    return jnp.asarray(reconstruction + latent_step + prediction)


def _mean_square(target: Array | np.ndarray, estimate: Array | np.ndarray) -> Array:
    residual = jnp.asarray(target) - jnp.asarray(estimate)
    return jnp.mean(residual**2)


@validated
def energy_loss(
    x: Features,
    jac: Float[Array | np.ndarray, "n d m"],
    *,
    grad_weight: Scalar = 1e-3,
    form: str = "energy",
) -> Loss:
    """Return a loss for the generator L of a reversible diffusion, from features and gradients.

    With D = sum_k E[d_k x d_k x^T], so that <f, -L g> = E[grad f . grad g] (overdamped Langevin,
    unit diffusion):

        "energy":   tr(W^2) - 2 tr(C),              W = C + a D,   C = E[x x^T],   a = grad_weight
        "pooled":   E_{s,t} k(s, t)^2 - 2 tr(C),
                    k(s, t) = <x(s), x(t)> + a sum_k <d_k x(s), d_k x(t)>

    The minimum of the energy form is -sum_{i < d} (1 + a e_i)^{-2}, with the smallest eigenvalues
    e_i of -L; minimisers span their eigenfunctions. The pooled form, kooplearn's, does not rank
    eigenfunctions: on an interval with reflecting ends {1, cos 2t} has a lower loss than {1, cos
    t}. Both first terms are biased upwards, by order 1 / n.

    Args:
        x: Features of samples of the invariant distribution, [n, d].
        jac: Derivatives of the features by the m coordinates of the state, [n, d, m].
        grad_weight: a, non-negative, in units of time, one over the shift of the resolvent; perhaps
            traced.
        form: "energy" or "pooled".

    Returns:
        At least -d.

    References:
        Kostic, Lounici, Halconruy, Devergne and Pontil (2024), see `fit_generator`.
        Devergne, Kostic, Parrinello and Pontil (2024), From biased to unbiased dynamics: an
        infinitesimal generator approach.
    """
    check_non_negative("grad_weight", grad_weight)
    check_choice("form", form, ("energy", "pooled"))
    return _energy(jnp.asarray(x), jnp.asarray(jac), grad_weight, form)


@partial(jax.jit, static_argnames="form")
def _energy(x: Array, jac: Array, grad_weight: Scalar, form: str) -> Array:
    n, d = x.shape
    if form == "energy":
        # Then the loss is |A^{-1} - sum_i x_i (x_i, .)|_HS^2 minus a constant, A = 1 - a L, in the
        # product <f, A g>.
        rows = jnp.moveaxis(jac, 2, 1).reshape(-1, d)
        covariance = product(x.T, x) + grad_weight * product(rows.T, rows)
        squares = jnp.sum(covariance**2)
    else:
        # <d_k x_l, x_j>^2 in place of |d_k x_l|^2 |x_j|^2: to first order in a, only the part of a
        # gradient in the span of the features is penalised.
        flat = jac.reshape(n, -1)
        if n <= d + flat.shape[1]:
            kernel = product(x, x.T) + grad_weight * product(flat, flat.T)
            squares = jnp.sum(kernel**2)
        else:  # the same sum without the n x n matrix; every term is non-negative
            feature_squares = jnp.sum(product(x.T, x) ** 2)
            gradient_squares = jnp.sum(product(flat.T, flat) ** 2)
            mixed_squares = jnp.sum(product(x.T, flat) ** 2)
            squares = feature_squares + grad_weight**2 * gradient_squares
            squares = squares + 2 * grad_weight * mixed_squares
    return squares / float(n * n) - (2.0 / n) * jnp.sum(x**2)


@validated
@jax.jit
def orthonormal_fro_reg(x: Features, *, key: PRNGKey | None = None) -> Loss:
    """Return an unbiased estimate of the distance of features from orthonormal and centred.

        1/d (|C - I|_F^2 + 2 |m|^2)  =  1/d (tr C^2 - 2 tr C + d + 2 |m|^2),
        C the covariance, m the mean of x

    The estimate of tr C^2 is the average of ((x_i - x_j) . (x_k - x_l))^2 / 4 over all quadruples
    of different samples.

    Args:
        x: Features, [n, d], n at least 4.
        key: Key of n random quadruples in place of all, which have a larger variance and cost n d
            in place of n d min(n, d), for hundreds of features.

    Returns:
        The estimate, which may be negative.

    References:
        Himeno and Yamada (2014), Estimations for some functions of covariance matrix in high
        dimension under non-normality.
    """
    if x.shape[0] < 4:
        fail("x", "hold at least four samples", f"shape {x.shape}")
    n, d = x.shape
    centred = centre(x)
    norms = jnp.sum(centred**2, 1)
    trace = jnp.sum(norms) / (n - 1)
    # tr of the squared sample covariance is too large by about ((tr C)^2 + tr C^2) / n for normal
    # samples, because it pairs each sample with itself, as does a product with a permuted batch
    # (kooplearn).
    if key is None:
        square = _off_diagonal_squares(centred, centred)
        square = square - 2.0 / (n - 2) * jnp.sum(norms**2)
        square = square + (n - 1) / (n - 2) * trace**2
        square = square / float(n * (n - 3))
    else:
        # Two steps of a random cycle share no sample. For 64 samples of 5 features the deviation is
        # six times larger.
        cycle = jax.random.permutation(key, centred)
        steps = cycle - jnp.roll(cycle, 1, 0)
        products = jnp.sum(steps * jnp.roll(steps, 2, 0), 1)
        square = jnp.mean(products**2) / 4
    mean = jnp.mean(x, 0)
    mean_square = jnp.sum(mean**2) - trace / n
    return (square - 2 * trace + d + 2 * mean_square) / d


@validated
@jax.jit
def orthonormal_logfro_reg(x: Features) -> Loss:
    """Return the distance of features from orthonormal and centred, with a barrier to collapse.

        1/d tr(C^2 - C - log C) + 2 |m|^2,     C the covariance, m the mean of x

    Args:
        x: Features, [n, d].

    Returns:
        Non-negative, and zero for covariance I and mean zero. With the machine epsilon eps,
        eigenvalues of C below d eps max(1, largest eigenvalue) count as d eps, and have no
        gradient.

    References:
        Kostic, Novelli, Grazzi, Lounici and Pontil (2024), see `dpnets_loss`, metric distortion
        loss.
    """
    covariance = _covariance(centre(x))
    eigenvalues = jnp.linalg.eigvalsh(covariance)
    mean = jnp.mean(x, 0)
    return _deformation(eigenvalues) / x.shape[1] + 2 * jnp.sum(mean**2)


def _deformation(eigenvalues: Array) -> Array:
    """Return R = sum of l^2 - l - log l over the eigenvalues of a covariance, in rising order."""
    floor = eigenvalues.shape[0] * rounding_unit(eigenvalues)
    is_resolved = eigenvalues > floor * jnp.maximum(eigenvalues[-1], 1.0)
    excess = eigenvalues**2 - eigenvalues
    logarithms = jnp.log(jnp.where(is_resolved, eigenvalues, floor))
    return jnp.sum(excess - logarithms)


def _off_diagonal_squares(x: Array, y: Array) -> Array:
    """Return the sum of <x_i, y_j>^2 over i != j."""
    n, d = x.shape
    # Long batches do without an n x n matrix: if all true pairs have one inner product, the
    # subtracted diagonal is at most half of the sum. In short batches it could be nearly all of it.
    if n <= 2 * d:
        is_diagonal = jnp.eye(n, dtype=bool)
        products = jnp.where(is_diagonal, 0.0, product(x, y.T))
        return jnp.sum(products**2)
    total = jnp.sum(product(x.T, x) * product(y.T, y))
    diagonal = jnp.sum(x * y, 1)
    return total - jnp.sum(diagonal**2)


def _covariance(x: Array) -> Array:
    return product(x.T, x) / x.shape[0]


def _whitened(x: Array, y: Array, center: bool) -> tuple[Array, Array]:
    """Return whitening maps of x and y, [2, d, d], and C_xy of the whitened features, [d, d]."""
    eps = rounding_unit(x)
    map_x, features_x, root_x = _whiten(x, eps, jnp.zeros((), x.dtype), center)
    map_y, features_y, root_y = _whiten(y, eps, root_x[0, 0], center)
    cross = product(features_x.T, features_y) / x.shape[0]
    cross = product(product(root_x, cross), root_y)
    return jnp.stack([map_x, map_y]), cross


def _whiten(x: Array, eps: float, earlier: Array, center: bool) -> tuple[Array, Array, Array]:
    """Return the whitening map M of x, nearly white features F and C_F^{-1/2}: x M = F C_F^{-1/2}.

    Decompositions run after the scalar `earlier`.
    """
    n, d = x.shape
    # Sums over n samples round: null directions of three features have 0.2 sqrt(n) units, of more
    # features 2.
    rtol = eps * max(d, 0.5 * n**0.5)

    # A covariance in float32 resolves deviations down to a thousandth of the largest, so features
    # are scaled, nearly whitened, and then whitened with a cut-off. The first two maps are
    # constants, because the result does not depend on them.
    features = x
    if center:
        features = centre(x)
    size = _root_mean_square(lax.stop_gradient(features))
    size_with_mean = _root_mean_square(lax.stop_gradient(x))
    is_varying = size > 8 * eps * size_with_mean  # otherwise constant up to rounding
    scale = ratio_or_zero(1.0, size, is_varying)
    features = features * scale[None]

    covariance = _after(earlier, lax.stop_gradient(_covariance(features)))
    eigenvalues, eigenvectors = jnp.linalg.eigh(covariance)
    eigenvalues = jnp.maximum(eigenvalues, 0.0)
    floor = rtol * jnp.maximum(eigenvalues[-1], 1.0)
    rough_map = eigenvectors * lax.rsqrt(eigenvalues + floor)[None]
    features = product(features, rough_map)

    root = psd_power(_covariance(features), -0.5, rtol=rtol)
    return scale[:, None] * product(rough_map, root), features, root


def _root_mean_square(x: Array) -> Array:
    """Return the root mean square of every column, even if squares overflow or vanish."""
    largest = jnp.max(jnp.abs(x), 0)
    scaled = x / positive_or_one(largest)[None]
    return largest * jnp.sqrt(jnp.mean(scaled**2, 0))


def _after(earlier: Array, array: Array) -> Array:
    """Return `array`, computed after the scalar `earlier`."""
    # Independent decompositions in one program, each batched by `vmap`, can hang on a CPU.
    return array + 0 * lax.stop_gradient(earlier)


def _check_enough(name: str, x: Array | np.ndarray, size: int, center: bool) -> None:
    """Raise if with so few samples any features are perfectly correlated."""
    minimum = size + 1
    kind = ""
    if center:
        minimum = size + 2
        kind = ", centred"
    if x.shape[0] < minimum:
        expected = f"hold at least {minimum} samples for {size} features{kind}"
        fail(name, expected, x.shape[0], "With fewer the score is the same for any features")


def _check_schatten_norm(schatten_norm: int) -> None:
    if schatten_norm not in (1, 2):
        fail("schatten_norm", "be 1 or 2", schatten_norm)
