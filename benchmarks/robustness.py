"""Compare the 40-scale input-noise sweep with common noise with evaluations of the whole network at every scale.

    python benchmarks/robustness.py [--seeds 2] [--samples 10000] [--repeats 3]
        [--only ours|jitted|unjitted]

Three ways to the same curves of stacked 784-1024-1024-10 networks:
  ours      `input_noise_error`: the first layer, linear in the scale, applied twice instead of
            40 times; jitted, members and scales sequentially.
  jitted    the network on `images + scale * noise`, scales mapped in batches of 16, members
            vmapped, jitted.
  unjitted  the same call without jit, as in the published notebook; compile times count, ours
            too.
Each way runs in a separate process, for its peak memory.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from timing import add_row

from dissociation import bmap, use_all_cores
from dissociation.measures import error_rate, input_noise_error
from dissociation.recipes import fresh_networks

SCALES = np.logspace(-1, 1, 40, dtype=np.float32)


def ours(models, images, labels, noise):
    def one(model, images, labels, noise):
        return input_noise_error(model, images, labels, SCALES, noise=noise)

    return bmap(one, in_axes=(eqx.if_array(0), None, None, None), batch_size=1)(
        models, images, labels, noise
    )


def plain(models, images, labels, noise):
    def at(model, scale, images, labels, noise):
        return error_rate(jax.vmap(model)(images + scale * noise), labels)

    def one(model, images, labels, noise):
        scales = bmap(at, in_axes=(None, 0, None, None, None), batch_size=16)
        return scales(model, jnp.asarray(SCALES), images, labels, noise)

    return eqx.filter_vmap(one, in_axes=(eqx.if_array(0), None, None, None))(
        models, images, labels, noise
    )


def run(way, options):
    use_all_cores()
    models = fresh_networks(options.seeds, key=jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 3)
    images = jax.random.uniform(keys[0], (options.samples, 784))
    labels = jax.nn.one_hot(jax.random.randint(keys[1], (options.samples,), 0, 10), 10)
    noise = jax.random.normal(keys[2], images.shape)
    call = {"ours": ours, "jitted": eqx.filter_jit(plain), "unjitted": plain}[way]
    seconds = []
    for _ in range(1 + (0 if way == "unjitted" else options.repeats)):
        began = time.perf_counter()
        errors = jax.block_until_ready(call(models, images, labels, noise))
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"first": seconds[0], "run": float(np.median(seconds[1:] or seconds)), "peak GiB": peak,
            "check": float(np.asarray(errors).mean())}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=["ours", "jitted", "unjitted"])
    parser.add_argument("--child", choices=["ours", "jitted", "unjitted"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run(options.child, options)))
        return
    sizes = [f"--{name}={getattr(options, name)}" for name in ("seeds", "samples", "repeats")]
    found = {}
    for way in options.only:
        command = [sys.executable, __file__, f"--child={way}", *sizes]
        child = subprocess.run(command, capture_output=True, text=True)
        if child.returncode:
            print(
                f"{way:10s} failed (exit status {child.returncode}): "
                f"{child.stderr.strip().splitlines()[-1:]}"
            )
            continue
        found[way] = json.loads(child.stdout.splitlines()[-1])
        print(way.ljust(10), "  ".join(f"{name} {value:.4g}" for name, value in found[way].items()))
    if {"ours", "jitted", "unjitted"} <= found.keys():
        ours = found["ours"]
        work = (
            f"input noise at 40 scales, {options.samples} images, {options.seeds} networks "
            "784-1024-1024-10"
        )
        add_row(
            work, [ours["run"]], {"whole network at every scale, jitted": [found["jitted"]["run"]]}
        )
        note = "both times include compilation"
        peers = {"published call, without jit": [found["unjitted"]["first"]]}
        add_row(f"{work}, first call", [ours["first"]], peers, note=note)
    if {"ours", "jitted"} <= found.keys():
        print(
            "jitted / ours, run time:              "
            f"{found['jitted']['run'] / found['ours']['run']:.2f}"
        )
    if {"ours", "unjitted"} <= found.keys():
        print(
            "unjitted / ours, compile time counted: "
            f"{found['unjitted']['first'] / found['ours']['first']:.2f}"
        )


if __name__ == "__main__":
    main()
