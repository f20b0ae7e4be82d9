from functools import partial

import jax
import numpy as np
import pytest
from scipy.special import log_softmax, softmax
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import KFold
from sklearn.model_selection import StratifiedKFold as KFoldByClass
from threadpoolctl import threadpool_limits
from words import refused

from dissociation import measures
from dissociation.measures import _probes as probes
from dissociation.measures import _softmax_solver as softmax_solver
from dissociation.measures import transfer_errors

RTOL = 1e-4  # promised agreement of losses
SPLITS = {"num_splits": 4, "folds": "contiguous"}  # with data of one shape, one compiled program


def make_data(n=103, d=8, classes=4, seed=0, dtype=np.float32):
    """Overlapping classes on features of unequal scale and mean, one feature constant."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) * np.geomspace(0.1, 10, d) + np.arange(d)
    x[:, 2] = 1.7
    truth = rng.normal(size=(d, classes)) / np.geomspace(0.1, 10, d)[:, None]
    labels = ((x - x.mean(0)) @ truth + rng.gumbel(size=(n, classes))).argmax(1)
    return x.astype(dtype), np.eye(classes, dtype=dtype)[labels]


@pytest.fixture(autouse=True, scope="module")
def _programs():
    """Compile the probes that most tests share: of `make_data` in both precisions."""
    for dtype in (np.float32, np.float64):
        with jax.enable_x64(dtype is np.float64):
            measures.linear_probe_fit(*make_data(dtype=dtype), **SPLITS)


def sklearn_folds(x, y, num_splits, ridge):
    x, labels, chances, losses = np.asarray(x, np.float64), y.argmax(1), np.zeros(y.shape), []
    for train, test in KFold(num_splits).split(x):
        constant = np.ptp(x[train], axis=0) == 0
        deviation = np.where(constant, 1, x[train].std(0))
        z = np.where(constant, 0, (x - x[train].mean(0)) / deviation)
        two = len(set(labels[train])) == 2
        with threadpool_limits(1):  # on a busy machine more threads wait for each other
            peer = LogisticRegression(C=(1 + two) / ridge, tol=1e-9, max_iter=10000).fit(
                z[train], labels[train]
            )
        chances[np.ix_(test, peer.classes_)] = peer.predict_proba(z[test])
        if two:  # one vector stands for two opposite halves
            weights, shift = (
                np.stack([-peer.coef_[0], peer.coef_[0]], 1) / 2,
                np.r_[-1, 1] * peer.intercept_ / 2,
            )
        else:
            weights, shift = peer.coef_.T, peer.intercept_
        chosen = y[train][:, peer.classes_] * log_softmax(z[train] @ weights + shift, 1)
        losses.append(-np.sum(chosen) + ridge / 2 * np.sum(weights**2))
    return chances, np.array(losses)


@pytest.mark.parametrize(
    ("size", "classes", "num_splits", "ridge"),
    [
        ((103, 8), 4, 4, 1.0),
        pytest.param((60, 90), 3, 4, 0.5, marks=pytest.mark.slow),
        pytest.param((100, 8), 2, 7, 5.0, marks=pytest.mark.slow),
    ],
    ids=["uneven-folds", "fewer-samples-than-features", "two-classes"],
)
def test_equals_sklearn_on_the_same_folds(size, classes, num_splits, ridge):
    x, y = make_data(*size, classes)
    fit = measures.linear_probe_fit(x, y, num_splits, ridge=ridge, folds="contiguous")
    chances, losses = sklearn_folds(x, y, num_splits, ridge)
    np.testing.assert_allclose(fit.losses, losses, rtol=RTOL)
    assert fit.converged.all()
    # Probabilities move with the square root of the loss: against a peer solved to 1e-9 ours is
    # solved further, too.
    tight = measures.linear_probe_fit(x, y, num_splits, ridge=ridge, tol=1e-6, folds="contiguous")
    np.testing.assert_allclose(tight.probabilities, chances, atol=0.01)


FOLD_OF_SAMPLES = jax.jit(softmax_solver.fold_of_samples, static_argnums=(1, 4))


def fold_of(labels, num_splits, count=None, key=None, folds="contiguous"):
    labels = np.zeros(labels, int) if isinstance(labels, int) else labels
    return np.asarray(FOLD_OF_SAMPLES(labels, num_splits, count or len(labels), key, folds))


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("sizes", "num_splits"), [((7, 5), 5), ((90, 5, 12), 4)])
def test_stratified_folds_hold_every_class_evenly(shuffled, sizes, num_splits):
    labels, number = np.repeat(np.arange(len(sizes)), sizes), sum(sizes)
    if shuffled:
        labels = np.random.default_rng(0).permutation(labels)
    count = lambda rows: np.bincount(labels[rows], minlength=len(sizes))  # noqa: E731
    for key in (None, jax.random.key(0)):
        ids = np.asarray(fold_of(labels, num_splits, key=key, folds="stratified"))
        table = np.array([count(ids == fold) for fold in range(num_splits)])
        assert np.ptp(table.sum(1)) <= 1
        # The same numbers of every class as scikit-learn's, whichever fold has one more.
        peers = [count(test) for _, test in KFoldByClass(num_splits).split(labels, labels)]
        np.testing.assert_array_equal(np.sort(table, 0), np.sort(peers, 0))
    part = number - 5
    used = np.asarray(fold_of(labels, num_splits, part, folds="stratified"))
    np.testing.assert_array_equal(
        used[:part], fold_of(labels[:part], num_splits, folds="stratified")
    )
    assert (used[part:] == num_splits).all()


def test_a_key_shuffles_folds_and_keeps_the_order():
    (x, y), key = make_data(), jax.random.key(3)
    ids = np.asarray(fold_of(103, 4, 83, key))
    np.testing.assert_array_equal(np.bincount(ids), [21, 21, 21, 20, 20])
    assert (ids[83:] == 4).all()
    assert (np.diff(ids[:83]) < 0).any()
    shuffled = np.asarray(measures.linear_probe(x, y, **SPLITS, key=key))
    plain = np.asarray(measures.linear_probe(x, y, **SPLITS))
    assert np.abs(shuffled - plain).max() > 1e-4
    # The same samples in sorted blocks of that shuffle, with folds in the order, give the same
    # rows.
    order = np.argsort(np.asarray(fold_of(103, 4, key=key)), kind="stable")
    blocks = measures.linear_probe(x[order], y[order], **SPLITS)
    np.testing.assert_allclose(blocks, shuffled[order], atol=2e-3)


def test_contiguous_folds_of_sorted_classes_never_predict_them():
    """With classes in blocks of one fold each, every held-out class is unknown and never predicted."""
    x, _ = make_data()
    y = np.eye(4, dtype=np.float32)[np.repeat(np.arange(4), [26, 26, 26, 25])]
    fit = measures.linear_probe_fit(x, y, **SPLITS)
    np.testing.assert_array_equal(np.sum(fit.probabilities * y, 1), 0)
    assert np.isneginf(np.diag(fit.intercepts)).all()
    assert fit.converged.all()
    shuffled = measures.linear_probe(x, y, **SPLITS, key=jax.random.key(0))
    assert np.sum(shuffled * y, 1).min() > 0
    np.testing.assert_allclose(fit.probabilities, sklearn_folds(x, y, 4, 1.0)[0], atol=0.01)


def test_features_constant_in_one_training_part_only():
    """They take no part in that fold, however large they are where it is held out, and they do in others."""
    x, y = make_data()
    x[:, 1] = 0.3
    x[:26, 1] = 1e4 * np.arange(26)
    fit = measures.linear_probe_fit(x, y, **SPLITS)
    without = measures.linear_probe(x * (np.arange(8) != 1), y, **SPLITS)
    np.testing.assert_allclose(fit.probabilities[:26], without[:26], atol=2e-3)
    np.testing.assert_array_equal(fit.coefficients[0, 1], 0)
    assert np.abs(fit.coefficients[1:, 1]).min() > 0
    np.testing.assert_allclose(fit.losses, sklearn_folds(x, y, 4, 1.0)[1], rtol=RTOL)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_constant_columns_do_no_harm(dtype, precision):
    """Which hold no information but the rounding of their values."""
    x, y = make_data(103, 4, 4, dtype=dtype)
    rng = np.random.default_rng(5)
    table = np.tile((rng.normal(size=4) * np.geomspace(1e-3, 1e4, 4)).astype(dtype), (103, 1))
    constant = np.where(rng.random((103, 4)) < 0.5, np.nextafter(table, dtype(np.inf)), table)
    options = SPLITS | {"ridge": 0.1}
    plain = measures.linear_probe_fit(np.pad(x, ((0, 0), (0, 4))), y, **options)
    fit = measures.linear_probe_fit(np.c_[x, constant], y, **options)
    assert fit.converged.all()
    assert fit.iterations <= plain.iterations + 1
    np.testing.assert_allclose(fit.losses, plain.losses, rtol=RTOL)
    np.testing.assert_allclose(fit.probabilities, plain.probabilities, atol=2e-3)
    np.testing.assert_array_equal(fit.coefficients[:, 4:], 0)


def test_a_common_offset_costs_its_digits_and_no_more():
    """The probe of float32 is that of float64 on the same rounded features."""
    x, y = make_data()
    moved = (x + np.float32(1e4)).astype(np.float32)
    fit = measures.linear_probe_fit(moved, y, **SPLITS, tol=1e-7)
    assert fit.converged.all()
    with jax.enable_x64(True):
        exact = measures.linear_probe_fit(moved.astype(float), y.astype(float), **SPLITS, tol=1e-12)
        np.testing.assert_allclose(fit.losses, exact.losses, rtol=RTOL)
        np.testing.assert_allclose(fit.probabilities, exact.probabilities, atol=2e-3)


@pytest.mark.parametrize("unit", [1e30, 1e-30])
def test_units_do_not_matter_to_the_converged_probe(unit):
    x, y = make_data()
    plain, scaled = (
        measures.linear_probe_fit(f * x, y, **SPLITS) for f in (np.float32(1), np.float32(unit))
    )
    assert plain.converged.all() & scaled.converged.all()
    np.testing.assert_allclose(scaled.probabilities, plain.probabilities, atol=2e-2)
    np.testing.assert_allclose(
        scaled.coefficients * np.float32(unit), plain.coefficients, atol=0.05
    )


def test_derivatives_are_refused():
    x, y = make_data(n=20, d=4)
    for predict in (measures.linear_probe, measures.gradient_probe):
        with pytest.raises(
            TypeError, match="probe, as a function of its features, has no derivative"
        ):
            jax.grad(lambda x, predict=predict: predict(x, y, 2).sum())(x)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(30, 200, 3), (60, 400, 2)])
def test_separable_data_converge_with_a_small_penalty(size):
    """Also where the penalty is far below the rounding of the curvature."""
    x, _ = make_data(*size)
    y = np.eye(size[2], dtype=np.float32)[np.arange(size[0]) % size[2]]
    for ridge in (1e-2, 1e-6):
        fit = measures.linear_probe_fit(x, y, 4, ridge=ridge)
        assert fit.converged.all(), ridge
        assert fit.iterations < 250
        with jax.enable_x64(True):
            exact = measures.linear_probe_fit(x.astype(float), y.astype(float), 4, ridge=ridge)
            assert exact.converged.all()
            np.testing.assert_allclose(fit.losses, exact.losses, rtol=RTOL)
            np.testing.assert_allclose(fit.probabilities, exact.probabilities, atol=0.06)


def test_too_few_steps_are_reported_and_their_folds_predict_nothing():
    x, y = make_data()
    few = SPLITS | {"max_steps": 4}
    fit = measures.linear_probe_fit(x, y, **few)
    assert not fit.converged.any()
    assert fit.iterations == 4
    least = measures.linear_probe_fit(x, y, **SPLITS).losses
    missing = 1 - np.asarray(least) / np.asarray(fit.losses)
    assert (missing > 1e-3).all()
    assert (missing <= np.asarray(fit.gap)).all()
    tol = float(np.median(fit.gap))
    fit = measures.linear_probe_fit(x, y, **few, tol=tol)
    assert 0 < fit.converged.sum() < 4
    with pytest.warns(RuntimeWarning, match="folds did not converge in .* steps") as said:
        chances = measures.linear_probe(x, y, **few, tol=tol)
    assert said[0].filename == __file__
    chances = np.asarray(chances)
    lost = np.isnan(chances)
    converged = np.asarray(fit.converged)[np.asarray(fold_of(103, 4))]
    np.testing.assert_array_equal(lost, np.tile(~converged[:, None], 4))
    np.testing.assert_array_equal(chances[~lost], np.asarray(fit.probabilities)[~lost])


def test_folds_that_did_not_converge_predict_nothing_when_traced():
    """The numbers say it, and those of samples in no fold stay zero."""
    x, y = make_data()
    predict = jax.jit(
        lambda x, c: measures.linear_probe(x, y, **SPLITS, max_steps=4, num_samples=c)
    )
    part = np.asarray(predict(x, 50))
    assert np.isnan(part[:50]).all()
    np.testing.assert_array_equal(part[50:], 0)


def test_features_that_are_not_finite_predict_nothing():
    x, y = make_data()
    x[7, 1] = np.nan
    with pytest.warns(RuntimeWarning, match="4 of 4 folds did not converge"):
        assert np.isnan(measures.linear_probe(x, y, **SPLITS)).all()


def test_gradient_probe_is_gradient_descent():
    x, y = make_data(40, 5, 3)
    ours = measures.gradient_probe(x, y, 4, num_steps=7, step_size=0.01, folds="contiguous")
    for train, test in KFold(4).split(x):
        weights, shift = np.zeros((5, 3)), np.zeros(3)
        chances = lambda rows, w, b: softmax(x[rows] @ w + b, 1)  # noqa: E731
        for _ in range(7):
            residual = (chances(train, weights, shift) - y[train]) / len(train)
            weights, shift = weights - 0.01 * x[train].T @ residual, shift - 0.01 * residual.sum(0)
        np.testing.assert_allclose(ours[test], chances(test, weights, shift), atol=1e-5)


def test_gradient_probe_is_stable_at_its_step_and_not_far_above():
    x, y = make_data(80, 6, 3)
    step = float(probes.stable_step_size(x))
    design = np.c_[x, np.ones(80)].astype(np.float64)
    np.testing.assert_allclose(step, 2 * 80 / np.linalg.norm(design, 2) ** 2, rtol=1e-3)
    for offset in (1e4, 1e12):
        moved = (x - x.mean(0) + offset).astype(np.float32)
        np.testing.assert_allclose(
            probes.stable_step_size(moved), 2 / (6 * offset**2 + 1), rtol=1e-3
        )
        assert np.isfinite(measures.gradient_probe(moved, y, 8, num_steps=3)).all()

    def loss(num_steps, size):
        chances = measures.gradient_probe(x, y, 8, num_steps=num_steps, step_size=size)
        return -np.mean(np.log(np.sum(chances * y, 1) + 1e-30))

    falling = [loss(steps, None) for steps in (0, 1, 20, 200)]
    assert falling == sorted(falling, reverse=True)
    np.testing.assert_allclose(falling[0], np.log(3), rtol=1e-5)
    with pytest.warns(RuntimeWarning, match="is above the stable"):
        assert loss(200, 30 * step) > falling[-1]
    loss(2, 2 * 0.99 * step)
    with pytest.warns(RuntimeWarning, match="is above the stable"):
        loss(2, 2 * 1.01 * step)
    options = {
        "probe": "gradient",
        "num_splits": 8,
        "fractions": (1.0,),
        "num_steps": 2,
        "step_size": 2 * 1.01 * step,
    }
    with pytest.warns(RuntimeWarning, match="is above the stable"):
        transfer_errors(x, y, key=None, **options)


def test_wrong_use():
    x, y = make_data(30, 6, 3)
    for predict in (measures.linear_probe, measures.gradient_probe):
        call = partial(predict, x, num_splits=5)
        refused(
            (
                lambda call=call: call(y, num_splits=31),
                "`num_splits` must be at most the number of samples",
            ),
            (
                lambda call=call: call(y, folds="random"),
                "`folds` must be one of 'stratified', 'contiguous'",
            ),
            (lambda call=call: call(y, num_samples=4), "`num_samples` must lie between"),
            (lambda call=call: call(np.ones((30, 1), np.float32)), "`y` must be .* got one column"),
        )
    for wrong in ({"ridge": 0.0}, {"tol": 0.0}):
        refused((lambda wrong=wrong: measures.linear_probe(x, y, 5, **wrong), "must be positive"))
