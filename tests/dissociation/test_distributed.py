"""Several processes on this machine, with CPU collectives: their members, their files, and the death of one."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dissociation
from dissociation import training
from dissociation.figures._command import RunOptions
from dissociation.training import Epochs, Layout, Save, fit, make_step
from dissociation.training import _checkpoint as checkpoint
from dissociation.training import _distributed as distributed
from dissociation.training import _run as run_module
from dissociation.training._chunk import run_chunk
from dissociation.training._distributed import LocalMembers

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "tools"))
import together


def digest(said):
    (line,) = {line for each in said for line in each.splitlines() if line.startswith("digest")}
    return line


def test_arguments_must_fit_together():
    for arguments in (("127.0.0.1:1",), ("127.0.0.1:1", 2, 2), ("127.0.0.1:1", 0, 0), ("127.0.0.1:1", 2, -1)):
        with pytest.raises(ValueError, match="`address` must be given with `num_processes` and a `process_id` from 0"):
            training.initialize(*arguments)
    jax.devices()
    with pytest.raises(RuntimeError, match=r"initialize\(\) must be called before any JAX calls"):
        training.initialize("127.0.0.1:1", 2, 1)
    with pytest.raises(ValueError, match="`distributed` must be given where the address"):
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


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_waits_in_vain_ends_with_a_sentence(index):
    address = f"127.0.0.1:{together.free_port()}"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", ALONE, address, str(index)], capture_output=True, text=True, timeout=100
    )
    assert time.monotonic() - began < 60
    assert done.returncode == 1
    assert f"ConnectionError: Not all processes came to {address} within 3 s. Start all again." in done.stderr


def test_one_process_has_all_values_and_members():
    assert distributed.all_gather(b"3") == [b"3"]
    assert distributed.all_gather(b"") == [b""]
    assert distributed.all_values({"a": [None, "b"]}) == [{"a": [None, "b"]}]
    assert distributed.on_main(lambda: (1, 2)) == [1, 2]
    with pytest.raises(OSError, match="full"):
        distributed.all_gather(b"", OSError("full"))
    local, members = LocalMembers(3), {"a": jnp.arange(3)}
    assert local.alone
    assert local.gather(local.take(members)) is members


@pytest.mark.parametrize(("total", "count"), [(5, 1), (5, 2), (2, 3), (1, 3)])
def test_local_members_make_up_the_whole(monkeypatch, total, count):
    """Every process takes at least one member; a member that belongs to another process is dropped."""
    members, taken = np.arange(total), []
    monkeypatch.setattr(jax, "process_count", lambda: count)
    for i in range(count):
        monkeypatch.setattr(jax, "process_index", lambda i=i: i)
        taken.append(LocalMembers(total).take(members))
    assert all(len(own) for own in taken)
    sent = []
    monkeypatch.setattr(distributed, "all_gather", lambda data: sent.append(data) or sent)
    for i, own in enumerate(taken):
        monkeypatch.setattr(jax, "process_index", lambda i=i: i)
        with suppress(ValueError):  # until all have sent theirs
            found = LocalMembers(total).gather(own)
    np.testing.assert_array_equal(found, members)


def small(key, members, width=16):
    data = jax.random.normal(key, (64, 8)), jax.random.normal(key, (64, 1))
    weights = jax.random.normal(key, (members, 8, width)), jnp.ones((members, width, 1))

    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jnp.tanh(x @ model[0]) @ model[1] - y) ** 2)

    return weights, make_step(loss, optax.adam(1e-2)), Epochs(data, 16)


def program_of_a_step(monkeypatch, key, layout, members=8):
    """The text of the compiled chunk that `fit` runs."""
    texts = []

    def looked_at(inputs, state):
        texts.append(run_chunk.lower(inputs, state).compile().compiled.as_text())
        return run_chunk(inputs, state)

    monkeypatch.setattr(run_module, "run_chunk", looked_at)
    models, step, sampler = small(key, members)
    fit(models, step, sampler, num_steps=2, key=key, layout=layout)
    return texts[0]


def test_no_parameters_are_gathered_inside_a_step(monkeypatch, key):
    """The compiled program of several devices holds no collective; with batches over two, one sum of gradients."""
    devices = jax.devices("cpu")[:4]
    over_members = program_of_a_step(monkeypatch, key, Layout("vmap", mesh=dissociation.member_mesh(devices)))
    assert "num_partitions=4" in over_members
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert f" {collective}" not in over_members
    over_data = program_of_a_step(monkeypatch, key, Layout("vmap", mesh=dissociation.member_mesh(devices, data=2)))
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
        spread = fit(models, step, sampler, layout=Layout("vmap", mesh=mesh), **options)
    assert [str(w.message).partition(":")[0] for w in warned] == ["member 4"]
    assert set(seen) == {((5,), (5,))}
    assert spread.history.loss.shape == (5, 8)
    assert spread.diverged_at.tolist() == [-1, -1, -1, -1, 0]
    assert {leaf.shape[0] for leaf in jax.tree.leaves(spread.state)} == {5}


def test_members_in_turn_agree_on_any_mesh(key):
    models, step, sampler = small(key, 5)

    def run(mesh):
        result = fit(models, step, sampler, num_epochs=3, key=key, layout=Layout("scan", mesh=mesh))
        return [*jax.tree.leaves(result.state), result.history.loss]

    one = run(None)
    for number in (2, 4):
        for a, b in zip(one, run(dissociation.member_mesh(jax.devices("cpu")[:number])), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_two_processes_have_members_values_and_errors_of_both():
    first, second = together.run(2, "maps", devices=2)
    assert "2 of 5; devices 2" in first
    assert "3 of 5; devices 2" in second


@pytest.mark.slow
def test_other_arguments_in_another_process_are_refused():
    for status, _, said in together.wait(together.start(2, "other")):
        assert status == 1
        assert "`fit` must be called with the same models, hyperparameters, key and steps in all processes" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [["members=5"], ["members=3", "own=1", "freeze=10", "member_map=unroll"], ["member_map=vmap", "mesh=1", "data=2"]],
)
def test_members_do_not_depend_on_the_number_of_processes(tmp_path, options):
    """One, two and four processes: the same up to rounding. Process 0 alone calls the callbacks."""
    found = []
    for count in (1, 2, 4):
        said = together.run(count, "fit", f"save={tmp_path}/out.npz", *options, devices=2)
        assert digest(said)
        assert all(("record" in each) == (index == 0) for index, each in enumerate(said))
        with np.load(tmp_path / "out.npz") as file:
            found.append(dict(file))
    for other in found[1:]:
        for name, leaf in found[0].items():
            np.testing.assert_allclose(other[name], leaf, rtol=1e-3, atol=1e-5)


def steps_of(folder):
    return sorted(checkpoint.read_header(path)["step"] for path in folder.glob("run.ckpt.*"))


@pytest.mark.slow
@pytest.mark.parametrize("dead", [1, 0])
def test_a_process_that_dies_before_its_write_ends_the_others_and_nothing_is_lost(tmp_path, dead):
    """The other process has written step 20, this one has not: both resume from step 15 to the same bits."""
    path = tmp_path / "run.ckpt"
    whole = digest(together.run(2, "fit"))
    started = together.start(2, "fit", f"checkpoint={path}", f"die={dead}:20")
    began = time.monotonic()
    ended = together.wait(started)
    assert time.monotonic() - began < 100
    assert ended[dead][0] == -signal.SIGKILL
    status, _, said = ended[1 - dead]
    if dead:  # the death of process 0 ends the runtime, and with it the others
        assert status == 1
        assert "Start all processes again: they resume from their checkpoints." in said
        assert steps_of(tmp_path)[-1] == 20
    assert status != 0
    said = together.run(2, "fit", f"checkpoint={path}")
    assert digest(said) == whole
    assert "record 10 " not in said[0]
    assert "record 20 " in said[0]
    names = {f"run.ckpt.{i}-of-2{end}" for i in range(2) for end in ("", ".before")}
    assert {file.name for file in tmp_path.glob("*")} == names
    assert digest(together.run(2, "fit", f"checkpoint={path}")) == whole


@pytest.mark.slow
def test_another_number_of_processes_is_refused(tmp_path):
    """The end of process 0 ends the runtime, and may abort the others before they say why."""
    path = tmp_path / "run.ckpt"
    for wrote, others in ((2, (1, 3)), (1, (2,))):
        together.run(wrote, "fit", f"checkpoint={path}", "steps=5")
        for count in others:
            ended = together.wait(together.start(count, "fit", f"checkpoint={path}", "steps=5"))
            assert ended[0][0] == 1
            assert all(status in (1, -signal.SIGABRT) for status, *_ in ended)
            wanted = f"`checkpoint` must be resumed by as many processes as wrote it ({wrote}), got {count}."
            assert all(wanted in said for status, _, said in ended if status == 1)
        for file in tmp_path.glob("*"):
            file.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fail=20", "interrupt=20", "terminate=20"])
def test_an_error_or_a_signal_of_one_stops_all_at_the_same_step(tmp_path, how):
    path = tmp_path / "run.ckpt"
    first, second = together.wait(together.start(2, "fit", f"checkpoint={path}", how))
    words = ("OSError: the disk of the callback is full", "KeyboardInterrupt")
    assert first[0] == (-signal.SIGTERM if "terminate" in how else 130 if "interrupt" in how else 1), first
    assert second[0] != 0
    assert "terminate" in how or words["interrupt" in how] in first[2]
    assert words["fail" not in how] in second[2] or second[0] == -signal.SIGABRT
    steps = [checkpoint.read_header(f"{path}.{i}-of-2")["step"] for i in range(2)]
    assert steps[0] == steps[1] >= 20
    assert digest(together.run(2, "fit", f"checkpoint={path}")) == digest(together.run(2, "fit"))
