import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation.models.bilinear import BilinearNetwork
from dissociation.spectral import interaction_tensor
from dissociation.spectral.tensor import higher_order_svd, low_rank


@pytest.fixture(scope="module")
def model():
    return BilinearNetwork(14, 6, 4, key=jax.random.key(5))


def test_higher_order_svd(model):
    tensor = np.asarray(interaction_tensor(model))
    found = higher_order_svd(model)
    back = np.einsum("kab,ok,ia,jb->oij", found.core, found.outputs, found.inputs, found.inputs)
    np.testing.assert_allclose(back, tensor, atol=1e-6)
    for matrix in (found.outputs, found.inputs):
        np.testing.assert_allclose(matrix.T @ matrix, np.eye(matrix.shape[1]), atol=1e-5)
    np.testing.assert_allclose(found.output_values, np.linalg.svd(tensor.reshape(4, -1), compute_uv=False), rtol=1e-4)
    exact = np.linalg.svd(tensor.transpose(1, 0, 2).reshape(14, -1), compute_uv=False)
    np.testing.assert_allclose(found.input_values, exact[:6], rtol=1e-4)
    slices = found.core.reshape(4, -1)
    np.testing.assert_allclose(slices @ slices.T, np.diag(found.output_values**2), atol=1e-7)


def best_of_three(model, rank, **options):
    keys = jnp.stack([jax.random.key(seed) for seed in range(3)])
    runs = eqx.filter_jit(lambda m, k: jax.lax.map(lambda one: low_rank(m, rank=rank, key=one, **options), k))(
        model, keys
    )
    return jax.tree.map(lambda leaf: leaf[jnp.argmax(runs.cosine)], runs)


def test_low_rank_form(model):
    tensor = np.asarray(interaction_tensor(model))
    cosines = []
    for rank in (1, 3, 6):
        # The best of a few starts: alternating least squares may stop short.
        best = best_of_three(model, rank, num_iterations=300)
        form = np.einsum("or,ri,rj->oij", best.outputs, best.left, best.right)
        form = 0.5 * (form + form.swapaxes(1, 2))
        cosine = np.sum(form * tensor) / np.linalg.norm(form) / np.linalg.norm(tensor)
        np.testing.assert_allclose(best.cosine, cosine, atol=1e-4)
        # At the optimum what is lost is what the cosine says.
        lost = np.linalg.norm(form - tensor) ** 2 / np.linalg.norm(tensor) ** 2
        np.testing.assert_allclose(lost, 1 - cosine**2, atol=1e-2)
        cosines.append(cosine)
    assert cosines[0] < cosines[1] < cosines[2]
    assert cosines[2] > 0.95  # as many terms as the layer has units
    # One term cannot do better than the largest singular value of any unfolding.
    assert cosines[0] <= np.linalg.svd(tensor.reshape(4, -1), compute_uv=False)[0] / np.linalg.norm(tensor) + 1e-5


def test_a_symmetric_low_rank_tensor_is_found(model):
    rng = np.random.default_rng(0)
    rows = np.linalg.qr(rng.normal(size=(6, 6)))[0][:2]
    weights = np.zeros((6, 6))
    weights[:2] = rows
    both = [jnp.asarray(weights, jnp.float32)] * 2
    changed = eqx.tree_at(lambda m: (m.layers[0].left, m.layers[0].right), model, both)
    assert float(best_of_three(changed, 2).cosine) > 0.9999


def test_bad_input_is_refused(model):
    with pytest.raises(ValueError, match="`rank` must be at least 1"):
        low_rank(model, rank=0, key=jax.random.key(0))
