"""Traced functions are equal if they compute the same, and compile once; and others are not."""

import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import compilations

import dissociation
from dissociation.training import Epochs, HostBatches, Save, fit, log_spaced_steps, make_step
from dissociation.training._partition import Threads
from dissociation.training._traced import trace

X = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)


def code(function):
    return trace(function, X).code


def rule(scale):
    @jax.custom_vjp
    def function(x):
        return scale * x

    function.defvjp(lambda x: (scale * x, None), lambda _, g: (g,))
    return function


def jitted_with(array):
    return lambda x: jax.jit(lambda y: y * array)(x)


SAME = {
    "jit with an array": lambda: jitted_with(np.arange(3.0)[None]),
    "closure": lambda: lambda x, c=0.1: c * x,
    "loop": lambda: lambda x: jax.lax.scan(lambda c, row: (c + row, c), jnp.zeros(3), x)[1],
    "rule of its own": lambda: rule(3.0),
    "draw": lambda: lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
}
DIFFERENT = {
    "constant": (lambda x: 0.1 * x, lambda x: 0.1000001 * x),
    "array inside": (jitted_with(np.ones((1, 3))), jitted_with(np.full((1, 3), 2.0))),
    "trips": (
        lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y * 2.0, x),
        lambda x: jax.lax.fori_loop(0, 4, lambda i, y: y * 2.0, x),
    ),
    "which result": (lambda x: (jnp.sin(x), jnp.cos(x))[0], lambda x: (jnp.sin(x), jnp.cos(x))[1]),
    "precision": (lambda x: x @ x.T, lambda x: jnp.matmul(x, x.T, precision="highest")),
    "forward": (rule(3.0), rule(4.0)),
    "structure": (lambda x: (x, x), lambda x: [x, x]),
    "sign of zero": (lambda x: x * 0.0, lambda x: x * -0.0),
}


@pytest.mark.parametrize("name", SAME)
def test_functions_made_anew_are_equal(name):
    one, other = code(SAME[name]()), code(SAME[name]())
    assert one == other
    assert hash(one) == hash(other)
    assert one.digest == other.digest


@pytest.mark.parametrize("name", DIFFERENT)
def test_functions_that_compute_something_else_are_not(name):
    one, other = map(code, DIFFERENT[name])
    assert one != other
    if name != "structure":
        assert one.digest != other.digest


def test_equal_operations_may_have_other_arrays():
    def scaled(factor):
        array = jnp.full((1, 3), factor)
        return trace(lambda x: x * array, X)

    small, large = scaled(1.0), scaled(2.0)
    assert small.code == large.code
    assert small.fingerprint() != large.fingerprint()
    np.testing.assert_array_equal(large(X), 2 * small(X))


def test_callbacks_are_equal_to_themselves_only():
    # What a Python function does cannot be compared; `print` twice is the same one.
    def told(callback):
        return trace(lambda x: jax.debug.callback(callback, x), X).code

    def heard(x):
        pass

    assert told(heard) != told(lambda x: None)
    assert code(lambda x: x) != told(heard)


FINGERPRINT = """
import jax, jax.numpy as jnp, optax
from dissociation.training._traced import trace
step = optax.adamw(1e-3, weight_decay=0.1)
def update(g, p): return optax.apply_updates(p, step.update(jax.nn.gelu(g), step.init(p), p)[0])
{lines}
found = trace(update, jnp.ones(3), jnp.ones(3)).fingerprint()
"""


def test_fingerprints_are_the_same_in_another_process_and_on_other_lines():
    here = {}
    exec(FINGERPRINT.format(lines="\n# further down\n"), here)
    command = [sys.executable, "-c", FINGERPRINT.format(lines="") + "print(found)"]
    there = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert there.strip() == here["found"]


def training(offset=0.0, scale=1.0, decimals=None):
    """The same loss and optimiser, made anew: their functions are other objects at every call."""
    target = jnp.full(3, offset)

    def loss(model, batch, key):
        return jnp.mean(jnp.abs(batch @ model - jnp.sum(target) - scale) ** 2)

    def observe(model, step, key):
        return jnp.sum(model) if decimals is None else jnp.round(jnp.sum(model), decimals)

    options = {"num_steps": 6, "key": jax.random.key(0), "save": Save(observe, [6])}
    return fit(jnp.ones((2, 3)), make_step(loss, optax.adam(0.1)), Epochs(X, 2), **options)


def test_equal_programs_compile_once():
    assert compilations(training)  # negative control: the first time
    assert compilations(training) == []
    # Arrays of a closure are arguments; their values compile nothing, and count.
    assert compilations(lambda: training(offset=0.5)) == []
    assert not np.array_equal(training(offset=0.5).models, training().models)
    assert compilations(lambda: training(decimals=1))  # another observation is another program
    assert not np.array_equal(training(decimals=1).history.observed, training().history.observed)


def batches_of_the_host(step):
    return itertools.repeat(np.asarray(X[:2]))


TWO = dissociation.member_mesh(jax.devices("cpu")[:2], data=2)
WEAK = jax.vmap(lambda i: jnp.asarray(0.1))(jnp.arange(3))  # of a weak type, which no step returns
COUNTS = {
    "remainder": (2, 2, {"sampler": Epochs(X, 3)}),
    "batches of the host": (1, 1, {"sampler": HostBatches(batches_of_the_host)}),
    "aux": (1, 1, {"aux": jnp.ones(3)}),
    "frozen": (1, 2, {"callbacks": [lambda step, records: np.arange(3) == step - 2]}),
    "three members on two threads": (1, 1, {"mesh": Threads(2), "member_map": "scan"}),
    "log-spaced records": (1, 1, {"save": Save(lambda model, *_: model, log_spaced_steps(9, 5))}),
    "hyperparameters of a weak type": (
        1,
        1,
        {"hyperparams": WEAK, "optimizer": lambda rate: optax.adam(rate)},
    ),
    "a checkpoint": (1, 1, {"checkpoint": "run"}),
    "a checkpoint under a data axis": (2, 1, {"checkpoint": "run", "mesh": TWO}),
}


@pytest.mark.cpu
@pytest.mark.parametrize("name", COUNTS)
def test_a_step_is_traced_once_for_each_size_of_batch(name, tmp_path, monkeypatch):
    """With a checkpoint too, and when it is resumed; a data axis needs a second trace."""
    monkeypatch.chdir(tmp_path)
    traces, compiled, options = COUNTS[name]
    assert WEAK.weak_type
    shift, calls = 1 + list(COUNTS).index(name) / 8, []  # another program than those of other tests

    def loss(model, *words):
        calls.append(1)
        value = jnp.mean((words[-2] @ model - shift) ** 2)
        return (value, words[0]) if len(words) == 3 else value

    def run(num_steps):
        calls.clear()
        given = {"sampler": Epochs(X, 2), "save": Save(at=range(0, 10, 3)), **options}
        step = make_step(loss, given.pop("optimizer", optax.adam(0.1)))
        return fit(jnp.ones((3, 3)), step, key=jax.random.key(0), num_steps=num_steps, **given)

    for programs, num_steps in ((compiled, 9), (0, 9 if "records" in name else 12)):
        messages = compilations(lambda num_steps=num_steps: run(num_steps))
        assert len(calls) == traces
        assert sum("run_chunk" in message for message in messages) == programs
        assert sum("observe_members" in message for message in messages) == (
            "records" in name and programs
        )


def test_unrolled_members_share_one_members_program():
    """So their bits cannot depend on their number, nor does the time to compile."""
    devices, mesh = 2, dissociation.member_mesh(jax.devices()[:2])

    def unrolled(members):
        step = make_step(
            lambda model, batch, key: jnp.mean((batch @ model - devices) ** 2), optax.adam(0.3)
        )
        save, how = (
            Save(lambda model, step, key: model.sum()),
            {"member_map": "unroll", "mesh": mesh},
        )
        options = {"num_steps": 2, "key": jax.random.key(0), "save": save, **how}
        return fit(jnp.ones((members, 3)), step, Epochs(X, 2), **options)

    assert any("run_chunk" in message for message in compilations(lambda: unrolled(devices)))
    assert not [
        m
        for m in compilations(lambda: unrolled(4 * devices))
        if "run_chunk" in m or "observe_members" in m
    ]
