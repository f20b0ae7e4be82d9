"""Tables of one measure between the layers of two files, in memory or in batches."""

import logging
import math
import time
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Array

from dissociation._core.array_files import StoredArray
from dissociation._core.checks import fail
from dissociation._core.splits import fold_numbers
from dissociation.figures import _compare_networks as files
from dissociation.figures._cache import Arrays, Cache
from dissociation.figures._compare_networks import Network
from dissociation.similarity import _block_sums as block_sums
from dissociation.similarity import _inference as inference
from dissociation.similarity import _pairs as pairs
from dissociation.similarity._measures import MEASURES

logger = logging.getLogger(__name__)

STREAMED = ("debiased_cka", "linear_cka")
"""Measures of layers that are read in batches."""

ORDERS_PER_PART = 25
"""Number of orders of samples after which a run resumes."""

TABLES = ("values", "estimate", "low", "high", "baseline", "p_values", "corrected")
"""Names of the tables [layers, other_layers]."""

SMALL_SUMS = 2**30
"""Bytes of sums of products that any memory budget allows."""

BATCH_NUMBERS = 2**23
"""Numbers of a batch of one layer."""

FEW_EVALUATIONS = 10
"""Number of evaluations whose time is estimated with that of compiling."""

LEVEL = 0.9
"""Coverage of intervals."""


def planned(config: Any, networks: list[Network]) -> pairs.Comparison:
    """Return the comparison of all layers, which are read and checked.

    Raises:
        WrongValue: If the measure cannot compare the layers.
    """
    first, second = networks
    number = len(first.rows)
    num_blocks: int | None = min(number, config.num_blocks)
    if number - -(-number // num_blocks) < MEASURES[config.measure].with_options().minimum:
        num_blocks = None
    groups = files.groups_of(first)
    positions = None
    if first.positions == "samples" and groups is None:
        positions = "samples"
    return pairs.planned(
        files.read_layers(first),
        config.measure,
        files.read_layers(second),
        names=(first.path, second.path),
        baseline=True,
        p_values=True,
        num_blocks=num_blocks,
        blocks="shuffled",
        groups=groups,
        level=LEVEL,
        positions=positions,
        channels="last",
        members=False,
        options={},
    )


def compare_in_memory(
    config: Any, key: Array, comparison: pairs.Comparison, num_bytes: int, cache: Cache
) -> Any:
    """Return the tables of all pairs, computed by the steps that `cache` holds."""
    comparison = comparison.with_orders(config.num_orders, key)
    steps: dict[str, list[Any]] = {}
    for task, choices in comparison.steps():
        if task == "orders":
            for start in range(0, len(choices), ORDERS_PER_PART):
                part = choices[start : start + ORDERS_PER_PART]
                steps[f"orders_{start}"] = [(task, part)]
        else:
            steps.setdefault(task, []).append((task, choices))
    jobs = {name: partial(_step_tables, comparison, step) for name, step in steps.items()}
    counts = {}
    for name, step in steps.items():
        counts[name] = sum(1 if choices is None else len(choices) for _, choices in step)
    if comparison.form.leave_outs is not None:
        counts["blocks"] = 2  # from the matrices of all samples
    arrays = _with_estimate(cache, jobs, counts, config.measure, num_bytes, has_programs=True)

    step_tables: dict[str, list[np.ndarray]] = {}
    for name, step_arrays in arrays.items():
        task = name.partition("_")[0]
        step_tables.setdefault(task, []).extend(step_arrays.values())
    similarities = pairs.concluded(comparison, step_tables)
    tables = {}
    for name in TABLES[:-1]:
        table = getattr(similarities, name)
        if table is not None:
            tables[name] = np.asarray(table)
    method = "holm" if similarities.family_p_values is None else "largest"
    tables["corrected"] = np.asarray(similarities.corrected(method))
    return tables


def _step_tables(comparison: pairs.Comparison, steps: list[Any]) -> Arrays:
    """Return the tables of steps, named by numbers."""
    return {str(index): table for index, table in enumerate(comparison.tables(steps))}


def _with_estimate(
    cache: Cache,
    jobs: Any,
    counts: dict[str, int],
    title: str,
    num_bytes: int,
    *,
    has_programs: bool,
) -> dict[str, Arrays]:
    """Return the arrays of jobs, with an estimate of the time from the first of them.

    `counts` are numbers of evaluations by job. If it `has_programs`, the first job takes time to
    compile, and is timed again.
    """
    title = f"{title}, about {num_bytes / 2**20:.0f} MiB"
    logger.info("estimate: %s", title)
    first = next(iter(jobs))
    compute = jobs.pop(first)
    arrays = cache.get_all({first: compute}, title)
    seconds = cache.seconds[first]
    num_left = sum(counts[name] for name in jobs)
    if has_programs and num_left > FEW_EVALUATIONS:
        began = time.perf_counter()
        compute()
        seconds = time.perf_counter() - began
    title = f"{title} and {1 + seconds * num_left:.0f} s"
    logger.info("estimate: %s", title)
    return arrays | cache.get_all(jobs, title)


def check_streamed(config: Any, networks: list[Network], budget: int, needed: int) -> None:
    """Raise unless the measure of layers that exceed the budget can be computed in batches."""
    advice = f"--max-samples {max(20, int(len(networks[0].rows) * budget / needed * 0.9))}"
    if config.measure not in STREAMED or files.groups_of(networks[0]) is not None:
        fail(
            "measure",
            f"be {' or '.join(STREAMED)}, without a mask of positions that are samples",
            f"{config.measure} of layers that take {needed} bytes of {budget} (memory_budget)",
            f"Or pass {advice}",
        )
    num_bytes = _sum_bytes(config, networks)
    if num_bytes > max(budget, SMALL_SUMS):
        fail(
            "memory_budget",
            f"hold the {num_bytes} bytes of sums of products of the widest layer",
            budget,
            f"Pass {advice}, or --positions mean for layers of positions",
        )


def _sum_bytes(config: Any, networks: list[Network]) -> int:
    """Return the bytes of the sums of one pair of the widest layers."""
    widths = [network.width(layer) for network in networks for layer in network.layers.values()]
    return 8 * (config.num_blocks + 4) * (max(widths) + 2) ** 2


def compare_in_batches(config: Any, networks: list[Network], cache: Cache) -> Any:
    """Return the tables of all pairs without p-values, a layer of A against all of B at a time."""
    number = len(networks[0].rows)
    num_blocks = min(config.num_blocks, number)
    block_of_sample = fold_numbers(number, num_blocks)
    compute = partial(_products, config, block_of_sample)
    sides = []
    jobs = {}
    for network in networks:
        side = [(network, layer) for layer in network.layers.values()]
        sides.append(side)
        for index, layer in enumerate(side):
            jobs[f"{network.name}_{index}"] = partial(compute, layer)
    shape = (len(sides[0]), len(sides[1]))
    for row, column in np.ndindex(shape):
        jobs[f"pair_{row}_{column}"] = partial(compute, sides[0][row], sides[1][column])
    num_bytes = _sum_bytes(config, networks) + 2**28
    counts = dict.fromkeys(jobs, 1)
    title = f"{config.measure}, in batches"
    arrays = _with_estimate(cache, jobs, counts, title, num_bytes, has_programs=False)

    is_debiased = config.measure == "debiased_cka"
    fractions = np.bincount(block_of_sample) / number
    quantile = inference.students_quantile(LEVEL, num_blocks)
    bounds = MEASURES[config.measure].range
    tables = {name: np.full(shape, np.nan) for name in TABLES}
    for row, column in np.ndindex(shape):
        products = [
            arrays[name]["0"] for name in (f"pair_{row}_{column}", f"a_{row}", f"b_{column}")
        ]
        values, chance = block_sums.cka(*products, is_debiased=is_debiased)
        interval = inference.interval(values[0], values[1:], quantile, bounds, True, np, fractions)
        numbers = (values[0], interval.estimate, interval.low, interval.high, chance)
        for name, entry in zip(TABLES, numbers, strict=False):
            tables[name][row, column] = entry
    return tables


def _products(
    config: Any, block_of_sample: np.ndarray, *layers: tuple[Network, StoredArray]
) -> Arrays:
    """Return the inner products of two layers, or of one layer with itself, as an array."""
    width = max(math.prod(layer.shape[1:]) for _, layer in layers)
    num_rows = max(1, BATCH_NUMBERS // width)
    streams = [network.batches(layer, num_rows, flat=True) for network, layer in layers]
    batches = ((blocks[0], blocks[-1]) for blocks in zip(*streams, strict=True))
    blocks = np.repeat(block_of_sample, files.num_positions_of(layers[0][0]))
    sums = block_sums.stream_block_sums(batches, blocks)
    return {"0": block_sums.products(sums, is_debiased=config.measure == "debiased_cka")}
