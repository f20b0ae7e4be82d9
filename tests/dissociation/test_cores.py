"""Every core a device: how many there are, and when it is too late."""

import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dissociation
from dissociation import sharding
from dissociation.bmap import bmap
from dissociation.cores import available_cores, side_by_side, use_all_cores
from dissociation.lanes import number_of_lanes, run_tasks
from dissociation.training import Epochs, Layout, Save, fit, make_step


def in_a_process_of_its_own(code):
    """What it prints, without the tests' four devices."""
    environment = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    return run.stdout + run.stderr


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", None), ("100000 100000", 1), ("150000 100000", 2), ("10000 100000", 1), ("?", None)],
)
def test_a_quota_is_a_limit(tmp_path, monkeypatch, quota, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(5)), raising=False)
    (tmp_path / "cpu.max").write_text(quota)
    assert available_cores(tmp_path / "cpu.max") == (cores or 5)
    assert available_cores(tmp_path / "none") == 5


@pytest.mark.slow
def test_devices_are_cores():
    code = """
import jax, dissociation
dissociation.use_all_cores()
from dissociation.cores import available_cores
print(jax.local_device_count() == available_cores())
dissociation.use_all_cores()  # as often as one likes
"""
    assert in_a_process_of_its_own(code) == "True\n"


@pytest.mark.slow
def test_it_can_be_too_late():
    code = """
import jax.numpy as jnp
import dissociation.cores
jnp.zeros(1)
dissociation.cores.available_cores = lambda: 3
dissociation.use_all_cores()
"""
    said = in_a_process_of_its_own(code)
    assert "use_all_cores() must be called before JAX computes anything, got 1 device(s)" in said
    assert "for 3 cores. Restart the process (in a notebook, the kernel)" in said


@pytest.mark.slow
def test_devices_that_have_started_decompose_alone():
    """Their pool of threads is there already, and the environment must not say that it is larger."""
    code = """
import jax, os
jax.config.update("jax_num_cpu_devices", 2)
jax.numpy.zeros(1)
import dissociation.cores as cores
cores.available_cores = lambda: 2
cores.use_all_cores()
print(jax.local_device_count(), jax.config.jax_num_cpu_devices, "PJRT_NPROC" in os.environ, cores.side_by_side(["svd"]))
"""
    assert in_a_process_of_its_own(code) == "2 2 False False\n"


@pytest.mark.slow
@pytest.mark.skipif(available_cores() == 1 or sys.platform != "linux", reason="has one thread, or cannot be found")
def test_a_blas_that_is_loaded_gets_one_thread():
    code = """
import scipy.linalg, dissociation
from threadpoolctl import threadpool_info
from dissociation.cores import side_by_side
def threads():
    return [info["num_threads"] for info in threadpool_info() if "scipy.libs" in info["filepath"]]
print(min(threads()) > 1)
dissociation.use_all_cores()
print(threads(), side_by_side(["svd"]))
"""
    assert in_a_process_of_its_own(code) == "True\n[1] True\n"


def test_enough_devices_are_left_alone(monkeypatch):
    monkeypatch.setattr("dissociation.cores.available_cores", lambda: 3)
    assert jax.local_device_count() == 4  # and have started
    dissociation.use_all_cores()
    assert jax.local_device_count() == 4
    assert dissociation.use_all_cores is use_all_cores
    with pytest.raises(AttributeError, match="no attribute 'use_no_cores'"):
        _ = dissociation.use_no_cores


@pytest.fixture
def three_cores(monkeypatch):
    monkeypatch.setattr("dissociation.cores.available_cores", lambda: 3)


def test_what_is_chosen(three_cores, monkeypatch):
    """No more lanes than members, devices or cores, and one where several could wait for each other."""
    assert number_of_lanes(5, ["dot_general", "eigh"], None) == 3
    assert number_of_lanes(2, [], None) == 2
    assert number_of_lanes(1, [], None) == 1
    assert number_of_lanes(5, ["pure_callback"], None) == 1
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    assert not side_by_side(["svd"])
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    assert side_by_side(["svd"])
    monkeypatch.setenv("PJRT_NPROC", str(jax.local_device_count()))
    assert number_of_lanes(5, ["svd"], None) == 1
    monkeypatch.delenv("PJRT_NPROC")
    assert number_of_lanes(5, ["svd"], None) == 1
    assert number_of_lanes(5, ["dot_general"], None) == 3
    over = sharding.place_members(jnp.ones((4, 2)), sharding.member_mesh())
    assert number_of_lanes(5, [], {"spread": over, "text": "a"}) == 1
    assert number_of_lanes(5, [], {"placed": jax.device_put(over, jax.devices()[1])}) == 3
    monkeypatch.setattr("dissociation.cores.available_cores", lambda: 9)
    assert number_of_lanes(9, [], None) == 4 == jax.local_device_count()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert number_of_lanes(9, [], None) == 1


def same(first, second):
    """Whether two PyTrees agree bit for bit, and lie on the same devices."""
    one, other = (jax.tree.leaves(eqx.filter([tree], eqx.is_array)) for tree in (first, second))
    return all(np.array_equal(a, b) and a.devices() == b.devices() for a, b in zip(one, other, strict=True))


@pytest.fixture
def seen(monkeypatch):
    """By how many lanes things were computed."""
    numbers = []

    def noted(tasks, lanes):
        numbers.append((len(tasks), lanes))
        return run_tasks(tasks, lanes)

    for module in ("dissociation.lanes", "dissociation.training.run"):
        monkeypatch.setattr(f"{module}.run_tasks", noted)
    return numbers


MODELS = {
    # XLA fuses the first, and the gradient of the third, otherwise where it compiles for several devices.
    "one output": lambda k: eqx.nn.MLP(6, 1, 16, 1, key=k),
    "ten outputs": lambda k: eqx.nn.MLP(6, 10, 16, 1, jnp.tanh, key=k),
    "attention": lambda k: eqx.nn.Sequential(
        [
            eqx.nn.Lambda(lambda x: x.reshape(3, 2)),
            Attends(eqx.nn.MultiheadAttention(1, 2, key=k)),
            eqx.nn.Lambda(jnp.ravel),
        ]
    ),
    "convolution": lambda k: eqx.nn.Sequential([eqx.nn.Lambda(lambda x: x[None]), eqx.nn.Conv1d(1, 2, 3, key=k)]),
}


class Attends(eqx.Module):
    attention: eqx.nn.MultiheadAttention

    def __call__(self, x, key=None):
        return self.attention(x, x, x)


@pytest.mark.parametrize("member_map", ["scan", "unroll"])
@pytest.mark.parametrize("kind", MODELS)
def test_members_side_by_side_have_equal_bits(three_cores, seen, kind, member_map, key):
    """Trained, observed with a decomposition, frozen; seven members, which three lanes do not divide."""
    models = eqx.filter_vmap(MODELS[kind])(jax.random.split(key, 7))
    x = jax.random.normal(key, (20, 6))
    y = jnp.sin(3 * x[:, 0]) + 0.1
    placed = jax.device_put(jnp.ones((1, 6)), jax.devices()[0])  # what a loss closes over may have been put on a device

    def loss(model, batch, key):
        out = jax.vmap(model)(batch[0] * placed).reshape(len(batch[0]), -1)
        return jnp.mean((out.mean(axis=1) - batch[1]) ** 2) + 0.1 * jnp.mean(out**2)

    def observe(model, step, key):
        weights = jax.tree.leaves(eqx.filter(model, eqx.is_array))
        return jnp.linalg.svd(weights[0].reshape(2, -1))[1] + jax.random.normal(key)

    def trained(**layout):
        freeze = lambda step, records: np.arange(7) == 2 if step == 4 else None  # noqa: E731
        options = {"save": Save(observe, at=[0, 4, 9]), "callbacks": [freeze], "layout": Layout(member_map, **layout)}
        return fit(models, make_step(loss, optax.adam(0.1)), Epochs((x, y), 8), num_steps=9, key=key, **options)

    alone, over = trained(mesh=None), trained()
    parts = 7 if member_map == "unroll" else 1
    assert seen[0] == (parts, 1)
    assert seen[-1] == (max(parts, 3), 3)
    assert same(alone.models, over.models)
    assert same(alone.state.opt_state, over.state.opt_state)
    jax.tree.map(np.testing.assert_array_equal, alone.history, over.history)
    assert np.isnan(over.history.loss[2, 4:]).all()
    assert np.ptp(over.history.loss[0]) > 0


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("number", [2, 3, 7])
def test_bmap_of_single_members_has_equal_bits(three_cores, seen, kind, number, key, monkeypatch):
    models = eqx.filter_vmap(MODELS[kind])(jax.random.split(key, number))
    x = jax.random.normal(key, (30, 6))

    def gradient(model, x):
        return eqx.filter_grad(lambda model: jnp.sum(jax.vmap(model)(x) ** 2))(model)

    mapped = bmap(gradient, in_axes=(eqx.if_array(0), None), batch_size=1, loop="scan")
    over = mapped(models, x)
    assert seen == [(min(number, 3), 3 if number > 2 else 2)]
    monkeypatch.setattr("dissociation.cores.available_cores", lambda: 1)
    assert same(mapped(models, x), over)
    assert same(eqx.filter_jit(mapped)(models, x), over)
    one = jax.tree.map(lambda leaf: leaf[:1] if eqx.is_array(leaf) else leaf, models)
    assert all(map(np.array_equal, jax.tree.leaves(mapped(one, x)), [a[:1] for a in jax.tree.leaves(over)]))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_single_member_is_compiled_as_many_are(three_cores, key, number):
    """XLA takes a loop of one member apart: what is fixed in it is folded and fused otherwise, and rounds otherwise."""
    weights = jax.random.normal(key, (5, 32, 48))

    def noisy(w):
        fixed = jax.random.normal(jax.random.key(7), w.shape)
        return (w + 0.1 * fixed).mean(0), (fixed + w.sum()).sum(1), jnp.sin(jnp.linspace(0, 9, 50) * w[0, 0]).sum()

    few, many = (bmap(noisy, batch_size=1)(weights[:count]) for count in (number, 5))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[:number]), few, many)

    def loss(w, batch, key):
        return jnp.mean((noisy(w)[0][None] - batch) ** 2)

    def trained(count, **layout):
        options = {"save": Save(lambda w, step, key: noisy(w), at=[0, 3]), "layout": Layout("scan", **layout)}
        sampler, keys = Epochs(jnp.ones((6, 48)), 3, shared=False), jax.random.split(key, 5)[:count]
        return fit(weights[:count], make_step(loss, optax.adam(0.1)), sampler, num_steps=3, key=keys, **options)

    few, alone, many = trained(number), trained(number, mesh=None), trained(5)
    for other in (alone, many):
        np.testing.assert_array_equal(few.models, other.models[:number])
        compared = few.history.observed, other.history.observed
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[:number]), *compared)


def test_what_looks_for_nan_or_compiles_nothing_goes_alone(three_cores, seen, key):
    x = jnp.ones((3, 4))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        bmap(lambda w: jnp.log(-w), batch_size=1)(x)
    step = make_step(lambda w, batch, key: jnp.mean((w[None] - batch) ** 2), optax.sgd(0.1))
    with jax.disable_jit():
        np.testing.assert_array_equal(bmap(lambda w: 2 * w, batch_size=1)(x), 2 * x)
        result = fit(x[:2], step, Epochs(jnp.zeros((4, 4)), 2), num_steps=2, key=key)
    assert {lanes for _, lanes in seen} == {1}
    np.testing.assert_allclose(result.models, 0.95**2 * x[:2], rtol=1e-6)


def test_bmap_side_by_side_stays_where_its_arrays_are(three_cores, seen, key):
    x, shared = jax.random.normal(key, (7, 5, 5)), jnp.eye(5)

    def values(a, b):
        return {"values": jnp.linalg.svd(a + b)[1], "first": jnp.argmax(a)}, None

    over = bmap(values, in_axes=(0, None), batch_size=1)(x, shared)
    placed = bmap(values, in_axes=(0, None), batch_size=1)(jax.device_put(x, jax.devices()[1]), np.eye(5))
    assert seen == [(3, 3)] * 2
    assert over[0]["values"].shape == (7, 5)
    assert over[0]["values"].devices() == {jax.devices()[0]}
    assert placed[0]["values"].devices() == {jax.devices()[1]}
    assert jax.tree.structure(placed) == jax.tree.structure(over)
    assert np.array_equal(placed[0]["values"], over[0]["values"])


def test_what_lies_on_several_devices_is_one_program(three_cores, seen, key):
    """Two that run at once, and wait for one another's parts, could wait for ever."""
    x = jax.random.normal(key, (4, 5))
    over = sharding.place_members(x, sharding.member_mesh())
    np.testing.assert_allclose(bmap(jnp.sum, batch_size=1)(over), x.sum(1), rtol=1e-6)
    step = make_step(lambda w, batch, key: jnp.mean((batch @ w - 1) ** 2), optax.sgd(0.1))
    result, alone = (fit(models, step, Epochs(x, 2), num_steps=3, key=key) for models in (over, x))
    assert set(seen) == {(1, 1), (2, 3)}
    np.testing.assert_allclose(result.models, alone.models, rtol=1e-5)


def test_settings_of_one_thread_hold_side_by_side(three_cores, seen):
    with jax.enable_x64(True):
        x = jnp.arange(6.0) / 3
        values = bmap(lambda x: x**2 + jnp.ones(2) / 3, batch_size=1)(x)
        assert seen == [(3, 3)]
        assert values.dtype == jnp.float64
        np.testing.assert_allclose(values, np.square(np.arange(6.0) / 3)[:, None] + np.ones(2) / 3, rtol=1e-15)


@pytest.mark.slow
def test_batches_of_decompositions_do_not_wait_for_each_other():
    """With as many threads as devices, XLA's default, this one never ended."""
    code = """
import faulthandler
faulthandler.dump_traceback_later(60, exit=True)
import dissociation.cores as cores
cores.available_cores = lambda: 2
cores.use_all_cores()
import jax, jax.numpy as jnp
from dissociation.bmap import bmap
a = jax.random.normal(jax.random.key(0), (6, 4, 130, 130))
for _ in range(20):
    values = bmap(lambda a: jnp.linalg.eigh(a @ a.mT)[0], batch_size=1)(a)
print(jax.local_device_count(), values.shape)
"""
    assert in_a_process_of_its_own(code) == "2 (6, 4, 130)\n"
