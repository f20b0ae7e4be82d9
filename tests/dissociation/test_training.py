import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dissociation import checkpoint as checkpoints
from dissociation import sharding
from dissociation.training import fit
from dissociation.training import run as run_module


class Linear(eqx.Module):
    weight: jax.Array
    name: str = eqx.field(static=True, default="linear")

    def __call__(self, x):
        return self.weight @ x


def linear_members(key, members=3, out=2, inputs=4):
    return eqx.filter_vmap(lambda k: Linear(jax.random.normal(k, (out, inputs))))(jax.random.split(key, members))


def regression(key, samples=10, inputs=4, out=2):
    x_key, y_key = jax.random.split(key)
    return jax.random.normal(x_key, (samples, inputs)), jax.random.normal(y_key, (samples, out))


def squared_error(model, batch, key):
    x, y = batch
    return 0.5 * jnp.mean(jnp.sum((jax.vmap(model)(x) - y) ** 2, axis=1))


def noisy_error(model, batch, key):
    x, y = batch
    return squared_error(model, (x + jax.random.normal(key, x.shape), y), key)


def noisy_weight_error(weight, batch, key):
    return noisy_error(Linear(weight), batch, key)


def weights(result):
    return np.asarray(result.models.weight)


def test_full_batch_descent_equals_its_closed_form(key):
    # W_t - W* = (W_0 - W*) (I - lr X^T X / n)^t for the mean squared error.
    models, (x, y) = linear_members(key), regression(key)
    result = fit(models, squared_error, (x, y), optax.sgd(0.1), num_steps=30, batch_size=None, key=key)
    gram = np.asarray(x, np.float64).T @ np.asarray(x, np.float64) / len(x)
    optimum = np.linalg.lstsq(np.asarray(x, np.float64), np.asarray(y, np.float64))[0].T
    shrink = np.linalg.matrix_power(np.eye(4) - 0.1 * gram, 30)
    expected = optimum + (np.asarray(models.weight, np.float64) - optimum) @ shrink
    np.testing.assert_allclose(weights(result), expected, rtol=2e-5, atol=2e-6)
    assert result.models.name == "linear"
    assert not models.weight.is_deleted()


@pytest.mark.parametrize("member_map", ["vmap", "scan", "unroll"])
def test_equals_a_plain_loop(key, member_map):
    """Batches, remainder, optimiser state and keys against a Python loop over members and steps."""
    models, data = linear_members(key), regression(key)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.1, 9))
    result = fit(
        models, noisy_error, data, optimizer, num_epochs=3, batch_size=4, key=key, member_map=member_map
    )  # fmt: skip
    for m in range(3):
        weight = models.weight[m]
        state, step = optimizer.init(weight), 0
        for epoch in range(3):
            order = jax.random.permutation(jax.random.fold_in(jax.random.fold_in(key, 0), epoch), 10)
            for chosen in (order[:4], order[4:8], order[8:]):
                member_key = jax.random.fold_in(jax.random.fold_in(key, 1), m)
                step_key = jax.random.fold_in(jax.random.fold_in(member_key, 0), step)
                batch = (data[0][chosen], data[1][chosen])
                value, gradient = jax.value_and_grad(noisy_weight_error)(weight, batch, step_key)
                update, state = optimizer.update(gradient, state)
                np.testing.assert_allclose(result.history.loss[m, step], value, rtol=1e-4)
                weight, step = weight + update, step + 1
        np.testing.assert_allclose(weights(result)[m], weight, rtol=1e-4, atol=1e-5)
    assert result.member_map == member_map


@pytest.mark.parametrize("shared", [True, False])
def test_every_epoch_uses_every_sample_once(key, shared):
    data = 2.0 ** jnp.arange(8)

    def mean_of_batch(model, batch, key):
        return jnp.mean(batch) + 0 * jnp.sum(model)

    run = fit(
        jnp.zeros((3, 1)), mean_of_batch, data, optax.sgd(0.0), num_epochs=2, batch_size=1, key=key,
        shared_batches=shared,
    )  # fmt: skip
    for losses in run.history.loss:
        assert sorted(losses[:8]) == sorted(losses[8:]) == data.tolist()
        assert losses[:8].tolist() != losses[8:].tolist()
    assert (run.history.loss == run.history.loss[0]).all() == shared


def test_remainder_is_used_or_dropped(key):
    data = jnp.arange(10.0)

    def mean_of_batch(model, batch, key):
        return jnp.mean(batch) + 0 * jnp.sum(model)

    def losses(**options):
        run = fit(
            jnp.zeros((1, 1)), mean_of_batch, data, optax.sgd(0.0), num_epochs=1, batch_size=4, key=key, **options
        )
        return run.history.loss[0]

    kept, dropped = losses(), losses(drop_remainder=True)
    assert kept @ [4, 4, 2] == pytest.approx(45)
    assert len(dropped) == 2
    np.testing.assert_array_equal(dropped, kept[:2])


@pytest.mark.parametrize("member_map", ["scan", "unroll"])
def test_members_in_turn_do_not_feel_each_other(key, member_map):
    """Alone, in company and over two devices: the same bits."""
    models, data = linear_members(key, members=3), regression(key, samples=64)

    def run(models, **options):
        options = {"num_epochs": 3, "batch_size": 10, "key": key, "member_map": member_map, **options}
        return fit(models, squared_error, data, optax.adam(1e-2), **options)

    together = run(models)
    alone = [run(jax.tree.map(lambda leaf, m=m: leaf[m : m + 1], models)) for m in range(3)]
    np.testing.assert_array_equal(weights(together), np.concatenate([weights(r) for r in alone]))
    two_devices = run(models, mesh=sharding.member_mesh(jax.devices("cpu")[:2]))
    np.testing.assert_array_equal(weights(together), weights(two_devices))
    np.testing.assert_array_equal(together.history.loss, two_devices.history.loss)
    # Three members on two devices are padded, and so are their own orders.
    own = {"shared_batches": False, "key": jax.random.split(key, 3)}
    mesh = sharding.member_mesh(jax.devices("cpu")[:2])
    np.testing.assert_array_equal(weights(run(models, **own)), weights(run(models, mesh=mesh, **own)))


def test_vmap_agrees_with_members_in_turn(key):
    models, data = linear_members(key, members=5), regression(key, samples=64)

    def run(**options):
        return fit(models, noisy_error, data, optax.sgd(0.05), num_epochs=2, batch_size=10, key=key, **options)

    in_turn, mapped = run(member_map="scan"), run(member_map="vmap")
    np.testing.assert_allclose(weights(in_turn), weights(mapped), rtol=1e-5, atol=1e-6)
    batched = run(member_map="vmap", members_per_batch=2)
    np.testing.assert_allclose(weights(mapped), weights(batched), rtol=1e-5, atol=1e-6)
    sharded = run(member_map="vmap", mesh=sharding.member_mesh(jax.devices("cpu")[:2]))
    np.testing.assert_allclose(weights(mapped), weights(sharded), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("member_map", ["scan", "vmap"])
def test_chunks_leave_no_trace(key, monkeypatch, member_map):
    models, data = linear_members(key), regression(key, samples=40)

    def run():
        return fit(
            models, noisy_error, data, optax.adam(0.05), num_epochs=4, batch_size=3, key=key, member_map=member_map
        )

    whole = run()
    monkeypatch.setattr(run_module, "CHUNK_SECONDS", 0.0)  # every chunk is one step
    np.testing.assert_array_equal(weights(whole), weights(run()))


@pytest.mark.parametrize(("samples", "drop", "epochs"), [(12, False, 42), (14, True, 36), (14, False, 1)])
def test_orders_of_several_short_epochs_at_once_change_nothing(key, monkeypatch, samples, drop, epochs):
    models, data = linear_members(key), regression(key, samples=samples)
    options = {"num_steps": 150, "batch_size": 4, "drop_remainder": drop, "key": key}
    found = []
    for longest in (512, 1):
        monkeypatch.setattr(run_module, "MAX_ORDER", longest)
        steps = samples // 4 if drop or samples % 4 == 0 else samples // 4 + 1
        batches = run_module.Batches(samples, 4, steps, key)
        assert batches.span == (epochs if longest > 1 else 1)
        for shared in (True, False):
            result = fit(models, noisy_error, data, optax.adam(0.05), shared_batches=shared, **options)
            found.append((weights(result), result.history.loss))
    jax.tree.map(np.testing.assert_array_equal, found[:2], found[2:])


def test_hyperparameters_differ_by_member_and_compile_once(key):
    models, data = linear_members(key), regression(key)
    rates, decays = jnp.array([0.1, 0.03, 0.01]), jnp.array([0.0, 0.1, 1.0])
    traces = []

    def counted(model, batch, key):
        traces.append(1)
        return squared_error(model, batch, key)

    def optimizer(hyperparams):
        return optax.adamw(hyperparams["rate"], weight_decay=hyperparams["decay"])

    def run(loss, models, optimizer, hyperparams):
        return fit(models, loss, data, optimizer, num_steps=20, batch_size=None, key=key, hyperparams=hyperparams)

    swept = run(counted, models, optimizer, {"rate": rates, "decay": decays})
    first = len(traces)
    run(counted, models, optimizer, {"rate": rates * 2, "decay": decays + 1})
    assert len(traces) - first <= 1  # the check of the loss traces it once; the compiled chunk is reused
    for m in range(3):
        member = jax.tree.map(lambda leaf, m=m: leaf[m : m + 1], models)
        alone = run(squared_error, member, optax.adamw(float(rates[m]), weight_decay=float(decays[m])), None)
        np.testing.assert_allclose(weights(swept)[m], weights(alone)[0], rtol=1e-5, atol=1e-6)


def test_observation_is_of_the_state_before_the_update(key):
    models, data = linear_members(key), regression(key)
    steps = [0, 3, 7]

    def observe(model, step, key):
        return {"weight": model.weight, "step": step, "draw": jax.random.normal(key)}

    def run(num_steps):
        return fit(
            models, squared_error, data, optax.sgd(0.1), num_steps=num_steps, batch_size=4, key=key,
            observe=observe, observe_at=[s for s in steps if s <= num_steps],
        )  # fmt: skip

    history = run(7).history
    assert history.observed_at.tolist() == steps
    np.testing.assert_array_equal(history.observed["step"], np.broadcast_to(steps, (3, 3)))
    np.testing.assert_array_equal(history.observed["weight"][:, 0], models.weight)
    np.testing.assert_array_equal(history.observed["weight"][:, 1], weights(run(3)))
    np.testing.assert_array_equal(history.observed["weight"][:, 2], weights(run(7)))
    assert len(np.unique(history.observed["draw"])) == 9


def test_log_gets_records_and_can_stop(key):
    models, data = linear_members(key), regression(key)
    seen = []

    def log(step, records):
        seen.append((step, records))
        return step >= 6

    run = fit(
        models, squared_error, data, optax.sgd(0.1), num_steps=30, batch_size=4, key=key, log=log,
        observe=lambda model, step, key: jnp.sum(model.weight), observe_at=range(0, 31, 3),
    )  # fmt: skip
    assert [step for step, _ in seen] == [0, 3, 6]
    assert run.num_steps == 6
    assert run.history.loss.shape == (3, 6)
    assert np.isnan(seen[0][1]["loss"]).all()
    np.testing.assert_allclose(seen[2][1]["loss"], run.history.loss[:, 3:6].mean(1), rtol=1e-6)
    np.testing.assert_allclose(seen[2][1]["observed"], np.asarray(run.models.weight).sum((1, 2)), rtol=1e-5)


@pytest.mark.parametrize(
    ("answer", "stops"),
    [(True, True), (np.True_, True), (jnp.array(True), True), (np.array([True]), True), (np.False_, False)]
    + [(None, False), (1, False), ("True", False), (np.ones(2, bool), False), (jnp.array(1), False)],
)
def test_any_form_of_true_stops_and_nothing_else_does(key, answer, stops):
    options = {"num_steps": 4, "batch_size": None, "key": key, "observe_at": [0, 2], "log": lambda *_: answer}
    result = fit(linear_members(key), squared_error, regression(key), optax.sgd(0.1), **options)
    assert result.num_steps == (0 if stops else 4)


def test_a_run_that_log_stopped_stays_stopped(key, tmp_path):
    seen = []

    def log(step, records):
        seen.append(step)
        return np.bool_(step >= 6)

    def run(**changes):
        options = {"num_steps": 12, "batch_size": 4, "key": key, "observe_at": range(0, 13, 3), "log": log}
        options |= {"checkpoint": tmp_path / "run"} | changes
        return fit(linear_members(key), squared_error, regression(key), optax.sgd(0.1), **options)

    first, again = run(), run()
    assert first.num_steps == again.num_steps == 6
    assert seen == [0, 3, 6]
    np.testing.assert_array_equal(weights(first), weights(again))
    np.testing.assert_array_equal(first.history.loss, again.history.loss)
    assert run(num_steps=30, observe_at=range(0, 31, 3)).num_steps == 6
    assert run(observe_at=[0, 9, 12]).num_steps == 9  # not asked at step 6
    whole = run(log=None, observe_at=None)
    np.testing.assert_array_equal(weights(whole), weights(run(log=None, observe_at=None, checkpoint=None)))


@pytest.mark.parametrize("member_map", ["scan", "vmap"])
def test_a_diverging_member_is_named_and_poisons_no_other(key, member_map):
    models, data = linear_members(key), regression(key)

    def run(rates):
        return fit(
            models, squared_error, data, lambda rate: optax.sgd(rate), num_steps=60, batch_size=None, key=key,
            hyperparams=jnp.asarray(rates), member_map=member_map,
        )  # fmt: skip

    with pytest.warns(RuntimeWarning, match=r"member 1: the loss became (inf|nan) at step \d+"):
        wild = run([0.1, 1e4, 0.2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calm = run([0.1, 0.1, 0.2])
    assert wild.diverged_at[0] == wild.diverged_at[2] == -1
    step = wild.diverged_at[1]
    assert np.isfinite(wild.history.loss[1, :step]).all()
    assert not np.isfinite(wild.history.loss[1, step])
    np.testing.assert_array_equal(weights(wild)[[0, 2]], weights(calm)[[0, 2]])


@pytest.mark.parametrize("member_map", ["scan", "vmap", "unroll"])
def test_an_interrupted_run_resumes_bit_for_bit(key, tmp_path, member_map):
    models, data = linear_members(key), regression(key, samples=30)
    options = {
        "num_steps": 25, "batch_size": 4, "key": key, "observe": lambda m, s, k: jax.random.normal(k) + m.weight,
        "observe_at": range(0, 26, 5), "member_map": member_map,
    }  # fmt: skip
    whole = fit(models, noisy_error, data, optax.adam(0.05), **options)
    path = tmp_path / "run"

    def interrupt(step, records):
        if step == 15:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(models, noisy_error, data, optax.adam(0.05), checkpoint=path, log=interrupt, **options)
    assert checkpoints.read_header(path)["step"] == 15
    steps = []
    resumed = fit(
        models, noisy_error, data, optax.adam(0.05), checkpoint=path, log=lambda s, r: steps.append(s), **options
    )
    assert steps == [20, 25]
    np.testing.assert_array_equal(weights(whole), weights(resumed))
    np.testing.assert_array_equal(whole.history.loss, resumed.history.loss)
    np.testing.assert_array_equal(whole.history.observed, resumed.history.observed)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]

    with pytest.raises(ValueError, match="whose key differ"):
        fit(models, noisy_error, data, optax.adam(0.05), checkpoint=path, **{**options, "key": jax.random.key(1)})


def test_an_interrupt_while_a_chunk_runs_loses_nothing(key, tmp_path, monkeypatch):
    # The chunk's input state is donated: at that moment the host holds nothing that could be saved.
    models, data = linear_members(key), regression(key, samples=30)
    options = {"num_steps": 25, "batch_size": 4, "key": key}
    whole = fit(models, noisy_error, data, optax.adam(0.05), **options)
    run_chunk, path = run_module.run_chunk, tmp_path / "run"

    def interrupted(inputs, state):
        result = run_chunk(inputs, state)
        if int(inputs[2][0]) >= 8:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        return result

    monkeypatch.setattr(run_module, "run_chunk", interrupted)
    monkeypatch.setattr(run_module, "CHUNK_SECONDS", 0.0)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        fit(models, noisy_error, data, optax.adam(0.05), checkpoint=path, **options)
    assert signal.getsignal(signal.SIGINT) is before
    assert 8 < checkpoints.read_header(path)["step"] < 25
    monkeypatch.setattr(run_module, "run_chunk", run_chunk)
    resumed = fit(models, noisy_error, data, optax.adam(0.05), checkpoint=path, **options)
    np.testing.assert_array_equal(weights(whole), weights(resumed))
    np.testing.assert_array_equal(whole.history.loss, resumed.history.loss)


def resumable(key, path, num_steps=12, batch_size=4, target=0.0, power=2, rate=0.05, scale=1.0, **options):
    """A run whose loss, optimiser and observation are other functions at every call, with their settings inside."""
    models, data = linear_members(jax.random.key(1)), regression(jax.random.key(2), samples=10)
    shift = jnp.full((1, 4), target)

    def loss(model, batch, key):
        x, y = batch
        return jnp.mean(jnp.abs(jax.vmap(model)(x + shift) - y) ** power)

    def observe(model, step, key):
        return scale * jnp.sum(model.weight)

    settings = {"observe": observe, "batch_size": batch_size, "key": key, "checkpoint": path}
    optimizer = rate if callable(rate) else optax.adam(rate)
    return fit(models, loss, data, optimizer, **{**settings, "num_steps": num_steps, **options})


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """A checkpoint of 12 steps, and what 30 in one go come to."""
    key, path = jax.random.key(20), tmp_path_factory.mktemp("stopped") / "run"
    resumable(key, path)
    return path, resumable(key, None, num_steps=30)


def other_observation(model, step, key):
    return jnp.max(model.weight)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"power": 4}, "loss"),
        ({"target": 0.5}, "loss"),
        ({"rate": 0.1}, "optimizer"),
        ({"rate": 0.05000001}, "optimizer"),
        ({"rate": optax.sgd}, "optimizer, hyperparams"),
        ({"scale": 2.0}, "observe"),
        ({"observe": other_observation}, "observe"),
        ({"observe": None}, "observe"),
        ({"power": 4, "rate": 0.1}, "loss, optimizer"),
        ({"batch_size": 5}, "loss, batch_size"),
        ({"drop_remainder": True}, "drop_remainder"),
        ({"shared_batches": False}, "shared_batches"),
        ({"key": jax.random.key(1)}, "key"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_a_checkpoint_is_refused_to_another_program(key, tmp_path, stopped_run, change, name):
    path = shutil.copy(stopped_run[0], tmp_path)
    if name.endswith("hyperparams"):
        change = {**change, "hyperparams": jnp.full(3, 0.05)}
    with pytest.raises(ValueError, match=f"`checkpoint` must be a file of the same run, got .*, whose {name} differ"):
        resumable(**{"key": key, "path": path, "num_steps": 30, **change})


@pytest.mark.parametrize("options", [{}, {"member_map": "unroll"}, {"mesh": 2}])
def test_a_finished_run_is_extended(key, tmp_path, stopped_run, options):
    """By the same program, made anew, on whatever devices; as if it had been one run."""
    path, whole = shutil.copy(stopped_run[0], tmp_path), stopped_run[1]
    if "mesh" in options:
        options = {"mesh": sharding.member_mesh(jax.devices("cpu")[: options["mesh"]])}
    longer = resumable(key, path, num_steps=30, **options)
    np.testing.assert_array_equal(weights(longer), weights(whole))
    np.testing.assert_array_equal(longer.history.loss, whole.history.loss)
    np.testing.assert_array_equal(longer.history.observed_at, whole.history.observed_at)
    np.testing.assert_array_equal(longer.history.observed, whole.history.observed)
    if not options:
        return
    again = resumable(key, path, num_steps=30)  # on one device again: the file holds no padding
    np.testing.assert_array_equal(weights(again), weights(whole))


def test_records_at_steps_that_have_passed_are_neither_invented_nor_kept(key, tmp_path, stopped_run):
    path = shutil.copy(stopped_run[0], tmp_path)  # observed at 0, 3, 6, 9 and 12
    with pytest.raises(
        ValueError, match=r"`observe_at` must hold no step before 12 at which .* was not observed, got 4"
    ):
        resumable(key, path, num_steps=30, observe_at=[3, 4, 20])
    some = resumable(key, path, num_steps=30, observe_at=[3, 12, 20])
    assert some.history.observed_at.tolist() == [3, 12, 20]
    np.testing.assert_array_equal(some.history.observed[:, :2], stopped_run[1].history.observed[:, [1, 4]])
    with pytest.raises(ValueError, match="`num_steps` must be at least the 30 of"):
        resumable(key, path, num_steps=29)


def test_a_schedule_that_depends_on_the_number_of_steps_is_another_program(key, tmp_path):
    def run(num_steps, total, **options):
        rate = optax.adam(optax.cosine_decay_schedule(0.1, total))
        data = regression(key, samples=10)
        more = {"num_steps": num_steps, "batch_size": 4, "key": key, "checkpoint": tmp_path / "run"}
        return fit(linear_members(key), squared_error, data, rate, **more, **options)

    run(10, 10)
    with pytest.raises(ValueError, match=r"whose optimizer differ.*say same_program=True"):
        run(20, 20)
    assert run(20, 10).num_steps == 20
    assert run(30, 30, same_program=True).num_steps == 30


def test_a_trace_of_another_version_says_so(key, tmp_path, stopped_run, monkeypatch):
    path = shutil.copy(stopped_run[0], tmp_path)
    monkeypatch.setattr(jax, "__version__", "99.0")
    with pytest.raises(
        ValueError, match=r"whose loss differ.*\(JAX .* wrote it, this is 99.0\), say same_program=True"
    ):
        resumable(key, path, num_steps=30, power=4)
    resumable(key, path, num_steps=30)  # the same operations under another version: the same program
    # Told so or not, other data are another run.
    with pytest.raises(ValueError, match="whose key differ"):
        resumable(jax.random.key(1), path, num_steps=30, same_program=True)


@pytest.mark.parametrize("batch_size", [None, 10])
def test_nothing_to_record_takes_no_trip_to_the_host_per_step(key, monkeypatch, batch_size):
    chunks, run_chunk = [], run_module.run_chunk
    monkeypatch.setattr(run_module, "run_chunk", lambda *args: chunks.append(1) or run_chunk(*args))
    options = {"num_steps": 2000, "batch_size": batch_size, "key": key}
    models, data = linear_members(key), regression(key, samples=10)
    monkeypatch.setattr(run_module, "CHUNK_SECONDS", 1e9)  # on a busy machine as on a quiet one
    quiet = fit(models, squared_error, data, optax.sgd(0.1), **options)
    assert len(chunks) <= 12  # of 1, 4, 16, ... steps, and never more than 512
    assert quiet.history.loss.shape == (3, 2000)
    assert quiet.history.observed_at.size == 0
    # Whoever wants to hear of every epoch does.
    steps = []
    heard = fit(
        models, squared_error, data, optax.sgd(0.1), **{**options, "num_steps": 7}, log=lambda s, r: steps.append(s)
    )
    assert steps == heard.history.observed_at.tolist() == list(range(8))


def test_progress_without_records_shows_the_loss(key):
    told = []

    class Meter:
        def __init__(self, total, description):
            pass

        def advance(self, step, text):
            told.append((step, text))

        def close(self):
            pass

    data = regression(key)
    fit(linear_members(key), squared_error, data, optax.sgd(0.1), num_steps=9, batch_size=None, key=key, progress=Meter)
    assert told[0] == (0, "")
    assert told[-1][0] == 9
    assert told[-1][1].startswith("loss ")


KILLED = """
import jax, jax.numpy as jnp, numpy as np, optax, sys
from dissociation import training
training.run.CHUNK_SECONDS = 0.001
x = jax.random.normal(jax.random.key(0), (500, 20))
result = training.fit(
    jnp.ones((3, 20)), lambda w, b, k: jnp.mean((b @ w - 1) ** 2) + 0.01 * jax.random.normal(k) @ jnp.ones(()),
    x, optax.adam(1e-3), num_epochs=int(sys.argv[2]), batch_size=32, key=jax.random.key(1),
    checkpoint=None if sys.argv[1] == "none" else sys.argv[1], checkpoint_seconds=0.0, member_map="scan",
)
np.save(sys.argv[3], np.concatenate([result.models, result.history.loss], axis=1))
""".replace(" @ jnp.ones(())", "")


def test_kill_minus_nine_at_any_moment(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(KILLED))
    path = tmp_path / "checkpoint"

    def command(checkpoint, output):
        return [sys.executable, str(script), str(checkpoint), "40", str(tmp_path / output)]

    subprocess.run(command("none", "whole.npy"), check=True)
    kills = 0
    for delay in (0.0, 0.2, 0.05):
        process = subprocess.Popen(command(path, "resumed.npy"))
        start = checkpoints.read_header(path)["step"] if path.exists() else -1
        while process.poll() is None and not (path.exists() and checkpoints.read_header(path)["step"] > start):
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
    assert kills >= 1
    subprocess.run(command(path, "resumed.npy"), check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "whole.npy"), np.load(tmp_path / "resumed.npy"))


class Convolutional(eqx.Module):
    convolution: eqx.nn.Conv2d
    head: eqx.nn.Linear

    def __init__(self, key):
        self.convolution = eqx.nn.Conv2d(1, 2, 3, key=key)
        self.head = eqx.nn.Linear(2, 3, key=key)

    def __call__(self, x):
        return self.head(jax.nn.relu(self.convolution(x)).mean((1, 2)))


def test_convolutions_are_kept_out_of_loops_on_a_cpu(key):
    models = eqx.filter_vmap(Convolutional)(jax.random.split(key, 2))
    data = (jax.random.normal(key, (8, 1, 6, 6)), jax.nn.one_hot(jnp.arange(8) % 3, 3))

    def loss(model, batch, key):
        return optax.softmax_cross_entropy(jax.vmap(model)(batch[0]), batch[1]).mean()

    def run(member_map):
        return fit(models, loss, data, optax.sgd(0.1), num_steps=6, batch_size=4, key=key, member_map=member_map)

    chosen = run("auto")
    assert chosen.member_map == ("unroll" if jax.default_backend() == "cpu" else "vmap")
    dense = fit(jnp.ones((2, 3)), lambda m, b, k: jnp.sum(m), data, optax.sgd(0.1), num_steps=1, batch_size=4, key=key)
    assert dense.member_map == ("scan" if jax.default_backend() == "cpu" else "vmap")
    np.testing.assert_allclose(chosen.history.loss, run("scan").history.loss, rtol=1e-5)


def test_unrolled_members_are_observed_in_turn(key):
    # Decompositions of several members at once can hang on a CPU.
    def observe(model, step, key):
        stack = jnp.stack([model.weight @ model.weight.T + k * jnp.eye(2) for k in range(8)])
        first = jnp.linalg.eigh(stack)[0]
        return {"values": first, "solved": jnp.linalg.solve(stack, stack)}

    models, data = linear_members(key), regression(key)
    found = [
        fit(models, squared_error, data, optax.sgd(0.1), num_steps=2, batch_size=None, key=key, observe=observe,
            member_map=how).history.observed
        for how in ("unroll", "scan")
    ]  # fmt: skip
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *found)


def test_progress_shows_what_is_asked():
    records = {"loss": np.ones(2), "observed": {name: np.full(2, 3.0) for name in "abcdefgh"}}
    assert run_module._describe(records, None).count("\u00b1") == 7
    assert run_module._describe(records, ("h", "b")) == "loss 1 \u00b1 0, h 3 \u00b1 0, b 3 \u00b1 0"
    assert run_module._describe(records, ("none",)) == "loss 1 \u00b1 0"


def test_other_arrays_stay_and_arrays_of_the_loss_are_inputs(key):
    models = {"weight": jnp.ones((2, 3)), "count": jnp.array([3, 4]), "key": jax.random.split(key, 2)}

    class Weighted(eqx.Module):
        target: jax.Array

        def __call__(self, model, batch, key):
            return jnp.sum((model["weight"] - self.target) ** 2) + 0 * jnp.sum(batch)

    data = jnp.ones((4, 1))
    result = fit(models, Weighted(jnp.arange(3.0)), data, optax.sgd(0.5), num_steps=1, batch_size=None, key=key)
    np.testing.assert_allclose(result.models["weight"], np.broadcast_to(np.arange(3.0), (2, 3)))
    np.testing.assert_array_equal(result.models["count"], [3, 4])
    assert (result.models["key"] == models["key"]).all()


def test_zero_steps_return_the_fresh_models(key):
    models, data = linear_members(key), regression(key)
    result = fit(models, squared_error, data, optax.sgd(0.1), num_epochs=0, batch_size=4, key=key)
    np.testing.assert_array_equal(weights(result), models.weight)
    assert result.history.loss.shape == (3, 0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_steps": None}, ValueError, "`num_steps` must be given, or `num_epochs`"),
        ({"num_epochs": 2}, ValueError, "but not both"),
        ({"num_steps": 2.0}, TypeError, "num_steps"),
        ({"batch_size": 11}, ValueError, r"`batch_size` must be at most the number of samples \(10\), got 11"),
        ({"member_map": "pmap"}, ValueError, "'auto', 'vmap', 'scan', 'unroll', got 'pmap'"),
        ({"observe_at": [0, 99]}, ValueError, "between 0 and the last step"),
        ({"observe_at": [0.5]}, TypeError, "observe_at"),
        ({"hyperparams": jnp.ones(2)}, ValueError, r"as many members as `models` \(3\), got 2"),
        ({"key": jax.random.split(jax.random.key(0), 3)}, ValueError, "`shared_batches` must be False"),
        ({"key": jax.random.split(jax.random.key(0), 2)}, ValueError, "one per member"),
        ({"members_per_batch": 2, "member_map": "scan"}, ValueError, "`members_per_batch` must be None"),
        ({"key": 0}, TypeError, r"`key` must be a random key.*, got int 0\."),
        ({"key": None}, TypeError, r"`key` must be a random key.*, got None\."),
        ({"key": jnp.ones(2)}, TypeError, "`key` must be a random key.*, got an array of dtype float32"),
        (
            {"key": jax.random.split(jax.random.key(0), (2, 2))},
            ValueError,
            r"`key` must be .*, got keys of shape \(2, 2\)",
        ),
        (
            {"hyperparams": [1e-2, 1e-3]},
            TypeError,
            r"`hyperparams` must hold arrays, members first, got float 0.01 at hyp",
        ),
        ({"hyperparams": "a"}, TypeError, "`hyperparams` must hold arrays, members first, got str 'a'"),
        ({"checkpoint_seconds": -1.0}, ValueError, "`checkpoint_seconds` must be at least 0, got -1.0"),
        ({"checkpoint_seconds": np.nan}, ValueError, "`checkpoint_seconds` must be at least 0, got nan"),
        ({"shown": ["foo"]}, ValueError, "`shown` must be one of 'loss', got 'foo'"),
        (
            {"shown": ["foo"], "observe": lambda m, s, k: {"a": jnp.ones(()), "b": jnp.ones(2)}},
            ValueError,
            "`shown` must be one of 'loss', 'a', got 'foo'",
        ),
        ({"progress": "loud"}, ValueError, "'terminal', 'notebook', 'auto', got 'loud'"),
        (
            {"optimizer": optax.adam},
            TypeError,
            "`optimizer` must be an optax.GradientTransformation where .* None, got",
        ),
        ({"optimizer": lambda rate: optax.sgd(0.1)}, TypeError, r"Call it, as in optax.adam\(1e-3\)"),
        ({"optimizer": optax.inject_hyperparams(optax.sgd)}, TypeError, "`optimizer` must be"),
        ({"hyperparams": jnp.ones(3)}, TypeError, "`optimizer` must be a function .*, which does not use them"),
        ({"optimizer": lambda rate: optax.adam, "hyperparams": jnp.ones(3)}, TypeError, "must return an optax.Grad"),
        ({"optimizer": lambda rate: None, "hyperparams": jnp.ones(3)}, TypeError, "`optimizer` must return"),
    ],
)
def test_wrong_arguments_are_named(key, change, error, message):
    options = {"num_steps": 2, "batch_size": 4, "key": key, "optimizer": optax.sgd(0.1), **change}
    with pytest.raises(error, match=message):
        fit(linear_members(key), squared_error, regression(key), **options)


def test_wrong_trees_are_named(key):
    models, (x, y) = linear_members(key), regression(key)
    options = {"num_steps": 2, "batch_size": 4, "key": key}
    with pytest.raises(ValueError, match=r"`data` must agree in the leading axis.*\[1\] with \(9,\)"):
        fit(models, squared_error, (x, y[:9]), optax.sgd(0.1), **options)
    with pytest.raises(ValueError, match="`models` must hold at least one array"):
        fit(lambda x: x, squared_error, (x, y), optax.sgd(0.1), **options)
    with pytest.raises(ValueError, match=r"`models` must not be empty, got a leading axis of length 0"):
        fit(Linear(jnp.ones((0, 2, 4))), squared_error, (x, y), optax.sgd(0.1), **options)
    with pytest.raises(TypeError, match=r"`models.weight` must hold real numbers, got dtype complex64"):
        fit(Linear(jnp.ones((3, 2, 4), complex)), squared_error, (x, y), optax.sgd(0.1), **options)
    with pytest.raises(TypeError, match=r"`models.weight` must be .*, got text"):
        fit(Linear(np.full((3, 2, 4), "a")), squared_error, (x, y), optax.sgd(0.1), **options)
    with pytest.raises(ValueError, match="`loss` must return a scalar"):
        fit(models, lambda m, b, k: b[0], (x, y), optax.sgd(0.1), **options)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (
            ([[1.0, 2.0]], [3.0]),
            TypeError,
            r"`data` must hold arrays, samples first, got float 1.0 at data\[0\]\[0\]\[0\]",
        ),
        ({"x": np.ones(10), "y": "text"}, TypeError, r"got str 'text' at data\['y'\]"),
        (np.array(["a"] * 10), TypeError, "`data` must be an array of numbers, got text"),
        ((np.ones(10), np.full(10, None)), TypeError, r"`data\[1\]` must be .* dtype object"),
        (np.full(10, 2**40), ValueError, "`data` must hold integers from -2147483648 to 2147483647, got 1099511627776"),
        (np.full(10, -(2**40)), ValueError, "got -1099511627776. Larger ones need"),
        (np.full(10, 2**32, np.uint64), ValueError, "`data` must hold integers from 0 to 4294967295, got 4294967296"),
        (
            (np.ones(10), np.array([1.0] * 9 + [np.nan])),
            ValueError,
            r"`data\[1\]` must be finite, got nan at index \(9,\)",
        ),
        (jnp.full(10, jnp.inf, jnp.bfloat16), ValueError, "`data` must be finite, got inf"),
        (np.ones((0, 2)), ValueError, "`data` must not be empty"),
        ({}, ValueError, "`data` must hold at least one array"),
    ],
)
def test_data_that_are_no_arrays_of_numbers_are_refused(key, data, error, message):
    with pytest.raises(error, match=message):
        fit(linear_members(key), squared_error, data, optax.sgd(0.1), num_steps=1, batch_size=None, key=key)


class ArrayLike:
    """As of another library."""

    def __init__(self, array):
        self.array = np.asarray(array)

    def __array__(self, dtype=None, copy=None):
        return self.array


def test_data_of_other_libraries_and_other_kinds_of_numbers_are_taken(key):
    models, (x, y) = linear_members(key), regression(key)
    options = {"num_steps": 3, "batch_size": 4, "key": key}
    plain = fit(models, squared_error, (x, y), optax.sgd(0.1), **options)
    other = fit(models, squared_error, (ArrayLike(x), ArrayLike(y)), optax.sgd(0.1), **options)
    np.testing.assert_array_equal(weights(plain), weights(other))
    sample_keys, whole = jax.random.split(key, 10), np.arange(10) - 2**31

    def loss(model, batch, key):
        assert jnp.issubdtype(batch[0].dtype, jax.dtypes.prng_key)
        return jnp.sum(model.weight) * (jnp.mean(batch[1] * 1.0) + jnp.mean(jnp.abs(batch[2])))

    seen = fit(models, loss, (sample_keys, whole, 1j * x.astype(jnp.float16)), optax.sgd(0.1), **options)
    assert np.isfinite(seen.history.loss).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_models_of_half_precision_are_trained_in_float32(key, dtype):
    models = jax.tree.map(lambda leaf: leaf.astype(dtype), linear_members(key))
    options = {"num_steps": 5, "batch_size": 4, "key": key}
    half = fit(models, squared_error, regression(key), optax.adam(0.01), **options)
    full = fit(Linear(models.weight.astype(jnp.float32)), squared_error, regression(key), optax.adam(0.01), **options)
    assert half.models.weight.dtype == jnp.float32
    np.testing.assert_array_equal(weights(half), weights(full))


def test_numbers_that_are_no_arrays_belong_to_all_members(key):
    """As the rate of a dropout layer."""

    def make(key):
        return eqx.nn.Sequential([eqx.nn.Linear(4, 2, key=key), eqx.nn.Dropout(0.5)])

    def loss(model, batch, key):
        x, y = batch
        keys = jax.random.split(key, len(x))
        return jnp.mean((jax.vmap(lambda x, k: model(x, key=k))(x, keys) - y) ** 2)

    models = eqx.filter_vmap(make)(jax.random.split(key, 3))
    result = fit(models, loss, regression(key), optax.adam(0.1), num_steps=40, batch_size=None, key=key)
    assert result.models.layers[1].p == 0.5
    assert (result.history.loss[:, -5:].mean(1) < result.history.loss[:, 0]).all()


def test_one_call_at_a_time_has_a_checkpoint(key, tmp_path):
    def run(log=None, name="run"):
        return resumable(key, tmp_path / name, observe_at=[0, 12], log=log)

    def second(step, records):
        if step == 0:
            with pytest.raises(BlockingIOError, match=rf"run is in use by process {os.getpid()} on .* Wait for it"):
                run()
            run(name="other")

    run(log=second)
    run()  # it is free again
