"""Hash what the code computes, to distinguish changes of its layout from changes of its numbers.

    python benchmarks/frozen.py [--keep FOLDER] [--only NAME ...]     writes frozen.json
    python benchmarks/frozen.py --check [--keep FOLDER]               compares with it

Hashes are of the arrays of all figures in smoke runs, seed 37, and of the output of the
documentation's examples. They hold for one machine, because others round differently. With `--keep`
arrays are stored and compared by a tolerance.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("frozen.json")
FIGURES = {
    "dissociation": (
        "robustness",
        "transfer",
        "eigenvectors",
        "collapse",
        "similarity",
        "freedom",
        "manifold",
        "planted",
    ),
    "koopman": ("ordered-mnist", "spectra"),
}


def digest(data):
    """Return a hash of sixteen hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()[:16]


def figure(package, name, folder):
    """Return hashes of a figure's arrays, by name."""
    command = [
        sys.executable,
        "-m",
        package,
        name,
        "--quick",
        "--silent",
        "--out",
        str(folder / name),
    ]
    subprocess.run(
        command,
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"MPLBACKEND": "Agg"},
    )
    (path,) = (folder / name).glob("*/*.npz")
    with np.load(path) as arrays:
        return {
            key: digest(np.ascontiguousarray(arrays[key]).tobytes()) for key in sorted(arrays.files)
        }


def example(code, folder):
    """Return a hash of the output of a page's block in a separate process, without times.

    A block that needs a package that is not installed, such as PyTorch, has none.
    """
    script = folder / "example.py"  # a file, since workers import it
    script.write_text(code)
    run = subprocess.run(
        [sys.executable, script],
        check=False,
        cwd=folder,
        capture_output=True,
        env=os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)},
    )
    if b"ModuleNotFoundError" in run.stderr:
        return None
    run.check_returncode()
    return digest(re.sub(rb"[\d.]+ m?s\b", b"", run.stdout))


def examples():
    """Return the blocks of Python on all pages, by page and place."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        for index, code in enumerate(
            re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        ):
            yield f"{page.relative_to(ROOT)} {index}", code


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    known = json.loads(FILE.read_text()) if FILE.exists() else {"figures": {}, "examples": {}}
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        found = {"figures": {}, "examples": {}}
        for package, names in FIGURES.items():
            for name in names:
                if not options.only or name in options.only:
                    found["figures"][name] = figure(package, name, folder)
                    print(name, len(found["figures"][name]), "arrays", flush=True)
        for name, code in examples():
            if not options.only or "examples" in options.only:
                with tempfile.TemporaryDirectory() as here:
                    found["examples"][name] = example(code, here)
                print(name, flush=True)
    if options.check:
        for kind, one in found.items():
            for name, value in one.items():
                same = value == known[kind].get(name)
                wrong = (
                    []
                    if same or kind == "examples"
                    else [k for k in value if value[k] != known[kind][name].get(k)]
                )
                print("same " if same else "OTHER", name, *wrong)
        sys.exit(
            any(
                value != known[kind].get(name)
                for kind, one in found.items()
                for name, value in one.items()
            )
        )
    for kind, one in found.items():
        known[kind] |= one
    FILE.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
