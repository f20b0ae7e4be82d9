"""Read the public names of both packages from the sources. `FACES` maps a folder or module to its `__all__`."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("dissociation", "koopman")


def dotted(path):
    """Return the name by which a source file of the packages is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def listed(path):
    """Return the names in `__all__` of a file, or without it those of all top-level functions and classes."""
    body = ast.parse(path.read_text()).body
    for node in body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    return [
        n.name
        for n in body
        if isinstance(n, ast.FunctionDef | ast.ClassDef) and not n.name.startswith("_")
    ]


def faces():
    """Yield every folder and module without underscore, and its public names."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = dotted(path)
            if path.stem != "__main__" and not any(
                part.startswith("_") for part in name.split(".")
            ):
                yield name, listed(path)


FACES = {name: names for name, names in faces() if names}
