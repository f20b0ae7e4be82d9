"""Every public output that has a derivative, against finite differences; where there is none, nothing that looks so."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from differences import directional

from koopman import (
    RBF,
    Linear,
    Polynomial,
    PrincipalComponents,
    ReducedRank,
    Ridge,
    decompose,
    eigenpairs,
    eigenvalues,
    fit,
    fit_generator,
    left_eigenfunctions,
    matrix_powers,
    modes,
    predict,
    right_eigenfunctions,
    risk,
    score,
    singular_values,
)
from koopman._operators._forecast import r2_score

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(5)
TURN = 0.9 * np.asarray(
    [[np.cos(0.4), -np.sin(0.4), 0.1], [np.sin(0.4), np.cos(0.4), 0.0], [0.0, 0.2, 0.5]]
)
X = RNG.normal(size=(30, 3)) * np.asarray([1.0, 1.4, 0.8])
Y = X @ TURN.T + 0.3 * RNG.normal(size=X.shape)
JAC = RNG.normal(size=(30, 3, 2))


def of_operator(estimator, x, y, alpha, center=False):
    """All that is computed from an operator, whichever rotation of its latent functions the fit has."""
    observable = jnp.concatenate([y, y[:, :1] ** 2], 1)
    operator = fit(estimator(alpha=alpha), x, y, observable=observable, center=center)
    out = {
        "operator.singular_values": operator.singular_values,
        "singular_values": singular_values(operator),
    }
    spectrum = decompose(operator)
    out["eigenvalues"] = eigenvalues(operator)
    for name in ("eigenvalues", "residuals", "condition", "shrinkage"):
        out[f"decompose.{name}"] = getattr(spectrum, name)
    found = modes(operator, time_step=0.5, spectrum=spectrum)
    out |= {f"modes.{name}": value for name, value in found._asdict().items()}
    out["right"] = right_eigenfunctions(operator, x[:4], spectrum)
    out["moduli"] = jnp.abs(right_eigenfunctions(operator, np.ones((2, 3)), spectrum))
    out["left"] = left_eigenfunctions(operator, x[:4], spectrum)
    out["predict"] = predict(operator, x[:4], [1, 3])
    out["risk"] = risk(operator, x, y)
    out["score"] = score(operator, x, steps=2, observable=observable)
    out["r2_score"] = r2_score(observable, predict(operator, x))
    return out


def of_dependent(estimator, x, y, alpha):
    """Where a feature is another one again C_x is singular, and its null space must not turn gradients to NaN."""
    operator = fit(estimator(alpha=alpha), x, y)
    out = {
        "operator.singular_values": operator.singular_values[:3],
        "predict": predict(operator, x, 3),
    }
    return out | {"risk": risk(operator, x[20:], y[20:])}


def of_kernel(estimator, kernel, number, x, y, alpha):
    """With a kernel, or on centres. A polynomial's matrix is singular, and must not turn gradients to NaN."""
    operator = fit(
        estimator(alpha=alpha), x[:20], y[:20], kernel=kernel, centres=number and x[:number]
    )
    out = {
        "operator.singular_values": operator.singular_values[:2],
        "risk": risk(operator, x[20:], y[20:]),
    }
    return out | {"predict": predict(operator, x[20:], 3)}


def of_moments(core, gram_y, readout):
    """The decomposition in the coordinates of the latent functions."""
    operator = fit(Ridge(0.2), X, Y)
    operator = eqx.tree_at(
        lambda o: (o.core, o.gram_y, o.readout), operator, (core, gram_y, readout)
    )
    out = {f"decompose.{name}": value for name, value in decompose(operator)._asdict().items()}
    out["eigenpairs"] = jnp.concatenate([eigenpairs(core)[0][None], eigenpairs(core)[1]])
    out["matrix_powers"] = matrix_powers(core, np.asarray([0, 1, 6]))
    return out


def of_generator(x, jac, diffusion, alpha, shift):
    out = {}
    for name, options in (
        ("default", {}),
        ("alpha", {"alpha": alpha}),
        ("shift", {"alpha": alpha, "shift": shift}),
        ("alpha 0", {"alpha": 0.0 * alpha}),
    ):
        found = fit_generator(x, jac, rank=3, diffusion=diffusion, **options)
        out |= {f"{field} {name}": value for field, value in found._asdict().items()}
    return out


KINDS = {
    "ridge": Ridge,
    "pcr": partial(PrincipalComponents, 2),
    "reduced_rank": partial(ReducedRank, 2),
}
KERNELS = {
    "ridge": (Ridge, Polynomial(2), None),
    "pcr by krylov": (partial(PrincipalComponents, 2, solver="krylov"), RBF(1.0), None),
    "reduced_rank": (partial(ReducedRank, 2, solver="dense"), Polynomial(2), None),
    "reduced_rank by krylov": (partial(ReducedRank, 2, solver="krylov"), RBF(1.0), None),
    "ridge on centres": (Ridge, RBF(2.0), 8),
}
CORE = np.asarray([[0.8, -0.3, 0.1], [0.4, 0.7, 0.0], [0.2, 0.1, 0.3]])
TABLE = {
    **{name: (partial(of_operator, kind), (X, Y, 0.3)) for name, kind in KINDS.items()},
    **{
        f"{name} of dependent features": (
            partial(of_dependent, kind),
            (X[:, [0, 1, 2, 0]], Y[:, [0, 1, 2, 0]], 0.1),
        )
        for name, kind in KINDS.items()
    },
    **{
        f"kernel {name}": (partial(of_kernel, *options), (X, Y, 0.1))
        for name, options in KERNELS.items()
    },
    "centred": (partial(of_operator, Ridge, center=True), (X, Y + 1.0, 0.3)),
    "moments": (of_moments, (CORE, 2 * np.eye(3) + 0.1 * CORE @ CORE.T, RNG.normal(size=(3, 2)))),
    "generator": (of_generator, (X, JAC, 0.7, 0.1, 2.0)),
}


def flat(outputs):
    """Complex values by their parts."""
    return {
        k: jnp.stack([v.real, v.imag]) if jnp.iscomplexobj(v) else v for k, v in outputs.items()
    }


@pytest.mark.parametrize("name", TABLE)
def test_every_output_against_finite_differences(name, x64):
    outputs, point = TABLE[name]
    rng = np.random.default_rng(1)
    point = tuple(jnp.asarray(part) for part in point)
    direction = tuple(jnp.asarray(rng.normal(size=part.shape)) for part in point)
    function = jax.jit(lambda point: flat(outputs(*point)))
    found = jax.jit(lambda point: jax.jvp(function, (point,), (direction,))[1])(point)
    values, expected = function(point), directional(function, point, direction)
    for key, value in found.items():
        numeric = expected[key]
        size = max(np.abs(numeric).max(), np.abs(values[key]).max() * 1e-3, 1e-6)
        assert np.abs(numeric - value).max() < 1e-6 * size, f"{name}: {key}\n{value}\n{numeric}"
    # Reverse mode is its transpose.
    pull = {key: jnp.asarray(rng.normal(size=value.shape)) for key, value in found.items()}
    (gradient,) = jax.jit(lambda point: jax.vjp(function, point)[1](pull))(point)
    backward = sum(jnp.vdot(a, b) for a, b in zip(gradient, direction, strict=True))
    forward = sum(jnp.vdot(pull[key], value) for key, value in found.items())
    np.testing.assert_allclose(backward, forward, rtol=1e-9)


def pulled(function, point):
    """The gradient of sums of each output, alone."""
    return jax.grad(lambda point: jnp.sum(jnp.real(function(point))))(point)


@pytest.mark.parametrize(
    ("matrix", "dtype"),
    [
        (np.diag([0.9, 0.5, 0.5]), np.float32),
        (
            np.asarray([[0.9, 0.0, 0.0], [0.0, 0.5, 1.0], [0.0, 0.0, 0.5]]),
            np.float32,
        ),  # one eigenvector of two
        (np.kron(np.eye(2), CORE[:2, :2]), np.float64),  # two equal conjugate pairs
        (np.zeros((2, 2)), np.float64),
    ],
)
def test_coinciding_eigenvalues_have_no_derivative(matrix, dtype, precision):
    """In any basis, and the others keep theirs."""
    for seed in (None, 0):
        basis = (
            np.eye(len(matrix))
            if seed is None
            else np.random.default_rng(seed).normal(size=matrix.shape)
        )
        moved = jnp.asarray(basis @ matrix @ np.linalg.inv(basis), dtype)
        for slot in (len(matrix) - 1, len(matrix) - 2):
            assert not jnp.isfinite(pulled(lambda m, s=slot: eigenpairs(m)[0][s], moved)).all()
            weights = jnp.asarray(np.random.default_rng(3).normal(size=len(matrix)), dtype)
            turned = pulled(
                lambda m, s=slot, v=weights: v * jnp.real(eigenpairs(m)[1][:, s]), moved
            )
            assert not jnp.isfinite(turned).all()
        if (
            len(matrix) == 3 and matrix[1, 2] == 0
        ):  # the defective one has no left eigenvectors at all
            found = pulled(lambda m: eigenpairs(m)[0][0], moved)
            exact = np.outer(np.linalg.inv(basis)[0], basis[:, 0])  # l w^T
            np.testing.assert_allclose(found, exact, atol=2e-3 if dtype == np.float32 else 1e-6)


def test_coinciding_rates_and_singular_values_have_no_derivative(x64):
    x = np.linalg.qr(RNG.normal(size=(30, 3)))[0]
    jac = (
        np.concatenate([x, np.zeros_like(x)]).reshape(2, 30, 3).transpose(1, 2, 0)
    )  # E = C: all rates are one
    for part in (0, 1):
        slope = pulled(
            lambda x, part=part: fit_generator(x, jac, rank=2, alpha=0.0)[part] ** 2, jnp.asarray(x)
        )
        assert not jnp.isfinite(slope).all()
    cycle = jnp.eye(4)[np.arange(13) % 4]
    fitted = lambda x: singular_values(fit(Ridge(0.0), x, jnp.roll(cycle[:-1], -1, 0)))  # noqa: E731
    assert not jnp.isfinite(jax.grad(lambda x: fitted(x)[0])(cycle[:-1])).all()


def test_masked_ranks_leave_the_gradients_of_the_others_alone(x64):
    """Zeros coincide, and nothing that depends on the leading eigenvalues alone is to see it."""

    def values(alpha, rank):
        operator = fit(
            PrincipalComponents(rank, alpha),
            jnp.pad(X, ((0, 0), (0, 2))),
            jnp.pad(Y, ((0, 0), (0, 2))),
        )
        found = decompose(operator)
        times = modes(operator, spectrum=found).implied_time_scale
        return (
            jnp.sum(jnp.abs(found.eigenvalues) ** 2)
            + found.residuals[0]
            + times[0]
            + found.condition[1]
        )

    cut = jax.grad(lambda alpha: values(alpha, 2))(0.2)
    np.testing.assert_allclose(jax.jit(jax.grad(values))(0.2, 2), cut, rtol=1e-8)
    step = (values(0.2 + 1e-5, 2) - values(0.2 - 1e-5, 2)) / 2e-5
    np.testing.assert_allclose(cut, step, rtol=1e-7)


@pytest.mark.parametrize(("kernel", "dtype"), [(None, np.float32), (Linear(), np.float64)])
@pytest.mark.parametrize("kind", [PrincipalComponents, ReducedRank])
def test_no_derivative_where_the_rank_cuts_equal_singular_values(kind, kernel, dtype, precision):
    x = np.eye(4, dtype=dtype)[np.arange(37) % 4]
    x, y, step = x[:-1], x[1:], RNG.normal(size=(36, 4)).astype(dtype)

    def slope(estimator, target=y, kernel=kernel):
        forecast = lambda s: predict(fit(estimator, x + s * step, target, kernel=kernel), x)  # noqa: E731
        return jax.jvp(forecast, (dtype(0),), (dtype(1),))[1]

    assert not jnp.isfinite(slope(kind(2, 1e-3))).any()
    # Where both are equal but neither is cut off nothing is lost, and all of them together are the
    # ridge estimator.
    np.testing.assert_allclose(slope(kind(4, 1e-3)), slope(Ridge(1e-3), kernel=None), atol=1e-4)
