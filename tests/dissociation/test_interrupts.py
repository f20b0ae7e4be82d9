import signal
import subprocess
import sys
import time

import numpy as np
import pytest

INTERRUPTED = """
import signal, sys, time
from dissociation.training import _interrupts as interrupts
interrupts.listen("the program")
kind = sys.argv[1]
if kind == "saving":
    interrupts.begin()
    interrupts.advice = "Saved; the same command goes on."
print("ready", flush=True)
if kind == "again":
    interrupts.begin()
    try:
        time.sleep(30)
    except KeyboardInterrupt:
        signal.raise_signal(signal.SIGTERM)
if kind == "lost":
    interrupts.begin()
    class Deaf:
        def __del__(self):
            time.sleep(0.5)
    held = Deaf()
    del held
if kind == "threads":
    import atexit, os
    interrupts.begin()
    atexit.register(os.abort)
try:
    with interrupts.interruptible():
        interrupts.check()
    time.sleep(30)
except KeyboardInterrupt:
    print("saved")
    if kind == "threads":
        interrupts.end()
    sys.exit(interrupts.status())
"""


@pytest.mark.parametrize(
    ("kind", "said", "number"),
    [
        ("importing", "", signal.SIGINT),
        ("saving", "saved", signal.SIGINT),
        ("saving", "saved", signal.SIGTERM),
        ("threads", "saved", signal.SIGTERM),
        ("again", "", signal.SIGINT),
        ("lost", "saved", signal.SIGTERM),
    ],
)
def test_signals_end_a_program_at_any_moment(kind, said, number):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED, kind], **options) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        began = time.perf_counter()
        process.send_signal(number)
        out, error = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert out.strip() == said
    assert "Traceback" not in error or kind == "lost"  # Python's words on an ignored exception
    assert time.perf_counter() - began < 5
    # A program that ends by itself says so itself.
    assert ("the program: stopped. Nothing had started." in error) == (
        kind not in ("saving", "threads", "lost")
    )


SWEPT = """
import sys
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax
from dissociation import training
from dissociation.training import _run
_run.CHUNK_SECONDS, _run.FIRST_WRITE = 0.001, 0.0
x = np.random.default_rng(0).normal(size=(100, 5)).astype(np.float32)
step = training.make_step(
    lambda model, batch, key: jnp.mean(jax.vmap(model)(batch[0]) ** 2) + 0.01 * jax.random.normal(key),
    lambda values: optax.adam(values["rate"]),
)
result = training.fit_grid(
    lambda key, width: eqx.nn.MLP(5, 1, width, 1, key=key), step, training.Epochs((x,), 10),
    training.Grid(width=[3, 4], rate=[0.1, 0.01], seed=[0]), key=jax.random.key(1), num_epochs=60,
    folder=None if sys.argv[1] == "none" else sys.argv[1], save=training.Save(seconds=1e9), progress=None,
    member_map="scan",
)
np.save(sys.argv[2], result.history.loss)
"""


@pytest.mark.slow
def test_a_sweep_that_is_killed_in_its_second_group_goes_on_bit_for_bit(tmp_path):
    folder = tmp_path / "sweep"

    def command(where, output):
        return [sys.executable, "-c", SWEPT, str(where), str(tmp_path / output)]

    with subprocess.Popen(command(folder, "killed.npy")) as process:
        while process.poll() is None and not (folder / "group-0001.ckpt").exists():
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert (folder / "group-0000.trained").exists()
    assert not (folder / "group-0001.trained").exists()
    subprocess.run(command(folder, "resumed.npy"), check=True)
    subprocess.run(command("none", "whole.npy"), check=True)
    np.testing.assert_array_equal(
        np.load(tmp_path / "whole.npy"), np.load(tmp_path / "resumed.npy")
    )
