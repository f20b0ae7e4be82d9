"""Import the public names of a package at their first use."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

DISTRIBUTION = "dissociation"


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package, which import a public name at its first use.

    The package lists its names in `__all__` and imports them under `if TYPE_CHECKING:`. Its folders
    are imported too. A name that is elsewhere raises an `ImportError` with the place, because `from
    package import name` hides the message of an `AttributeError`.
    """
    homes: dict[str, str] = {}

    def getattribute(name: str) -> Any:
        module = sys.modules[package]
        if not homes:
            homes.update(_homes(str(module.__file__)))
        if name == "__version__" and "." not in package:
            from importlib.metadata import version

            value = version(DISTRIBUTION)
        elif name in homes:
            try:
                value = getattr(importlib.import_module(homes[name]), name)
            except AttributeError as error:  # Python would say that the package lacks the name
                raise ImportError(f"{homes[name]} cannot be imported: {error}") from error
        elif not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None:
            value = importlib.import_module(f"{package}.{name}")
        else:
            from dissociation._core.hints import hint

            missing = f"module {package!r} has no attribute {name!r}"
            advice = hint(package, name)
            if advice is not None:
                raise ImportError(f"{missing}. {advice}.")
            raise AttributeError(missing)
        setattr(module, name, value)
        return value

    def listed() -> list[str]:
        version = [] if "." in package else ["__version__"]
        return sorted([*sys.modules[package].__all__, *version])

    return getattribute, listed


def _homes(path: str) -> dict[str, str]:
    """Return the modules of the names that a file imports."""
    import ast  # here, because `import dissociation` takes milliseconds

    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    homes = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                homes[alias.name] = str(node.module)
    return homes
