import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import assert_only_draws
from labels import assert_labelled

from dissociation.bilinear import Spectrum
from dissociation.figures import eigenvector_tables as tables
from dissociation.figures import eigenvectors
from dissociation.figures._eigenvector_measures import top_similarity
from dissociation.figures._seeds import masked

pytestmark = pytest.mark.slow

KEY = jax.random.PRNGKey(3)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    config = dataclasses.replace(eigenvectors.Config().quick(), num_epochs=20)
    folder = tmp_path_factory.mktemp("eigenvectors")
    return eigenvectors.compute(config, key=KEY, folder=folder), config, folder


def test_similarity(small):
    results, config, _ = small
    for size, measures in results.similarity.items():
        pairs = 3 if size == config.reference else 9  # no network with itself
        for by in ("magnitude", "positive", "negative", "matched"):
            assert measures[by].shape == (pairs, 10, 5)
        # The best matching is at least as good as matching equal ranks.
        assert (measures["matched"].sum(2) >= measures["magnitude"].sum(2) - 1e-4).all()
        assert np.abs(measures["form"]).max() <= 1
        # Digits have features, and every network finds them: far above chance, and the leading ones more than the rest.
        chance = (2 / (np.pi * 784)) ** 0.5
        assert measures["positive"][..., 0].mean() > 5 * chance
        assert measures["positive"][..., 0].mean() > measures["positive"][..., 4].mean()
    np.testing.assert_allclose(np.diag(results.top)[1], results.similarity[24]["magnitude"][..., 0].mean(), rtol=1e-5)
    assert results.with_self > results.top[1, 1]  # a network agrees with itself
    np.testing.assert_allclose(results.with_self, (3 * results.top[1, 1] + 3) / 6, rtol=1e-5)


def test_networks_that_diverged_are_left_out_and_named(small):
    results, config, _ = small
    # The last of the reference size's three networks, and the first of the other size's.
    diverged_at = {12: np.array([5, -1, -1]), 24: np.array([-1, -1, 9])}
    alive = {size: steps < 0 for size, steps in diverged_at.items()}
    similarity, pairs = {}, results.pairs
    for size, measures in results.similarity.items():
        gone = (diverged_at[size][pairs[size][0]] >= 0) | (diverged_at[24][pairs[size][1]] >= 0)
        similarity[size] = masked(measures, ~gone)
        assert (~gone).sum() == (1 if size == 24 else 4)
    left = {size: masked({"full": results.full_error[size], **results.error[size]}, alive[size])
            for size in config.sizes}  # fmt: skip
    found = results._replace(
        similarity=similarity,
        diverged_at=diverged_at,
        full_error={size: part.pop("full") for size, part in left.items()},
        error=left,
        intervals={
            size: eigenvectors._intervals(config, size, similarity[size], pairs[size], alive) for size in config.sizes
        },
    )
    assert np.isfinite(found.intervals[24]["magnitude"][:, 0]).all()
    for mean, low, high in found.intervals[12]["magnitude"]:
        kept = results.similarity[12]["magnitude"][[3, 4, 6, 7]]
        np.testing.assert_allclose(mean, kept.mean((0, 1)), rtol=1e-5)
        assert ((low <= mean + 1e-6) & (mean <= high + 1e-6)).all()
    assert [row[2].endswith("(2 of 3)") for row in eigenvectors.table(found)[1:]] == [True, True]
    assert tables.accuracy_table(found)[1][1] == "2 of 3"
    left_out = "size 12 seed 0 at step 5, size 24 seed 2 at step 9 (4 of 6 networks remain)"
    assert eigenvectors.headline(found).endswith(left_out)
    assert_only_draws(eigenvectors, found)


def test_top_similarity_is_of_networks_that_did_not_diverge(small):
    results, config, _ = small
    rng = np.random.default_rng(0)
    vectors = np.linalg.qr(rng.normal(size=(3, 10, 8, 8)))[0]
    stacked = jax.vmap(lambda own: Spectrum(jnp.ones((10, 8)), own, False))(jnp.asarray(vectors, jnp.float32))
    spectra = {size: {"magnitude": stacked} for size in config.sizes}
    for kept in ([True, True, True], [True, False, True]):
        alive = {size: np.array(kept) for size in config.sizes}
        top = top_similarity(spectra, alive)["top"]
        first = np.abs(np.einsum("aci,bci->abc", vectors[:, :, 0], vectors[:, :, 0])).mean(2)[np.ix_(kept, kept)]
        np.testing.assert_allclose(top[1, 1], first[np.triu_indices(len(first), 1)].mean(), rtol=1e-5)
        np.testing.assert_allclose(top[0, 1], first.mean(), rtol=1e-5)


def test_sizes_are_an_axis(small, tmp_path):
    results, config, _ = small
    dims = {"train_loss": ("sizes", "seeds", "epochs"), "top": ("sizes", "other_sizes")}
    found = assert_labelled(eigenvectors, results, tmp_path, dims).to_xarray()
    size = config.sizes[-1]
    np.testing.assert_array_equal(found.train_loss.sel(sizes=size), results.history[size]["train_loss"])


def test_truncation(small):
    results, config, _ = small
    for size in config.sizes:
        for order in eigenvectors.ORDERS:
            errors = results.error[size][order]
            assert errors.shape == (3, 11)
            assert (errors[:, 0] > 0.8).all()  # no component: class 0 for all
            assert errors[:, 10].mean() < 0.5
        np.testing.assert_allclose(results.error[size]["magnitude"][:, -1], results.full_error[size], atol=0.1)
        np.testing.assert_allclose(
            results.history[size]["validation_accuracy"][:, -1], 1 - results.full_error[size], atol=1e-6
        )
    errors = {24: {"magnitude": np.asarray([[0.9, 0.3, 0.2], [0.9, 0.2, 0.2]])}}
    exact = results._replace(error=errors, full_error={24: np.asarray([0.2, 0.2])})
    assert eigenvectors.components_needed(exact) == {24: 2.0}
    assert eigenvectors.components_needed(exact, drop=0.06) == {24: 1.0}


def test_details(small):
    results, config, _ = small
    assert (np.diff(results.values) <= 0).all()
    assert results.leading.shape == (2, 3, 784)
    data = eigenvectors.source(config)
    first = data.test_images[np.argmax(np.asarray(data.test_labels).argmax(1) == config.digit)]
    np.testing.assert_array_equal(results.explained["image"], np.asarray(first).reshape(-1))  # and of its digit
    vectors, values = results.explained["vectors"], results.explained["component_values"]
    parts = values * (vectors @ results.explained["image"]) ** 2
    np.testing.assert_allclose(results.explained["contributions"], parts, rtol=1e-3, atol=1e-4)
    assert set(results.radii) == {0, 1, 5, 10}
    assert (results.radii[0] >= 0).all()
    np.testing.assert_allclose((results.radii[0] > 0).mean(), 1 - results.full_error[24][0], atol=0.35)


def test_masks(small):
    results, config, _ = small
    masks = results.masks
    np.testing.assert_allclose(np.linalg.norm(masks["mask"]), 1, rtol=1e-5)
    whole = 1 - results.full_error[config.reference][0]
    np.testing.assert_allclose(masks["mask_accuracy"][:, 0], whole, atol=1e-6)
    np.testing.assert_allclose(masks["random_accuracy"][0], whole, atol=1e-6)
    # A mask of weights alone does far more harm than random ones of its norm, and draws images to its digit.
    worst = masks["mask_accuracy"][:, -1].min()
    assert worst < masks["random_accuracy"][-1] - 0.05
    assert masks["mask_share"][:, -1].max() > masks["mask_share"][0, 0] + 0.1


def test_tables(small):
    results, config, _ = small
    for make in (tables.similarity_table, tables.accuracy_table, tables.mask_table, tables.certified_table):
        rows = make(results)
        assert len({len(row) for row in rows}) == 1
        assert len(rows) > 1
    certified = {row[0]: row[1:] for row in tables.certified_table(results, (0.0, 1e6))[1:]}
    assert list(certified) == ["1", "5", "10", "all"]
    np.testing.assert_allclose(float(certified["all"][0]), (results.radii[0] > 0).mean(), atol=5e-3)
    assert float(certified["all"][1]) == 0
    assert [row[1] for row in tables.similarity_table(results)[1:]] == ["1", "5"] * 3  # 5 ranks were compared


def test_images_tables_and_resuming(small):
    results, config, folder = small
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_only_draws(eigenvectors, results)
    assert "glyphs" in eigenvectors.headline(results)
    for part in ("3 of size 12, 3 of size 24", "1000 training and 200 test images", "means over 3 seeds", "(d, e)"):
        assert part in eigenvectors.caption(results)
    left, right, bar = eigenvectors.draw(results).subfigs[0].axes
    assert left.get_xticks()[0] == 1
    assert right.images[0].get_clim() == (0, 1)
    assert bar.get_ylabel() == "similarity"
    again = eigenvectors.compute(config, key=KEY, folder=folder)
    jax.tree.map(np.testing.assert_array_equal, eigenvectors.arrays(results), eigenvectors.arrays(again))
