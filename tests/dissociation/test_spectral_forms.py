import jax
import jax.numpy as jnp
import numpy as np
import pytest
from words import refused

from dissociation.bilinear import (
    adversarial_mask,
    decompose,
    interaction_tensor,
    truncate,
    truncated_outputs,
)
from dissociation.bilinear._forms import activations, contributions, mean_contribution, reorder
from dissociation.models import BilinearNetwork

RNG = np.random.default_rng(0)


def network(inputs=20, hidden=8, classes=3, seed=0, **options):
    return BilinearNetwork(inputs, hidden, classes, key=jax.random.key(seed), **options)


@pytest.mark.parametrize("hidden", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_decomposition_against_a_dense_reference(hidden):
    """Input-space matrices in float64, straight from the definition."""
    model = network(784, hidden, 10)
    embed, head = np.asarray(model.embed, float), np.asarray(model.head, float)
    left, right = (
        np.asarray(w, float) @ embed for w in (model.layers[0].left, model.layers[0].right)
    )
    forms = np.einsum("co,oi,oj->cij", head, left, right)
    dense = 0.5 * (forms + forms.swapaxes(1, 2))
    found = decompose(model)
    assert found.vectors.shape == (10, hidden, 784)
    own = np.asarray(found.values, float), np.asarray(found.vectors, float)
    for index, (form, values, vectors) in enumerate(zip(dense, *own, strict=True)):
        scale = np.abs(values[0])
        if index == 0:  # the slow one
            exact = np.linalg.eigvalsh(form)
            exact = exact[np.argsort(-np.abs(exact))][:hidden]
            np.testing.assert_allclose(np.sort(values), np.sort(exact), atol=1e-5 * scale)
        # Orthonormal eigenvectors whose eigenvalues make up the whole norm: none is missing.
        np.testing.assert_allclose(np.linalg.norm(values), np.linalg.norm(form), rtol=1e-5)
        np.testing.assert_allclose(form @ vectors.T, values * vectors.T, atol=1e-5 * scale)
        np.testing.assert_allclose(vectors @ vectors.T, np.eye(hidden), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"bias": True, "residual": True}])
@pytest.mark.parametrize(("inputs", "hidden"), [(20, 8), (6, 9)])
@pytest.mark.parametrize("space", ["input", "hidden"])
def test_the_form_is_the_network(options, inputs, hidden, space):
    model = network(inputs, hidden, **options)
    x = RNG.normal(size=(5, inputs)).astype(np.float32)
    seen = x if space == "input" else jax.vmap(lambda one: model.representations(one)["embed"])(x)
    tensor = interaction_tensor(model, space=space)
    full = np.pad(seen, ((0, 0), (0, 1)), constant_values=1) if options else seen
    np.testing.assert_array_equal(tensor, tensor.swapaxes(1, 2))
    logits = jax.vmap(model)(x)
    np.testing.assert_allclose(np.einsum("ni,cij,nj->nc", full, tensor, full), logits, atol=1e-5)
    spectrum = decompose(model, space=space)
    np.testing.assert_allclose(jax.vmap(spectrum)(seen), logits, atol=1e-5)
    # All components are the whole network, none is nothing.
    by_number = truncated_outputs(spectrum, seen)
    np.testing.assert_allclose(by_number[:, -1], logits, atol=1e-5)
    np.testing.assert_array_equal(by_number[:, 0], 0)
    np.testing.assert_allclose(jax.vmap(truncate(spectrum, 2))(seen), by_number[:, 2], atol=1e-6)


def test_orders():
    model = network()
    values = {
        by: np.asarray(decompose(model, by=by).values)
        for by in ("magnitude", "positive", "negative")
    }
    assert (np.diff(np.abs(values["magnitude"])) <= 0).all()
    assert (np.diff(values["positive"]) <= 0).all()
    assert (np.diff(values["negative"]) >= 0).all()
    assert values["positive"][0, 0] > 0 > values["negative"][0, 0]
    np.testing.assert_allclose(np.sort(values["magnitude"]), values["negative"], atol=1e-6)


def test_deeper_layers_by_directions_pulled_back():
    model = network(num_layers=2)
    x = RNG.normal(size=(4, 20)).astype(np.float32)
    below = jax.vmap(lambda one: model.representations(one)["layers[0].left"])(x)
    last = decompose(model, space="hidden")
    np.testing.assert_allclose(jax.vmap(last)(below), jax.vmap(model)(x), atol=1e-6)
    # An eigenvector of the last layer is an output direction of the one below it.
    directions = last.vectors[0, :3]
    pulled = decompose(model, directions, layer=0)
    np.testing.assert_allclose(jax.vmap(pulled)(x), below @ directions.T, atol=1e-5)


def test_contributions_and_their_order():
    model = network()
    x = RNG.normal(size=(50, 20)).astype(np.float32) * np.linspace(0.01, 3, 20, dtype=np.float32)
    spectrum = decompose(model)
    np.testing.assert_allclose(contributions(spectrum, x).sum(2), jax.vmap(model)(x), atol=1e-4)
    np.testing.assert_allclose(
        activations(spectrum, x)[:, 1, 2], x @ spectrum.vectors[1, 2], atol=1e-5
    )
    weight = mean_contribution(spectrum, x)
    ordered = reorder(spectrum, weight)
    assert (np.diff(mean_contribution(ordered, x)) <= 1e-6).all()
    assert (np.asarray(ordered.values) != np.asarray(spectrum.values)).any()
    np.testing.assert_allclose(jax.vmap(ordered)(x), jax.vmap(model)(x), atol=1e-4)


def test_masks_excite_one_component_alone():
    spectrum = decompose(network(60, 12))
    mask = adversarial_mask(spectrum, 1, 2, against=4, norm=2.0)
    np.testing.assert_allclose(jnp.linalg.norm(mask), 2.0, rtol=1e-5)
    found = np.abs(activations(spectrum, mask[None])[0, :, :4])
    assert found[1, 2] > 0.5
    found[1, 2] = 0
    assert found.max() < 1e-4


def test_bad_input_is_refused():
    one, two = network(), network(num_layers=2)
    spectrum = decompose(one)
    refused(
        (lambda: decompose(network(gate="relu")), "without a gate, got 'relu'"),
        (lambda: decompose(two), "`space` must be 'hidden' for every layer but the first"),
        (lambda: decompose(two, layer=0), "`directions` must be given"),
        (lambda: decompose(one, layer=1), "`layer` must be one of the model's 1"),
        (lambda: decompose(one, by="first"), "'magnitude', 'positive', 'negative'"),
        (lambda: truncate(spectrum, 9), "`num_components` must be at most 8"),
        (
            lambda: adversarial_mask(spectrum, 1, 4, against=4),
            "`component` must be at most 3, got 4",
        ),
    )
