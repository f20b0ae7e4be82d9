"""Joint moments against the samples themselves; multidimensional scaling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import similarity_reference as reference
from scipy.spatial.distance import pdist, squareform
from sklearn.manifold import smacof

from dissociation import similarity
from dissociation.similarity import _streaming as streaming

RNG = np.random.default_rng(0)
LATENT = RNG.standard_normal((400, 3))
X = (
    LATENT @ RNG.standard_normal((3, 5))
    + RNG.standard_normal((400, 5))
    + np.linspace(0, 20, 400)[:, None]
)
Y = LATENT @ RNG.standard_normal((3, 4)) + RNG.standard_normal((400, 4))
Z = RNG.standard_normal((400, 2))
CUTS = (0, 50, 57, 300, 400)


def batches(*arrays):
    return [
        tuple(array[start:stop] for array in arrays)
        for start, stop in zip(CUTS, CUTS[1:], strict=False)
    ]


@pytest.fixture(scope="module")
def moments_of_precision():
    """Return the moments in batches of unequal sizes and means, by True for float64."""
    moments = {}
    for is_double in (False, True):
        with jax.enable_x64(is_double):
            moments[is_double] = similarity.stream_moments(batches(X, Y, Z))
    return moments


@pytest.mark.parametrize(
    ("is_double", "tolerance"), [(False, 1e-5), (True, 1e-12)], ids=["float32", "float64"]
)
@pytest.mark.parametrize("name", streaming.STREAMED)
def test_streamed_measures_are_those_of_the_samples(
    name, is_double, tolerance, moments_of_precision
):
    """Batches have unequal sizes and unequal means."""
    with jax.enable_x64(is_double):
        found = np.asarray(
            similarity.similarity_from_moments(moments_of_precision[is_double], name)
        )
    wanted = np.array([[getattr(reference, name)(a, b) for b in (X, Y, Z)] for a in (X, Y, Z)])
    np.testing.assert_allclose(found, wanted, atol=tolerance)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["linear_cka", "debiased_cka"])
def test_streamed_baselines_are_those_of_the_samples(name, moments_of_precision):
    stacked = np.stack([np.pad(part, ((0, 0), (0, 5 - part.shape[1]))) for part in (X, Y, Z)])
    baseline = similarity.pairwise(stacked, name, members=True).baseline
    np.testing.assert_allclose(
        similarity.baseline_from_moments(moments_of_precision[True], name), baseline, atol=1e-12
    )


@pytest.mark.usefixtures("x64")
def test_moments_merge_in_any_order():
    parts = batches(X, Y)
    whole = similarity.stream_moments([(X, Y)])
    on_device = streaming._sums_on_device
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        found = similarity.stream_moments(parts[i] for i in order)
        for part in ("count", "mean", "products", "quartics"):
            one, other = getattr(found, part), getattr(whole, part)
            np.testing.assert_allclose(
                one, other, rtol=1e-9, atol=1e-9 * float(jnp.abs(other).max())
            )
    points = [part[0] for part in (X, Y)]
    sums = streaming._sums_on_host([X, Y], points, X.dtype)
    np.testing.assert_allclose(on_device([X, Y], points, X.dtype), sums, rtol=1e-9, atol=1e-9)


def test_large_means_cost_a_stream_no_digits():
    parts = [(1e5 + X[start : start + 7], 3e4 + Y[start : start + 7]) for start in range(0, 399, 7)]
    moments = similarity.stream_moments(
        (a.astype(np.float32), b.astype(np.float32)) for a, b in parts
    )
    x, y = (
        np.concatenate([np.asarray(part[k], np.float32) for part in parts]).astype(float)
        for k in (0, 1)
    )
    for name in ("linear_cka", "debiased_cka"):
        found = similarity.similarity_from_moments(moments, name)[0, 1]
        np.testing.assert_allclose(found, getattr(reference, name)(x, y), atol=1e-5)


def test_wrong_moments_are_refused_by_name():
    joint, read = (
        lambda *arrays: similarity.stream_moments([arrays]),
        similarity.similarity_from_moments,
    )
    single = X.astype(np.float32)
    for call, words in (
        (
            lambda: similarity.stream_moments([X, Y]),
            "`batches` must give a tuple of arrays each, one per representat",
        ),
        (lambda: similarity.stream_moments([]), "`batches` must give at least one batch"),
        (
            lambda: joint(np.where(X[7, 1] == X, np.nan, X)),
            r"`batches\[0\]\[0\]` must be finite, .* \(7, 1\)",
        ),
        (lambda: joint(X, Y[1:]), r"`batches` must hold arrays \[n, p\], \[n, q\], ... of one n"),
        (lambda: similarity.stream_moments([(X, Y), (Y, X)]), "of the same widths throughout"),
        (lambda: read(joint(X, Y), "cca"), "`measure` must be one of"),
        (
            lambda: read(joint(np.float32(1e-19) * single, Y)),
            "representations of mean squares from 3e-16 to 6e",
        ),
        (
            lambda: read(joint(np.float32(1e18) * single, Y)),
            "representations of mean squares from 3e-16 to 6e",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.usefixtures("x64")
def test_multidimensional_scaling_of_a_plane_is_exact():
    plane = RNG.standard_normal((9, 2))
    exact = squareform(pdist(plane))
    for found in (similarity.classical_mds(exact), similarity.smacof(exact, key=jax.random.key(0))):
        np.testing.assert_allclose(squareform(pdist(np.asarray(found.points))), exact, atol=1e-6)
        assert found.relative_stress < 1e-6


@pytest.mark.usefixtures("x64")
def test_multidimensional_scaling_agrees_with_scikit_learn():
    distances = squareform(RNG.random(36))
    classical = similarity.classical_mds(distances)
    np.testing.assert_allclose(
        np.abs(classical.points), np.abs(reference.classical_mds(distances, 2)), atol=1e-9
    )
    found = similarity.smacof(distances, rtol=1e-12, max_steps=5000)
    start = {"init": np.asarray(classical.points), "n_init": 1, "normalized_stress": False}
    _, wanted = smacof(distances, n_components=2, max_iter=5000, eps=1e-13, **start)
    assert found.stress == pytest.approx(wanted, rel=1e-4)
    assert similarity.smacof(
        distances, key=jax.random.key(0), num_starts=8
    ).stress <= found.stress * (1 + 1e-3)
    assert found.stress < classical.stress
    with pytest.raises(
        ValueError, match="`distances` must be symmetric, non-negative and zero on the diagonal"
    ):
        similarity.smacof(distances + np.eye(9))
    # Rounding on the diagonal, also below zero, is no distance.
    rounded = similarity.classical_mds(distances - 1e-9 * np.eye(9))
    np.testing.assert_array_equal(rounded.points, classical.points)
