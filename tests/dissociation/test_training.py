"""`fit`: many members at once, however they are mapped, chunked and laid over devices."""

import warnings
from functools import partial
from unittest.mock import Mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from linear_regression import (
    Linear,
    linear_members,
    noisy_error,
    regression,
    squared_error,
    trained,
    weights,
)

import dissociation
from dissociation.training import Epochs, FullBatch, Online, Progress, Save, fit, make_step
from dissociation.training import _chunk as chunk_module
from dissociation.training import _run as run_module
from dissociation.training._progress import Meter

SGD = make_step(squared_error, optax.sgd(0.1))


def noisy_weight_error(weight, batch, key):
    return noisy_error(Linear(weight), batch, key)


def test_equals_a_plain_loop(key):
    """Batches, remainder, optimiser state and keys against a Python loop over members and steps."""
    models, data = linear_members(key), regression(key)
    optimizer = optax.sgd(optax.cosine_decay_schedule(0.1, 9), momentum=0.9)
    result = fit(models, make_step(noisy_error, optimizer), Epochs(data, 4), num_epochs=3, key=key)
    key_of = jax.random.fold_in
    permuted = jax.jit(lambda key, epoch: jax.random.permutation(key_of(key_of(key, 0), epoch), 10))
    start = jax.jit(optimizer.init)

    @jax.jit
    def one_step(weight, state, batch, member, step):
        step_key = key_of(key_of(key_of(key_of(key, 1), member), 0), step)
        value, gradient = jax.value_and_grad(noisy_weight_error)(weight, batch, step_key)
        update, state = optimizer.update(gradient, state)
        return weight + update, state, value

    x, y = map(np.asarray, data)
    for m in range(3):
        weight = np.asarray(models.weight)[m]
        state = start(weight)
        step = 0
        for epoch in range(3):
            order = np.asarray(permuted(key, epoch))
            for chosen in (order[:4], order[4:8], order[8:]):
                weight, state, value = one_step(weight, state, (x[chosen], y[chosen]), m, step)
                np.testing.assert_allclose(result.history.loss[m, step], value, rtol=1e-4)
                step += 1
        np.testing.assert_allclose(weights(result)[m], weight, rtol=1e-4, atol=1e-5)
    assert result.models.name == "linear"
    assert not models.weight.is_deleted()


TWO = dissociation.member_mesh(jax.devices("cpu")[:2])
FOUR = dissociation.member_mesh(jax.devices("cpu")[:4])
LAYOUTS = [
    ("vmap",),
    ("vmap", "auto", 2),
    ("vmap", TWO),
    ("unroll",),
    ("unroll", TWO),
    ("scan", FOUR),
]
BOTH = dissociation.member_mesh(jax.devices("cpu")[:4], data=2)
DATA = [("vmap", BOTH), ("scan", BOTH), ("unroll", BOTH)]


def run_layout(layout, *, shared, size, models=None, keys=None):
    """Train five linear members for ten steps."""
    key = jax.random.key(20)
    how = dict(zip(("member_map", "mesh", "members_per_batch"), layout, strict=False))
    # Only members with own orders get a smaller last batch, which is a program of its own.
    data = regression(key, samples=60 if shared else 64)
    sampler = Epochs(data, size, drop_remainder=size < 10, shared=shared)
    models = linear_members(key, members=5) if models is None else models
    keys = (key if shared else jax.random.split(key, 5)) if keys is None else keys
    return fit(
        models, make_step(noisy_error, optax.sgd(0.05)), sampler, num_steps=10, key=keys, **how
    )


def assert_close(result, wanted, rtol=1e-5, atol=1e-6):
    np.testing.assert_allclose(weights(result), wanted[0], rtol=rtol, atol=atol)
    np.testing.assert_allclose(result.history.loss, wanted[1], rtol=rtol)


@pytest.fixture(scope="module")
def members_in_turn():
    """Return the weights and losses of members that are trained sequentially, with one order of samples."""
    result = run_layout(("scan",), shared=True, size=10)
    return weights(result), result.history.loss


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=["at once", "in batches", "over devices"])
def test_members_agree_with_members_in_turn(layout, members_in_turn):
    assert_close(run_layout(layout, shared=True, size=10), members_in_turn)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shared", "size", "layouts"),
    [(False, 10, LAYOUTS), (True, 8, DATA), (True, 9, DATA)],
    ids=["own orders", "over devices", "not divided"],
)
def test_members_with_any_orders_and_batches_agree_with_members_in_turn(shared, size, layouts):
    """Alone, at once, in batches, with members or batches over devices; without `vmap`, members have the same bits."""
    first = run_layout(("scan",), shared=shared, size=size)
    wanted = weights(first), first.history.loss
    for layout in layouts:
        tolerance = () if layout[0] == "vmap" or size < 10 else (0, 0)
        assert_close(run_layout(layout, shared=shared, size=size), wanted, *tolerance)
    if not shared:
        key = jax.random.key(20)
        models = jax.tree.map(lambda leaf: leaf[3:4], linear_members(key, members=5))
        alone = run_layout(
            ("scan",), shared=False, size=size, models=models, keys=jax.random.split(key, 5)[3:4]
        )
        assert_close(alone, [leaf[3:4] for leaf in wanted])


@pytest.mark.slow
def test_members_per_batch_follow_the_memory(key, monkeypatch):
    models, sizes, needed = linear_members(key, 12, out=40), [], []
    data = regression(key, samples=450, out=40)
    largest, program_bytes = chunk_module.largest_batch, chunk_module.program_bytes
    monkeypatch.setattr(
        chunk_module,
        "program_bytes",
        lambda program: needed.append(program_bytes(program)) or needed[-1],
    )
    monkeypatch.setattr(
        run_module, "largest_batch", lambda *args: sizes.append(largest(*args)) or sizes[-1]
    )

    def run(budget, member_map, size=None):
        monkeypatch.setattr(chunk_module, "free_memory", lambda arrays: budget)
        step, how = (
            make_step(noisy_error, optax.adam(0.05)),
            {"mesh": TWO, "members_per_batch": size},
        )
        return weights(
            fit(
                models, step, Epochs(data, 200), num_epochs=2, key=key, member_map=member_map, **how
            )
        )

    plain = run(None, "vmap")
    np.testing.assert_allclose(run(2**40, "vmap", "auto"), plain, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(run(needed[0] - 1, "vmap", "auto"), plain, rtol=1e-5, atol=1e-6)
    assert sizes[0] == 12 // 2 > sizes[1] >= 1
    with pytest.raises(ValueError, match=r"`memory_budget` must be at least \d+ bytes"):
        run(100, "vmap", "auto")
    np.testing.assert_allclose(
        run(100, "scan", "auto"), plain, rtol=1e-5, atol=1e-6
    )  # in turn: nothing to choose


@pytest.mark.parametrize(
    ("member_map", "size"),
    [("scan", 4), pytest.param("vmap", 3, marks=pytest.mark.slow)],
    ids=["scan", "vmap"],
)
def test_chunks_leave_no_trace(key, monkeypatch, member_map, size):
    models, data = linear_members(key), regression(key, samples=40)

    def run(seconds, longest):
        # The longest chunk sets the size of a buffer, and the name makes a program of each of them.
        named = Linear(models.weight, f"chunks of {longest} by {member_map}")
        monkeypatch.setattr(run_module, "CHUNK_SECONDS", seconds)
        for module in (chunk_module, run_module):
            monkeypatch.setattr(module, "MAX_CHUNK", longest)
        step = make_step(noisy_error, optax.adam(0.05))
        result = fit(named, step, Epochs(data, size), num_epochs=2, key=key, member_map=member_map)
        return weights(result), result.history.loss

    whole = run(1e9, 512)
    jax.tree.map(np.testing.assert_array_equal, whole, run(0.0, 512))  # every chunk is one step
    jax.tree.map(np.testing.assert_array_equal, whole, run(1e9, 3))


def test_observation_is_of_the_state_before_the_update(key):
    models, data = linear_members(key), regression(key)

    def observe(model, step, key):
        return {"weight": model.weight, "step": step, "draw": jax.random.normal(key)}

    def run(num_steps, *steps):
        return fit(
            models, SGD, Epochs(data, 4), num_steps=num_steps, key=key, save=Save(observe, steps)
        )

    history = run(7, 0, 3, 7).history
    assert history.observed_at.tolist() == [0, 3, 7]
    np.testing.assert_array_equal(history.observed["step"], [[0, 3, 7]] * 3)
    np.testing.assert_array_equal(history.observed["weight"][:, 0], models.weight)
    np.testing.assert_array_equal(history.observed["weight"][:, 1], weights(run(3)))
    np.testing.assert_array_equal(history.observed["weight"][:, 2], weights(run(7)))
    assert len(np.unique(history.observed["draw"])) == 9


def test_observations_are_by_epoch_unless_told(key):
    def steps(sampler=None, **options):
        return trained(key, sampler=sampler, num_steps=8, **options).history.observed_at.tolist()

    epochs, observed = (
        Epochs(regression(key), 4),
        Save(lambda model, step, key: jnp.sum(model.weight)),
    )
    assert steps(epochs, save=observed) == [0, 3, 6, 8]
    assert steps(save=observed) == [0, 8]
    assert steps(epochs, callbacks=[lambda step, records: None]) == [0, 3, 6, 8]
    assert steps(epochs, callbacks=[Progress(Mock(return_value=Mock(spec=Meter)))]) == []
    assert steps(epochs) == []


def test_a_diverging_member_is_named_and_poisons_no_other(key):
    def run(rates):
        options = {"hyperparams": jnp.asarray(rates), "member_map": "vmap"}
        return trained(key, optimizer=lambda rate: optax.sgd(rate), num_steps=60, **options)

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
    return value, {
        "halves": 0.5 * value,
        "signs": jnp.sign(model.weight).astype(int),
        "first": x[0],
    }


@pytest.mark.parametrize("member_map", ["vmap", "unroll"])
def test_metrics_are_kept_step_by_step(key, member_map):
    models, options = linear_members(key), {"num_steps": 7, "member_map": member_map}
    found, plain = (trained(key, loss=loss, **options) for loss in (with_sign, squared_error))
    np.testing.assert_array_equal(found.history.loss, plain.history.loss)
    metrics = found.history.metrics
    np.testing.assert_array_equal(metrics["halves"], 0.5 * found.history.loss)
    assert metrics["signs"].shape == (3, 7, 2, 4)
    assert metrics["signs"].dtype.kind == "i"
    np.testing.assert_array_equal(metrics["signs"][:, 0], np.sign(models.weight))
    np.testing.assert_array_equal(
        metrics["first"], np.broadcast_to(regression(key)[0][0], (3, 7, 4))
    )
    assert plain.history.metrics is None
    nothing = trained(key, loss=with_sign, num_steps=0)
    np.testing.assert_array_equal(weights(nothing), models.weight)
    assert nothing.history.metrics["signs"].shape == (3, 0, 2, 4)


def drawn(key):
    x_key, y_key = jax.random.split(key)
    return jax.random.normal(x_key, (5, 4)), jax.random.normal(y_key, (5, 2))


SAMPLERS = {
    "epochs": lambda data: Epochs(data, 4),
    "whole": FullBatch,
    "draws": lambda data: Online(drawn),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_run_in_two_parts_equals_one(key, name):
    """The same bits, by epochs, by draws and by the whole, with Adam's averages and noise in the loss."""
    models, data = linear_members(key), regression(key)
    step = make_step(noisy_error, optax.adam(0.05))
    sampler = SAMPLERS[name](data)
    whole = fit(models, step, sampler, num_steps=15, key=key)
    first = fit(models, step, sampler, num_steps=7, key=key)
    second = fit(first.state, step, sampler, num_steps=8, key=key)
    parts = [first.history.loss, second.history.loss]
    np.testing.assert_array_equal(whole.history.loss, np.concatenate(parts, axis=1))
    assert (first.history.first_step, second.history.first_step) == (0, 7)
    jax.tree.map(np.testing.assert_array_equal, whole.state, second.state)


def test_another_optimiser_begins_anew_and_the_same_goes_on(key):
    first = trained(key, optimizer=optax.adam(0.05), num_steps=5)
    kept = trained(key, first.state, optimizer=optax.adam(0.01), num_steps=1)
    np.testing.assert_array_equal(kept.state.opt_state[0].count, [6] * 3)

    @jax.jit
    def update_of(models, state):
        slope = jax.vmap(jax.grad(squared_error), (0, None, None))(models, regression(key), key)
        return jax.vmap(optax.scale_by_adam().update)(slope, state)[0].weight

    update = np.asarray(update_of(first.models, first.state.opt_state[0]))
    np.testing.assert_allclose(weights(kept), weights(first) - 0.01 * update, rtol=1e-5, atol=1e-6)
    again = partial(trained, key, optimizer=optax.sgd(0.05, momentum=0.9), num_steps=5)
    momentum, fresh = again(first.state), again(first.models)
    np.testing.assert_array_equal(weights(momentum), weights(fresh))
    assert momentum.state.step.tolist() == [10] * 3
    assert fresh.state.step.tolist() == [5] * 3


def test_phases_chain(key):
    """Another loss, other hyperparameters and other data from the same state, three phases on end."""
    models, data, more = (
        linear_members(key),
        regression(key),
        regression(jax.random.key(1), samples=6),
    )
    none, strong, decayed = (
        jnp.zeros(3),
        jnp.full(3, 2.0),
        lambda settings: optax.adamw(0.05, weight_decay=settings),
    )
    step = make_step(squared_error, decayed)
    one = fit(models, step, Epochs(data, 4), num_epochs=2, key=key, hyperparams=none)
    two = fit(one.state, step, FullBatch(more), num_steps=5, key=key, hyperparams=strong)
    three = fit(
        two.state, step, Epochs(data, 4), num_epochs=1, key=key
    )  # the state's own hyperparameters
    assert [r.num_steps for r in (one, two, three)] == [6, 11, 14]
    other = fit(two.state, step, Epochs(data, 4), num_epochs=1, key=key, hyperparams=none)
    assert (
        np.abs(weights(other)) > np.abs(weights(three))
    ).mean() > 0.9  # without decay they stay larger


def test_convolutions_are_kept_out_of_loops_on_a_cpu(key):
    models = eqx.filter_vmap(lambda key: eqx.nn.Conv2d(1, 2, 3, key=key))(jax.random.split(key, 2))
    data = jax.random.normal(key, (8, 1, 6, 6))

    def loss(model, batch, key):
        return jnp.mean(jax.vmap(model)(batch) ** 2)

    chosen = fit(models, make_step(loss, optax.sgd(0.1)), Epochs(data, 4), num_steps=1, key=key)
    assert chosen.member_map == ("unroll" if jax.default_backend() == "cpu" else "vmap")
    summed = make_step(lambda m, b, k: jnp.sum(m), optax.sgd(0.1))
    dense = fit(jnp.ones((2, 3)), summed, Epochs(data, 4), num_steps=1, key=key)
    assert dense.member_map == ("scan" if jax.default_backend() == "cpu" else "vmap")


def test_other_arrays_stay_and_arrays_of_the_loss_are_inputs(key):
    models = {
        "weight": jnp.ones((2, 3)),
        "count": jnp.array([3, 4]),
        "key": jax.random.split(key, 2),
        "rate": 0.5,
    }

    class Weighted(eqx.Module):
        target: jax.Array

        def __call__(self, model, batch, key):
            return jnp.sum((model["weight"] - self.target) ** 2) + 0 * jnp.sum(batch)

    step = make_step(Weighted(jnp.arange(3.0)), optax.sgd(0.5))
    result = fit(models, step, FullBatch(jnp.ones((4, 1))), num_steps=1, key=key)
    np.testing.assert_allclose(result.models["weight"], np.broadcast_to(np.arange(3.0), (2, 3)))
    np.testing.assert_array_equal(result.models["count"], [3, 4])
    assert result.models["rate"] == 0.5  # as of a dropout layer
    assert (result.models["key"] == models["key"]).all()


def test_nothing_to_record_takes_no_trip_to_the_host_per_step(key, monkeypatch):
    chunks, run = [], run_module.run_tasks
    monkeypatch.setattr(run_module, "run_tasks", lambda *args: chunks.append(1) or run(*args))
    sampler = Epochs(regression(key, samples=10), 10)  # every step is an epoch
    monkeypatch.setattr(run_module, "CHUNK_SECONDS", 1e9)  # on a busy machine as on a quiet one
    quiet = trained(key, sampler=sampler, num_steps=2000)
    assert len(chunks) <= 12  # of 1, 4, 16, ... steps, and never more than 512
    assert quiet.history.loss.shape == (3, 2000)
    assert quiet.history.observed_at.size == 0


STATES = eqx.filter_vmap(lambda _: eqx.nn.State(eqx.nn.BatchNorm(3, "batch", mode="ema")))(
    jnp.arange(3)
)


def two_kinds(model, step, key):
    return {"a": jnp.ones(()), "b": jnp.ones(2)}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_steps": None}, ValueError, "`num_steps` must be given, or `num_epochs`"),
        ({"num_epochs": 2}, ValueError, "but not both"),
        ({"member_map": "pmap"}, ValueError, "'auto', 'vmap', 'scan', 'unroll', got 'pmap'"),
        ({"at": [0, 99]}, ValueError, "`at` must lie between 0 and the last step"),
        ({"hyperparams": jnp.ones(2)}, ValueError, r"as many members as `models` \(3\), got 2"),
        ({"aux": jnp.ones(2)}, ValueError, r"`aux` must have as many members as `models` \(3\), "
                                           r"got 2"),
        ({"keys": jax.random.split(jax.random.key(0), 3)}, ValueError, "`shared` must be False "
                                                                       "in the sampler"),
        ({"members_per_batch": 2, "member_map": "scan"}, ValueError, "`members_per_batch` must "
                                                                     "be None"),
        ({"mesh": 3}, TypeError, '`mesh` must be a mesh of `member_mesh`, None or "auto", got 3'),
        ({"mesh": jax.make_mesh((1,), ("batch",))}, ValueError, "`mesh` must have the axis "
                                                                "'members', and 'data' at"),
        ({"hyperparams": [1e-2, 1e-3]}, TypeError, "`hyperparams` must hold arrays, .* first, "
                                                   "got float 0.01 at hyp"),
        ({"seconds": np.nan}, ValueError, "`save` must have `seconds` of at least 0, got nan"),
        ({"progress": "auto", "shown": ["foo"], "observe": two_kinds}, ValueError, "one of "
                                                                                   "'loss', 'a', "
                                                                                   "got 'foo'"),
        ({"progress": "loud"}, ValueError, "'terminal', 'auto', 'late', got 'loud'"),
        ({"optimizer": lambda rate: optax.sgd(0.1)}, TypeError, r"Call it, as in "
                                                                r"optax.adam\(1e-3\)"),
        ({"callbacks": [print, 3]}, TypeError, r"`callbacks\[1\]` must be a function of step and "
                                               r"records, or a Call"),
        ({"observe": "loss"}, TypeError, "`save` must have a function as `observe`, got 'loss'"),
        ({"models": Linear(jnp.ones((0, 2, 4)))}, ValueError, "`models` must not be empty, got a "
                                                              "leading axis of"),
        ({"models": eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))}, ValueError,
         r"`models` must agree in the leading .* = eqx.filter_vmap\(init\)\(jax"),
        ({"models": Linear(np.full((3, 2, 4), "a"))}, TypeError, r"`models.weight` must be .*, "
                                                                 r"got text"),
        ({"models": STATES}, TypeError, "`models` must hold parameters, got an eqx.nn.State .* "
                                        "Pass .* `aux`"),
        ({"loss": lambda m, b, k: (b[0], 1.0)}, ValueError, "`loss` must return a scalar"),
        ({"loss": lambda m, b, k: ()}, ValueError, "`loss` must return a scalar"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(key, change, error, message):
    options = {"num_steps": 2, "sampler": Epochs(regression(key), 4), **change}
    given = {
        name: options.pop(name) for name in list(options) if name in ("observe", "at", "seconds")
    }
    shown = {name: options.pop(name) for name in list(options) if name in ("progress", "shown")}
    if shown:
        options["callbacks"] = [Progress(shown.pop("progress"), **shown)]
    with pytest.raises(error, match=message):
        trained(key, save=Save(**given), **options)


@pytest.mark.parametrize("names", [{"inner": {"a/b": 1}}, {"a": {"b": 1}, "a_b": 2}, {"at": 1}])
def test_names_that_cannot_be_saved_are_refused_before_the_first_step(key, names):
    recorded, seen = jax.tree.map(jnp.asarray, names), Mock(return_value=None)
    loss = lambda model, batch, key: (squared_error(model, batch, key), recorded)  # noqa: E731
    options = {"num_steps": 3, "callbacks": [seen]}
    for part, given in (
        ("save", {"save": Save(lambda model, step, key: recorded)}),
        ("step", {"loss": loss}),
    ):
        if "at" in names and part == "step":  # that name is taken among observations alone
            continue
        with pytest.raises(
            ValueError, match=f"`{part}` must (have names other than|give each array)"
        ):
            trained(key, **options, **given)
    assert not seen.called


def test_inside_of_a_transformation_the_other_layer_is_named(key):
    with pytest.raises(
        TypeError, match=r"`models` must be known: `fit` is driven by the host, .* use `train`"
    ):
        eqx.filter_jit(lambda models: trained(key, models, num_steps=2).models)(linear_members(key))
    with pytest.raises(TypeError, match="`key` must be known"):
        jax.vmap(lambda own: trained(key, keys=own, num_steps=2).history.loss)(
            jax.random.split(key)
        )


def test_models_of_half_precision_are_trained_in_float32(key):
    models = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), linear_members(key))
    half = trained(key, models, num_steps=5)
    full = trained(key, Linear(models.weight.astype(jnp.float32)), num_steps=5)
    assert half.models.weight.dtype == jnp.float32
    np.testing.assert_array_equal(weights(half), weights(full))


def test_results_print_in_a_line(key):
    found = trained(
        key, num_steps=30, save=Save(lambda model, step, key: {"norm": jnp.sum(model.weight**2)})
    )
    said = repr(found)
    assert "\n" not in said
    assert said.startswith("FitResult(3 of Linear, 0 diverged, 30 steps by ")
    assert repr(found.history) in said
    assert (
        f"loss=f32[3,30](numpy) from {found.history.loss.min():.4g} to "
        f"{found.history.loss.max():.4g}" in said
    )
