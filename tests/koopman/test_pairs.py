import jax
import jax.numpy as jnp
import numpy as np
import pytest

from koopman.operators import fit_ridge
from koopman.pairs import gram_root, lagged_pairs, merge_moments, moments, scan_moments


@pytest.mark.parametrize("lag", [1, 3])
def test_pairs_stay_within_their_trajectory(lag):
    # The hundreds of a state name its trajectory, the rest its time.
    trajectories = [100.0 * k + np.arange(length)[:, None] for k, length in enumerate((7, 4, 12))]
    x, y = lagged_pairs(trajectories, lag)
    assert len(x) == sum(len(t) - lag for t in trajectories)
    np.testing.assert_array_equal(y - x, np.full_like(x, lag))
    np.testing.assert_array_equal(x // 100, y // 100)
    # The negative control: pairs of the joined trajectories cross two boundaries.
    x, y = lagged_pairs(np.concatenate(trajectories), lag)
    assert np.sum(x // 100 != y // 100) == 2 * lag


def test_one_trajectory_of_pictures():
    film = np.arange(24.0).reshape(4, 3, 2)
    x, y = lagged_pairs(film, 2)
    np.testing.assert_array_equal(x, film[:2])
    np.testing.assert_array_equal(y, film[2:])


@pytest.mark.parametrize(
    ("trajectories", "lag", "error", "words"),
    [
        (np.zeros((3, 2)), 3, ValueError, r"`trajectories` must be longer than the lag \(3\), got 3 samples"),
        ([np.zeros((5, 2)), np.zeros((2, 2))], 2, ValueError, r"trajectories\[1\]"),
        ([np.zeros((5, 2)), np.zeros((5, 3))], 1, ValueError, r"states of shape \(2,\)"),
        ([], 1, ValueError, "at least one trajectory"),
        (np.zeros((5, 2)), 0, ValueError, "`lag`"),
        (np.asarray([[0.0], [1.0], [np.nan], [np.inf]]), 1, ValueError, r"nan at index \(2, 0\)"),
    ],
)
def test_pairs_refuse(trajectories, lag, error, words):
    with pytest.raises(error, match=words):
        lagged_pairs(trajectories, lag)


def test_lags_can_be_swept():
    trajectories = [np.random.default_rng(n).normal(size=(n, 2)).astype(np.float32) for n in (9, 6)]
    x, y = jax.jit(jax.vmap(lambda lag: lagged_pairs(trajectories, lag, max_lag=4)))(jnp.arange(1, 5))
    assert x.shape == y.shape == (4, 5 + 2, 2)
    np.testing.assert_array_equal(x, np.broadcast_to(np.concatenate([t[:-4] for t in trajectories]), x.shape))
    for index, lag in enumerate(range(1, 5)):
        np.testing.assert_array_equal(y[index], np.concatenate([t[lag:][: len(t) - 4] for t in trajectories]))
    np.testing.assert_array_equal(lagged_pairs(trajectories, 4, max_lag=4).y, lagged_pairs(trajectories, 4).y)
    for lag, words in ((5, r"`lag` must be at most `max_lag` \(4\)"), (0, "`lag` must be at least 1")):
        with pytest.raises(ValueError, match=words):
            lagged_pairs(trajectories, lag, max_lag=4)
    with pytest.raises(ValueError, match=r"trajectories\[1\]` must be longer than the lag \(6\)"):
        lagged_pairs(trajectories, 1, max_lag=6)


def test_moments_refuse_what_is_not_finite():
    x, y, o = draw()
    bad = np.where(np.arange(60)[:, None] == 13, np.nan, y).astype(np.float32)
    with pytest.raises(ValueError, match=r"`y` must be finite, got nan at index \(13, 0\)"):
        moments(x, bad)
    with pytest.raises(ValueError, match=r"`observable` must be finite, got nan at index \(13, 0\)"):
        moments(x, y, observable=bad)
    with pytest.raises(ValueError, match=r"`y` must be finite, got nan at index \(1, 3, 0\)"):
        scan_moments(x.reshape(6, 10, 3), bad.reshape(6, 10, 3))
    # Under jit values are not known; what comes out is refused by the fit.
    seen = jax.jit(moments)(x, bad)
    with pytest.raises(ValueError, match="`x` must be moments of finite data"):
        fit_ridge(seen)


def draw(n=60, d=3, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(2.0, 1.0, size=(n, width)).astype(np.float32) for width in (d, d, 2)]


@pytest.mark.parametrize("center", [False, True])
def test_moments_merge_to_those_of_all_pairs(center):
    x, y, o = draw()
    whole = moments(x, y, observable=o, center=center)
    parts = [moments(x[i:j], y[i:j], observable=o[i:j], center=center) for i, j in ((0, 11), (11, 12), (12, 60))]
    merged = merge_moments(merge_moments(parts[0], parts[1]), parts[2])
    scanned = jax.jit(lambda *a: scan_moments(*a[:2], observable=a[2], center=center))(
        *(a.reshape(6, 10, -1) for a in (x, y, o))
    )
    about = [a - a.mean(0) if center else a for a in (x, y, o)]
    for found in (whole, merged, scanned):
        assert float(found.count) == 60
        np.testing.assert_allclose(found.mean_x, x.mean(0), rtol=1e-5)
        joint = np.concatenate(about, 1)
        np.testing.assert_allclose(found.root.T @ found.root, joint.T @ joint, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(np.tril(whole.root, -1), 0)


def test_moments_refuse_what_does_not_fit():
    x, y, _ = draw()
    with pytest.raises((ValueError, TypeError)):
        moments(x, y[:-1])
    with pytest.raises(ValueError, match="centred as `first` is"):
        merge_moments(moments(x, y, center=True), moments(x, y))
    with pytest.raises(ValueError, match="widths of `first`"):
        merge_moments(moments(x, y), moments(x[:, :2], y[:, :2]))


@pytest.mark.parametrize("shape", [(9, 4), (3, 4)])
def test_gram_root_and_its_gradient(shape):
    with jax.enable_x64(True):
        rng = np.random.default_rng(1)
        # The third column repeats the first: rank falls short, where the derivative of QR itself is not finite.
        x = rng.normal(size=shape)[:, [0, 1, 0, 3]]
        weight = rng.normal(size=(4, 4))

        def value(x):
            root = gram_root(x)
            return jnp.sum(weight * (root.T @ root)) + jnp.sum((root.T @ root) ** 2)

        step = rng.normal(size=shape)
        slope = jnp.vdot(jax.grad(value)(jnp.asarray(x)), step)
        numeric = (value(jnp.asarray(x + 1e-5 * step)) - value(jnp.asarray(x - 1e-5 * step))) / 2e-5
        np.testing.assert_allclose(slope, numeric, rtol=1e-6)
