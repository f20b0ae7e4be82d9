"""Measure the CPU seconds and the programs of test files, without a cache of compiled programs.

    python tests/tools/times.py tests/koopman/test_maps.py dissociation/measures
    python tests/tools/times.py --marks "not full" --out times.json

Each file runs in a process of its own, twice, with `jax.clear_caches()` between. The second time
counts: imports are paid by then, compiling is not. The set-up of shared fixtures of a module is a
column of its own.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import cpu_seconds
import jax
import pytest
import tyro

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests", "dissociation", "koopman")


class Twice:
    """Run all tests twice, and keep the measured numbers of the second time."""

    def __init__(self):
        self.rows = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        for _ in range(2):
            jax.clear_caches()
            self.rows.clear()
            for item, following in itertools.zip_longest(session.items, session.items[1:]):
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return True

    def pytest_runtest_logreport(self, report):
        numbers = dict(report.user_properties)
        if report.when == "call" and "cpu" in numbers:
            is_marked = bool({"slow", "full"} & set(report.keywords))
            self.rows.append(
                {"test": report.nodeid, "outcome": report.outcome, "marked": is_marked} | numbers
            )


def write_rows(path, marks, out):
    """Write the rows of a file, whose tests run in this process."""
    rows = Twice()
    pytest.main(["-n0", "-q", "-p", "no:cacheprovider", *marks, path], plugins=[rows])
    Path(out).write_text(json.dumps(rows.rows))


def measure(path, marks):
    """Return the rows of a file, measured in another process."""
    folders = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false", "PYTHONPATH": folders}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "rows.json"
        code = f"import times; times.write_rows({str(path)!r}, {marks!r}, {str(out)!r})"
        words = [sys.executable, "-c", code]
        subprocess.run(words, env=environment, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())


def files_under(paths):
    """Return the test files, and the sources with examples in their docstrings, that lie at or under `paths`."""
    files = []
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            is_test = file.name.startswith("test_")
            if is_test or ("tests" not in file.parts and ">>> " in file.read_text()):
                files.append(file)
    return files


def print_tables(rows_of_file):
    """Print the files, the longest first, and the tests above the limit."""
    totals = []
    for file, rows in rows_of_file.items():
        sums = [sum(row[name] for row in rows) for name in ("cpu", "shared", "programs")]
        totals.append((*sums, len(rows), file))
    print("     CPU s  shared  programs  tests  file")
    for cpu, shared, programs, count, file in sorted(totals, reverse=True):
        print(f"{cpu:10.1f} {shared:7.1f} {programs:9d} {count:6d}  {file}")
    print(f"{sum(row[0] for row in totals):10.1f} {sum(row[1] for row in totals):7.1f}  in all")
    rows = [row for rows in rows_of_file.values() for row in rows]
    long = [row for row in rows if row["cpu"] > cpu_seconds.LIMIT and not row["marked"]]
    print(f"{len(long)} tests without mark above {cpu_seconds.LIMIT:.0f} CPU seconds")
    for row in sorted(long, key=lambda row: -row["cpu"]):
        print(f"{row['cpu']:10.1f} {row['shared']:7.1f} {row['programs']:9d}  {row['test']}")
    for row in rows:
        if row["outcome"] != "passed":
            print(f"{row['outcome']}: {row['test']}")


def main(
    files: tyro.conf.Positional[tuple[Path, ...]] = (),
    marks: str | None = None,
    out: Path | None = None,
):
    """Measure test files, all by default, and print tables.

    Args:
        files: Test files, sources with examples, or folders of them.
        marks: Expression of marks, as `-m` of pytest; that of pyproject.toml by default.
        out: File for the numbers of all tests, by file.
    """
    options = [] if marks is None else ["-m", marks]
    rows_of_file = {}
    for file in files_under(files or [ROOT / folder for folder in FOLDERS]):
        rows_of_file[str(file)] = measure(file.resolve(), options)
        print(f"measured {file}", file=sys.stderr)
        if out:
            out.write_text(json.dumps(rows_of_file, indent=1))
    print_tables(rows_of_file)


if __name__ == "__main__":
    tyro.cli(main)
