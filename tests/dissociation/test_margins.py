import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation.measures import linear_head
from dissociation.measures._margins import class_plane, signed_distance
from dissociation.models import CNN, MLP, BilinearNetwork

RNG = np.random.default_rng(0)
Z, W, B = (RNG.normal(size=shape).astype(np.float32) for shape in ((50, 6), (4, 6), (4,)))


def test_the_sign_is_the_logits_and_the_length_the_way_to_the_boundary():
    distance = signed_distance(Z, W, B, 1, 3)
    logits = Z @ W.T + B
    np.testing.assert_array_equal(distance > 0, logits[:, 1] > logits[:, 3])
    # Moving by the distance against the normal lands on the boundary.
    normal = (W[1] - W[3]) / np.linalg.norm(W[1] - W[3])
    moved = (Z - np.asarray(distance)[:, None] * normal) @ W.T + B
    np.testing.assert_allclose(moved[:, 1], moved[:, 3], atol=1e-5)
    np.testing.assert_allclose(signed_distance(Z, W, B, 3, 1), -distance, rtol=1e-5)
    without = signed_distance(Z, W, np.zeros(4, np.float32), 1, 3)
    np.testing.assert_allclose(distance - without, (B[1] - B[3]) / np.linalg.norm(W[1] - W[3]), rtol=1e-4)


def test_the_plane():
    plane = class_plane(W, B, 0, 2)
    np.testing.assert_allclose(plane.basis @ plane.basis.T, np.eye(2), atol=1e-6)
    # It holds both weights, and the first axis points from b to a.
    for row in W[[0, 2]]:
        np.testing.assert_allclose(plane.basis.T @ (plane.basis @ row), row, atol=1e-5)
    np.testing.assert_allclose(plane.basis[0], (W[0] - W[2]) / np.linalg.norm(W[0] - W[2]), atol=1e-6)
    # A sample's place relative to the line is its signed distance, in the plane or not.
    apart = plane.coordinates(Z)[:, 0] - plane.boundary
    np.testing.assert_allclose(apart, signed_distance(Z, W, B, 0, 2), atol=1e-5)


@pytest.mark.parametrize("model", [MLP(6, 8, 1, 3, key=jax.random.key(0)), CNN(8, 3, key=jax.random.key(0)),
                                   eqx.nn.MLP(6, 3, 8, 1, key=jax.random.key(0))])  # fmt: skip
def test_heads(model):
    weights, biases = linear_head(model)
    assert weights.shape == (3, 8)
    last = model.head if isinstance(model, CNN) else model.layers[-1]
    z = jax.random.normal(jax.random.key(1), (8,))
    np.testing.assert_allclose(last(z), weights @ z + biases, atol=1e-6)
    bare = eqx.nn.MLP(6, 3, 8, 1, use_final_bias=False, key=jax.random.key(0))
    np.testing.assert_array_equal(linear_head(bare)[1], 0)


def test_bad_input_is_refused():
    ending = lambda last: eqx.nn.MLP(6, 3, 8, 1, final_activation=last, key=jax.random.key(0))  # noqa: E731
    zeros = jnp.zeros(2)
    for call, error, words in (
        (lambda: class_plane(jnp.asarray([[1.0, 2.0], [2.0, 4.0]]), zeros, 0, 1), ValueError, "parallel rows"),
        (lambda: class_plane(jnp.ones((2, 2)), zeros, 0, 1), ValueError, "equal rows"),
        (lambda: signed_distance(Z, np.ones((4, 6), np.float32), B, 0, 1), ValueError, "equal rows"),
        (lambda: signed_distance(Z, W, B, 0, 4), ValueError, "`second` must be a class from 0 to 3, got 4"),
        (lambda: signed_distance(Z, W, B, 2, 2), ValueError, "`second` must be another class"),
        (lambda: linear_head(BilinearNetwork(6, 4, 3, key=jax.random.key(0))), TypeError, "linear last layer"),
        # The identity on small numbers, and on large positive ones; the identity on large numbers.
        (lambda: linear_head(ending(lambda z: jnp.maximum(z, -1e6))), TypeError, "with an activation"),
        (lambda: linear_head(ending(lambda z: jnp.where(abs(z) < 1e-6, 0, z))), TypeError, "with an activation"),
    ):
        with pytest.raises(error, match=words):
            call()


def test_traced_weights_that_span_nothing_give_nan():
    for weights in (np.ones((2, 3)), np.zeros((2, 3))):
        assert np.isnan(jax.jit(lambda w: signed_distance(np.ones((4, 3)), w, np.zeros(2), 0, 1))(weights)).all()
    for factor in (1.1, -3.7):
        parallel = np.asarray([[0.1, 0.2, 0.7]], np.float32) * np.asarray([[1.0], [factor]], np.float32)
        plane = jax.jit(lambda w: class_plane(w, np.zeros(2, np.float32), 0, 1))(parallel)
        assert np.isnan(plane.basis[1]).all()


def test_a_plane_prints_its_numbers():
    shown = repr(class_plane(np.eye(2, dtype=np.float32), np.zeros(2, np.float32), 0, 1))
    assert "0.707107" in shown
    assert "f32" not in shown
