"""What the benchmarks share: work timed in turn with its peers, and rows for the table that `all.py` writes."""

import json
import multiprocessing
import os
import time
from functools import partial

import numpy as np

ROWS = "BENCHMARK_ROWS"
"""The environment variable that names the file to which rows are added, a line of JSON each."""


def timed(function):
    """Seconds of a call that waits for its result."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def in_turn(functions, repeats):
    """Seconds of every call: each function once in a round, so that a drift of the machine meets all."""
    seconds = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            seconds[name].append(timed(function))
    return seconds


def ratio(ours, theirs):
    """Lower quartile, median and upper quartile of the peer's time over ours, round by round."""
    return tuple(np.quantile(np.divide(theirs, ours), (0.25, 0.5, 0.75)).tolist())


def add_row(work, ours, peers, *, first=None, note=""):
    """Add a row to the table, if one is being made.

    Args:
        work: What was done, with its sizes.
        ours: Seconds of every round.
        peers: Seconds of every round by the name of the peer.
        first: Seconds of our first call, with compiling.
        note: Why it is as it is.
    """
    if ROWS not in os.environ:
        return
    found = {name: {"seconds": float(np.median(times)), "ratio": ratio(ours, times)} for name, times in peers.items()}
    row = {"work": work, "ours": float(np.median(ours)), "first": first, "peers": found, "note": note}
    with open(os.environ[ROWS], "a") as file:
        file.write(json.dumps(row) + "\n")


def _one_process(barrier, warm, run, arguments):
    import torch

    torch.set_num_threads(1)
    warm()
    barrier.wait()
    run(*arguments)
    barrier.wait()


def one_process_per_core(warm, run, arguments):
    """Seconds in which PyTorch does `run` of every entry of `arguments`, one process each on one thread.

    Starting the processes, and `warm`, are left out. Both are functions of a script's top level.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(arguments) + 1)
    children = [context.Process(target=_one_process, args=(barrier, warm, run, each)) for each in arguments]
    for child in children:
        child.start()
    barrier.wait(300)
    seconds = timed(partial(barrier.wait, 3000))
    for child in children:
        child.join()
    return seconds


def shares(number):
    """How many of so many members each core gets."""
    cores = min(os.cpu_count() or 1, number)
    return [number // cores + (core < number % cores) for core in range(cores)]
