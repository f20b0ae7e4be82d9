"""Figures made by two processes: the arrays of one process, and the same bits whichever process is killed."""

import random
import time
from pathlib import Path

import numpy as np
import pytest
import together

pytestmark = [pytest.mark.slow, pytest.mark.full]

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
def test_two_processes_agree_with_one_and_end_in_the_same_arrays_if_killed(name, tmp_path):
    """Both are killed, or one of them, which ends the other."""
    rng, options = random.Random(name), {"devices": 2}
    together.run(1, "", command=command(name, tmp_path / "one"))
    began = time.monotonic()
    said = together.run(2, "", command=command(name, tmp_path / "whole"), **options)
    span = time.monotonic() - began
    assert ["Wrote" in each for each in said] == [True, False]
    one, whole = arrays(tmp_path / "one"), arrays(tmp_path / "whole")
    assert one.keys() == whole.keys()
    for name_of_array, value in one.items():
        if value.dtype.kind == "f":
            np.testing.assert_allclose(whole[name_of_array], value, rtol=1e-4, atol=1e-6)
        else:
            np.testing.assert_array_equal(whole[name_of_array], value)
    for victims in (slice(None), slice(0, 1), slice(1, 2)):
        start = time.time()
        started = together.start(2, "", command=command(name, tmp_path / "killed"), **options)
        while not any(lock.stat().st_mtime > start for lock in tmp_path.glob("killed/*/parts/.lock")):
            time.sleep(0.1)  # a process that has not joined would wait for the dead one for minutes
            assert started[0].poll() is None, started[0].communicate()
        time.sleep(rng.uniform(0, 0.5) * span)
        for process in started[victims]:
            process.kill()
        for status, _, said in together.wait(started):
            assert status in (0, -9, -6) or (status == 1 and "Start all processes again" in said), said
    together.run(2, "", command=command(name, tmp_path / "killed"), **options)
    found = arrays(tmp_path / "killed")
    assert whole.keys() == found.keys()
    for name_of_array, value in whole.items():
        np.testing.assert_array_equal(found[name_of_array], value, name_of_array)


def test_a_second_run_of_two_processes_and_one_without_an_address_are_refused(tmp_path):
    words = [*command("robustness", tmp_path), "--num-epochs", "200"]
    alone = together.start(1, "", command=["-m", "dissociation", "robustness", "--distributed"])
    first = together.start(1, "", command=words)
    try:
        while not list(tmp_path.glob("*/parts/.lock")):
            time.sleep(0.1)
            assert first[0].poll() is None, first[0].communicate()
        second = together.wait(together.start(2, "", command=words))
        assert [status for status, *_ in second] == [1, 1]
        assert "is in use by process" in second[0][2]
        assert "Process 0 failed: BlockingIOError" in second[1][2]
    finally:
        first[0].kill()
        together.wait(first)
    ((status, _, said),) = together.wait(alone)
    assert status == 2
    assert said.splitlines()[1].startswith(
        "dissociation: `address` must be given, as no cluster's environment holds it"
    )
