"""Test the tests of modules by random small faults, one at a time.

    python tests/tools/mutate.py --seed 0 --number 60 --out outcomes.json
    python tests/tools/mutate.py --seed 0 --number 60 --draw mutants.json
    python tests/tools/mutate.py --mutants mutants.json --marks "not full"

A mutant is one change on one line of the library: a sign, a factor, a comparison, an axis, a count
off by one, `and` for `or`, a minimum for a maximum. In a copy of the tree, the test files that
import the module run until the first failure, without slow tests unless `--marks` selects them. A
mutant that survives needs a test, or changes no result.
"""

import ast
import functools
import io
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tokenize
from pathlib import Path
from typing import Annotated

import tyro

ROOT = Path(__file__).parents[2]
SKIPPED = ("__main__.py", "__init__.py", "_cli.py", "_axes.py", "_progress.py")
SWAPS = {
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
    "//": "/",
    "**": "*",
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
}
SWAPS |= {
    "==": "!=",
    "!=": "==",
    "and": "or",
    "or": "and",
    "min": "max",
    "max": "min",
    "minimum": "maximum",
}
SWAPS |= {
    "maximum": "minimum",
    "sum": "mean",
    "mean": "sum",
    "all": "any",
    "any": "all",
    "argmax": "argmin",
}
SWAPS |= {"argmin": "argmax", "floor": "ceil", "ceil": "floor", "True": "False", "False": "True"}
TESTED_BY = {
    "dissociation.training._state": ["dissociation/test_training_state.py"],
    "dissociation.training._samplers": [
        "dissociation/test_samplers.py",
        "dissociation/test_training_loop.py",
        "dissociation/test_callbacks.py",
    ],
    "dissociation.training._partition": [
        "dissociation/test_training.py",
        "dissociation/test_resuming.py",
    ],
    "dissociation.training._loop": ["dissociation/test_training_loop.py"],
    "dissociation.training._chunk": [
        "dissociation/test_training.py",
        "dissociation/test_callbacks.py",
    ],
    "dissociation.training._run": [
        "dissociation/test_training.py",
        "dissociation/test_resuming.py",
    ],
    "dissociation.training._plan": ["dissociation/test_grids.py", "dissociation/test_executor.py"],
    "dissociation.training._sweep_folder": [
        "dissociation/test_grids.py",
        "dissociation/test_executor.py",
    ],
    "dissociation.training._fitting": [
        "dissociation/test_training.py",
        "dissociation/test_resuming.py",
    ],
    "dissociation.training._records": [
        "dissociation/test_callbacks.py",
        "dissociation/test_resuming.py",
    ],
    "dissociation.measures._softmax_solver": [
        "dissociation/test_probes.py",
        "dissociation/test_transfer.py",
    ],
    "dissociation.measures._coordinates": ["dissociation/test_nearest_information.py"],
    "dissociation.measures._neighbours": ["dissociation/test_nearest_information.py"],
    "dissociation.figures._eigenvector_measures": ["dissociation/test_eigenvectors.py"],
    "dissociation.figures._members": ["dissociation/test_figures.py"],
    "koopman.figures._ordered_mnist_models": ["koopman/test_figures.py"],
    "dissociation.models._recorder": [
        "dissociation/test_layers_by_name.py",
        "dissociation/test_representations.py",
    ],
    "dissociation.models._module_values": ["dissociation/test_layers_by_name.py"],
    "dissociation.models._intervention": ["dissociation/test_layers_by_name.py"],
    "dissociation.bilinear._certificate": ["dissociation/test_spectral_certificate.py"],
    "dissociation._core.results": [
        "dissociation/test_results.py",
        "dissociation/test_validation.py",
    ],
    "koopman.datasets._trajectories": [
        "koopman/test_linear.py",
        "koopman/test_langevin.py",
        "koopman/test_maps.py",
    ],
    "koopman._operators._subspaces": ["koopman/test_operators.py", "koopman/test_derivatives.py"],
    "koopman._operators._estimators": ["koopman/test_operators.py", "koopman/test_nystroem.py"],
}
RULES = "indexing operation_rules control_flow flow axes"
SYMMETRY = [
    "dissociation/test_groups.py",
    "dissociation/test_indexing.py",
    "dissociation/test_symmetry.py",
]
TESTED_BY |= {f"dissociation.rewrites._{rule}": SYMMETRY for rule in RULES.split()}
TESTED_BY["dissociation._core.frames"] = [
    "koopman/test_frames.py",
    "koopman/test_pairs.py",
    "koopman/test_forecast.py",
]
TESTED_BY["dissociation._core.columns"] = ["koopman/test_frames.py", "koopman/test_pairs.py"]
TESTED_BY["dissociation.training._interrupts"] = ["dissociation/test_interrupts.py"]
TESTED_BY["dissociation.data._weights"] = ["dissociation/test_weights.py"]
TESTED_BY["dissociation.models._function"] = ["dissociation/test_function_model.py"]
TESTED_BY["dissociation._core.memory"] = ["dissociation/test_memory.py"]
COMPARED = ["dissociation/test_compare_figure.py"]
for name in ("figures.compare", "figures._compare_networks", "figures._compare_measures"):
    TESTED_BY[f"dissociation.{name}"] = COMPARED
TESTED_BY["dissociation.similarity._block_sums"] = COMPARED
TESTED_BY["dissociation.similarity._leave_outs"] = ["dissociation/test_similarity_pairs.py"]
TESTED_BY["dissociation.plotting._matches"] = COMPARED
TESTED_BY["dissociation._core.lazy"] = ["test_packaging.py"]
TESTED_BY["koopman._operators._numerics"] = ["koopman/test_operators.py"]
TESTED_BY["koopman._operators._operator"] = ["koopman/test_operators.py"]
TESTED_BY["koopman._operators._rotations"] = ["koopman/test_dynamical_similarity.py"]
for module in ("_exponentials", "_exponential_fit", "_exponential_start"):
    TESTED_BY[f"koopman._models.{module}"] = ["koopman/models/test_exponentials.py"]
TESTED_BY["koopman._models._rates"] = ["koopman/models/test_rates.py"]
TESTED_BY["koopman._models._lags"] = ["koopman/models/test_lags.py"]
for module in ("_block_sums", "_intervals"):
    TESTED_BY[f"koopman._models.{module}"] = ["koopman/models/test_intervals.py"]
for module in ("_model", "_lifting", "_dynamics", "_bands", "_saving", "_trajectories"):
    TESTED_BY[f"koopman._models.{module}"] = [
        "koopman/models/test_model.py",
        "koopman/models/test_model_data.py",
    ]
TESTED_BY["koopman.figures.coverage"] = ["koopman/models/test_coverage.py"]
TESTED_BY["koopman._models._drawing"] = ["koopman/models/test_drawing.py"]
TESTED_BY["dissociation.rewrites._comparison"] = [
    "dissociation/test_growth.py",
    "dissociation/test_rewrites.py",
]
"""Modules that are tested through others."""
SETTING = re.compile(r"\w+: [\w |\[\], .]+ = |.*strict=")
"""Defaults of settings, and what only guards: no logic to mutate."""


def sites(path):
    """Return every mutation of a file: (line, first column, last column, replacement)."""
    source = path.read_text()
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.string.strip()]
    lines = source.splitlines()
    found = []
    for before, token in itertools.pairwise(tokens):
        new = SWAPS.get(token.string)
        if token.string in "+-*/**" and before.string in "(,[{*=:return":  # a sign, or unpacking
            new = "" if token.string == "-" else None
        if token.type == tokenize.NUMBER:
            value = ast.literal_eval(token.string)
            new = str(value + 1) if isinstance(value, int) else repr(1.5 * value or 1.0)
        words = lines[token.start[0] - 1].lstrip()
        if (
            new is None
            or SETTING.match(words)
            or words.startswith(("fail(", "checks.fail(", "import", "from"))
        ):
            continue
        found.append((token.start[0], token.start[1], token.end[1], new))
    return found


def is_python(source):
    """Return True if a mutated file can be compiled."""
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


@functools.cache
def names_in(path):
    """Return the imports (module, name, bound name) of a test file, and its attributes (owner, name)."""
    imports, attributes = [], set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            imports += [
                (node.module, alias.name, alias.asname or alias.name) for alias in node.names
            ]
        elif isinstance(node, ast.Import):
            imports += [(alias.name, "", alias.asname or alias.name) for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            attributes.add((ast.unparse(node.value), node.attr))
    return imports, attributes


def uses(path, dotted, names):
    """Return the number of names that a test file takes from a module, directly or through a folder."""
    package, module = dotted.rsplit(".", 1)
    faces = (package, package.partition(".")[0])
    imports, attributes = names_in(path)
    count, folders = 0, set()
    for source, name, bound in imports:
        is_whole = not name
        count += not is_whole and source == dotted
        count += (source, name) == (package, module)
        count += source in faces and name in names
        if (source if is_whole else f"{source}.{name}") in faces:
            folders.add(bound)
    used = {name for owner, name in attributes if owner in folders}
    return count + len(used & names)


def tests_of(module, root):
    """Return the test files that import a module of the library or its public names, the module's own file first."""
    dotted = ".".join(module.with_suffix("").parts)
    files = [root / "tests" / own for own in TESTED_BY.get(dotted, ())]
    if files:
        return [str(path.relative_to(root)) for path in files]
    body = ast.parse((root / module).read_text()).body
    names = {
        n.name
        for n in body
        if isinstance(n, ast.FunctionDef | ast.ClassDef) and not n.name.startswith("_")
    }
    files = [
        path
        for path in sorted((root / "tests").rglob("test_*.py"))
        if path.parent.name != "notebooks"
    ]
    found = [(path, uses(path, dotted, names)) for path in files if path.name != "test_inputs.py"]
    found = [(path, count) for path, count in found if count]
    found.sort(key=lambda row: (module.stem.strip("_") not in row[0].stem, -row[1]))
    return [str(path.relative_to(root)) for path, _ in found][:3]


def is_skipped(path):
    """Return True for modules without logic to mutate."""
    return path.name in SKIPPED or path.stem.endswith("_drawing")


def modules(root):
    """Return the modules of the library that are mutated, relative to `root`."""
    paths = [
        path
        for package in ("dissociation", "koopman")
        for path in sorted((root / package).rglob("*.py"))
    ]
    return [path.relative_to(root) for path in paths if not is_skipped(path)]


def draw(generator, number, root, paths):
    """Return mutants at random lines of modules: (module, line, first column, last column, replacement)."""
    lines = []
    for path in paths:
        by_line = {}
        for site in sites(root / path):
            by_line.setdefault(site[0], []).append(site)
        lines += [(path, own) for own in by_line.values()]
    mutants = ((path, *generator.choice(own)) for path, own in generator.sample(lines, len(lines)))
    return list(itertools.islice((m for m in mutants if is_python(mutated(m, root)[0])), number))


def stored(mutant, root):
    """Return a mutant as a row of a file, which holds the text of its line."""
    path, number, first, last, replacement = mutant
    text = (root / path).read_text().splitlines()[number - 1]
    columns = {"first": first, "last": last, "replacement": replacement}
    return {"module": str(path), "line": number, "text": text} | columns


def restored(row, generator, root):
    """Return the mutant of a row and True, or a new one in the same file and False if the line is gone."""
    path = Path(row["module"])
    lines = (root / path).read_text().splitlines()
    numbers = [number for number, text in enumerate(lines, 1) if text == row["text"]]
    if numbers:
        nearest = min(numbers, key=lambda number: abs(number - row["line"]))
        return (path, nearest, row["first"], row["last"], row["replacement"]), True
    (mutant,) = draw(generator, 1, root, [path])
    return mutant, False


def mutated(mutant, root):
    """Return the mutated text of the file, and the line before and after the mutation."""
    path, line, first, last, replacement = mutant
    lines = (root / path).read_text().splitlines(keepends=True)
    old = lines[line - 1]
    lines[line - 1] = old[:first] + replacement + old[last:]
    return "".join(lines), old.strip(), lines[line - 1].strip()


def environment_of(root):
    """Return the environment in which tests import the tree in `root`."""
    return os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}


def run(mutant, root, timeout, marks):
    """Return the outcome of the marked tests of a mutant in `root`, and restore the file."""
    path, line = mutant[:2]
    file = root / path
    before = file.read_text()
    text, old, new = mutated(mutant, root)
    tests = tests_of(path, root)
    row = {"module": str(path), "line": line, "old": old, "new": new, "tests": tests}
    began = time.perf_counter()
    try:
        file.write_text(text)
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            marks,
            "-n0",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            *tests,
        ]
        settings = {
            "cwd": root,
            "env": environment_of(root),
            "capture_output": True,
            "timeout": timeout,
        }
        status = subprocess.run([*words, str(path)], **settings).returncode
        row["outcome"] = {0: "survived", 1: "caught", 5: "no tests"}.get(status, "caught (import)")
    except subprocess.TimeoutExpired:
        row["outcome"] = "out of time"  # a loop without end, or a busy machine: look at it
    finally:
        file.write_text(before)
    return row | {"seconds": round(time.perf_counter() - began, 1)}


def main(
    seed: int = 0,
    number: int = 60,
    timeout: float = 600,
    out: Path = Path("outcomes.json"),
    mutants: Path | None = None,
    draw_to: Annotated[Path | None, tyro.conf.arg(name="draw")] = None,
    marks: str = "not slow and not full",
):
    """Make mutants and write the outcome of each.

    Args:
        seed: Seed of the draw.
        number: Number of mutants.
        timeout: Seconds for the tests of one mutant.
        out: File of outcomes; mutants whose outcomes it holds are not run again.
        mutants: File of stored mutants. A new one is drawn in the same file if a line is gone.
        draw_to: File in which the draw is stored; nothing is run.
        marks: Expression of marks of the tests that run.
    """
    generator = random.Random(seed)
    if mutants is None:
        drawn = [(mutant, True) for mutant in draw(generator, number, ROOT, modules(ROOT))]
    else:
        drawn = [restored(row, generator, ROOT) for row in json.loads(mutants.read_text())]
    if draw_to is not None:
        draw_to.write_text(
            json.dumps([stored(mutant, ROOT) for mutant, _ in drawn], indent=1) + "\n"
        )
        return
    rows = json.loads(out.read_text()) if out.exists() else []
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "tree"
        shutil.copytree(
            ROOT, copy, ignore=shutil.ignore_patterns(".git", "results", "*.png", ".venv*")
        )
        whole = [
            sys.executable,
            "-m",
            "pytest",
            "-n0",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/test_canary.py",
        ]
        subprocess.run(
            whole, cwd=copy, env=environment_of(copy), check=True, stdout=subprocess.DEVNULL
        )  # else every mutant would be "caught"
        for mutant, is_stored in drawn[len(rows) :]:
            rows.append(run(mutant, copy, timeout, marks) | {"drawn again": not is_stored})
            again = "" if is_stored else " (drawn again: its line is gone)"
            sys.stdout.write(
                f"{len(rows):3d} {rows[-1]['outcome']:10s} "
                f"{rows[-1]['module']}:{rows[-1]['line']}{again}\n"
            )
            sys.stdout.flush()
            out.write_text(json.dumps(rows, indent=1))
    caught = sum(row["outcome"].startswith("caught") for row in rows)
    sys.stdout.write(f"caught {caught} of {len(rows)}\n")


if __name__ == "__main__":
    tyro.cli(main)
