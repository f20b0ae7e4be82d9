"""Figures made by several processes: the arrays of one, whoever is killed on the way."""

import random
import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import together

pytestmark = pytest.mark.slow

SIZES = {
    "robustness": ["--num-train", "200", "--num-test", "50", "--num-seeds", "3", "--num-epochs", "2", "--width", "16",
                   "--num-scales", "3", "--num-zero", "4"],
    "collapse": ["--num-train", "50", "--num-loaded", "60", "--num-test", "50", "--num-steps", "60", "--width", "8",
                 "--num-information", "0", "--batch-size", "25"],
}  # fmt: skip


def command(name, out):
    return ["-m", "dissociation", name, "--quick", "--silent", *SIZES[name], "--out", str(out)]


def arrays(out):
    (path,) = Path(out).glob("*/*.npz")
    with np.load(path) as file:
        return dict(file)


def assert_same(out, other):
    wanted, found = arrays(out), arrays(other)
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, name)


@pytest.mark.parametrize("name", list(SIZES))
def test_eight_devices_and_four_processes_find_what_one_does(name, tmp_path):
    together.run(1, "", command=command(name, tmp_path / "one"))
    together.run(1, "", command=command(name, tmp_path / "devices"), devices=8)
    said = together.run(4, "", command=command(name, tmp_path / "processes"))
    assert "Wrote" in said[0]
    assert not any("Wrote" in each for each in said[1:])
    assert_same(tmp_path / "one", tmp_path / "devices")
    assert_same(tmp_path / "one", tmp_path / "processes")


@pytest.mark.parametrize("name", list(SIZES))
def test_killed_five_times_and_continued_by_others_it_ends_in_the_same_arrays(name, tmp_path):
    rng = random.Random(name)
    began = time.monotonic()
    together.run(1, "", command=command(name, tmp_path / "alone"))
    span = time.monotonic() - began
    for count, devices in ((2, 1), (1, 8), (3, 1), (1, 2), (2, 2)):
        start = time.time()
        started = together.start(count, "", command=command(name, tmp_path / "killed"), devices=devices)
        while not any(lock.stat().st_mtime > start for lock in tmp_path.glob("killed/*/parts/.lock")):
            time.sleep(0.1)  # processes that are not together yet would wait for the dead one for minutes
            assert started[0].poll() is None, started[0].communicate()
        time.sleep(rng.uniform(0, 0.5) * span)
        for process in started[:1] if count == 3 else started:
            process.kill()
        for status, _, said in together.wait(started):
            assert status in (0, -9) or (status == 1 and "The same command goes on" in said), said
    together.run(2, "", command=command(name, tmp_path / "killed"))
    assert_same(tmp_path / "alone", tmp_path / "killed")


def test_two_runs_of_several_processes_are_refused_and_what_is_wrong_is_said_once(tmp_path):
    first = together.start(2, "", command=[*command("robustness", tmp_path), "--num-epochs", "200"])
    try:
        while not list(tmp_path.glob("*/parts/.lock")):
            time.sleep(0.1)
            assert first[0].poll() is None, first[0].communicate()
        second = together.wait(together.start(2, "", command=[*command("robustness", tmp_path), "--num-epochs", "200"]))
        assert [status for status, *_ in second] == [1, 1]
        assert "is in use by process" in second[0][2]
        assert not second[1][2]
    finally:
        for process in first:
            process.kill()
        together.wait(first)
    started = together.start(1, "", command=["-m", "dissociation", "robustness", "--distributed"])
    ((status, _, said),) = together.wait(started)
    assert status == 2
    assert said.startswith(
        "dissociation: `address` must be given with `num_processes` and `process_id` where no cluster"
    )
