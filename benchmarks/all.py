"""Run every comparison with a user's alternative, and write the table of `docs/benchmarks.md`.

    python benchmarks/all.py [--quick] [--only NAME ...] [--out docs/benchmarks.md]

Every script runs in a separate process and alternates with its peers. Times are medians. The ratio
is the peer's time over ours, round by round, with quartiles; rows below 1 are marked. A JSON file
of the same name holds the numbers of this machine and of the one measured before it, each with a
column. With `--only`, those of other scripts are kept if machine, versions and sizes are the same.
`--quick` takes fewer rounds, and smaller sizes if a round is long.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from timing import ROWS

HERE = Path(__file__).parent
RUNS = {
    "training": (["--seeds", "1", "4", "8"], ["--seeds", "1", "4", "--samples", "10000"]),
    "collapse": (["--only", "steps", "knn", "--steps", "1000"],) * 2,
    "spectral": ([], ["--samples", "20480", "--epochs", "2"]),
    "encoders": (
        ["--losses", "vamp", "--repeats", "3"],
        ["--losses", "vamp", "--repeats", "3", "--only", "epochs"],
    ),
    "operators": ([], ["--only", "linear", "--repeats", "3"]),
    "nystroem": (None, ["--only", "nystroem", "--repeats", "2"]),
    "models": ([], ["--repeats", "3"]),
    "robustness": ([], ["--samples", "2000", "--repeats", "2"]),
    "similarity": (
        [],
        ["--members", "16", "--layers", "1", "--stream", "100000", "--repeats", "3"],
    ),
    "compare": ([], ["--stream", "0", "--repeats", "1"]),
    "manifold": ([], ["--repeats", "3"]),
    "probes": ([], ["--peer-folds", "1", "--samples", "5000", "--features", "512"]),
}
"""The arguments of every script, and those of a quick run; None where another entry holds it."""
SCRIPTS = {"nystroem": "operators"}
PACKAGES = (
    "jax",
    "jaxlib",
    "equinox",
    "optax",
    "numpy",
    "scipy",
    "torch",
    "scikit-learn",
    "kooplearn",
    "rsatoolbox",
)


def machine():
    """Return the machine of the run: processor, cores, versions, day."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        named = [
            line
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        cpu = named[0].partition(":")[2].strip() if named else cpu
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "day": day,
        "versions": versions,
    }


def run(name, arguments):
    """Return the rows of a script, and its error if it failed."""
    script = HERE / f"{SCRIPTS.get(name, name)}.py"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        print(f"== {script.name} {' '.join(arguments)}", flush=True)
        child = subprocess.run(
            [sys.executable, script, *arguments], env={**os.environ, ROWS: str(path)}, check=False
        )
        lines = path.read_text().splitlines() if path.exists() else []
    return [{"script": script.name, **json.loads(line)} for line in lines], child.returncode


def seconds(value):
    """Return a time as text, in seconds or a shorter unit."""
    for unit, factor in (("s", 1), ("ms", 1e3), ("us", 1e6)):
        if value * factor >= 1 or unit == "us":
            return f"{value * factor:.3g} {unit}"
    return ""


def table(measured):
    """Return rows of Markdown, one per peer, with a column of ratios per machine.

    Args:
        measured: Machines with their rows, the one of the last run first, which gives the seconds.
    """
    count = len(measured)
    titles = [f"ratio, {letter}" for letter in "AB"[:count]] if count > 1 else ["ratio"]
    header = ["work", "ours", "first call", "peer", "peer's time", *titles, "note"]
    lines = [f"| {' | '.join(header)} |", "|" + " --- |" * len(header)]
    for row in union(measured):
        first = "" if row["first"] is None else seconds(row["first"])
        for peer, times in row["peers"].items():
            ratios = [ratio_of(machine["rows"], row["work"], peer) for machine in measured]
            is_lost = any(ratio is not None and ratio[1] < 1 for ratio in ratios)
            mark = "; ".join(filter(None, ("**below 1**" if is_lost else "", row["note"])))
            cells = [row["work"], seconds(row["ours"]), first, peer, seconds(times["seconds"])]
            for ratio in ratios:
                text = "" if ratio is None else "{1:.2f} ({0:.2f} to {2:.2f})".format(*ratio)
                cells.append(text)
            lines.append(f"| {' | '.join([*cells, mark])} |")
    return "\n".join(lines)


def union(measured):
    """Return the rows of all machines, those of the last run first, in the order of scripts."""
    rows, works = [], set()
    for machine in measured:
        rows += [row for row in machine["rows"] if row["work"] not in works]
        works = {row["work"] for row in rows}
    order = [f"{name}.py" for name in RUNS]
    return sorted(rows, key=lambda row: order.index(row["script"]))


def ratio_of(rows, work, peer):
    """Return the quartiles of a peer's ratio, or None if it was not measured."""
    for row in rows:
        # Names of peers may end in results of a run, in brackets.
        for name, times in row["peers"].items():
            if row["work"] == work and name.partition(" (")[0] == peer.partition(" (")[0]:
                return times["ratio"]
    return None


def page(measured, command):
    """Return the whole page."""
    lines = []
    for letter, machine in zip("AB", measured, strict=False):
        about = machine["about"]
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        title = f"Machine {letter}" if len(measured) > 1 else "Machine"
        load = "" if about["load"] is None else f", load {about['load']:.1f} at the start"
        lines.append(
            f"{title}, {about['day']}: {about['cpu']}, {about['cores']} cores{load}; {versions}."
        )
    lost = 0
    for row in union(measured):
        for peer in row["peers"]:
            ratios = [ratio_of(machine["rows"], row["work"], peer) for machine in measured]
            lost += any(ratio is not None and ratio[1] < 1 for ratio in ratios)
    machines = "\n\n".join(lines)
    return f"""# Benchmarks

Written by `{command}`.

{machines}

The ratio is the peer's time divided by ours in the same round: its median over the rounds, with quartiles. Both run
alternately. Our times are warm calls, and the peer's times are those of the last machine measured. The first call, which
compiles, has its own column. PyTorch runs with the number of threads that suits it. For several seeds a second row has PyTorch
in one process per core, with one thread each. `--only` renews the rows of one script. Rows below 1 on a machine: {lost}.

{table(measured)}
"""


def place(about):
    """Return what tells machines apart."""
    return about["cpu"], about["cores"]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller sizes")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "benchmarks.md")
    options = parser.parse_args()
    about, rows, failed = machine(), [], []
    numbers = options.out.with_suffix(".json")
    scripts = {f"{SCRIPTS.get(name, name)}.py" for name in options.only}
    measured = json.loads(numbers.read_text()) if numbers.exists() else []
    others = [entry for entry in measured if place(entry["about"]) != place(about)]
    for entry in measured:
        is_same = entry["about"]["versions"] == about["versions"] and entry not in others
        if is_same and entry["quick"] == options.quick:
            rows = [row for row in entry["rows"] if row["script"] not in scripts]
    for name in options.only:
        arguments = RUNS[name][options.quick]
        if arguments is None:
            continue
        found, status = run(name, arguments)
        rows += found
        failed += [name] if status else []
    measured = [{"about": about, "quick": options.quick, "rows": rows}, *others][:2]
    command = f"python benchmarks/all.py{' --quick' if options.quick else ''}"
    options.out.write_text(page(measured, command))
    numbers.write_text(json.dumps(measured, indent=1) + "\n")
    print(f"wrote {options.out} and {numbers}")
    if failed:
        print(f"failed: {', '.join(failed)}; their rows are missing or incomplete")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
