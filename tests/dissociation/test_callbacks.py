"""What happens on the host while a run goes on."""

import csv
import warnings
from functools import partial
from unittest.mock import Mock, call

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from linear_regression import squared_error, trained, weights

from dissociation.training import Callback, CsvLog, EarlyStop, FreezeDiverged, Progress, Save
from dissociation.training._progress import Meter, described
from dissociation.training._records import numbers_of


def rated(rate):
    return optax.sgd(rate)


@pytest.mark.parametrize(
    ("answer", "steps"),
    [(np.array([True]), 0), ([False] * 3, 4), (1, None), (np.ones(2, bool), None)],
)
def test_any_form_of_true_stops_and_what_is_none_is_refused(key, answer, steps):
    run = partial(trained, key, num_steps=4, save=Save(at=[0, 2]), callbacks=[lambda *_: answer])
    if steps is not None:
        assert run().num_steps == steps
        return
    with pytest.raises(
        ValueError, match="`callbacks` must return None, True, or a boolean for each of the 3 mem"
    ):
        run()


class Told(Callback):
    """Notes all calls."""

    def __init__(self):
        self.calls = []
        self.begin = lambda step, num_steps, past: self.calls.append(
            ("begin", step, num_steps, [s for s, _ in past])
        )
        self.advance = lambda step, loss: self.calls.append(("advance", step, loss.shape))
        self.record = lambda step, records: self.calls.append(("record", step))
        self.close = lambda: self.calls.append(("close",))


def test_callbacks_are_told_in_order(key, tmp_path):
    def run(num_steps, *callbacks, **options):
        save = Save(lambda model, step, key: jnp.sum(model.weight), at=[0, 4])
        return trained(key, num_steps=num_steps, save=save, callbacks=callbacks, **options)

    first, second, seen = Told(), Told(), []
    result = run(6, first, lambda step, records: seen.append(records), checkpoint=tmp_path / "run")
    np.testing.assert_array_equal(seen[1]["observed"], result.history.observed[:, 1])
    assert first.calls[:3] == [("begin", 0, 6, []), ("record", 0), ("advance", 0, (3, 0))]
    assert first.calls[-1] == ("close",)
    moves = [call for call in first.calls if call[0] == "advance"]
    assert moves[-1][1] == 6
    assert sum(shape[1] for *_, shape in moves) == 6
    run(9, second, checkpoint=tmp_path / "run")
    assert second.calls[:2] == [("begin", 6, 9, [0, 4]), ("advance", 6, (3, 0))]
    # What fails on the way is closed all the same, and nothing of it is swallowed.
    third = Told()
    with pytest.raises(RuntimeError, match="at once"):
        run(6, third, Mock(side_effect=RuntimeError("at once")))
    assert third.calls[-2:] == [("record", 0), ("close",)]
    same = run(6, Callback())  # methods may be left out
    np.testing.assert_array_equal(weights(same), weights(result))


def test_progress_shows_records(key):
    def shown(**options):
        meter = Mock(return_value=Mock(spec=Meter))
        result = trained(key, num_steps=9, callbacks=[Progress(meter)], **options)
        assert 9 in meter.call_args.args
        assert meter.return_value.method_calls[-1] == call.close()
        return result, [one.args for one in meter.return_value.advance.mock_calls]

    save = Save(
        lambda model, step, key: {"norm": jnp.linalg.norm(model.weight), "all": model.weight},
        [0, 3, 9],
    )
    result, told = shown(save=save)
    loss, norm = result.history.loss[:, 3:].mean(1), result.history.observed["norm"][:, -1]
    wanted = (
        f"loss {loss.mean():.4g} \u00b1 {loss.std():.2g}, norm {norm.mean():.4g} \u00b1 "
        f"{norm.std():.2g}"
    )
    assert told[-1] == (9, wanted)
    assert told[0] == (0, "compiling")
    assert told[1][1].startswith("norm ")  # there is no loss yet
    assert told[1][1].endswith(", compiling")
    assert "compiling" not in told[2][1]
    _, told = shown()
    assert told[1] == (0, "compiling")  # without records there is the loss alone
    assert told[-1][1].startswith("loss ")


def test_progress_shows_what_is_asked_by_short_names():
    records = {"loss": np.ones(2), "observed": {name: np.full(2, 3.0) for name in "abcdefgh"}}
    assert described(records, None).count("\u00b1") == 7
    assert described(records, ("h", "b")) == "loss 1 \u00b1 0, h 3 \u00b1 0, b 3 \u00b1 0"
    ones = np.ones(2)
    records = {
        "loss": ones,
        "metrics": {"a": ones, "b": ones},
        "observed": {"a": ones, "c": {"d": ones}},
    }
    assert list(numbers_of(records)) == ["loss", "metrics.a", "b", "observed.a", "c.d"]


def test_members_that_wait_too_long_are_frozen(key):
    """Others go on as if they were alone: in turn, in the same bits."""
    rates, same = jnp.array([0.3, 0.0, 0.08]), np.testing.assert_array_equal
    options = {
        "save": Save(lambda m, s, k: {"copy": m.weight}, range(0, 91, 2)),
        "member_map": "unroll",
    }
    run = partial(trained, key, optimizer=rated, num_steps=90, hyperparams=rates, **options)
    free, stopped = run(), run(callbacks=[EarlyStop("loss", 3, least_change=1e-3)])
    ends = stopped.state.step.tolist()  # by the rule of the next test
    assert ends[1] == 10  # its first loss, and four that are no better
    assert len(set(ends)) == 3
    assert max(ends) < 90
    assert stopped.num_steps == max(ends)
    for m, end in enumerate(ends):
        copies = stopped.history.observed["copy"][m]
        np.testing.assert_array_equal(weights(stopped)[m], copies[end // 2])
        assert (copies[end // 2 :] == copies[end // 2]).all()
        same(copies[: end // 2 + 1], free.history.observed["copy"][m, : end // 2 + 1])
        same(stopped.history.loss[m, :end], free.history.loss[m, :end])
        assert np.isnan(stopped.history.loss[m, end:]).all()
    assert (stopped.diverged_at == -1).all()


def test_early_stops_look_at_what_they_are_told_to(key):
    def records(value, name="score"):
        return {
            "loss": np.full(2, np.nan),
            "metrics": None,
            "observed": {name: np.asarray(value, float)},
        }

    def asked(stop, values):
        stop.begin(0, 10, [])
        return [stop.record(step, records(value)).tolist() for step, value in enumerate(values)]

    falling = EarlyStop("score", 1)
    values = [[1.0, 1.0], [0.5, 1.0], [0.6, 0.9], [0.5, 0.8], [0.4, np.nan], [0.3, np.nan]]
    wanted = [
        [False, False],
        [False, False],
        [False, False],
        [True, False],
        [False, False],
        [False, True],
    ]
    assert (
        asked(falling, values) == asked(falling, values) == wanted
    )  # every run starts from scratch
    rising = EarlyStop("score", 0, rising=True)
    assert asked(rising, [[1, 1], [2, 1], [3, 2]]) == [
        [False, False],
        [False, True],
        [False, False],
    ]
    at_least = EarlyStop("score", 0, least_change=0.5)
    assert asked(at_least, [[2, 2], [1.6, 1.4]]) == [[False, False], [True, False]]
    falling.begin(3, 10, [(step, records(value)) for step, value in enumerate(values[:3])])
    assert falling.record(3, records(values[3])).tolist() == [True, False]
    with pytest.raises(ValueError, match="`name` must be one of 'loss', 'score', got 'other'"):
        EarlyStop("other", 1).record(0, records([1, 1]))
    for wrong in ({"patience": -1}, {"patience": 1, "least_change": -0.5}):
        with pytest.raises(ValueError, match="`(patience|least_change)` must be"):
            EarlyStop("loss", **wrong)


def test_a_phase_that_goes_on_is_not_stopped_for_what_it_has_not_seen(key):
    """Its first record has no loss yet: neither impatience nor divergence."""
    run = partial(
        trained, key, trained(key, num_steps=5).state, num_steps=4, save=Save(at=range(5, 10))
    )
    plain, guarded = run(), run(callbacks=[FreezeDiverged(), EarlyStop("loss", 0)])
    assert guarded.num_steps == 9
    np.testing.assert_array_equal(weights(plain), weights(guarded))
    np.testing.assert_array_equal(plain.history.loss, guarded.history.loss)


def test_diverged_members_are_frozen(key):
    def run(rates=(0.1, 1e4, 0.2), **options):
        options |= {"save": Save(at=range(0, 61, 3)), "member_map": "vmap"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return trained(
                key, optimizer=rated, num_steps=60, hyperparams=jnp.asarray(rates), **options
            )

    free, guarded = run(), run(callbacks=[FreezeDiverged()])
    at = -(-(free.diverged_at[1] + 1) // 3) * 3  # the first record that the loss is in
    assert 0 < at < 60
    np.testing.assert_array_equal(free.diverged_at, guarded.diverged_at)
    np.testing.assert_allclose(
        weights(free)[[0, 2]], weights(guarded)[[0, 2]], rtol=1e-5, atol=1e-6
    )
    assert guarded.state.step.tolist() == [60, at, 60]
    assert run(rates=[1e4] * 3, callbacks=[FreezeDiverged()]).num_steps < 60  # none is left


def test_a_truth_value_per_member_freezes_for_good(key):
    def freeze(step, records):
        return np.array([False, step == 3, False])

    callbacks = [freeze, lambda *_: np.zeros(3, bool)]
    result = trained(key, num_steps=9, save=Save(at=range(10)), callbacks=callbacks)
    assert result.state.step.tolist() == [9, 3, 9]
    # What is frozen in one phase goes on in the next, unless it is frozen there.
    assert trained(key, result.state, num_steps=2).num_steps == 11


def test_a_table_has_a_row_per_record_and_member(key, tmp_path):
    def loss(model, batch, key):
        return squared_error(model, batch, key), {"first": model.weight[0, 0], "all": model.weight}

    path = tmp_path / "log.csv"
    path.write_text("what was here before")
    save = Save(
        lambda model, step, key: {"norm": jnp.linalg.norm(model.weight), "whole": model.weight},
        [0, 2, 5],
    )
    rates = np.array([0.1, 0.2, 0.3], np.float32)
    log = CsvLog(path, {"rate": rates, "name": ["a", "b", "c"]})
    options = {"num_steps": 5, "hyperparams": jnp.asarray(rates), "save": save, "callbacks": [log]}
    result = trained(key, loss=loss, optimizer=rated, **options)
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["step", "member", "rate", "name", "loss", "first", "norm"]
    assert [row[:2] for row in rows] == [
        [str(step), str(m)] for step in (0, 2, 5) for m in range(3)
    ]
    assert [row[3] for row in rows] == ["a", "b", "c"] * 3
    np.testing.assert_array_equal(np.float32([row[2] for row in rows]), np.tile(rates, 3))
    found = np.float32([row[4:] for row in rows]).reshape(3, 3, 3)  # [times, members, numbers]
    assert np.isnan(found[0, :, :2]).all()
    for i, (first, last) in enumerate(((0, 2), (2, 5)), start=1):
        np.testing.assert_allclose(
            found[i, :, 0], result.history.loss[:, first:last].mean(1), rtol=1e-6
        )
        np.testing.assert_allclose(
            found[i, :, 1], result.history.metrics["first"][:, first:last].mean(1), rtol=1e-6
        )
    np.testing.assert_array_equal(found[:, :, 2], result.history.observed["norm"].T)
    assert [p.name for p in tmp_path.iterdir()] == ["log.csv"]
    with pytest.raises(
        ValueError, match=r"`columns` must hold one .* of the 3 members, got shape \(2,\)"
    ):
        trained(key, num_steps=1, callbacks=[CsvLog(path, {"rate": [0.1, 0.2]})])


def test_a_full_disk_is_named_by_the_table(small_disk):
    log = CsvLog(small_disk / "table.csv")
    log.begin(0, 10, [])
    (small_disk / "rest").write_bytes(bytes(92 * 1024))
    with pytest.raises(OSError, match="No space left on device: '.*table.csv'"):
        log.record(0, {"loss": np.ones(10_000)})
