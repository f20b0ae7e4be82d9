"""Models of trajectories: equality with `fit`, forecasts, bands, features, kernels and files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compilations
from words import refused

import koopman
from koopman import PrincipalComponents, ReducedRank, Ridge, fit, fit_model, lagged_pairs
from koopman._models._lifting import threshold_rank

pytestmark = pytest.mark.usefixtures("x64")

ROTATION = 0.95 * np.array([[np.cos(0.3), np.sin(0.3)], [-np.sin(0.3), np.cos(0.3)]])


def noisy_rotation(num_steps, seed=0, scale=1.0):
    """Return states of x' = x R with noise, [num_steps, 2]."""
    noise = scale * np.random.default_rng(seed).normal(size=(num_steps, 2))
    states = np.zeros((num_steps, 2))
    for step in range(num_steps - 1):
        states[step + 1] = states[step] @ ROTATION + noise[step]
    return states


STATES = noisy_rotation(600)


def reference(states, estimator, num_delays, **options):
    """Return the operator of `fit` on delays, and the last row of delays."""
    delayed = np.asarray(koopman.delay_embed(states, num_delays))
    x, y = map(np.asarray, lagged_pairs(delayed))
    observable = y[:, : states.shape[1]]
    return fit(estimator, x, y, observable=observable, **options), delayed[-1:]


def check_equality(states, estimator, num_delays=1):
    """Check that forecasts and eigenvalues of a model are those of `fit`."""
    model = fit_model(states, estimator, num_delays=num_delays)
    operator, row = reference(states, estimator, num_delays, center=True)
    expected = np.asarray(koopman.predict(operator, row, [1, 7]))
    np.testing.assert_allclose(model.predict([1, 7])["mean"].values, expected, rtol=1e-6)
    lifted = koopman.predict(model.operator, model.lift(states[-num_delays:]), [1, 7])
    np.testing.assert_allclose(lifted, expected, rtol=1e-6)
    leading = koopman.eigenvalues(operator)[:2]
    np.testing.assert_allclose(koopman.eigenvalues(model.operator)[:2], leading, atol=1e-7)


@pytest.mark.parametrize(
    ("estimator", "num_delays"),
    [(Ridge(), 3), (Ridge(0.1), 1), (PrincipalComponents(3), 3), (ReducedRank(2), 3)],
)
@pytest.mark.filterwarnings("ignore:`alpha`")
def test_a_model_is_the_fit_of_its_pairs(estimator, num_delays):
    check_equality(STATES * [1.0, 30.0] + 5, estimator, num_delays)


@pytest.mark.parametrize(
    "estimator", [Ridge(), Ridge(1e-3), PrincipalComponents(2), ReducedRank(2)]
)
@pytest.mark.filterwarnings("ignore:There are fewer pairs", "ignore:`alpha`")
def test_more_columns_than_pairs_change_no_result(estimator):
    shapes = np.random.default_rng(1).normal(size=(2, 90)) * np.geomspace(1, 50, 90)
    wide = STATES[:40] @ shapes + 3 + np.random.default_rng(2).normal(size=(40, 90))
    check_equality(wide, estimator)


def test_blocks_of_columns_have_the_bands_of_few_columns():
    rng = np.random.default_rng(1)
    few = STATES[:60] @ rng.normal(size=(2, 90)) + 0.1 * rng.normal(size=(60, 90))
    many = np.tile(few, (1, 13))
    expected = fit_model(few, PrincipalComponents(2)).predict(2)
    model = fit_model(many, PrincipalComponents(2))
    many[:] = 0.0  # a model does not refer to the arrays of its user
    forecast = model.predict(2)
    for name in ("mean", "mean_low", "high"):
        repeated = np.tile(expected[name].values, (1, 1, 13))
        np.testing.assert_allclose(forecast[name].values, repeated, rtol=1e-6)


def test_kernels_are_those_of_fit():
    states = STATES[:60]
    kernel = koopman.RBF(3.0)
    for centres in (states[:30], None):
        model = fit_model(states, PrincipalComponents(5), kernel=kernel, centres=centres)
        operator, row = reference(states, PrincipalComponents(5), 1, kernel=kernel, centres=centres)
        values = koopman.eigenvalues(model.operator)
        np.testing.assert_allclose(values, koopman.eigenvalues(operator), atol=1e-8)
        expected = np.asarray(koopman.predict(operator, row, 2))
        np.testing.assert_allclose(model.predict([2])["mean"].values[0], expected, atol=1e-8)
        # The constant's eigenvalue 1 is no mode, though a kernel has no intercept.
        assert model.rates().growth.values.max() < -1e-3


def test_rates_have_units_and_hold_the_truth():
    model = fit_model(STATES, time_step=0.5)
    rates = model.rates()
    assert bool(rates.resolved.values.all())
    assert rates.growth.attrs["units"] == "1/time"
    truth = {"growth": 2 * np.log(0.95), "frequency": 0.3 / np.pi}
    truth["time_scale"] = -1 / truth["growth"]
    for name, value in truth.items():
        low, high = float(rates[f"{name}_low"][0]), float(rates[f"{name}_high"][0])
        assert low < value < high
    assert "growth (1/time)" in model.summary()
    assert rates.share.values.sum() == pytest.approx(1)


def test_bands_hold_new_observations_and_means_lie_within():
    held = []
    for seed in range(12):
        states = noisy_rotation(600, seed + 10)
        forecast = fit_model(states[:500]).predict([1, 5, 20], past=states[499:500])
        later = states[[500, 504, 519]][:, None]
        held.append((forecast.low.values < later) & (later < forecast.high.values))
        assert (forecast.mean_low < forecast["mean"]).all()
        assert (forecast.low < forecast.mean_low).all()
        assert (forecast.mean_high < forecast.high).all()
    assert 0.8 < np.mean(held) < 0.98  # 72 correlated observations, at level 0.9


def test_a_higher_level_is_wider_and_few_blocks_have_no_intervals():
    model = fit_model(STATES)
    wide = model.predict(2, level=0.99)
    narrow = model.predict(2, level=0.5)
    assert (wide.high > narrow.high).all()
    assert (wide.mean_low < narrow.mean_low).all()
    short = fit_model(STATES[:30])
    assert np.isnan(short.predict(1).mean_low).all()
    assert np.isfinite(short.predict(1).low).all()
    rates = short.rates()
    assert not rates.resolved.values.any()
    assert np.isnan(rates.growth_low).all()
    assert "blocks" in str(rates.reason.values[0]) or "pairs" in str(rates.reason.values[0])


def test_scores_stand_beside_persistence():
    scores = fit_model(STATES).score(noisy_rotation(600, 1), [1, 30])
    assert scores.error.dims == ("step", "column")
    # One step: the noise; many steps: the spread, which persistence exceeds by the root of 2.
    np.testing.assert_allclose(scores.error.values[0], 1, rtol=0.1)
    ratio = scores.persistence.values[1] / scores.error.values[1]
    assert (ratio > 1.2).all()


def polynomial(state):
    return jnp.concatenate([state, state**2])


def test_features_lift_under_transformations():
    model = fit_model(STATES, features=polynomial, num_delays=2)

    def total(past):
        return koopman.predict(model.operator, model.lift(past), 3).sum()

    past = STATES[-2:]
    expected = model.predict([3])["mean"].values.sum()
    np.testing.assert_allclose(jax.jit(total)(past), expected)
    np.testing.assert_allclose(jax.vmap(total)(past[None]), [expected])
    step = 1e-6 * np.eye(4).reshape(4, 2, 2)[1]
    slope = (total(past + step) - total(past - step)) / 2e-6
    np.testing.assert_allclose(jax.grad(total)(past)[0, 1], slope, rtol=1e-5)
    with pytest.raises(TypeError, match="`model` must be known"):
        jax.jit(lambda model: model.rates())(model)


def test_images_keep_their_shape():
    rng = np.random.default_rng(0)
    angle = 0.4 * np.arange(120)
    amplitudes = np.stack([np.cos(angle), np.sin(angle)], 1)
    video = (amplitudes @ rng.normal(size=(2, 140))).reshape(120, 10, 14)
    video = video + 0.01 * rng.normal(size=video.shape)
    model = fit_model([video], PrincipalComponents("auto"))
    assert model.recipe.estimator.rank == 2
    table = model.mode_table()
    assert table.shapes.shape == (1, 10, 14)
    assert bool(table.rates.resolved[0])
    forecast = model.predict(4)
    assert forecast["mean"].dims == ("step", "run", "height", "width")
    np.testing.assert_allclose(
        koopman.predict(model.operator, model.lift(video[-1:]), 4)[0],
        forecast["mean"].values[3, 0],
        atol=1e-10,
    )
    assert model.predict(1, past=video[-1:])["mean"].shape == (1, 1, 10, 14)


def test_the_hard_threshold_counts_tones():
    rng = np.random.default_rng(0)
    times = np.arange(400)
    tones = np.cos(0.1 * times) + np.cos(0.7 * times) + 0.1 * rng.normal(size=400)
    model = fit_model(tones, PrincipalComponents("auto"), num_delays=40)
    assert model.recipe.estimator.rank == 4
    assert threshold_rank(np.array([5.0, 4.0, 1e-17, 0.0]), 50, 4) == 2


def test_files_restore_models_bit_for_bit(tmp_path):
    kernel = {"kernel": koopman.RBF(3.0), "centres": STATES[:20]}
    for name, options in {
        "plain": {},
        "kernel": kernel,
        "features": {"features": polynomial},
    }.items():
        model = fit_model(STATES, PrincipalComponents(3) if options else None, **options)
        model.save(tmp_path / f"{name}.npz")
        function = options.get("features")
        loaded = koopman.load_model(tmp_path / f"{name}.npz", features=function)
        for variable, values in model.predict(3).items():
            np.testing.assert_array_equal(values, loaded.predict(3)[variable])
        assert repr(loaded) == repr(model)
    path = tmp_path / "features.npz"
    refused(
        (lambda: koopman.load_model(path), "`features` must be given again"),
        (lambda: koopman.load_model(path, jnp.cos), "`features` must be the function of the fit"),
        (
            lambda: koopman.load_model(tmp_path / "plain.npz", polynomial),
            "`features` must be None",
        ),
    )
    np.savez(tmp_path / "objects.npz", tree=np.asarray([None, {}], object))
    refused((lambda: koopman.load_model(tmp_path / "objects.npz"), "must be a file of"))
    model = fit_model(STATES[:50], PrincipalComponents(2), kernel=lambda x, y: x @ y.T)
    with pytest.raises(TypeError, match="`kernel` must be one of koopman to be saved"):
        model.save(tmp_path / "function.npz")


def test_other_lengths_compile_no_program():
    def analyse(num_steps):
        model = fit_model(STATES[:num_steps] * 2.0, num_delays=2)
        model.rates()
        model.predict(3)

    assert len(compilations(lambda: analyse(600))) <= 15
    assert compilations(lambda: analyse(550)) == []


def test_options_that_do_not_fit_are_refused():
    model = fit_model(STATES, num_delays=3)
    refused(
        (lambda: fit_model(STATES, kernel=koopman.RBF(1.0), center=True), "`center` must be False"),
        (lambda: fit_model(STATES, centres=STATES[:3]), "`kernel` must be given"),
        (
            lambda: fit_model(STATES, num_delays=2, kernel=koopman.RBF(1.0), centres=STATES[:3]),
            f"`centres` must have shape .m, {2 * STATES.shape[1]}., a row of delays",
        ),
        (lambda: fit_model(STATES, num_input_delays=2), "`num_input_delays` must be 1"),
        (
            lambda: fit_model(STATES, features=jnp.log),
            r"`features` must return finite numbers.*got (nan|-inf) for state",
        ),
        (lambda: fit_model(np.ones((9, 2))), "`trajectories` must hold states that vary"),
        (lambda: model.predict(0), "`steps` must be at least 1"),
        (lambda: model.predict(2, past=STATES[:2]), r"`past` must have 3 rows or more"),
        (lambda: model.predict(2, past=STATES[:3, :1]), r"`past` must have the 2 columns"),
        (lambda: model.predict(2, inputs=np.ones((2, 1))), "`inputs` must be None"),
        (lambda: model.rates(level=1.0), "`level` must be between 0 and 1"),
        (
            lambda: fit_model(STATES, features=polynomial).matrices(),
            "`model` must be linear in few states",
        ),
        (lambda: fit(PrincipalComponents("auto"), STATES, STATES), "`rank` must be an integer in"),
    )
    with pytest.raises(TypeError, match="`trajectories` must be known"):
        jax.jit(lambda states: fit_model(states).lifted)(STATES)
