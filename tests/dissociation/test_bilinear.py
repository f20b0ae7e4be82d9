import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from dissociation.bilinear import decompose
from dissociation.models import BilinearNetwork, wrap_bilinear
from dissociation.models._bilinear import GATES, BilinearLayer
from dissociation.models._initial import draw_weights

X = np.random.default_rng(0).normal(size=(7, 12)).astype(np.float32)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_a_product(gate, bias):
    layer = BilinearLayer(12, 5, bias=bias, gate=gate, key=jax.random.key(0))
    left, right = X @ np.asarray(layer.left).T, X @ np.asarray(layer.right).T
    if bias:
        left, right = left + np.asarray(layer.left_bias), right + np.asarray(layer.right_bias)
    np.testing.assert_allclose(jax.vmap(layer)(X), GATES[gate](left) * right, rtol=1e-4, atol=1e-6)
    doubled = jax.vmap(layer)(2 * X)
    quadratic = np.allclose(doubled, 4 * jax.vmap(layer)(X), rtol=1e-4, atol=1e-6)
    assert quadratic == (not bias and gate in ("none", "relu"))  # a ReLU is homogeneous too, but no quadratic form


@pytest.mark.parametrize("residual", [False, True])
def test_a_network_by_hand(residual):
    model = BilinearNetwork(12, 6, 3, num_layers=2, residual=residual, key=jax.random.key(1))
    hidden = X @ np.asarray(model.embed).T
    for layer in model.layers:
        added = (hidden @ np.asarray(layer.left).T) * (hidden @ np.asarray(layer.right).T)
        hidden = hidden + added if residual else added
    np.testing.assert_allclose(jax.vmap(model)(X), hidden @ np.asarray(model.head).T, rtol=1e-4, atol=1e-6)
    found = jax.vmap(model.representations)(X)
    assert list(found) == ["hidden0", "hidden1", "features", "logits"]
    np.testing.assert_allclose(found["features"], hidden, rtol=1e-4, atol=1e-6)


def test_initial_weights():
    plain = BilinearNetwork(key=jax.random.key(0))
    assert (plain.embed.shape, plain.head.shape) == ((256, 784), (10, 256))
    assert 0.99 * 784**-0.5 < np.abs(plain.embed).max() <= 784**-0.5
    assert np.abs(plain.layers[0].left).max() <= 1 / 16
    init = lambda key, shape, fan_in: jnp.full(shape, 1.0 * fan_in)  # noqa: E731
    model = BilinearNetwork(4, 3, 2, init=init, key=jax.random.key(0))
    np.testing.assert_array_equal(model.embed, 4)
    np.testing.assert_array_equal(model.head, 3)
    spread = draw_weights("lecun", (300, 400), 100, key=jax.random.key(0)).std()
    np.testing.assert_allclose(spread, 0.1, rtol=0.01)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"gate": "tanh"}, "'silu'"), ({"init": "he"}, "'lecun'"), ({"num_layers": 0}, "`num_layers`")],
)
def test_bad_input_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        BilinearNetwork(4, 3, 2, **options, key=jax.random.key(0))


@pytest.mark.parametrize("bias", [False, True])
def test_any_bilinear_model_can_be_wrapped(bias):
    # Layers of different widths, as no constructor here makes them.
    rng = np.random.default_rng(0)
    embed, head = rng.normal(size=(5, 7)).astype(np.float32), rng.normal(size=(3, 4)).astype(np.float32)
    sizes = [(6, 5), (4, 6)]
    layers = [
        tuple(rng.normal(size=s).astype(np.float32) for s in (shape, shape, *((shape[:1],) * 2 if bias else ())))
        for shape in sizes
    ]
    model = wrap_bilinear(embed, layers, head)
    x = rng.normal(size=7).astype(np.float32)
    hidden = embed @ x
    for left, right, *biases in layers:
        b, c = biases or (0, 0)
        hidden = (left @ hidden + b) * (right @ hidden + c)
    np.testing.assert_allclose(model(x), head @ hidden, rtol=1e-4)
    # And decomposed: the first layer's forms give what it computes.
    spectrum = decompose(model, np.eye(6, dtype=np.float32), layer=0)
    left, right, *biases = layers[0]
    b, c = biases or (0, 0)
    np.testing.assert_allclose(spectrum(x), (left @ (embed @ x) + b) * (right @ (embed @ x) + c), rtol=1e-3, atol=1e-3)


def test_what_does_not_fit_is_not_wrapped():
    layer = (np.ones((4, 5), np.float32), np.ones((4, 5), np.float32))
    for layers, columns, words in (([], 5, "at least one layer"), ([layer], 5, "`head` must have 4 columns")):
        with pytest.raises(ValueError, match=words):
            wrap_bilinear(np.ones((5, 7), np.float32), layers, np.ones((3, columns), np.float32))


def test_parts_that_are_no_real_weights_are_named(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    eye, head = np.eye(3, dtype=np.float32), np.ones((2, 3), np.float32)
    for parts, error, words in (
        ((eye, np.full((3, 3), "a")), TypeError, r"`layers\[1\]\[1\]` must be an array of real numbers, got text"),
        ((eye, eye * 1j), TypeError, r"`layers\[1\]\[1\]` must hold real numbers, got dtype complex64"),
        ((eye, eye, np.ones(2), np.ones(3)), ValueError, r"two biases \[outputs\] or none, in layer 1, got \[\(3, 3\)"),
        ((eye, eye[:2]), ValueError, "two matrices"),
        ((np.float32(1.0), eye), ValueError, "two matrices"),
        ((), ValueError, r"two matrices \[outputs, 3\], .*, in layer 1, got \[\]"),
    ):
        with pytest.raises(error, match=words):
            wrap_bilinear(eye, [(eye, eye), parts], head)
