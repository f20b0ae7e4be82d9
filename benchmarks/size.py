"""Count lines, statements and public names of the library and its tests, and what reviewers count.

    python benchmarks/size.py [folder of a checkout] [--ways]

Public names are in `__all__` of a folder's `__init__` or of a module without underscore, or without
`__all__` all top-level names without underscore. Statements are those of the syntax tree, without
docstrings.

With `--ways`, also count the modules that an entry imports, our functions that `fit` enters before
the loss, and functions that take a figure's configuration.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

PACKAGES = ("dissociation", "koopman")
MARKS = {
    "skipped": r"mark\.skip|importorskip|pytest\.skip\(",
    "expected to fail": r"xfail",
    "slow": r"mark\.slow",
}
LOW = {
    "jax._src": r"jax\._src",
    "pickle": r"\b(?:import|from) pickle\b|allow_pickle=True",
    "ctypes": r"\bctypes\b",
    "jax.extend": r"jax\.extend\b",
}


def is_docstring(node):
    """Return True if a statement is a string alone."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def statements(tree):
    """Return the number of statements of a syntax tree, without strings that stand alone."""
    return sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in ast.walk(tree))


def public_names(path, tree):
    """Return the public names of a module."""
    if any(part.startswith("_") for part in (*path.parts[:-1], path.stem.replace("__init__", ""))):
        return []
    names = []
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and any(
            getattr(t, "id", "") == "__all__" for t in targets
        ):
            try:
                return list(ast.literal_eval(node.value))
            except ValueError:
                return lazy_names(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names += [target.id for target in targets if isinstance(target, ast.Name)]
    if path.stem == "__init__":
        return lazy_names(tree)
    return [name for name in names if not name.startswith("_")]


def lazy_names(tree):
    """Return the names that an `__init__` imports, also for type checkers."""
    found = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and node.module
        and node.module.split(".")[0] in PACKAGES
        for alias in node.names
    }
    return [name for name in found if not name.startswith("_")]


def functions(trees):
    """Return all functions, with the numbers of lines without docstring and of parameters."""
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = [one for one in node.body if not is_docstring(one)]
                length = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                arguments = node.args
                yield (
                    length,
                    len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs),
                )


def report(root):
    """Return pairs of a measure and its value."""
    files = [
        path.relative_to(root)
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    ]
    texts = {path: (root / path).read_text() for path in files}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = {path: text.count("\n") for path, text in texts.items()}
    names = {path: public_names(path, trees[path]) for path in files}
    tests = [path.read_text() for path in sorted((root / "tests").rglob("*.py"))]
    entries = {p.name for p in (root / "dissociation").iterdir()} - {
        "__init__.py",
        "__main__.py",
        "py.typed",
        "__pycache__",
    }
    known = list(functions(trees.values()))
    whole, tested = "\n".join(texts.values()), "\n".join(tests)
    yield "library lines", sum(lines.values())
    for package in PACKAGES:
        yield (
            f"  {package}",
            sum(count for path, count in lines.items() if path.parts[0] == package),
        )
    yield "statements", sum(map(statements, trees.values()))
    yield "files", len(files)
    yield "entries at the root of dissociation", len(entries)
    yield "public names", sum(map(len, names.values()))
    yield "test lines", sum(text.count("\n") for text in tests)
    yield "bytes of text", len(whole.encode())
    yield "characters per line", round(len(whole) / sum(lines.values()), 1)
    yield "files over 400 lines", sum(count > 400 for count in lines.values())
    yield "longest file", "{} ({})".format(*max((count, path) for path, count in lines.items()))
    yield "bodies over 60 lines", sum(length > 60 for length, _ in known)
    yield "functions with more than 10 parameters", sum(count > 10 for _, count in known)
    for name, pattern in {
        "Any": r"\bAny\b",
        "noqa": r"# noqa",
        "type: ignore": r"type: ignore",
    }.items():
        yield name, len(re.findall(pattern, whole))
    for name, pattern in MARKS.items():
        yield f"tests {name}", len(re.findall(pattern, tested))
    for name, pattern in LOW.items():
        yield (
            f"files with {name}",
            ", ".join(str(p) for p, text in texts.items() if re.search(pattern, text)) or "none",
        )


def imported(path, root):
    """Return the paths of our modules that importing a file imports, without `__init__` files."""
    blocks = [ast.parse(path.read_text())]
    while blocks:
        for node in blocks.pop().body:
            if isinstance(node, ast.If | ast.Try) and "TYPE_CHECKING" not in ast.dump(
                getattr(node, "test", node)
            ):
                blocks.append(node)
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                file = (root / Path(*name.split("."))).with_suffix(".py")
                if name.split(".")[0] in PACKAGES and file.exists():
                    yield file


def closure(root, *entries):
    """Return all modules that entries need, by syntax trees."""
    found, left = set(), [root / entry for entry in entries if (root / entry).exists()]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += imported(path, root)
    return found


FIT = """
import sys, equinox as eqx, jax, jax.numpy as jnp, optax
from dissociation.training import Epochs, fit, make_step
seen = set()
def loss(model, batch, key):
    sys.setprofile(None)
    x, y = batch
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)
models = eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 1, key=key))(jax.random.split(jax.random.key(0), 4))
step, data = make_step(loss, optax.sgd(0.1)), Epochs((jnp.ones((8, 3)), jnp.ones(8)), 4)
def enter(frame, event, _):
    code = frame.f_code
    if event == "call" and "/dissociation/" in code.co_filename:
        seen.add((code.co_filename, code.co_qualname))
sys.setprofile(enter)
fit(models, step, data, num_steps=2, key=jax.random.key(1))
print(len(seen))
"""


def ways(root):
    """Return pairs of a measure and its value."""
    operators = closure(root, "koopman/_operators/_fit.py", "koopman/operators.py")
    yield (
        "modules of koopman that `fit` needs",
        sum(root / "koopman" in path.parents for path in operators),
    )
    trainings = ("dissociation/training/_fitting.py", "dissociation/training/fitting.py")
    yield "modules that training's `fit` needs", len(closure(root, *trainings))
    commands = (
        "dissociation/__main__.py",
        "dissociation/figures/_command.py",
        "dissociation/figures/robustness.py",
    )
    figure = closure(root, *commands, "dissociation/command.py", "dissociation/figures/command.py")
    yield "modules of `python -m dissociation robustness`", len(figure)
    functions = [node for path in figure for node in ast.walk(ast.parse(path.read_text()))]
    handed = [
        node
        for node in functions
        if isinstance(node, ast.FunctionDef)
        and "config"
        in {arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
    ]
    yield "functions that are handed its configuration", len(handed)
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", FIT], env=environment, capture_output=True, text=True, check=True
    )
    yield "functions entered from `fit` to the loss", run.stdout.strip()


def main():
    words = [word for word in sys.argv[1:] if word != "--ways"]
    root = Path(words[0] if words else Path(__file__).parents[1]).resolve()
    rows = [*report(root), *(ways(root) if "--ways" in sys.argv else ())]
    for name, value in rows:
        print(f"{name:48}{value}")


if __name__ == "__main__":
    main()
