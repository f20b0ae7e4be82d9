"""Compare peak memory and time of `bmap`, `equinox.filter_vmap` and `jax.lax.map`.

All map a perceptron on noisy images over noise scales. Every variant runs in a separate process,
because the peak memory of a process does not fall. Columns: seconds to compile, median milliseconds
of the repeats, rise of the peak memory while compiling (from the start, with data) and then while
running, and the compiler's memory of the program.

    python benchmarks/bmap.py [--images 2000] [--width 512] [--scales 40] [--batch 4] [--repeats 5]
"""

import argparse
import json
import logging
import resource
import statistics
import subprocess
import sys
import time
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp

from dissociation import bmap

VARIANTS = ("filter_vmap", "lax.map", "bmap", "lax.map one", "bmap one", "bmap auto")


def error(model, scale, images, noise):
    """Return the mean of the largest logits of noisy images."""
    return jnp.mean(jnp.max(jax.vmap(model)(images + scale * noise), axis=-1))


def mapped(variant, batch):
    """Return a function of (model, scales, images, noise)."""
    axes = (None, 0, None, None)
    if variant == "filter_vmap":
        return eqx.filter_vmap(error, in_axes=axes)
    size = 1 if variant.endswith("one") else batch
    if variant.startswith("bmap"):
        return bmap(error, in_axes=axes, batch_size=size)
    batched = None if size == 1 else size
    return lambda m, scales, x, n: jax.lax.map(
        lambda s: error(m, s, x, n), scales, batch_size=batched
    )


def peak():
    """Return the peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def chosen_batch(arguments, budget):
    """Return the batch size of "auto" under `budget`, and the seconds of the whole call."""
    records = []
    logger = logging.getLogger("dissociation.training")
    logger.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    start = time.perf_counter()
    auto = partial(bmap, batch_size="auto", memory_budget=budget)
    jax.block_until_ready(auto(error, in_axes=(None, 0, None, None))(*arguments))
    return records[0].args[0], time.perf_counter() - start


def measure(variant, options):
    """Measure one variant in this process."""
    width, keys = options.width, jax.random.split(jax.random.key(0), 3)
    model = eqx.nn.MLP(784, 10, width, 2, key=keys[0])
    images, noise = (jax.random.uniform(k, (options.images, 784)) for k in keys[1:])
    scales = jnp.logspace(-1, 1, options.scales)
    arguments = jax.block_until_ready((model, scales, images, noise))
    start_peak, batch, note = peak(), options.batch, ""
    if variant == "bmap auto":
        batch, seconds = chosen_batch(arguments, options.budget * 2**20)
        note = f"chose {batch} for {options.budget} MiB; search and run {seconds:.1f} s"
    arrays, static = eqx.partition(arguments, eqx.is_array)
    function = mapped(variant, batch)
    start = time.perf_counter()
    compiled = jax.jit(lambda a: function(*eqx.combine(a, static))).lower(arrays).compile()
    compiling = time.perf_counter() - start
    compiled_peak = peak()
    result = jax.block_until_ready(compiled(arrays))
    times = []
    for _ in range(options.repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(arrays))
        times.append(time.perf_counter() - start)
    usage = compiled.memory_analysis()
    return {
        "compile_s": compiling,
        "run_ms": 1e3 * statistics.median(times),
        "compile_mib": (compiled_peak - start_peak) / 2**20,
        "run_mib": (peak() - compiled_peak) / 2**20,
        "compiler_mib": (usage.temp_size_in_bytes + usage.output_size_in_bytes) / 2**20,
        "check": float(result.sum()),
        "note": note,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"images": 2000, "width": 512, "scales": 40, "batch": 4, "repeats": 5, "budget": 128}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--variant", choices=VARIANTS, help="run only this one, in this process, and print JSON"
    )
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measure(options.variant, options)))
        return
    print(
        f"{options.scales} scales, {options.images} images, "
        f"784-{options.width}-{options.width}-10, ",
        end="",
    )
    print(f"batches of {options.batch}, {jax.default_backend()}, jax {jax.__version__}")
    titles = ("compile s", "run ms", "compile MiB", "run MiB", "compiler MiB", "check")
    print(f"{'variant':<12}", *(f"{title:>12}" for title in titles))
    for variant in VARIANTS:
        command = [sys.executable, __file__, "--variant", variant]
        command += [word for name in sizes for word in (f"--{name}", str(getattr(options, name)))]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        note = row.pop("note")
        print(f"{variant:<12}", *(f"{number:>12.2f}" for number in row.values()), note)


if __name__ == "__main__":
    main()
