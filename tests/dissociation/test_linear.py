"""Exact solutions of linear networks, against closed forms, perturbations, optimisers and an ODE solver."""

from itertools import product

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import compilations
from scipy.integrate import solve_ivp
from scipy.linalg import expm
from scipy.optimize import minimize
from words import refused

from dissociation import representations
from dissociation.linear import (
    FAMILIES,
    GLS,
    LSS,
    MRNS,
    MWNS,
    LinearNetwork,
    Noise,
    balanced_network,
    complete_tree,
    deep_residual,
    expected_loss,
    fresh_loss,
    gradient_flow,
    hierarchy_task,
    least_loss,
    least_norm,
    least_norm_network,
    make_task,
    noise_minimiser,
    placement,
    plant,
    plant_rsm,
    plurality,
    random_task,
    second_readout_loss,
    simulated_loss,
    teacher_task,
)
from dissociation.rewrites import linear_cka_range
from dissociation.training import FullBatch, make_step, train

KEY = jax.random.key(0)
SHAPES = {
    "tall": {"num_samples": 30, "num_inputs": 8, "num_outputs": 5, "rank": 3},
    "few samples": {"num_samples": 6, "num_inputs": 10, "num_outputs": 4, "noise": 0.1},
    "deficient": {
        "num_samples": 30,
        "num_inputs": 10,
        "num_outputs": 4,
        "rank": 3,
        "input_rank": 7,
    },
    "rank of inputs": {"num_samples": 20, "num_inputs": 5, "num_outputs": 7, "noise": 0.1},
    "ill-conditioned": {
        "num_samples": 40,
        "num_inputs": 9,
        "num_outputs": 6,
        "rank": 4,
        "condition": 300.0,
    },
}


def task_of(name, **options):
    return random_task(**SHAPES[name], **{"key": KEY} | options)


@pytest.fixture
def task():
    return task_of("deficient")


def test_a_task_is_one_on_every_processor(task, monkeypatch):
    """Decompositions may return singular vectors of other signs, and other bases of null spaces."""
    rng, svd, qr = np.random.default_rng(0), np.linalg.svd, np.linalg.qr

    def turned(vectors, number):
        signs, rest = rng.choice([-1, 1], number), vectors.shape[1] - number
        apart = vectors[:, number:] @ qr(rng.normal(size=(rest, rest)))[0]
        return signs, np.concatenate([vectors[:, :number] * signs, apart], 1)

    def other_svd(matrix, **options):
        left, values, right = svd(matrix, **options)
        signs, right = turned(right.T, len(values))
        return left * signs, values, right.T

    monkeypatch.setattr(np.linalg, "svd", other_svd)
    monkeypatch.setattr(
        np.linalg,
        "qr",
        lambda matrix, mode: (turned(qr(matrix, mode)[0], matrix.shape[1])[1], None),
    )
    other = make_task(task.x, task.y, rtol=1e-5)
    monkeypatch.undo()
    same = make_task(task.x, task.y, rtol=1e-5)
    assert min(jnp.abs(task.irrelevant).max(), jnp.abs(task.unseen).max()) > 0.1
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, atol=3e-6), same, other)


def arrays(task):
    """Return X, Y of the specification, columns are samples, in float64."""
    return np.asarray(task.x, float).T, np.asarray(task.y, float).T


SECOND = [
    pytest.param(shape, 12, "float32", marks=pytest.mark.full)
    for shape in SHAPES
    if shape != "ill-conditioned"
]
CASES = [
    ("ill-conditioned", 12, "float32"),
    *product(SHAPES, [12], ["float64"]),
    ("deficient", 3, "float64"),
    *SECOND,
]


@pytest.mark.parametrize(("shape", "hidden", "dtype"), CASES)
@pytest.mark.usefixtures("precision")
@pytest.mark.slow
def test_samples_are_members(shape, hidden, dtype):
    task = task_of(shape)
    x, y = arrays(task)
    best = y @ np.linalg.pinv(x, rcond=1e-6)
    condition = float(task.input_values[0] / task.input_values[-1])
    bound = max(1e-5, 4e-7 * condition) if dtype == "float32" else max(1e-12, 1e-14 * condition)
    minima = {"MRNS": 2 * np.linalg.norm(best @ x, "nuc"), "MWNS": 2 * np.linalg.norm(best, "nuc")}

    @jax.jit
    def draw(keys):
        def one(family):
            networks = jax.vmap(lambda key: family.sample(task, hidden, key=key))(keys)
            return networks, jax.vmap(lambda network: family.residual(task, network))(networks)

        return {name: one(family) for name, family in FAMILIES.items()}

    for name, (networks, found) in draw(jax.random.split(KEY, 10)).items():
        assert networks.weights[0].dtype == dtype
        first, second = (np.asarray(weight, float) for weight in networks.weights)
        span = np.eye(len(x)) if name in ("LSS", "MWNS") else x @ np.linalg.pinv(x, rcond=1e-6)
        missed = np.linalg.norm((second @ first - best) @ span, axis=(1, 2)) / np.linalg.norm(best)
        assert missed.max() < bound, (name, missed.max())
        assert np.abs(found.map).max() < bound
        assert np.abs(found.norm).max() < 10 * bound
        if name in minima:
            read = first @ x if name == "MRNS" else first
            norm = np.sum(read**2, (1, 2)) + np.sum(second**2, (1, 2))
            np.testing.assert_allclose(norm, minima[name], rtol=10 * bound)


def test_the_families_are_nested_and_differ(task):
    residuals = {
        name: {
            other: FAMILIES[other].residual(task, family.sample(task, 12, key=KEY))
            for other in FAMILIES
        }
        for name, family in FAMILIES.items()
    }
    member = {(a, b) for a in FAMILIES for b in FAMILIES if max(map(abs, residuals[a][b])) < 1e-5}
    nested = {("LSS", "GLS"), ("MWNS", "LSS"), ("MWNS", "GLS"), ("MRNS", "GLS")}
    assert member == {(name, name) for name in FAMILIES} | nested


@pytest.mark.parametrize("family", [MRNS, MWNS], ids=["MRNS", "MWNS"])
@pytest.mark.usefixtures("x64")
def test_no_solution_has_a_smaller_norm(task, family):
    x, _ = arrays(task)
    network = family.sample(task, 9, key=KEY)

    def norm(first, second):
        return ((first @ x if family is MRNS else first) ** 2).sum() + (second**2).sum()

    first, second = map(np.asarray, network.weights)
    least = norm(first, second)
    for scale in (1e-3, 0.03, 1.0):
        for draw in range(10):
            # Along the manifold: another basis of hidden units, which are then not balanced.
            mix = np.eye(9) + scale * np.random.default_rng(draw).normal(size=(9, 9))
            assert norm(mix @ first, second @ np.linalg.inv(mix)) > least - 1e-9

    def penalised(flat):
        first, second = flat[:90].reshape(9, 10), flat[90:].reshape(4, 9)
        return norm(first, second) + 1e4 * jnp.sum((second @ first @ x - task.predictions.T) ** 2)

    start = np.random.default_rng(0).normal(size=90 + 36)
    value_and_slope = jax.jit(jax.value_and_grad(penalised))
    found = minimize(value_and_slope, start, jac=True, method="L-BFGS-B", options={"maxiter": 3000})
    assert float(least) * (1 - 1e-3) < found.fun < float(least) * 1.1


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_walks_are_stationary_and_stay(task, family):
    @jax.jit
    @jax.vmap
    def walked(key):
        steps = family.walk(task, 9, 3, rate=0.1, key=key)
        return steps, jax.vmap(lambda network: family.residual(task, network).map)(steps)

    steps, residual = walked(jax.random.split(KEY, 500))
    assert residual.max() < 3e-5
    first = np.asarray(steps.weights[0], float)
    # Moments of the first and of the last step agree, and the two are correlated.
    means = np.mean(first**2, (2, 3))
    difference = means[:, 0] - means[:, 2]
    assert abs(difference.mean()) < 4 * difference.std() / len(means) ** 0.5 + 1e-6
    overlap = np.mean(first[:, 0] * first[:, 1]) / np.mean(first**2)
    assert 0.7 < overlap < 0.99
    apart = family.walk(task, 9, 2, rate=1.0, key=KEY).weights[0]
    assert not np.allclose(apart[0], apart[1], atol=0.1)
    assert family.walk(task, 9, 1, key=KEY).weights[0].shape[0] == 1


def test_frames_are_uniform(task):
    first = jax.vmap(lambda key: MWNS.sample(task, 6, key=key).weights[0])(
        jax.random.split(KEY, 10_000)
    )
    codes = np.asarray(first @ task.map_right) / np.sqrt(np.asarray(task.map_values))  # R
    np.testing.assert_allclose(codes.mean(0), 0, atol=4 / (6 * 10_000) ** 0.5)
    np.testing.assert_allclose(
        np.einsum("sia,sja->ij", codes, codes) / 10_000, np.eye(6) * task.rank / 6, atol=0.02
    )


@pytest.mark.usefixtures("x64")
def test_the_nearest_network(task):
    rng = np.random.default_rng(0)
    first = 0.5 * rng.normal(size=(12, 10))
    second = 0.5 * rng.normal(size=(4, 12))
    network = LinearNetwork((jnp.asarray(first), jnp.asarray(second)))
    project = jax.jit(
        lambda family, network: FAMILIES[family].project(task, network), static_argnums=0
    )

    def distance(weights):
        return (
            sum(
                np.sum((a - np.asarray(b)) ** 2)
                for a, b in zip(weights, network.weights, strict=True)
            )
            ** 0.5
        )

    for name, family in FAMILIES.items():
        nearest = project(name, network)
        assert max(map(abs, family.residual(task, nearest))) < 1e-10
        again = project(name, nearest)
        np.testing.assert_allclose(again.weights[0], nearest.weights[0], atol=1e-10)
        np.testing.assert_allclose(again.weights[1], nearest.weights[1], atol=1e-10)
        if family in (GLS, LSS):  # at a fixed first layer: normal equations
            np.testing.assert_array_equal(nearest.weights[0], first)
            read = np.asarray(first) @ (arrays(task)[0] if family is GLS else np.eye(10))
            change = np.asarray(nearest.weights[1] - second)
            np.testing.assert_allclose(
                change @ (np.eye(12) - read @ np.linalg.pinv(read)), 0, atol=1e-9
            )
            continue
        # Other members, near the projection and far from it, are further away.
        below, above = map(np.asarray, nearest.weights)
        unseen = np.asarray(task.unseen) @ np.asarray(task.unseen).T
        for draw in range(30):
            matrix = np.random.default_rng(draw).normal(size=(12, 12))
            mix = expm(10.0 ** -(draw % 4) * (matrix - matrix.T))
            turned = mix @ below
            if family is MRNS:  # unseen weights stay
                turned = turned @ (np.eye(10) - unseen) + np.asarray(first) @ unseen
            assert distance((turned, above @ mix.T)) > distance((below, above))
    placed = placement(task, network)
    np.testing.assert_allclose(placed.distance[3] * np.linalg.norm(np.r_[first.ravel(), second.ravel()]),
                               distance(project("MWNS", network).weights))  # fmt: skip
    two = jnp.where(np.arange(12)[:, None] < 2, first, 0)  # carry two of three directions
    short = LinearNetwork((two, network.weights[1]))
    assert np.isnan(project("GLS", short).weights[1]).all()


def test_the_hierarchy_has_its_closed_form():
    task = hierarchy_task(complete_tree(4))
    np.testing.assert_allclose(
        task.target_values**2, [31, 15, *[7] * 2, *[3] * 4, *[1] * 8], rtol=1e-5
    )
    np.testing.assert_allclose(jnp.sum(task.target_values), 29.6604535614, rtol=1e-6)
    rsm = MRNS.rsm(task)
    network = MRNS.sample(task, 40, key=KEY)
    np.testing.assert_allclose(network.hidden(task.x) @ network.hidden(task.x).T, rsm, atol=1e-5)
    # Entries depend on the depth that leaves share alone.
    steps = np.array(
        [
            (31**0.5 - 15**0.5) / 16,
            (15**0.5 - 7**0.5) / 8,
            (7**0.5 - 3**0.5) / 4,
            (3**0.5 - 1) / 2,
            1,
        ]
    )
    first = np.cumsum(steps)[[4, 3, 2, 2, *[1] * 4, *[0] * 8]]
    np.testing.assert_allclose(rsm[0], first, atol=1e-6)
    # An uneven tree, and inputs that mix: the root of Y Y^T.
    parents = np.array([-1, 0, 0, 1, 1, 1, 2])
    x = np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0] + 2 * np.eye(4)
    task = hierarchy_task(parents, x)
    expected = np.array(
        [[1, 1, 0, 1, 0, 0, 0], [1, 1, 0, 0, 1, 0, 0], [1, 1, 0, 0, 0, 1, 0], [1, 0, 1, 0, 0, 0, 1]]
    )
    np.testing.assert_array_equal(task.y, expected)
    values, vectors = np.linalg.eigh(expected @ expected.T)
    np.testing.assert_allclose(MRNS.rsm(task), (vectors * values**0.5) @ vectors.T, atol=1e-5)
    mixed = MWNS.sample(task, 6, key=KEY).hidden(task.x)
    np.testing.assert_allclose(MWNS.rsm(task), mixed @ mixed.T, atol=1e-5)


# Floats alone, so that all three share programs.
NOISES = {"inputs": Noise(0.3), "weights": Noise(0.0, 0.2, 0.4), "all": Noise(0.3, 0.2, 0.4)}


@jax.jit
def sampled(task):
    """Return members of two families, with 7 hidden units."""
    return [family.sample(task, 7, key=KEY) for family in (GLS, MRNS)]


@pytest.mark.parametrize("noise", NOISES.values(), ids=list(NOISES))
def test_expected_losses(task, noise):
    for place, network in enumerate(sampled(task)):
        exact = expected_loss(task, network, noise)
        found = simulated_loss(
            task, network, noise, num_draws=4000, key=jax.random.fold_in(KEY, place)
        )
        assert found.error < 0.1 * exact
        assert abs(found.mean - exact) < 4 * found.error
        np.testing.assert_allclose(expected_loss(task, network), task.unexplained / 2, atol=1e-6)


@jax.jit
def sampled_losses(task, noise, keys):
    """Return expected losses of members of each family, [keys] each."""

    def losses(key):
        networks = [family.sample(task, 7, spread=0.3, key=key) for family in FAMILIES.values()]
        return [expected_loss(task, network, noise) for network in networks]

    return jax.vmap(losses)(keys)


@jax.jit
def slope_and_curvature(task, noise, network, direction):
    """Return two derivatives of the expected loss along the manifold of solutions."""
    first, second = network.weights

    def moved(size):
        mix = jax.scipy.linalg.expm(size * direction)
        return expected_loss(
            task, LinearNetwork((mix @ first, second @ jnp.linalg.inv(mix))), noise
        )

    return jax.jvp(jax.grad(moved), (0.0,), (1.0,))


@pytest.mark.parametrize("noise", NOISES.values(), ids=list(NOISES))
@pytest.mark.usefixtures("x64")
def test_minimisers_under_noise(task, noise):
    network = noise_minimiser(task, 7, noise, key=KEY)
    assert max(map(abs, GLS.residual(task, network))) < 1e-12
    least = least_loss(task, 7, noise)
    np.testing.assert_allclose(expected_loss(task, network, noise), least, rtol=1e-12)
    assert np.min(sampled_losses(task, noise, jax.random.split(KEY, 20))) > least - 1e-12


@pytest.mark.parametrize("noise", NOISES.values(), ids=list(NOISES))
@pytest.mark.usefixtures("x64")
def test_the_loss_is_stationary_at_minimisers_under_noise(task, noise):
    """The gradient along the manifold of solutions is zero."""
    network = noise_minimiser(task, 7, noise, key=KEY)
    direction = np.random.default_rng(0).normal(size=(7, 7))
    slope, curvature = slope_and_curvature(task, noise, network, direction)
    assert abs(slope) < 1e-9
    assert noise is NOISES["inputs"] or curvature > 1e-3


@pytest.mark.usefixtures("x64")
def test_minimisers_under_traced_noise_are_solutions(task):
    @jax.jit
    @jax.vmap
    def missed(size):
        network = noise_minimiser(task, 7, Noise(0.0, size, size), key=KEY)
        return GLS.residual(task, network).map

    assert missed(jnp.array([0.0, 0.2])).max() < 1e-12


@pytest.mark.usefixtures("x64")
def test_minimisers_move_between_the_minimal_families(task):
    ends = [noise_minimiser(task, 7, Noise(size, 0.2, 0.2), key=KEY) for size in (1e-9, 1e6)]
    rsms = [family.rsm(task) for family in (MRNS, MWNS)]
    for network, rsm in zip(ends, rsms, strict=True):
        own = network.hidden(task.x) @ network.hidden(task.x).T
        np.testing.assert_allclose(
            own / jnp.linalg.norm(own), rsm / jnp.linalg.norm(rsm), atol=1e-6
        )
    # With |X| s_1 = sqrt(outputs) s_2 the first one is an MRNS, not only up to a factor.
    equal = Noise(0, 0.1 / float(jnp.linalg.norm(task.x)), 0.1 / 4**0.5)
    assert max(map(abs, MRNS.residual(task, noise_minimiser(task, 7, equal, key=KEY)))) < 1e-10


def test_fresh_inputs_and_second_readouts(task):
    network = MRNS.sample(task, 7, key=KEY)
    root = np.random.default_rng(1).normal(size=(10, 10)).astype(np.float32)
    x = np.random.default_rng(2).normal(size=(100_000, 10)) @ root.T
    losses = 0.5 * np.sum((x @ np.asarray(network.map - task.best_map).T) ** 2, 1)
    exact = fresh_loss(network, task.best_map, jnp.asarray(root @ root.T))
    assert abs(losses.mean() - exact) < 4 * losses.std() / 100_000**0.5
    np.testing.assert_allclose(
        fresh_loss(network, task.best_map), 0.5 * jnp.sum((network.map - task.best_map) ** 2)
    )
    # The data's own second moment in place of the covariance.
    inputs = np.asarray(task.x)
    moment = jnp.asarray(inputs.T @ inputs / 30)
    for noise in NOISES.values():
        noisy = fresh_loss(network, task.best_map, moment, noise)
        np.testing.assert_allclose(
            noisy, expected_loss(task, network, noise) - task.unexplained / 2, rtol=1e-4
        )
    y = np.random.default_rng(3).normal(size=(30, 3)).astype(np.float32)
    hidden = np.asarray(network.hidden(task.x), float)
    fitted = hidden @ np.linalg.lstsq(hidden, y.astype(float), rcond=1e-5)[0]
    loss = second_readout_loss(network, task.x, jnp.asarray(y))
    np.testing.assert_allclose(loss, np.sum((y - fitted) ** 2) / 60, rtol=1e-4)
    assert second_readout_loss(network, task.x, task.predictions) < 1e-9


def test_which_minimal_family_is_better_depends_on_scale():
    """On fresh inputs N(0, 1), with noise of equal variance on all weights."""
    draws, noise, better = np.random.default_rng(0), Noise(0, 1, 1), {}
    for scale in (0.2, 1.0):
        wins = []
        for _ in range(15):
            x = scale * draws.normal(size=(20, 10))
            task = make_task(
                x.astype(np.float32), (x @ draws.normal(size=(10, 5))).astype(np.float32)
            )
            losses = [
                fresh_loss(f.sample(task, 10, key=KEY), task.best_map, noise=noise)
                for f in (MRNS, MWNS)
            ]
            wins.append(bool(losses[1] < losses[0]))
        better[scale] = np.mean(wins)
    assert 0 < better[0.2] < 1
    assert better[1.0] == 1


@pytest.mark.parametrize("widths", [(3,), (5, 4), (6, 3, 9)])
@pytest.mark.usefixtures("x64")
def test_deep_networks_of_least_norm(task, widths):
    network = least_norm_network(task, widths, key=KEY)
    assert [weight.shape[0] for weight in network.weights] == [*widths, 4]
    assert max(map(abs, deep_residual(task, network))) < 1e-12
    for before, after in zip(network.weights[:-1], network.weights[1:], strict=True):
        np.testing.assert_allclose(before @ before.T, after.T @ after, atol=1e-12)
    x, y = arrays(task)
    values = np.linalg.svd(y @ np.linalg.pinv(x, rcond=1e-6), compute_uv=False)[:3]
    depth = len(widths) + 1
    np.testing.assert_allclose(least_norm(task, depth), depth * np.sum(values ** (2 / depth)))
    scaled = eqx.tree_at(lambda n: n.weights[0], network, 2 * network.weights[0])
    assert deep_residual(task, scaled).map > 0.9
    np.testing.assert_allclose(jax.vmap(network)(task.x), task.x @ network.map.T, atol=1e-12)


def white_task(samples=12, inputs=4, outputs=6, rank=3):
    x = np.linalg.qr(np.random.default_rng(0).normal(size=(samples, inputs)))[0]
    maps = [
        np.random.default_rng(i).normal(size=s)
        for i, s in enumerate([(inputs, rank), (rank, outputs)], 1)
    ]
    return make_task(
        1.7 * x,
        1.7 * x @ maps[0] @ maps[1]
        + 0.1 * np.random.default_rng(4).normal(size=(samples, outputs)),
    )


def balanced(task, hidden, scale):
    """Return a balanced network, made by one program."""
    return jax.jit(lambda: balanced_network(task, hidden, scale, key=KEY))()


@pytest.mark.parametrize(("hidden", "scale"), [(2, 0.5), (5, 1e-3), (9, 2.0)])
@pytest.mark.usefixtures("x64")
def test_gradient_flow_against_an_ode_solver(hidden, scale):
    task = white_task()
    network = balanced(task, hidden, scale)
    times = np.array([0.0, 0.3, 0.4, 2.0, 15.0, 60.0])
    flow = gradient_flow(task, network, times)
    x, y = arrays(task)

    def slope(_, flat):
        first, second = flat[: hidden * 4].reshape(hidden, 4), flat[hidden * 4 :].reshape(6, hidden)
        error = (second @ first @ x - y) @ x.T / 12
        return -np.r_[(second.T @ error).ravel(), (error @ first.T).ravel()]

    start = np.concatenate([np.asarray(weight).ravel() for weight in network.weights])
    solved = solve_ivp(slope, (0, 60), start, "DOP853", times, rtol=1e-10, atol=1e-12).y.T
    for place, flat in enumerate(solved):
        first, second = flat[: hidden * 4].reshape(hidden, 4), flat[hidden * 4 :].reshape(6, hidden)
        np.testing.assert_allclose(flow.map[place], second @ first, atol=1e-7)
        np.testing.assert_allclose(flow.first[place], first.T @ first, atol=1e-7)
        np.testing.assert_allclose(flow.second[place], second @ second.T, atol=1e-7)


def test_gradient_flow_maps_over_tasks():
    tasks = [
        make_task(white.x, scale * white.y) for white in [white_task()] for scale in (1.0, 30.0)
    ]
    network, times = balanced(tasks[0], 3, 0.1), np.array([1.0, 40.0])
    stacked = jax.tree.map(lambda *parts: np.stack(parts), *tasks)
    flow = jax.jit(jax.vmap(lambda task: gradient_flow(task, network, times).map))
    mapped = np.asarray(flow(stacked))
    for place, one in enumerate(tasks):
        alone = gradient_flow(one, network, times).map
        np.testing.assert_allclose(mapped[place], alone, atol=1e-3 * float(one.map_values[0]))
    values = stacked.input_values.copy()
    values[1, 0] *= 1.1
    unequal = eqx.tree_at(lambda t: t.input_values, stacked, values)
    assert np.isnan(flow(unequal)).all((1, 2, 3)).tolist() == [False, True]
    unbalanced = LinearNetwork((2 * network.weights[0], network.weights[1]))
    assert np.isnan(
        jax.jit(lambda network: gradient_flow(tasks[0], network, times).map)(unbalanced)
    ).all()


@pytest.mark.usefixtures("x64")
def test_flows_of_other_last_times_share_a_program_and_have_derivatives():
    task, times = white_task(), np.array([1.0, 20.0])
    network = balanced(task, 3, 0.5)
    gradient_flow(task, network, times)
    assert compilations(lambda: gradient_flow(task, network, 50 * times)) == []
    for late in (1e9, 1e30):
        with pytest.raises(
            ValueError,
            match=r"`times` must rise by at most .* in each of 2 intervals, 2000000 steps",
        ):
            gradient_flow(task, network, late * times)
    late = jax.jit(lambda task: gradient_flow(task, network, 1e30 * times).map)(task)
    assert np.isnan(late).all()

    def size(factor):
        # A common rotation and scale of both layers keep them balanced.
        scaled = LinearNetwork((factor * network.weights[0], factor * network.weights[1]))
        return jnp.sum(gradient_flow(task, scaled, times).map ** 2)

    run = jax.jit(size)
    slope = (run(1.0 + 1e-5) - run(1.0 - 1e-5)) / 2e-5
    np.testing.assert_allclose(jax.jit(jax.grad(size))(1.0), slope, rtol=1e-5)


@pytest.mark.slow
def test_plurality_by_all_measures(task):
    whole = plurality(task, GLS, 8, num_pairs=5, key=KEY)
    assert set(whole.refused) == {"crossnobis_rsa"}
    assert all(
        np.isfinite(values).all() and values.shape == (5,) for values in whole.values.values()
    )
    assert whole.values["debiased_cka"].max() < 0.99
    few = "linear_cka", "debiased_cka"
    minimal = plurality(task, MWNS, 8, measures=few, key=KEY)
    for name in few:
        np.testing.assert_allclose(minimal.values[name], 1, atol=1e-4)
    reference = GLS.sample(task, 8, key=KEY).hidden(task.x)
    free = linear_cka_range(np.asarray(task.x), np.asarray(reference))
    assert free.low < plurality(task, LSS, 8, measures=few[:1], key=KEY).values["linear_cka"].min()
    assert free.high > 0.99


def test_plurality(task):
    few = ("linear_cka",)
    options = {"measures": few, "num_pairs": 3, "key": KEY}
    same = {
        family: plurality(task, family, 8, **options).values["linear_cka"] for family in (MRNS, GLS)
    }
    np.testing.assert_allclose(same[MRNS], 1, atol=1e-4)
    assert same[GLS].max() < 0.99
    other = task_of("deficient", key=jax.random.key(5))
    apart = plurality(task, MRNS, 8, other=other, **options)
    assert apart.values["linear_cka"].max() < 0.9


def test_planted_activity(task):
    draws = np.random.default_rng(0)
    pattern = np.asarray(task.sample_basis) @ draws.normal(size=(7, 9)).astype(np.float32)
    codes = np.asarray(task.target_right)
    missing = pattern - codes @ (codes.T @ pattern)  # what the task needs is not in the pattern
    outside = pattern + draws.normal(size=pattern.shape).astype(np.float32)
    cases = (
        (pattern, 1e-3, True),
        (pattern[:, :6], 1e-3, False),
        (missing, 0.1, False),
        (outside, 0.01, False),
    )
    for given, least, exact in cases:
        found = plant(task, given, least=least)
        assert GLS.residual(task, found.network).map < 1e-4
        np.testing.assert_allclose(
            np.linalg.norm(found.network.hidden(task.x) - given), found.distance, atol=1e-4
        )
        assert found.bound <= found.distance * (1 + 1e-5) + 1e-5
        assert (found.distance < 1e-4 * np.linalg.norm(given)) == exact
    raised = 0.1 * np.linalg.norm(missing, 2) * 3**0.5
    np.testing.assert_allclose(plant(task, missing, least=0.1).bound, raised, rtol=1e-4)
    # One column that holds what the task needs: no other direction may replace it.
    single = random_task(20, 4, 3, rank=1, key=KEY)
    column = np.pad(np.asarray(single.target_right), ((0, 0), (0, 3)))
    found = plant(single, column)
    assert found.distance < 1e-5
    np.testing.assert_allclose(
        jnp.linalg.norm(found.network.weights[1]), single.target_values[0], rtol=1e-4
    )
    rsm = np.asarray(task.x) @ np.asarray(task.x).T
    planted = plant_rsm(task, rsm, 10, least=1e-4)
    hidden = planted.network.hidden(task.x)
    np.testing.assert_allclose(hidden @ hidden.T, rsm, atol=1e-3)
    assert GLS.residual(task, planted.network).map < 1e-3


def test_stacked_tasks_and_other_tools(task):
    tasks = [task_of("deficient", key=jax.random.key(seed)) for seed in range(3)]
    stacked = jax.tree.map(lambda *parts: np.stack(parts), *tasks)
    keys = jax.random.split(KEY, 3)
    networks = jax.jit(jax.vmap(lambda t, k: GLS.sample(t, 8, key=k)))(stacked, keys)
    alone = GLS.sample(tasks[1], 8, key=keys[1])
    np.testing.assert_allclose(networks.weights[0][1], alone.weights[0], atol=1e-4)
    network = MWNS.sample(task, 8, key=KEY)
    layers = representations(network, task.x)
    assert list(layers) == ["weights[1]", "logits"] or len(layers) == 2
    np.testing.assert_allclose(layers["features"], network.hidden(task.x), atol=1e-5)
    taught = teacher_task(task.x, network.weights, key=KEY)
    np.testing.assert_allclose(taught.best_map, task.best_map, atol=1e-4)


def test_the_coarsest_rounding_cuts_ranks():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(100, 5)) @ rng.normal(size=(5, 12))).astype(np.float32)
    labels = make_task(
        x, np.eye(3)[rng.integers(0, 3, 100)]
    )  # float64, as one-hot labels often are
    assert labels.input_values.shape == (5,)
    loss = expected_loss(labels, LSS.sample(labels, 8, key=KEY))
    assert loss == pytest.approx(float(least_loss(labels, 8, Noise())), rel=1e-5)
    given = rng.normal(size=(50, 12))
    assert (
        make_task(
            given, (given @ rng.normal(size=(12, 2)) @ rng.normal(size=(2, 5))).astype(np.float32)
        ).rank
        == 2
    )


@pytest.mark.parametrize(("tilt", "finite"), [(1e-6, True), (1e-4, False)])
def test_readouts_of_layers_that_miss_inputs_are_nan(tilt, finite):
    task = random_task(30, 8, 4, rank=2, key=KEY)
    first = jnp.concatenate([(task.map_right + tilt * task.irrelevant[:, :2]).T, jnp.ones((1, 8))])
    found = LSS.residual(task, LSS.project(task, LinearNetwork((first, jnp.ones((4, 3)))))).map
    assert (found < 1e-5) if finite else jnp.isnan(found)


def test_refusals(task):
    stacked = jax.tree.map(lambda part: part[None], task)
    network, eye, ones = (
        GLS.sample(task, 5, key=KEY),
        np.eye(30, dtype=np.float32),
        np.ones((30, 3), np.float32),
    )
    white = white_task()
    start = balanced(white, 3, 0.1)
    refused(
        (
            lambda: GLS.sample(task, 2, key=KEY),
            "`hidden` must be at least the rank of the best map",
        ),
        (lambda: GLS.sample(stacked, 5, key=KEY), "`task` must be one task"),
        (lambda: GLS.sample(task, 5, spread=10.0, key=KEY), "`spread` must be from 0 to 3"),
        (lambda: GLS.rsm(task), "no unique matrix"),
        (
            lambda: GLS.residual(task, LinearNetwork((jnp.ones((3, 10)),))),
            "`network` must have weights",
        ),
        (lambda: GLS.residual(task, LinearNetwork(())), "`network` must have weights"),
        (
            lambda: placement(task, LinearNetwork((jnp.ones((1, 10)), jnp.ones((4, 1))))),
            "at least 3 hidden units",
        ),
        (lambda: make_task(eye[:, :2], eye[:, 2:]), "`y` must depend on x"),
        (lambda: make_task(np.nan * ones, ones), "`x` must be finite"),
        (lambda: hierarchy_task(np.array([-1, 0, 3, 2])), "lead to the root"),
        (lambda: hierarchy_task(np.array([-1, 2, 1, 0, 1])), "lead to the root"),
        (
            lambda: teacher_task(task.x, [np.full((2, 10), np.nan)], key=KEY),
            r"`weights\[0\]` must be finite",
        ),
        (lambda: noise_minimiser(task, 5, Noise(0, 0.1, 0), key=KEY), "noise on both layers"),
        (
            lambda: expected_loss(task, network, Noise(jnp.ones(2))),
            "`noise.inputs` must be a single number, got shape",
        ),
        (lambda: fresh_loss(network, task.best_map[:1]), "`teacher` must have the shape"),
        (
            lambda: fresh_loss(network, task.best_map, -eye[:10, :10]),
            "`covariance` must be symmetric and positive semi",
        ),
        (lambda: second_readout_loss(network, ones, ones), "`x` must have 10 columns"),
        (lambda: least_norm(stacked, 2), "`task` must be one task"),
        (
            lambda: least_norm_network(task, (5, 2), key=KEY),
            r"`widths\[1\]` must be at least the rank",
        ),
        (
            lambda: deep_residual(task, LinearNetwork((jnp.ones((3, 10)), jnp.ones((4, 2))))),
            "layers that follow each",
        ),
        (lambda: balanced_network(stacked, 5, 0.1, key=KEY), "`task` must be one task"),
        (
            lambda: gradient_flow(task, MWNS.sample(task, 5, key=KEY), np.ones(1)),
            "`task` must have white inputs",
        ),
        (
            lambda: gradient_flow(
                white, LinearNetwork((2 * start.weights[0], start.weights[1])), np.ones(1)
            ),
            "balanced",
        ),
        (lambda: gradient_flow(white, start, np.array([1.0, 0.5])), "`times` must increase"),
        (lambda: plant(task, np.zeros((30, 5), np.float32)), "not be zero"),
        (lambda: plant_rsm(task, -eye, 5), "positive semidefinite"),
        (lambda: plant_rsm(task, eye, 2), "`hidden` must be at least the rank"),
        (lambda: plant_rsm(task, 0 * eye, 5), "`rsm` must have shape .*, and not be zero"),
    )
    with pytest.raises(
        TypeError, match="its rank sets shapes, got a traced value. Call it outside"
    ):
        jax.jit(lambda x: make_task(x, x).best_map)(np.eye(3))


def test_gradient_descent_follows_the_flow():
    task = white_task()
    network = balanced(task, 5, 0.1)
    left, values, right = (
        np.asarray(part) for part in (task.map_left, task.map_values, task.map_right)
    )
    fastest = float(np.max(values * np.asarray(task.input_values)[0] ** 2 / 12))
    rate = 5e-3 / fastest

    def loss(network, batch, key):
        return 0.5 * jnp.mean(jnp.sum((jax.vmap(network)(batch[0]) - batch[1]) ** 2, 1))

    step = make_step(loss, optax.sgd(rate))
    state, done = step.init(network), 0
    ends = [40, 200, 600, 1600, 4000]
    maps = np.asarray(gradient_flow(task, network, rate * np.array(ends, float)).map)
    for place, end in enumerate(ends):
        options = {"num_steps": end - done, "key": KEY, "first_step": done}
        state, done = train(state, step, FullBatch((task.x, task.y)), **options)[0], end
        missed = np.asarray(state.model.map) - maps[place]
        assert np.abs(np.diagonal(left.T @ missed @ right) / values).max() < 0.02
    learned = left[:, 0] @ maps @ right[:, 0] / values[0]
    assert learned[0] < 0.1
    assert learned[-1] > 0.95
