"""Several processes on this machine, with CPU collectives: their members, their files, and the death of one."""

import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import together

import dissociation
from dissociation import training
from dissociation.figures._command import RunOptions
from dissociation.training import Epochs, Save, fit, make_step
from dissociation.training import _checkpoint as checkpoint
from dissociation.training import _distributed as distributed
from dissociation.training import _run as run_module
from dissociation.training._chunk import run_chunk


def test_arguments_must_fit_together():
    for arguments in (("127.0.0.1:1",), ("127.0.0.1:1", 2, 2)):
        with pytest.raises(ValueError, match="`address` must be given with `num_processes` and a `process_id` from 0"):
            training.initialize(*arguments)
    jax.devices()
    with pytest.raises(RuntimeError, match=r"initialize\(\) must be called before any JAX calls"):
        training.initialize("127.0.0.1:1", 2, 1)
    with pytest.raises(ValueError, match="`distributed` must be given with the address"):
        RunOptions(num_processes=2)


def test_the_coordinator_listens_at_its_address_alone(monkeypatch):
    called = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **options: called.append((given, options)))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(distributed, "_joined", SimpleNamespace(set=lambda: None))
    training.initialize("127.0.0.1:1234", 2, 0)
    assert called[0][0] == ("127.0.0.1:1234", 2, 0)
    assert called[0][1]["coordinator_bind_address"] == "127.0.0.1:1234"


ALONE = """
import sys
from dissociation.training import _distributed as distributed
distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), timeout=3)
"""


def test_processes_that_wait_in_vain_end_with_a_sentence():
    began, started = time.monotonic(), []
    for index in (0, 1):
        address = f"127.0.0.1:{together.free_port()}"
        words = [sys.executable, "-c", ALONE, address, str(index)]
        started.append((address, subprocess.Popen(words, stderr=subprocess.PIPE, text=True)))
    for address, process in started:
        ((status, _, said),) = together.wait([process], timeout=100)
        assert status == 1
        assert f"ConnectionError: Not all processes came to {address} within 3 s. Start all again." in said
    assert time.monotonic() - began < 60


def small(key, members, width=16):
    data = jax.random.normal(key, (64, 8)), jax.random.normal(key, (64, 1))
    weights = jax.random.normal(key, (members, 8, width)), jnp.ones((members, width, 1))

    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jnp.tanh(x @ model[0]) @ model[1] - y) ** 2)

    return weights, make_step(loss, optax.adam(1e-2)), Epochs(data, 16)


def program_of_a_step(monkeypatch, key, mesh, members=8):
    """The text of the compiled chunk that `fit` runs."""
    texts = []

    def looked_at(inputs, state):
        texts.append(run_chunk.lower(inputs, state).compile().compiled.as_text())
        return run_chunk(inputs, state)

    monkeypatch.setattr(run_module, "run_chunk", looked_at)
    models, step, sampler = small(key, members)
    fit(models, step, sampler, num_steps=2, key=key, member_map="vmap", mesh=mesh)
    return texts[0]


@pytest.mark.slow
def test_no_parameters_are_gathered_inside_a_step(monkeypatch, key):
    """The compiled program of several devices holds no collective; with batches over two, one sum of gradients."""
    devices = jax.devices("cpu")[:4]
    over_members = program_of_a_step(monkeypatch, key, dissociation.member_mesh(devices))
    assert "num_partitions=4" in over_members
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert f" {collective}" not in over_members
    over_data = program_of_a_step(monkeypatch, key, dissociation.member_mesh(devices, data=2))
    assert " all-reduce" in over_data
    gathered = [line for line in over_data.splitlines() if " all-gather" in line]
    assert not any("[2,8,16]" in line or "[4,8,16]" in line for line in gathered)


def test_padding_reaches_no_result(key):
    """Five members on four devices are eight, the last of which repeats: what it says is said once."""
    models, step, sampler = small(key, 5)
    models = models[0], models[1].at[4, 0, 0].set(jnp.nan)
    seen = []

    def look(step, records):
        seen.append(jax.tree.map(np.shape, (records["loss"], records["observed"])))

    mesh = dissociation.member_mesh(jax.devices("cpu")[:4])
    save = Save(lambda model, step, key: jnp.sum(model[0]))
    options = {"num_epochs": 2, "key": key, "save": save, "callbacks": [look]}
    with pytest.warns(RuntimeWarning, match="the loss became nan") as warned:
        spread = fit(models, step, sampler, member_map="vmap", mesh=mesh, **options)
    assert [str(w.message).partition(":")[0] for w in warned] == ["member 4"]
    assert set(seen) == {((5,), (5,))}
    assert spread.history.loss.shape == (5, 8)
    assert spread.diverged_at.tolist() == [-1, -1, -1, -1, 0]
    assert {leaf.shape[0] for leaf in jax.tree.leaves(spread.state)} == {5}


@pytest.mark.slow
def test_two_processes_have_members_values_and_errors_of_both(tmp_path):
    """Arguments that differ, and a checkpoint of one process, are refused in both."""
    path = f"checkpoint={tmp_path}/run.ckpt"
    together.fit({"checkpoint": f"{tmp_path}/run.ckpt", "steps": "5"})
    first, second = together.run(2, "maps", path, devices=2)
    assert "2 of 5; devices 2" in first
    assert "3 of 5; devices 2" in second


OPTIONS = (
    {"members": "5"},
    {"members": "3", "own": "1", "freeze": "10", "member_map": "unroll"},
    {"member_map": "vmap", "data": "2"},
)


def outcomes(said):
    """For each run of a process, what it printed and its digest."""
    return re.findall(r"(.*?)^digest (\S+)$", said, re.MULTILINE | re.DOTALL)


@pytest.mark.full
def test_members_do_not_depend_on_the_number_of_processes(tmp_path):
    """One and four processes: the same up to rounding. Process 0 alone calls the callbacks."""
    words = []
    for i, options in enumerate(OPTIONS):
        together.fit(options | {"save": f"{tmp_path}/one-{i}.npz"})
        words += ["then", f"save={tmp_path}/four-{i}.npz", *(f"{name}={value}" for name, value in options.items())]
    said = together.run(4, "fit", *words, devices=2)
    for i in range(len(OPTIONS)):
        assert len({outcomes(each)[i][1] for each in said}) == 1
        assert ["record" in outcomes(each)[i][0] for each in said] == [True, False, False, False]
        with np.load(tmp_path / f"one-{i}.npz") as one, np.load(tmp_path / f"four-{i}.npz") as four:
            for name, leaf in one.items():
                np.testing.assert_allclose(four[name], leaf, rtol=1e-3, atol=1e-5)


ENDS = ("fail=20", "interrupt=20", "terminate=20", "die=0:20", "die=1:20")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Runs of two processes that end at step 20 in each way, and their resumption after a whole run."""
    folder, ended, steps = tmp_path_factory.mktemp("stopped"), [], []
    paths = [folder / f"{i}" / "run.ckpt" for i in range(len(ENDS))]
    for how, path in zip(ENDS, paths, strict=True):
        path.parent.mkdir()
        began = time.monotonic()
        ended.append(together.wait(together.start(2, "fit", f"checkpoint={path}", how)))
        assert time.monotonic() - began < 100
        files = {file.name: checkpoint.read_header(file)["step"] for file in path.parent.glob("run.ckpt.*")}
        steps.append(files)
    words = [word for path in [*paths, paths[-1]] for word in ("then", f"checkpoint={path}")]
    whole, *resumed = zip(*map(outcomes, together.run(2, "fit", "steps=40", *words)), strict=True)
    return paths, ended, steps, whole, resumed


@pytest.mark.full
def test_stopped_runs_resume_to_the_same_bits_and_finished_ones_are_read(stopped):
    paths, _, _, whole, resumed = stopped
    assert {digest for runs in (whole, *resumed) for _, digest in runs} == {whole[0][1]}
    for path, ((printed, _), _) in zip(paths, resumed, strict=False):
        assert "record 10 " not in printed
        assert "record 20 " in printed or "die" not in ENDS[int(path.parent.name)]
        names = {f"run.ckpt.{i}-of-2{end}" for i in range(2) for end in ("", ".before")}
        assert {file.name for file in path.parent.glob("*")} == names
    with pytest.raises(ValueError, match=r"`checkpoint` must be resumed by as many processes as .* \(2\), got 1\."):
        together.fit({"checkpoint": str(paths[0])})


@pytest.mark.full
@pytest.mark.parametrize("dead", [0, 1])
def test_a_process_that_dies_before_its_write_ends_the_others(stopped, dead):
    """The other process has written step 20, this one has not."""
    _, ended, steps, *_ = stopped
    ended, steps = ended[3 + dead], steps[3 + dead]
    assert ended[dead][0] == -signal.SIGKILL
    status, _, said = ended[1 - dead]
    if dead:  # the death of process 0 ends the runtime, and with it the others
        assert status == 1
        assert "Start all processes again: they resume from their checkpoints." in said
        assert max(steps.values()) == 20
    assert status != 0


@pytest.mark.full
@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_error_or_a_signal_of_one_stops_all_at_the_same_step(stopped, index):
    how, (first, second), steps = ENDS[index], stopped[1][index], stopped[2][index]
    words = ("OSError: the disk of the callback is full", "KeyboardInterrupt")
    assert first[0] == (-signal.SIGTERM if "terminate" in how else 130 if "interrupt" in how else 1), first
    assert second[0] != 0
    assert "terminate" in how or words["interrupt" in how] in first[2]
    assert words["fail" not in how] in second[2] or second[0] == -signal.SIGABRT
    assert steps["run.ckpt.0-of-2"] == steps["run.ckpt.1-of-2"] >= 20
