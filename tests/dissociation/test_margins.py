import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from words import refused

from dissociation.measures import linear_head
from dissociation.measures._margins import class_places
from dissociation.models import CNN, MLP, BilinearNetwork

RNG = np.random.default_rng(0)
Z, W, B = (RNG.normal(size=shape).astype(np.float32) for shape in ((50, 6), (4, 6), (4,)))


def test_distances_and_the_plane():
    weights, biases = jnp.asarray(W), jnp.asarray(B)
    distance, plane, boundary = class_places(jnp.asarray(Z), weights, biases, 1, 3)
    logits = Z @ W.T + B
    np.testing.assert_array_equal(distance > 0, logits[:, 1] > logits[:, 3])
    # Moving by the distance against the normal lands on the boundary.
    normal = (W[1] - W[3]) / np.linalg.norm(W[1] - W[3])
    moved = (Z - np.asarray(distance)[:, None] * normal) @ W.T + B
    np.testing.assert_allclose(moved[:, 1], moved[:, 3], atol=1e-5)
    np.testing.assert_allclose(plane[:, 0], Z @ normal, atol=1e-5)
    np.testing.assert_allclose(plane[:, 0] - boundary, distance, atol=1e-5)
    # The plane holds both weights: their lengths and products stay.
    rows = class_places(weights[jnp.asarray([1, 3])], weights, biases, 1, 3)[1]
    np.testing.assert_allclose(rows @ rows.T, W[[1, 3]] @ W[[1, 3]].T, atol=1e-5)


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


def test_heads_that_are_not_linear_are_refused():
    ending = lambda last: eqx.nn.MLP(6, 3, 8, 1, final_activation=last, key=jax.random.key(0))  # noqa: E731
    refused(
        (lambda: linear_head(BilinearNetwork(6, 4, 3, key=jax.random.key(0))), "linear last layer"),
        # The identity on small numbers, and on large positive ones; the identity on large numbers.
        (lambda: linear_head(ending(lambda z: jnp.maximum(z, -1e6))), "with an activation"),
        (
            lambda: linear_head(ending(lambda z: jnp.where(abs(z) < 1e-6, 0, z))),
            "with an activation",
        ),
        error=TypeError,
    )


def test_weights_that_span_nothing_give_nan():
    for weights in (jnp.ones((2, 3)), jnp.zeros((2, 3))):
        assert np.isnan(class_places(jnp.ones((4, 3)), weights, jnp.zeros(2), 0, 1)[0]).all()
    for factor in (1.1, -3.7):
        parallel = jnp.asarray([[0.1, 0.2, 0.7]]) * jnp.asarray([[1.0], [factor]])
        distance, plane, _ = class_places(jnp.ones((4, 3)), parallel, jnp.zeros(2), 0, 1)
        assert np.isfinite(distance).all()
        assert np.isnan(plane[:, 1]).all()
