"""All pairs: labels, memory, images, one program; intervals, tests against chance, baselines."""

import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pandas
import pytest
import similarity_reference as reference
from compiled import compilations
from matplotlib.figure import Figure
from scipy import stats
from scipy.spatial.distance import squareform

from dissociation import similarity
from dissociation.similarity import MEASURES
from dissociation.similarity import _inference as inference
from dissociation.similarity import _items as items
from dissociation.similarity import _pairs as pairs
from dissociation.similarity import _tables as tables
from dissociation.similarity._base import compared
from dissociation.similarity._inference import Interval
from dissociation.similarity._leave_outs import without_blocks
from dissociation.similarity._orders import random_orders, units_of
from dissociation.training import _progress as progress

RNG = np.random.default_rng(0)
NUMBER = 30
LATENT = RNG.standard_normal((NUMBER, 3))


def layer(members, width):
    noise = RNG.standard_normal((members, NUMBER, width))
    return (LATENT @ RNG.standard_normal((members, 3, width)) + noise).astype(np.float32)


LAYERS = {"layers[0]": layer(3, 7), "layers[1]": layer(3, 5), "logits": layer(3, 7)}
ITEMS = [LAYERS[name][member] for name in LAYERS for member in range(3)]
PIECES = 2 * 4 * (60 * 7 + 7)
"""Bytes of two prepared representations, of one for linear CKA."""


ROWS = [0, 4, 8]
"""One member of each layer, whose pairs with all are computed by the reference."""


def by_reference(name, **options):
    measure = getattr(reference, name)
    return np.array(
        [
            [measure(ITEMS[row].astype(float), y.astype(float), **options) for y in ITEMS]
            for row in ROWS
        ]
    )


@pytest.mark.parametrize(
    ("name", "options", "reference_options", "memory_budget"),
    [
        ("debiased_cka", {}, {}, None),
        ("linear_cka", {}, {}, PIECES),  # a piece per item
        ("rsa", {"comparison": "cosine"}, {"comparison": "cosine"}, None),
        ("linear_predictivity", {"alpha": 2.0, "num_folds": 2}, {"alpha": 2.0, "folds": 2}, None),
        ("soft_matching", {}, {}, None),
    ],
)
def test_all_pairs_are_each_pair_whatever_the_memory(
    name, options, reference_options, memory_budget
):
    found = similarity.pairwise(
        LAYERS,
        name,
        memory_budget=memory_budget,
        members=True,
        baseline=False,
        outputs=None,
        **options,
    )
    np.testing.assert_allclose(
        np.asarray(found.values)[ROWS], by_reference(name, **reference_options), atol=5e-6
    )
    assert (
        found.items
        == found.others
        == tuple((layer, member) for layer in LAYERS for member in range(3))
    )
    for last in ("layers[1]", "features"):
        np.testing.assert_array_equal(found.between(last, "logits"), found.values[3:6, 6:])
    with pytest.raises(ValueError, match=r"`layer` must be one of .* 'hidden0'"):
        found.between("hidden0")
    assert found.measure == name


def test_pairs_of_an_asymmetric_measure_are_each_pair_in_pieces():
    layers = {name: LAYERS[name] for name in ("layers[0]", "logits")}  # of one width
    found = similarity.pairwise(
        layers, "pwcca", memory_budget=PIECES, members=True, baseline=False, outputs=None
    )
    places = [0, 1, 2, 6, 7, 8]
    wanted = by_reference("pwcca")[[0, 2]][:, places]
    np.testing.assert_allclose(np.asarray(found.values)[[0, 5]], wanted, atol=5e-6)


@pytest.mark.parametrize("name", ["linear_cka", "rsa", "angular_similarity"])
def test_all_pairs_are_each_pair_whatever_the_tiles(name, monkeypatch):
    monkeypatch.setattr(tables, "PART", 32)
    monkeypatch.setattr(tables, "TILE_BYTES", 4 * 4 * NUMBER * NUMBER * 4)  # 2 x 2 pairs
    # CKA over samples. No other test has these widths, so its programs are compiled with the small
    # tiles.
    wide = {layer: np.tile(x, (1, 1, 9)) for layer, x in LAYERS.items()}
    found = similarity.pairwise(wide, name, members=True, baseline=False, outputs=None)
    np.testing.assert_allclose(np.asarray(found.values)[ROWS], by_reference(name), atol=5e-6)


def test_a_second_call_compiles_nothing():
    def run():
        similarity.pairwise(LAYERS["layers[0]"], "angular_similarity", members=True, num_blocks=10)
        similarity.pairwise(LAYERS["layers[0]"], "rbf_cka", members=True, scale=RNG.random() + 0.5)

    assert compilations(run)
    assert not compilations(run)


def test_long_work_shows_its_progress_between_chunks(monkeypatch, capsys):
    name = "angular_similarity"

    def numbers():
        found = similarity.pairwise(
            LAYERS["layers[0]"], name, members=True, num_blocks=10, p_values=True, num_orders=19
        )
        drawn = similarity.permutation_test(name, *ITEMS[:2], key=jax.random.key(0), num_draws=20)
        return [
            *(getattr(found, part) for part in ("values", "low", "high", "p_values", "baseline")),
            drawn.p_value,
        ]

    monkeypatch.setattr(progress.LateMeter, "SECONDS", 1e3)
    whole = numbers()
    assert not capsys.readouterr().err  # it took less than the time after which a meter opens
    monkeypatch.setattr(tables, "SMALLEST_CHUNK", 1)
    monkeypatch.setattr(tables, "CHUNKS", 8)  # of 3 orders, not a divisor of their number
    monkeypatch.setattr(progress.LateMeter, "SECONDS", 0.0)
    monkeypatch.setattr(progress.BarMeter, "SECONDS", 0.0)
    for one, other in zip(numbers(), whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4)
    shown = capsys.readouterr().err
    steps = [int(step) for step in re.findall(rf"{name}: .* (\d+)/30 ", shown)]
    assert steps[-1] == 30
    assert len(set(steps)) > 4
    assert re.search(rf"{name}: .* 21/21 ", shown)


def test_custom_functions_and_lists_of_any_width():
    first_column = lambda x, y, *, power=1: jnp.abs(jnp.corrcoef(x[:, 0], y[:, 0])[0, 1]) ** power  # noqa: E731
    given = [ITEMS[0], ITEMS[4], ITEMS[2]]  # of 7, 5 and 7 features
    found = similarity.pairwise(given, first_column, power=2, baseline=False)
    np.testing.assert_allclose(
        found.values, np.corrcoef([one[:, 0] for one in given]) ** 2, atol=1e-5
    )
    assert found.items == (("", 0), ("", 1), ("", 2))
    only_values = {"baseline": False, "num_blocks": None, "p_values": False}
    named_as_argument = similarity.compare(
        *ITEMS[:2], "partial_whitening_distance", a=0.3, **only_values
    )
    wanted = similarity.partial_whitening_distance(*ITEMS[:2], a=0.3)
    np.testing.assert_allclose(named_as_argument.values, wanted, atol=1e-5)


def test_frames_that_order_their_rows_differently_are_refused():
    frame = pandas.DataFrame(RNG.standard_normal((20, 3)), index=[f"s{i}" for i in range(20)])
    other = frame.iloc[::-1]
    for given in ([frame, other], {"a": frame, "b": other}):
        with pytest.raises(
            ValueError, match="order of `representations`, got the same labels in another order"
        ):
            similarity.pairwise(given, "linear_cka")
    with pytest.raises(ValueError, match="`y` must have its rows in the order of `x`"):
        similarity.linear_cka(frame, other)


SHAPED = RNG.standard_normal((6, 5, 4, 3))


@pytest.mark.parametrize(
    ("shape", "stated", "wanted"),
    [
        ((6, 60), {"members": True}, (6, 60, 1)),
        ((6, 20, 3), {"members": False, "positions": "neurons"}, (6, 60)),
        ((6, 20, 3), {"members": False, "positions": "samples", "channels": "last"}, (120, 3)),
        ((6, 20, 3), {"members": False, "positions": "samples", "channels": "first"}, (18, 20)),
        ((6, 5, 4, 3), {"members": True, "positions": "samples", "channels": "first"}, (6, 15, 4)),
        (
            (6, 20, 3),
            {},
            "`members` must be True or False .* True: 6 members, 20 samples each. False: 6 samples",
        ),
        ((6, 20, 3), {"members": False}, "`positions` must be one of"),
        (
            (6, 5, 4, 3),
            {"members": False, "positions": "samples"},
            "`channels` must be .*Last: 3 .* First: 5 channels",
        ),
        ((6,), {"members": True}, "must have axes"),
    ],
)
def test_axes_are_stated_or_refused(shape, stated, wanted):
    array = np.resize(SHAPED, shape)
    if isinstance(wanted, str):
        with pytest.raises(ValueError, match=wanted):
            similarity.pairwise({"layer": array}, "linear_cka", **stated)
        return
    (given,) = items.as_items(
        "x", array, **{"members": None, "positions": None, "channels": None} | stated
    ).arrays
    if stated.get("channels") == "first":
        array = np.moveaxis(array, 2 if stated["members"] else 1, -1)
    np.testing.assert_array_equal(np.ravel(given), np.ravel(array).astype(np.float32))
    assert given.shape == (wanted if stated.get("members") else (1, *wanted))


def test_one_number_per_sample_is_one_feature():
    outputs = LAYERS["logits"][..., 0]
    options = {"members": True, "baseline": False}
    wanted = similarity.pairwise(LAYERS | {"logits": outputs[..., None]}, "linear_cka", **options)
    found = similarity.pairwise(LAYERS | {"logits": outputs}, "linear_cka", **options)
    np.testing.assert_array_equal(found.values, wanted.values)
    assert found.items == wanted.items
    assert found.disagreement is None  # there are no classes
    np.testing.assert_array_equal(found.output_similarity, np.tile(found.between("logits"), (3, 3)))
    pair = similarity.compare(outputs[0], ITEMS[3], "linear_cka", num_blocks=None, p_values=False)
    assert pair.values.shape == ()
    np.testing.assert_allclose(pair.values, found.between("features", "logits")[0, 0], rtol=1e-5)


def test_functions_are_compared_beside_every_pair_of_representations():
    options = {"members": True, "baseline": False}
    found = similarity.pairwise(LAYERS, "linear_cka", **options)
    for table in (found, similarity.compare(LAYERS, dict(LAYERS), "linear_cka", **options)):
        for name in ("disagreement", "jensen_shannon"):
            own = np.array([[getattr(reference, name)(x, y) for y in ITEMS[6:]] for x in ITEMS[6:]])
            np.testing.assert_allclose(getattr(table, name), np.tile(own, (3, 3)), atol=1e-6)
        np.testing.assert_array_equal(
            table.output_similarity, np.tile(table.between("logits"), (3, 3))
        )
    without = similarity.pairwise(LAYERS, "linear_cka", outputs=None, **options)
    assert without.disagreement is without.output_similarity is None


def test_representations_that_say_nothing_are_named():
    dead = LAYERS | {
        "layers[1]": np.where(np.arange(3)[:, None, None] == 1, 2.0, LAYERS["layers[1]"])
    }
    with pytest.warns(
        RuntimeWarning, match=r"linear_cka is not defined for layers\[1\] 1, whose values are NaN"
    ):
        found = similarity.pairwise(dead, "linear_cka", members=True, baseline=False)
    assert np.isnan(found.values[4]).all()
    assert np.isfinite(np.delete(np.delete(np.asarray(found.values), 4, 0), 4, 1)).all()


@pytest.mark.usefixtures("unchecked")
def test_wrong_calls_are_refused_by_name():
    one, other = ITEMS[:2]
    listed = lambda *several: similarity.pairwise(list(several), "debiased_cka", members=True)  # noqa: E731
    compiled = jax.jit(lambda x: similarity.pairwise(x, "linear_cka", members=True).values)
    table = lambda **options: similarity.pairwise(LAYERS, "linear_cka", members=True, **options)  # noqa: E731
    few = lambda: similarity.compare(one[:20], other[:20], "mutual_knn", num_neighbours=19)  # noqa: E731
    for call, words in (
        (
            lambda: similarity.pairwise([one, other], lambda x: x.sum()),
            r"must take 2 arguments \(x, y\), got \(x\)",
        ),
        (few, "at least 20 samples, got 19 without one block"),
        (
            lambda: compiled(LAYERS["layers[0]"]),
            "`representations` must be concrete: pairs of representations",
        ),
        (lambda: similarity.pairwise(LAYERS, "cka"), "`measure` must be one of 'debiased_cka'"),
        (
            lambda: similarity.pairwise([one, other[1:]], "linear_cka"),
            "same samples throughout, got 29, 30 samples",
        ),
        (
            lambda: similarity.compare(one, other, num_blocks=31),
            "`num_blocks` must be at most 30, the number of sam",
        ),
        (
            lambda: similarity.compare(one[:10], other[:10], "cca", num_blocks=5),
            "fewer features than samples less one",
        ),
        (lambda: listed(one.tolist(), other.tolist()), "list of arrays, got (nested lists|a list)"),
        (lambda: listed(one, other.tolist()), "list of arrays, got (nested lists|a list)"),
        (lambda: table(bandwidth=2), "`bandwidth` is no option: linear_cka has no options"),
        (
            lambda: similarity.compare(one, other, "rsa", k=1),
            "`k` is no option: the options of rsa are rdm, compari",
        ),
        (
            lambda: similarity.compare(one, other, lambda x, y: "q"),
            "must return one real number .*, got str 'q'",
        ),
        (
            lambda: similarity.compare(one, other, lambda x, y: float(x[0, 0])),
            "`measure` must be .* JAX's operations",
        ),
        (
            lambda: similarity.pairwise({0: one, "0": other}),
            "have layers whose names differ as text",
        ),
        (
            lambda: similarity.compare(one, ITEMS[4], "disagreement"),
            "as many classes throughout for disagreement, got",
        ),
        (lambda: table(outputs="logit"), "`outputs` must be one of"),
        (
            lambda: table(blocks="random"),
            "`blocks` must be one of 'shuffled', 'contiguous', got 'random'",
        ),
        (
            lambda: similarity.compare(one, other, "rbf_cka", scale=np.ones(2)),
            "`scale` must be a number, got shape",
        ),
        (
            lambda: similarity.compare(one, other, lambda x, y: x[0]),
            "`measure` must return one real number",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            call()


ALIKE = RNG.standard_normal((300, 3))
"""Features of so many samples that a copy of them has a p-value below the smallest."""


def test_a_p_value_below_what_moments_say_is_printed_as_that():
    alike = similarity.compare(ALIKE, 2 * ALIKE, "linear_cka", num_blocks=None, baseline=False)
    assert alike.p_values == 1e-16
    assert "p_values=< 1e-16," in repr(alike)


def test_p_values_below_what_moments_say_are_printed_as_that():
    many = similarity.pairwise(
        np.stack([ALIKE] * 5), "linear_cka", members=True, p_values=True, baseline=False
    )
    assert many.corrected()[0, 1] == pytest.approx(1e-15)  # of ten pairs
    assert "p_values=f64[5,5](numpy) from < 1e-16 to < 1e-16" in repr(many)


def test_one_pair_has_an_interval_and_a_test_by_default_and_tables_have_none():
    one = ITEMS[0]
    other = ITEMS[1]
    for pair in (
        similarity.compare(one, other, "linear_cka"),
        similarity.pairwise(one, "linear_cka", other),
    ):
        assert pair.p_values.shape == pair.low.shape == ()
    across = similarity.compare([one, other], [one], "linear_cka")
    for table in (across, similarity.pairwise([one, other], "linear_cka")):
        assert table.p_values is table.low is table.estimate is None


def test_tables_have_intervals_and_tests_on_request():
    one = ITEMS[0]
    other = ITEMS[1]
    pair = similarity.compare(other, one, "linear_cka", baseline=False)
    table = similarity.compare([one, other], [one], "linear_cka", p_values=True, num_blocks=20)
    np.testing.assert_allclose(table.values[1, 0], pair.values, rtol=1e-4)
    np.testing.assert_allclose(table.low[1, 0], pair.low, rtol=1e-4)
    np.testing.assert_allclose(table.p_values[1, 0], pair.p_values, rtol=1e-4)


@pytest.mark.parametrize("name", ["debiased_cka", "linear_cka"])
@pytest.mark.parametrize("is_within", [False, True])
def test_tables_of_linear_cka_leave_blocks_out_as_single_pairs_do(name, is_within):
    rng = np.random.default_rng(3)
    widths = {"a": 5, "b": 9, "c": 5}
    x = {layer: rng.normal(3, 1, size=(53, width)) for layer, width in widths.items()}
    y = {
        layer: np.tanh(x[layer]) @ rng.normal(size=(width, width))
        for layer, width in widths.items()
    }
    options = {"num_blocks": 7, "p_values": False, "progress": None}
    table = similarity.pairwise(x, name, None if is_within else y, **options)
    for row, first in enumerate(x):
        for column, second in enumerate(x):
            pair = similarity.compare(x[first], (x if is_within else y)[second], name, **options)
            for field in ("estimate", "low", "high", "standard_error"):
                value = getattr(table, field)[row, column]
                np.testing.assert_allclose(value, getattr(pair, field), atol=2e-5)


@pytest.mark.parametrize("is_debiased", [False, True])
def test_one_long_sample_leaves_no_rounding_without_its_block(is_debiased):
    rng = np.random.default_rng(3)
    shared = rng.normal(size=(200, 8))
    items = shared @ rng.normal(size=(2, 8, 20)) + rng.normal(10, 1, size=(2, 200, 20))
    items[:, 3] *= 100
    remaining = [np.delete(np.arange(200), rows) for rows in np.split(np.arange(200), 20)]
    found = without_blocks(is_debiased, [jnp.asarray(items, jnp.float32)], remaining)
    measure = similarity.debiased_cka if is_debiased else similarity.linear_cka
    with jax.enable_x64(True):
        wanted = [measure(*items[:, rows]) for rows in remaining]
    np.testing.assert_allclose(found[:, 0, 1], wanted, atol=1e-3)


def test_few_samples_have_as_many_blocks_or_no_interval():
    one = ITEMS[0][:8]
    other = ITEMS[4][:8]
    few = similarity.compare(
        one.tolist(), other.tolist(), "linear_cka"
    )  # nested lists are one array
    blocks = similarity.compare(one, other, "linear_cka", num_blocks=8)
    np.testing.assert_allclose(
        [few.values, few.standard_error], [blocks.values, blocks.standard_error]
    )
    assert similarity.compare(one[:4], other[:4], baseline=False, p_values=False).low is None


def test_p_values_are_corrected_and_pairs_once_each():
    p = np.array([[0.01, 0.04, np.nan], [0.03, 0.005, 1.0]])
    np.testing.assert_allclose(
        similarity.adjust_p_values(p), [[0.04, 0.09, np.nan], [0.09, 0.025, 1.0]]
    )
    bh = similarity.adjust_p_values(p, "bh")
    np.testing.assert_allclose(bh[~np.isnan(bh)], stats.false_discovery_control(p[~np.isnan(p)]))
    np.testing.assert_array_equal(similarity.adjust_p_values(p, "none"), p)
    with pytest.raises(ValueError, match="`p_values` must lie from 0 to 1"):
        similarity.adjust_p_values([1.5])
    options = {"members": True, "p_values": True}
    found = similarity.pairwise(LAYERS, "linear_cka", **options)
    assert np.isnan(np.diagonal(found.p_values)).all()
    upper, corrected = np.triu_indices(9, 1), found.corrected("bh")
    np.testing.assert_allclose(
        corrected[upper], similarity.adjust_p_values(found.p_values[upper], "bh")
    )
    np.testing.assert_allclose(corrected, corrected.T)
    across = similarity.compare(LAYERS["layers[0]"], LAYERS["layers[1]"], "linear_cka", **options)
    one_way = similarity.pairwise(LAYERS["layers[1]"], "pwcca", num_orders=19, **options)
    for table in (across, one_way):
        np.testing.assert_allclose(table.corrected(), similarity.adjust_p_values(table.p_values))


def test_sums_over_samples_have_intervals_about_themselves():
    n = 300
    x = RNG.standard_normal((n, 4))
    found = similarity.compare(x, x @ RNG.standard_normal((4, 3)), "procrustes_distance")
    assert found.low < found.values < found.high
    function, properties = (
        lambda a, b: jnp.sqrt(jnp.sum((a - b) ** 2)),
        {"identical": 0.0, "range": (0.0, np.inf)},
    )
    distance = similarity.custom_measure(function, symmetric=True, **properties)
    near = similarity.compare(x, x + 0.01 * RNG.standard_normal(x.shape), distance)
    assert near.low < near.values < near.high
    assert near.p_values == 1 / 200  # close, as distances are small


def smooth(n, width, rng):
    x = np.zeros((n, width))
    for step in range(1, n):
        x[step] = 0.95 * x[step - 1] + rng.standard_normal(width)
    return x


def test_what_depends_on_its_neighbours_is_tested_by_shifts():
    rng = np.random.default_rng(3)
    options = {"num_blocks": None, "baseline": False}
    p_values = []
    for _ in range(12):
        pair = smooth(300, 3, rng), smooth(300, 3, rng)
        shifted = similarity.compare(*pair, "linear_cka", blocks="contiguous", **options).p_values
        free = similarity.compare(*pair, "linear_cka", blocks="shuffled", **options).p_values
        assert shifted > free
        p_values.append(shifted)
    assert min(p_values) > 0.005
    assert np.mean(np.array(p_values) < 0.1) < 0.4


def test_orders_of_a_time_series_are_all_of_its_shifts():
    x = smooth(60, 3, np.random.default_rng(3))
    options = {"key": jax.random.key(0), "blocks": "contiguous", "num_draws": 999}
    assert similarity.permutation_test("linear_cka", x, x[::-1], **options).num_draws == 59
    shifts = random_orders(jax.random.key(1), 50, units_of(60), blocks="contiguous")
    assert len(set(shifts[:, 0]) - {0}) == 50  # none is the order as it is
    np.testing.assert_array_equal((shifts - shifts[:, :1]) % 60, np.tile(np.arange(60), (50, 1)))


def test_blocks_are_left_out_whole_and_positions_and_repeats_stay_together():
    for blocks in ("shuffled", "contiguous"):
        kept = inference.kept_rows(11, 4, blocks)
        left = [np.setdiff1d(np.arange(11), rows) for part in kept for rows in part]
        assert sorted(np.concatenate(left)) == list(range(11))
        assert all((np.diff(rows) == 1).all() for rows in left) == (blocks == "contiguous")
    repeated = inference.kept_rows(12, 3, repeats=2)[0]
    assert all(set(rows[rows < 6] + 6) == set(rows[rows >= 6]) for rows in repeated)
    assert inference.kept_rows(40 * 36, 20, num_positions=36)[0].shape == (20, 38 * 36)
    images = random_orders(jax.random.key(0), 3, units_of(40 * 36, num_positions=36)).reshape(
        3, 40, 36
    )
    np.testing.assert_array_equal(np.sort(images[..., 0], 1), np.tile(36 * np.arange(40), (3, 1)))
    np.testing.assert_array_equal(images - images[:, :, :1], np.arange(36) + np.zeros((3, 40, 1)))
    base = np.cumsum(np.cumsum(np.random.default_rng(4).standard_normal((2, 40, 6, 6, 3)), 2), 3)
    stated = {"members": False, "positions": "samples", "channels": "last"}
    assert similarity.compare(*base, "linear_cka", **stated).p_values > 0.01


def test_many_samples_cost_no_matrix_over_them():
    x = RNG.standard_normal((50_000, 2)).astype(np.float32)
    found = similarity.compare(
        x, x + RNG.standard_normal(x.shape), "linear_cka", num_blocks=4, num_orders=4
    )
    assert found.p_values == 1 / 5
    assert found.baseline.shape == ()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "name", ["linear_cka", "debiased_cka", "rbf_cka", "cca_squared", "rsa", "mutual_knn"]
)
@pytest.mark.slow
def test_baselines_are_means_over_all_orders(name):
    """Of 6 samples there are 720 orders."""
    x, y = RNG.standard_normal((2, 6, 2))
    options = {"num_neighbours": 2} if name == "mutual_knn" else {}
    measure = MEASURES[name]
    found = similarity.compare(x, y, name, num_blocks=None, p_values=False, **options)
    score = jax.vmap(
        lambda order: compared(
            measure.with_options(**options), jnp.asarray(x), jnp.asarray(y)[order]
        )
    )
    orders = jnp.asarray(list(itertools.permutations(range(6))))
    np.testing.assert_allclose(found.baseline, score(orders).mean(), atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_moments_are_those_of_all_orders():
    middle = np.eye(7) - 1 / 7
    one, other = (middle @ (part + part.T) @ middle for part in RNG.standard_normal((2, 7, 7)))
    found = inference.null_moments(
        *(inference.invariants(jnp.asarray(part)) for part in (one, other)), 7
    )
    np.testing.assert_allclose(found, reference.permutation_moments(one, other), rtol=1e-9)


@pytest.mark.parametrize(
    "name",
    [
        "linear_cka",  # from moments
        pytest.param("debiased_rbf_cka", marks=pytest.mark.slow),
        "rsa",  # from random orders
        pytest.param("mutual_knn", marks=pytest.mark.slow),
    ],
)
def test_p_values_of_tables_agree_with_random_orders(name):
    x = RNG.standard_normal((25, 3))
    stacked = np.stack(
        [x, x + RNG.standard_normal(x.shape), 0.35 * x + RNG.standard_normal(x.shape)]
    )
    table = similarity.pairwise(stacked, name, members=True, p_values=True, num_orders=999)
    drawn = similarity.permutation_test(name, x, stacked[2], num_draws=4999, key=jax.random.key(0))
    error = np.sqrt(drawn.p_value * (1 - drawn.p_value) / 1000)
    assert abs(table.p_values[0, 2] - drawn.p_value) < 4 * error + 0.01
    np.testing.assert_allclose(table.baseline[0, 2], drawn.null_mean, atol=4 * drawn.null_sd / 70)
    assert np.isnan(np.diagonal(table.p_values)).all()


def test_the_jackknife_of_a_mean_is_students_interval():
    data = RNG.standard_normal(40)
    leave_outs = np.array([np.delete(data, index).mean() for index in range(40)])
    found = similarity.jackknife_interval(data.mean(), leave_outs, level=0.95)
    low, high = stats.t.interval(0.95, 39, data.mean(), stats.sem(data))
    np.testing.assert_allclose([found.low, found.high], [low, high], rtol=1e-4)
    np.testing.assert_allclose(found.bias, 0, atol=1e-5)
    skewed = similarity.jackknife_interval(
        data.var(), [np.delete(data, index).var() for index in range(40)]
    )
    np.testing.assert_allclose(
        skewed.bias, data.var() - data.var(ddof=1), rtol=1e-2
    )  # exact in theory


@pytest.mark.parametrize("name", ["debiased_cka", "angular_distance"])
def test_rounding_beside_a_bound_is_no_bias(name):
    x = np.maximum(np.random.default_rng(1).standard_normal((1080, 4)), 0)
    # A layer and its permuted neurons, in float32.
    found = similarity.compare(x, x[:, ::-1], name, p_values=False, baseline=False)
    np.testing.assert_array_equal(
        [found.estimate, found.low, found.high], [MEASURES[name].identical] * 3
    )


def test_an_estimate_beyond_a_bound_is_set_to_it_with_a_warning():
    noise = np.random.default_rng(0).standard_normal((2, 60, 4))
    with pytest.warns(RuntimeWarning, match="1 of 1 estimates of linear_cka left the range 0 to 1"):
        found = similarity.compare(*noise, "linear_cka", p_values=False, baseline=False)
    assert found.low == found.estimate == 0


def test_members_are_left_out_whole():
    table = squareform(np.arange(1.0, 7.0))
    found = similarity.member_interval(table)
    means = [np.delete(np.delete(table, i, 0), i, 1).sum() / 6 for i in range(4)]
    assert found.mean == pytest.approx(3.5)
    assert found.standard_error == pytest.approx(
        np.sqrt(3 / 4 * np.sum((means - np.mean(means)) ** 2))
    )
    assert found.high - found.mean == pytest.approx(stats.t.ppf(0.95, 3) * found.standard_error)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (-np.inf, 1.0), (0.0, np.inf)])
def test_estimates_lie_inside_of_their_intervals(bounds):
    rng = np.random.default_rng(5)
    least, most = max(bounds[0], -5), min(bounds[1], 5)
    values = np.concatenate([rng.uniform(least, most, 500), [least, most, most]])
    spread = 10.0 ** rng.uniform(-9, 1, len(values)) * (
        np.arange(len(values)) < 502
    )  # the last has no error at all
    shift = spread * rng.standard_normal(len(values)) * 3
    leave_outs = np.clip(
        values + shift + spread * rng.standard_normal((7, len(values))), least, most
    )
    for unbias in (True, False):
        found = similarity.jackknife_interval(values, leave_outs, bounds=bounds, unbias=unbias)
        assert (found.low <= found.estimate).all()
        assert (found.estimate <= found.high).all()
        assert bounds[0] <= found.low.min() <= found.high.max() <= bounds[1]
        if unbias and bounds == (0.0, np.inf):  # on its own scale
            np.testing.assert_allclose(
                found.estimate, np.clip(values - found.bias, 0, None), atol=1e-5
            )
        if not unbias:
            np.testing.assert_allclose(found.estimate, values, rtol=1e-6)


def test_sums_of_singular_values_warn_of_half_the_bias():
    """Between one and two standard errors, where their intervals hold the truth too rarely."""
    rng = np.random.default_rng(0)
    causes = rng.standard_normal((1000, 4))
    x, y = causes @ rng.standard_normal((2, 4, 20)) + 0.7 * rng.standard_normal((2, 1000, 20))
    options = {"p_values": False, "baseline": False}
    with pytest.warns(
        RuntimeWarning,
        match="`values` of angular_distance have a bias larger than 1 standard errors",
    ):
        found = similarity.compare(x, y, "angular_distance", **options)
    assert abs(found.values - found.estimate) < 2 * (found.high - found.low) / (2 * 1.73)
    similarity.compare(
        x, y, "linear_predictivity", **options
    )  # between the limits, too, and silent


@pytest.mark.parametrize("name", ["linear_cka", "cca"])
def test_values_are_biased_and_estimates_hold_their_intervals(name):
    rng, options = np.random.default_rng(6), {"p_values": False, "baseline": False}
    causes = rng.standard_normal((500, 40))
    x, y = (
        causes @ rng.standard_normal((40, width)) + 3 * rng.standard_normal((500, width))
        for width in (128, 96)
    )
    with pytest.warns(
        RuntimeWarning, match=f"1 of 1 `values` of {name} have a bias larger .* read `estimate`"
    ):
        found = similarity.compare(x, y, name, **options)
    assert found.low < found.estimate < found.high < found.values
    estimate, arms = found.bars()
    np.testing.assert_allclose(
        [estimate - arms[0], estimate + arms[1]], [[found.low], [found.high]], rtol=1e-6
    )
    assert arms.min() > 0
    Figure().subplots().errorbar([0], *found.bars(), fmt="o")
    with pytest.raises(ValueError, match="`num_blocks` must be given for intervals"):
        similarity.compare(x, y, name, num_blocks=None, **options).bars()


def simulated(name, samples, maps, noise, pairs):
    """Estimates and leave-block-out estimates of pairs with a latent cause, [pairs] and [20, pairs], and the truth."""
    own = [into.T @ into + noise**2 * np.eye(len(into)) for into in maps]
    truth = np.sum((maps[0].T @ maps[1]) ** 2) / np.linalg.norm(own[0]) / np.linalg.norm(own[1])
    maps = [jnp.asarray(into, jnp.float32) for into in maps]
    form, kept = MEASURES[name].with_options(), jnp.asarray(inference.kept_rows(samples, 20)[0])

    def one(key):
        latent, *errors = jax.random.split(key, 3)
        z = jax.random.normal(latent, (samples, len(maps[0])))
        seen = zip(errors, maps, strict=True)
        x, y = (
            z @ into + noise * jax.random.normal(e, (samples, into.shape[1])) for e, into in seen
        )
        left = jax.lax.map(lambda rows: compared(form, x[rows], y[rows]), kept, batch_size=20)
        return compared(form, x, y), left

    keys = jax.random.split(jax.random.key(7), pairs)
    values, leave_outs = jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=20))(keys)
    return values, leave_outs.T, truth


@pytest.mark.parametrize(
    ("name", "samples", "features", "noise", "pairs"),
    [
        ("linear_cka", 60, 5, 1.0, 400),  # .6 standard errors too high
        pytest.param("debiased_cka", 300, 5, 0.5, 1000, marks=pytest.mark.slow),
    ],
)
def test_intervals_cover(name, samples, features, noise, pairs):
    """90 % intervals, of features from as many causes, hold the population's value."""
    rng = np.random.default_rng(4)
    maps = [rng.standard_normal((features, features)) for _ in range(2)]
    values, leave_outs, truth = simulated(name, samples, maps, noise, pairs)
    found = similarity.jackknife_interval(values, leave_outs, bounds=MEASURES[name].range)
    covered = np.mean((np.asarray(found.low) <= truth) & (truth <= np.asarray(found.high)))
    assert abs(covered - 0.9) < 3 * np.sqrt(0.9 * 0.1 / pairs)
    if name == "linear_cka":
        error = np.std(values) / 20
        assert np.mean(values) - truth > 6 * error
        assert abs(np.mean(found.estimate) - truth) < 3 * error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"), [("angular_similarity", {}), ("mutual_knn", {"num_neighbours": 2})]
)
def test_p_values_are_uniform_under_independence(name, options):
    found = []
    for key in jax.random.split(jax.random.key(3), 300):
        own, draws = jax.random.split(key)
        x, y = jax.random.normal(own, (2, 15, 3))
        found.append(
            similarity.permutation_test(name, x, y, key=draws, num_draws=999, **options).p_value
        )
    if options:  # discrete: never below nominal
        for level in (0.01, 0.05, 0.1, 0.3):
            assert np.mean(np.array(found) <= level) < level + 3 * np.sqrt(level / 300)
    else:
        assert stats.kstest(found, "uniform").pvalue > 0.01


def test_blocks_that_leave_too_few_samples_are_refused():
    """Four blocks of 14 samples leave 10 or 11, and ten neighbours take 11."""
    with pytest.raises(
        ValueError, match="`x` must have at least 11 samples, got 10 without one block"
    ):
        similarity.compare(ITEMS[0][:14], ITEMS[1][:14], "mutual_knn", num_blocks=4)


@pytest.mark.parametrize(("bias", "warned"), [(1.5, False), (2.5, True)])
def test_a_bias_of_two_errors_is_named(bias, warned):
    numbers = [np.array([[number]]) for number in (0.01, 0.3, 0.5, 0.01 * bias, 0.4)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        pairs._warn_biased(similarity.MEASURES["linear_cka"], np.array([[0.4]]), Interval(*numbers))
    assert bool(seen) == warned


def test_a_budget_below_two_representations_is_refused():
    with pytest.raises(
        ValueError,
        match=r"`memory_budget` must be at least \d+ bytes, for two representations, got 1",
    ):
        similarity.pairwise(LAYERS, "linear_cka", memory_budget=1, members=True)
