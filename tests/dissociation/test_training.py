"""`fit`: many members at once, however they are mapped, chunked and laid over devices."""

import logging
import warnings
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import compilations
from linear_regression import Linear, linear_members, mean_of_batch, noisy_error, regression, squared_error, weights

import dissociation
from dissociation.training import (
    Callback,
    EarlyStop,
    Epochs,
    FullBatch,
    Layout,
    Online,
    Progress,
    Save,
    fit,
    make_step,
)
from dissociation.training import (
    _chunk as chunk_module,
)
from dissociation.training import (
    _run as run_module,
)

SGD = make_step(squared_error, optax.sgd(0.1))


def noisy_weight_error(weight, batch, key):
    return noisy_error(Linear(weight), batch, key)


def test_full_batch_descent_equals_its_closed_form(key):
    # W_t - W* = (W_0 - W*) (I - lr X^T X / n)^t for the mean squared error.
    models, (x, y) = linear_members(key), regression(key)
    result = fit(models, SGD, FullBatch((x, y)), num_steps=30, key=key)
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
        models, make_step(noisy_error, optimizer), Epochs(data, 4), num_epochs=3, key=key, layout=Layout(member_map)
    )
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


@pytest.mark.slow
@pytest.mark.parametrize("member_map", ["scan", "unroll"])
def test_members_in_turn_are_independent(key, member_map):
    """Alone, with others and over two devices: the same up to rounding."""
    models, data = linear_members(key, members=3), regression(key, samples=64)
    step, two = make_step(squared_error, optax.adam(1e-2)), dissociation.member_mesh(jax.devices("cpu")[:2])

    def run(models, key=key, mesh=None, shared=True):
        layout = Layout(member_map, mesh=mesh)
        return fit(models, step, Epochs(data, 10, shared=shared), num_epochs=3, key=key, layout=layout)

    def close(one, other):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)

    together = run(models)
    alone = [run(jax.tree.map(lambda leaf, m=m: leaf[m : m + 1], models)) for m in range(3)]
    close(weights(together), np.concatenate([weights(r) for r in alone]))
    two_devices = run(models, mesh=two)
    close(weights(together), weights(two_devices))
    close(together.history.loss, two_devices.history.loss)
    # Three members on two devices are padded, and so are their own orders.
    own = {"shared": False, "key": jax.random.split(key, 3)}
    close(weights(run(models, **own)), weights(run(models, mesh=two, **own)))


def test_vmap_agrees_with_members_in_turn(key):
    models, data = linear_members(key, members=5), regression(key, samples=64)

    def run(*layout, **more):
        step = make_step(noisy_error, optax.sgd(0.05))
        return fit(models, step, Epochs(data, 10), num_epochs=2, key=key, layout=Layout(*layout, **more))

    in_turn, mapped = run("scan"), run("vmap")
    np.testing.assert_allclose(weights(in_turn), weights(mapped), rtol=1e-5, atol=1e-6)
    batched = run("vmap", 2)
    np.testing.assert_allclose(weights(mapped), weights(batched), rtol=1e-5, atol=1e-6)
    sharded = run("vmap", mesh=dissociation.member_mesh(jax.devices("cpu")[:2]))
    np.testing.assert_allclose(weights(mapped), weights(sharded), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("member_map", ["vmap", "scan", "unroll"])
def test_batches_may_be_laid_over_devices_too(key, member_map):
    """Four devices, two for the members and two for every batch; batches of 9 are divided by none."""
    models, data = linear_members(key, members=3), regression(key, samples=64)
    mesh = dissociation.member_mesh(jax.devices("cpu")[:4], data=2)
    for size in (8, 9):

        def run(*layout, size=size, **more):
            step = make_step(noisy_error, optax.sgd(0.05))
            sampler = Epochs(data, size, drop_remainder=True)
            return fit(models, step, sampler, num_steps=10, key=key, layout=Layout(*layout, **more))

        plain, spread = run("vmap"), run(member_map, mesh=mesh)
        np.testing.assert_allclose(weights(spread), weights(plain), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(spread.history.loss, plain.history.loss, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [0, 2])
def test_members_per_batch_follow_the_memory(key, monkeypatch, devices):
    models, sizes, needed = linear_members(key, 12, out=40), [], []
    data = regression(key, samples=450, out=40)
    mesh = dissociation.member_mesh(jax.devices("cpu")[:devices]) if devices else None
    largest, program_bytes = chunk_module.largest_batch, chunk_module.program_bytes

    def run(budget, *layout):
        with monkeypatch.context() as patch:
            patch.setattr(chunk_module, "free_memory", lambda arrays: budget)
            patch.setattr(
                chunk_module, "program_bytes", lambda program: needed.append(program_bytes(program)) or needed[-1]
            )
            patch.setattr(run_module, "largest_batch", lambda *args: sizes.append(largest(*args)) or sizes[-1])
            step, layout = make_step(noisy_error, optax.adam(0.05)), Layout(*layout, mesh=mesh)
            return weights(fit(models, step, Epochs(data, 200), num_epochs=2, key=key, layout=layout))

    plain = run(None, "vmap")
    np.testing.assert_allclose(run(2**40, "vmap", "auto"), plain, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(run(needed[0] - 1, "vmap", "auto"), plain, rtol=1e-5, atol=1e-6)
    assert sizes[0] == 12 // max(devices, 1) > sizes[1] >= 1
    with pytest.raises(ValueError, match=r"`memory_budget` must be at least \d+ bytes"):
        run(100, "vmap", "auto")
    np.testing.assert_allclose(run(100, "scan", "auto"), plain, rtol=1e-5, atol=1e-6)  # in turn: nothing to choose


@pytest.mark.slow
@pytest.mark.parametrize("member_map", ["scan", "vmap", "unroll"])
def test_chunks_leave_no_trace(key, monkeypatch, member_map):
    models, data = linear_members(key), regression(key, samples=40)

    def run():
        step = make_step(noisy_error, optax.adam(0.05))
        result = fit(models, step, Epochs(data, 3), num_epochs=4, key=key, layout=Layout(member_map))
        return weights(result), result.history.loss

    monkeypatch.setattr(run_module, "CHUNK_SECONDS", 1e9)
    whole = run()
    monkeypatch.setattr(run_module, "CHUNK_SECONDS", 0.0)  # every chunk is one step
    jax.tree.map(np.testing.assert_array_equal, whole, run())


def test_the_longest_chunk_leaves_no_trace(key, monkeypatch):
    models, data = linear_members(key), regression(key, samples=40)
    monkeypatch.setattr(run_module, "CHUNK_SECONDS", 1e9)

    def run(longest):
        for module in (chunk_module, run_module):
            monkeypatch.setattr(module, "MAX_CHUNK", longest)
        jax.clear_caches()
        step = make_step(noisy_error, optax.adam(0.05))
        result = fit(models, step, Epochs(data, 4), num_epochs=4, key=key, layout=Layout("scan"))
        return weights(result), result.history.loss

    jax.tree.map(np.testing.assert_array_equal, run(512), run(3))
    jax.clear_caches()


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
        step = make_step(loss, optimizer)
        return fit(models, step, FullBatch(data), num_steps=20, key=key, hyperparams=hyperparams)

    swept = run(counted, models, optimizer, {"rate": rates, "decay": decays})
    first = len(traces)
    run(counted, models, optimizer, {"rate": rates * 2, "decay": decays + 1})
    assert len(traces) - first <= 1  # the step is traced once; the compiled chunk is reused
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
        save = Save(observe, [s for s in steps if s <= num_steps])
        return fit(models, SGD, Epochs(data, 4), num_steps=num_steps, key=key, save=save)

    history = run(7).history
    assert history.observed_at.tolist() == steps
    np.testing.assert_array_equal(history.observed["step"], np.broadcast_to(steps, (3, 3)))
    np.testing.assert_array_equal(history.observed["weight"][:, 0], models.weight)
    np.testing.assert_array_equal(history.observed["weight"][:, 1], weights(run(3)))
    np.testing.assert_array_equal(history.observed["weight"][:, 2], weights(run(7)))
    assert len(np.unique(history.observed["draw"])) == 9


def test_observations_are_by_epoch_unless_told(key):
    models, data = linear_members(key), regression(key)

    def steps(sampler, **options):
        return fit(models, SGD, sampler, key=key, **options).history.observed_at.tolist()

    observed = Save(lambda model, step, key: jnp.sum(model.weight))
    assert steps(Epochs(data, 4), num_steps=8, save=observed) == [0, 3, 6, 8]
    assert steps(FullBatch(data), num_steps=8, save=observed) == [0, 8]
    assert steps(Epochs(data, 4), num_steps=8, callbacks=[lambda step, records: None]) == [0, 3, 6, 8]
    assert steps(Epochs(data, 4), num_steps=8, callbacks=[Progress(lambda *_: Silent())]) == []
    assert steps(Epochs(data, 4), num_steps=8) == []


class Silent:
    def advance(self, step, text):
        pass

    def close(self):
        pass


@pytest.mark.parametrize("member_map", ["scan", "vmap"])
def test_a_diverging_member_is_named_and_poisons_no_other(key, member_map):
    models, data = linear_members(key), regression(key)

    def run(rates):
        step = make_step(squared_error, lambda rate: optax.sgd(rate))
        return fit(
            models, step, FullBatch(data), num_steps=60, key=key, hyperparams=jnp.asarray(rates),
            layout=Layout(member_map),
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


def with_sign(model, batch, key):
    """A loss with metrics of three kinds."""
    x, y = batch
    value = squared_error(model, batch, key)
    return value, {"halves": 0.5 * value, "signs": jnp.sign(model.weight).astype(int), "first": x[0]}


@pytest.mark.parametrize("member_map", ["scan", "vmap", "unroll"])
def test_metrics_are_kept_step_by_step(key, member_map):
    models, data = linear_members(key), regression(key)
    steps = [make_step(loss, optax.sgd(0.1)) for loss in (with_sign, squared_error)]
    found, plain = (
        fit(models, step, FullBatch(data), num_steps=7, key=key, layout=Layout(member_map)) for step in steps
    )
    np.testing.assert_array_equal(found.history.loss, plain.history.loss)
    metrics = found.history.metrics
    np.testing.assert_array_equal(metrics["halves"], 0.5 * found.history.loss)
    assert metrics["signs"].shape == (3, 7, 2, 4)
    assert metrics["signs"].dtype.kind == "i"
    np.testing.assert_array_equal(metrics["signs"][:, 0], np.sign(models.weight))
    np.testing.assert_array_equal(metrics["first"], np.broadcast_to(data[0][0], (3, 7, 4)))
    assert plain.history.metrics is None


def test_a_run_in_two_parts_equals_one(key):
    """The same bits, by epochs, by draws and by the whole, with Adam's averages and noise in the loss."""
    models, data = linear_members(key), regression(key)
    step = make_step(noisy_error, optax.adam(0.05))

    def drawn(key):
        x_key, y_key = jax.random.split(key)
        return jax.random.normal(x_key, (5, 4)), jax.random.normal(y_key, (5, 2))

    for sampler in (Epochs(data, 4), Epochs(data, 5), FullBatch(data), Online(drawn)):
        whole = fit(models, step, sampler, num_steps=15, key=key)
        first = fit(models, step, sampler, num_steps=7, key=key)
        second = fit(first.state, step, sampler, num_steps=8, key=key)
        np.testing.assert_array_equal(weights(whole), weights(second))
        parts = [first.history.loss, second.history.loss]
        np.testing.assert_array_equal(whole.history.loss, np.concatenate(parts, axis=1))
        assert (first.history.first_step, second.history.first_step) == (0, 7)
        assert (first.num_steps, second.num_steps) == (7, 15)
        jax.tree.map(np.testing.assert_array_equal, whole.state, second.state)
        assert second.state.step.tolist() == [15, 15, 15]


def test_another_optimiser_begins_anew_and_the_same_goes_on(key):
    models, sampler = linear_members(key), FullBatch(regression(key))
    first = fit(models, make_step(squared_error, optax.adam(0.05)), sampler, num_steps=5, key=key)
    kept = fit(first.state, make_step(squared_error, optax.adam(0.01)), sampler, num_steps=1, key=key)
    new = fit(first.models, make_step(squared_error, optax.adam(0.01)), sampler, num_steps=1, key=key)
    assert not np.array_equal(weights(kept), weights(new))
    np.testing.assert_array_equal(kept.state.opt_state[0].count, [6] * 3)
    slope = jax.vmap(jax.grad(squared_error), (0, None, None))(first.models, sampler.data, key)
    by_hand = jax.vmap(optax.scale_by_adam().update)(slope, first.state.opt_state[0])[0]
    np.testing.assert_allclose(weights(kept), weights(first) - 0.01 * by_hand.weight, rtol=1e-5, atol=1e-6)
    momentum = fit(first.state, make_step(squared_error, optax.sgd(0.05, momentum=0.9)), sampler, num_steps=5, key=key)
    fresh = fit(first.models, make_step(squared_error, optax.sgd(0.05, momentum=0.9)), sampler, num_steps=5, key=key)
    np.testing.assert_array_equal(weights(momentum), weights(fresh))
    assert momentum.state.step.tolist() == [10] * 3
    assert fresh.state.step.tolist() == [5] * 3


def test_one_program_serves_all_steps_and_observations(key, caplog):
    step = make_step(squared_error, lambda rate: optax.adam(rate))
    rates = jax.vmap(lambda i: jnp.asarray(0.1))(jnp.arange(3))  # of a weak type, which no step returns
    assert rates.weak_type
    save = Save(lambda model, step, key: jnp.sum(model.weight), at=range(0, 41, 10))
    with jax.log_compiles():
        fit(linear_members(key), step, FullBatch(regression(key)), num_steps=40, key=key, hyperparams=rates, save=save)
    compiled = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Compiling")]
    for name in ("run_chunk", "observe_members"):
        assert sum(name in message for message in compiled) == 1, name


class Interrupt(Callback):
    def begin(self, step, num_steps, past):
        raise KeyboardInterrupt


def test_a_log_changes_nothing_that_is_compiled(key, caplog):
    def run(inputs):
        data, step = FullBatch(regression(key, inputs=inputs)), make_step(squared_error, optax.sgd(0.1))
        save = Save(lambda model, step, key: jnp.sum(model.weight), at=[5])  # is never reached
        with pytest.raises(KeyboardInterrupt):
            fit(
                linear_members(key, inputs=inputs), step, data, num_steps=5, key=key, save=save, callbacks=[Interrupt()]
            )

    counts = []
    for level, inputs in ((logging.WARNING, 20), (logging.WARNING, 21), (logging.INFO, 22)):
        logging.getLogger("dissociation").setLevel(level)
        counts.append(len(compilations(caplog, lambda inputs=inputs: run(inputs))))
    logging.getLogger("dissociation").setLevel(logging.NOTSET)
    assert counts[1] == counts[2]  # the first has compiled what is of any size
    assert "3 members by scan" in caplog.text


def test_phases_chain(key):
    """Another loss, other hyperparameters and other data from the same state, three phases on end."""
    models, data, more = linear_members(key), regression(key), regression(jax.random.key(1), samples=6)

    def decayed(settings):
        return optax.adamw(0.05, weight_decay=settings)

    step = make_step(squared_error, decayed)
    none, strong = jnp.zeros(3), jnp.full(3, 2.0)
    one = fit(models, step, Epochs(data, 4), num_epochs=2, key=key, hyperparams=none)
    two = fit(one.state, step, FullBatch(more), num_steps=5, key=key, hyperparams=strong)
    same = fit(two.state, step, Epochs(data, 4), num_epochs=1, key=key)  # the state's own hyperparameters
    three = fit(two.state, step, Epochs(data, 4), num_epochs=1, key=key, hyperparams=strong)
    np.testing.assert_array_equal(weights(same), weights(three))
    assert [r.num_steps for r in (one, two, three)] == [6, 11, 14]
    plain = fit(two.state, make_step(squared_error, optax.sgd(0.1)), FullBatch(data), num_steps=1, key=key)
    assert plain.state.hyperparams is None
    other = fit(two.state, step, Epochs(data, 4), num_epochs=1, key=key, hyperparams=none)
    assert (np.abs(weights(other)) > np.abs(weights(three))).mean() > 0.9  # without decay they stay larger
    # The batches are those of steps 11, 12 and 13, of the epochs that these lie in.
    seen = fit(
        two.state, make_step(mean_of_batch, decayed), Epochs(2.0 ** jnp.arange(4), 1), num_steps=9, key=key
    ).history.loss  # fmt: skip
    assert sorted(seen[0, 1:5]) == sorted(seen[0, 5:9]) == [1, 2, 4, 8]


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
        step = make_step(loss, optax.sgd(0.1))
        return fit(models, step, Epochs(data, 4), num_steps=6, key=key, layout=Layout(member_map))

    chosen = run("auto")
    assert chosen.member_map == ("unroll" if jax.default_backend() == "cpu" else "vmap")
    summed = make_step(lambda m, b, k: jnp.sum(m), optax.sgd(0.1))
    dense = fit(jnp.ones((2, 3)), summed, Epochs(data, 4), num_steps=1, key=key)
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
        fit(models, SGD, FullBatch(data), num_steps=2, key=key, save=Save(observe), layout=Layout(how)).history.observed
        for how in ("unroll", "scan")
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *found)


def test_other_arrays_stay_and_arrays_of_the_loss_are_inputs(key):
    models = {"weight": jnp.ones((2, 3)), "count": jnp.array([3, 4]), "key": jax.random.split(key, 2)}

    class Weighted(eqx.Module):
        target: jax.Array

        def __call__(self, model, batch, key):
            return jnp.sum((model["weight"] - self.target) ** 2) + 0 * jnp.sum(batch)

    step = make_step(Weighted(jnp.arange(3.0)), optax.sgd(0.5))
    result = fit(models, step, FullBatch(jnp.ones((4, 1))), num_steps=1, key=key)
    np.testing.assert_allclose(result.models["weight"], np.broadcast_to(np.arange(3.0), (2, 3)))
    np.testing.assert_array_equal(result.models["count"], [3, 4])
    assert (result.models["key"] == models["key"]).all()


def test_zero_steps_return_the_fresh_models(key):
    models, data = linear_members(key), regression(key)
    result = fit(models, make_step(with_sign, optax.sgd(0.1)), Epochs(data, 4), num_epochs=0, key=key)
    np.testing.assert_array_equal(weights(result), models.weight)
    assert result.history.loss.shape == (3, 0)
    assert result.history.metrics["signs"].shape == (3, 0, 2, 4)


@pytest.mark.parametrize("single", [True, False])
def test_nothing_to_record_takes_no_trip_to_the_host_per_step(key, monkeypatch, single):
    chunks, run = [], run_module.run_tasks
    monkeypatch.setattr(run_module, "run_tasks", lambda *args: chunks.append(1) or run(*args))
    models, data = linear_members(key), regression(key, samples=10)
    sampler = FullBatch(data) if single else Epochs(data, 10)
    monkeypatch.setattr(run_module, "CHUNK_SECONDS", 1e9)  # on a busy machine as on a quiet one
    quiet = fit(models, SGD, sampler, num_steps=2000, key=key)
    assert len(chunks) <= 12  # of 1, 4, 16, ... steps, and never more than 512
    assert quiet.history.loss.shape == (3, 2000)
    assert quiet.history.observed_at.size == 0
    # Whoever wants to hear of every step does; who does not say so hears of the beginning and of the end.
    for at, wanted in ((range(8), list(range(8))), (None, [0, 7])):
        steps = []
        listening = {"save": Save(at=at), "callbacks": [lambda s, r, steps=steps: steps.append(s)]}
        heard = fit(models, SGD, sampler, num_steps=7, key=key, **listening)
        assert steps == heard.history.observed_at.tolist() == wanted


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_steps": None}, ValueError, "`num_steps` must be given, or `num_epochs`"),
        ({"num_epochs": 2}, ValueError, "but not both"),
        ({"num_steps": 2.0}, TypeError, "num_steps"),
        ({"batch_size": 11}, ValueError, r"`batch_size` must be at most the number of samples \(10\), got 11"),
        ({"member_map": "pmap"}, ValueError, "'auto', 'vmap', 'scan', 'unroll', got 'pmap'"),
        ({"at": [0, 99]}, ValueError, "`at` must lie between 0 and the last step"),
        ({"at": [0.5]}, TypeError, "`at` must"),
        ({"hyperparams": jnp.ones(2)}, ValueError, r"as many members as `models` \(3\), got 2"),
        ({"aux": jnp.ones(2)}, ValueError, r"`aux` must have as many members as `models` \(3\), got 2"),
        ({"key": jax.random.split(jax.random.key(0), 3)}, ValueError, "`shared` must be False in the sampler"),
        ({"key": jax.random.split(jax.random.key(0), 2)}, ValueError, "one per member"),
        ({"members_per_batch": 2, "member_map": "scan"}, ValueError, "`members_per_batch` must be None"),
        ({"mesh": 3}, TypeError, '`mesh` must be a mesh of `member_mesh`, None or "auto", got 3'),
        ({"threads": None}, TypeError, "`threads` must be a Python integer .*, got None"),
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
        ({"seconds": -1.0}, ValueError, "`save` must have `seconds` of at least 0, got -1.0"),
        ({"seconds": np.nan}, ValueError, "`save` must have `seconds` of at least 0, got nan"),
        ({"progress": "auto", "shown": ["foo"], "at": [0]}, ValueError, "`shown` must be one of 'loss', got 'foo'"),
        (
            {"progress": "auto", "shown": ["foo"], "observe": lambda m, s, k: {"a": jnp.ones(()), "b": jnp.ones(2)}},
            ValueError,
            "`shown` must be one of 'loss', 'a', got 'foo'",
        ),
        ({"progress": "loud"}, ValueError, "'terminal', 'notebook', 'auto', 'late', got 'loud'"),
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
        ({"optimizer": "adam"}, TypeError, "`optimizer` must be an optax.GradientTransformation, or a function"),
        (
            {"callbacks": [print, 3]},
            TypeError,
            r"`callbacks\[1\]` must be a function of step and records, or a Callback",
        ),
        ({"observe": "loss"}, TypeError, "`save` must have a function as `observe`, got 'loss'"),
        (
            {"callbacks": [lambda step, records: np.array([True, False])], "at": [1]},
            ValueError,
            "`callbacks` must return None, True, or a truth value for each of the 3 members, got an array of dtype",
        ),
        ({"callbacks": [EarlyStop]}, TypeError, r"`callbacks\[0\]` must be a function of step and records"),
    ],
)
def test_wrong_arguments_are_named(key, change, error, message):
    options = {"num_steps": 2, "batch_size": 4, "key": key, "optimizer": optax.sgd(0.1), **change}
    given = {name: options.pop(name) for name in list(options) if name in ("observe", "at", "seconds")}
    layout = {name: options.pop(name) for name in list(options) if name in Layout._fields}
    shown = {name: options.pop(name) for name in list(options) if name in ("progress", "shown")}
    callbacks = [Progress(shown.pop("progress"), **shown)] if shown else options.pop("callbacks", [])
    with pytest.raises(error, match=message):
        fit(
            linear_members(key),
            make_step(squared_error, options.pop("optimizer")),
            Epochs(regression(key), options.pop("batch_size")),
            save=Save(**given),
            layout=Layout(**layout),
            callbacks=callbacks,
            **options,
        )


@pytest.mark.parametrize("part", ["save", "step"])
@pytest.mark.parametrize("names", [{"inner": {"a/b": 1}}, {"a": {"b": 1}, "a_b": 2}, {"at": 1}])
def test_names_that_cannot_be_saved_are_refused_before_the_first_step(key, part, names):
    def recorded(own):
        return jax.tree.map(jnp.asarray, names if own == part else {"fine": 0})

    step = make_step(lambda model, batch, key: (squared_error(model, batch, key), recorded("step")), optax.sgd(0.1))
    save, seen = Save(lambda model, step, key: recorded("save")), []
    options = {"num_steps": 3, "key": key, "save": save, "callbacks": [lambda step, records: seen.append(step)]}
    run = partial(fit, linear_members(key), step, FullBatch(regression(key)), **options)
    if part == "step" and "at" in names:
        assert "metrics_at" in run().labelled().arrays  # that name is taken among observations alone
        return
    with pytest.raises(ValueError, match=f"`{part}` must record under names that a file of results can hold"):
        run()
    assert not seen


def test_inside_of_a_transformation_the_other_layer_is_named(key):
    models, sampler = linear_members(key), Epochs(regression(key), 4)
    step = make_step(squared_error, optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"`models` must be known: `fit` is driven by the host, .* use `train`"):
        eqx.filter_jit(lambda models: fit(models, step, sampler, num_steps=2, key=key).models)(models)
    with pytest.raises(TypeError, match="`key` must be known"):
        jax.vmap(lambda key: fit(models, step, sampler, num_steps=2, key=key).history.loss)(jax.random.split(key))


def test_wrong_trees_are_named(key):
    models, data = linear_members(key), Epochs(regression(key), 4)
    options = {"num_steps": 2, "key": key}
    with pytest.raises(ValueError, match="`models` must hold at least one array"):
        fit(lambda x: x, SGD, data, **options)
    with pytest.raises(ValueError, match=r"`models` must not be empty, got a leading axis of length 0"):
        fit(Linear(jnp.ones((0, 2, 4))), SGD, data, **options)
    with pytest.raises(
        ValueError, match=r"`models` must agree in the leading .* = eqx.filter_vmap\(init\)\(jax.random.split"
    ):
        fit(eqx.nn.MLP(4, 2, 8, 1, key=key), SGD, data, **options)
    with pytest.raises(TypeError, match=r"`models.weight` must hold real numbers, got dtype complex64"):
        fit(Linear(jnp.ones((3, 2, 4), complex)), SGD, data, **options)
    with pytest.raises(TypeError, match=r"`models.weight` must be .*, got text"):
        fit(Linear(np.full((3, 2, 4), "a")), SGD, data, **options)
    for wrong in (lambda m, b, k: b[0], lambda m, b, k: (b[0], 1.0), lambda m, b, k: None, lambda m, b, k: ()):
        with pytest.raises(ValueError, match="`loss` must return a scalar"):
            fit(models, make_step(wrong, optax.sgd(0.1)), data, **options)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_models_of_half_precision_are_trained_in_float32(key, dtype):
    models = jax.tree.map(lambda leaf: leaf.astype(dtype), linear_members(key))
    step, sampler = make_step(squared_error, optax.adam(0.01)), Epochs(regression(key), 4)
    half = fit(models, step, sampler, num_steps=5, key=key)
    full = fit(Linear(models.weight.astype(jnp.float32)), step, sampler, num_steps=5, key=key)
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
    result = fit(models, make_step(loss, optax.adam(0.1)), FullBatch(regression(key)), num_steps=40, key=key)
    assert result.models.layers[1].p == 0.5
    assert (result.history.loss[:, -5:].mean(1) < result.history.loss[:, 0]).all()


def test_results_print_in_a_line(key):
    data = regression(key)
    save = Save(lambda model, step, key: {"norm": jnp.sum(model.weight**2)}, at=(0, 30))
    step = make_step(squared_error, optax.sgd(0.1))
    found = fit(linear_members(key), step, FullBatch(data), num_steps=30, key=key, save=save)
    said = repr(found)
    assert "\n" not in said
    assert said.startswith("FitResult(3 of Linear, 0 diverged, 30 steps by scan, ")
    assert repr(found.history) in said
    assert f"loss=f32[3,30](numpy) from {found.history.loss.min():.4g} to {found.history.loss.max():.4g}" in said
