"""The largest batches of members whose compiled program fits in memory."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from dissociation import checks, memory

logger = logging.getLogger(__name__)

CORRECTIONS = 6
"""How often a guess of the largest batch is corrected at most."""


def run_largest(function_of: Callable[[int], Callable[..., Any]], arrays: Any, size: int, budget: int | None) -> Any:
    """`function_of(batch_size)(arrays)` with the largest batch size that fits; what was measured is what runs.

    Args:
        function_of: From members per batch to a function; its arrays become inputs of the compiled program.
        arrays: A PyTree of concrete arrays.
        size: How many members there are.
        budget: Bytes for temporaries and results; None: what `memory.free_memory` says is safe.

    Returns:
        The function's result.

    Raises:
        ValueError: Inside `jit`, `grad`, `vmap`, or if not even one member fits, or the backend measures nothing.
    """

    @functools.cache
    def compiled(batch_size: int) -> tuple[Any, int]:
        # As constants, arrays that a function closes over would be folded and copied.
        converted = eqx.filter_closure_convert(function_of(batch_size), arrays)
        _refuse_traced(converted)
        jitted: Any = eqx.filter_jit(_call)
        program = jitted.lower(converted, arrays).compile()
        return functools.partial(program, converted, arrays), needed_bytes(program.compiled)

    _refuse_traced(arrays)
    budget = memory.free_memory(jax.tree.leaves(arrays)) if budget is None else budget
    chosen = largest(lambda batch_size: compiled(batch_size)[1], size, budget)
    run, needed = compiled(chosen)
    logger.info("batches of %d of %d members: %d bytes of %d", chosen, size, needed, budget)
    return run()


def needed_bytes(program: Any) -> int:
    """`memory.program_bytes`, or an error where the backend gives no account."""
    needed = memory.program_bytes(program)
    if needed is None:
        checks.fail("batch_size", "be a number here", "'auto'", "This backend gives no memory analysis")
    return needed


def largest(bytes_of: Callable[[int], int], size: int, budget: int) -> int:
    """The largest batch of at most `size` members whose program needs at most `budget` bytes, in few calls.

    A single batch is tried first. If it is too large, batches of 2 and 4 give the slope (memory is linear in the batch
    from 2 on, not from 1), and the line gives a guess, which is tried and corrected. The answer is the largest where
    the line holds, and fits in any case.

    Args:
        bytes_of: What a program of this many members per batch needs.
        size: How many members there are.
        budget: Bytes.

    Returns:
        Members per batch.

    Raises:
        ValueError: If not even one member fits.
    """
    if bytes_of(size) <= budget:
        return size
    fits = next((batch for batch in (4, 2, 1) if batch < size and bytes_of(batch) <= budget), 0)
    if fits == 0:
        checks.fail("memory_budget", f"be at least {bytes_of(1)} bytes (one member at a time, all results)", budget)
    if fits < 4:
        return 3 if fits == 2 and size > 3 and bytes_of(3) <= budget else fits
    too_large, slope = size, (bytes_of(4) - bytes_of(2)) / 2
    for _ in range(CORRECTIONS):
        room = int((budget - bytes_of(fits)) / max(slope, 1.0))
        guess = min(fits + room, too_large - 1)
        if guess <= fits:
            break
        slope = (bytes_of(guess) - bytes_of(fits)) / (guess - fits)
        if bytes_of(guess) <= budget:
            fits = guess
        else:
            too_large = guess
    return fits


def _call(function: Callable[[Any], Any], arrays: Any) -> Any:
    return function(arrays)


def _refuse_traced(tree: Any) -> None:
    if any(checks.is_traced(leaf) for leaf in jax.tree.leaves(tree)):
        raise ValueError(
            "`batch_size` must be a number or None inside jit, grad, vmap and other transformations, got 'auto'. The "
            "program that runs is not known there; choose with 'auto' outside, on concrete arrays."
        )
