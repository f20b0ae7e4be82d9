"""Names at the top of a package whose modules are imported when they are first asked for."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

DISTRIBUTION = "dissociation"


def attach(package: str, homes: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package: its version, and names from modules that stay unloaded until then.

    Args:
        package: Its `__name__`.
        homes: The names by the modules that define them.

    Returns:
        The two functions.
    """
    home = {name: module for module, names in homes.items() for name in names}

    def getattribute(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version

            value = version(DISTRIBUTION)
        elif name == "__all__":
            value = sorted(home)
        elif name in home:
            value = getattr(importlib.import_module(home[name]), name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home, "__version__"} - {"TYPE_CHECKING", "attach"})

    return getattribute, listed
