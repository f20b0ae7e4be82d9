"""The parts of JAX that may change without notice, in one place: nothing else imports `jax._src` or `jax.extend`.

Each is imported when it is first asked for. If it is gone, the error names what needs it, and all else can be used.
"""

import importlib
from typing import TYPE_CHECKING, Any

import jax

ENTRIES = {
    "jex": ("jax.extend.core", None, "reading programs, for `neuron_groups`, rewrites and checkpoints"),
    "threefry2x32_p": ("jax.extend.random", "threefry2x32_p", "`keys.normal`"),
}
"""By name: the module, what is taken of it (None: itself), and what fails without it."""

if TYPE_CHECKING:
    from jax.extend import core as jex
    from jax.extend.random import threefry2x32_p

    __all__ = ["jex", "threefry2x32_p"]


def __getattr__(name: str) -> Any:
    if name not in ENTRIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute, needed = ENTRIES[name]
    try:
        found = importlib.import_module(module)
        return found if attribute is None else getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        lacks = module if attribute is None else f"{module}.{attribute}"
        raise ImportError(f"JAX {jax.__version__} lacks {lacks}, needed for {needed}. Install an older JAX.") from error
