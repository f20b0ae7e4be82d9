"""What a training step sees: passes over arrays, draws, and batches of the host."""

import threading
from functools import partial
from unittest.mock import Mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from linear_regression import (
    linear_members,
    mean_of_batch,
    noisy_error,
    regression,
    trained,
    weights,
)

from dissociation.training import Epochs, FullBatch, HostBatches, Online, Sampler, fit, make_step
from dissociation.training import _samplers as samplers_module

SEEN = make_step(mean_of_batch, optax.sgd(0.0))
"""A step whose loss is the mean of its batch."""


def losses(sampler, key, members=3, **options):
    return fit(jnp.zeros((members, 1)), SEEN, sampler, key=key, **options).history.loss


@pytest.mark.parametrize("shared", [True, False])
def test_every_epoch_uses_every_sample_once(key, shared):
    data = 2.0 ** jnp.arange(8)
    seen = losses(Epochs(data, 1, shared=shared), key, num_epochs=2)
    for own in seen:
        assert sorted(own[:8]) == sorted(own[8:]) == data.tolist()
        assert own[:8].tolist() != own[8:].tolist()
    assert (seen == seen[0]).all() == shared


@pytest.mark.parametrize(("stacked", "drop"), [(True, True), (False, False)])
def test_without_shuffling_batches_come_in_the_given_order(key, stacked, drop):
    factors = jnp.arange(1.0, 4)[:, None] if stacked else jnp.ones((3, 1))
    data = factors * jnp.arange(10.0)[None]
    sampler = Epochs(
        data if stacked else data[0], 4, shuffle=False, stacked=stacked, drop_remainder=drop
    )
    wanted = [1.5, 5.5] * 3 if drop else [1.5, 5.5, 8.5] * 3
    np.testing.assert_allclose(
        losses(sampler, key, num_epochs=3), factors * np.array(wanted)[None], rtol=1e-6
    )


KINDS = {
    "epochs": Epochs,
    "whole": lambda data, size, shared, stacked: FullBatch(data, stacked=stacked),
    "draws": lambda data, size, **options: Online(
        lambda source, key: source + jax.random.normal(key), data, **options
    ),
}


@pytest.mark.parametrize(
    ("kind", "shared", "size"),
    [
        ("epochs", True, 4),
        ("epochs", False, 5),
        ("whole", True, 4),
        ("draws", False, 4),
    ],  # one smaller last batch
)
def test_members_may_have_data_of_their_own(key, kind, shared, size):
    """Stacked data: every member as if it were alone with its own."""
    stacked = np.asarray(jax.random.normal(key, (3, 12)))
    member_keys = key if shared else jax.random.split(key, 3)
    found = losses(
        KINDS[kind](stacked, size, shared=shared, stacked=True), member_keys, num_steps=7
    )
    for m in range(3):
        own, sampler = slice(m, m + 1), KINDS[kind](stacked[m], size, shared=shared, stacked=False)
        alone = losses(sampler, key if shared else member_keys[own], 1, num_steps=7)
        np.testing.assert_array_equal(found[m], alone[0])
    assert len(np.unique(found[:, 0])) == 3


def test_stacked_data_must_belong_to_the_members(key):
    stacked = partial(Epochs, stacked=True)
    for call, words in (
        (
            lambda: losses(stacked(jnp.ones((2, 8)), 4), key, num_steps=1),
            r"members as `models` \(3\), got 2",
        ),
        (lambda: stacked(jnp.ones((2, 7)), 8), r"at most the number of samples \(7\), got 8"),
        (lambda: Online(lambda key: key, stacked=True), "`source` must be given"),
        (
            lambda: stacked((jnp.ones((3, 5)), jnp.ones((3, 4))), 2),
            r"`data` must agree .*\[1\] with \(4,\)",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_draws_differ_by_step_and_by_member_unless_shared(key):
    own = losses(Online(jax.random.normal), key, num_steps=5)
    assert len(np.unique(own)) == 15
    shared = losses(Online(jax.random.normal, shared=True), key, num_steps=5)
    assert len(np.unique(shared)) == 5
    assert (shared == shared[0]).all()
    member_keys = jax.random.split(jax.random.key(3), 3)
    found = losses(Online(jax.random.normal), member_keys, num_steps=5)
    for m in range(3):
        order = jax.random.split(member_keys[m], 3)[2]  # a member's third key draws
        wanted = [jax.random.normal(jax.random.fold_in(order, step)) for step in range(5)]
        np.testing.assert_array_equal(found[m], wanted)


class Alternating(Sampler):
    """A sampler of a user's own: one sample after the other, from a start that is drawn once for ten steps."""

    data: jax.Array
    shared: bool = eqx.field(static=True, default=False)
    stacked: bool = eqx.field(static=True, default=False)
    epoch_steps: int = eqx.field(static=True, default=10)

    def segment(self, step):
        block, within = divmod(step, 10)
        return samplers_module.Segment(None, block, within, 10 * (block + 1))

    def plan(self, key, block):
        return jax.random.randint(jax.random.fold_in(key, block), (), 0, len(self.data))

    def batch(self, plan, within, size):
        return self.data[(plan + within) % len(self.data)][None]


def test_a_sampler_of_ones_own(key):
    found = losses(Alternating(jnp.arange(50.0)), key, num_epochs=3)
    steps = np.diff(found.reshape(3, 3, 10), axis=2) % 50
    assert (steps == 1).all()
    assert (
        len(np.unique(found.reshape(3, 3, 10)[:, :, 0])) > 5
    )  # every member and every block begins elsewhere


def in_order(data, size, begun=None):
    """What `Epochs(data, size, shuffle=False)` gives, batch by batch, from any step on and without end."""

    def start(step):
        if begun is not None:
            begun.append(step)
        count = len(data[0]) // size
        while True:
            at = step % count * size
            yield jax.tree.map(lambda leaf: np.asarray(leaf)[at : at + size], data)  # noqa: B023
            step += 1

    return start


@pytest.mark.parametrize(
    ("member_map", "block"), [("vmap", 4), pytest.param("scan", 100, marks=pytest.mark.slow)]
)
def test_batches_of_the_host_equal_those_of_arrays(key, member_map, block):
    models, data = linear_members(key), regression(key, samples=20)
    step, how = make_step(noisy_error, optax.adam(0.05)), {"member_map": member_map}
    inside = fit(models, step, Epochs(data, 4, shuffle=False), num_steps=33, key=key, **how)
    sampler = HostBatches(in_order(data, 4), epoch_steps=5, block=block)
    outside = fit(models, step, sampler, num_steps=33, key=key, **how)
    np.testing.assert_array_equal(weights(inside), weights(outside))
    np.testing.assert_array_equal(inside.history.loss, outside.history.loss)
    first = fit(models, step, sampler, num_epochs=2, key=key, **how)
    begun = []
    again = HostBatches(in_order(data, 4, begun), block=block)
    second = fit(first.state, step, again, num_steps=23, key=key, **how)
    np.testing.assert_array_equal(weights(outside), weights(second))
    assert set(begun) == {first.num_steps} == {10}  # goes on where the state stands


@pytest.mark.parametrize(("count", "block"), [(0, 4), (8, 4), (10, 16)])
def test_an_iterator_that_ends_says_so(key, count, block):
    data = jnp.ones((4, 3))
    sampler = HostBatches(lambda step: iter([data] * (count - step)), block=block)
    wanted = (
        f"`start` must give a batch for every step, {count} among them, got an iterator "
        "that has ended"
    )
    with pytest.raises(ValueError, match=wanted):
        losses(sampler, key, num_steps=11)
    if count:
        assert losses(sampler, key, num_steps=count).shape == (3, count)


def test_an_iterator_may_fill_one_buffer_again_and_again(key):
    def start(step):
        buffer = np.zeros((4, 3), np.float32)
        for i in range(step, 100):
            buffer[:] = i
            yield buffer

    found = losses(HostBatches(start, block=16), key, num_steps=20)
    np.testing.assert_array_equal(found, np.tile(np.arange(20.0), (3, 1)))


def test_batches_of_several_shapes_are_refused(key):
    sizes = [4, 4, 4, 2]
    for block in (4, 1):  # within what is handed over at once, and between
        sampler = HostBatches(
            lambda step: (np.ones(size, np.float32) for size in sizes[step:]), block=block
        )
        with pytest.raises(
            ValueError,
            match=r"`start` must give batches of one structure .*at step 3 .*smaller batch",
        ):
            losses(sampler, key, num_steps=4)


def test_the_thread_of_the_host_ends_with_the_run(key):
    sampler, failing = (
        HostBatches(in_order(regression(key, samples=20), 4), block=2),
        Mock(side_effect=RuntimeError),
    )
    with pytest.raises(RuntimeError):
        trained(key, sampler=sampler, num_steps=6, callbacks=[failing])
    for thread in [thread for thread in threading.enumerate() if "(fill)" in thread.name]:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (
            ([[1.0, 2.0]], [3.0]),
            TypeError,
            r"`data` must hold arrays, samples first, got float 1.0 at data\[0\]\[0\]",
        ),
        ((np.ones(10), np.full(10, None)), TypeError, r"`data\[1\]` must be .* dtype object"),
        (
            np.full(10, 2**40),
            ValueError,
            "`data` must hold integers from -2147483648 to 2147483647, got 1099511627776",
        ),
        (jnp.full(10, jnp.inf, jnp.bfloat16), ValueError, "`data` must be finite, got inf"),
        ({}, ValueError, "`data` must hold at least one array"),
        (
            (np.ones(10), np.ones(9)),
            ValueError,
            r"`data` must agree in the leading axis.*\[1\] with \(9,\)",
        ),
    ],
)
def test_data_that_are_no_arrays_of_numbers_are_refused(data, error, message):
    for sampler in (FullBatch, lambda data: Epochs(data, 2)):
        with pytest.raises(error, match=message):
            sampler(data)


def test_what_the_host_starts_must_give_batches(key):
    for start, error, words in (
        (lambda step: None, TypeError, "`start` must return an iterator of batches, got None"),
        (
            lambda step: [[[1.0, 2.0]]] * 9,
            TypeError,
            "`start` must hold arrays, samples first, got float 1.0",
        ),
        (lambda step: 1 // 0, ZeroDivisionError, "by zero"),
    ):
        with pytest.raises(error, match=words):
            trained(key, sampler=HostBatches(start), num_steps=2)
    for name in ("epoch_steps", "block"):
        with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
            HostBatches(iter, **{name: 0})


def test_data_of_other_kinds_of_numbers_are_taken(key):
    x = regression(key)[0]
    sample_keys, whole = jax.random.split(key, 10), np.arange(10) - 2**31

    def loss(model, batch, key):
        assert jnp.issubdtype(batch[0].dtype, jax.dtypes.prng_key)
        return jnp.sum(model.weight) * (jnp.mean(batch[1] * 1.0) + jnp.mean(jnp.abs(batch[2])))

    data = (sample_keys, whole, 1j * x.astype(jnp.float16))
    seen = trained(key, loss=loss, sampler=Epochs(data, 4), num_steps=3)
    assert np.isfinite(seen.history.loss).all()
