"""Several processes on this machine, with CPU collectives: their shares, their files, and what a dead one leaves."""

import io
import os
import pickle
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dissociation import checks, distributed, sharding, shares
from dissociation.figures.command import RunOptions
from dissociation.files import RefusedFile
from dissociation.shares import Share
from dissociation.training import Epochs, Layout, Save, fit, make_step
from dissociation.training import run as run_module
from dissociation.training.chunk import run_chunk

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "tools"))
import together


def digest(said):
    (line,) = {line for each in said for line in each.splitlines() if line.startswith("digest")}
    return line


def test_what_is_given_must_fit_together():
    with pytest.raises(ValueError, match="`address` must be host:port, got 'here'"):
        distributed.initialize("here")
    with pytest.raises(ValueError, match="`process_id` must lie from 0 to 1, got 2"):
        distributed.initialize("127.0.0.1:1", 2, 2)
    with pytest.raises(ValueError, match="`heartbeat` must be at least 5"):
        distributed.initialize("127.0.0.1:1", 2, 1, heartbeat=1)
    jax.devices()
    with pytest.raises(RuntimeError, match=r"initialize\(\) must be called before JAX computes anything"):
        distributed.initialize("127.0.0.1:1", 2, 1)
    assert not distributed.started()
    assert distributed.is_main()
    with pytest.raises(ValueError, match="`distributed` must be given where the address"):
        RunOptions(num_processes=2)


ALONE = """
import sys
from dissociation import distributed
distributed._QUIET = 1
try:
    distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), timeout=3)
except ConnectionError as error:
    sys.stdout.write(f"{error}\\n")
import jax
sys.stdout.write(f"{jax.numpy.ones(3).sum()} {jax.process_count()}")
"""


@pytest.mark.parametrize("index", [0, 1])
def test_who_waits_says_for_whom_and_ends_with_it(index):
    address = f"127.0.0.1:{together.free_port()}"
    began = time.monotonic()
    line = [sys.executable, "-c", ALONE, address, str(index)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=True)
    assert time.monotonic() - began < 60
    listens = "process 0 listens" if index else "it listens"
    whom = f"as process {index} of 2 for the others at {address}, where {listens}"
    assert f"This process waits {whom}: for 3 s at most, 1 of them are over.\n" in done.stderr
    said, computed = done.stdout.splitlines()
    assert said.startswith(f"The processes did not come together: this one has waited 3 s {whom}. Start all of them")
    assert computed == "3.0 1"


def test_who_need_not_wait_says_nothing(caplog):
    distributed._in_time(lambda: None, 300)
    with pytest.raises(OSError, match="the port"):
        distributed._in_time(taken_port, 300)
    assert not caplog.records


def taken_port():
    raise OSError("the port is taken")


def test_alone_nothing_is_exchanged():
    assert distributed.exchange(3) == [3]
    assert distributed.on_main(lambda: distributed.number()) == 1
    doubled = shares.over_processes(lambda x: 2 * x, jnp.arange(3))
    assert doubled.tolist() == [0, 2, 4]
    with pytest.raises(ValueError, match="`stacked` must hold arrays that agree in a leading axis"):
        shares.over_processes(lambda x: x, (jnp.ones(2), jnp.ones(3)))


ARRAYS = [
    np.arange(6, dtype=">i4").reshape(2, 3).T, np.float32(2.5), np.array(["a", "bcd"]), np.zeros((0, 3), bool),
    np.array("2020-01-01", "M8[D]"), jnp.array([0.1, jnp.inf], jnp.bfloat16), np.array(1 - 2j),
]  # fmt: skip


def test_messages_are_arrays_and_json():
    value = {"a": [1, [2.5, None, True, "text", float("inf")], {}], "b": ARRAYS, "c": {"d": [[]]}, "e": 2**70}
    found = distributed._unpacked(distributed._packed(value))
    assert {**found, "b": 0} == {**value, "b": 0}
    for one, other in zip(found["b"], ARRAYS, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, np.shape(other))
        np.testing.assert_array_equal(one, other)
    for wrong in (object(), {1, 2}, b"bytes", np.array([None]), len):
        with pytest.raises(TypeError, match="`value` must hold arrays, numbers and text, got an object of type"):
            distributed._packed([wrong])


class Runs:
    ran = False

    def __reduce__(self):
        return (setattr, (Runs, "ran", True))


class Store:
    """The runtime's store, in which another client has put something in the place of process 1."""

    def __init__(self, message):
        self.message, self.kept = message, {}

    def key_value_set_bytes(self, name, data):
        self.kept[name] = data

    def wait_at_barrier(self, name, timeout):
        self.kept[name.strip() + "/1"] = b"=" + self.message

    def key_value_delete(self, folder):
        self.kept = {name: data for name, data in self.kept.items() if not name.startswith(folder)}

    def key_value_dir_get_bytes(self, folder):
        return [(name, data) for name, data in self.kept.items() if name.startswith(folder)]


def npy_of(value):
    file = io.BytesIO()
    np.savez(file, words=np.array([value], object))
    return file.getvalue()


@pytest.mark.parametrize(
    "message",
    [pickle.dumps(("", False, Runs())), npy_of(Runs()), b"", b"{3}", distributed._packed([1, 2])[:-1]],
    ids=["pickle", "objects", "nothing", "no JSON", "cut"],
)
def test_what_another_client_has_stored_is_not_run(monkeypatch, message):
    monkeypatch.setattr(distributed, "_group", distributed._Group(Store(message), 0, 2, 60.0))
    with pytest.raises(RuntimeError, match="All processes must run one program, got a message not of arrays"):
        distributed.exchange(3)
    assert not Runs.ran
    monkeypatch.setattr(distributed._group, "client", Store(distributed._packed(("", False, 4))))
    assert distributed.exchange(3) == [3, 4]


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (KeyError("name"), KeyError("'name'")),
        (checks.WrongValue("`x` must"), checks.WrongValue("`x` must")),
        (RefusedFile("damaged"), RefusedFile("damaged")),
        (FileNotFoundError(2, "No such file", "/path"), FileNotFoundError("[Errno 2] No such file: '/path'")),
        (UnicodeDecodeError("utf-8", b"a", 0, 1, "why"), RuntimeError("process 0: UnicodeDecodeError: 'utf-8' codec")),
        (pickle.PicklingError("own"), RuntimeError("process 0: PicklingError: own")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_reach_other_processes(error, wanted):
    found = distributed._error_of(type(error).__name__, str(error))
    assert type(found) is type(wanted)
    assert str(found).startswith(str(wanted))


def test_the_coordinator_listens_where_it_was_told_to(monkeypatch):
    called = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **options: called.append((given, options)))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    distributed._start("127.0.0.1:1234", 2, 0, 60, 300)
    assert called[0][0] == ("127.0.0.1:1234", 2, 0)
    assert called[0][1]["coordinator_bind_address"] == "127.0.0.1:1234"


@pytest.mark.parametrize("bounds", [(0, 5), (0, 2, 5), (0, 1, 1, 2), (0, 0, 0, 1)])
def test_shares_make_up_the_whole(bounds):
    """Every process takes one member at least, of which those that are not its own are dropped."""
    members = np.arange(bounds[-1])
    taken = [Share(bounds, i).take(members) for i in range(len(bounds) - 1)]
    assert all(len(own) for own in taken)
    counts = np.diff(bounds)
    np.testing.assert_array_equal(np.concatenate([own[:n] for own, n in zip(taken, counts, strict=True)]), members)
    pieces = [(start, stop) for start, stop in ((0, 1), (1, 3), (3, 5)) if stop <= bounds[-1]]
    for i, own in enumerate(taken):
        cuts = [members[start:stop][cut] for start, stop in pieces if (cut := Share(bounds, i).cut(start, stop))]
        if pieces[-1][1] == bounds[-1]:
            np.testing.assert_array_equal(np.concatenate(cuts), own)


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
    over_members = program_of_a_step(monkeypatch, key, Layout("vmap", mesh=sharding.member_mesh(devices)))
    assert "num_partitions=4" in over_members
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert f" {collective}" not in over_members
    over_data = program_of_a_step(monkeypatch, key, Layout("vmap", mesh=sharding.member_mesh(devices, data=2)))
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

    mesh = sharding.member_mesh(jax.devices("cpu")[:4])
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
        for a, b in zip(one, run(sharding.member_mesh(jax.devices("cpu")[:number])), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_two_processes_share_members_out():
    """Devices of both in one mesh, global arrays, what is large and small between them, errors in both at once."""
    first, second = together.run(2, "maps", devices=2)
    assert "2 of 5; devices 4; from 0" in first
    assert "3 of 5; devices 4; from 0" in second


@pytest.mark.slow
@pytest.mark.parametrize(("what", "said"), [
    ("exchange", "All processes must run the same program, got 'place 0' in process 0 and 'place 1' in 1."),
    ("fit", "`fit` must be called with the same models, hyperparameters, key and steps in all processes"),
])  # fmt: skip
def test_processes_that_do_something_else_are_told(what, said):
    first, second = together.run(2, "mix", f"what={what}")
    assert said in first
    assert "[0, 2, 4]" in first
    assert "[0, 2, 4]" in second


@pytest.mark.slow
@pytest.mark.parametrize("options", [["members=5"], ["members=3", "own=1", "freeze=10", "member_map=unroll"]])
def test_members_do_not_know_how_many_processes_there_are(options):
    """Two and four processes, eight devices in one: the bits of one device."""
    alone = digest(together.run(1, "fit", *options))
    assert digest(together.run(1, "fit", *options, "mesh=1", devices=8)) == alone
    for count in (2, 4):
        said = together.run(count, "fit", *options, devices=2)
        assert digest(said) == alone
        assert all(("record" in each) == (index == 0) for index, each in enumerate(said))  # callbacks in the first one


@pytest.mark.slow
def test_a_mesh_of_all_processes_lays_members_and_data(tmp_path):
    """Members batched, in the program of each process: the same up to rounding."""
    found = []
    for count, more in ((1, []), (2, ["mesh=1"]), (2, ["mesh=1", "data=2"])):
        together.run(count, "fit", "member_map=vmap", f"save={tmp_path}/out.npz", *more, devices=2 if more else 1)
        with np.load(tmp_path / "out.npz") as file:
            found.append(dict(file))
    assert found[0]["loss"].shape == (5, 40)
    for other in found[1:]:
        for name, leaf in found[0].items():
            np.testing.assert_allclose(other[name], leaf, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dead", [1, 0])
def test_a_dead_process_ends_the_others_and_nothing_is_lost(tmp_path, dead):
    """They end within the heartbeats, with a sentence; three processes, and then one, go on where the two stopped."""
    path = tmp_path / "run.ckpt"
    alone = digest(together.run(1, "fit"))
    started = together.start(2, "fit", f"checkpoint={path}", f"die={dead}:20")
    while started[dead].poll() is None:
        time.sleep(0.05)
    began = time.monotonic()
    ended = together.wait(started)
    assert time.monotonic() - began < 4 * together.HEARTBEAT
    assert ended[dead][0] == -signal.SIGKILL
    status, _, said = ended[1 - dead]
    assert status == 1
    why = (
        r"process 1 \(on .*\) has died: nothing was heard of it for" if dead else "process 0, which leads it, has died"
    )
    assert re.search(why, said), said
    assert "Start all processes again: what has a checkpoint goes on from it." in said
    assert len(list(tmp_path.glob("run.ckpt.20.*"))) == 2 or len(list(tmp_path.glob("run.ckpt.15.*"))) == 2
    said = together.run(3, "fit", f"checkpoint={path}", "steps=30")
    assert "record 0 " not in said[0]
    said = together.run(1, "fit", f"checkpoint={path}")
    assert digest(said) == alone
    assert "record 25 " not in said[0]
    assert [file.name for file in tmp_path.glob("*")] == ["run.ckpt"]  # pieces of earlier steps are gone
    assert digest(together.run(2, "fit", f"checkpoint={path}")) == alone


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 1])
def test_who_dies_in_an_exchange_of_devices_is_said_as_well(dead):
    """The devices notice it before the watch does; what they say has no word of advice."""
    started = together.start(2, "lose", f"dead={dead}")
    status, _, said = together.wait(started)[1 - dead]
    assert status == 1
    why = r"process 1 \(on .*\) has died: nothing" if dead else "process 0, which leads it, has died"
    assert re.search(why, said), said
    assert "Start all processes again" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fail=20", "interrupt=20"])
def test_an_error_or_an_interrupt_of_one_ends_all_at_the_same_step(tmp_path, how):
    path = tmp_path / "run.ckpt"
    ended = together.wait(together.start(2, "fit", f"checkpoint={path}", how))
    word = "OSError: the disk of the callback is full" if "fail" in how else "KeyboardInterrupt"
    assert all(status and word in said for status, _, said in ended), ended
    assert len(list(tmp_path.glob("run.ckpt.2[0-9].*"))) == 2
    assert digest(together.run(1, "fit", f"checkpoint={path}")) == digest(together.run(1, "fit"))
