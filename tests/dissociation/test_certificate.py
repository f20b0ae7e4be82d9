import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation.models import MLP
from dissociation.rewrites import certify

INPUTS = np.asarray([[1.0, 0.0], [0.0, 2.0], [-4.0, 1.0], [0.5, 0.4]], np.float32)


@pytest.mark.parametrize("run", [certify, eqx.filter_jit(certify)])
def test_counts_by_hand(run):
    # The identity against a shift of the second output by 0.25: only the last input changes sides.
    for batch_size in (None, 1, 3, 100):
        certificate = run(
            lambda x: x, lambda x: x + jnp.asarray([0.0, 0.25]), INPUTS, batch_size=batch_size
        )
        assert [float(value) for value in certificate] == [0.25, 0.0625, 1, 4]
        assert not bool(certificate.kept(1.0))


IDENTITY = lambda x: x  # noqa: E731


def replaced(value):
    return lambda x: jnp.where((x == -4.0) & (value != 0), value, x)


@pytest.mark.parametrize(
    ("original", "rewritten", "size", "relative", "flips"),
    [
        (IDENTITY, lambda x: x + 0.25, 0.25, 0.0625, 0),
        (jnp.sin, jnp.sin, 0, 0, 0),
        (jnp.zeros_like, jnp.zeros_like, 0, 0, 0),
        (jnp.zeros_like, jnp.ones_like, 1, np.inf, 0),
        (lambda x: x[0], lambda x: x[0] - 0.75, 0.75, 0.1875, 1),
        (lambda x: x[:1], lambda x: x[:1] - 0.75, 0.75, 0.1875, 1),
        (lambda x: jnp.outer(x, x), lambda x: jnp.outer(x, x).at[0, 0].add(30.0), 30, 1.875, 1),
        (IDENTITY, lambda x: jnp.where(x > 1.5, jnp.nan, x), np.nan, np.nan, 1),
        # Outputs without a largest are changed predictions.
        *((replaced(0.0), replaced(bad), bad, bad, 1) for bad in (np.nan, np.inf)),
        *((replaced(bad), replaced(0.0), bad, np.nan, 1) for bad in (np.nan, np.inf)),
        *((replaced(bad), replaced(bad), np.nan, np.nan, 1) for bad in (np.nan, np.inf)),
    ],
)
def test_changes_of_outputs_of_any_shape_and_size(original, rewritten, size, relative, flips):
    certificate = certify(original, rewritten, INPUTS)
    np.testing.assert_array_equal(certificate, [size, relative, flips, 4])
    for tolerance in (0.0, 0.2, 0.25, 1e30):  # without a flip a change is judged by its size
        assert bool(certificate.kept(tolerance)) == (flips == 0 and size <= tolerance)


def test_the_highest_precision_is_asked_for():
    seen = []

    def model(x):
        seen.append(jax.config.jax_default_matmul_precision)
        return x

    certify(model, model, INPUTS)
    assert set(seen) == {"highest"}


@pytest.mark.usefixtures("unchecked")
def test_certificate_refuses():
    """Outputs that cannot be compared, and models that do not take an input, by name."""
    model, wide = (eqx.nn.MLP(inputs, 3, 4, 2, key=jax.random.key(0)) for inputs in (2, 3))
    ours = MLP(3, 4, 1, 2, key=jax.random.key(0))
    stacked = eqx.filter_vmap(lambda key: eqx.nn.MLP(2, 3, 4, 2, key=key))(
        jax.random.split(jax.random.key(0), 5)
    )
    for original, rewritten, error, words in (
        (lambda x: x, lambda x: x[:1], ValueError, "`rewritten` must give outputs of the shape"),
        (jnp.sin, lambda x: (x, x), TypeError, "`rewritten` must give one array, got PyTreeDef"),
        (lambda x: x + 1j, jnp.sin, TypeError, "`original` must give real numbers, got dtype "
                                               "complex64"),
        (lambda x: x[:0], jnp.sin, ValueError, r"`original` must give outputs that are not "
                                               r"empty, got shape \(0,\)"),
        *((wrong, model, TypeError, r"`original` must take one example of shape \(2,\) .* got an "
                                    r"error: ")
          for wrong in (stacked, wide)),
        *((model, wrong, TypeError, r"`rewritten` must take one example of shape \(2,\)") for wrong in (stacked, wide)),
        (ours, model, ValueError, r"`x` must be one example of shape \(3,\), got shape \(2,\)"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            certify(original, rewritten, INPUTS)
    with pytest.raises(ValueError, match="`batch_size` must be at least 1"):
        certify(jnp.sin, jnp.sin, INPUTS, batch_size=0)
