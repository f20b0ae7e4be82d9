"""Time work alternately with its peers, and make rows for the table of `all.py`."""

import json
import multiprocessing
import os
import time
from functools import partial

import numpy as np

ROWS = "BENCHMARK_ROWS"
"""The environment variable that names the file to which rows are added, a line of JSON each."""


def timed(function):
    """Return the seconds of a call, including the wait for its result."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def in_turn(functions, repeats):
    """Return the seconds of every call. A round calls each function once, so that drifts of the machine affect all."""
    seconds = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            seconds[name].append(timed(function))
    return seconds


def ratio(ours, theirs):
    """Return lower quartile, median and upper quartile of the peer's time over ours, round by round."""
    return tuple(np.quantile(np.divide(theirs, ours), (0.25, 0.5, 0.75)).tolist())


def add_row(work, ours, peers, *, first=None, note=""):
    """Add a row to the table, if there is one.

    Args:
        work: Description of the work, with sizes.
        ours: Our seconds of every round.
        peers: Seconds of every round by peer.
        first: Seconds of our first call, with compiling.
        note: Explanation of the ratio.
    """
    if ROWS not in os.environ:
        return
    found = {
        name: {"seconds": float(np.median(times)), "ratio": ratio(ours, times)}
        for name, times in peers.items()
    }
    row = {
        "work": work,
        "ours": float(np.median(ours)),
        "first": first,
        "peers": found,
        "note": note,
    }
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
    """Return PyTorch's seconds for `run` of every entry of `arguments`, in one process of one thread per entry.

    Starts of processes and `warm` are left out. `run` and `warm` are functions of a script's top
    level.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(arguments) + 1)
    children = [
        context.Process(target=_one_process, args=(barrier, warm, run, each)) for each in arguments
    ]
    for child in children:
        child.start()
    barrier.wait(300)
    seconds = timed(partial(barrier.wait, 3000))
    for child in children:
        child.join()
    return seconds


def shares(number):
    """Return the number of members on each core."""
    cores = min(os.cpu_count() or 1, number)
    return [number // cores + (core < number % cores) for core in range(cores)]
