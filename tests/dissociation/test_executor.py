"""Groups of sweeps trained by workers: the same bits as here, whatever happens to a worker."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dissociation.training import Epochs, Grid, Save, fit_grid, make_step
from dissociation.training import _executor as module
from dissociation.training._plan import _largest_group

GRID = Grid(width=[3, 4], rate=[0.1, 0.01], seed=[0, 1])


def sweep(shift=0.5, width_factor=1, wrong=False):
    """Return arguments of `fit_grid`, whose functions are closures."""
    x = jax.random.normal(jax.random.key(3), (20, 5))

    def init(key, width):
        return eqx.nn.MLP(5, 1, width * width_factor, 1, key=key)

    def loss(model, batch, key):
        return jnp.mean((jax.vmap(model)(batch[0]) - shift) ** 2)

    def optimizer(values):
        if wrong and isinstance(values["rate"], jax.core.Tracer):
            raise ArithmeticError("no such rate")
        return optax.sgd(values["rate"])

    return init, make_step(loss, optimizer), Epochs((x,), 10), GRID


def trained(folder=None, num_epochs=4, arguments=None, **options):
    observed = Save(
        lambda model, step, key: jnp.sum(model.layers[0].weight),
        at=[0, 2 * num_epochs],
        seconds=0.1,
    )
    given = {
        "key": jax.random.key(0),
        "num_epochs": num_epochs,
        "save": observed,
        "progress": None,
    } | options
    return fit_grid(*(sweep() if arguments is None else arguments), folder=folder, **given)


def assert_equal(one, other):
    assert one.plan.groups == other.plan.groups
    for half in (np.arange(4), np.arange(4, 8)):
        for leaf, same in zip(
            *(
                jax.tree.leaves(eqx.filter(found.models_of(half), eqx.is_array))
                for found in (one, other)
            ),
            strict=True,
        ):
            np.testing.assert_array_equal(leaf, same)
    np.testing.assert_array_equal(one.history.loss, other.history.loss)
    np.testing.assert_array_equal(one.history.observed, other.history.observed)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("plain"), num_groups=4)


def test_threads_return_the_same_bits(plain, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        found = trained(tmp_path, num_groups=4, executor=pool)
    assert_equal(plain, found)
    assert not [*tmp_path.glob("tasks*"), *tmp_path.glob("*.steps")]
    assert_equal(plain, trained(tmp_path))  # the stored plan, without an executor
    with pytest.raises(
        ValueError, match=r"`folder` must have a plan of at least 5 groups, got .* of 4. Leave out"
    ):
        trained(tmp_path, num_groups=5)


class Lossy:
    """Executor that loses all tasks, or refuses them."""

    def __init__(self, refuses):
        self.refuses = refuses

    def submit(self, function, *arguments):
        if self.refuses:
            raise OSError("no workers")
        future = Future()
        future.set_exception(ConnectionError("worker ended"))
        return future


@pytest.mark.parametrize("refuses", [True, False])
def test_groups_that_are_lost_are_trained_here(plain, tmp_path, refuses):
    with pytest.warns(
        RuntimeWarning, match="`executor` took no task" if refuses else "`executor` lost a task"
    ):
        found = trained(tmp_path, num_groups=4, executor=Lossy(refuses))
    assert_equal(plain, found)


def test_errors_of_training_are_raised_with_their_members(tmp_path):
    with ThreadPoolExecutor(1) as pool:
        trained(tmp_path, num_groups=2, arguments=sweep())  # the plan
        for path in tmp_path.glob("group-0001*"):
            path.unlink()
        with pytest.raises(RuntimeError, match=r"(?s)for\nmembers \(4, 5, 6, 7\):.*no such rate"):
            trained(tmp_path, arguments=sweep(wrong=True), executor=pool)


def test_tasks_compare_versions_and_take_settings(tmp_path, monkeypatch):
    with module.submitting(None, tmp_path, ("contents",)) as tasks:
        assert module._read(tasks.path, tasks.digest) == ("contents",)
        plan, error = module.run_task(tasks.path, "another digest", 0)
        assert plan is None
        assert "was written anew since this task was submitted" in error
        monkeypatch.setattr(module, "PACKAGES", ("no_such_package",))
        assert "no_such_package" in module.run_task(tasks.path, tasks.digest, 0)[1]
        monkeypatch.undo()
        monkeypatch.setattr(module.platform, "python_version", lambda: "3.0")
        with pytest.raises(
            RuntimeError, match=r"must have Python 3\.1\d.*, as the caller of fit_grid, got 3.0"
        ):
            module._read(tasks.path, tasks.digest)
    assert not tasks.path.exists()


def test_wrong_calls(tmp_path):
    with pytest.raises(ValueError, match="`folder` must be given with `executor`"):
        trained(executor=Lossy(True))
    with pytest.raises(TypeError, match='`mesh` must be None or "auto" with `executor`'):
        trained(
            tmp_path, executor=Lossy(True), mesh=jax.sharding.Mesh(jax.devices()[:1], "members")
        )
    with pytest.raises(
        ValueError, match="`num_groups` must be at most the number of members, 8, got 9"
    ):
        trained(tmp_path, num_groups=9)
    with pytest.raises(ValueError, match="`num_groups` must be at least 1"):
        trained(tmp_path, num_groups=0)


def test_without_the_extra_the_error_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(
        ImportError,
        match=r"cloudpickle must be installed for `executor`: pip install 'dissociation\[executor\]'",
    ):
        trained(tmp_path, executor=Lossy(True))


@pytest.mark.parametrize(
    ("counts", "wanted"), [([8], 1), ([8], 3), ([8], 8), ([5, 2], 3), ([5, 2], 7), ([1, 9], 4)]
)
def test_groups_are_as_large_as_their_number_allows(counts, wanted):
    size = _largest_group(counts, wanted)
    number = [sum(-(-count // size) for count in counts) for size in (size, size + 1)]
    assert number[0] >= wanted
    assert size == max(counts) or number[1] < wanted


@pytest.mark.slow
def test_a_worker_of_dask_is_killed(tmp_path):
    distributed = pytest.importorskip("distributed")
    epochs = 3000
    here = trained(tmp_path / "here", epochs, num_groups=4)
    where = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    with distributed.LocalCluster(**where) as cluster, distributed.Client(cluster) as client:
        victim = next(iter(client.run(os.getpid).values()))

        def kill():
            while not [*(tmp_path / "there").glob("*.ckpt")]:
                time.sleep(0.05)
            os.kill(victim, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        executor = client.get_executor(pure=False)
        found = trained(tmp_path / "there", epochs, num_groups=4, executor=executor)
        killer.join(60)
        assert victim not in client.run(os.getpid).values()
    assert_equal(here, found)


@pytest.mark.full
def test_a_pool_loses_a_worker_under_other_settings(tmp_path):
    """The pool is broken afterwards; the driver has x64, which new processes have not."""
    with jax.enable_x64(True):
        here = trained(tmp_path / "here", 2000, num_groups=4)
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:

            def kill():
                while not [*(tmp_path / "there").glob("*.ckpt")]:
                    time.sleep(0.05)
                os.kill(next(iter(pool._processes)), signal.SIGKILL)

            killer = threading.Thread(target=kill)
            killer.start()
            with pytest.warns(RuntimeWarning, match="`executor` lost a task"):
                found = trained(tmp_path / "there", 2000, num_groups=4, executor=pool)
            killer.join(60)
        assert here.history.loss.dtype == np.float64
        assert_equal(here, found)


@pytest.mark.full
def test_large_models(tmp_path):
    large = sweep(width_factor=600_000)  # 50 MB and more
    here = trained(tmp_path / "here", 1, large, num_groups=8)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert_equal(here, trained(tmp_path / "there", 1, large, num_groups=8, executor=pool))


DRIVER = """
import multiprocessing, sys
sys.path.insert(0, {tests!r})
from concurrent.futures import ProcessPoolExecutor
from test_executor import trained
if __name__ == "__main__":
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        trained({folder!r}, 3000, num_groups=4, executor=pool)
"""


@pytest.mark.full
def test_the_driver_is_killed_and_called_again(tmp_path):
    script, folder = tmp_path / "driver.py", tmp_path / "there"
    script.write_text(DRIVER.format(tests=str(Path(__file__).parent), folder=str(folder)))
    driver = subprocess.Popen([sys.executable, script])
    while not [*folder.glob("*.ckpt")]:
        assert driver.poll() is None
        time.sleep(0.05)
    driver.kill()
    driver.wait()
    with ThreadPoolExecutor(2) as pool:  # workers of the killed driver may still train
        found = trained(folder, 3000, executor=pool)
    assert_equal(trained(tmp_path / "here", 3000, num_groups=4), found)
