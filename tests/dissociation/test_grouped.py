"""Samples in groups, against NumPy, against distinct samples, and against all orders."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.spatial.distance import cdist

from dissociation._core.groups import group_numbers, num_distinct, one_per_group
from dissociation.measures import information, linear_probe, linear_probe_fit, transfer_errors
from dissociation.similarity import compare, custom_measure, jackknife_interval, permutation_test

DRAWS = np.random.default_rng(11)
GROUPS = np.repeat(np.arange(9), [4, 1, 3, 2, 5, 1, 2, 4, 2])
SHUFFLED = DRAWS.permutation(GROUPS)
COMMON = DRAWS.normal(size=(24, 2))
X = np.concatenate([COMMON, DRAWS.normal(size=(24, 2))], 1).astype(np.float32)
Y = (COMMON @ DRAWS.normal(size=(2, 3)) + 0.5 * DRAWS.normal(size=(24, 3))).astype(np.float32)
PLAIN = {"num_blocks": None, "p_values": False, "baseline": False}
PAIRS = (
    "debiased_cka",
    "debiased_rbf_cka",
    "rbf_cka",
    "distance_correlation",
    "rsa",
    "mutual_knn",
    "knn_jaccard",
)
MORE = [
    pytest.param(measure, marks=() if "knn" in measure else pytest.mark.slow)
    for measure in PAIRS[1:]
]


def value(measure, x, y, groups=None, **options):
    return np.asarray(compare(x, y, measure, groups=groups, **PLAIN, **options).values).item()


def projected(matrix, apart):
    """Return the matrix of pairs of two groups without its part a_i + a_j, by least squares over entries."""
    rows, columns = np.nonzero(apart)
    design = np.eye(len(matrix))[rows] + np.eye(len(matrix))[columns]
    found = np.linalg.lstsq(design, matrix[apart], rcond=None)[0]
    left = np.zeros_like(matrix)
    left[apart] = matrix[apart] - design @ found
    return left


def double_centred(matrix):
    return matrix - matrix.mean(0) - matrix.mean(1)[:, None] + matrix.mean()


def cosine(a, b):
    return np.sum(a * b) / np.sqrt(np.sum(a * a) * np.sum(b * b))


def by_numpy(measure, x, y, groups):
    x, y = x.astype(float), y.astype(float)
    apart = groups[:, None] != groups[None]
    distances = [cdist(one, one) for one in (x, y)]
    kernels = [np.exp(-(one**2) / (2 * np.median(one[apart]) ** 2)) for one in distances]
    if measure == "debiased_cka":
        return cosine(projected(x @ x.T, apart), projected(y @ y.T, apart))
    if measure == "debiased_rbf_cka":
        return cosine(*(projected(one, apart) for one in kernels))
    if measure == "rbf_cka":
        return cosine(*(double_centred(np.where(apart, one, 1)) for one in kernels))
    if measure == "distance_correlation":
        return np.sqrt(cosine(*(double_centred(np.where(apart, one, 0)) for one in distances)))
    pairs = np.triu(apart)
    if measure == "rsa":
        return np.corrcoef(*(one[pairs] for one in distances))[0, 1]
    near = []
    for one in (x, y):
        angles = np.where(apart, cdist(one, one, "cosine"), np.inf)
        near.append([set(np.argsort(row)[:3]) for row in angles])
    common = [len(a & b) for a, b in zip(*near, strict=True)]
    if measure == "mutual_knn":
        return np.mean(common) / 3
    return np.mean([both / (6 - both) for both in common])


@pytest.mark.parametrize("measure", [*PAIRS[:1], *MORE])
def test_pairs_within_a_group_are_left_out(measure):
    options = {"num_neighbours": 3} if "knn" in measure else {}
    assert value(measure, X, Y, SHUFFLED, **options) == pytest.approx(
        by_numpy(measure, X, Y, SHUFFLED), abs=2e-5
    )
    alone = value(measure, X, Y, np.arange(24), **options)
    assert alone == pytest.approx(value(measure, X, Y, **options), abs=2e-5)
    moved = 2 * X + (0 if "knn" in measure else 3)
    assert value(measure, moved, Y, SHUFFLED, **options) == pytest.approx(
        by_numpy(measure, X, Y, SHUFFLED), abs=1e-4
    )


@pytest.mark.parametrize(
    "comparison", ["spearman", pytest.param("kendall", marks=pytest.mark.slow), "cosine"]
)
def test_pairs_of_rdms_within_a_group_do_not_count(comparison):
    apart = np.triu(SHUFFLED[:, None] != SHUFFLED[None])
    entries = [cdist(one, one)[apart] for one in (X.astype(float), Y.astype(float))]
    expected = {
        "spearman": lambda a, b: stats.spearmanr(a, b)[0],
        "kendall": lambda a, b: stats.kendalltau(a, b)[0],
        "cosine": cosine,
    }[comparison](*entries)
    assert value("rsa", X, Y, SHUFFLED, comparison=comparison) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("measure", [*PAIRS[:1], *MORE[:4]])
def test_copies_in_groups_change_nothing(measure):
    order = DRAWS.permutation(48)
    x, y, groups = (np.repeat(one, 2, 0)[order] for one in (X, Y, np.arange(24)))
    assert value(measure, x, y, groups) == pytest.approx(value(measure, X, Y), abs=2e-5)


def test_measured_conditions_stay_together():
    x, y = (np.concatenate([one, one + 0.1 * DRAWS.normal(size=one.shape)]) for one in (X, Y))
    groups = np.tile(SHUFFLED, 2)
    alone = value("crossnobis_rsa", x, y, np.tile(np.arange(24), 2))
    assert alone == pytest.approx(value("crossnobis_rsa", x, y), abs=1e-5)
    assert value("crossnobis_rsa", x, y, groups) != pytest.approx(alone, abs=1e-3)
    with pytest.raises(
        ValueError, match="`groups` must be the same in all 2 repeats of the samples"
    ):
        compare(x, y, "crossnobis_rsa", groups=np.arange(48), **PLAIN)


def test_the_jackknife_weighs_blocks_by_their_size():
    sizes = np.array([3.0, 1, 2, 4])
    left, whole = DRAWS.normal(size=4), 0.3
    total = sizes.sum()
    ratios = total / sizes
    estimate = 4 * whole - np.sum((1 - sizes / total) * left)
    pseudo = ratios * whole - (ratios - 1) * left
    error = np.sqrt(np.mean((pseudo - estimate) ** 2 / (ratios - 1)))
    found = jackknife_interval(np.float32(whole), left.astype(np.float32), sizes=sizes)
    assert float(found.estimate) == pytest.approx(estimate, abs=1e-5)
    assert float(found.standard_error) == pytest.approx(error, abs=1e-5)
    equal = jackknife_interval(np.float32(whole), left.astype(np.float32))
    assert float(equal.standard_error) == pytest.approx(
        np.sqrt(3 / 4 * np.sum((left - left.mean()) ** 2)), abs=1e-5
    )


def test_blocks_hold_whole_groups():
    """Unequal groups, one at a time, against the value of each remainder."""
    found = compare(
        X, Y, "debiased_cka", groups=SHUFFLED, num_blocks=9, p_values=False, baseline=False
    )
    rows = [np.flatnonzero(group != SHUFFLED) for group in range(9)]
    left = [by_numpy("debiased_cka", X[kept], Y[kept], SHUFFLED[kept]) for kept in rows]
    sizes = np.bincount(SHUFFLED).astype(float)
    whole = by_numpy("debiased_cka", X, Y, SHUFFLED)
    expected = jackknife_interval(np.array(whole), np.array(left), sizes=sizes, bounds=(-1.0, 1.0))
    for name in ("estimate", "low", "high", "standard_error"):
        assert float(getattr(found, name)) == pytest.approx(
            float(getattr(expected, name)), abs=1e-4
        )


def by_halves(x, y, rows):
    """Return the product of means over groups with even numbers."""
    even = (rows % 2 == 0)[:, None]
    return jnp.sum(jnp.where(even, x, 0)) * jnp.sum(jnp.where(even, y, 0))


def test_folds_hold_whole_groups():
    measure = custom_measure(by_halves, rows=True)
    numbers = group_numbers(SHUFFLED, 24)
    even = numbers % 2 == 0
    assert value(measure, X, Y, SHUFFLED) == pytest.approx(X[even].sum() * Y[even].sum(), rel=1e-4)
    copies = (
        np.repeat(DRAWS.normal(size=(20, 30)), 5, 0),
        np.repeat(DRAWS.normal(size=(20, 2)), 5, 0),
    )
    labels = np.repeat(np.arange(20), 5)
    order = DRAWS.permutation(100)
    x, y, labels = (one[order] for one in (*copies, labels))
    assert value("linear_predictivity", x, y, labels) < 0.3
    with pytest.warns(RuntimeWarning, match="20 of 100 samples are distinct"):
        assert value("linear_predictivity", x, y) > 0.99


def test_orders_exchange_groups_of_equal_size():
    """Four pairs and a triple have 24 orders, which are all taken."""
    groups = np.repeat(np.arange(5), [2, 2, 2, 2, 3])
    rows = [np.flatnonzero(groups == group) for group in range(5)]
    x, y = X[:11], Y[:11]
    values = []
    for order in itertools.permutations(range(4)):
        moved = np.concatenate([*(rows[group] for group in order), rows[4]])
        values.append(by_numpy("debiased_cka", x, y[moved], groups))
    expected = np.mean(np.array(values) >= values[0] - 1e-9)
    found = compare(x, y, groups=groups, num_blocks=None)
    assert float(found.p_values) == pytest.approx(expected)
    assert float(found.baseline) == pytest.approx(np.mean(values), abs=1e-5)
    test = permutation_test("debiased_cka", x, y, groups=groups, key=jax.random.key(0))
    assert float(test.p_value) == pytest.approx(expected)
    assert test.num_draws == 23
    few = np.repeat(np.arange(5), [1, 2, 2, 2, 4])
    with pytest.warns(
        RuntimeWarning,
        match=r"groups of equal size have 6 orders \(1 of 1, 3 of 2, 1 of 4 samples\)",
    ):
        assert np.isnan(compare(x, y, groups=few, num_blocks=None).p_values)
    with pytest.warns(RuntimeWarning, match="fewer than 20: p-values and values by chance are NaN"):
        assert np.isnan(
            permutation_test("debiased_cka", x, y, groups=few, key=jax.random.key(0)).p_value
        )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_samples_that_repeat_others_are_counted(dtype):
    x, y = (np.repeat(DRAWS.normal(size=(30, width)), 3, 0) for width in (6, 2))
    order = DRAWS.permutation(90)
    x, y = (one[order].astype(dtype) for one in (x, y))
    near = (x * (1 + 1e-6 * DRAWS.normal(size=(90, 1)))).astype(dtype)
    offset = (x + 1000 * np.arange(6)).astype(dtype)
    assert [num_distinct([one, y]) for one in (x, near, offset, 1e-20 * near)] == [30] * 4
    assert num_distinct([x, DRAWS.normal(size=(90, 2)).astype(dtype)]) == 90
    assert num_distinct([x + 1e-4 * DRAWS.normal(size=x.shape).astype(dtype), y]) == 90
    assert (
        num_distinct([DRAWS.normal(size=(20_000, 1)).astype(dtype), np.arange(20_000) % 3])
        >= 19_990
    )
    single = x.copy()
    single[order == 0] *= 1e6
    assert num_distinct([single, y]) == 31


def test_samples_that_repeat_others_are_named_once():
    x, y = np.repeat(X, 10, 0), np.repeat(Y, 10, 0)
    test = lambda *pair: permutation_test("linear_cka", *pair, key=jax.random.key(0), num_draws=20)  # noqa: E731
    for call in (lambda *pair: compare(*pair, **PLAIN), test):
        with pytest.warns(
            RuntimeWarning, match=r"24 of 240 samples are distinct.*`groups`.*or drop the copies"
        ) as seen:
            call(x, y)
        assert len(seen) == 1
    tokens = np.repeat(X[:, None], 3, 1)  # equal positions of different samples
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(tokens, tokens, members=False, positions="samples", channels="last", **PLAIN)
        compare(x, DRAWS.normal(size=y.shape), **PLAIN)


def test_a_probe_predicts_groups_that_it_has_not_seen():
    rng = np.random.default_rng(5)
    centres = rng.normal(size=(40, 20))
    x = (np.repeat(centres, 10, 0) + 1e-3 * rng.normal(size=(400, 20))).astype(np.float32)
    labels = np.repeat(rng.integers(0, 2, 40), 10)
    groups = np.repeat([f"stimulus {i}" for i in range(40)], 10)
    order = rng.permutation(400)
    x, labels, groups = x[order], labels[order], groups[order]
    assert np.mean(linear_probe(x, labels).argmax(1) != labels) < 0.1
    held_out = linear_probe(x, labels, groups=groups)
    assert np.mean(held_out.argmax(1) != labels) > 0.3
    assert linear_probe_fit(x, labels, groups=groups).probabilities.shape == held_out.shape
    budgets = transfer_errors(x, labels, key=jax.random.key(0), fractions=(0.5, 1.0), groups=groups)
    assert float(budgets[-1]) > 0.3
    with pytest.warns(
        RuntimeWarning,
        match="40 of 400 samples are distinct.*copies of a held-out sample are fitted",
    ):
        linear_probe(np.repeat(centres, 10, 0), np.repeat(labels[:40], 10))
    with pytest.raises(
        ValueError, match=r"`groups` must label at least `num_splits` \(10\) groups, got 4"
    ):
        linear_probe(x[:40], labels[:40], groups=np.arange(40) // 10)


@pytest.mark.parametrize(
    ("folds", "shuffled"), [("stratified", False), ("stratified", True), ("contiguous", False)]
)
def test_folds_of_probes_hold_whole_groups(folds, shuffled):
    from dissociation.measures._softmax_solver import fold_of_samples

    groups = group_numbers(DRAWS.permutation(np.repeat(np.arange(15), np.arange(1, 16))), 120)
    labels = (groups % 3).astype(np.int32)
    key = jax.random.key(0) if shuffled else None
    for count in (120, 90):
        found = np.asarray(
            fold_of_samples(
                jnp.asarray(labels), 4, jnp.asarray(count), key, folds, jnp.asarray(groups)
            )
        )
        assert (found[count:] == 4).all()
        used = [
            np.unique(found[:count][groups[:count] == group]) for group in np.unique(groups[:count])
        ]
        assert all(len(fold) == 1 for fold in used)
        sizes = np.bincount(np.concatenate(used))
        assert sizes.max() - sizes.min() <= 1


def test_information_takes_one_sample_of_each_group():
    x = DRAWS.normal(size=(200, 1)).astype(np.float32)
    z = (0.8 * x + 0.6 * DRAWS.normal(size=(200, 1))).astype(np.float32)
    expected = information(x, z)
    copies = np.repeat(x, 3, 0), np.repeat(z, 3, 0)
    found = information(*copies, groups=np.repeat(np.arange(200), 3))
    assert float(found.value) == pytest.approx(float(expected.value), abs=1e-5)
    assert float(found.error) == pytest.approx(float(expected.error), abs=1e-5)
    with pytest.warns(RuntimeWarning, match="100 of 200 samples are distinct"):
        information(np.repeat(x[:100], 2, 0), np.repeat(z[:100], 2, 0))
    choices = one_per_group(np.array([0, 1, 0, 0, 2, 1]), 10)
    np.testing.assert_array_equal(choices, [[0, 1, 4], [2, 5, 4], [3, 1, 4]])


def test_groups_may_be_named(unchecked):
    pd = pytest.importorskip("pandas")
    xarray = pytest.importorskip("xarray")
    expected = value("debiased_cka", X, Y, SHUFFLED)
    names = np.array([f"s{group}" for group in SHUFFLED])
    frame = pd.DataFrame(X, columns=list("abcd")).assign(subject=names)
    other = pd.DataFrame(Y, columns=list("efg"))
    assert value("debiased_cka", frame, other, "subject") == pytest.approx(expected)
    assert value("debiased_cka", frame, other.assign(subject=names), "subject") == pytest.approx(
        expected
    )
    levels = frame.set_index("subject", append=True)
    assert value("debiased_cka", levels, Y, "subject") == pytest.approx(expected)
    array = xarray.DataArray(X, dims=("sample", "neuron"), coords={"subject": ("sample", names)})
    assert value("debiased_cka", {"layer": array}, {"layer": Y}, "subject") == pytest.approx(
        expected
    )
    assert value(
        "debiased_cka", frame.drop(columns="subject"), other, frame["subject"]
    ) == pytest.approx(expected)
    z = information(frame, other, groups="subject", num_neighbours=2)
    assert float(z.value) == pytest.approx(
        float(information(X, Y, groups=names, num_neighbours=2).value), nan_ok=True
    )
    with pytest.raises(
        ValueError, match="`groups` must be one label per sample, or the name of a column"
    ):
        compare(frame.drop(columns="subject"), other, groups="animal")
    with pytest.raises(ValueError, match="`groups` must be the same in all frames"):
        compare(frame, other.assign(subject=names[::-1]), groups="subject")


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        (
            np.arange(23),
            r"`groups` must be 24 integers or texts, the label of each sample, got shape \(23,\)",
        ),
        (np.full(24, 0.5), "got 0.5 of type float"),
        (np.array(["a", None] * 12, object), "got None of type NoneType"),
        (np.arange(24) // 8, "`groups` must label at least 4 groups, got 3"),
        (
            np.minimum(np.arange(24) // 2, 5),
            "leave at least 15 samples outside of the largest, of 14 samples, got 10",
        ),
    ],
)
def test_wrong_groups_are_named(groups, match):
    with pytest.raises((ValueError, TypeError), match=match):
        compare(X, Y, groups=groups, **PLAIN)
    with pytest.raises(ValueError, match="`blocks` must be 'shuffled' for samples in groups"):
        compare(X, Y, groups=SHUFFLED, blocks="contiguous")


@pytest.mark.slow
def test_independent_stimuli_with_repeats_are_not_similar():
    """Forty stimuli, ten near-copies each: p-values by groups are uniform, and intervals hold 0."""
    passed = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        x, y = (
            np.repeat(rng.normal(size=(40, 5)), 5, 0) + 0.1 * rng.normal(size=(200, 5))
            for _ in range(2)
        )
        found = compare(x, y, groups=np.repeat(np.arange(40), 5), num_orders=19)
        passed.append((float(found.p_values) > 0.05, found.low <= 0 <= found.high))
    small, covered = np.mean(passed, 0)
    assert small > 0.7
    assert covered > 0.6


def test_rows_of_a_time_series_are_named():
    """Independent walks share information by the estimate; independent rows that were sorted are named, too."""
    rng = np.random.default_rng(3)
    walks = np.cumsum(rng.normal(size=(2, 200, 1)), 1).astype(np.float32)
    rows = rng.normal(size=(200, 1)).astype(np.float32)
    related = rows + 0.3 * rng.normal(size=(200, 1)).astype(np.float32)
    order = np.argsort(rows[:, 0])
    for pair in (walks, (rows[order], related[order])):
        with pytest.warns(
            RuntimeWarning,
            match="rows of `x` and `z` resemble the rows before them.*sorted by a value",
        ):
            information(*pair)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        information(rows, related)
        information(walks[0], rows)
        information(walks[0, rng.permutation(200)], walks[1])
