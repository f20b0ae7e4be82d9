"""Kill runs of a command at random moments, and compare their files.

    python tests/tools/kill_runs.py dissociation robustness --quick --num-train 300 --kills 12

A reference run in a separate folder takes some time T. Then the same command is stopped `--kills`
times, each after a uniformly random time up to T, by SIGKILL, SIGINT and SIGTERM alternately, and
started again. After a run that has ended the next one has another folder, and the last run is not
stopped. Arrays are compared bit for bit with those of the reference run. Output that looks like a
traceback is shown and counts as a fault.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
STATUS = {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}


def begin(words: list[str], out: Path, errors: Path) -> subprocess.Popen[bytes]:
    """Start the command in the folder `out`, with its error output in `errors`."""
    arguments = [sys.executable, "-m", *words, "--silent", "--out", str(out)]
    with errors.open("ab") as file:
        return subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=file)


def arrays(out: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return the arrays of the folder by run and part or figure, without wall times and marks."""
    found = {}
    for path in sorted(out.rglob("*.npz")):
        with np.load(path) as file:
            names = [name for name in file if name not in ("seconds", "checksum")]
            found[str(path.relative_to(out))] = {name: file[name] for name in names}
    return found


def compare(found: Path, wanted: Path) -> tuple[int, int, int]:
    """Return the numbers of arrays, of arrays that differ or are missing, and of files of other runs."""
    here, there = arrays(found), arrays(wanted)
    number = sum(len(part) for part in there.values())

    def same(path: str, name: str, value: np.ndarray) -> bool:
        mine = here.get(path, {}).get(name)
        return mine is not None and np.array_equal(mine, value, equal_nan=value.dtype.kind in "fc")

    different = sum(
        not same(path, name, value) for path, part in there.items() for name, value in part.items()
    )
    return number, different, len(here.keys() - there.keys())


def kill_often(words: list[str], folder: Path, kills: int, rng: random.Random, errors: Path) -> int:
    """Returns the number of faults."""
    began = time.perf_counter()
    assert begin(words, folder / "alone", errors).wait() == 0, errors.read_text()
    span = time.perf_counter() - began
    faults, ended, folders = 0, [], [folder / "killed"]
    while sum(word != "done" for word in ended) < kills:
        number = SIGNALS[len(ended) % 3]
        process = begin(words, folders[-1], errors)
        time.sleep(rng.uniform(0, span))
        early = process.poll() is not None
        process.send_signal(number)
        status = process.wait()
        ended.append("done" if early else str(status))
        wrong = status not in ((0,) if early else (0, STATUS[number], -number))
        faults += wrong
        if wrong:
            print(f"{number.name} number {len(ended)}: status {status}")
        if status == 0:  # the next ones are to hit a run too
            folders.append(folder / f"killed-{len(folders)}")
    assert begin(words, folders[-1], errors).wait() == 0, errors.read_text()
    number, different, foreign = np.sum(
        [compare(killed, folder / "alone") for killed in folders], axis=0
    ).tolist()
    print(
        f"{' '.join(words)}: {span:.0f} s alone, {len(folders)} runs; {kills} kills ended "
        f"{', '.join(ended)}"
    )
    print(f"  {number} arrays, {different} different, {foreign} foreign")
    return faults + different + foreign


def main() -> int:
    """Returns the number of faults."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--random", type=int, default=0)
    own, words = parser.parse_known_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = f"{scratch}/cache"
        errors = Path(scratch) / "errors"
        faults = kill_often(words, Path(scratch), own.kills, random.Random(own.random), errors)
        said = errors.read_text()
        if "Traceback" in said:
            faults += 1
            print(said)
        print(json.dumps({"command": " ".join(words), "faults": faults}))
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
