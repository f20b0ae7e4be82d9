"""Figures made by several processes: the arrays of one process, and the same ones whichever process is killed."""

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


@pytest.mark.parametrize("name", list(SIZES))
def test_eight_devices_and_four_processes_agree_with_one(name, tmp_path):
    together.run(1, "", command=command(name, tmp_path / "one"))
    together.run(1, "", command=command(name, tmp_path / "devices"), devices=8)
    said = together.run(4, "", command=command(name, tmp_path / "processes"))
    assert "Wrote" in said[0]
    assert not any("Wrote" in each for each in said[1:])
    wanted = arrays(tmp_path / "one")
    for other in ("devices", "processes"):
        found = arrays(tmp_path / other)
        assert wanted.keys() == found.keys()
        for name, value in wanted.items():
            compare = np.testing.assert_allclose if value.dtype.kind == "f" else np.testing.assert_array_equal
            compare(found[name], value, **({"rtol": 1e-4, "atol": 1e-6} if value.dtype.kind == "f" else {}))


@pytest.mark.parametrize("name", list(SIZES))
def test_killed_four_times_it_ends_in_the_same_arrays(name, tmp_path):
    """All of two processes are killed, or one of them, which ends the other."""
    rng = random.Random(name)
    began = time.monotonic()
    together.run(2, "", command=command(name, tmp_path / "whole"))
    span = time.monotonic() - began
    for victims in (slice(None), slice(0, 1), slice(1, 2), slice(None)):
        start = time.time()
        started = together.start(2, "", command=command(name, tmp_path / "killed"))
        while not any(lock.stat().st_mtime > start for lock in tmp_path.glob("killed/*/parts/.lock")):
            time.sleep(0.1)  # a process that has not joined would wait for the dead one for minutes
            assert started[0].poll() is None, started[0].communicate()
        time.sleep(rng.uniform(0, 0.5) * span)
        for process in started[victims]:
            process.kill()
        for status, _, said in together.wait(started):
            assert status in (0, -9, -6) or (status == 1 and "Start all processes again" in said), said
    together.run(2, "", command=command(name, tmp_path / "killed"))
    wanted, found = arrays(tmp_path / "whole"), arrays(tmp_path / "killed")
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, name)


def test_a_second_run_of_several_processes_is_refused(tmp_path):
    first = together.start(2, "", command=[*command("robustness", tmp_path), "--num-epochs", "200"])
    try:
        while not list(tmp_path.glob("*/parts/.lock")):
            time.sleep(0.1)
            assert first[0].poll() is None, first[0].communicate()
        second = together.wait(together.start(2, "", command=[*command("robustness", tmp_path), "--num-epochs", "200"]))
        assert [status for status, *_ in second] == [1, 1]
        assert "is in use by process" in second[0][2]
        assert "Process 0 failed: BlockingIOError" in second[1][2]
    finally:
        for process in first:
            process.kill()
        together.wait(first)
    started = together.start(1, "", command=["-m", "dissociation", "robustness", "--distributed"])
    ((status, _, said),) = together.wait(started)
    assert status == 2
    assert said.startswith("dissociation: `address` must be given, as no cluster's environment holds it")
