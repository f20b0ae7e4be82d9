"""Public outputs with a derivative of their own, against central differences in float64, in one table."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from differences import directional

from dissociation import bilinear
from dissociation._core import linalg
from dissociation.bilinear import _similarity as similarity
from dissociation.fig4 import expand as neurons
from dissociation.measures import _collapse as collapse
from dissociation.measures import _margins as margins
from dissociation.measures import class_moments, merge_moments, neural_collapse
from dissociation.models import BilinearNetwork
from dissociation.rewrites import _null_spaces as symmetry
from dissociation.rewrites import certify

LABELS = np.arange(12) % 3


def network(shift=0.0, **options):
    """A network of float64 whose weights all move with `shift`."""
    with jax.ensure_compile_time_eval():
        parts, structure = jax.tree.flatten(
            BilinearNetwork(5, 4, 3, key=jax.random.key(0), **options)
        )
        parts = [np.asarray(part, float) for part in parts]
    rng = np.random.default_rng(0)
    moved = [jnp.asarray(part + shift * rng.normal(size=part.shape)) for part in parts]
    return jax.tree.unflatten(structure, moved)


def spectra(shift):
    one, other = bilinear.decompose(network(shift)), bilinear.decompose(network(0.3 + 0.7 * shift))
    return one, other


def moments(z):
    halves = [class_moments(part, LABELS[:6], 4, scatter=True) for part in (z[:6], z[6:])]
    return merge_moments(*halves)


def measures(z):
    found = moments(z)
    values = [*vars(neural_collapse(found)).values(), *vars(collapse.simplex_frame(found)).values()]
    extra = [
        collapse.trace_ratio(found),
        collapse.self_duality(found, np.arange(24.0).reshape(4, 6) % 5),
    ]
    return [value for value in values if value.shape == ()] + extra


def certified(model, x, label=0):
    found = bilinear.certified_radius(bilinear.margins(model), x, label)
    return [found.radius, found.step, found.radii[1:]]


def projectors(spectrum):
    return jnp.einsum("oci,ocj->ocij", spectrum.vectors, spectrum.vectors)


def pairs_interval(values):
    mean = bilinear.pair_mean(values, *similarity.member_pairs(4))
    return tuple(similarity.bootstrap_interval(mean, (4,), key=jax.random.key(1), num_resamples=20))


X5 = np.asarray([0.3, -1.2, 0.8, 0.5, -0.4])
# Name: a function of arrays, and their shapes. An empty shape is one number near zero.
TABLE = {
    "positive_inverse": (lambda a: linalg.positive_inverse(a @ a.T + jnp.eye(5)), (5, 5)),
    "collapse": (measures, (12, 6)),
    "collapse far away": (lambda z: measures(z + 100.0)[6:], (12, 6)),
    "signed_distance": (lambda z, w, b: margins.class_places(z, w, b, 0, 2)[0], (6, 4), (3, 4), (3,)),
    "decompose": (lambda s: [bilinear.decompose(network(s)).values, projectors(bilinear.decompose(network(s)))], ()),
    "adversarial_mask": (lambda s: jnp.abs(bilinear.adversarial_mask(spectra(s)[0], 1, 0, against=1)), ()),
    "similarities": (lambda s: [similarity.overlaps(*spectra(s)), bilinear.rank_similarity(*spectra(s)),
                                bilinear.form_similarity(*spectra(s))], ()),
    "matched_similarity": (lambda s: bilinear.matched_similarity(*spectra(s), 3), ()),
    "bootstrap_interval": (pairs_interval, (6,)),
    "certified_radius in the input": (lambda x: certified(network(bias=True), X5 + 0.1 * x), (5,)),
    "certified_radius in the weights": (lambda s: certified(network(s, residual=True), X5), ()),
    "certified_radius, hard case": (lambda s, x: certified(bilinear.Spectrum(
        jnp.asarray([[1.0, -0.3], [0.0, 0.0]]) + s * jnp.asarray([[0.5, 0.7], [0.0, 0.0]]),
        jnp.asarray([np.eye(2)] * 2), False, "input"), jnp.stack([2 + x[0], 0.0]))[0], (), (1,)),
    "add_random_zero_neurons": (lambda a, b: neurons.add_random_zero_neurons(a, b, key=jax.random.key(1)),
                                (4, 3), (2, 4)),
    "phantoms, exact": (neurons.add_phantom_zero_neurons, (4, 6), (2, 4), (3, 6), (3, 2)),
    "phantoms, low rank": (lambda a, b, x, y, p: neurons.add_phantom_zero_neurons(a, b, x @ y, p, rtol=1e-9),
                           (4, 5), (2, 4), (6, 2), (2, 5), (6, 2)),
    "perturb_in_null_space": (lambda w, s: symmetry.perturb_in_null_space(
        w, np.eye(4)[:2], 1.0 + s, key=jax.random.key(1)), (3, 4), ()),
    "certify": (lambda s, x: certify(lambda z: jnp.sin(z), lambda z: jnp.sin((1.5 + s) * z), x)[:2], (), (4, 3)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_derivatives_are_those_of_central_differences(name, x64):
    function, *shapes = TABLE[name]
    rng = np.random.default_rng(7)
    points, directions = (
        [jnp.asarray(rng.normal(size=shape)) for shape in shapes] for _ in range(2)
    )
    points = [0.1 * point if point.shape == () else point for point in points]

    def outputs(points):
        return [leaf for leaf in jax.tree.leaves(function(*points)) if eqx.is_inexact_array(leaf)]

    both = jax.jit(lambda points: jax.jvp(outputs, (points,), (directions,)))
    slopes = both(points)[1]
    assert slopes
    # Fourth order, so that a step above the rounding of solvers will do.
    expected = directional(lambda points: both(points)[0], points, directions)
    for slope, wanted in zip(*jax.tree.map(np.asarray, (slopes, expected)), strict=True):
        some = np.isfinite(wanted)
        assert some.any()
        np.testing.assert_allclose(slope[some], wanted[some], rtol=1e-5, atol=1e-6, err_msg=name)
