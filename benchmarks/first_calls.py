"""Count the programs that first calls compile, and their CPU seconds, without a cache of compiled programs.

    python benchmarks/first_calls.py [--only JOB ...] [--repeats 3] [--against FILE]
        [--out first_calls.json]

Each job of `tests/tools/first_calls.py` runs in fresh processes, with the package that `PYTHONPATH`
or the environment names. Seconds are CPU seconds of the process, the median of the repeats.
`--against` prints the numbers of an earlier file beside these, such as one of another checkout.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

TOOLS = Path(__file__).parents[1] / "tests" / "tools"


def measure(job):
    """Print a line of JSON with name, number of programs and CPU seconds for each call of a job."""
    sys.path.insert(0, str(TOOLS))
    warnings.simplefilter("ignore")
    import first_calls
    import jax
    from compiled import num_compiled

    for name, call in getattr(first_calls, job)():
        programs, start = num_compiled(), time.process_time()
        try:
            call()
            jax.effects_barrier()
        except Exception as error:
            print(json.dumps([name, None, repr(error)[:200]]), flush=True)
            continue
        print(
            json.dumps([name, num_compiled() - programs, time.process_time() - start]), flush=True
        )


def jobs():
    """Return the names of all jobs, without an import of JAX."""
    text = (TOOLS / "first_calls.py").read_text()
    names = text.rpartition("JOBS = (")[2].rpartition(")")[0]
    return [name.strip() for name in names.split(",")]


def run(job, repeats):
    """Return programs and median CPU seconds of the calls of a job, by name."""
    settings = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    rows = {}
    for _ in range(repeats):
        command = [sys.executable, __file__, "--measure", job]
        output = subprocess.run(
            command, check=True, capture_output=True, text=True, env=settings
        ).stdout
        for line in output.splitlines():
            name, programs, seconds = json.loads(line)
            if programs is None:
                print(f"{name} failed: {seconds}")
                continue
            rows.setdefault(name, []).append((programs, seconds))
    return {
        name: [row[0][0], statistics.median(seconds for _, seconds in row)]
        for name, row in rows.items()
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure")
    options = parser.parse_args()
    if options.measure:
        measure(options.measure)
        return
    earlier = json.loads(options.against.read_text()) if options.against else {}
    print(f"{'call':32} {'programs':>8} {'CPU s':>7} {'before':>16}")
    found = {}
    for job in options.only or jobs():
        for name, (programs, seconds) in run(job, options.repeats).items():
            found[name] = [programs, seconds]
            before = earlier.get(name)
            text = f"{before[0]:8} {before[1]:7.2f}" if before else ""
            print(f"{name:32} {programs:8} {seconds:7.2f} {text}", flush=True)
    both = [name for name in found if name in earlier]
    if both:
        sums = [sum(table[name][1] for name in both) for table in (found, earlier)]
        print(f"{'sum':32} {'':8} {sums[0]:7.2f} {'':8} {sums[1]:7.2f}")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
