"""Every core a device: how many there are, and when it is too late."""

import subprocess
import sys
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dissociation import bmap, member_mesh, use_all_cores
from dissociation.training import Epochs, FullBatch, Save, fit, make_step
from dissociation.training import _run as run_module
from dissociation.training._machine import (
    CALLBACKS,
    available_cores,
    number_of_threads,
    run_tasks,
    runs_in_parallel,
)
from dissociation.training._members import place_members

pytestmark = pytest.mark.cpu


def in_a_process_of_its_own(code):
    """What it prints, without the tests' four devices."""
    environment = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    return run.stdout + run.stderr


def test_a_quota_is_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(5)), raising=False)
    for quota, cores in (("max 100000", 5), ("150000 100000", 2), ("10000 100000", 1), ("?", 5)):
        (tmp_path / "cpu.max").write_text(quota)
        assert available_cores(tmp_path / "cpu.max") == cores
    assert available_cores(tmp_path / "none") == 5


@pytest.mark.slow
def test_devices_are_cores_and_decompose_in_parallel():
    """With as many threads as devices, XLA's default, the last lines never ended."""
    code = """
import faulthandler
faulthandler.dump_traceback_later(60, exit=True)
import jax, dissociation
from dissociation.training import _machine as cores
cores.available_cores = lambda: 2
dissociation.use_all_cores()
print(jax.local_device_count())
dissociation.use_all_cores()  # as often as one likes
import jax.numpy as jnp
a = jax.random.normal(jax.random.key(0), (6, 4, 130, 130))
for _ in range(20):
    values = dissociation.bmap(lambda a: jnp.linalg.eigh(a @ a.mT)[0], batch_size=1)(a)
print(values.shape)
"""
    assert in_a_process_of_its_own(code) == "2\n(6, 4, 130)\n"


@pytest.mark.slow
def test_devices_that_have_started_decompose_alone():
    """Their pool of threads is there already, and the environment must not say that it is larger."""
    code = """
import jax, os
jax.config.update("jax_num_cpu_devices", 2)
jax.numpy.zeros(1)
from dissociation.training import _machine as cores
cores.available_cores = lambda: 2
cores.use_all_cores()
print(jax.local_device_count(), jax.config.jax_num_cpu_devices, "PJRT_NPROC" in os.environ)
print(cores.runs_in_parallel(["svd"]))
cores.available_cores = lambda: 3
cores.use_all_cores()
"""
    said = in_a_process_of_its_own(code)
    assert said.startswith("2 2 False\nFalse\n")
    assert "use_all_cores() must be called before JAX computes anything, got 2 device(s)" in said
    assert "for 3 cores. Restart the process (in a notebook, the kernel)" in said


@pytest.mark.slow
@pytest.mark.skipif(
    available_cores() == 1 or sys.platform != "linux", reason="has one thread, or cannot be found"
)
@pytest.mark.parametrize("loaded", ["scipy.linalg", "numpy"])
def test_the_blas_of_scipy_gets_one_thread(loaded):
    code = f"""
import {loaded}, dissociation
from threadpoolctl import threadpool_info
from dissociation.training._machine import runs_in_parallel
def threads(package):
    return [info["num_threads"] for info in threadpool_info() if package + ".libs" in info["filepath"]]
before = threads("numpy")
dissociation.use_all_cores()
print(threads("scipy"), threads("numpy") == before, runs_in_parallel(["svd"]))
"""
    assert in_a_process_of_its_own(code) == "[1] True True\n"


@pytest.fixture
def three_cores(monkeypatch):
    monkeypatch.setattr("dissociation.training._machine.available_cores", lambda: 3)


def test_what_is_chosen(three_cores, monkeypatch):
    """No more threads than members, devices or cores, and one where several could wait for each other."""
    use_all_cores()
    assert jax.local_device_count() == 4  # have started, and are enough
    assert number_of_threads(5, ["dot_general", "eigh"], None) == 3
    assert number_of_threads(2, [], None) == 2
    assert number_of_threads(1, [], None) == 1
    assert number_of_threads(5, ["pure_callback"], None) == 1
    assert runs_in_parallel(["svd"])
    monkeypatch.delenv("PJRT_NPROC")
    assert number_of_threads(5, ["svd"], None) == 1
    assert number_of_threads(5, ["dot_general"], None) == 3
    over = place_members(jnp.ones((4, 2)), member_mesh())
    assert number_of_threads(5, [], {"spread": over, "text": "a"}) == 1
    assert number_of_threads(5, [], {"placed": jax.device_put(over, jax.devices()[1])}) == 3
    monkeypatch.setattr("dissociation.training._machine.available_cores", lambda: 9)
    assert number_of_threads(9, [], None) == 4 == jax.local_device_count()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert number_of_threads(9, [], None) == 1


@pytest.mark.parametrize("member_map", ["scan", "unroll"])
def test_no_step_calls_the_host(three_cores, monkeypatch, key, member_map):
    """The compiled programs of chunks and observations hold no callback, feed or transfer."""
    texts = []

    def kept(program, inputs, state):
        texts.append(program.lower(inputs, state).as_text())
        return program(inputs, state)

    for name in ("run_chunk", "observe_members"):
        monkeypatch.setattr(run_module, name, partial(kept, getattr(run_module, name)))
    monkeypatch.setattr(run_module, "compiled", lambda function, threads, *example: function)
    step = make_step(lambda w, batch, key: jnp.mean((batch @ w - 1) ** 2), optax.adam(0.1))
    save = Save(lambda w, step, key: jnp.sum(w), at=[0, 3])
    fit(
        jnp.ones((3, 4)),
        step,
        Epochs(jnp.ones((6, 4)), 3),
        num_steps=3,
        key=key,
        save=save,
        member_map=member_map,
    )
    assert len(texts) >= 3
    for text in texts:
        assert "stablehlo" in text
        assert not any(
            word in text for word in (*CALLBACKS, "callback", "infeed", "outfeed", "stablehlo.send")
        )


def close(first, second):
    """Require that two PyTrees agree up to rounding, and lie on the same devices."""
    one, other = (jax.tree.leaves(eqx.filter([tree], eqx.is_array)) for tree in (first, second))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert a.devices() == b.devices()


@pytest.fixture
def seen(monkeypatch):
    """By how many threads things were computed."""
    numbers = []

    def noted(tasks, threads):
        numbers.append((len(tasks), threads))
        return run_tasks(tasks, threads)

    for module in ("dissociation.training._partition", "dissociation.training._run"):
        monkeypatch.setattr(f"{module}.run_tasks", noted)
    return numbers


MODELS = {
    "one output": lambda k: eqx.nn.MLP(6, 1, 16, 1, key=k),
    "ten outputs": lambda k: eqx.nn.MLP(6, 10, 16, 1, jnp.tanh, key=k),
    "convolution": lambda k: eqx.nn.Sequential(
        [eqx.nn.Lambda(lambda x: x[None]), eqx.nn.Conv1d(1, 2, 3, key=k)]
    ),
}


X = np.random.default_rng(0).normal(size=(30, 6)).astype(np.float32)


@eqx.filter_jit
def drawn(kind, key, number):
    """Return `number` models of a kind."""
    return eqx.filter_vmap(MODELS[kind])(jax.random.split(key, number))


@pytest.mark.parametrize(
    ("kind", "member_map"),
    [
        # Three devices and two shapes: a program for each.
        pytest.param("one output", "scan", marks=pytest.mark.slow),
        pytest.param("ten outputs", "unroll", marks=pytest.mark.slow),
        ("convolution", "unroll"),
    ],
)
def test_members_in_parallel_agree_with_one_after_another(three_cores, seen, kind, member_map, key):
    """Trained, observed with a decomposition, frozen; five members, which three threads do not divide."""
    models = drawn(kind, key, 5)
    x = X[:20]
    y = np.sin(3 * x[:, 0]) + 0.1
    placed = jax.device_put(
        jnp.ones((1, 6)), jax.devices()[0]
    )  # what a loss closes over may have been put on a device

    def loss(model, batch, key):
        out = jax.vmap(model)(batch[0] * placed).reshape(len(batch[0]), -1)
        return jnp.mean((out.mean(axis=1) - batch[1]) ** 2) + 0.1 * jnp.mean(out**2)

    def observe(model, step, key):
        weights = jax.tree.leaves(eqx.filter(model, eqx.is_array))
        return jnp.linalg.svd(weights[0].reshape(2, -1))[1] + jax.random.normal(key)

    freeze = lambda step, records: np.arange(5) == 2 if step == 4 else None  # noqa: E731
    options = {"save": Save(observe, at=[0, 4, 8]), "callbacks": [freeze], "member_map": member_map}
    step = make_step(loss, optax.adam(0.1))
    sampler = Epochs((x, y), 10)

    def trained(**layout):
        return fit(models, step, sampler, num_steps=8, key=key, **options, **layout)

    alone = trained(mesh=None)
    over = trained()
    parts = 5 if member_map == "unroll" else 1
    assert seen[0] == (parts, 1)
    assert seen[-1] == (max(parts, 3), 3)
    close(alone.models, over.models)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        alone.history,
        over.history,
    )
    jax.tree.map(np.testing.assert_array_equal, over.history, trained().history)
    assert np.isnan(over.history.loss[2, 4:]).all()
    assert np.ptp(over.history.loss[0]) > 0


@pytest.mark.parametrize(
    ("kind", "number"), [("one output", 2), ("ten outputs", 3), ("convolution", 7)]
)
def test_bmap_in_parallel_agrees_with_one_after_another(
    three_cores, seen, kind, number, key, monkeypatch
):
    models = drawn(kind, key, number)

    def gradient(model, x):
        return eqx.filter_grad(lambda model: jnp.sum(jax.vmap(model)(x) ** 2))(model)

    mapped = bmap(gradient, in_axes=(eqx.if_array(0), None), batch_size=1, loop="scan")
    over = mapped(models, X)
    assert seen == [(min(number, 3), 3 if number > 2 else 2)]
    monkeypatch.setattr("dissociation.training._machine.available_cores", lambda: 1)
    close(mapped(models, X), over)
    close(eqx.filter_jit(mapped)(models, X), over)


def test_what_looks_for_nan_goes_alone(three_cores, seen):
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        bmap(lambda w: jnp.log(-w), batch_size=1)(jnp.ones((3, 4)))
    assert {threads for _, threads in seen} == {1}


def test_what_compiles_nothing_goes_alone(three_cores, seen, key):
    x = jnp.ones((2, 4))
    step = make_step(lambda w, batch, key: jnp.mean((w[None] - batch) ** 2), optax.sgd(0.1))
    keys = key, jax.random.split(key)
    with jax.disable_jit():
        np.testing.assert_array_equal(bmap(lambda w: 2 * w, batch_size=1)(x), 2 * np.ones((2, 4)))
        result = fit(x, step, FullBatch(jnp.zeros((2, 4))), num_steps=2, key=keys)
    assert {threads for _, threads in seen} == {1}
    np.testing.assert_allclose(result.models, np.full((2, 4), 0.95**2), rtol=1e-6)


def test_bmap_in_parallel_keeps_devices_and_settings(three_cores, seen):
    x = np.random.default_rng(0).normal(size=(7, 5, 5)).astype(np.float32)
    shared = np.eye(5, dtype=np.float32)

    def values(a, b):
        return {"values": jnp.linalg.svd(a + b)[1], "first": jnp.argmax(a)}, None

    mapped = bmap(values, in_axes=(0, None), batch_size=1)
    over = mapped(x, shared)
    placed = mapped(jax.device_put(x, jax.devices()[1]), shared)
    assert seen == [(3, 3)] * 2
    assert [each[0]["values"].devices() for each in (over, placed)] == [
        {jax.devices()[0]},
        {jax.devices()[1]},
    ]
    jax.tree.map(np.testing.assert_array_equal, placed, over)
    with jax.enable_x64(True):  # settings of one thread hold in the others
        third = np.arange(6.0) / 3
        squares = bmap(lambda x: x**2 + jnp.ones(2) / 3, batch_size=1)(third)
        assert seen[2:] == [(3, 3)]
        assert squares.dtype == jnp.float64
        np.testing.assert_allclose(
            squares, np.square(np.arange(6.0) / 3)[:, None] + np.ones(2) / 3, rtol=1e-15
        )


def test_what_lies_on_several_devices_is_one_program(three_cores, seen, key):
    """Two that run at once, and wait for one another's parts, could wait for ever."""
    x = X[:4, :5]
    over = place_members(jnp.asarray(x), member_mesh())
    np.testing.assert_allclose(bmap(jnp.sum, batch_size=1)(over), x.sum(1), rtol=1e-6)
    step = make_step(lambda w, batch, key: jnp.mean((batch @ w - 1) ** 2), optax.sgd(0.1))
    result, alone = (
        fit(models, step, Epochs(x, 2), num_steps=3, key=key) for models in (over, jnp.asarray(x))
    )
    assert set(seen) == {(1, 1), (2, 3)}
    np.testing.assert_allclose(result.models, alone.models, rtol=1e-5)
