"""Groups of programs whose axes have one entry, or none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation.rewrites import group_report

OPERATIONS = {
    "power of a number": lambda y: y * 2.0 ** jnp.arange(len(y)),
    "power": lambda y: jnp.abs(y) ** jnp.arange(1.0, 1 + len(y)),
    "numbers": lambda y: 2.0 * y + 1.0,
    "largest": lambda y: jnp.maximum(y, 0.0),
    "choice": lambda y: jnp.where(y > 0, y, 0.1 * y),
    "limits": lambda y: jnp.clip(y, -1.0, 1.0),
    "sums": lambda y: y - jnp.sum(y, keepdims=True),
    "running sums": jnp.cumsum,
    "order": jnp.sort,
    "reversed": lambda y: y[::-1],
    "reshaped": lambda y: y.reshape(-1, 1) * jnp.ones((1, 1)),
    "repeated": lambda y: jnp.tile(y, 2),
    "joined": lambda y: jnp.concatenate([y, y]),
    "stacked": lambda y: jnp.stack([y, 2 * y]),
    "padded": lambda y: jnp.pad(y, (0, 1)),
    "products": lambda y: y @ jnp.ones((len(y), 2)),
    "outer": lambda y: y[:, None] * y[None],
    "slices": lambda y: y[: len(y) // 2],
    "chosen": lambda y: y[jnp.zeros(1, int)] if len(y) else y,
    "written": lambda y: y.at[:1].set(0.0),
    "softmax": lambda y: jax.nn.softmax(y) if len(y) else y,
    "a loop": lambda y: jax.lax.scan(
        lambda carry, row: (carry + row, carry * row), y, jnp.ones((1, len(y)))
    )[1],
    "spectrum": lambda y: jnp.abs(jnp.fft.fft(y)) if len(y) else y,
}


@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_rules_take_the_shapes_of_results_from_the_program(name, size):
    model = np.ones((2, 3), np.float32), np.ones((3, max(size, 1)), np.float32)
    report = group_report(
        model, np.ones(2, np.float32), call=lambda m, x: OPERATIONS[name]((x @ m[0] @ m[1])[:size])
    )
    assert [len(group.slots) for group in report.groups.values()][:1] == [2]  # the hidden layer


def test_powers_of_one_output():
    report = group_report(
        np.ones((4, 1)), np.ones(4), call=lambda m, x: (x @ m) * 2.0 ** jnp.arange(1)
    )
    assert not report.groups
