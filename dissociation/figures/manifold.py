"""Figure `manifold`: all solutions of two-layer linear networks, and the noise that selects among them.

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
from dissociation.linear._families import FAMILIES, LSS, MRNS, MWNS, LinearNetwork
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
    task_key, walk_key, noise_key, tree_key = jax.random.split(key, 4)
    tasks = _tasks(config, task_key)
    jobs = {
        "walks": partial(_walks, config, tasks, walk_key),
        "noise": partial(_noise, config, jax.tree.map(lambda part: part[0], tasks), noise_key),
        "hierarchy": partial(_hierarchy, config, tree_key),
    }
    found = cache.get_all(jobs, "walking and simulating")
    walks, noise, tree = found.values()
    families, minimal = list(FAMILIES), ["MRNS", "MWNS"]
    variables = {
        "moved": (("quantities", "tasks", "steps"), walks["moved"]),
        "drift": (("families", "tasks", "steps"), walks["drift"]),
        "similarity": (
            ("measures", "scopes", "families", "other_families", "tasks", "pair_steps"),
            walks["similarity"],
        ),
        **{
            name: (("sources", "solutions", "scales"), noise[name])
            for name in ("theory", "simulated", "error")
        },
        "selected": (("minimal", "noise_scales"), noise["selected"]),
        "parents": ("nodes", complete_tree(config.depth)),
        "leaves_x": (("leaves", "features"), tree["x"]),
        "leaves_y": (("leaves", "nodes"), tree["y"]),
        "activity": (("planted", "leaves", "units"), tree["activity"]),
        "rsm": (("planted", "leaves", "other_leaves"), tree["rsm"]),
        "mds": (("planted", "leaves", "axes"), tree["mds"]),
    }
    coords = {
        "quantities": list(QUANTITIES), "families": families, "other_families": families, "minimal": minimal,
        "measures": list(MEASURES), "scopes": ["one task", "two tasks"], "sources": ["inputs", "parameters"],
        "solutions": [*families, *MINIMISERS], "scales": noise["scales"], "noise_scales": noise["noise_scales"],
        "planted": ["LSS", *minimal],
    }  # fmt: skip
    return xarray.Dataset(variables, coords)


def _tasks(config: Config, key: Array) -> Task:
    """Return stacked tasks of the same inputs."""
    keys = jax.random.split(key, 2)
    sizes = config.num_samples, config.num_inputs, config.num_outputs
    first = random_task(
        *sizes,
        rank=config.rank,
        input_rank=config.input_rank,
        condition=config.condition,
        key=keys[0],
    )
    shape = config.num_tasks, config.rank, config.num_inputs + config.num_outputs
    maps = np.split(np.asarray(jax.random.normal(keys[1], shape)), [config.num_inputs], 2)
    targets = (
        np.asarray(first.x)
        @ maps[0].swapaxes(1, 2)
        @ maps[1]
        / np.sqrt(config.num_inputs * config.rank)
    )
    tasks = [make_task(first.x, y.astype(first.x.dtype), rtol=1e-5) for y in targets]
    return jax.tree.map(lambda *parts: jnp.asarray(np.stack(parts)), *tasks)


def _walks(config: Config, tasks: Task, key: Array) -> dict[str, Array | np.ndarray]:
    """Return distances, drift and similarities of walks in all families."""
    keys = jax.random.split(key, (2, len(FAMILIES), config.num_tasks))

    def walk(family: str, place: int, each: Array) -> LinearNetwork:
        one = partial(
            FAMILIES[family].walk,
            hidden=config.hidden,
            num_steps=config.num_steps,
            rate=config.rate,
        )
        return jax.vmap(lambda task, key: one(task, key=key))(tasks, each[place])

    walks = {name: walk(name, place, keys[0]) for place, name in enumerate(FAMILIES)}
    others = {name: walk(name, place, keys[1]) for place, name in enumerate(FAMILIES)}
    moved = jax.vmap(_moved)(tasks, walks["GLS"])
    drift = [jax.vmap(_drift)(tasks, networks) for networks in walks.values()]
    kept = config.pair_steps
    hidden, other = (
        [jax.vmap(_activity)(tasks, networks)[:, :kept] for networks in each.values()]
        for each in (walks, others)
    )  # [tasks, steps, samples, units]
    rows = np.array(
        [[_compared(one, second) for second in other] for one in hidden]
    )  # families first
    return {
        "moved": np.moveaxis(moved, 1, 0),
        "drift": np.stack(drift),
        "similarity": np.moveaxis(rows, (2, 3), (0, 1)),
    }


def _activity(task: Task, networks: LinearNetwork) -> Array:
    """Return hidden activities, [steps, samples, units]."""
    return jax.vmap(lambda network: network.hidden(task.x))(networks)


@jax.jit
def _moved(task: Task, networks: LinearNetwork) -> Array:
    """Return relative distances from the first step, [quantities, steps]."""
    hidden = _activity(task, networks)
    outputs = hidden @ networks.weights[1].swapaxes(1, 2)
    losses = jnp.sum((outputs - task.y[None]) ** 2, (1, 2))
    arrays = *networks.weights, hidden, hidden @ hidden.swapaxes(1, 2), outputs
    moved = [
        jnp.linalg.norm(each - each[:1], axis=(1, 2)) / jnp.linalg.norm(each[0]) for each in arrays
    ]
    # Targets without noise leave no loss: its scale is that of outputs of zero.
    return jnp.stack([*moved, jnp.abs(losses - losses[0]) / jnp.sum(task.y**2)])


@jax.jit
def _drift(task: Task, networks: LinearNetwork) -> Array:
    """Return relative errors of the first step's readout of later activities, [steps]."""
    read = _activity(task, networks) @ networks.weights[1][0].T
    wanted = task.predictions
    return jnp.linalg.norm(read - wanted[None], axis=(1, 2)) / jnp.linalg.norm(wanted)


@jax.jit
def _compared(hidden: Array, others: Array) -> Array:
    """Return measures of activities with others of the same task and of the next, [measures, scopes, tasks, steps]."""

    def three(x: Array, y: Array) -> Array:
        return jnp.stack([rsa(x, y), linear_predictivity(x, y), _in_sample(x, y)])

    def scope(other: Array) -> Array:
        return lax.map(lambda pair: jax.vmap(three)(*pair), (hidden, other))

    return jnp.moveaxis(lax.map(scope, jnp.stack([others, jnp.roll(others, -1, 0)])), 3, 0)


def _in_sample(x: Array, y: Array) -> Array:
    """Return the share of the variance of y that a linear map of x explains on the samples that fitted it."""
    left, values, _ = jnp.linalg.svd(centre(x), full_matrices=False)
    kept = values > 1e-5 * values[0]
    target = centre(y)
    return jnp.sum((jnp.where(kept[None], left, 0.0).T @ target) ** 2) / jnp.sum(target**2)


def _noise(config: Config, task: Task, key: Array) -> dict[str, Array | np.ndarray]:
    """Return theory and simulation under noise, and RSA of the minimiser with the minimal families."""
    families = [*FAMILIES.values(), LSS]  # the last one is the least under input noise
    number, wide = config.num_scales, jnp.geomspace(1e-2, 1e2, 4 * config.num_scales)
    draw_keys, least_keys, run_keys = _keys(
        key, len(families), 6 * number, 2 * number * (len(families) + 2)
    )
    networks = [
        family.sample(task, config.hidden, key=k)
        for family, k in zip(families, draw_keys, strict=True)
    ]
    scales, zeros = jnp.geomspace(0.03, 1.0, number), jnp.zeros(number)

    def least(pair: tuple[Array, Array]) -> LinearNetwork:
        noise = Noise(
            pair[0], 0.1, 0.1
        )  # of equal sizes on both layers: their common size does not matter
        return noise_minimiser(task, config.hidden, noise, key=pair[1])

    minimisers = lax.map(least, (np.concatenate([zeros, scales, wide]), least_keys))

    def part(begin: int, end: int | None) -> LinearNetwork:
        return jax.tree.map(lambda weight: weight[begin:end], minimisers)

    known = [jax.tree.map(lambda weight: np.stack([weight] * number), one) for one in networks]
    known += part(0, number), part(number, 2 * number)
    stacked = jax.tree.map(
        lambda *weights: jnp.asarray(np.stack(weights, 1)), *known
    )  # scales first

    def measured(network: LinearNetwork, noise: Noise, key: Array) -> Array:
        found = simulated_loss(task, network, noise, num_draws=config.num_draws, key=key)
        return jnp.stack([expected_loss(task, network, noise), *found])

    noises = Noise(np.stack([scales, zeros]), *[np.stack([zeros, scales])] * 2)  # [sources, scales]
    over_scales = jax.vmap(jax.vmap(measured, (0, None, 0)))
    run_keys = run_keys.reshape(2, number, len(families) + 2, *key.shape)
    found = lax.map(
        lambda pair: over_scales(stacked, *pair), (noises, run_keys)
    )  # [sources, scales, solutions, 3]
    theory, simulated, error = np.moveaxis(found, (3, 2), (0, 2))
    ends = [networks[list(FAMILIES).index(name)].hidden(task.x) for name in ("MRNS", "MWNS")]
    chosen = _activity(task, part(2 * number, None))
    selected = np.stack([jax.vmap(rsa, (0, None))(chosen, end) for end in ends])
    arrays = {
        "theory": theory,
        "simulated": simulated,
        "error": error,
        "selected": selected,
        "scales": scales,
    }
    return arrays | {"noise_scales": wide}


def _keys(key: Array, *numbers: int) -> list[Array]:
    """Return keys in groups, by one program."""
    return jnp.split(jax.random.split(key, sum(numbers)), np.cumsum(numbers)[:-1])


def _hierarchy(config: Config, key: Array) -> dict[str, Array]:
    """Return hidden activities of the hierarchy: one with the leaves exchanged, and the minimal families."""
    keys = jax.random.split(key, 5)
    leaves = 2**config.depth
    x = jnp.eye(leaves) + jax.random.normal(keys[0], (leaves, leaves)) / (2 * leaves**0.5)
    task = hierarchy_task(complete_tree(config.depth), x)
    units = leaves + leaves // 2
    order = jax.random.permutation(keys[1], leaves)
    networks = [
        plant_rsm(task, MRNS.rsm(task)[order][:, order], units).network,
        *(
            family.sample(task, units, key=k)
            for family, k in zip((MRNS, MWNS), keys[2:4], strict=True)
        ),
    ]
    activity = jnp.stack([network.hidden(task.x) for network in networks])
    mds = jax.vmap(scaled)(activity, jax.random.normal(keys[4], (len(networks), leaves, 2)))
    return {
        "x": task.x,
        "y": task.y,
        "activity": activity,
        "rsm": activity @ activity.swapaxes(1, 2),
        "mds": mds,
    }
