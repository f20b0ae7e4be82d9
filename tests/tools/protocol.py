"""Check that a public function agrees with itself called plainly, compiled, mapped over members and in a loop.

It can also be traced under a compilation that knows its arrays, as constants that it closes over.

Arguments come from `tests/tools/registry`. Members differ in their real numbers (the second has
1.25 times those of the first, rows of one-hot labels excepted) and in their keys.
"""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compilations
from registry import NAMES, ROWS

HOST = {
    "dissociation.data._glyphs.glyph_data": "gives NumPy's arrays, to be used as data sets are",
    "dissociation.data._datasets.load": "reads files",
    "dissociation.rewrites._null_spaces.null_": "the rank sets shapes",
    "dissociation.rewrites._rewrites.null_space": "the rank sets shapes",
    "dissociation.rewrites._rewrites.compose": "gives a function",
    "dissociation.rewrites._groups": "traces a model",
    "dissociation.models._representations.layer_shapes": "traces a model",
    "dissociation.rewrites._canonical": "a step of the host",
    "dissociation.rewrites._freedom.cka_": "a step of the host",
    "dissociation.rewrites._freedom.linear_": "a step of the host",
    "dissociation.rewrites._plant_": "planting by the host",
    "dissociation.linear._tasks.": "ranks, which set shapes, by the host",
    "dissociation.linear._planting.": "ranks by the host",
    "dissociation.rewrites._network_matching.match_": "assignments by the host",
    "dissociation.rewrites._barriers.barriers": "assignments by the host",
    "dissociation.recipes._mnist.fit_": "training by the host",
    "dissociation.recipes._mnist.train_": "training by the host",
    "dissociation.recipes._bilinear.train_": "training by the host",
    "dissociation.recipes._compression.train_": "training by the host",
    "dissociation.recipes._grokking.train_": "training by the host",
    "dissociation.training._fitting": "training by the host",
    "dissociation.training._grids": "training by the host",
    "koopman._encoders._learn.train_": "training by the host",
    "koopman._operators._diagnose.diagnose": "a step of the host",
    "dissociation.bilinear._similarity.pair_mean": "gives a function",
    "dissociation.similarity._inference.adjust_p_values": "a step of the host",
    "dissociation.similarity._inference.permutation_test": "p-values by the host",
    "dissociation.similarity._pairs.compare": "planned by the host",
    "dissociation.similarity._pairs.pairwise": "planned by the host",
    "koopman.datasets._linear.linear_spectrum": "what is known of a data set, in NumPy's float64",
    "koopman.datasets._linear.regime_switching_spectrum": "what is known of a data set, in "
    "NumPy's float64",
    "koopman.datasets._ordered_mnist.ordered_mnist": "counts labels, in NumPy",
}
"""What works on known numbers alone."""

KNOWN = {
    "dissociation.linear._dynamics.gradient_flow": ("times",),
    "dissociation.data._datasets.Dataset": ("train_labels", "test_labels"),
    "dissociation.measures._robustness": ("labels",),
    "dissociation.measures._probes": ("y", "labels", "fractions"),
    "dissociation.measures._hsic.information_plane": ("labels",),
    "dissociation.measures._crossing": ("times", "end", "at"),
    "koopman.datasets._linear.regime_switching_var": ("transition",),
}
"""Arguments that are the same for all members: integer labels, which do not say how many classes there are while they
are traced, what sets shapes, and what 1.25 times itself is no valid value of."""


ANEW = (
    "dissociation.data._glyphs.draw_glyphs",
    "dissociation.training._members.map_members",
    "dissociation.measures._robustness.",
    "dissociation.bilinear._certificate.margins",
    "dissociation.training._loop.train",
    "dissociation.rewrites._certificate.certify",
    "dissociation.rewrites._growth.",
    "dissociation.rewrites._rewrites.",
    "dissociation.rewrites._seen.",
    "dissociation.rewrites._barriers.",
    "dissociation.rewrites._network_matching.",
    "koopman.datasets.",
)
"""What maps or loops over a function of the caller's, or one that closes over arguments: compiled at every call that is
not itself inside of a compiled function."""


def is_key(leaf):
    return eqx.is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_one_hot(leaf):
    return leaf.ndim == 2 and bool(((leaf == 0) | (leaf == 1)).all() and (leaf.sum(1) == 1).all())


def other(leaf):
    """A second member's value of an argument."""
    if is_key(leaf):
        return jax.random.fold_in(leaf, 1)
    if not jnp.issubdtype(leaf.dtype, jnp.inexact) or is_one_hot(leaf):
        return leaf
    return 1.25 * leaf


def numbers(tree):
    leaves = [leaf for leaf in jax.tree.leaves(tree) if eqx.is_array_like(leaf)]
    return [np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf) for leaf in leaves]


def same(first, second, message):
    first, second = numbers(first), numbers(second)
    assert len(first) == len(second), message
    for a, b in zip(first, second, strict=True):
        scale = max(1.0, float(np.nanmax(np.abs(np.where(np.isfinite(a), a, 0)), initial=0)))
        np.testing.assert_allclose(b, a, rtol=1e-3, atol=1e-4 * scale, err_msg=message)


def rows_of(package):
    """Return the rows of the functions of a package, marked `full` beyond the first row of a function."""
    rows = []
    for row in ROWS:
        if row.id.startswith(package) and not row.id.startswith((*HOST,)):
            is_first = row.id == NAMES[row.values[0]]
            rows.append(
                pytest.param(*row.values, id=row.id, marks=() if is_first else pytest.mark.full)
            )
    return rows


def check_agreement(function, make_call):
    """Compare a function called plainly in a loop with the same function compiled and mapped over two members."""
    call = make_call()
    fixed = [names for name, names in KNOWN.items() if NAMES[function].startswith(name)]
    kept = {name: call.pop(name) for names in fixed for name in names if name in call}
    given = jax.tree.map(
        lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, call
    )
    arrays, rest = eqx.partition(given, eqx.is_array)
    if not jax.tree.leaves(arrays):
        pytest.skip("no arrays")

    def run(arrays):
        return function(**eqx.combine(arrays, rest), **kept)

    on_device = jax.tree.map(jnp.asarray, kept)

    def known(_):  # a compiled function of something else, which closes over these arrays
        return eqx.filter(function(**given, **on_device), eqx.is_array)

    members = [arrays, jax.tree.map(other, arrays)]
    with warnings.catch_warnings(action="ignore"):
        loop = [run(member) for member in members]
        assert any(np.isfinite(leaf).any() for leaf in numbers(loop)), "nothing to compare"
        jax.eval_shape(known, 0.0)
        if not NAMES[function].startswith(ANEW):
            assert not compilations(lambda: run(arrays)), "again"
        stacked = eqx.filter_jit(eqx.filter_vmap(run))(
            jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
        )
    for index, wanted in enumerate(loop):
        found = jax.tree.map(lambda leaf, i=index: leaf[i] if eqx.is_array(leaf) else leaf, stacked)
        same(wanted, found, f"member {index}")
