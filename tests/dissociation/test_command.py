"""The command line on a figure that costs nothing: what it says, what lies on disk, and what kills leave."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from dissociation import __main__ as program
from dissociation import figures, load_results
from dissociation.figures import _command as command

TOY = Path(__file__).with_name("toy_figure.py")
ROOT = TOY.parents[2]


@pytest.fixture(scope="module")
def toy():
    spec = importlib.util.spec_from_file_location("toy_figure", TOY)
    module = importlib.util.module_from_spec(spec)
    sys.modules["toy_figure"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["toy_figure"]


@pytest.fixture
def run(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "cache_folder", lambda: tmp_path / "cache")

    def run(*words, out=None):
        place = ["--out", str(tmp_path / "out" if out is None else out)]
        return status_of(toy, ["toy", *map(str, words), *place])

    return run


def status_of(toy, arguments):
    try:
        return figures.run_command({"toy": toy}, arguments, program="toy", description="Toys.")
    except SystemExit as end:
        return end.code


def unframed(printed):
    """What tyro prints in a box, without the box and in one line."""
    return " ".join(re.sub("[\u2500-\u257f]|-{3,}", " ", printed).split())


def one_line(capsys):
    """The error that was printed: one line, after the one that says that the run compiles."""
    error = capsys.readouterr().err.removeprefix("toy: compiling\n")
    assert error.count("\n") == 1
    return error


def folders(out):
    return sorted(path for path in out.iterdir() if path.is_dir())


def contents(folder):
    with np.load(folder / "toy.npz") as file:
        return {name: file[name] for name in file}


def test_a_run_has_a_folder_of_its_own(run, toy, tmp_path, monkeypatch, capsys):
    for words in ((), ("--seed", 4), ("--quick", "--num-seeds", 3)):
        assert run(*words) == 0
    found = folders(tmp_path / "out")
    assert {path.name.rsplit("_", 1)[0] for path in found} == {
        "toy",
        "toy_seed-4",
        "toy_quick_num_seeds-3",
    }
    for folder in found:
        names = {path.name for path in folder.iterdir()}
        made = {"toy.json", "toy.npz", "toy.pdf", "toy.png", "report.html"}
        assert names == made | {"parts", "run.json", "log.txt"}
        assert str(folder) in capsys.readouterr().out or folder != found[0]
    shapes = {path.name.rsplit("_", 1)[0]: contents(path)["part0"].shape for path in found}
    assert shapes["toy_quick_num_seeds-3"] == (
        3,
        2,
    )  # what is given holds, the rest is a rehearsal's
    real = toy.source
    monkeypatch.setattr(toy, "source", lambda config: real(config) + 1)
    assert run() == 0
    assert len(folders(tmp_path / "out")) == 4  # other data are another run


def test_the_files_hold_the_dataset(run, toy, tmp_path):
    run()
    (folder,) = folders(tmp_path / "out")
    found = load_results(folder / "toy.npz")
    assert found.part2.dims == ("seeds", "steps")
    description = json.loads((folder / "toy.json").read_text())
    assert description["axes"]["part2"] == ["seeds", "steps"]
    assert description["config"] == {"num_seeds": 3, "num_steps": 4, "gate": ""}
    assert description["nan"] is None
    assert toy.caption(found) == "A line (a) of 3 parts."  # which is as good as what was computed
    assert len(toy.draw(found).artists) == 1


def test_the_report_says_how_the_run_was_made(run, toy, tmp_path, monkeypatch, capsys):
    assert run("--quick", "--seed", 4) == 0
    (folder,) = folders(tmp_path / "out")
    page = (folder / "report.html").read_text()
    assert f"<td>python -m toy toy --quick --seed 4 --out {tmp_path / 'out'}</td>" in page
    settings = '<th scope="row">num_seeds</th><td>2', '<th scope="row">seed</th><td>4'
    for words in (
        *settings,
        "<figcaption>A line (a) of 3 parts.</figcaption>",
        "peak on host (MiB)",
        "devices",
    ):
        assert words in page, words
    said = capsys.readouterr().out
    assert "a toy\n\npart  mean" in said
    assert "A line (a) of 3 parts." in said
    monkeypatch.setattr(toy, "NETWORK", {"weights": np.arange(3)})
    assert run("--quick", "--seed", 4) == 0
    assert "<h2>one of the networks</h2>" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "first"),
    [(["robustness"], "dissociation robustness: importing JAX\n"), (["robustness", "--silent"], "")]
    + [(words, "") for words in ([], ["--version"], ["--help"], ["robustness", "--help"])],
)
def test_the_first_line_comes_before_the_imports(monkeypatch, capsys, words, first):
    monkeypatch.setattr(sys, "argv", ["dissociation", *words])
    monkeypatch.setattr(program.interrupts, "listen", Mock())
    monkeypatch.setattr(program.importlib, "import_module", Mock(side_effect=ImportError))
    with pytest.raises(ImportError):
        program.main()
    assert capsys.readouterr().err == first


def test_a_run_says_that_it_compiles_before_it_draws_data(run, toy, monkeypatch, capsys):
    written, source = [], toy.source

    def observed(config):
        written.append(capsys.readouterr().err)
        return source(config)

    monkeypatch.setattr(toy, "source", observed)
    assert run() == 0
    capsys.readouterr()
    assert run("--silent") == 0
    assert written == ["toy: compiling\n", ""]


def test_the_same_command_goes_on(run, toy, tmp_path, monkeypatch, capsys):
    real, done = toy._part, []

    def part(config, key, i):
        if i == 1 and len(done) == 1:
            done.append("interrupt")
            raise KeyboardInterrupt
        done.append(i)
        return real(config, key, i)

    monkeypatch.setattr(toy, "_part", part)
    assert run() == 130
    said = capsys.readouterr().err
    assert "The same command resumes" in said
    (folder,) = folders(tmp_path / "out")
    assert str(folder / "parts") in said
    assert run("--resume") == 0
    assert done == [0, "interrupt", 1, 2]
    assert run() == 0
    assert done == [0, "interrupt", 1, 2]
    assert "Resuming in" in capsys.readouterr().err
    first = contents(folder)
    assert run("--fresh") == 0
    assert done[4:] == [0, 1, 2]
    assert (folder / "parts-before-1" / "part0.npz").exists()  # by mistake: nothing is lost
    assert run("--fresh") == 0
    assert (folder / "parts-before-2" / "part0.npz").exists()
    assert (
        "--fresh" not in json.loads((folder / "run.json").read_text())["command"]
    )  # which is to go on
    for name, array in contents(folder).items():
        np.testing.assert_array_equal(array, first[name])


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("--num-seeds", 0), 2, "`num_seeds` must be at least 1, got 0."),
        (
            ("--num-seds", 1),
            2,
            "Unrecognized options: --num-seds, 1 Perhaps you meant: --num-seeds",
        ),
        (
            ("--num-seeds", "x"),
            2,
            "Error parsing --num-seeds: invalid literal for int() with base 10: 'x'",
        ),
        (("--seed", 2**32), 2, "`seed` must lie from 0 to 4294967295, got 4294967296."),
        (("--resume", "--fresh"), 2, "`fresh` must not be given together with `resume`."),
        (("--num-steps", 101), 2, "`num_steps` must be at most 100"),
        (("--resume",), 1, "`resume` must find an earlier run"),
    ],
)
def test_wrong_values_are_refused_before_anything_starts(
    run, tmp_path, capsys, words, status, said
):
    assert run(*words) == status
    error = capsys.readouterr().err
    assert said in unframed(error)
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_commands_and_help(toy, capsys):
    for words, said in (([], "Expected one of {toy}"), (["toi"], "Available subcommands: toy")):
        assert status_of(toy, words) == 2
        assert said in unframed(capsys.readouterr().err)
    assert status_of(toy, ["toy", "--help"]) == 0
    assert "--num-seeds" in capsys.readouterr().out


def test_data_that_are_missing_touch_nothing(run, tmp_path, monkeypatch, capsys):
    assert run() == 0
    (folder,) = folders(tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    monkeypatch.setenv("TOY_DATA", "/nowhere")
    capsys.readouterr()
    for words in ((), ("--fresh",), ("--num-seeds", 0), ("--fresh", "--num-seds", 1)):
        assert run(*words) in (1, 2)
        assert "Traceback" not in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def spoil_arrays(path):
    with np.load(path) as file:
        arrays = dict(file)
    arrays["part"] = np.zeros_like(arrays["part"])
    np.savez_compressed(path, **arrays)


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        ("part1.npz", lambda path: path.write_bytes(path.read_bytes()[:-30]), "is broken"),
        ("part1.npz", lambda path: path.write_bytes(b"text"), "is broken: File is not a zip file"),
        ("part1.npz", spoil_arrays, "was changed or renamed"),
        (
            "part1.npz",
            lambda path: shutil.copy(path.with_name("part0.npz"), path),
            "was changed or renamed",
        ),
        ("identity.json", lambda path: path.unlink(), "is missing"),
        (
            "identity.json",
            lambda path: path.write_text(path.read_text().replace("4", "5")),
            "was changed",
        ),
    ],
)
def test_parts_that_are_broken_or_changed_are_refused(run, tmp_path, capsys, name, spoil, said):
    assert run() == 0
    (folder,) = folders(tmp_path / "out")
    figure = (folder / "toy.npz").read_bytes()
    spoil(folder / "parts" / name)
    capsys.readouterr()
    assert run("--silent") == 1
    error = one_line(capsys)
    assert said in error
    assert str(folder / "parts" / name) in error
    assert "elete" in error  # what to do
    assert (folder / "toy.npz").read_bytes() == figure
    if name == "part1.npz":  # as advised
        (folder / "parts" / name).unlink()
    assert run(*(["--fresh"] if name == "identity.json" else [])) == 0
    assert np.isfinite(contents(folder)["part1"]).all()


def test_parts_of_another_run_are_refused(run, tmp_path, capsys):
    assert run() == 0
    assert run("--seed", 4) == 0
    one, other = folders(tmp_path / "out")
    shutil.copy(other / "parts" / "part1.npz", one / "parts")
    capsys.readouterr()
    assert run("--silent") == 1
    assert "part1.npz belongs to another run" in capsys.readouterr().err
    shutil.copytree(other / "parts", one / "parts", dirs_exist_ok=True)  # identity and all
    assert run("--silent") == 1
    assert "whose key differ" in capsys.readouterr().err


BEFORE = {
    "num_seeds": 3, "num_steps": 4, "gate": "", "key": "38ec903a10150a84463ca4fe976d37e7",
    "data": "634d3c87c97008c59865f3edceed34ae", "precision": "float32", "digest": "8bd3aa8baa80fd28e70dfac495a6f1b1",
    "folder": "toy_1a8ed627d2", "checksum": "d9ce0d587ad0e6eeb5eb75fe446fa178",
}  # fmt: skip
"""A run folder as the code wrote it that knew sweeps of figures; its second part is all 7."""


def test_a_run_folder_from_before_is_resumed(run, tmp_path, monkeypatch):
    monkeypatch.setattr(command.metadata, "version", lambda name: "0.1.0")
    parts = tmp_path / "out" / BEFORE["folder"] / "parts"
    parts.mkdir(parents=True)
    config = {name: BEFORE[name] for name in ("num_seeds", "num_steps", "gate")}
    identity = {"config": config, **{name: BEFORE[name] for name in ("key", "data", "precision")}}
    (parts / "identity.json").write_text(
        json.dumps({"identity": identity, "digest": BEFORE["digest"]})
    )
    marks = {"run_digest": BEFORE["digest"], "checksum": BEFORE["checksum"]}
    np.savez(parts / "part1.npz", part=np.full((3, 4), 7, np.float32), seconds=1.5, **marks)
    assert run("--resume") == 0
    found = contents(parts.parent)
    assert (found["part1"] == 7).all()
    assert (found["part0"] != 7).all()


def environment(tmp_path):
    own = {
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "JAX_PLATFORMS": "cpu",
    }
    return {**os.environ, **own}


def start(tmp_path, *words):
    arguments = [sys.executable, str(TOY), "toy", *map(str, words), "--silent"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(arguments, env=environment(tmp_path), cwd=tmp_path, **options)


def wait_for(path):
    while not path.exists():
        time.sleep(0.01)


@pytest.fixture
def gate(tmp_path):
    folder = tmp_path / "gate"
    folder.mkdir()
    return folder


@pytest.mark.slow
def test_two_runs_at_once(run, tmp_path, gate, capsys):
    # One stands in its second part while another of the same settings, and one of others, try the
    # same place.
    (gate / "0").touch()
    with start(tmp_path, "--out", tmp_path / "out", "--gate", gate) as first:
        wait_for(gate / "waiting1")
        for words in ((), ("--fresh",), ("--resume",)):
            assert run("--gate", gate, "--silent", *words) == 1
            assert f"is in use by process {first.pid} on " in one_line(capsys)
        for name in ("1", "2"):
            (gate / name).touch()
        assert run("--gate", gate, "--seed", 5, "--silent") == 0
        assert first.wait(60) == 0
    for seed in (5, 37):
        assert run("--gate", gate, "--seed", seed, out=tmp_path / "alone") == 0
    for folder, alone in zip(folders(tmp_path / "out"), folders(tmp_path / "alone"), strict=True):
        for name, array in contents(folder).items():
            np.testing.assert_array_equal(array, contents(alone)[name])


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on(run, tmp_path, gate):
    (gate / "0").touch()
    with start(tmp_path, "--out", tmp_path / "out", "--gate", gate) as process:
        wait_for(gate / "waiting1")
        process.kill()
    for name in ("1", "2"):
        (gate / name).touch()
    (folder,) = folders(tmp_path / "out")
    kept = (folder / "parts" / "part0.npz").stat().st_mtime_ns
    assert run("--gate", gate) == 0
    assert (folder / "parts" / "part0.npz").stat().st_mtime_ns == kept


def test_a_full_disk_is_told_in_a_line_wherever_it_fills(run, capsys, small_disk):
    out, ballast = small_disk / "out", small_disk / "ballast"
    statuses = []
    for pages in range(0, 24, 3):  # free ones: the first failure is later every time
        shutil.rmtree(out, ignore_errors=True)
        ballast.write_bytes(b"x" * 4096 * (24 - pages))
        statuses.append(run("--silent", out=out))
        error = capsys.readouterr().err
        assert not [path for path in out.rglob("*") if path.name.endswith(".tmp")]
        assert not [path for path in out.rglob("toy.*") if path.stat().st_size == 0]
        if statuses[-1]:
            assert "No space left on device" in error
            assert str(out) in error
            assert error.count("\n") == 1
            ballast.unlink()
            assert run("--silent", out=out) == 0  # the same command goes on
    assert set(statuses) == {0, 1}
    assert statuses == sorted(statuses, reverse=True)
    assert statuses.index(0) > 1


def test_a_folder_that_cannot_be_written_is_told_at_once(
    run, toy, tmp_path, capsys, locked_disk, monkeypatch
):
    monkeypatch.setattr(toy, "compute", Mock(side_effect=AssertionError("come to")))
    (tmp_path / "file").touch()
    for out in (locked_disk, locked_disk / "new", tmp_path / "file"):
        assert run(out=out) == 1
        assert str(out) in one_line(capsys)


def test_a_bug_shows_its_traceback(run, toy, monkeypatch):
    monkeypatch.setattr(toy, "compute", Mock(side_effect=ValueError("shapes do not fit")))
    with pytest.raises(ValueError, match="shapes do not fit"):
        run()


def test_memory_that_runs_out_is_told_in_a_line(run, toy, monkeypatch, capsys):
    monkeypatch.setattr(
        toy, "compute", Mock(side_effect=RuntimeError("RESOURCE_EXHAUSTED: Out of memory.\nTraces"))
    )
    assert run() == 1
    assert "out of memory; choose smaller sizes. RESOURCE_EXHAUSTED: Out of memory." in one_line(
        capsys
    )


@pytest.mark.slow
@pytest.mark.parametrize("package", ["dissociation", "koopman"])
def test_both_packages_are_programs(tmp_path, package):
    words = [sys.executable, "-m", package, "--quick"]
    done = subprocess.run(
        words, env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Available subcommands: " in unframed(done.stderr)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("own", [None, "/own"])
def test_compiled_programs_are_kept_where_the_user_says(run, tmp_path, own):
    jax.config.update("jax_compilation_cache_dir", own)
    command.start_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == (own or str(tmp_path / "cache"))


@pytest.mark.parametrize("words", [["toy", "--help"], ["--version"]])
def test_readers_may_leave(toy, words, monkeypatch):
    """As `| head` does: no traceback, and nothing left in a buffer that fails when the process ends."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert figures.run_command({"toy": toy}, words, program="toy", description="Toys.") == 0
