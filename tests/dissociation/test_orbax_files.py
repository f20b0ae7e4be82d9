"""Checkpoints by Orbax: what is read is what was written, on other devices too, and runs go on whichever way."""

import os
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from linear_regression import linear_members, noisy_error, regression

from dissociation import checkpoint, files, orbax_files, sharding
from dissociation.sweeps import Grid
from dissociation.training import Epochs, Layout, Save, fit, fit_grid, make_step
from dissociation.training import run as run_module

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "tools"))
import together

DTYPES = ["float32", "bfloat16", "float16", "float64", "int4", "int8", "int32", "uint32", "bool", "complex64"]


def mesh_of(number):
    return sharding.member_mesh(jax.devices("cpu")[:number])


def spread(tree, number):
    return sharding.place_members(tree, mesh_of(number))


def tree(key):
    return {
        "weights": [jax.random.normal(key, (8, 2, 3)), jnp.arange(8, dtype=jnp.int8)],
        "half": jnp.array([0.1, jnp.inf, jnp.nan, -0.0], jnp.bfloat16),
        "numpy": np.arange(3, dtype=np.float64) / 7,
        "key": jax.random.split(key, 2),
        "numbers": (3, 2.5, True),
        "function": jnp.sin,
        "empty": jnp.zeros((0, 4)),
        "scalar": jnp.asarray(3.5),
        "a/b .. é": jnp.arange(4.0),
    }


def bits(leaf):
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return (np.asarray(leaf).tobytes(), leaf.dtype, leaf.shape) if hasattr(leaf, "dtype") else leaf


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert type(a) is type(b)
        assert bits(a) == bits(b)


def shapes(tree):
    """What `restore` needs to know of arrays; other leaves have other values."""

    def other(leaf):
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        if isinstance(leaf, np.ndarray):
            return leaf * 0
        return type(leaf)(0) if isinstance(leaf, int | float) else leaf

    return jax.tree.map(other, tree)


def test_round_trip(key, tmp_path):
    original, path = tree(key), tmp_path / "deep" / "folder"
    orbax_files.save(path, original, {"step": 3})
    assert_same(orbax_files.restore(path, shapes(original)), original)
    assert orbax_files.read_header(path) == {"step": 3}
    assert [each.name for each in path.parent.iterdir()] == ["folder"]
    orbax_files.save(path, {"less": jnp.ones(2)})  # takes the place of the older one
    assert_same(orbax_files.restore(path, {"less": jnp.zeros(2)}), {"less": jnp.ones(2)})
    orbax_files.save(path, {"n": 1})
    assert orbax_files.restore(path, {"n": 0}) == {"n": 1}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_comes_back_on_any_devices(key, tmp_path, dtype):
    with jax.enable_x64(True):
        data = jax.random.bits(key, (8, 3, 16), jnp.uint8)
        if dtype in ("bool", "int4"):
            data = (data % 2).astype(dtype)
        else:  # whatever these bytes are as numbers
            data = jnp.asarray(np.asarray(data).view(jnp.dtype(dtype)))
        data = spread(data, 4)  # on its way XLA may change what stands behind a NaN in bfloat16
        orbax_files.save(tmp_path / "folder", [data])
        for number in (1, 2, 4):
            like = spread(data, number)
            (back,) = orbax_files.restore(tmp_path / "folder", [like])
            assert bits(back) == bits(data)
            assert back.sharding.device_set == like.sharding.device_set
    if dtype == "float64":
        with pytest.raises(files.RefusedFile, match=r"the leaf \[0\] is float64\. Enable JAX's 64 bits"):
            orbax_files.restore(tmp_path / "folder", [jax.ShapeDtypeStruct(data.shape, data.dtype)])


def test_devices_that_cut_or_repeat_rows(key, tmp_path):
    data = jax.random.normal(key, (4, 6))
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("a", "b"))
    for spec in (("a",), ("b", "a"), (None, "b"), (("a", "b"),), ()):
        where = NamedSharding(mesh, PartitionSpec(*spec))
        orbax_files.save(tmp_path / "folder", jax.device_put(data, where))
        for wanted in (where, NamedSharding(mesh, PartitionSpec("a", "b"))):
            like = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=wanted)
            back = orbax_files.restore(tmp_path / "folder", like)
            assert back.sharding == wanted
            assert bits(back) == bits(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {"more": jnp.ones(2)}, r"lacks the leaf \['more'\]"),
        (lambda t: {"numpy": t["numpy"]}, r"holds the leaf \['a/b .. é'\], which `like` lacks \(4 in all\)"),
        (lambda t: {n: leaf for n, leaf in t.items() if n != "key"}, r"holds the leaf \['key'\], which `like` lacks"),
        (lambda t: t | {"half": t["half"][:1]}, r"the leaf \['half'\] has shape \(4,\).*wanted \(1,\)"),
        (lambda t: t | {"half": t["half"].astype(jnp.float16)}, r"\['half'\].*bfloat16, wanted \(4,\) and float16"),
        (lambda t: t | {"half": 3}, r"\['half'\].*wanted \(\) and int"),
        (lambda t: t | {"half": t["key"]}, r"\['half'\].*wanted \(2,\) and key<"),
        (lambda t: t | {"numpy": t["numpy"].astype(np.float32)}, r"\['numpy'\].*float64, wanted \(3,\) and float32"),
        (lambda t: t | {"key": jax.random.key(0)}, r"the leaf \['key'\] is a key"),
        (lambda t: t | {"numbers": (3.0, 2.5, True)}, r"the leaf \['numbers'\]\[0\] is 3, wanted a float"),
    ],
)
def test_misfits_name_the_leaf(key, tmp_path, change, message):
    orbax_files.save(tmp_path / "folder", tree(key))
    with pytest.raises(files.RefusedFile, match=message):
        orbax_files.restore(tmp_path / "folder", change(tree(key)))


def data_files(path):
    return [each for each in (path / orbax_files.ARRAYS).rglob("*") if each.parent.name == "d"]


def test_every_changed_byte_is_noticed(key, tmp_path):
    """Of the arrays, most of which Orbax itself does not notice, and of the header."""
    path, data = tmp_path / "folder", {"a": spread(jax.random.normal(key, (4, 300)), 4), "n": 3}
    orbax_files.save(path, data, {"step": 10})
    noticed = 0
    for file in data_files(path):
        whole = file.read_bytes()
        for at in (0, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            try:
                assert_same(orbax_files.restore(path, data)["a"], data["a"])  # of an older state: not read
            except files.RefusedFile as error:
                assert "is damaged" in str(error)  # noqa: PT017
                noticed += "damaged at the leaf ['a'], row " in str(error)
        file.write_bytes(whole)
    assert noticed >= 2
    rest = path / orbax_files.REST
    whole = rest.read_bytes()
    rest.write_bytes(whole.replace(b'"step": 10', b'"step": 90'))
    with pytest.raises(files.RefusedFile, match="its header cannot be read"):
        orbax_files.read_header(path)
    rest.write_bytes(whole)
    assert_same(orbax_files.restore(path, data), data)


def test_what_is_missing_is_noticed(key, tmp_path):
    path, data = tmp_path / "folder", {"a": jax.random.normal(key, (4, 300))}
    with pytest.raises(FileNotFoundError):
        orbax_files.read_header(path)
    orbax_files.save(path, data)
    for file in data_files(path):
        file.unlink()
    with pytest.raises(files.RefusedFile, match=r"is damaged at the leaf \['a'\]: Orbax cannot read it .* Delete it"):
        orbax_files.restore(path, data)
    (path / orbax_files.REST).unlink()
    with pytest.raises(files.RefusedFile, match="must be a folder of Orbax' arrays and of rest, which is missing"):
        orbax_files.restore(path, data)


@pytest.mark.parametrize("place", ["replace", "rename"])
def test_a_failed_write_leaves_the_old_folder(tmp_path, monkeypatch, place):
    path = tmp_path / "folder"
    orbax_files.save(path, jnp.ones(3), {"step": 1})

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(*((checkpoint.os, "replace") if place == "replace" else (orbax_files.Path, "rename")), full)
    with pytest.raises(OSError, match="disk full"):
        orbax_files.save(path, jnp.zeros(3), {"step": 2})
    monkeypatch.undo()
    assert [each.name for each in tmp_path.iterdir()] in (["folder"], [])
    if place == "replace":
        assert orbax_files.read_header(path) == {"step": 1}


def test_a_full_disk_keeps_the_old_folder(key, small_disk):
    path = small_disk / "folder"
    orbax_files.save(path, jnp.ones(3), {"step": 1})
    with pytest.raises(OSError, match="folder cannot be written: .*No space left on device"):
        orbax_files.save(path, jax.random.normal(key, (4, 25_000)), {"step": 2})
    assert [each.name for each in small_disk.iterdir()] == ["folder"]
    assert orbax_files.read_header(path) == {"step": 1}


def test_without_orbax_there_is_advice(key, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"pip install 'dissociation\[orbax\]'"):
        orbax_files.save(tmp_path / "folder", jnp.ones(3))
    with pytest.raises(ImportError, match=r"pip install 'dissociation\[orbax\]'"):
        training(key, tmp_path / "run", save=Save(orbax=True))
    training(key, tmp_path / "run")


def test_orbax_is_imported_when_it_is_asked_for():
    code = "import sys, dissociation.training.run, dissociation.orbax_files; print('orbax.checkpoint' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def training(key, path, devices=1, orbax=False, until=None, members=8, **options):
    """Thirty steps, or an interrupt after `until` of them; batched on several devices, where a CPU has threads else."""

    def interrupt(step, records):
        if step == until:
            raise KeyboardInterrupt

    save = Save(lambda m, s, k: jax.random.normal(k) + m.weight, range(0, 31, 5), orbax=orbax)
    layout = Layout("scan") if devices == 1 else Layout("vmap", mesh=mesh_of(devices))
    options = {"save": save, "callbacks": [interrupt], "num_steps": 30, "layout": layout, **options}
    models, sampler = linear_members(key, members), Epochs(regression(key, samples=30), 4)
    return fit(models, make_step(noisy_error, optax.adam(0.05)), sampler, key=key, checkpoint=path, **options)


def same_run(first, second):
    jax.tree.map(np.testing.assert_array_equal, first.state, second.state)
    jax.tree.map(np.testing.assert_array_equal, first.history, second.history)


def interrupted(key, path, **options):
    with pytest.raises(KeyboardInterrupt):
        training(key, path, until=15, **options)
    return sorted(each.name for each in path.parent.iterdir())


WAYS = [
    ((4, True), (4, True)), ((4, True), (4, False)), ((4, False), (4, True)), ((1, True), (1, True)),
    ((4, True), (2, True)), ((2, True), (4, True)), ((4, True), (3, True)), ((4, True), (1, True)),
    ((1, True), (4, True)), ((1, False), (2, True)),
]  # fmt: skip


@pytest.mark.parametrize("members", [8, 5])
@pytest.mark.parametrize(("first", "then"), WAYS, ids=str)
def test_a_run_goes_on_bit_for_bit(key, tmp_path, members, first, then):
    """On other devices, by the other kind of file, where devices divide the members or not."""
    path = tmp_path / "orbax" / "run"
    kept = interrupted(key, path, devices=first[0], orbax=first[1], members=members)
    assert kept == (["run", f"run.15.0-{members}"] if first[1] else ["run"])
    resumed = training(key, path, *then, members=members)
    kept = sorted(each.name for each in path.parent.iterdir())
    assert kept == (["run", f"run.30.0-{members}"] if then[1] else ["run"])  # the older is gone
    plain = None
    if first[0] != then[0]:  # a batch of other size may round otherwise: the plain file changes devices as well
        plain = tmp_path / "plain" / "run"
        interrupted(key, plain, devices=first[0], members=members)
    same_run(resumed, training(key, plain, then[0], members=members))


def test_nothing_is_put_together_on_one_device(key, tmp_path, monkeypatch):
    """Orbax gets the states as they lie, padding included, and a run goes on with arrays that lie as before."""
    given, taken = [], []

    def save(path, tree, header, save=orbax_files.save):
        given.append(tree)
        save(path, tree, header)

    def restore(path, like, restore=orbax_files.restore):
        taken.append(restore(path, like))
        return taken[-1]

    monkeypatch.setattr(orbax_files, "save", save)
    monkeypatch.setattr(orbax_files, "restore", restore)
    monkeypatch.setattr(run_module.Run, "whole_state", None)
    mesh = Mesh(np.reshape(jax.devices("cpu")[:4], (4, 1)), ("members", "data"))
    for member_map in ("scan", "unroll", "vmap"):
        options = {"orbax": True, "members": 5, "layout": Layout(member_map, mesh=mesh)}
        interrupted(key, tmp_path / member_map, **options)
        with pytest.raises(TypeError, match="'NoneType' object is not callable"):  # at its very end, for the result
            training(key, tmp_path / member_map, **options)
    assert len(given) == 6
    assert len(taken) == 3
    for leaf in jax.tree.leaves([*given, *taken]):
        assert len(leaf.sharding.device_set) == 4
        assert not leaf.sharding.is_fully_replicated


def test_what_is_committed_is_not_written_again(key, tmp_path):
    """A write of the same step would have to remove it first: killed at that moment the run would be lost."""
    path = tmp_path / "run"
    whole = training(key, path, 4, True)
    piece = tmp_path / "run.30.0-8"
    before = {each: each.stat().st_ino for each in [piece, *piece.rglob("*")]}
    same_run(training(key, path, 2, True), whole)
    assert {each: each.stat().st_ino for each in [piece, *piece.rglob("*")]} == before
    same_run(training(key, path, 2, False), whole)
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_what_another_program_takes_over_is_its_own(key, tmp_path):
    """Told that it is the same program, at the very step at which the other one ended."""
    path, changed = tmp_path / "run", Save(lambda m, s, k: 2 * jax.random.normal(k) + m.weight, [0, 30], orbax=True)
    training(key, path, 4, True)
    first = training(key, path, 4, save=changed, same_program=True)
    same_run(first, training(key, path, 4, save=changed))


def test_what_a_killed_write_left_is_removed(key, tmp_path):
    path, left = tmp_path / "run", (".run.15.0-8.0123abcd.tmp", "run.20.0-8", "run.15.0-4")
    for name in left:
        (tmp_path / name / "arrays").mkdir(parents=True)
    for name in ("run.20.0-8.csv", "other.20.0-8", ".other.15.0-8.0123abcd.tmp"):
        (tmp_path / name).touch()
    training(key, path, 4, True)
    kept = {each.name for each in tmp_path.iterdir()}
    assert kept == {"run", "run.30.0-8", "run.20.0-8.csv", "other.20.0-8", ".other.15.0-8.0123abcd.tmp"}


def test_a_damaged_or_foreign_piece_is_refused(key, tmp_path):
    path = tmp_path / "run"
    interrupted(key, path, devices=4, orbax=True)
    piece = tmp_path / "run.15.0-8"
    written = {each: each.read_bytes() for each in data_files(piece)}
    for file, whole in written.items():
        at = len(whole) // 2
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(files.RefusedFile, match="run.15.0-8 is damaged"):
        training(key, path, 4, True)
    for file, whole in written.items():
        file.write_bytes(whole)
    orbax_files.save(piece, [1], {"run": "another", "step": 15})
    with pytest.raises(files.RefusedFile, match=r"run.15.0-8 must hold members 0 to 7 of .*run\. Delete both"):
        training(key, path, 4, True)


def test_a_sweep_takes_the_option_and_begins_afresh(tmp_path):
    """Its groups keep folders, which are set aside with the rest."""
    data = jnp.ones((8, 3)), jnp.ones((8, 1))

    def swept(folder, **options):
        def init(key, width):
            return eqx.nn.MLP(3, 1, width, 1, key=key)

        def loss(model, batch, key):
            return jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)

        step, grid = make_step(loss, optax.sgd(0.1)), Grid(width=[2, 3], seed=[0, 1])
        options = {"key": jax.random.key(1), "num_steps": 4, "folder": folder, "progress": None, **options}
        return fit_grid(init, step, Epochs(data, 4), grid, **options)

    first = swept(tmp_path, save=Save(orbax=True))
    assert all((tmp_path / f"group-000{group}.ckpt.4.0-2").is_dir() for group in range(2))
    again = swept(tmp_path, save=Save(orbax=True), fresh=True)
    assert len(list(tmp_path.glob("*/group-*.ckpt.4.0-2"))) == 2
    plain = swept(None)
    for other in (again, plain):
        np.testing.assert_array_equal(first.history.loss, other.history.loss)


def test_the_option_is_checked(key, tmp_path):
    with pytest.raises(TypeError, match="`save` must have True or False as `orbax`, got 'yes'"):
        training(key, None, save=Save(orbax="yes"))


def digest(said):
    (line,) = {line for each in said for line in each.splitlines() if line.startswith("digest")}
    return line


@pytest.mark.slow
def test_two_processes_write_and_one_goes_on(tmp_path):
    """Each writes a folder alone; three go on, one with the plain file, and two with folders again."""
    path, alone = tmp_path / "run.ckpt", digest(together.run(1, "fit"))
    ended = together.wait(together.start(2, "fit", f"checkpoint={path}", "orbax=1", "fail=20"))
    assert all(status and "the disk of the callback is full" in said for status, _, said in ended), ended
    assert len([each for each in tmp_path.glob("run.ckpt.20.*") if each.is_dir()]) == 2
    said = together.run(3, "fit", f"checkpoint={path}", "steps=30", "orbax=1")
    assert "record 0 " not in said[0]
    pieces = list(tmp_path.glob("run.ckpt.*"))
    assert len(pieces) == 3
    assert all(each.is_dir() for each in pieces)
    assert digest(together.run(1, "fit", f"checkpoint={path}")) == alone
    assert [each.name for each in tmp_path.iterdir()] == ["run.ckpt"]
    assert digest(together.run(2, "fit", f"checkpoint={path}", "orbax=1")) == alone


@pytest.mark.slow
def test_each_of_two_processes_writes_from_two_devices(tmp_path):
    """Of five members, batched, with padding."""
    path, options = tmp_path / "run.ckpt", ["mesh=1", "member_map=vmap"]
    whole = digest(together.run(2, "fit", *options, devices=2))
    options += [f"checkpoint={path}", "orbax=1"]
    ended = together.wait(together.start(2, "fit", *options, "fail=20", devices=2))
    assert all("the disk of the callback is full" in said for _, _, said in ended), ended
    said = together.run(2, "fit", *options, devices=2)
    assert "record 20 " not in said[0]
    assert digest(said) == whole
