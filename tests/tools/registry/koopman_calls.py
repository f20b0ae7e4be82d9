"""Valid calls of the public functions of `koopman`."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import koopman
from dissociation.data import Dataset
from koopman import datasets

RANDOM = np.random.default_rng(0)
PATH = RANDOM.standard_normal((13, 3)).astype(np.float32)
X, Y = PATH[:-1], PATH[1:]
JACOBIAN = RANDOM.standard_normal((12, 3, 2)).astype(np.float32)
OBSERVABLE = RANDOM.standard_normal((12, 2)).astype(np.float32)
STABLE = np.array([[0.5, 0.1], [0.0, 0.3]], np.float32)
TRANSITION = np.array([[0.9, 0.1], [0.2, 0.8]], np.float32)
KEY = np.array([0, 1], np.uint32)  # raw: making a typed one would start a backend
KERNEL = koopman.RBF(1.0)


def energy(x):
    """Return the energy of a harmonic well."""
    return jnp.sum(x**2) / 2


def squared_error(target, forecast):
    """Return a metric of forecasts."""
    return jnp.mean((target - forecast) ** 2)


def kernel(x, y):
    """Return products of states, as a plain function."""
    return x @ y.T


def encoder():
    """Return a network from states of 3 coordinates to 2 features."""
    return eqx.nn.Linear(3, 2, key=jax.random.key(0))


@functools.cache
def operator():
    """Return a fitted operator on 3 features."""
    return koopman.fit(koopman.Ridge(0.1), X, Y)


@functools.cache
def decomposed():
    """Return the spectrum of `operator()`."""
    return koopman.decompose(operator())


def feature_map():
    """Return a feature map of states of 3 coordinates."""
    return koopman.FeatureMap(2, encoder=encoder(), key=jax.random.key(0))


def digits():
    """Return images of two classes."""
    labels = np.eye(2, dtype=np.float32)[[0, 1, 1, 0]]
    images = RANDOM.random((4, 784)).astype(np.float32)
    return Dataset("noise", images, labels, images, labels)


PAIRS = {"x": X, "y": Y}
FIT = PAIRS | {"observable": OBSERVABLE}
OPTIONS = {"center": False, "route": "qr"}
RUN = {"num_steps": 3, "key": KEY, "num_trajectories": 2}
STEPS = RUN | {"time_step": 0.01, "substeps": 2}
REGIMES = {"matrices": np.stack([STABLE, -STABLE]), "transition": TRANSITION}
NOISY = {"friction": 1.0, "sigma": 1.0}
CELLS = {"time_step": 0.1, "num_components": 2, "num_cells": 40}
ALIGN = {"key": KEY, "num_starts": 2, "num_steps": 20, "form": "frobenius"}

CALLS = {
    koopman.RBF: lambda: dict(length_scale=1.5),
    koopman.Laplacian: lambda: dict(length_scale=1.5),
    koopman.Matern: lambda: dict(length_scale=1.5, nu=2.5),
    koopman.Polynomial: lambda: dict(degree=3, gamma=0.5, offset=0.0),
    koopman.FeatureMap: lambda: dict(
        features=2, encoder=encoder(), feature_norm=1.5, init="lecun", key=KEY
    ),
    koopman.Autoencoder: lambda: dict(
        features=2, orthogonal=True, upsampling="bilinear", init="lecun", key=KEY
    ),
    datasets.overdamped_langevin: lambda: (
        STEPS | NOISY | dict(potential=energy, initial=np.ones((2, 3), np.float32))
    ),
    datasets.langevin_spectrum: lambda: dict(potential=energy, domain=(-3.0, 3.0)) | NOISY | CELLS,
    datasets.prinz_langevin: lambda: (
        STEPS | NOISY | dict(time_step=1e-3, initial=np.ones((2, 1), np.float32))
    ),
    datasets.prinz_spectrum: lambda: NOISY | CELLS,
    datasets.linear_system: lambda: (
        RUN | dict(matrix=STABLE, noise=STABLE[:, :1], initial=np.ones(2, np.float32))
    ),
    datasets.linear_spectrum: lambda: dict(matrix=STABLE, degree=2, noise=STABLE),
    datasets.regime_switching_var: lambda: (
        RUN | REGIMES | dict(noise=0.1, initial=np.ones(2, np.float32), initial_regime=1)
    ),
    datasets.regime_switching_spectrum: lambda: dict(REGIMES),
    datasets.logistic_map: lambda: RUN | dict(order=2, initial=np.full((2, 1), 0.3, np.float32)),
    datasets.logistic_features: lambda: dict(states=RANDOM.random((5, 1)), order=2),
    datasets.logistic_spectrum: lambda: dict(order=2, num_components=2),
    datasets.ordered_mnist: lambda: dict(num_digits=2, data=digits(), folder="."),
    datasets.cycle_spectrum: lambda: dict(num_digits=4),
    datasets.ornstein_uhlenbeck: lambda: (
        RUN | dict(theta=1.0, sigma=1.0, time_step=0.1, initial=np.ones((2, 1), np.float32))
    ),
    datasets.ornstein_uhlenbeck_spectrum: lambda: dict(
        theta=1.0, sigma=1.0, time_step=0.1, num_components=3
    ),
    datasets.duffing: lambda: (
        STEPS
        | dict(
            initial=np.ones((2, 2), np.float32),
            alpha=0.5,
            beta=0.1,
            gamma=0.1,
            delta=2.5,
            omega=2.0,
        )
    ),
    datasets.lorenz63: lambda: (
        STEPS | dict(initial=np.ones((2, 3), np.float32), sigma=10.0, mu=28.0, beta=2.5)
    ),
    koopman.predict: lambda: dict(operator=operator(), x=X, steps=2),
    koopman.matrix_powers: lambda: dict(matrix=STABLE, exponents=np.array([1, 3])),
    koopman.diagnose: lambda: dict(operator=operator()) | PAIRS,
    koopman.risk: lambda: dict(operator=operator()) | PAIRS,
    koopman.score: lambda: dict(
        operator=operator(), trajectory=PATH, lag=1, steps=2, observable=PATH, metric=squared_error
    ),
    koopman.align_dynamics: lambda: ALIGN | dict(a=STABLE, b=TRANSITION),
    koopman.dynamical_distance: lambda: ALIGN | dict(a=STABLE, b=TRANSITION),
    koopman.pairwise_dynamical_distance: lambda: (
        ALIGN
        | dict(
            operators=np.stack([STABLE, TRANSITION, -STABLE]),
            others=np.stack([STABLE.T, TRANSITION]),
        )
    ),
    koopman.eigenvalue_distance: lambda: dict(
        eigenvalues_a=np.array([0.5, 0.1j, -0.1j], np.complex64),
        eigenvalues_b=np.array([0.2, 0.9, -0.3j], np.complex64),
    ),
    koopman.transition_matrix: lambda: dict(operator=operator(), metric="data"),
    koopman.Ridge: lambda: dict(alpha=0.1),
    koopman.PrincipalComponents: lambda: dict(rank=2, alpha=0.1, solver="krylov"),
    koopman.ReducedRank: lambda: dict(rank=2, alpha=0.1, solver="spectral"),
    koopman.fit_generator: lambda: dict(
        x=X, jac=JACOBIAN, rank=2, diffusion=1.0, alpha=0.1, shift=1.0
    ),
    koopman.median_distance: lambda: dict(x=X, max_samples=10),
    koopman.encode: lambda: dict(model=encoder(), states=X),
    koopman.train_encoders: lambda: (
        dict(
            model=feature_map(),
            loss="vamp",
            data=(X, Y),
            validation=(X, Y),
            optimizer=optax.adam(1e-3),
        )
        | dict(num_seeds=1, num_epochs=1, batch_size=6, key=KEY)
    ),
    koopman.validation_loss: lambda: (
        dict(kind="vamp", model=feature_map(), trajectories=np.stack([PATH, PATH[::-1]]))
        | dict(lag=1, trajectory_axis=0, batch_size=12)
    ),
    koopman.vamp_loss: lambda: PAIRS | dict(schatten_norm=2, center_covariances=True),
    koopman.vamp_score: lambda: (
        PAIRS | dict(x_test=X[:7], y_test=Y[:7], schatten_norm=2, center_covariances=True, rank=2)
    ),
    koopman.dpnets_loss: lambda: (
        PAIRS | dict(relaxed=False, metric_deformation=1.0, center_covariances=True)
    ),
    koopman.spectral_contrastive_loss: lambda: dict(PAIRS),
    koopman.autoencoder_loss: lambda: (
        PAIRS
        | dict(x_rec=X + 1, y_enc=X[:, :2], x_evo=Y[:, :2], y_pred=Y + 1)
        | dict(alpha_rec=1.0, alpha_lin=1.0, alpha_pred=1.0)
    ),
    koopman.energy_loss: lambda: dict(x=X, jac=JACOBIAN, grad_weight=0.1, form="energy"),
    koopman.orthonormal_fro_reg: lambda: dict(x=X, key=KEY),
    koopman.orthonormal_logfro_reg: lambda: dict(x=X),
    koopman.nystroem_map: lambda: dict(kernel=KERNEL, centres=X[:4]),
    koopman.choose_centres: lambda: dict(
        x=X, num_centres=4, key=KEY, method="leverage", kernel=KERNEL, alpha=0.1
    ),
    koopman.fit: (
        lambda: FIT | dict(estimator=koopman.ReducedRank(2, 0.1, solver="dense")) | OPTIONS,
        lambda: (
            FIT | dict(estimator=koopman.PrincipalComponents(2, 0.1), kernel=kernel, center=False)
        ),
        lambda: FIT | dict(estimator=koopman.Ridge(0.1), kernel=KERNEL, centres=X[:4], route="qr"),
    ),
    koopman.lagged_pairs: lambda: dict(
        trajectories=np.stack([PATH, PATH]), lag=1, max_lag=2, trajectory_axis=0
    ),
    koopman.delay_embed: lambda: dict(
        trajectory=np.stack([PATH, PATH]), num_delays=3, stride=2, trajectory_axis=0
    ),
    koopman.moments: lambda: PAIRS | dict(observable=OBSERVABLE, center=True),
    koopman.merge_moments: lambda: dict(first=koopman.moments(X, Y), second=koopman.moments(Y, X)),
    koopman.scan_moments: lambda: dict(
        x=X.reshape(3, 4, 3),
        y=Y.reshape(3, 4, 3),
        observable=OBSERVABLE.reshape(3, 4, 2),
        center=True,
    ),
    koopman.eigenvalues: lambda: dict(operator=operator()),
    koopman.decompose: lambda: dict(operator=operator()),
    koopman.right_eigenfunctions: lambda: dict(operator=operator(), x=X, spectrum=decomposed()),
    koopman.left_eigenfunctions: lambda: dict(operator=operator(), x=X, spectrum=decomposed()),
    koopman.modes: lambda: dict(operator=operator(), time_step=0.1, spectrum=decomposed()),
    koopman.singular_values: lambda: dict(operator=operator()),
}
