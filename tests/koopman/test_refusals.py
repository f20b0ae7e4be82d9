"""Wrong calls raise errors that name the argument."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import koopman
from koopman import (
    Linear,
    PrincipalComponents,
    ReducedRank,
    Ridge,
    choose_centres,
    fit,
    fit_generator,
    predict,
    score,
)

X = np.ones((6, 2), np.float32) * np.arange(6, dtype=np.float32)[:, None]
KEY = jax.random.key(0)
FEW, MANY = np.random.default_rng(0).normal(size=(2, 40, 4)).astype(np.float32)
PATH, JAC = FEW[:20, :3], np.ones((40, 4, 1), np.float32)


def operator():
    return fit(Ridge(), PATH[:-1], PATH[1:])


def stacked(estimator, *numbers):
    return fit(jax.vmap(estimator)(jnp.asarray(numbers)), FEW, MANY)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        # Estimators.
        (lambda: Ridge(-1.0), "`alpha` must be non-negative"),
        (lambda: ReducedRank(0), "`rank` must be at least 1"),
        (
            lambda: fit(ReducedRank(2, solver="spectral"), FEW, MANY),
            "`solver` must be one of .*'randomized', got",
        ),
        (
            lambda: fit(ReducedRank(2, solver="randomized"), FEW, MANY, kernel=koopman.RBF(1.0)),
            "one of .*'spectral'",
        ),
        (lambda: stacked(Ridge, 0.05, 0.1), r"`alpha` must be a single number.*jax.vmap"),
        (lambda: stacked(ReducedRank, 0, 1, 2), "`rank` must be a single number"),
        # Fits of features.
        (
            lambda: fit(ReducedRank(3), X, X),
            r"`rank` must be at most the number of features \(2\), got 3",
        ),
        (lambda: fit(ReducedRank(1), X, X, route="svd"), "'qr', 'covariance'"),
        (lambda: fit(ReducedRank(1), X[:1], X[:1]), "at least two pairs"),
        (lambda: fit(ReducedRank(1), X), "lagged_pairs"),
        (lambda: fit(ReducedRank(1), koopman.moments(X, X), X), "stand alone"),
        # Fits with a kernel.
        (
            lambda: fit(PrincipalComponents(7), X, X, kernel=Linear()),
            "at most the number of samples",
        ),
        (lambda: fit(Ridge(), X, X, centres=X), "`kernel` must be given with `centres`"),
        (
            lambda: fit(Ridge(), koopman.moments(X, X), kernel=Linear()),
            "`x` must be states.*got moments",
        ),
        (lambda: fit(Ridge(), X, kernel=Linear()), "`x` must be states.*got no `y`"),
        (
            lambda: fit(Ridge(), X, X, kernel=Linear(), center=True),
            "`center` must be False with a kernel",
        ),
        (
            lambda: fit(Ridge(), X, X, kernel=Linear(), route="covariance"),
            "`route` must be 'qr' for a kernel without",
        ),
        (lambda: choose_centres(X, 7, key=KEY), "`num_centres`"),
        # Kernels.
        (lambda: koopman.RBF(0.0), "`length_scale` must be positive"),
        (lambda: koopman.Matern(1.0, 2.0), "one of 0.5, 1.5, 2.5"),
        (lambda: koopman.Polynomial(0), "`degree`"),
        (lambda: koopman.median_distance(X[:1]), "at least two states"),
        # Forecasts, spectra and generators.
        (lambda: predict(operator(), PATH, 0), "`steps` must be at least 1, got 0"),
        (lambda: predict(operator(), PATH[:, :2]), "as the operator was fitted"),
        (
            lambda: koopman.right_eigenfunctions(operator(), PATH[:, :2]),
            r"shape \[n, 3\], as the operator was fitted",
        ),
        (lambda: koopman.modes(operator(), time_step=0.0), "`time_step`"),
        (lambda: score(operator(), PATH, lag=7, steps=3), r"longer than lag \* steps \(21\)"),
        (
            lambda: koopman.align_dynamics(FEW[:4], MANY[:4], key=KEY, num_starts=0),
            "`num_starts` must be at least 1",
        ),
        (
            lambda: koopman.align_dynamics(FEW[:4], MANY[:4], key=KEY, num_steps=0),
            "`num_steps` must be at least 1",
        ),
        (
            lambda: koopman.align_dynamics(FEW[:4], MANY[:4], key=KEY, form="euclidean"),
            "`form` must be one of 'frob",
        ),
        (lambda: fit_generator(FEW, JAC, rank=5), "at most the number of features"),
        (lambda: fit_generator(FEW, JAC, rank=1, diffusion=0.0), "`diffusion`"),
        (lambda: fit_generator(FEW, JAC, rank=1, alpha=-1.0), "`alpha`"),
        (lambda: fit_generator(FEW, JAC, rank=1, shift=0.0), "`shift`"),
    ],
)
def test_wrong_calls_are_refused_by_name(call, words, unchecked):
    with pytest.raises((ValueError, TypeError), match=words):
        call()
