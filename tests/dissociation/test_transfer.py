import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compilations

from dissociation import measures
from dissociation.measures._probes import _budget


def make_data(n=120, d=6, classes=3):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, d)).astype(np.float32)
    labels = (x @ rng.normal(size=(d, classes)) + rng.gumbel(size=(n, classes))).argmax(1)
    return x, np.eye(classes, dtype=np.float32)[labels]


@pytest.mark.slow
@pytest.mark.parametrize(("probe", "num_buckets"), [("converged", 1), ("gradient", 3)])
def test_errors_are_those_of_the_probe_on_slices(probe, num_buckets):
    x, y = make_data()
    fractions = (1.0, 0.25, 0.6)
    predict = {"converged": measures.linear_probe, "gradient": measures.gradient_probe}[probe]
    wanted = []
    for fraction in fractions:
        count = round(120 * fraction)
        chances = np.asarray(predict(x[:count], y[:count], 5))
        wanted.append(np.mean(chances.argmax(1) != y[:count].argmax(1)))
    options = {
        "key": None,
        "fractions": fractions,
        "num_splits": 5,
        "probe": probe,
        "num_buckets": num_buckets,
    }
    errors = measures.transfer_errors(x, y, **options)
    np.testing.assert_allclose(
        errors, wanted, atol=1.01 / 30
    )  # one sample at a tie, in the smallest budget
    assert np.abs(errors - np.array(wanted)).sum() < 2 / 30
    assert len(set(np.round(wanted, 3))) > 1


def test_default_budgets_are_twentieths():
    x, y = make_data(400, 4)
    assert [_budget(k / 20, 10_000, 10) for k in range(1, 21)] == [500 * k for k in range(1, 21)]
    assert _budget(0.57, 100, 10) == 57  # int(0.57 * 100) is 56
    assert _budget(0.999, 100, 10) == 99
    assert measures.transfer_errors(x, y, key=None, num_buckets=1, probe="gradient").shape == (20,)


@pytest.mark.parametrize("option", ["ridge", "step_size"])
def test_another_number_compiles_nothing(option):
    probe = {"ridge": "converged", "step_size": "gradient"}[option]
    options = {"key": None, "fractions": (1.0,), "num_splits": 3, "probe": probe}
    run = lambda value: measures.transfer_errors(*make_data(), **options, **{option: value})  # noqa: E731
    assert compilations(lambda: run(0.1))
    assert not compilations(lambda: run(0.2))
    assert not np.array_equal(run(0.1), run({"ridge": 1e3, "step_size": 1e-6}[option]))


def test_wrong_use():
    for options, message in (
        ({"fractions": (0.0, 1.0)}, r"`fractions` must lie in \(0, 1\]"),
        ({"fractions": (0.01,)}, "`fractions` must leave at least `num_splits`"),
        ({"probe": "lucky"}, "`probe` must be one of 'converged', 'gradient'"),
        ({"probe": "gradient", "step_size": jnp.asarray(0.0)}, "`step_size` must be positive"),
        ({"probe": "gradient", "num_steps": jnp.asarray(-1)}, "`num_steps` must be non-negative"),
    ):
        with pytest.raises(ValueError, match=message):
            measures.transfer_errors(*make_data(), **{"key": None} | options)


@pytest.mark.parametrize("probe", [pytest.param("converged", marks=pytest.mark.slow), "gradient"])
def test_sorted_rows_transfer_as_well_as_shuffled_ones(probe):
    """Of features that say something and of features that do not, for budgets below the size of a class, too."""
    options = {"fractions": (0.2, 0.5, 1.0), "num_splits": 5, "probe": probe, "num_buckets": 1}
    run = jax.jit(lambda x, y, key: measures.transfer_errors(x, y, key=key, **options))
    x, y = make_data(300)
    noise = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    place = np.argsort(y.argmax(1), kind="stable")
    keys = jax.random.split(jax.random.key(0), 8)
    for features, low in ((x, 0.1), (noise, 0.5)):
        given, ordered = (
            np.stack([run(features[rows], y[rows], key) for key in keys])
            for rows in (slice(None), place)
        )
        spread = (given.var(0, ddof=1) + ordered.var(0, ddof=1)) ** 0.5 / len(keys) ** 0.5
        assert (np.abs(given.mean(0) - ordered.mean(0)) <= 3.5 * np.maximum(spread, 0.003)).all()
        assert (ordered.mean(0) > low).all()
    # As they come, the first rows are of one class: no error there is no news, and it is refused
    # where it is seen.
    with pytest.raises(
        ValueError, match=r"every class in the first 60 rows.*got none of class 1.*Pass a `key`"
    ):
        measures.transfer_errors(noise[place], y[place], key=None, **options)


@pytest.mark.slow
def test_one_key_is_one_order_for_all_members():
    x, y = make_data()
    options, key = {"fractions": (0.3, 1.0), "num_splits": 5, "num_buckets": 1}, jax.random.key(2)
    members = jnp.stack([jnp.asarray(x), 3 * jnp.asarray(x)])
    both = jax.vmap(lambda member: measures.transfer_errors(member, y, key=key, **options))(members)
    order = jax.random.permutation(key, len(x))
    wanted = measures.transfer_errors(x[order], y[order], key=None, **options)
    np.testing.assert_allclose(both, np.stack([wanted, wanted]), atol=1.01 / 36)


def test_budgets_without_a_converged_probe_have_no_error():
    x, y = make_data()
    x[60, 0] = np.nan  # in the larger budget alone
    with pytest.warns(RuntimeWarning, match="did not converge in 1 of 2 budgets"):
        errors = measures.transfer_errors(
            x, y, key=None, fractions=(0.5, 1.0), num_splits=5, num_buckets=1
        )
    np.testing.assert_array_equal(np.isnan(errors), [False, True])
