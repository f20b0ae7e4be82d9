"""Similarity of two solutions of one family."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, Float

from dissociation._core.checks import check_choice, check_count, fail
from dissociation._core.results import printed
from dissociation._core.types import PRNGKey, PRNGKeys, Scalar
from dissociation._core.validation import validated
from dissociation.linear._families import Family
from dissociation.linear._tasks import Task
from dissociation.similarity._measures import MEASURES
from dissociation.training._bmap import bmap


class Plurality(NamedTuple):
    """Measures between hidden activities of independent pairs of solutions; see `plurality`.

    Attributes:
        values: Values by measure, [pairs].
        refused: Reasons by measure why it does not take the activities.
    """

    values: dict[str, Float[Array, " pairs"]]
    refused: dict[str, str]

    __repr__ = printed


@validated
def plurality(
    task: Task,
    family: Family,
    hidden: int,
    *,
    other: Task | None = None,
    measures: Sequence[str] = tuple(MEASURES),
    num_pairs: int = 100,
    spread: Scalar = 1.0,
    key: PRNGKey,
) -> Plurality:
    """Return similarity measures between pairs of random solutions of a task, or of two tasks.

    `rewrites.linear_cka_range(task.x, activity)` is the attainable range of linear CKA with one
    activity, over all GLS and LSS with at least as many hidden units as the inputs' rank.

    Args:
        task: Task.
        family: One of `FAMILIES`.
        hidden: Hidden units.
        other: Task of the second solution, with as many samples.
        measures: Names in `similarity.MEASURES`.
        num_pairs: Pairs.
        spread: As in `Family.sample`.
        key: Random key.
    """
    second = task if other is None else other
    if len(second.x) != len(task.x):
        fail("other", f"have as many samples as `task` ({len(task.x)})", len(second.x))
    for name in measures:
        check_choice("measures", name, MEASURES)
    keys = jax.random.split(key, 2 * check_count("num_pairs", num_pairs, minimum=1))

    def activities(task: Task, keys: PRNGKeys) -> Array:
        sample = partial(family.sample, task, hidden, spread=spread)
        return jax.vmap(lambda k: sample(key=k).hidden(task.x))(keys)

    pairs = activities(task, keys[::2]), activities(second, keys[1::2])
    values = {}
    refused = {}
    for name in measures:
        measure = MEASURES[name]
        if measure.repeats > 1:
            refused[name] = f"compares {measure.repeats} repeats of every sample"
            continue
        try:
            values[name] = eqx.filter_jit(bmap(measure.function))(*pairs)
        except ValueError as error:
            refused[name] = str(error)
    return Plurality(values, refused)
