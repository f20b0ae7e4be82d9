"""List the programs that a call compiles."""

import jax


def compilations(caplog, function):
    """Return the names of the programs that the call compiles."""
    caplog.clear()
    with jax.log_compiles():
        function()
    return [message for message in caplog.messages if "Finished XLA compilation" in message]
