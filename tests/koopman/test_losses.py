from functools import partial
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from differences import directional
from words import refused

from koopman import (
    autoencoder_loss,
    dpnets_loss,
    energy_loss,
    orthonormal_fro_reg,
    orthonormal_logfro_reg,
    spectral_contrastive_loss,
    vamp_loss,
    vamp_score,
)

TRAINING = np.random.default_rng(3).normal(
    size=(2, 20, 8)
)  # distinct singular values, whose two largest are kept

# Every loss as a function of a batch of pairs, whose weights are traced where the batch is.
LOSSES = {
    "vamp-2": vamp_loss,
    "vamp-1": lambda x, y: vamp_loss(x, y, schatten_norm=1),
    "vamp-2-uncentred": lambda x, y: vamp_loss(x, y, center_covariances=False),
    "vamp-1-uncentred": lambda x, y: vamp_loss(x, y, schatten_norm=1, center_covariances=False),
    "dpnets": lambda x, y: dpnets_loss(x, y, metric_deformation=x[0, 0] ** 2),
    "dpnets-relaxed": lambda x, y: dpnets_loss(x, y, metric_deformation=x[0, 0] ** 2, relaxed=True),
    "contrastive": spectral_contrastive_loss,
    "autoencoder": lambda x, y: autoencoder_loss(
        x,
        y,
        x + 0.1,
        y**2,
        x,
        2 * x,
        alpha_rec=x[1, 0] ** 2,
        alpha_lin=x[0, 0] ** 2,
        alpha_pred=y[0, 0] ** 2,
    ),
    "energy-pooled": lambda x, y: energy_loss(
        x, jnp.stack([y, 2 * y], 2), grad_weight=x[0, 0] ** 2, form="pooled"
    ),
    "energy": lambda x, y: energy_loss(x, jnp.stack([y, 2 * y], 2), grad_weight=x[0, 0] ** 2),
    "fro": lambda x, y: orthonormal_fro_reg(x + y),
    "fro-keyed": lambda x, y: orthonormal_fro_reg(x + y, key=jax.random.key(3)),
    "logfro": lambda x, y: orthonormal_logfro_reg(x + y),
    "score": lambda x, y: vamp_score(*TRAINING[..., : x.shape[1]], x, y, rank=2),
}
every_loss = pytest.mark.parametrize("name", LOSSES)
DECOMPOSED = ["vamp-2", "vamp-1", "vamp-2-uncentred", "dpnets", "dpnets-relaxed", "logfro", "score"]


def batch(n=40, d=3, seed=0, dtype=np.float64):
    """Correlated pairs with means and unequal scales."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + rng.normal(size=d)
    return x.astype(dtype), (
        x @ rng.normal(size=(d, d)) / d + rng.normal(size=(n, d)) + 0.5
    ).astype(dtype)


@pytest.mark.parametrize("schatten_norm", [1, 2])
def test_vamp_of_a_cycle_and_of_identical_features(schatten_norm):
    """Deterministic and invertible: all singular values are 1, and centring takes the constant's away."""
    states = np.tile(np.eye(5), (7, 1))[3:].astype(np.float32)  # unequal counts
    for order in (np.roll(np.arange(5), 1), np.arange(5)):
        uncentred = vamp_loss(
            states, states[:, order], schatten_norm=schatten_norm, center_covariances=False
        )
        np.testing.assert_allclose(uncentred, -5, atol=2e-5)
        np.testing.assert_allclose(
            vamp_loss(states, states[:, order], schatten_norm=schatten_norm), -4, atol=2e-5
        )
    shuffled = np.random.default_rng(0).permutation(states)  # negative control
    assert vamp_loss(states, shuffled, schatten_norm=schatten_norm, center_covariances=False) > -4


@pytest.mark.parametrize("center", [True, False])
def test_vamp_does_not_change_under_linear_maps(center):
    """Columns may differ by any factor, in single precision too."""
    x, y = batch(dtype=np.float32)
    mixing = np.random.default_rng(5).normal(size=(3, 3)).astype(np.float32)
    far = np.float32([[1e-8, 1.0, 1e6]])
    for schatten_norm in (1, 2):
        loss = partial(vamp_loss, schatten_norm=schatten_norm, center_covariances=center)
        np.testing.assert_allclose(loss(x @ mixing + 5 * center, y * 3), loss(x, y), rtol=1e-3)
        for one, other in ((far, far[:, ::-1]), (1e-30, 1e-30), (1e30, 1e30), (1e30, 1.0)):
            np.testing.assert_allclose(
                loss(x * np.float32(one), y * np.float32(other)), loss(x, y), rtol=1e-4
            )
        assert abs(loss(x**3, y) - loss(x, y)) > 0.01  # negative control


@pytest.mark.parametrize("center", [True, False])
def test_vamp_slopes_take_any_unit(center):
    x, y = batch(dtype=np.float32)
    slope = jax.jit(jax.grad(partial(vamp_loss, center_covariances=center)))
    for unit in np.float32([1e-30, 1e30]):
        np.testing.assert_allclose(
            np.asarray(slope(x * unit, y * unit)) * unit, slope(x, y), atol=1e-5
        )


@pytest.mark.parametrize("center", [True, False])
def test_vamp_scores_take_any_unit(center):
    x, y = batch(dtype=np.float32)
    score = partial(vamp_score, rank=2, center_covariances=center)
    for unit in np.float32([1e-30, 1e30]):
        np.testing.assert_allclose(
            score(x * unit, y * unit, y * unit, x * unit), score(x, y, y, x), rtol=1e-3
        )


def test_vamp_of_ill_conditioned_features_in_single_precision():
    """Condition number 1e4, in directions that are not those of the axes; covariances in float32 lose it (control)."""
    rng = np.random.default_rng(6)
    x = rng.normal(size=(500, 5))
    y = 0.7 * x[:, ::-1] + 0.7 * rng.normal(size=x.shape)
    mixing = np.geomspace(1, 1e-4, 5)[:, None] * np.linalg.qr(rng.normal(size=(5, 5)))[0]
    bases = [np.linalg.qr(a - a.mean(0))[0] for a in (x, y)]
    expected = -np.sum((bases[0].T @ bases[1]) ** 2)
    x, y = (x @ mixing).astype(np.float32), (y @ mixing).astype(np.float32)
    np.testing.assert_allclose(vamp_loss(x, y), expected, rtol=1e-3)
    centred = [a - a.mean(0) for a in (x, y)]
    inverse = [np.linalg.pinv(a.T @ a, rcond=1e-6, hermitian=True) for a in centred]
    cross = centred[0].T @ centred[1]
    assert abs(np.trace(inverse[0] @ cross @ inverse[1] @ cross.T) + expected) > 0.1


@pytest.mark.parametrize("shape", [(3, 5), (10, 5), (11, 5), (200, 1)])
def test_contrastive_equals_its_definition_in_either_form(shape):
    x, y = batch(*shape)
    n = shape[0]
    inner = x @ y.T
    expected = (inner**2).sum() - (np.diag(inner) ** 2).sum()
    expected = expected / (n * (n - 1)) - 2 / n * np.trace(inner)
    with jax.enable_x64(True):
        np.testing.assert_allclose(spectral_contrastive_loss(x, y), expected, rtol=1e-12)
    single = spectral_contrastive_loss(x.astype(np.float32), y.astype(np.float32))
    np.testing.assert_allclose(single, expected, rtol=1e-5, atol=1e-5 * (inner**2).mean())


def test_contrastive_takes_no_square_of_the_batch():
    x = jnp.ones((3000, 4))
    shapes = str(jax.make_jaxpr(jax.grad(spectral_contrastive_loss))(x, x))
    assert "3000,3000" not in shapes
    assert "8,8" in str(jax.make_jaxpr(spectral_contrastive_loss)(x[:8], x[:8]))


def test_autoencoder_by_hand():
    x, y = np.ones((2, 3, 4), np.float32), np.zeros((2, 3, 4), np.float32)
    code, moved = np.zeros((2, 5), np.float32), np.full((2, 5), 3, np.float32)
    loss = autoencoder_loss(
        x, y, x + 2, code, moved, y + 5, alpha_rec=10.0, alpha_lin=100.0, alpha_pred=1000.0
    )
    assert loss == 10 * 4 + 100 * 9 + 1000 * 25
    assert autoencoder_loss(x, y, x, code, code, y) == 0


@pytest.mark.parametrize(("n", "d", "m"), [(5, 3, 2), (30, 2, 1)])
def test_energy_equals_its_definitions(n, d, m, x64):
    x, _ = batch(n, d)
    jac = np.random.default_rng(7).normal(size=(n, d, m))
    kernel = x @ x.T + 0.3 * np.einsum("idk,jdk->ij", jac, jac)
    moment = (x.T @ x + 0.3 * np.einsum("nik,njk->ij", jac, jac)) / n
    size = 2 * np.trace(x.T @ x) / n
    pooled = energy_loss(x, jac, grad_weight=0.3, form="pooled")
    np.testing.assert_allclose(pooled, (kernel**2).mean() - size, rtol=1e-11)
    energy = energy_loss(x, jac, grad_weight=0.3)  # the form that ranks is the default
    np.testing.assert_allclose(energy, (moment**2).sum() - size, rtol=1e-11)


def test_orthonormality_of_exact_gaussians():
    """Covariance S and mean m known: the barrier in closed form, and its zero."""
    draws = np.random.default_rng(0).normal(size=(30, 4))
    draws[:, 0] = 1
    white = np.linalg.qr(draws)[0][:, 1:] * 30**0.5  # the empirical mean is zero, the covariance I
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(3, 3)))[0]
    for scale, mean in (
        (np.ones(3), np.zeros(3)),
        (np.array([0.5, 1.0, 2.0]), np.array([0.1, -0.2, 0.3])),
    ):
        expected = np.mean(scale**4 - scale**2 - np.log(scale**2)) + 2 * mean @ mean
        x = white * scale @ turn + mean
        np.testing.assert_allclose(
            orthonormal_logfro_reg(x.astype(np.float32)), expected, rtol=1e-5, atol=1e-5
        )
        with jax.enable_x64(True):
            np.testing.assert_allclose(orthonormal_logfro_reg(x), expected, atol=1e-12)


def test_fro_is_the_average_over_quadruples(x64):
    x = np.random.default_rng(2).exponential(size=(6, 2))
    squares = [((x[i] - x[j]) @ (x[k] - x[m])) ** 2 / 4 for i, j, k, m in permutations(range(6), 4)]
    trace = np.trace(np.cov(x.T))
    inner = x @ x.T
    mean = (inner.sum() - np.trace(inner)) / 30  # pairs of different samples
    expected = (np.mean(squares) - 2 * trace + 2 + 2 * mean) / 2
    np.testing.assert_allclose(orthonormal_fro_reg(x), expected, rtol=1e-10)
    wide = np.hstack([x, np.zeros((6, 4))])  # n <= 2 d: the other form of the sum
    np.testing.assert_allclose(orthonormal_fro_reg(wide) * 6 - 4, expected * 2, rtol=1e-10)
    # A key draws quadruples; over many keys the average is the same.
    keys = jax.random.split(jax.random.key(0), 20_000)
    draws = np.asarray(jax.jit(jax.vmap(lambda key: orthonormal_fro_reg(x, key=key)))(keys))
    assert abs(draws.mean() - expected) < 4 * draws.std() / 20_000**0.5
    assert draws.std() > 0.01


@pytest.mark.parametrize("center", [True, False])
def test_dpnets_by_its_equation(center, x64):
    x, y = batch()
    a, b = (x - x.mean(0), y - y.mean(0)) if center else (x, y)
    cov_x, cov_y, cross = a.T @ a / 40, b.T @ b / 40, a.T @ b / 40
    penalty = sum(np.trace(c @ c - c - scipy.linalg.logm(c)) for c in (cov_x, cov_y))
    plain = np.trace(np.linalg.solve(cov_x, cross) @ np.linalg.solve(cov_y, cross.T))
    relaxed = (cross**2).sum() / np.linalg.norm(cov_x, 2) / np.linalg.norm(cov_y, 2)
    assert relaxed < plain
    for score, option in ((plain, False), (relaxed, True)):
        loss = dpnets_loss(x, y, relaxed=option, metric_deformation=0.7, center_covariances=center)
        np.testing.assert_allclose(loss, -score + 0.7 / 6 * penalty, rtol=1e-9)


def direct_score(x, y, x_test, y_test, schatten_norm, rank):
    """Return the VAMP score by inverse square roots of covariances."""

    def covariances(x, y):
        x, y = x - x.mean(0), y - y.mean(0)
        return x.T @ x / len(x), x.T @ y / len(x), y.T @ y / len(x)

    def inverse_root(matrix):
        return np.linalg.inv(scipy.linalg.sqrtm(matrix).real)

    cov_x, cross, cov_y = covariances(x, y)
    left, _, right = np.linalg.svd(inverse_root(cov_x) @ cross @ inverse_root(cov_y))
    u, v = inverse_root(cov_x) @ left[:, :rank], inverse_root(cov_y) @ right[:rank].T
    cov_x, cross, cov_y = covariances(x_test, y_test)
    seen = inverse_root(u.T @ cov_x @ u) @ (u.T @ cross @ v) @ inverse_root(v.T @ cov_y @ v)
    return (np.linalg.svd(seen, compute_uv=False) ** schatten_norm).sum()


@pytest.mark.parametrize(("schatten_norm", "rank"), [(1, 2), (2, 2), (1, None), (2, None)])
def test_score_against_a_direct_computation(schatten_norm, rank, x64):
    """Without a rank it is the loss of the test data."""
    training = batch(seed=0, d=7)
    test = batch(n=25, seed=1, d=7)
    score = vamp_score(*training, *test, schatten_norm=schatten_norm, rank=rank)
    np.testing.assert_allclose(
        score, direct_score(*training, *test, schatten_norm, rank), rtol=1e-9
    )
    if rank is None:
        np.testing.assert_allclose(score, -vamp_loss(*test, schatten_norm=schatten_norm), rtol=1e-9)


@pytest.mark.slow
@every_loss
def test_gradient_is_that_of_finite_differences(name, x64):
    """Compiled and mapped over batches, the value and the gradient are those of each."""
    rng = np.random.default_rng(8)
    pairs = jnp.stack([jnp.stack(batch(seed=seed)) for seed in range(2)])
    direction = rng.normal(size=pairs.shape[1:])
    total = jax.jit(lambda pair: LOSSES[name](pair[0], pair[1]))
    values, gradients = jax.jit(jax.vmap(jax.value_and_grad(total)))(pairs)
    for pair, value, gradient in zip(pairs, values, gradients, strict=True):
        np.testing.assert_allclose(value, LOSSES[name](pair[0], pair[1]), rtol=1e-8, atol=1e-10)
        expected = directional(total, pair, direction)
        np.testing.assert_allclose(jnp.sum(gradient * direction), expected, rtol=1e-6, atol=1e-8)


def dependent(z):
    """Three features, a large constant, a repeated one, a sum and zeros."""
    array_library = np if isinstance(z, np.ndarray) else jnp
    constant = array_library.full_like(z[:, :1], 1234.1)
    return array_library.concatenate(
        [z, constant, z[:, :1], z[:, 1:2] + 2 * z[:, 2:], 0 * z[:, :1]], 1
    )


def few(z):
    """Five features of four samples, which VAMP scores refuse."""
    return jnp.sin(z[:4] @ jnp.asarray(np.random.default_rng(9).normal(size=(3, 5))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "extend"),
    [
        *((name, dependent) for name in DECOMPOSED),
        *((name, few) for name in ("dpnets-relaxed", "logfro", "score")),
    ],
)
def test_gradient_of_deficient_batches(name, extend):
    """Finite in all entries, in both precisions, and right along changes of the batch that keep the rank."""
    loss = LOSSES[name]
    x, y = batch()
    direction = np.random.default_rng(10).normal(size=(2, *x.shape))
    both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    single, gradients = both(
        extend(jnp.asarray(x, jnp.float32)), extend(jnp.asarray(y, jnp.float32))
    )
    assert all(jnp.isfinite(gradient).all() for gradient in gradients)

    with jax.enable_x64(True):
        pair = jnp.stack([x, y])
        wide, pull = jax.vjp(jax.vmap(extend), pair)
        double, gradients = both(*wide)
        assert all(jnp.isfinite(gradient).all() for gradient in gradients)
        total = jax.jit(lambda pair: loss(extend(pair[0]), extend(pair[1])))
        expected = directional(total, pair, direction)
        gradient = pull(jnp.stack(gradients))[0]
        np.testing.assert_allclose(jnp.sum(gradient * direction), expected, rtol=1e-5, atol=1e-6)
    if name.startswith("vamp"):  # the floor of the logarithm is one of the dtype
        np.testing.assert_allclose(single, double, rtol=1e-3)


@pytest.mark.parametrize("schatten_norm", [1, 2])
def test_deficient_features_change_no_loss(schatten_norm):
    x, y = batch(dtype=np.float32)
    loss = vamp_loss(x, y, schatten_norm=schatten_norm)
    np.testing.assert_allclose(
        vamp_loss(dependent(x), dependent(y), schatten_norm=schatten_norm), loss, rtol=1e-3
    )


def test_a_large_constant_changes_no_loss():
    x, y = batch(dtype=np.float32)
    offset = np.full(
        (40, 1), 1e4 / 3, np.float32
    )  # rounding of its mean must not make it a feature
    np.testing.assert_allclose(
        vamp_loss(np.hstack([x, offset]), np.hstack([y, offset])), vamp_loss(x, y), rtol=1e-4
    )


@pytest.mark.parametrize("rank", [2, None])
def test_deficient_features_change_no_score_of_other_data(rank, x64):
    training = batch()
    test = batch(n=25, seed=1)
    score = vamp_score(*map(dependent, training + test), rank=rank)
    np.testing.assert_allclose(score, direct_score(*training, *test, 2, rank), rtol=1e-8)


@pytest.mark.slow  # it takes decompositions of wide features, in two programs
def test_members_with_wide_features_do_not_hang():
    """Two independent decompositions in one program, batched by members, did: here they are ordered."""
    x, noise = np.random.default_rng(0).normal(size=(2, 4, 150, 100)).astype(np.float32)
    y = x + noise
    both = jax.value_and_grad(dpnets_loss)
    mapped = jax.jit(jax.vmap(both))
    for _ in range(2):
        values, gradients = jax.block_until_ready(mapped(x, y))
    value, gradient = jax.jit(both)(x[2], y[2])
    np.testing.assert_allclose(values[2], value, rtol=1e-4)
    np.testing.assert_allclose(gradients[2], gradient, rtol=1e-2, atol=1e-4)


@every_loss
def test_dtype_follows_the_input(name, x64):
    for dtype in (np.float32, np.float64):
        if name != "score":  # its training data here are of double precision
            assert jax.eval_shape(LOSSES[name], *batch(dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("center", [True, False])
def test_batches_that_any_features_explain_are_refused(center):
    """They score their rank whatever they hold: one more sample, and noise no longer does."""
    least = 5 if center else 4
    options = {"center_covariances": center}
    x, y = batch(n=least, dtype=np.float32)
    assert vamp_loss(x, y, **options) > -2.999
    jax.eval_shape(partial(dpnets_loss, **options), x, y)
    short = x[:-1], y[:-1]
    words = f"`x` must hold at least {least} samples for 3 features"
    for loss in (vamp_loss, dpnets_loss, jax.jit(partial(vamp_loss, **options))):
        with pytest.raises(ValueError, match=words):
            loss(*short, **({} if loss not in (vamp_loss, dpnets_loss) else options))
    jax.eval_shape(partial(dpnets_loss, relaxed=True, **options), *short)
    more = batch(n=20, dtype=np.float32)
    with pytest.raises(ValueError, match=words):
        vamp_score(*short, *more, **options)
    with pytest.raises(ValueError, match="`x_test` must hold at least"):
        vamp_score(*more, *short, **options)
    assert jnp.isfinite(vamp_score(*more, *short, rank=2, **options))


def test_wrong_arguments_are_named(unchecked):
    x, y = batch(dtype=np.float32)
    refused(
        (lambda: vamp_loss(x, y, schatten_norm=3), "`schatten_norm` must be 1 or 2, got 3"),
        (
            lambda: vamp_score(x, y, x, y, rank=4),
            r"`rank` must be at most the number of features \(3\), got 4",
        ),
        (
            lambda: dpnets_loss(x, y, metric_deformation=-1.0),
            "`metric_deformation` must be non-negative",
        ),
        (lambda: spectral_contrastive_loss(x[:1], y[:1]), "`x` must hold at least two pairs"),
        (
            lambda: autoencoder_loss(x, y, x, x, x, y, alpha_lin=-1.0),
            "`alpha_lin` must be non-negative",
        ),
        (
            lambda: energy_loss(x, x[:, :, None], form="other"),
            "`form` must be one of 'energy', 'pooled'",
        ),
        (lambda: orthonormal_fro_reg(x[:3]), "`x` must hold at least four samples"),
    )


@pytest.mark.slow
def test_a_mean_that_swamps_the_variance_is_named():
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(2, 60, 3)) + 1e4).astype(np.float32)
    for loss in (vamp_loss, dpnets_loss, lambda *a, **k: vamp_score(*a, *a, **k)):
        with pytest.warns(
            UserWarning, match="Column . of `y` varies.*pass center_covariances=True"
        ):
            loss(x - x.mean(0)[None], y, center_covariances=False)
        loss(x, y, center_covariances=True)
        jax.jit(partial(loss, center_covariances=False))(x, y)
    with pytest.warns(UserWarning, match="take features about their mean"):
        spectral_contrastive_loss(x, y)
