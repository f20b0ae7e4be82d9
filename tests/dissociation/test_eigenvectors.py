import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray
from drawn import assert_only_draws
from saved import assert_saved

from dissociation.bilinear import Spectrum
from dissociation.figures import _eigenvector_measures as measures
from dissociation.figures import eigenvector_tables as tables
from dissociation.figures import eigenvectors, rows

pytestmark = pytest.mark.slow

KEY = jax.random.PRNGKey(3)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    sizes = {"num_seeds": 4, "large": 24, "num_large_seeds": 3, "num_components": 15}
    config = dataclasses.replace(eigenvectors.Config().quick(), num_epochs=20, **sizes)
    folder = tmp_path_factory.mktemp("eigenvectors")
    return eigenvectors.compute(config, key=KEY, cache=folder), config, folder


def test_similarity(small):
    results, config, _ = small
    for size in config.sizes:
        pairs = 3 if size == config.reference else 12  # no network with itself
        one = eigenvectors.of_size(results, size)
        assert one.similarity.shape == (4, pairs, 10, 5)
        found = rows(one.similarity, "measures")
        # The best matching is at least as good as matching equal ranks.
        assert (found["matched"].sum(2) >= found["magnitude"].sum(2) - 1e-4).all()
        assert np.abs(one.form).max() <= 1
        # Digits have features, and every network finds them: far above chance, and the leading ones
        # more than the rest.
        chance = (2 / (np.pi * 784)) ** 0.5
        assert found["positive"][..., 0].mean() > 5 * chance
        assert found["positive"][..., 0].mean() > found["positive"][..., 4].mean()
    np.testing.assert_allclose(results.top[1, 1], found["magnitude"][..., 0].mean(), rtol=1e-5)
    assert results.with_self > results.top[1, 1]  # a network agrees with itself
    np.testing.assert_allclose(results.with_self, (3 * results.top[1, 1] + 3) / 6, rtol=1e-5)


def test_networks_that_diverged_are_left_out_and_named(small):
    results, config, _ = small
    # The last of the reference size's three networks, and the first of the other size's.
    found = results.copy(deep=True)
    found.diverged_at[:] = [[5, -1, -1, -1], [-1, -1, 9, -1]]
    left = found.diverged_at.values < 0
    alive = {12: left[0], 24: left[1, :3]}
    known = np.take_along_axis(left, found["first"].values, 1) & left[1][found.second.values]
    assert known[0].sum() == 6
    assert known[1, :3].sum() == 1
    for name in ("error", "full_error"):
        found[name] = found[name].where(found.diverged_at < 0)
    found["similarity"] = found.similarity.where(
        xarray.DataArray(known, dims=("hidden_sizes", "pairs"))
    )
    for index, (size, others) in enumerate(((12, alive[24]), (24, None))):
        one = eigenvectors.of_size(found, size)
        pairs = np.stack([one["first"], one.second])
        for place, similarity in enumerate(one.similarity.values):
            found.interval[index, place] = measures.intervals(
                similarity, pairs, alive[size], others
            )
    interval = found.interval.sel(measures="magnitude")
    assert np.isfinite(interval.sel(hidden_sizes=24, bounds="mean")).all()
    for mean, low, high in interval.sel(hidden_sizes=12).values:
        kept = results.similarity.sel(hidden_sizes=12, measures="magnitude")[[3, 4, 6, 7, 9, 10]]
        np.testing.assert_allclose(mean, kept.mean(("pairs", "classes")), rtol=1e-5)
        assert ((low <= mean + 1e-6) & (mean <= high + 1e-6)).all()
    assert [row[2][-8:] for row in eigenvectors.table(found)[1:]] == ["(3 of 4)", "(2 of 3)"]
    assert [row[1] for row in tables.accuracy_table(found)[1:]] == ["3 of 4", "2 of 3"]
    left_out = "size 12 seed 0 at step 5, size 24 seed 2 at step 9 (5 of 7 networks remain)"
    assert eigenvectors.headline(found).endswith(left_out)
    assert_only_draws(eigenvectors, found)


def test_top_similarity_is_of_networks_that_did_not_diverge():
    rng = np.random.default_rng(0)
    vectors = np.linalg.qr(rng.normal(size=(3, 10, 8, 8)))[0]
    stacked = jax.vmap(lambda own: Spectrum(jnp.ones((10, 8)), own, False))(
        jnp.asarray(vectors, jnp.float32)
    )
    spectra = {size: {"magnitude": stacked} for size in (12, 24)}
    for kept in ([True, True, True], [True, False, True]):
        top = measures.top_similarity(spectra, {size: np.array(kept) for size in spectra})["top"]
        first = np.abs(np.einsum("aci,bci->abc", vectors[:, :, 0], vectors[:, :, 0])).mean(2)[
            np.ix_(kept, kept)
        ]
        np.testing.assert_allclose(
            top[1, 1], first[np.triu_indices(len(first), 1)].mean(), rtol=1e-5
        )
        np.testing.assert_allclose(top[0, 1], first.mean(), rtol=1e-5)


def test_sizes_of_several_lengths_are_padded(small, tmp_path):
    results, *_ = small
    dims = {
        "train_loss": ("hidden_sizes", "seeds", "epochs"),
        "top": ("hidden_sizes", "other_hidden_sizes"),
    }
    assert_saved(results, tmp_path, dims)
    lengths = {axis: results[f"{axis}_length"].values.tolist() for axis in measures.PADDED}
    assert lengths == {"seeds": [4, 3], "pairs": [12, 3], "ranks": [5, 5], "components": [13, 16]}
    assert results.train_loss.dtype == results.similarity.dtype == np.float32
    for name in ("train_loss", "full_error", "error"):
        assert np.isnan(results[name].sel(hidden_sizes=24, seeds=3)).all()
        assert all(
            np.isfinite(eigenvectors.of_size(results, size)[name]).all() for size in (12, 24)
        )
    assert results.second.sel(hidden_sizes=24).values.tolist() == [1, 2, 2] + [-1] * 9
    assert results.radii.attrs == results.norms.attrs == {"units": "pixel intensity"}


def test_truncation(small):
    results, config, _ = small
    for size in config.sizes:
        one = eigenvectors.of_size(results, size)
        assert (one.error[..., 0] > 0.8).all()  # no component: class 0 for all
        assert (one.error.sel(components=10).mean("seeds") < 0.5).all()
        np.testing.assert_allclose(
            one.error.sel(orders="magnitude")[:, -1], one.full_error, atol=0.1
        )
        np.testing.assert_allclose(one.validation_accuracy[:, -1], 1 - one.full_error, atol=1e-6)
    dims = ("hidden_sizes", "orders", "seeds", "components")
    errors = np.array([[[[0.9, 0.3, 0.2], [0.9, 0.2, 0.2]]]])
    variables = {"error": (dims, errors), "full_error": (("hidden_sizes", "seeds"), [[0.2, 0.2]])}
    exact = xarray.Dataset(variables, {"hidden_sizes": [24], "orders": ["magnitude"]})
    assert eigenvectors.components_needed(exact) == {24: 2.0}
    assert eigenvectors.components_needed(exact, drop=0.06) == {24: 1.0}
    assert eigenvectors.components_needed(exact, drop=0.0) == {24: np.inf}


def test_details(small):
    results, config, _ = small
    assert (np.diff(results.eigenvalues) <= 0).all()
    assert results.leading.shape == (2, 3, 784)
    data = eigenvectors.source(config)
    first = data.test_images[np.argmax(np.asarray(data.test_labels).argmax(1) == config.digit)]
    np.testing.assert_array_equal(results.image, np.asarray(first).reshape(-1))  # and of its digit
    parts = results.component_values * (results.vectors @ results.image) ** 2
    np.testing.assert_allclose(results.contributions, parts, rtol=1e-3, atol=1e-4)
    assert results.kept.values.tolist() == ["1", "5", "15", "all"]
    radii = results.radii.sel(kept="all")
    assert (radii >= 0).all()
    np.testing.assert_allclose(
        (radii > 0).mean(), 1 - results.full_error.sel(hidden_sizes=24, seeds=0), atol=0.35
    )


def test_masks(small):
    results, config, _ = small
    np.testing.assert_allclose(np.linalg.norm(results.mask), 1, rtol=1e-5)
    whole = 1 - results.full_error.sel(hidden_sizes=config.reference, seeds=0)
    accuracy, share, random = results.mask_accuracy, results.mask_share, results.random_accuracy
    np.testing.assert_allclose(accuracy[:, 0], whole, atol=1e-6)
    np.testing.assert_allclose(random[0], whole, atol=1e-6)
    # A mask of weights alone does far more harm than random ones of its norm, and draws images to
    # its digit.
    assert accuracy[:, -1].min() < random[-1] - 0.05
    assert share[:, -1].max() > share[0, 0] + 0.1


def test_tables(small):
    results, *_ = small
    for make in (
        tables.similarity_table,
        tables.accuracy_table,
        tables.mask_table,
        tables.certified_table,
    ):
        shown = make(results)
        assert len({len(row) for row in shown}) == 1
        assert len(shown) > 1
    certified = {row[0]: row[1:] for row in tables.certified_table(results, (0.0, 1e6))[1:]}
    assert list(certified) == ["1", "5", "15", "all"]
    np.testing.assert_allclose(
        float(certified["all"][0]), (results.radii.sel(kept="all") > 0).mean(), atol=5e-3
    )
    assert float(certified["all"][1]) == 0
    assert [row[1] for row in tables.similarity_table(results)[1:]] == [
        "1",
        "5",
    ] * 3  # 5 ranks were compared


def test_images_tables_and_resuming(small):
    results, config, folder = small
    with warnings.catch_warnings(action="error"):
        assert_only_draws(eigenvectors, results)
    assert "glyphs" in eigenvectors.headline(results)
    for part in (
        "4 of size 12, 3 of size 24",
        "1000 training and 200 test images",
        "over 3 to 4 seeds",
        "(d, e)",
    ):
        assert part in eigenvectors.caption(results)
    left, right, bar = eigenvectors.draw(results).subfigs[0].axes
    assert left.get_xticks()[0] == 1
    assert right.images[0].get_clim() == (0, 1)
    assert bar.get_ylabel() == "similarity"
    again = eigenvectors.compute(config, key=KEY, cache=folder)
    xarray.testing.assert_identical(results.drop_attrs(), again.drop_attrs())


def test_intervals_of_one_network_are_not_numbers():
    """Of three networks two diverged: there are no pairs left to resample."""
    similarity = np.full((3, 2, 4), np.nan)
    similarity[0] = np.arange(8.0).reshape(2, 4)
    pairs = np.array([[0, 0, 1], [1, 2, 2]])
    found = measures.intervals(similarity, pairs, np.array([True, False, False]))
    assert found.shape == (2, 3, 4)
    np.testing.assert_allclose(found[:, 0], np.tile(similarity[0].mean(0), (2, 1)))
    assert np.isnan(found[:, 1:]).all()
