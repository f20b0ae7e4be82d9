import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize
from words import refused

from dissociation.bilinear import (
    Spectrum,
    adversarial_mask,
    certified_accuracy,
    certified_radius,
    decompose,
    margins,
    truncate,
)
from dissociation.bilinear._forms import reorder
from dissociation.bilinear._similarity import overlaps
from dissociation.models import BilinearNetwork, wrap_bilinear


def network(classes=3, **options):
    return eqx.filter_jit(lambda key: BilinearNetwork(6, 5, classes, key=key, **options))(
        jax.random.key(3)
    )


def float64(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), float), tree)


@eqx.filter_jit
def logits_of(model, x):
    return jax.vmap(model)(x)


def labelled(model, count=12, seed=0):
    x = np.random.default_rng(seed).normal(size=(count, model.embed.shape[1])).astype(np.float32)
    return x, np.asarray(logits_of(model, x)).argmax(1)


def certify(model, x, labels):
    @eqx.filter_jit
    def run(model, x, labels):
        forms = margins(model)
        return jax.vmap(lambda one, label: certified_radius(forms, one, label))(x, labels)

    return run(model, x, labels)


@eqx.filter_jit
def certified(model, x):
    """Return the certified radius of class 0 about one input."""
    return certified_radius(margins(model), x, 0)


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"residual": True}])
def test_the_point_found_lies_on_the_boundary(options):
    with jax.enable_x64(True):
        model = float64(network(**options))
        x, labels = labelled(model)
        x = x.astype(float)
        found = jax.tree.map(np.asarray, certify(model, x, labels))
        assert np.isfinite(found.radius).all()
        np.testing.assert_allclose(
            np.linalg.norm(found.step, axis=1), found.radius + found.allowance, rtol=1e-12
        )
        assert (found.allowance > 0).all()
        assert (found.allowance < 1e-10 * found.radius).all()
        logits = np.asarray(logits_of(model, x + found.step))
        own, rival = (logits[np.arange(12), index] for index in (labels, found.rival))
        np.testing.assert_allclose(own, rival, atol=1e-9)
        for length, kept in ((1.001, False), (0.999, True)):
            moved = np.asarray(logits_of(model, x + length * found.step))
            assert ((moved.argmax(1) == np.asarray(labels)) == kept).all()


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_no_attack_finds_a_nearer_one():
    model = float64(network(bias=True))
    x, labels = labelled(model, 6)
    found = certify(model, x.astype(float), labels)
    margin = jax.jit(lambda p, a, b: model(p)[a] - model(p)[b])
    slope = jax.jit(jax.grad(margin))
    for one, label, radii in zip(x, np.asarray(labels), np.asarray(found.radii), strict=True):
        for rival in set(range(3)) - {int(label)}:
            limit = {
                "type": "ineq",
                "fun": lambda p, pair=(label, rival): -float(margin(p, *pair)),
                "jac": lambda p, pair=(label, rival): -slope(p, *pair),
            }
            best = np.inf
            for seed in range(8):
                start = one + np.random.default_rng(seed).normal(size=6)

                def distance(p, c=one):
                    return float(np.sum((p - c) ** 2))

                result = minimize(
                    distance, start, constraints=[limit], method="SLSQP", options={"maxiter": 200}
                )
                if result.success and margin(result.x, label, rival) < 1e-6:
                    best = min(best, result.fun**0.5)
            np.testing.assert_allclose(radii[rival], best, rtol=1e-3)


def spectrum_of(first, second):
    """Two diagonal forms, and so a margin with the difference on its diagonal."""
    eye = np.broadcast_to(np.eye(len(first), dtype=np.float32), (2, len(first), len(first)))
    return Spectrum(jnp.asarray([first, second], jnp.float32), jnp.asarray(eye), False, "input")


def test_closed_forms():
    # x1^2 - x2^2 from (2, 1): the nearest point of the lines x1 = +-x2 is at distance 1 / sqrt(2).
    forms = spectrum_of([1, 0], [0, 1])
    found = certified(forms, np.asarray([2.0, 1.0], np.float32))
    np.testing.assert_allclose(found.radius, 0.5**0.5, rtol=1e-5)
    np.testing.assert_allclose(found.step, [-0.5, 0.5], atol=1e-5)
    # The hard case, (2, 0): no slope along the second axis, and two nearest points, (1, 1) and (1,
    # -1).
    found = certified(forms, np.asarray([2.0, 0.0], np.float32))
    np.testing.assert_allclose(found.radius, 2**0.5, rtol=1e-5)
    np.testing.assert_allclose(np.abs(found.step), [1, 1], atol=1e-5)
    # The centre of |x|^2 > 0 is its only point that is not above zero. The margin has no slope
    # there, which costs half the digits.
    found = certified(spectrum_of([1, 1], [0, 0]), np.asarray([2.0, 0.0], np.float32))
    np.testing.assert_allclose(found.radius + found.allowance, 2, rtol=1e-3)
    np.testing.assert_allclose(found.radius, 2, rtol=1e-2)


@pytest.mark.parametrize("curvature", [0.0, -1e-20, 1e-7])
def test_an_all_but_linear_margin_has_the_distance_to_a_plane(curvature):
    # (c x + 1) * (V x) with c next to nothing: logits V x.
    weights, ones = np.asarray([[1.0, 2.0], [0.0, -1.0]], np.float32), np.ones(2, np.float32)
    layer = (curvature * np.eye(2, dtype=np.float32), weights, ones, 0 * ones)
    model = wrap_bilinear(np.eye(2, dtype=np.float32), [layer], np.eye(2, dtype=np.float32))
    x, difference = ones, weights[0] - weights[1]
    found = certified(model, x)
    distance = difference @ x / np.linalg.norm(difference)
    np.testing.assert_allclose(found.radius, distance, rtol=1e-5)
    np.testing.assert_allclose(
        found.step, -distance * difference / np.linalg.norm(difference), rtol=1e-5
    )


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_derivatives_in_reverse():
    """Of radius and step, against those along a direction: the label's own row has none."""
    model, (x, along) = (
        float64(network()),
        jnp.asarray(np.random.default_rng(0).normal(size=(2, 6))),
    )
    forms, label = margins(model), jnp.argmax(model(x))
    for part in (
        lambda v: certified_radius(forms, v, label).radius,
        lambda v: certified_radius(forms, v, label).step[0],
    ):
        slope = jax.jit(jax.grad(part))(x) @ along
        np.testing.assert_allclose(slope, jax.jvp(part, (x,), (along,))[1], rtol=1e-9)


def test_no_rival_and_misclassified():
    # With a constant, 1 + x^2 against 0 never changes sign.
    vectors = jnp.broadcast_to(jnp.eye(2), (2, 2, 2))
    forms = margins(Spectrum(jnp.asarray([[1.0, 1.0], [0.0, 0.0]]), vectors, True, "input"))
    found = certified_radius(forms, np.asarray([0.5], np.float32), 0)
    assert np.isinf(found.radius)
    np.testing.assert_array_equal(found.step, 0)
    wrong = certified_radius(forms, np.asarray([0.5], np.float32), 1)
    assert float(wrong.radius) == 0
    shares = certified_accuracy(
        np.asarray([0.0, 1.0, 2.0, np.inf], np.float32), np.asarray([0.0, 1.5], np.float32)
    )
    np.testing.assert_allclose(shares, [0.75, 0.5])


@pytest.mark.slow
def test_a_full_spectrum_has_the_networks_radii_and_a_truncated_one_has_not():
    model = network()
    x, labels = labelled(model)
    own = certify(model, x, labels).radius
    spectrum = decompose(model)
    np.testing.assert_allclose(certify(spectrum, x, labels).radius, own, rtol=2e-3)
    assert np.abs(certify(truncate(spectrum, 2), x, labels).radius - own).max() > 0.01


def cancelling(size, width, seed):
    """A network whose margin is left of terms `size` times as large."""
    rng = np.random.default_rng(seed)
    small, rows = rng.normal(size=(2, 3, width)), rng.normal(size=(2, 3, width)) * size**0.5
    pair = [np.concatenate([a, b, b * (1 + 1e-7 * (i == 0))]).astype(np.float32) for i, (a, b) in
            enumerate(zip(small, rows, strict=True))]  # fmt: skip
    head = rng.normal(size=(2, 3)).astype(np.float32)
    return wrap_bilinear(
        np.eye(width, dtype=np.float32),
        [tuple(pair)],
        np.concatenate([head, head[:, :3], -head], 1),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (network(bias=True), 1e-3),
        (network(residual=True), 1e-3),
        (BilinearNetwork(784, 30, 10, key=jax.random.key(0)), 2e-2),
        (BilinearNetwork(6, 20, 4, key=jax.random.key(1)), 2e-3),
        (truncate(decompose(network(bias=True)), 2), 2e-3),
        *((cancelling(10.0**power, width, power), 1.0) for power in (3, 7) for width in (1, 6)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_float32_certifies_no_more_than_the_true_distance(model, loss):
    width = (
        model.vectors.shape[2] - model.constant
        if isinstance(model, Spectrum)
        else model.embed.shape[1]
    )
    x = np.random.default_rng(0).normal(size=(24, width)).astype(np.float32)
    labels = jax.vmap(model)(x).argmax(1)
    found = certify(model, x, labels)
    with jax.enable_x64(True):
        exact = certify(float64(model), x.astype(float), labels)
        certified, distance = np.asarray(exact.radius), np.asarray(exact.radius + exact.allowance)
    assert (np.asarray(found.radius, float) <= distance).all()
    assert (certified <= distance).all()
    some = np.isfinite(distance) & (distance > 0)
    assert np.median(1 - found.radius[some] / distance[some]) <= loss
    # Without the allowance it is close where little cancels.
    near = np.asarray(found.radius + found.allowance, float)[some] / distance[some]
    assert loss == 1.0 or np.abs(near - 1).max() < 2e-3


@pytest.mark.parametrize(("dtype", "place"), [(np.float32, 0), (np.float64, 150)])
def test_a_curvature_near_zero_is_not_taken_for_none(dtype, place):
    # |x|^2 - c z^2 + 1 without slope along z: the nearest zero is far along z. A cut-off at d eps
    # took c for zero.
    with jax.enable_x64(dtype is np.float64):
        width = 151
        curvature = 0.5 * width * float(np.finfo(dtype).eps)
        values = np.ones(width + 1, dtype)
        values[place] = -curvature
        eye = jnp.asarray(
            np.broadcast_to(np.eye(width + 1, dtype=dtype), (2, width + 1, width + 1))
        )
        spectrum = Spectrum(jnp.asarray([values, 0 * values]), eye, True, "input")
        x = np.zeros(width, dtype)
        x[7] = 1.0
        found = certified(spectrum, x)
        # From the stationary point y_7 = -1 / (1 + c) on, all of the way is along z.
        short = 1 / (1 + curvature)
        distance = np.hypot(short, np.sqrt((1 + (1 - short) ** 2) / curvature))
        np.testing.assert_allclose(found.radius + found.allowance, distance, rtol=1e-2)
        assert 0.9 * distance < float(found.radius) <= distance


@pytest.mark.slow
def test_what_is_undefined_is_refused_or_nan():
    forms, x = margins(network()), np.ones(6, np.float32)
    for bad in (np.nan, np.inf):
        spoilt = np.where(np.arange(6) == 2, np.float32(bad), x)
        assert np.isnan(jax.jit(certified_radius)(forms, spoilt, 0).radius)
        broken = eqx.tree_at(
            lambda m: m.embed, network(), replace_fn=lambda w, value=bad: w.at[0, 0].set(value)
        )
        assert np.isnan(certified_radius(jax.jit(margins)(broken), x, 0).radius)
    for label in (-1, 3):
        refused(
            (
                lambda label=label: certified_radius(forms, x, label),
                "`label` must be a class from 0 to 2",
            )
        )
        assert np.isnan(jax.jit(certified_radius)(forms, x, label).radius)
    assert np.isnan(
        certified_accuracy(np.asarray([1.0, np.nan], np.float32), np.ones(1, np.float32))
    ).all()


def test_a_spectrum_of_another_space_is_not_certified():
    """Of square networks, where sizes cannot tell: a radius among hidden vectors is none among inputs."""
    model = BilinearNetwork(6, 6, 3, key=jax.random.key(3))
    hidden, inputs = (decompose(model, space=space) for space in ("hidden", "input"))
    unknown = Spectrum(hidden.values, hidden.vectors, False)

    def shape_of_margins(step, spectrum):
        return eqx.filter_eval_shape(lambda s: margins(step(s)), spectrum)

    for step in (lambda s: s, lambda s: truncate(s, 4), lambda s: reorder(s, jnp.abs(s.values))):
        for spectrum, space in ((hidden, "'hidden'"), (unknown, "None")):
            refused(
                (
                    lambda s=spectrum, f=step: shape_of_margins(f, s),
                    f'be a spectrum with `space="input"`, got space {space}',
                )
            )
        assert shape_of_margins(step, inputs).values.shape[0] == 3
    refused(
        (lambda: adversarial_mask(hidden, 0, 0, against=1), "`spectrum` must be a spectrum with"),
        (
            lambda: overlaps(inputs, hidden),
            "`b` must be in the space of `a`, 'input', got 'hidden'",
        ),
        (lambda: margins(network(num_layers=2)), "one layer"),
        (lambda: margins(network(classes=1)), "at least two classes"),
    )


def test_networks_in_half_precision_have_the_spectrum_of_the_same_numbers_in_float32():
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), network(bias=True))
    single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half)
    assert eqx.tree_equal(decompose(half), decompose(single))
    assert eqx.tree_equal(margins(half), margins(single))
