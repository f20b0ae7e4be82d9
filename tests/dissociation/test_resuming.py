"""Runs that are interrupted, killed, extended: what a checkpoint gives back, and to whom."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from linear_regression import (
    Normalised,
    linear_members,
    noisy_error,
    normalised_error,
    regression,
    trained,
    weights,
)

import dissociation
from dissociation.training import (
    CsvLog,
    EarlyStop,
    Epochs,
    FreezeDiverged,
    FullBatch,
    HostBatches,
    Online,
    Save,
    fit,
    make_step,
)
from dissociation.training import _checkpoint_file as checkpoints
from dissociation.training import _run as run_module
from dissociation.training._partition import Threads


def same_run(first, second):
    """The same bits, whichever way they came about."""
    jax.tree.map(np.testing.assert_array_equal, first.state, second.state)
    jax.tree.map(np.testing.assert_array_equal, first.history, second.history)
    np.testing.assert_array_equal(first.diverged_at, second.diverged_at)


def noisy_run(key, members=3):
    """Return `fit` of linear members with noise in the loss, by Adam and batches."""
    step, sampler = make_step(noisy_error, optax.adam(0.05)), Epochs(regression(key, samples=30), 4)
    return partial(fit, linear_members(key, members), step, sampler, key=key)


def interrupt_at(step):
    def interrupt(now, records):
        if now == step:
            raise KeyboardInterrupt

    return interrupt


def test_a_run_that_a_callback_stopped_stays_stopped(key, tmp_path):
    seen = []
    sampler = Epochs(regression(key), 4)

    def log(step, records):
        seen.append(step)
        return np.bool_(step >= 6)

    def run(at):
        path = tmp_path / "run"
        return trained(
            key, sampler=sampler, save=Save(at=at), num_steps=12, callbacks=[log], checkpoint=path
        )

    first, again = run(range(0, 13, 3)), run(range(0, 13, 3))
    assert first.num_steps == again.num_steps == 6
    assert seen == [0, 3, 6]
    same_run(first, again)
    assert run([0, 9, 12]).num_steps == 9  # not called at step 6


@pytest.mark.slow
def test_a_run_that_a_callback_stopped_goes_on_without_it(key, tmp_path):
    run = partial(trained, key, sampler=Epochs(regression(key), 4), num_steps=12)
    path = tmp_path / "run"
    stopped = run(
        save=Save(at=[0, 9, 12]),
        callbacks=[lambda step, records: np.bool_(step >= 6)],
        checkpoint=path,
    )
    assert stopped.num_steps == 9
    np.testing.assert_array_equal(weights(run(checkpoint=path)), weights(run()))


@pytest.fixture
def interruptible():
    """What runs in the background may ignore an interrupt."""
    before = (
        signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.getsignal(signal.SIGTERM),
    )
    yield
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGTERM, before[1])


@pytest.fixture(scope="module")
def noisy_run_of_25_steps():
    return noisy_run(jax.random.key(20))(num_steps=25)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_chunk_runs_loses_nothing(
    key, tmp_path, monkeypatch, interruptible, noisy_run_of_25_steps, number
):
    # The chunk's input state is donated: at that moment the host holds nothing that could be saved.
    train = partial(noisy_run(key), num_steps=25)
    run, path, chunks, terminated = run_module.run_tasks, tmp_path / "run", [], []

    def handle(number, frame):
        terminated.append((number, path.exists()))

    signal.signal(signal.SIGTERM, handle)

    def interrupted(tasks, threads):
        result = run(tasks, threads)
        chunks.append(result)
        if len(chunks) > 8:
            os.kill(os.getpid(), number)
            time.sleep(0.01)
        return result

    monkeypatch.setattr(run_module, "run_tasks", interrupted)
    monkeypatch.setattr(run_module, "CHUNK_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        train(checkpoint=path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert terminated == [(signal.SIGTERM, True)] * (
        number == signal.SIGTERM
    )  # when the state was on the disk
    assert signal.getsignal(signal.SIGTERM) is handle
    assert 8 < checkpoints.read_header(path)["step"] < 25
    monkeypatch.setattr(run_module, "run_tasks", run)
    same_run(noisy_run_of_25_steps, train(checkpoint=path))


def shrunk(state, by=0.9):
    return state.replace(model=jax.tree.map(lambda leaf: by * leaf, state.model))


def resumable(
    key, path, num_steps=12, *, target=0.0, power=2, rate=0.05, scale=1.0, at=None, after_update=shrunk,
    batch_size=4, shared=True, sampler=None, models=None, **options,
):  # fmt: skip
    """A run whose loss, optimiser and observation are other functions at every call, with their settings inside."""
    data, shift = regression(jax.random.key(2), samples=10), jnp.full((1, 4), target)

    def loss(model, batch, key):
        x, y = batch
        return jnp.mean(jnp.abs(jax.vmap(model)(x + shift) - y) ** power)

    def observe(model, step, key):
        return scale * jnp.sum(model.weight)

    step = make_step(loss, rate if callable(rate) else optax.adam(rate), after_update=after_update)
    sampler, models = (
        sampler or Epochs(data, batch_size, shared=shared),
        models or linear_members(jax.random.key(1)),
    )
    save = Save(observe if scale else None, at)
    return fit(
        models, step, sampler, num_steps=num_steps, key=key, checkpoint=path, save=save, **options
    )


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """A checkpoint of 12 steps, and what 30 in one go come to."""
    key, path = jax.random.key(20), tmp_path_factory.mktemp("stopped") / "run"
    resumable(key, path)
    return path, resumable(key, None, num_steps=30)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"target": 0.5}, "program"),
        ({"rate": 0.05000001}, "program"),
        ({"rate": optax.sgd}, "hyperparams, program"),
        ({"scale": 2.0}, "observe"),
        ({"scale": None}, "observe"),
        ({"after_update": partial(shrunk, by=0.8)}, "program"),
        ({"batch_size": 5}, "program, sampler"),
        ({"shared": False}, "sampler"),
        ({"sampler": FullBatch(regression(jax.random.key(3)))}, "program, sampler, data"),
        ({"models": linear_members(jax.random.key(7))}, "models"),
        ({"key": jax.random.key(1)}, "key"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_a_checkpoint_is_refused_to_another_program(key, tmp_path, stopped_run, change, name):
    path = shutil.copy(stopped_run[0], tmp_path)
    if name.startswith("hyperparams"):
        change = {**change, "hyperparams": jnp.full(3, 0.05)}
    with pytest.raises(
        ValueError,
        match=f"`checkpoint` must be a file of the same run, got .*, whose {name} differ",
    ):
        resumable(**{"key": key, "path": path, "num_steps": 30, **change})


def test_a_finished_run_is_extended_and_its_records_are_kept(key, tmp_path, stopped_run):
    path, extended = (
        shutil.copy(stopped_run[0], tmp_path),
        shutil.copy(stopped_run[0], tmp_path / "extended"),
    )
    for _ in range(2):  # extended, then read
        same_run(resumable(key, extended, num_steps=30), stopped_run[1])
    with pytest.raises(
        ValueError, match=r"`at` must hold no step before 12 at which .* was not observed, got 4"
    ):
        resumable(
            key, path, num_steps=30, at=[3, 4, 20]
        )  # the first part was observed at 0, 3, 6, 9 and 12
    some = resumable(key, path, num_steps=30, at=[3, 12, 20])
    assert some.history.observed_at.tolist() == [3, 12, 20]
    np.testing.assert_array_equal(
        some.history.observed[:, :2], stopped_run[1].history.observed[:, [1, 4]]
    )
    with pytest.raises(ValueError, match="`num_steps` must be at least the 30 of"):
        resumable(key, path, num_steps=29)


def test_a_trace_of_another_version_says_so(key, tmp_path, stopped_run, monkeypatch):
    path = shutil.copy(stopped_run[0], tmp_path)
    monkeypatch.setattr(jax, "__version__", "99.0")
    with pytest.raises(
        ValueError,
        match=r"program differ.*\(JAX .* wrote it, this is 99.0\), pass same_program=True",
    ):
        resumable(key, path, num_steps=30, power=4)
    resumable(
        key, path, num_steps=20
    )  # the same operations under another version: the same program
    assert resumable(key, path, num_steps=30, power=4, same_program=True).num_steps == 30
    with pytest.raises(ValueError, match="whose key differ"):
        resumable(jax.random.key(1), path, num_steps=30, same_program=True)
    checkpoints.save(
        path, None, checkpoints.read_header(path) | {"format": 2, "layout": "of other fields"}
    )
    with pytest.raises(
        ValueError, match="`checkpoint` must be a file of format 3, got .* of format 2"
    ):
        resumable(key, path)


@pytest.mark.slow
def test_a_second_phase_resumes_as_the_first_does(key, tmp_path):
    """Begun at a state of 5 steps, interrupted at 11, ended at 20."""
    step, sampler, path = (
        make_step(noisy_error, optax.adam(0.05)),
        Epochs(regression(key), 4),
        tmp_path / "run",
    )
    save = Save(lambda m, s, k: m.weight)
    begun = fit(linear_members(key), step, sampler, num_steps=5, key=key, save=save)
    options = {"num_steps": 15, "key": key, "save": Save(save.observe, range(5, 21, 3))}
    whole = fit(begun.state, step, sampler, **options)
    with pytest.raises(KeyboardInterrupt):
        fit(begun.state, step, sampler, checkpoint=path, callbacks=[interrupt_at(11)], **options)
    assert checkpoints.read_header(path)["step"] == 11
    steps = []
    seen = [lambda step, records: steps.append(step)]
    same_run(whole, fit(begun.state, step, sampler, checkpoint=path, callbacks=seen, **options))
    assert steps == [14, 17, 20]
    assert whole.history.observed_at.tolist() == list(range(5, 21, 3))
    assert whole.history.loss.shape == (3, 15)
    new = fit(begun.models, step, sampler, num_steps=0, key=key, save=save)
    other = begun.state.replace(opt_state=new.state.opt_state)
    with pytest.raises(ValueError, match="begin differ"):
        fit(other, step, sampler, checkpoint=path, num_steps=15, key=key, save=save)


def noisy_normalised_error(model, state, batch, key):
    noisy = batch[0], batch[1] + 0.1 * jax.random.normal(key, batch[1].shape)
    return *normalised_error(model, state, noisy, key), {"bias": model.head.bias}


@pytest.mark.slow
def test_aux_metrics_and_frozen_members_resume_bit_for_bit(key, tmp_path):
    models, aux = eqx.filter_vmap(eqx.nn.make_with_state(Normalised))(jax.random.split(key, 3))
    step, sampler = (
        make_step(noisy_normalised_error, optax.adam(0.05)),
        Epochs(regression(key, samples=30), 4),
    )

    def freeze(step, records):
        return np.array([False, step >= 6, step >= 12])

    def observe(model, aux, step, key):
        return {"mean": aux.get(model.norm.batch_state_index)[0]}

    options = {"num_steps": 24, "key": key, "aux": aux, "member_map": "vmap"}
    options["save"] = Save(observe, range(0, 25, 3))
    whole = fit(models, step, sampler, callbacks=[freeze], **options)
    with pytest.raises(KeyboardInterrupt):
        fit(
            models,
            step,
            sampler,
            checkpoint=tmp_path / "run",
            callbacks=[interrupt_at(9), freeze],
            **options,
        )
    assert checkpoints.read_header(tmp_path / "run")["frozen"] == [False, True, False]
    resumed = fit(models, step, sampler, checkpoint=tmp_path / "run", callbacks=[freeze], **options)
    same_run(whole, resumed)
    mean = whole.history.observed["mean"]
    for m, frozen_at in ((1, 2), (2, 4)):  # the averages of frozen members stay as they were
        assert (mean[m, frozen_at:] == mean[m, frozen_at]).all()
        assert (mean[m, frozen_at] != mean[m, frozen_at - 1]).any()
        assert np.isnan(whole.history.metrics["bias"][m, 3 * frozen_at :]).all()
    assert np.isfinite(whole.history.loss[0]).all()


def test_early_stops_and_tables_resume(key, tmp_path):
    """A member's patience, and the rows of a table, do not depend on a cut of the run in two."""
    save = Save(lambda m, s, k: {"norm": jnp.linalg.norm(m.weight)}, range(0, 41, 2))
    options = {"optimizer": lambda rate: optax.sgd(rate), "hyperparams": jnp.array([0.1, 0.0, 1.0])}
    run = partial(trained, key, num_steps=40, save=save, **options)

    def callbacks(name, *more):
        stops = EarlyStop("loss", 3), FreezeDiverged()
        return [*more, CsvLog(tmp_path / name, {"rate": [0.1, 0.0, 1.0]}), *stops]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        whole = run(callbacks=callbacks("whole.csv"))
        with pytest.raises(KeyboardInterrupt):
            run(callbacks=callbacks("parts.csv", interrupt_at(4)), checkpoint=tmp_path / "run")
        (tmp_path / "parts.csv").write_text((tmp_path / "parts.csv").read_text() + "torn")
        resumed = run(callbacks=callbacks("parts.csv"), checkpoint=tmp_path / "run")
    same_run(whole, resumed)
    assert np.isnan(whole.history.loss[1, -1])  # it stood still, and was frozen
    assert np.isfinite(whole.history.loss[0, 9])
    assert (tmp_path / "parts.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_batches_of_the_host_resume_at_the_right_step(key, tmp_path):
    """After an error, before which all is kept."""
    data = [np.asarray(part) for part in regression(key, samples=64)]
    broken, begun, path = True, [], tmp_path / "run"

    def start(step):
        begun.append(step)
        for i in range(step, 1000):
            if broken and i == 13:
                raise OSError("the disk is gone")
            yield data[0][i % 16 * 4 :][:4], data[1][i % 16 * 4 :][:4]

    step, sampler = (
        make_step(noisy_error, optax.adam(0.05)),
        HostBatches(start, epoch_steps=16, block=4),
    )
    run = partial(
        fit,
        linear_members(key),
        step,
        sampler,
        num_steps=20,
        key=key,
        save=Save(at=range(0, 21, 4)),
    )
    with pytest.raises(OSError, match="is gone"):
        run(checkpoint=path)
    assert checkpoints.read_header(path)["step"] == 12
    broken = False
    resumed = run(checkpoint=path)
    assert begun[-1] == 12
    same_run(resumed, run())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_signal_is_lost_in_a_collection_of_garbage(
    key, tmp_path, interruptible, monkeypatch, number
):
    """Exceptions in a callback of the collector are ignored."""
    monkeypatch.setattr(run_module, "CHUNK_SECONDS", 0.0)
    signal.signal(signal.SIGTERM, lambda *_: None)
    armed = []

    def collected(phase, info):
        if armed and armed.pop():
            os.kill(os.getpid(), number)
            time.sleep(0.01)

    def collect(step, records):
        if step == 6:
            armed.append(True)
            gc.collect()

    gc.callbacks.append(collected)
    try:
        with pytest.raises(KeyboardInterrupt):
            noisy_run(key)(
                num_steps=25, save=Save(at=[0, 6]), callbacks=[collect], checkpoint=tmp_path / "run"
            )
    finally:
        gc.callbacks.remove(collected)
    assert checkpoints.read_header(tmp_path / "run")["step"] == 6


def test_a_second_interrupt_raises_at_once(key, tmp_path, interruptible, monkeypatch):
    run, seen = run_module.run_tasks, []

    def twice(tasks, threads):
        if seen:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)
        seen.append(len(seen))
        return run(tasks, threads)

    monkeypatch.setattr(run_module, "run_tasks", twice)
    monkeypatch.setattr(run_module, "CHUNK_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        noisy_run(key)(num_steps=25, checkpoint=tmp_path / "run")
    assert seen == [0]
    assert checkpoints.read_header(tmp_path / "run")["step"] == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.setattr(run_module, "run_tasks", run)
    assert noisy_run(key)(num_steps=25, checkpoint=tmp_path / "run").num_steps == 25


def test_an_interrupt_is_heard_while_the_host_makes_a_batch(key, tmp_path, interruptible):
    batch, used, over, path = (
        regression(key),
        threading.Event(),
        threading.Event(),
        tmp_path / "run",
    )

    def start(step):
        yield batch
        used.wait(60)
        time.sleep(0.2)  # until the run waits for the next one
        os.kill(os.getpid(), signal.SIGINT)
        over.wait(60)
        yield batch

    options = {
        "num_steps": 9,
        "save": Save(at=[1]),
        "callbacks": [lambda *_: used.set()],
        "checkpoint": path,
    }
    with pytest.raises(KeyboardInterrupt):
        trained(key, sampler=HostBatches(start, block=1), **options)
    assert not over.is_set()
    assert checkpoints.read_header(path)["step"] == 1
    over.set()
    reached, late = [], threading.Event()

    def first(step):
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        late.wait(20)
        reached.append(step)
        yield batch

    with pytest.raises(KeyboardInterrupt):
        trained(key, sampler=HostBatches(first, block=1), num_steps=9)
    assert reached == []  # in the first batch, too
    late.set()


KILLED = """
import jax, jax.numpy as jnp, numpy as np, optax, sys
from dissociation import training
from dissociation.training import _run
_run.CHUNK_SECONDS, _run.FIRST_WRITE = 0.001, 0.0
x = jax.random.normal(jax.random.key(0), (500, 20))
loss = lambda w, b, k: jnp.mean((b @ w - 1) ** 2) + 0.01 * jax.random.normal(k)
result = training.fit(
    jnp.ones((3, 20)), training.make_step(loss, optax.adam(1e-3)), training.Epochs(x, 32), num_epochs=int(sys.argv[2]),
    key=jax.random.key(1), save=training.Save(seconds=1e9), member_map="scan",
    checkpoint=None if sys.argv[1] == "none" else sys.argv[1],
)
np.save(sys.argv[3], np.concatenate([result.models, result.history.loss], axis=1))
"""


@pytest.mark.slow
def test_kill_minus_nine_at_any_moment(tmp_path):
    """The first checkpoint is written before the time of `Save` is over."""
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
        while process.poll() is None and not (
            path.exists() and checkpoints.read_header(path)["step"] > start
        ):
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
    assert kills >= 1
    subprocess.run(command(path, "resumed.npy"), check=True)
    np.testing.assert_array_equal(
        np.load(tmp_path / "whole.npy"), np.load(tmp_path / "resumed.npy")
    )


def test_handlers_are_taken_by_the_main_thread_alone_while_it_trains(key, interruptible):
    def trained():
        found = []
        resumable(
            key,
            None,
            at=[0, 12],
            callbacks=[lambda *_: found.append(signal.getsignal(signal.SIGTERM))],
        )
        return found[0]

    signal.signal(signal.SIGTERM, print)
    assert trained() not in (signal.SIG_DFL, signal.SIG_IGN, print)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(trained).result() is print
    assert signal.getsignal(signal.SIGTERM) is print
    resumable(
        key, None, at=[0], callbacks=[lambda *_: bool(signal.signal(signal.SIGTERM, repr)) and None]
    )
    assert signal.getsignal(signal.SIGTERM) is repr  # a callback's own
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert trained() is signal.SIG_IGN


def test_one_call_at_a_time_has_a_checkpoint(key, tmp_path):
    def run(*callbacks, name="run"):
        return resumable(key, tmp_path / name, at=[0, 12], callbacks=callbacks)

    def second(step, records):
        if step == 0:
            with pytest.raises(
                BlockingIOError, match=rf"run is in use by process {os.getpid()} on .* Wait for it"
            ):
                run()
            run(name="other")

    run(second)
    run()  # it is free again


TWO = dissociation.member_mesh(jax.devices("cpu")[:2])


@pytest.mark.slow  # programs of two layouts
@pytest.mark.parametrize(
    "first",
    [
        {"member_map": "scan", "mesh": Threads(2)},
        {"member_map": "vmap", "members_per_batch": 2},
        {"member_map": "unroll"},
        {"member_map": "vmap", "mesh": TWO},
    ],
)
def test_a_resume_takes_the_layout_of_the_checkpoint(key, tmp_path, monkeypatch, caplog, first):
    """The same bits, though another number of devices and cores is found."""
    run, path = noisy_run(key, 5), tmp_path / "run"
    whole = run(num_steps=12, **first)
    run(num_steps=5, **first, checkpoint=path)
    stored = checkpoints.read_header(path)["layout"]
    monkeypatch.setattr("dissociation.training._machine.available_cores", lambda: 1)
    same_run(whole, run(num_steps=12, members_per_batch="auto", checkpoint=path))
    assert not caplog.records
    assert checkpoints.read_header(path)["layout"] == stored
    other = {"member_map": "scan", "mesh": None}
    if first.get("mesh") is TWO:  # which is there no more
        monkeypatch.setattr(jax, "local_device_count", lambda *_: 1)
        other = {}
    run(num_steps=14, checkpoint=path, **other)
    assert [record.message.endswith("bits may differ.") for record in caplog.records] == [True]
    assert checkpoints.read_header(path)["layout"]["mesh"] is None


def drawn_about(shift):
    shift = jnp.full((1, 4), shift)
    return lambda key: (shift + jax.random.normal(key, (4, 4)), jnp.ones((4, 2)))


def test_a_checkpoint_is_refused_to_other_draws(key, tmp_path):
    run = partial(resumable, key, tmp_path / "run")
    run(sampler=Online(drawn_about(1.0)))
    with pytest.raises(ValueError, match="whose (program|sampler)"):
        run(sampler=Online(drawn_about(2.0)), num_steps=30)
    assert run(sampler=Online(drawn_about(1.0)), num_steps=30).num_steps == 30  # created again
