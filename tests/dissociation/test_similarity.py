"""Measures of similarity: what is claimed of each, an independent reference, libraries, closed forms."""

import warnings
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import similarity_reference as reference
from scipy import stats
from scipy.linalg import orthogonal_procrustes
from scipy.spatial.distance import pdist
from scipy.spatial.distance import squareform as as_square

from dissociation import similarity
from dissociation._core.rounding_ties import ranks, snapped
from dissociation.similarity import MEASURES
from dissociation.similarity import _kernels as kernels
from dissociation.similarity import _matched_correlation as matching
from dissociation.similarity._base import compared, of_sizes

RNG = np.random.default_rng(0)
SAMPLES, P, Q = 40, 6, 4
LATENT = RNG.standard_normal((SAMPLES, 3))
X = LATENT @ RNG.standard_normal((3, P)) + RNG.standard_normal((SAMPLES, P)) + 3
Y = LATENT @ RNG.standard_normal((3, Q)) + RNG.standard_normal((SAMPLES, Q)) - 3
Z = RNG.standard_normal((SAMPLES, P))
WIDE = LATENT @ RNG.standard_normal((3, P)) + RNG.standard_normal((SAMPLES, P)) + 1
ROTATION = np.linalg.qr(RNG.standard_normal((P, P)))[0]
FUNCTIONAL = ("disagreement", "jensen_shannon")

FEW_FOLDS = {"linear_predictivity": {"num_folds": 2}}
"""Options of measures whose programs grow with the number of folds."""

WITHOUT_DERIVATIVE = (
    *FUNCTIONAL,
    "svcca",
    "rbf_cka",
    "angular_similarity",
    "cca_squared",
)  # some through others

MAPS = {
    "O": lambda x: x @ ROTATION,
    "S": lambda x: 2.7 * x,
    "T": lambda x: x + np.linspace(-4, 4, P),
    "P": lambda x: x[:, np.random.default_rng(1).permutation(P)],
    "L": lambda x: x @ (np.eye(P) + 0.4 * np.random.default_rng(2).standard_normal((P, P))),
    "D": lambda x: x * np.linspace(0.3, 3, P),
}


@pytest.fixture(params=["float32", "float64"])
def precision(request):
    """A dtype with its tolerance, of the range."""
    with jax.enable_x64(request.param == "float64"):
        yield np.dtype(request.param), {"float32": 1e-5, "float64": 1e-10}[request.param]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.slow
def test_what_is_claimed_of_a_measure_holds_and_no_more(name):
    """Invariances with their negative controls, symmetry, range, identity, the triangle inequality: from one table."""
    measure = MEASURES[name]
    variants = [X, *(change(X) for change in MAPS.values()), Z, WIDE]
    options = {"members": True, "baseline": False, "num_blocks": None, "p_values": False}
    stacked = np.stack(variants)
    options |= FEW_FOLDS.get(name, {})
    table = np.asarray(
        similarity.compare(stacked, stacked.copy(), measure, **options).values
    )  # both triangles
    tolerance = 1e-9
    of_y = measure.invariances if measure.invariances_of_y is None else measure.invariances_of_y
    for index, letter in enumerate(MAPS, 1):
        for side, values, claimed in (
            ("x", table[:, -1], measure.invariances),
            ("y", table[-1], of_y),
        ):
            moved = abs(values[index] - values[0])
            if letter in claimed:
                assert moved < tolerance, f"{name} moves by {moved} under {letter} of {side}"
            elif name not in FUNCTIONAL:  # logits are no neurons
                assert moved > 1e-6, f"{name} does not move under {letter} of {side}"
    np.testing.assert_allclose(np.diagonal(table), measure.identical, atol=max(tolerance, 1e-7))
    least, most = measure.range
    assert table.min() >= least - tolerance
    assert table.max() <= most + tolerance
    if measure.symmetric:
        np.testing.assert_allclose(table, table.T, atol=1e-9)
    else:
        assert abs(table - table.T).max() > 1e-3
    if measure.metric:
        slack = (
            table[:, :, None] + table.T[None] - table[:, None]
        )  # [i, j, k]: d(i, j) + d(k, j) - d(i, k)
        assert slack.min() > -tolerance


@pytest.mark.parametrize("name", MEASURES)
def test_measures_agree_with_an_independent_reference(name, precision):
    """Distances are squared, angles are cosines."""
    kind, tolerance = precision
    x, y = (X[:, :Q].astype(kind) if name in FUNCTIONAL else X.astype(kind)), Y.astype(kind)
    ours, wide = float(MEASURES[name](x, y)), [np.asarray(part, float) for part in (x, y)]
    wanted = getattr(reference, name)(*wide)
    if name in ("angular_distance", "partial_whitening_distance"):
        ours, wanted = np.cos(ours), np.cos(wanted)
    elif name in ("procrustes_distance", "gulp_distance"):
        ours, wanted = ours**2, wanted**2
        tolerance *= (
            P + Q
            if name == "gulp_distance"
            else sum(np.sum((part - part.mean(0)) ** 2) for part in wide)
        )
    assert abs(ours - wanted) <= tolerance


def assert_close(found, wanted):
    np.testing.assert_allclose(found, wanted, atol=1e-10)


@pytest.mark.usefixtures("x64")
def test_options_agree_with_the_reference():
    assert_close(similarity.rbf_cka(X, Y, scale=0.4), reference.rbf_cka(X, Y, scale=0.4))
    assert_close(similarity.svcca(X, Y, variance=0.8), reference.svcca(X, Y, variance=0.8))
    assert_close(similarity.mutual_knn(X, Y, num_neighbours=3), reference.mutual_knn(X, Y, 3))
    for a in (0.0, 1.0):
        distance = similarity.partial_whitening_distance(X, Y, a=a)
        assert_close(np.cos(distance), np.cos(reference.partial_whitening_distance(X, Y, a)))
    squared = similarity.gulp_distance(X, Y, lam=0.0) ** 2
    assert_close(squared / (P + Q), reference.gulp_distance(X, Y, 0.0) ** 2 / (P + Q))
    outputs = X[:, :Q], Y, RNG.integers(0, Q, SAMPLES)
    assert_close(
        similarity.min_max_disagreement(*outputs), reference.min_max_disagreement(*outputs)
    )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("num_folds", [None, 2])
def test_predictivity_at_several_penalties_agrees_with_the_reference(num_folds):
    alphas = np.array([0.0, 1.0, 50.0])
    wanted = [reference.linear_predictivity(X, Y, alpha, num_folds) for alpha in alphas]
    assert_close(similarity.predictivity_path(X, Y, alphas, num_folds=num_folds), wanted)
    assert_close(similarity.linear_predictivity(X, Y, alpha=50.0, num_folds=num_folds), wanted[-1])


@pytest.mark.usefixtures("x64")
def test_predictivity_of_contiguous_folds_agrees_with_the_reference():
    contiguous = np.array_split(np.arange(SAMPLES), 3)  # of unequal sizes
    found = similarity.linear_predictivity(X, Y, alpha=3.0, num_folds=3, folds="contiguous")
    assert_close(found, reference.linear_predictivity(X, Y, 3.0, contiguous))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", ["euclidean", "squared", "correlation", "cosine"])
def test_rdms_agree_with_the_reference(kind):
    np.testing.assert_allclose(
        similarity.rdm(X, kind), reference.rdm(X, kind), rtol=1e-9, atol=1e-9
    )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("comparison", ["pearson", "spearman", "kendall", "cosine"])
def test_comparisons_of_rdms_agree_with_the_reference(comparison):
    """Squared distances of integers tie exactly, and ties distinguish the variants of Kendall's tau."""
    x = np.round(X)
    y = np.round(Y)
    found = similarity.rsa(x, y, rdm="squared", comparison=comparison)
    np.testing.assert_allclose(found, reference.rsa(x, y, "squared", comparison), atol=3e-10)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("comparison", ["pearson", "spearman"])  # one without ranks, one with them
def test_rsa_of_cosine_distances_agrees_with_the_reference(comparison):
    found = similarity.rsa(X, Y, rdm="cosine", comparison=comparison)
    np.testing.assert_allclose(found, reference.rsa(X, Y, "cosine", comparison), atol=3e-10)


@pytest.mark.usefixtures("x64")
def test_crossnobis_agrees_with_rsatoolbox():
    from rsatoolbox.data import Dataset
    from rsatoolbox.rdm import calc_rdm

    half = SAMPLES // 2
    noise = np.cov(Z.T)
    runs = {"cond": np.tile(np.arange(half), 2), "run": np.repeat([0, 1], half)}
    with warnings.catch_warnings(action="ignore"):
        settings = {"descriptor": "cond", "cv_descriptor": "run", "noise": np.linalg.inv(noise)}
        found = calc_rdm(Dataset(X, obs_descriptors=runs), method="crossnobis", **settings)
    wanted = found.get_vectors()[0]
    np.testing.assert_allclose(
        similarity.crossnobis_rdm(X[:half], X[half:], noise), wanted, rtol=1e-9, atol=1e-9
    )
    assert wanted.min() < 0  # not clipped


def test_small_distances_are_not_lost_in_rounding():
    """The formula's root of a difference would say 1e-3 of what is nearly equal, and 0 or NaN of equals."""
    x = X.astype(np.float32)
    turned = (x.astype(float) @ ROTATION).astype(np.float32)
    size = np.linalg.norm(x - x.mean(0))
    assert similarity.procrustes_distance(x, turned) < 1e-6 * size
    assert similarity.angular_distance(x, turned) < 1e-6
    assert similarity.gulp_distance(x, turned) < 1e-5
    moved = turned + np.float32(1e-4) * Z.astype(np.float32)
    a, b = (one.astype(float) - one.mean(0, float) for one in (x, moved))
    wanted = np.linalg.norm(a @ orthogonal_procrustes(a, b)[0] - b)
    np.testing.assert_allclose(similarity.procrustes_distance(x, moved), wanted, rtol=1e-2)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", [name for name in MEASURES if name not in WITHOUT_DERIVATIVE])
@pytest.mark.slow
def test_derivatives_are_those_of_differences_or_refused(name):
    direction = np.random.default_rng(3).standard_normal(X.shape)
    along = lambda t: MEASURES[name](X + t * direction, Y, **FEW_FOLDS.get(name, {}))  # noqa: E731
    if MEASURES[name].host:
        with pytest.raises(TypeError, match="no derivative"):
            jax.grad(along)(0.0)
        return
    step = 1e-6
    wanted = (along(step) - along(-step)) / (2 * step)
    np.testing.assert_allclose(jax.jit(jax.grad(along))(0.0), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "form", [kernels.LINEAR_CKA, kernels.DEBIASED_CKA], ids=["linear", "debiased"]
)
def test_features_and_samples_agree_and_the_cheaper_form_is_taken(form):
    few, many = of_sizes(form, 10_000, 50, 50), of_sizes(form, 100, 5000, 5000)
    assert few.prepare is form.prepare
    assert many.prepare is of_sizes(form, 100, 50, 50, items=50, pairs=1225).prepare is form.half

    def value_and_mean(form, x, y):
        a = form.prepare(x)
        b = form.prepare(y)
        return jnp.stack([form.compare(a, b), form.expected(a, b)])

    found = [jax.jit(partial(value_and_mean, one))(X, Y) for one in (few, many)]
    np.testing.assert_allclose(*found, atol=1e-12)


def test_neighbours_that_tie_share_their_places():
    """Broken by the order of rows, ties would be broken alike on both sides and pass for agreement."""
    x = np.repeat(np.eye(4, dtype=np.float32), 10, 0)
    y = np.tile(np.eye(4, dtype=np.float32), (10, 1))
    # Of 9 equals in x and in y, 5 are drawn; two rows are equal in both where i // 10 = j // 10 and
    # i % 4 = j % 4.
    same = (np.arange(40)[:, None] // 10 == np.arange(40) // 10) & (
        np.arange(40)[:, None] % 4 == np.arange(40) % 4
    )
    wanted = np.mean((same.sum(1) - 1) * (5 / 9) ** 2) / 5
    np.testing.assert_allclose(similarity.mutual_knn(x, y, num_neighbours=5), wanted, rtol=1e-5)


def test_soft_matching_by_assignment_and_by_a_linear_programme(monkeypatch):
    wanted = similarity.soft_matching(X, Y)
    monkeypatch.setattr(matching, "LARGEST_ASSIGNMENT", 0)
    np.testing.assert_allclose(similarity.soft_matching(X, Y), wanted, atol=1e-6)
    np.testing.assert_allclose(
        similarity.soft_matching(X, Z), similarity.hard_matching(X, Z), atol=1e-6
    )


def test_what_no_measure_is_defined_for_is_refused_by_name():
    flat, tiny = np.tile(Y[:1].astype(np.float32), (SAMPLES, 1)), (1e-40 * Y).astype(np.float32)
    same, small = (
        "`y` must differ between samples, got the same row 40 times",
        "`y` must have an entry of at least 1",
    )
    for name, x, y, words in (
        *(
            (name, X, flat, same)
            for name in ("linear_cka", "debiased_cka", "angular_similarity", "svcca")
        ),
        *(
            (name, X, tiny, small)
            for name in ("mutual_knn", "gulp_distance", "soft_matching", "linear_cka")
        ),
        ("cca", X[:7], Y[:7], "`x` must have fewer features than samples less one"),
        ("debiased_cka", X[:3], Y[:3], "`x` must have at least 4 samples, got 3"),
        ("mutual_knn", X[:5], Y[:5], "`x` must have at least 11 samples, got 5"),
        ("crossnobis_rsa", X[:9], Y[:9], "even number of rows"),
    ):
        with pytest.raises(ValueError, match=words):
            MEASURES[name](x, y)
    similarity.cca(X[:8], Y[:8])
    assert similarity.disagreement(Y, Y) == 0
    assert similarity.procrustes_distance(X, flat) == pytest.approx(
        np.linalg.norm(X - X.mean(0)), rel=1e-6
    )


def table():
    """What is known of every measure, as the guide has it."""
    rows = [
        "| measure | equation | ignores | | range | cost |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for measure in MEASURES.values():
        kinds = [
            word
            for word, holds in (("metric", measure.metric), ("asymmetric", not measure.symmetric))
            if holds
        ]
        other = measure.invariances_of_y
        ignores = measure.invariances or "nothing"
        ignores = ignores if other is None else f"{ignores} of x, {other} of y"
        least, most = (
            f"{end:.4g}".replace("inf", "∞").replace("1.571", "π/2") for end in measure.range
        )
        equation = measure.equation.replace("|", "\\|")
        cells = [
            f"`{measure.name}`",
            equation,
            ignores,
            ", ".join(kinds),
            f"{least} to {most}",
            measure.cost,
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def test_the_table_of_the_guide_is_what_the_measures_say():
    assert table() in (Path(__file__).parents[2] / "docs" / "similarity.md").read_text()


def test_constant_neurons_in_large_arrays_cost_no_digits():
    x, y = np.random.default_rng(0).standard_normal((2, 300, 256)).astype(np.float32)
    x[:, :128], y[:, :128] = 1.3 * x[0, :128], 0.7 * y[0, :128]
    wanted = similarity.hard_matching(x[:, 128:], y[:, 128:]) / 2  # half of the neurons are dead
    assert abs(similarity.hard_matching(x, y) - wanted) < 0.02


def test_a_sample_far_longer_than_others_costs_no_digits():
    x, y = (np.concatenate([1e4 * part[:1], part[1:]]) for part in (X, Y))
    wanted = reference.debiased_cka(x, y)
    np.testing.assert_allclose(similarity.debiased_cka(x, y), wanted, atol=1e-5)
    of_one_width = [x, np.pad(y, ((0, 0), (0, P - Q)))]
    table = similarity.pairwise(of_one_width, "debiased_cka", baseline=False)
    np.testing.assert_allclose(table.values[0, 1], wanted, atol=1e-5)


TIED = RNG.integers(-1, 2, (SAMPLES, P)).astype(float)
TIED[5:10] = TIED[:5]
CODE = np.eye(Q)[np.sort(RNG.choice(Q, SAMPLES, p=[0.5, 0.25, 0.15, 0.1]))]


@pytest.mark.parametrize("rdm", ["euclidean", "squared", "cosine"])
@pytest.mark.parametrize("comparison", ["spearman", "kendall"])
def test_ties_of_rdms_survive_rounding(rdm, comparison):
    """On one-hot classes and integers SciPy has the exact ties; here the rows are turned, moved and scaled."""
    compare = {
        "spearman": lambda a, b: stats.spearmanr(a, b).statistic,
        "kendall": reference.kendall_tau_a,
    }[comparison]
    code = np.pad(CODE, ((0, 0), (0, P - Q))) + (rdm == "cosine") * TIED[:, :1]
    wanted = compare(*(np.round(reference.rdm(one, rdm), 9) for one in (code, TIED)))
    x, y = ((one @ ROTATION).astype(np.float32) for one in (code, TIED))
    a, b = (reference.rdm(one, rdm) for one in (x, y))
    moved = x + np.float32(0 if rdm == "cosine" else 50)
    pairs = (x, y), (x[:, ::-1] @ ROTATION.astype(np.float32), np.ldexp(y, -50)), (moved, y)
    found = [similarity.rsa(*pair, rdm=rdm, comparison=comparison) for pair in pairs]
    found += [
        similarity.compare_rdms(*pair, comparison)
        for pair in ((a, np.ldexp(b, 60)), (np.ldexp(a, -60), b))
    ]
    np.testing.assert_allclose(found, wanted, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in MEASURES if name not in FUNCTIONAL]
    + [
        ("rsa", {"rdm": "correlation", "comparison": "kendall"}),
        ("crossnobis_rsa", {"comparison": "spearman"}),
    ],
)
def test_rounding_and_the_order_of_rows_decide_nothing(name, options):
    """Rows with ties, turned, scaled by a power of two, with permuted columns, an offset, in other orders."""
    measure = MEASURES[name]
    invariances = measure.invariances.replace("O", "") if "rdm" in options else measure.invariances
    x, y = TIED.astype(np.float32), (3 * CODE + TIED[:, :Q]).astype(np.float32)
    value = lambda x, y: float(measure(x, y, **options))  # noqa: E731
    moved = {
        "O": lambda x: (x @ ROTATION).astype(np.float32),
        "P": lambda x: x[:, ::-1],
        "D": lambda x: x * np.float32([[1], [1e6]])[np.arange(P) % 2, 0],
        "T": lambda x: (
            x + 1024 * (not options)
        ),  # float32 holds these integers with an offset of 1024
    }
    wanted = value(x, y)
    found = [value(move(x), y) for letter, move in moved.items() if letter in invariances]
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    if "S" in invariances:
        np.testing.assert_array_equal(
            [value(np.ldexp(x, 60), y), value(np.ldexp(x, -60), y)], wanted
        )
    half = SAMPLES // 2
    for order in (RNG.permutation(half), np.argsort(x[:half, 0], kind="stable")):
        rows = np.concatenate([order, half + order])  # both measurements of a condition stay such
        atol = 0.2 if name == "linear_predictivity" else 2e-5  # its folds change
        np.testing.assert_allclose(value(x[rows], y[rows]), wanted, atol=atol)


GULP = partial(similarity.gulp_distance, lam=0.0)
WHITENED = partial(similarity.partial_whitening_distance, a=0.0)


def streamed(*arrays):
    return similarity.stream_moments([arrays])


@pytest.mark.parametrize(
    "function",
    [
        GULP,
        WHITENED,
        similarity.cca,
        lambda x, y: similarity.predictivity_path(x, y, np.zeros(1), num_folds=2)[0],
    ],
    ids=["gulp", "whitened", "cca", "predictivity path"],
)
def test_a_scale_per_neuron_drops_no_direction(function):
    x = X.astype(np.float32)
    y = Y.astype(np.float32)
    scaled = (X * 10.0 ** np.linspace(-3, 3, P)).astype(np.float32)
    np.testing.assert_allclose(function(scaled, y), function(x, y), atol=2e-5)


def test_a_repeated_neuron_adds_no_direction():
    repeated = Y[:, [0, 1, 2, 2]]
    np.testing.assert_allclose(
        similarity.pwcca(X, repeated), similarity.pwcca(X, Y[:, :3]), atol=2e-5
    )


def dependent(noise):
    """Return features whose first column differs from a combination of two others by `noise`, and other features."""
    x, y = (np.tile(part.astype(np.float32), (8, 1)) for part in (X, Y))
    x[:, 0] = 3 * x[:, 1] - x[:, 2]
    x[:, 0] += np.float32(noise) * np.tile(Z[:, 0], 8)
    return x, y


@pytest.mark.parametrize(
    "function",
    [
        GULP,
        WHITENED,
        partial(similarity.svcca, variance=1.0),
        similarity.cca,
        similarity.linear_predictivity,
    ],
    ids=["gulp", "whitened", "svcca", "cca", "predictivity"],
)
def test_dropped_directions_are_counted(function):
    with pytest.warns(
        RuntimeWarning, match="1 of the directions of `x` exceed rounding, but are too small"
    ):
        function(*dependent(2e-4))
    if function is similarity.cca:
        function(*dependent(0.0))  # an exact dependence loses nothing


def test_dropped_directions_of_pairs_are_counted_by_name():
    x, y = dependent(2e-4)
    forms = (
        ("cca", {}),
        ("gulp_distance", {"lam": 0.0}),
        ("partial_whitening_distance", {"a": 0.0}),
    )
    with pytest.warns(RuntimeWarning, match="1 of the directions of `deep 0` exceed rounding"):
        similarity.pairwise({"deep": x, "other": y}, "cca", baseline=False)
    for name, options in forms:
        with pytest.raises(ValueError, match="fewer features than samples less one"):
            similarity.pairwise([X[:5], Y[:5]], name, baseline=False, **options)


def test_stimuli_repeated_in_order_are_predicted():
    """Each of 10 stimuli is shown 4 times: none may be held out whole."""
    x = np.tile(RNG.standard_normal((10, 12)), (4, 1)) + 0.01 * RNG.standard_normal((SAMPLES, 12))
    y = np.tile(RNG.standard_normal((10, Q)), (4, 1))
    for rows in (
        np.arange(SAMPLES),
        np.argsort(x[:, 0]),
        np.arange(SAMPLES).reshape(4, 10).T.reshape(-1),
    ):
        assert similarity.linear_predictivity(x[rows], y[rows]) > 0.99


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_maps_of_any_unit(scale):
    distances = as_square(pdist(Z))
    for embed in (similarity.classical_mds, similarity.smacof):
        found, wanted = embed((scale * distances).astype(np.float32)), embed(distances)
        np.testing.assert_allclose(found.points / np.float32(scale), wanted.points, atol=5e-3)
        np.testing.assert_allclose(found.relative_stress, wanted.relative_stress, atol=1e-4)


def without_rest():
    """Return representations of one active sample, and of samples that are orthogonal to each other, in float32."""
    single = np.zeros((SAMPLES, P))
    single[3] = RNG.standard_normal(P)
    square = np.linalg.qr(RNG.standard_normal((SAMPLES, SAMPLES)))[0]
    cases = [
        np.pad(x, ((0, 0), (0, SAMPLES - x.shape[1])))
        for x in (single, 0.7 * np.eye(SAMPLES), 0.7 * square)
    ]
    return np.stack(cases).astype(np.float32)


@pytest.mark.parametrize("size", [P, 400])
def test_nothing_over_nothing_is_no_number(size):
    """Nothing but rounding is left of such representations, over features and over samples."""
    form = of_sizes(kernels.DEBIASED_CKA, SAMPLES, size, size)
    y = jnp.asarray(Y, jnp.float32)
    assert np.isnan(jax.vmap(lambda x: compared(form, x, y))(without_rest())).all()


def test_nothing_over_nothing_of_moments_is_no_number():
    for x in without_rest():
        moments = similarity.stream_moments([(x, Y)])
        with pytest.warns(RuntimeWarning, match="debiased_cka is not defined for representation 0"):
            assert np.isnan(similarity.similarity_from_moments(moments)[0, 1])


@pytest.mark.parametrize("name", ["rsa", "debiased_rbf_cka"])
def test_nothing_over_nothing_of_pairs_is_no_number(name):
    wide = np.pad(Y[:20], ((0, 0), (0, 20 - Q)))
    with pytest.warns(RuntimeWarning, match="is not defined for"):
        found = similarity.pairwise([0.7 * np.eye(20), wide], name, baseline=False)
    assert np.isnan(found.values[0, 1])


def test_a_degenerate_null_is_no_evidence():
    orthogonal = np.linalg.qr(RNG.standard_normal((12, 12)))[0]
    wide = np.pad(Y[:12], ((0, 0), (0, 12 - Q)))
    found = similarity.compare(orthogonal, wide, "linear_cka", num_blocks=None, baseline=False)
    assert found.p_values == 1  # all orders score alike


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_predictivity_has_a_derivative_with_dead_neurons(alpha):
    x = X.copy()
    x[:, 0] = 0.7
    value = lambda x, alpha=alpha: similarity.linear_predictivity(x, Y, alpha=alpha, num_folds=2)  # noqa: E731
    found = jax.jit(jax.grad(value))(jnp.asarray(x, jnp.float32))
    assert np.isfinite(found).all()
    assert np.abs(found[:, 1:]).max() > 1e-3
    np.testing.assert_allclose(value(1e-15 * x, 1e-30 * alpha), value(x), atol=1e-5)


def test_predictivity_of_one_active_sample_has_a_bound():
    x = np.zeros_like(X)
    x[3, 0] = 1
    assert similarity.linear_predictivity(x, Z[:, :Q]) > -0.5


def test_ties_of_dense_numbers_of_sizes_of_zeros_and_of_numbers_that_are_none():
    dense = RNG.uniform(size=200_000).astype(
        np.float32
    )  # neighbours within rounding of the largest
    np.testing.assert_allclose(jax.jit(ranks)(dense), stats.rankdata(dense), atol=20)
    assert abs(snapped(dense) - dense).max() < 1e-4
    values = np.float32([1e6, 2.0, 1.0, 2.000001, -1e-17, np.nan, np.inf, np.inf, -np.inf])
    tied = snapped(values, np.abs(np.nan_to_num(values, posinf=1.0, neginf=1.0)))
    values[3] = 2.0
    np.testing.assert_array_equal(tied, values)
    np.testing.assert_array_equal(snapped(values)[4], 0.0)
    same = jnp.array([[3.0, 1.0, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(jax.jit(jax.vmap(ranks))(same), [[4, 1.5, 1.5, 3], [2.5] * 4])
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: jnp.sum(x * snapped(x))))(same), same)
    np.testing.assert_array_equal(snapped(np.arange(3)), np.arange(3))


def in_clusters(apart):
    """Return two representations of the same three clusters, of 13 and 14 samples, in float32."""
    rng = np.random.default_rng(8)
    labels = np.arange(SAMPLES) * 3 // SAMPLES
    centres = apart * rng.standard_normal((3, P))
    x = centres[labels] + rng.standard_normal((SAMPLES, P))
    y = 0.2 * centres[labels] @ rng.standard_normal((P, P)) + rng.standard_normal((SAMPLES, P))
    return x.astype(np.float32), y.astype(np.float32)


@pytest.mark.parametrize("apart", [30.0, 1e4])
@pytest.mark.parametrize("kind", ["euclidean", "cosine"])
def test_distances_within_clusters_that_are_far_apart(kind, apart):
    """Differences of products in float32 lose these distances: all pairs of a cluster were ties."""
    x, y = in_clusters(apart)
    wanted = reference.rsa(x.astype(float), y.astype(float), kind, "spearman")
    np.testing.assert_allclose(
        similarity.rsa(x, y, rdm=kind, comparison="spearman"), wanted, atol=1e-3
    )


@pytest.mark.parametrize("apart", [30.0, 1e4])
def test_neighbours_within_clusters_that_are_far_apart(apart):
    x, y = in_clusters(apart)
    wanted = reference.mutual_knn(x.astype(float), y.astype(float), 10)
    np.testing.assert_allclose(similarity.mutual_knn(x, y, num_neighbours=10), wanted, atol=5e-3)
