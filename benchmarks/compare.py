"""Compare all layers of two files by `python -m dissociation compare`, beside NumPy.

    python benchmarks/compare.py [--layers 12] [--samples 2000] [--stream 50000] [--repeats 3]

The command runs in a process of its own, and its time holds imports, compiling, the figure and all
files. NumPy reads the same files, computes the matrix over samples of each layer once, and from it
debiased CKA of all pairs, also without each of 20 blocks of samples; it has no p-values. The second
row reads files that exceed the memory budget, in batches.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
from timing import add_row, in_turn

NUM_BLOCKS = 20
WIDTH = 768


def write_layers(path, num_layers, num_samples, seed):
    """Write random layers that share 64 hidden factors."""
    hidden = np.random.default_rng(0).normal(size=(num_samples, 64)).astype(np.float32)
    rng = np.random.default_rng(seed)
    layers = {}
    for index in range(num_layers):
        weights = rng.normal(size=(64, WIDTH)).astype(np.float32)
        noise = rng.standard_normal((num_samples, WIDTH), np.float32)
        layers[f"layers.{index}"] = np.tanh(0.1 * hidden @ weights) + 0.5 * noise
    np.savez(path, **layers)


def run_command(folder, options):
    """Run the command on both files, and return its largest memory in MiB."""
    out = tempfile.mkdtemp(dir=folder)
    words = [sys.executable, "-m", "dissociation", "compare", "a.npz", "b.npz", "--silent"]
    command = [*words, "--out", out, *options]
    peak = 0
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as process:
        # The kernel's account of children holds the memory of this process as well.
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            memory = re.search(r"VmHWM:\s+(\d+)", status.read_text())
            if memory:
                peak = max(peak, int(memory[1]))
            time.sleep(0.1)
    if process.returncode:
        raise RuntimeError(f"the command ended with status {process.returncode}")
    return peak / 2**10


def centred(gram):
    """Return U-centred matrices over samples, [layers, n n]."""
    number = gram.shape[1]
    rows = gram.sum(2) / (number - 2)
    shift = rows - 0.5 * rows.sum(1, keepdims=True) / (number - 1)
    gram -= shift[:, :, None]
    gram -= shift[:, None]
    diagonal = np.arange(number)
    gram[:, diagonal, diagonal] = 0
    return gram.reshape(len(gram), -1)


def debiased(gram, num_rows):
    """Return debiased CKA of the first `num_rows` layers with the others."""
    flat = centred(gram)
    norms = np.sqrt(np.einsum("ln,ln->l", flat, flat))
    table = flat[:num_rows] @ flat[num_rows:].T
    return table / np.outer(norms[:num_rows], norms[num_rows:])


def by_numpy(folder):
    """Return debiased CKA of all pairs, and the same without each block of samples."""
    layers = []
    for name in ("a", "b"):
        with np.load(folder / f"{name}.npz") as file:
            layers += [file[layer] for layer in file]
    num_rows = len(layers) // 2
    number = len(layers[0])
    gram = np.empty((len(layers), number, number), np.float32)
    diagonal = np.arange(number)
    for matrix, layer in zip(gram, layers, strict=True):
        x = layer - layer.mean(0)
        np.matmul(x, x.T, out=matrix)
        matrix[diagonal, diagonal] = 0
    tables = []
    for block in np.array_split(np.random.default_rng(0).permutation(number), NUM_BLOCKS):
        rows = np.setdiff1d(diagonal, block)
        tables.append(debiased(gram[:, rows][:, :, rows], num_rows))
    return debiased(gram, num_rows), np.stack(tables)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--stream", type=int, default=50_000, help="0 leaves the batches out")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    size = f"{options.layers} x {options.layers} layers"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed, letter in enumerate("ab"):
            write_layers(folder / f"{letter}.npz", options.layers, options.samples, seed)
        ours = partial(run_command, folder, [])
        rounds = {"ours": ours, "NumPy": partial(by_numpy, folder)}
        seconds = in_turn(rounds, options.repeats)
        memory = ours()
        print(f"{size} of {options.samples} x {WIDTH}: {seconds}, {memory:.0f} MiB")
        work = f"`compare A B`, {size} of {options.samples} x {WIDTH}: debiased CKA, intervals"
        note = f"ours: a process with imports, compiling, p-values and files, {memory:.0f} MiB"
        add_row(work, seconds["ours"], {"NumPy": seconds["NumPy"]}, note=note)

    if options.stream:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for seed, letter in enumerate("ab"):
                write_layers(folder / f"{letter}.npz", options.layers, options.stream, seed)
            budget = ["--memory-budget", str(2**30)]
            began = time.perf_counter()
            memory = run_command(folder, budget)
            seconds = time.perf_counter() - began
            work = f"`compare A B`, {size} of {options.stream} x {WIDTH}, in batches"
            print(f"{work}: {seconds:.0f} s, {memory:.0f} MiB")
            add_row(work, [seconds], {}, note=f"{memory:.0f} MiB")


if __name__ == "__main__":
    main()
