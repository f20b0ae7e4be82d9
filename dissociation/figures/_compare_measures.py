"""Tables of one measure between the layers of two files, in memory or in batches."""

import logging
import time
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array

from dissociation._core.checks import fail
from dissociation._core.splits import fold_numbers
from dissociation.figures._cache import Arrays, Cache
from dissociation.figures._compare_files import Network, groups_of
from dissociation.similarity import _block_sums as block_sums
from dissociation.similarity import _inference as inference
from dissociation.similarity import _pairs as pairs
from dissociation.similarity._base import of_sizes
from dissociation.similarity._measures import MEASURES

logger = logging.getLogger(__name__)

STREAMED = ("debiased_cka", "linear_cka")
"""Measures of layers that are read in batches."""

ORDERS_PER_PART = 25
"""Number of orders of samples after which a run resumes."""

TABLES = ("values", "estimate", "low", "high", "baseline", "p_values", "corrected")
"""Names of the tables [layers, other_layers]."""

FEW_PRODUCTS = 10**10
"""Number of multiplications of a comparison that takes about a second."""

SMALL_SUMS = 2**30
"""Bytes of sums of products that any memory budget allows."""

LEVEL = 0.9
"""Coverage of intervals."""


def compare_in_memory(config: Any, key: Array, networks: list[Network], cache: Cache) -> Arrays:
    """Return the tables of all pairs, computed at once, by the steps that `cache` holds."""
    first, second = networks
    is_grid = any(layer.ndim > 2 for layer in first.features.values())
    positions = "samples" if is_grid else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large biases: the figure shows estimates
        comparison = pairs.planned(
            first.features,
            config.measure,
            second.features,
            baseline=True,
            p_values=True,
            num_orders=config.num_orders,
            key=key,
            num_blocks=num_blocks_of(config, networks),
            blocks="shuffled",
            groups=groups_of(first),
            level=LEVEL,
            positions=positions,
            channels="last",
            members=False,
            options={},
        )
        steps: dict[str, list[Any]] = {"all": [("all", None)]}
        orders = comparison.null.orders
        if orders is not None:
            for start in range(0, len(orders), ORDERS_PER_PART):
                part = orders[start : start + ORDERS_PER_PART]
                steps[f"orders_{start}"] = [("orders", part)]
        if comparison.subsets:
            steps["blocks"] = [("blocks", rows) for rows in comparison.subsets]
        jobs = {name: partial(_step_tables, comparison, step) for name, step in steps.items()}
        arrays = cache.get_all(jobs, f"{config.measure}, {estimated(comparison)}")

        step_tables = list(arrays["all"].values())
        draws = [arrays[name]["0"] for name in steps if name.startswith("orders")]
        if draws:
            step_tables.append(np.concatenate(draws))
        step_tables += arrays.get("blocks", {}).values()
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


def num_blocks_of(config: Any, networks: list[Network]) -> int | None:
    """Return the number of blocks of samples, None for samples that are too few for intervals."""
    number = min(len(networks[0].rows), config.num_blocks)
    smallest = len(networks[0].rows) - -(-len(networks[0].rows) // number)
    form = MEASURES[config.measure].with_options()
    if number < 2 or smallest < form.minimum:
        return None
    return number


def estimated(comparison: pairs.Comparison) -> str:
    """Return an estimate of time and memory, from the time of one pair."""
    form = comparison.form
    arrays = comparison.first.arrays + comparison.second.arrays
    x = max(arrays, key=lambda array: array.shape[2])[0]
    num_rows = len(comparison.first.labels)
    num_columns = len(comparison.second.labels)
    sizes = {"items": num_rows + num_columns, "pairs": num_rows * num_columns}
    num_bytes = 3 * sum(array.nbytes for array in arrays)
    num_evaluations = 1
    for task, choices in comparison.steps()[1:]:
        if task == "orders" or form.leave_outs is None:
            num_evaluations += len(choices)
    num_products = num_evaluations * sum(sizes.values()) * x.size * min(x.shape)
    if num_products < FEW_PRODUCTS:
        return announced(1, num_bytes)

    labels = form.labels_of(len(x))
    sized = of_sizes(form, len(x), x.shape[1], x.shape[1], **sizes)
    prepare_seconds, prepared = _timed(sized.prepared, x, labels)
    compare_seconds, _ = _timed(sized.compare, prepared, prepared)

    seconds = num_evaluations * prepare_seconds * sizes["items"]
    seconds += num_evaluations * compare_seconds * sizes["pairs"]
    if form.leave_outs is not None and comparison.subsets:
        seconds *= 2
    num_bytes += sizes["items"] * sum(leaf.nbytes for leaf in jax.tree.leaves(prepared))
    return announced(seconds, num_bytes)


def _timed(function: Any, *arguments: Any) -> tuple[float, Any]:
    """Return the seconds of a second call, and its result."""
    compiled = eqx.filter_jit(function)
    jax.block_until_ready(compiled(*arguments))
    began = time.perf_counter()
    result = jax.block_until_ready(compiled(*arguments))
    return time.perf_counter() - began, result


def announced(seconds: float | int, num_bytes: int) -> str:
    """Return an estimate in words, and write it to the log."""
    duration = f"{max(seconds, 1):.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
    estimate = f"about {duration} and {num_bytes / 2**20:.0f} MiB"
    logger.info("estimate: %s", estimate)
    return estimate


def check_streamed(config: Any, networks: list[Network], budget: int, needed: int) -> None:
    """Raise unless the measure of layers that exceed the budget can be computed in batches."""
    has_groups = groups_of(networks[0]) is not None
    number = len(networks[0].rows)
    suggestion = max(20, int(number * budget / needed * 0.9))
    if config.measure in STREAMED and not has_groups:
        num_bytes = _sum_bytes(config.num_blocks, networks)
        if num_bytes > max(budget, SMALL_SUMS):
            fail(
                "memory_budget",
                f"hold the {num_bytes} bytes of sums of products of the widest layer",
                budget,
                f"Pass --max-samples {suggestion}, or --positions mean for layers of positions",
            )
        return
    requirement = f"be {' or '.join(STREAMED)}, without a mask of positions that are samples"
    received = f"{config.measure} of layers that take {needed} bytes of {budget} (memory_budget)"
    fail("measure", requirement, received, f"Or pass --max-samples {suggestion}")


def _sum_bytes(num_blocks: int, networks: list[Network]) -> int:
    """Return the bytes of the sums of one pair of the widest layers."""
    widths = [network.width(layer) for network in networks for layer in network.layers.values()]
    return 8 * (num_blocks + 4) * (max(widths) + 2) ** 2


def compare_in_batches(config: Any, networks: list[Network], cache: Cache) -> Arrays:
    """Return the tables of all pairs without p-values, a layer of A against all of B at a time."""
    first, second = networks
    number = len(first.rows)
    num_blocks = max(2, min(config.num_blocks, number))
    block_of_sample = fold_numbers(number, num_blocks)
    measure = MEASURES[config.measure]
    compute = partial(_sums_of_pair, config, networks, block_of_sample, num_blocks)

    began = time.perf_counter()
    jobs = {}
    for name, network in (("first", first), ("second", second)):
        for index, layer in enumerate(network.layers):
            jobs[f"{name}_{index}"] = partial(compute, (network, layer), None)
    title = f"{config.measure}, in batches"
    first_name = "first_0"
    squares = cache.get_all({first_name: jobs.pop(first_name)}, title)
    seconds = cache.seconds[first_name]
    num_bytes = _sum_bytes(num_blocks, networks) + 2**28
    num_pairs = len(first.layers) * len(second.layers)
    estimate = announced(seconds * (len(jobs) + 1.5 * num_pairs), num_bytes)
    title = f"{title}, {estimate}"
    squares |= cache.get_all(jobs, title)

    row_jobs = {}
    for index, layer in enumerate(first.layers):
        row_jobs[f"row_{index}"] = partial(_row, compute, networks, layer)
    rows = cache.get_all(row_jobs, title)
    is_debiased = config.measure == "debiased_cka"
    fractions = np.bincount(block_of_sample, minlength=num_blocks) / number
    quantile = inference.students_quantile(LEVEL, num_blocks)
    shape = (len(first.layers), len(second.layers))
    tables = {name: np.full(shape, np.nan) for name in TABLES}
    for row, column in np.ndindex(shape):
        crossed = block_sums.Products(*rows[f"row_{row}"][str(column)])
        of_first = block_sums.Products(*squares[f"first_{row}"]["0"])
        of_second = block_sums.Products(*squares[f"second_{column}"]["0"])
        ratio = block_sums.cka(crossed, of_first, of_second, is_debiased=is_debiased)
        values = ratio.hsic
        interval = inference.interval(
            values[0], values[1:], quantile, measure.range, True, np, fractions
        )
        numbers = (values[0], interval.estimate, interval.low, interval.high, ratio.chance[0])
        for name, entry in zip(TABLES, numbers, strict=False):
            tables[name][row, column] = entry
    logger.info("compared in %.0f s", time.perf_counter() - began)
    return tables


def _row(compute: Any, networks: list[Network], layer: str) -> Arrays:
    """Return the inner products of one layer of A with all layers of B, by number."""
    first, second = networks
    arrays = {}
    for index, other in enumerate(second.layers):
        arrays[str(index)] = compute((first, layer), (second, other))["0"]
    return arrays


def _sums_of_pair(
    config: Any,
    networks: list[Network],
    block_of_sample: np.ndarray,
    num_blocks: int,
    first: tuple[Network, str],
    second: tuple[Network, str] | None,
) -> Arrays:
    """Return the inner products of two layers, or of one layer with itself, as an array."""
    batches = _paired(first, second)
    num_positions = 1
    network, layer = first
    stored = network.layers[layer]
    if network.positions == "samples" and network.has_positions(stored):
        num_positions = int(np.prod(network.grid(stored)))
    blocks = np.repeat(block_of_sample, num_positions)
    sums = block_sums.stream_block_sums(batches, blocks, num_blocks)
    products = block_sums.products(sums, is_debiased=config.measure == "debiased_cka")
    return {"0": np.stack(products)}


def _paired(
    first: tuple[Network, str], second: tuple[Network, str] | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the features of the same samples of two layers, or of one layer twice."""
    streams = []
    num_rows = min(_num_rows(*side) for side in (first, second or first))
    for network, layer in filter(None, (first, second)):
        streams.append(network.batches(network.layers[layer], num_rows, flat=True))
    for block in zip(*streams, strict=True):
        yield block[0], block[-1]


def _num_rows(network: Network, layer: str) -> int:
    """Return the number of samples of a batch."""
    stored = network.layers[layer]
    num_features = int(np.prod(stored.shape[1:]))
    return max(1, 2**23 // num_features)
