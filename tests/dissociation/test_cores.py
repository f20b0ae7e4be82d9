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
    """No more devices than members or cores, and one where several could wait for each other."""
    assert sharding.default_mesh(5, ["dot_general", "eigh"]).devices.tolist() == jax.devices()[:3]
    assert sharding.default_mesh(2, []).size == 2
    assert sharding.default_mesh(1, []) is None
    assert sharding.default_mesh(5, ["pure_callback"]) is None
    with jax.default_device(jax.devices()[1]):
        assert sharding.default_mesh(5, []) is None
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    assert not side_by_side(["svd"])
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    assert side_by_side(["svd"])
    monkeypatch.setenv("PJRT_NPROC", str(jax.local_device_count()))
    assert sharding.default_mesh(5, ["svd"]) is None
    monkeypatch.delenv("PJRT_NPROC")
    assert sharding.default_mesh(5, ["svd"]) is None
    assert sharding.default_mesh(5, ["dot_general"]).size == 3


def same(first, second):
    """Whether two PyTrees agree bit for bit, and lie on the same devices."""
    one, other = (jax.tree.leaves(eqx.filter([tree], eqx.is_array)) for tree in (first, second))
    return all(np.array_equal(a, b) and a.devices() == b.devices() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("member_map", ["scan", "unroll"])
def test_members_are_laid_over_devices_with_equal_bits(three_cores, monkeypatch, member_map, key):
    """Trained, observed with a decomposition, frozen and gathered; seven members, which three devices do not divide."""
    meshes = []

    def seen(*arguments):
        meshes.append(chosen(*arguments))
        return meshes[-1]

    chosen = sharding.default_mesh
    monkeypatch.setattr(sharding, "default_mesh", seen)
    models = eqx.filter_vmap(lambda k: eqx.nn.MLP(4, 2, 6, 1, key=k))(jax.random.split(key, 7))
    x, y = jax.random.normal(key, (20, 4)), jnp.eye(2)[jnp.arange(20) % 2]

    def loss(model, batch, key):
        return optax.softmax_cross_entropy(jax.vmap(model)(batch[0]), batch[1]).mean()

    def observe(model, step, key):
        return jnp.linalg.svd(model.layers[0].weight)[1] + jax.random.normal(key)

    def trained(**layout):
        freeze = lambda step, records: np.arange(7) == 2 if step == 4 else None  # noqa: E731
        options = {"save": Save(observe, at=[0, 4, 9]), "callbacks": [freeze], "layout": Layout(member_map, **layout)}
        return fit(models, make_step(loss, optax.adam(0.1)), Epochs((x, y), 8), num_steps=9, key=key, **options)

    alone, over = trained(mesh=None), trained()
    assert [mesh.size for mesh in meshes] == [3]
    assert same(alone.models, over.models)
    assert same(alone.state.opt_state, over.state.opt_state)
    jax.tree.map(np.testing.assert_array_equal, alone.history, over.history)
    assert np.isnan(over.history.loss[2, 4:]).all()


def test_bmap_lays_single_members_over_devices(three_cores, monkeypatch, key):
    x, shared = jax.random.normal(key, (7, 5, 5)), jnp.eye(5)

    def values(a, b):
        return {"values": jnp.linalg.svd(a + b)[1], "first": jnp.argmax(a)}, None

    over = bmap(values, in_axes=(0, None), batch_size=1)(x, shared)
    monkeypatch.setattr(sharding, "default_mesh", lambda *_: None)
    alone = bmap(values, in_axes=(0, None), batch_size=1)(x, shared)
    assert same(alone, over)
    assert over[0]["values"].shape == (7, 5)
    # Arrays that were put on a device stay there, and so does what is computed of them.
    monkeypatch.undo()
    placed = bmap(values, in_axes=(0, None), batch_size=1)(jax.device_put(x, jax.devices()[1]), np.eye(5))
    assert placed[0]["values"].devices() == {jax.devices()[1]}
    assert np.array_equal(placed[0]["values"], alone[0]["values"])
    assert jax.tree.structure(alone) == jax.tree.structure(over)


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
