"""Run every comparison with a user's alternative, and write the table of `docs/benchmarks.md`.

    python benchmarks/all.py [--quick] [--only NAME ...] [--out docs/benchmarks.md]

Every script runs in a separate process and alternates with its peers. Times are medians. The ratio
is the peer's time over ours, round by round, with quartiles; rows below 1 are marked. A JSON file
of the same name holds the numbers. With `--only`, those of other scripts are kept if machine,
versions and sizes are the same. `--quick` takes fewer rounds, and smaller sizes if a round is long.
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


def table(rows):
    """Return rows of Markdown, one per peer."""
    lines = [
        "| work | ours | first call | peer | peer's time | ratio (quartiles) | note |",
        f"|{' --- |' * 7}",
    ]
    for row in rows:
        first = "" if row["first"] is None else seconds(row["first"])
        for peer, found in row["peers"].items():
            low, middle, high = found["ratio"]
            note = "; ".join(filter(None, (row["note"], row.get("machine"))))
            mark = f"**below 1**{': ' if note else ''}{note}" if middle < 1 else note
            cells = row["work"], seconds(row["ours"]), first, peer, seconds(found["seconds"])
            lines.append(
                f"| {' | '.join(cells)} | {middle:.2f} ({low:.2f} to {high:.2f}) | {mark} |"
            )
    return "\n".join(lines)


def page(about, rows, command):
    """Return the whole page."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    below = sum(found["ratio"][1] < 1 for row in rows for found in row["peers"].values())
    return f"""# Benchmarks

Written by `{command}` on {about["day"]}: {about["cpu"]}, {about["cores"]} cores, load {about["load"]:.1f} at the start;
{versions}.

The ratio is the peer's time divided by ours in the same round: its median over the rounds, with quartiles. Both run
alternately. Our times are warm calls. The first call, which compiles, has its own column. PyTorch runs with the number
of threads that suits it. For several seeds a second row has PyTorch in one process per core, with one thread each.
`--only` renews the rows of one script. A row of another machine names it in its note. Rows below 1: {below}.

{table(rows)}
"""


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
    kept = json.loads(numbers.read_text()) if numbers.exists() else {"machine": {}, "rows": []}
    same = all(kept["machine"].get(name) == about[name] for name in ("cpu", "cores", "versions"))
    if kept.get("quick", False) == options.quick and (same or options.only != list(RUNS)):
        rows = [row for row in kept["rows"] if row["script"] not in scripts]
    elsewhere = (
        {}
        if same or not rows
        else {"machine": f"on {about['cpu']}, {about['cores']} cores, {about['day']}"}
    )
    for name in options.only:
        arguments = RUNS[name][options.quick]
        if arguments is None:
            continue
        found, status = run(name, arguments)
        rows += [row | elsewhere for row in found]
        failed += [name] if status else []
    order = [f"{name}.py" for name in RUNS]
    rows.sort(key=lambda row: order.index(row["script"]))
    about = kept["machine"] if elsewhere else about
    command = f"python benchmarks/all.py{' --quick' if options.quick else ''}"
    options.out.write_text(page(about, rows, command))
    numbers.write_text(
        json.dumps({"machine": about, "quick": options.quick, "rows": rows}, indent=1) + "\n"
    )
    print(f"wrote {options.out} and {numbers}")
    if failed:
        print(f"failed: {', '.join(failed)}; their rows are missing or incomplete")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
