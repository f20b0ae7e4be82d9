import dataclasses
import warnings

import jax
import numpy as np
import pytest

from dissociation.figures import eigenvector_tables as tables
from dissociation.figures import eigenvectors

KEY = jax.random.PRNGKey(3)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    config = dataclasses.replace(eigenvectors.Config().quick(), num_epochs=20)
    folder = tmp_path_factory.mktemp("eigenvectors")
    return eigenvectors.compute(config, key=KEY, folder=folder), config, folder


def test_similarity(small):
    results, config, _ = small
    for size, measures in results.similarity.items():
        pairs = 3 if size == config.reference else 9  # nobody with itself
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


def test_intervals(small):
    results, *_ = small
    for size in results.config.sizes:
        honest, published = (eigenvectors.intervals(results, size, resample=r) for r in (True, False))
        np.testing.assert_allclose(honest[0], published[0], rtol=1e-4)
        for mean, low, high in (honest, published):
            assert (low <= mean + 1e-6).all()
            assert (mean <= high + 1e-6).all()


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
    exact = results._replace(error={24: {"magnitude": np.asarray([[0.9, 0.3, 0.2], [0.9, 0.2, 0.2]])}})
    exact = exact._replace(full_error={24: np.asarray([0.2, 0.2])})
    assert eigenvectors.components_needed(exact) == {24: 2.0}
    assert eigenvectors.components_needed(exact, drop=0.06) == {24: 1.0}


def test_details(small):
    results, config, _ = small
    assert (np.diff(results.values) <= 0).all()
    assert results.leading.shape == (2, 3, 784)
    assert results.explained["image"].shape == (784,)
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
    # A mask of weights alone does far more harm than random ones of its norm, and draws pictures to its digit.
    worst = masks["mask_accuracy"][:, -1].min()
    assert worst < masks["random_accuracy"][-1] - 0.1
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


def test_pictures_tables_and_resuming(small):
    results, config, folder = small
    figure = eigenvectors.draw(results)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.canvas.draw()
    rows = eigenvectors.table(results)
    assert len({len(row) for row in rows}) == 1
    assert "glyphs" in eigenvectors.headline(results)
    again = eigenvectors.compute(config, key=KEY, folder=folder)
    jax.tree.map(np.testing.assert_array_equal, eigenvectors.arrays(results), eigenvectors.arrays(again))
    with pytest.raises(ValueError, match="`reference` must be one of the sizes"):
        dataclasses.replace(config, reference=7)
