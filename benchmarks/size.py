"""Size of the library and its tests: lines, statements, public names, and what reviewers count.

    python benchmarks/size.py [folder of a checkout]

A public name stands in `__all__` of a folder's `__init__` or of a module without underscore; a module without `__all__`
shows all of its top-level names without underscore. Statements are those of the syntax tree, without docstrings.
"""

import ast
import re
import sys
from pathlib import Path

PACKAGES = ("dissociation", "koopman")
MARKS = {"skipped": r"mark\.skip|importorskip|pytest\.skip\(", "expected to fail": r"xfail", "slow": r"mark\.slow"}
LOW = {"jax._src": r"jax\._src", "pickle": r"\bpickle\b", "ctypes": r"\bctypes\b", "jax.extend": r"jax\.extend\b"}


def is_docstring(node):
    """Whether a statement is a string alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def statements(tree):
    """Statements of a syntax tree, strings that stand alone not counted."""
    return sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in ast.walk(tree))


def public_names(path, tree):
    """Names that a module offers."""
    if any(part.startswith("_") for part in (*path.parts[:-1], path.stem.replace("__init__", ""))):
        return []
    names = []
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and any(getattr(t, "id", "") == "__all__" for t in targets):
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
    """Return the names that an `__init__` imports, also for type checkers: its public face."""
    found = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES
        for alias in node.names
    }
    return [name for name in found if not name.startswith("_")]


def functions(trees):
    """All functions, with the number of their lines without docstring and of their parameters."""
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = [one for one in node.body if not is_docstring(one)]
                length = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                arguments = node.args
                yield length, len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)


def report(root):
    """Pairs of a measure and its value."""
    files = [path.relative_to(root) for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
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
        yield f"  {package}", sum(count for path, count in lines.items() if path.parts[0] == package)
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
    for name, pattern in {"Any": r"\bAny\b", "noqa": r"# noqa", "type: ignore": r"type: ignore"}.items():
        yield name, len(re.findall(pattern, whole))
    for name, pattern in MARKS.items():
        yield f"tests {name}", len(re.findall(pattern, tested))
    for name, pattern in LOW.items():
        yield f"files with {name}", ", ".join(str(p) for p, text in texts.items() if re.search(pattern, text)) or "none"


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
    for name, value in report(root):
        print(f"{name:42}{value}")


if __name__ == "__main__":
    main()
