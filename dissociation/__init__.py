"""What a network's function says about its representation, and what it leaves open.

Train many seeds of a network, rewrite its weights without changing its function, and measure what changes.
Import the modules, for example `from dissociation.weights import neurons`: nothing is imported here, and
`use_all_cores` when it is asked for.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "use_all_cores":
        from dissociation.cores import use_all_cores

        return use_all_cores
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
