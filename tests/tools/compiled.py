"""What a call compiles."""

import jax


def compilations(caplog, function):
    """What the call compiles, by name."""
    caplog.clear()
    with jax.log_compiles():
        function()
    return [message for message in caplog.messages if "Finished XLA compilation" in message]
