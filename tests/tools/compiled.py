"""Count the programs that a call compiles, by the events of `jax.monitoring`."""

import jax

EVENT = "/jax/core/compile/backend_compile_duration"
"""Event that JAX records for each program that it compiles or reads from its cache."""

_names = []


def _record(event, seconds, **details):
    if event == EVENT:
        _names.append(details.get("fun_name", ""))


jax.monitoring.register_event_duration_secs_listener(_record)


def num_compiled():
    """Return the number of programs that this process has compiled since this module was imported."""
    return len(_names)


def compilations(function):
    """Return the names of the programs that the call compiles, such as "jit(add)"."""
    before = len(_names)
    function()
    return _names[before:]
