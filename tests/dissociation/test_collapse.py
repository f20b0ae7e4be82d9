import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from words import refused, warned

from dissociation.measures import class_moments, merge_moments, neural_collapse
from dissociation.measures._collapse import (
    nearest_centre_agreement,
    self_duality,
    simplex_frame,
    trace_ratio,
)

RNG = np.random.default_rng(0)


def samples(count=400, width=12, classes=5, noise=0.5, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.choice(classes, count, p=np.arange(1, classes + 1) / sum(range(1, classes + 1)))
    means = rng.normal(size=(classes, width))
    return (means[labels] + noise * rng.normal(size=(count, width))).astype(np.float32), labels


def reference(features, labels, classes, classifier=None, logits=None):
    """Straight from the definitions, in float64."""
    z = features.astype(float)
    present = [c for c in range(classes) if (labels == c).any()]
    means = np.stack([z[labels == c].mean(0) for c in present])
    apart = np.stack([z[i] - means[present.index(c)] for i, c in enumerate(labels)])
    within = np.mean([a @ a for a in apart])
    between = np.sum(
        [
            (labels == c).mean() * np.sum((m - z.mean(0)) ** 2)
            for c, m in zip(present, means, strict=True)
        ]
    )
    scale = np.linalg.norm(z, axis=1).mean()
    values = np.linalg.svd(means, compute_uv=False)
    centred = means - means.mean(0)
    s_w = sum(np.outer(a, a) for a in apart) / len(z)
    s_b = centred.T @ centred / len(present)
    norms = np.linalg.norm(centred, axis=1)
    cosines = (centred @ centred.T / np.outer(norms, norms))[np.triu_indices(len(present), 1)]
    found = {
        "within": within,
        "between": between,
        "scale": scale,
        "nc1": within / (between + 1e-8),
        "rnc1": within / (scale**2 + 1e-10),
        "nc2": values[0] / values[-1] if len(present) <= z.shape[1] else np.inf,
        "trace": np.trace(s_w @ np.linalg.pinv(s_b, rcond=1e-8)) / len(present),
        "equinorm": norms.std() / norms.mean(),
        "equiangularity": cosines.std(),
        "maximal_angle": np.abs(cosines + 1 / (len(present) - 1)).mean(),
    }
    if classifier is not None:
        rows = classifier.astype(float)[present]
        found["nc3"] = (
            np.linalg.norm(rows / np.linalg.norm(rows) - centred / np.linalg.norm(centred)) ** 2
        )
        nearest = [present[int(np.argmin([np.linalg.norm(x - m) for m in means]))] for x in z]
        found["nc4"] = np.mean(
            [c == np.argmax(row) for c, row in zip(nearest, logits, strict=True)]
        )
    return found


@jax.jit
def measured(moments):
    found = {**vars(neural_collapse(moments)), **vars(simplex_frame(moments))}
    return found | ({} if moments.scatter is None else {"trace": trace_ratio(moments)})


@pytest.mark.parametrize(
    ("names", "width", "offset"),
    [
        ([0, 1, 2, 3, 4], 12, 0.0),
        ([0, 1, 3, 4, 6], 12, 1e4),  # of seven classes, 2 and 5 have no samples
        ([0, 1, 2, 4, 5], 3, 0.0),  # more classes than dimensions, one of them without samples
    ],
)
def test_against_the_definitions_in_float64(names, width, offset):
    features, labels = samples(width=width)
    features, labels, classes = (
        features + np.float32(offset),
        np.asarray(names)[labels],
        max(names) + 1,
    )
    classifier = RNG.normal(size=(classes, width)).astype(np.float32)
    logits = (features - features.mean(0)) @ classifier.T
    expected = reference(features, labels, classes, classifier, logits)
    moments = class_moments(features, labels, classes, scatter=True)
    found = measured(moments) | {
        "nc3": self_duality(moments, classifier),
        "nc4": nearest_centre_agreement(features, logits, moments),
    }
    assert set(found) == set(expected)
    assert 0 < expected["nc4"] < 1
    if offset:
        expected.pop("nc2")  # of the means as they are: see the warning
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-3 if offset else 1e-5, err_msg=name)


def test_trace_ratio_where_class_means_coincide():
    # Every class holds the same samples: a spread, and nothing between. Below: no spread either,
    # and one class alone.
    points = RNG.normal(size=(10, 4)).astype(np.float32) + 3
    labels = np.repeat(np.arange(3), 10)
    ratio = jax.jit(lambda z, y: trace_ratio(class_moments(z, y, 5, scatter=True)))
    assert ratio(np.tile(points, (3, 1)), labels) == np.inf
    assert np.isnan(ratio(np.zeros((30, 4), np.float32), labels))
    assert np.isnan(ratio(np.tile(points, (3, 1)), np.zeros(30, int)))
    # Two classes coincide, a third does not: the direction towards it is left.
    shifted = np.tile(points, (3, 1))
    shifted[20:] += np.asarray([0.0, 2.0, 0.0, 0.0], np.float32)
    expected = (
        2 / 3 * points[:, 1].astype(float).var() * 9 / 8
    )  # rank one: S_B = 8/9 along the shift
    np.testing.assert_allclose(ratio(shifted, labels), expected / 2, rtol=1e-4)


def test_batches_merge_to_the_whole():
    features, labels = samples()
    whole = class_moments(features, labels, 5, scatter=True)
    merged = class_moments(
        features[:7], labels[:7], 5, scatter=True
    )  # some classes are not in the first batch
    for start, stop in ((7, 150), (150, 400)):
        merged = merge_moments(
            merged, class_moments(features[start:stop], labels[start:stop], 5, scatter=True)
        )
    for name, value in vars(whole).items():
        np.testing.assert_allclose(getattr(merged, name), value, rtol=1e-5, atol=1e-4, err_msg=name)
    for name, value in measured(whole).items():
        np.testing.assert_allclose(measured(merged)[name], value, rtol=1e-4, err_msg=name)
    assert merge_moments(whole, class_moments(features, labels, 5)).scatter is None


@pytest.mark.parametrize(("scale", "cuts"), [(1e-30, []), (1e-20, [0, 150]), (1e30, [0, 150])])
def test_features_of_any_scale(scale, cuts):
    """Whose squares float32 does not hold; the first of three batches has no samples."""
    features, labels = samples()
    features = features.astype(np.float64) * scale
    logits = np.random.default_rng(3).normal(size=(400, 5))
    classifier = logits[:12].T
    expected = reference(features, labels, 5, classifier, logits)
    features = features.astype(np.float32)
    parts = zip(np.split(features, cuts), np.split(labels, cuts), strict=True)
    moments = functools.reduce(
        merge_moments, (class_moments(*part, 5, scatter=True) for part in parts)
    )
    small = pytest.warns(RuntimeWarning, match="beside which the published constants of `nc1`")
    with small if scale < 1 else contextlib.nullcontext():
        neural_collapse(moments)
    found = measured(moments) | {"nc4": nearest_centre_agreement(features, logits, moments)}
    for rows in (classifier, 1e-30 * classifier):
        found["nc3"] = self_duality(moments, rows)
        for name, value in found.items():
            wanted = expected[name] if expected[name] < 3e38 else np.inf
            np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-36, err_msg=name)


def test_near_collapse_nothing_cancels():
    # Classes 1000 apart from the origin with a spread of 0.01: mean of squares less square of the
    # mean is all rounding.
    rng = np.random.default_rng(0)
    labels = np.arange(300) % 3
    centres = np.asarray([[1000.0, 0, 0], [0, 1000.0, 0], [0, 0, 1000.0]])
    features = (centres[labels] + 0.01 * rng.normal(size=(300, 3))).astype(np.float32)
    exact = reference(features, labels, 3)
    found = neural_collapse(class_moments(features, labels, 3))
    np.testing.assert_allclose(found.within, exact["within"], rtol=1e-3)
    np.testing.assert_allclose(found.nc2, 1.0, rtol=1e-4)
    halves = [class_moments(features[i::2], labels[i::2], 3) for i in range(2)]
    np.testing.assert_allclose(
        neural_collapse(merge_moments(*halves)).within, exact["within"], rtol=2e-2
    )


def test_collapsed_features_of_a_simplex():
    simplex = np.eye(4) - 0.25
    labels = np.arange(40) % 4
    features = simplex[labels].astype(np.float32)
    moments = class_moments(features, labels, 4, scatter=True)
    found = measured(moments)
    for name in ("within", "nc1", "rnc1", "trace", "equinorm", "equiangularity", "maximal_angle"):
        np.testing.assert_allclose(found[name], 0.0, atol=1e-6, err_msg=name)
    assert found["nc2"] == np.inf  # the means of a simplex about its middle are linearly dependent
    slopes = jax.jit(jax.jacrev(lambda z: measured(class_moments(z, labels, 4, scatter=True))))(
        features
    )
    for name in ("rnc1", "trace", "equinorm", "equiangularity"):
        assert np.isfinite(slopes[name]).all(), name
    np.testing.assert_allclose(self_duality(moments, 3.0 * simplex), 0.0, atol=1e-6)
    np.testing.assert_allclose(self_duality(moments, -simplex), 4.0, atol=1e-6)
    turned = simplex[[1, 0, 3, 2]]
    cosine = np.sum(simplex * turned) / np.sum(simplex**2)
    np.testing.assert_allclose(self_duality(moments, turned), 2 - 2 * cosine, atol=1e-6)
    # An orthogonal frame is the other end: condition number 1.
    np.testing.assert_allclose(
        neural_collapse(class_moments(np.eye(4, dtype=np.float32)[labels], labels, 4)).nc2, 1.0
    )


def test_bad_input_is_refused():
    small, wide = (class_moments(np.ones((3, width)), np.arange(3), 3) for width in (2, 4))
    refused(
        (
            lambda: class_moments(np.ones((3, 2)), [0, 1, 5], 3),
            "`labels` must lie between 0 and 2, got 0",
        ),
        (lambda: trace_ratio(small), "`moments` must have a scatter matrix"),
        (lambda: merge_moments(small, wide), "`b` must have class means of the shape"),
        error=(ValueError, TypeError),
    )


@pytest.mark.parametrize(("offset", "number"), [(10, 0), (-1e4, 1)])
def test_uncentred_measures_of_an_offset_are_warned_of(offset, number):
    features, labels = samples()
    moments = class_moments(features + np.float32(offset), labels, 5)
    assert ["`nc2`" in words for words in warned(lambda: neural_collapse(moments))] == [
        True
    ] * number
    assert not warned(lambda: measured(moments))  # traced: no numbers to go by


def test_where_the_frame_is_undefined():
    labels = np.arange(12) % 3
    noise = RNG.normal(size=(4, 5))[np.repeat(np.arange(4), 3)]
    for offset in (0.0, 1e3):  # the same four samples in every class
        same = (offset + noise).astype(np.float32)
        moments = class_moments(same, labels, 4)
        assert np.isnan(
            [*vars(simplex_frame(moments)).values(), self_duality(moments, np.ones((4, 5)))]
        ).all()
    assert np.isnan([*vars(simplex_frame(class_moments(same, 0 * labels, 4))).values()]).all()
    # The middle class is at the mean of all: norms are defined, angles are not.
    middle = simplex_frame(
        class_moments((noise + (labels - 1)[:, None]).astype(np.float32), labels, 4)
    )
    np.testing.assert_allclose(middle.equinorm, 0.5**0.5, rtol=1e-5)
    assert np.isnan([middle.equiangularity, middle.maximal_angle]).all()


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_features_that_are_not_finite_are_refused_or_give_nan(bad):
    features, labels = samples(40)
    finite = np.zeros_like(features)
    good = class_moments(features.copy(), labels, 5)
    features[7, 3] = bad
    logits, classifier = np.eye(5, dtype=np.float32)[labels], np.ones((5, 12), np.float32)
    with pytest.raises(ValueError, match=r"`features` must be finite, got .* at index \(7, 3\)"):
        class_moments(features, labels, 5)
    moments = jax.jit(lambda z: class_moments(z, labels, 5, scatter=True))(features)
    found = measured(moments) | {"nc3": self_duality(moments, classifier)}
    assert not np.isfinite(list(found.values())).any(), found  # the mean norm may be infinite
    agreement = jax.jit(nearest_centre_agreement)
    assert np.isfinite(agreement(finite, logits, good))
    assert np.isnan([agreement(features, logits, good), agreement(finite, logits, moments)]).all()
    logits[3, 1] = np.abs(bad)
    assert np.isnan(agreement(finite, logits, good))


def test_traced_labels_out_of_range_give_nan():
    features, labels = samples(40)
    run = jax.jit(lambda y: class_moments(features, y, 5).spread.sum())
    for label, good in ((0, True), (-1, False), (5, False)):
        given = np.where(np.arange(40) == 3, label, labels)
        assert np.isfinite(run(given)) == good
        found = jax.jit(lambda y: neural_collapse(class_moments(features, y, 5)))(given)
        assert {bool(np.isfinite(value)) for value in vars(found).values()} == {good}


def test_gradients_are_finite_at_a_perfect_frame():
    simplex = jnp.asarray((np.eye(4) - 0.25)[np.arange(8) % 4])  # collapsed
    at_frame = lambda z: measured(class_moments(z, np.arange(8) % 4, 4, scatter=True))  # noqa: E731
    slopes = jax.jit(jax.jacrev(at_frame))(simplex)
    for name in ("rnc1", "trace", "equinorm", "equiangularity"):
        assert np.isfinite(slopes[name]).all(), name
