"""Figure `manifold`: all solutions of two-layer linear networks, and noise that selects some.

After figures 1, 3 and 4 of Braun, Grant and Saxe (2025), with exact walks in place of perturbation
and descent.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import xarray
from jax import lax
from jaxtyping import Array

from dissociation._core.checks import check_positive, fail
from dissociation._core.linalg import centre
from dissociation.figures._cache import AnyMeter, Cache, CacheFolder
from dissociation.figures._harness import Settings, run
from dissociation.figures._manifold_drawing import QUANTITIES, draw, scaled
from dissociation.figures._manifold_drawing import caption as caption
from dissociation.figures._manifold_drawing import headline as headline
from dissociation.figures._manifold_drawing import table as table
from dissociation.linear._families import FAMILIES, LSS, MRNS, MWNS, Family, LinearNetwork
from dissociation.linear._noise import Noise, expected_loss, noise_minimiser, simulated_loss
from dissociation.linear._planting import plant_rsm
from dissociation.linear._tasks import Task, complete_tree, hierarchy_task, make_task, random_task
from dissociation.similarity._dissimilarity import rsa
from dissociation.similarity._predictivity import linear_predictivity

__all__ = ["Config", "compute", "draw"]

STEM = "solution-manifold"
SHOWS = (
    "All linear networks that solve a task: walks, hierarchies, similarity of families, and "
    "selection by noise."
)

MEASURES = "rsa", "predictivity", "in-sample predictivity"
MINIMISERS = "least under input noise", "least under parameter noise", "least under both"


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    """Settings of tasks, walks and noise."""

    num_tasks: int = 10
    """Random tasks of the same inputs, at least 2."""
    num_samples: int = 60
    """Samples of a task."""
    num_inputs: int = 20
    """Inputs."""
    input_rank: int = 12
    """Rank of the inputs."""
    condition: float = 10.0
    """Ratio of the largest to the smallest singular value of the inputs, at least 1."""
    num_outputs: int = 8
    """Outputs."""
    rank: int = 4
    """Rank of a task's map."""
    hidden: int = 16
    """Hidden units, at least the rank."""
    num_steps: int = 501
    """Steps of a walk."""
    pair_steps: int = 101
    """Steps at which families are compared, the first of a walk."""
    rate: float = 0.05
    """Fraction by which free parameters decay in a step of a walk, up to 1."""
    depth: int = 4
    """Levels of the hierarchy's tree below its root."""
    num_scales: int = 9
    """Standard deviations of noise."""
    num_draws: int = 4000
    """Draws of noise in simulations."""

    def __post_init__(self):
        self.check(num_samples=10, num_inputs=1, num_outputs=1, depth=(1, 7), hidden=self.rank)
        self.check(input_rank=(1, min(self.num_samples, self.num_inputs)))
        self.check(rank=(1, min(self.input_rank, self.num_outputs)), condition=(1.0, 1000.0))
        self.check(
            num_tasks=2, num_steps=2, pair_steps=(2, self.num_steps), num_scales=2, num_draws=2
        )
        self.check(rate=check_positive)
        if self.rate > 1:
            fail("rate", "be at most 1", self.rate)

    def quick(self) -> "Config":
        """Return the options of a smoke run."""
        return dataclasses.replace(
            self, num_tasks=3, num_steps=51, pair_steps=11, num_scales=4, num_draws=500
        )


def source(config: Config) -> None:
    """Load nothing: the tasks are drawn."""


def compute(
    config: Config,
    *,
    key: Array,
    data: None = None,
    cache: CacheFolder = None,
    progress: AnyMeter = None,
) -> xarray.Dataset:
    """Walk, plant, compare and add noise; see `figures.Figure.compute`.

    Returns:
        `moved` [quantities, tasks, steps], distances from the first step of a walk in GLS over the
        norm of the first; for the loss, its change over the loss of zero outputs. `drift`
        [families, tasks, steps], relative error of predictions by the first step's readout. By
        measure and scope (one task, or the next one), `similarity` [measures, scopes, families,
        other_families, tasks, pair_steps] of two independent walks. `theory`, `simulated` and
        `error` of the expected loss, [sources, solutions, scales], and `selected` [minimal,
        noise_scales], RSA of the minimiser under both noises with the minimal families. Of the
        hierarchy, `leaves_x`, `leaves_y`, and of three solutions `activity`, `rsm` and `mds`,
        [planted, leaves, ...].
    """
    return run(_computed, config, key=key, data=data, cache=cache, progress=progress)


def _computed(config: Config, key: Array, data: None, cache: Cache) -> xarray.Dataset:
    """Return the dataset of `compute`."""
    task_key, walk_key, noise_key, tree_key = jax.random.split(key, 4)
    tasks = _tasks(config, task_key)
    first_task = jax.tree.map(lambda leaf: leaf[0], tasks)
    jobs = {
        "walks": partial(_walks, config, tasks, walk_key),
        "noise": partial(_noise, config, first_task, noise_key),
        "hierarchy": partial(_hierarchy, config, tree_key),
    }
    arrays = cache.get_all(jobs, "walking and simulating")
    walks, noise, tree = arrays.values()

    variables = {}
    pair_axes = ("families", "other_families", "tasks", "pair_steps")
    variables["moved"] = (("quantities", "tasks", "steps"), walks["moved"])
    variables["drift"] = (("families", "tasks", "steps"), walks["drift"])
    variables["similarity"] = (("measures", "scopes", *pair_axes), walks["similarity"])
    for name in ("theory", "simulated", "error"):
        variables[name] = (("sources", "solutions", "scales"), noise[name])
    variables["selected"] = (("minimal", "noise_scales"), noise["selected"])
    variables["parents"] = ("nodes", complete_tree(config.depth))
    variables["leaves_x"] = (("leaves", "features"), tree["x"])
    variables["leaves_y"] = (("leaves", "nodes"), tree["y"])
    variables["activity"] = (("planted", "leaves", "units"), tree["activity"])
    variables["rsm"] = (("planted", "leaves", "other_leaves"), tree["rsm"])
    variables["mds"] = (("planted", "leaves", "axes"), tree["mds"])

    families = list(FAMILIES)
    minimal = ["MRNS", "MWNS"]
    coords = {
        "quantities": list(QUANTITIES),
        "families": families,
        "other_families": families,
        "minimal": minimal,
        "measures": list(MEASURES),
        "scopes": ["one task", "two tasks"],
        "sources": ["inputs", "parameters"],
        "solutions": [*families, *MINIMISERS],
        "scales": noise["scales"],
        "noise_scales": noise["noise_scales"],
        "planted": ["LSS", *minimal],
    }
    return xarray.Dataset(variables, coords)


def _tasks(config: Config, key: Array) -> Task:
    """Return stacked tasks of the same inputs."""
    first_key, map_key = jax.random.split(key, 2)
    first = random_task(
        config.num_samples,
        config.num_inputs,
        config.num_outputs,
        rank=config.rank,
        input_rank=config.input_rank,
        condition=config.condition,
        key=first_key,
    )
    shape = (config.num_tasks, config.rank, config.num_inputs + config.num_outputs)
    draws = np.asarray(jax.random.normal(map_key, shape))
    encoders, decoders = np.split(draws, [config.num_inputs], 2)
    scale = np.sqrt(config.num_inputs * config.rank)
    targets = np.asarray(first.x) @ encoders.swapaxes(1, 2) @ decoders / scale
    tasks = [make_task(first.x, y.astype(first.x.dtype), rtol=1e-5) for y in targets]
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *tasks)


def _walks(config: Config, tasks: Task, key: Array) -> dict[str, Array | np.ndarray]:
    """Return distances, drift and similarities of walks in all families."""
    keys = jax.random.split(key, (2, len(FAMILIES), config.num_tasks))

    def walk(family: Family, family_keys: Array) -> LinearNetwork:
        walk_task = partial(
            family.walk, hidden=config.hidden, num_steps=config.num_steps, rate=config.rate
        )
        return jax.vmap(lambda task, key: walk_task(task, key=key))(tasks, family_keys)

    def activities(walks: list[LinearNetwork]) -> list[Array]:
        """Return activities [tasks, steps, samples, units] of each family."""
        return [jax.vmap(_activity)(tasks, networks)[:, : config.pair_steps] for networks in walks]

    walks = list(map(walk, FAMILIES.values(), keys[0]))
    second_walks = list(map(walk, FAMILIES.values(), keys[1]))
    moved = jax.vmap(_moved)(tasks, walks[list(FAMILIES).index("GLS")])
    drift = [jax.vmap(_drift)(tasks, networks) for networks in walks]

    rows = []
    second_activities = activities(second_walks)
    for first in activities(walks):
        rows.append([_compared(first, second) for second in second_activities])
    similarity = np.array(rows)  # [families, other_families, measures, scopes, ...]
    return {
        "moved": np.moveaxis(moved, 1, 0),
        "drift": np.stack(drift),
        "similarity": np.moveaxis(similarity, (2, 3), (0, 1)),
    }


def _activity(task: Task, networks: LinearNetwork) -> Array:
    """Return hidden activities, [steps, samples, units]."""
    return jax.vmap(lambda network: network.hidden(task.x))(networks)


@jax.jit
def _moved(task: Task, networks: LinearNetwork) -> Array:
    """Return relative distances from the first step, [quantities, steps]."""
    hidden = _activity(task, networks)
    rsms = hidden @ hidden.swapaxes(1, 2)
    outputs = hidden @ networks.weights[1].swapaxes(1, 2)
    losses = jnp.sum((outputs - task.y[None]) ** 2, (1, 2))

    distances = []
    for arrays in (*networks.weights, hidden, rsms, outputs):
        distance = jnp.linalg.norm(arrays - arrays[:1], axis=(1, 2))
        distances.append(distance / jnp.linalg.norm(arrays[0]))
    # Targets without noise leave no loss: its scale is that of outputs of zero.
    distances.append(jnp.abs(losses - losses[0]) / jnp.sum(task.y**2))
    return jnp.stack(distances)


@jax.jit
def _drift(task: Task, networks: LinearNetwork) -> Array:
    """Return relative errors of the first step's readout of later activities, [steps]."""
    outputs = _activity(task, networks) @ networks.weights[1][0].T
    targets = task.predictions
    errors = jnp.linalg.norm(outputs - targets[None], axis=(1, 2))
    return errors / jnp.linalg.norm(targets)


@jax.jit
def _compared(first: Array, second: Array) -> Array:
    """Return measures of activities of two walks, [measures, scopes, tasks, steps].

    The second walk is of the same task, or of the next task.
    """

    def measure(x: Array, y: Array) -> Array:
        return jnp.stack([rsa(x, y), linear_predictivity(x, y), _in_sample(x, y)])

    def over_tasks(second: Array) -> Array:
        return lax.map(lambda pair: jax.vmap(measure)(*pair), (first, second))

    scopes = jnp.stack([second, jnp.roll(second, -1, 0)])
    return jnp.moveaxis(lax.map(over_tasks, scopes), 3, 0)


def _in_sample(x: Array, y: Array) -> Array:
    """Return the share of variance of y that a linear map of x explains on its own samples."""
    left_vectors, values, _ = jnp.linalg.svd(centre(x), full_matrices=False)
    is_significant = values > 1e-5 * values[0]
    basis = jnp.where(is_significant[None], left_vectors, 0.0)
    target = centre(y)
    explained = jnp.sum((basis.T @ target) ** 2)
    return explained / jnp.sum(target**2)


def _noise(config: Config, task: Task, key: Array) -> dict[str, Array | np.ndarray]:
    """Return losses under noise, and RSA of the minimiser with the minimal families."""
    families = [*FAMILIES.values(), LSS]  # the last one is the least under input noise
    num_scales = config.num_scales
    num_solutions = len(families) + 2
    num_keys = [len(families), 6 * num_scales, 2 * num_scales * num_solutions]
    keys = jax.random.split(key, sum(num_keys))
    draw_keys, minimiser_keys, run_keys = jnp.split(keys, np.cumsum(num_keys)[:-1])

    networks = []
    for family, family_key in zip(families, draw_keys, strict=True):
        networks.append(family.sample(task, config.hidden, key=family_key))

    def minimise(pair: tuple[Array, Array]) -> LinearNetwork:
        input_noise, minimiser_key = pair
        # Equal noise on both layers: its size does not matter.
        noise = Noise(input_noise, 0.1, 0.1)
        return noise_minimiser(task, config.hidden, noise, key=minimiser_key)

    scales = jnp.geomspace(0.03, 1.0, num_scales)
    zeros = jnp.zeros(num_scales)
    wide_scales = jnp.geomspace(1e-2, 1e2, 4 * num_scales)
    all_scales = np.concatenate([zeros, scales, wide_scales])
    minimisers = lax.map(minimise, (all_scales, minimiser_keys))

    def minimisers_from(start: int, end: int | None) -> LinearNetwork:
        return jax.tree.map(lambda weight: weight[start:end], minimisers)

    solutions = []
    for network in networks:
        solutions.append(jax.tree.map(lambda weight: np.stack([weight] * num_scales), network))
    solutions.append(minimisers_from(0, num_scales))
    solutions.append(minimisers_from(num_scales, 2 * num_scales))
    # The scales are the first axis, solutions the second.
    stacked = jax.tree.map(lambda *weights: jnp.asarray(np.stack(weights, 1)), *solutions)

    def losses_of(network: LinearNetwork, noise: Noise, key: Array) -> Array:
        simulated = simulated_loss(task, network, noise, num_draws=config.num_draws, key=key)
        return jnp.stack([expected_loss(task, network, noise), *simulated])

    parameter_scales = np.stack([zeros, scales])
    noises = Noise(np.stack([scales, zeros]), parameter_scales, parameter_scales)
    over_scales = jax.vmap(jax.vmap(losses_of, (0, None, 0)))
    run_keys = run_keys.reshape(2, num_scales, num_solutions, *key.shape)
    over_sources = lax.map(lambda pair: over_scales(stacked, *pair), (noises, run_keys))
    # From [sources, scales, solutions, 3] to [3, sources, solutions, scales].
    theory, simulated, error = np.moveaxis(over_sources, (3, 2), (0, 2))

    activities = _activity(task, minimisers_from(2 * num_scales, None))
    selected = []
    for name in ("MRNS", "MWNS"):
        minimal = networks[list(FAMILIES).index(name)].hidden(task.x)
        selected.append(jax.vmap(rsa, (0, None))(activities, minimal))
    return {
        "theory": theory,
        "simulated": simulated,
        "error": error,
        "selected": np.stack(selected),
        "scales": scales,
        "noise_scales": wide_scales,
    }


def _hierarchy(config: Config, key: Array) -> dict[str, Array]:
    """Return the hierarchy's task and hidden activities of three solutions.

    The first solution has the leaves exchanged, the other two are minimal.
    """
    noise_key, order_key, *family_keys, start_key = jax.random.split(key, 5)
    num_leaves = 2**config.depth
    noise = jax.random.normal(noise_key, (num_leaves, num_leaves))
    x = jnp.eye(num_leaves) + noise / (2 * num_leaves**0.5)
    task = hierarchy_task(complete_tree(config.depth), x)

    hidden = num_leaves + num_leaves // 2
    order = jax.random.permutation(order_key, num_leaves)
    exchanged = MRNS.rsm(task)[order][:, order]
    networks = [plant_rsm(task, exchanged, hidden).network]
    for family, family_key in zip((MRNS, MWNS), family_keys, strict=True):
        networks.append(family.sample(task, hidden, key=family_key))

    activity = jnp.stack([network.hidden(task.x) for network in networks])
    start = jax.random.normal(start_key, (len(networks), num_leaves, 2))
    return {
        "x": task.x,
        "y": task.y,
        "activity": activity,
        "rsm": activity @ activity.swapaxes(1, 2),
        "mds": jax.vmap(scaled)(activity, start),
    }
