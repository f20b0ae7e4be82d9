"""Print how often the 90 % intervals of `compare` hold the truth, for every measure that has intervals.

    python benchmarks/coverage.py [--num-draws 200] [--only MEASURE ...]

x and y share four causes. The truth of a measure that converges is its estimate from 4000 samples,
the mean of five draws; of others (neighbours, sums over samples) it is the mean of their values
over the draws of this size, about which their intervals lie.
"""

import argparse
import warnings

import numpy as np

from dissociation import similarity

SIZES = ((60, 5), (200, 10), (1000, 20))
"""Samples, and features of either side."""
SKIPPED = ("disagreement", "jensen_shannon")
"""Measures of outputs, whose features are classes."""


def draw(seed, number, width):
    """Return two representations [number, width] that share four causes."""
    rng = np.random.default_rng(seed)
    mixing = np.random.default_rng(width).standard_normal((2, 4, width))
    causes = rng.standard_normal((number, 4))
    return (causes @ mixing + 0.7 * rng.standard_normal((2, number, width))).astype(np.float32)


def draw_twice(seed, number, width):
    """Return two representations [number, width], of two measurements of half as many conditions."""
    half = number // 2
    x, y = draw(seed, half, width)
    noise = np.random.default_rng(seed + 10**6).standard_normal((2, half, width)).astype(np.float32)
    return np.concatenate([x, x + noise[0]]), np.concatenate([y, y + noise[1]])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-draws", type=int, default=200)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    print(
        f"coverage of nominal 90 % by {options.num_draws} draws; fraction of draws with a "
        "warning of bias"
    )
    for name, measure in similarity.MEASURES.items():
        if name in SKIPPED or (options.only and name not in options.only):
            continue
        sample = draw_twice if measure.repeats == 2 else draw
        settings = {"measure": name, "p_values": False, "baseline": False, "progress": None}
        for number, width in SIZES:
            rows, warned = [], 0
            for seed in range(options.num_draws):
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    found = similarity.compare(*sample(seed, number, width), **settings)
                warned += any("bias" in str(one.message) for one in seen)
                rows.append([float(part) for part in (found.values, found.low, found.high)])
            values, low, high = np.array(rows).T
            truth = values.mean()
            if measure.population:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    large = [
                        similarity.compare(*sample(10**4 + k, 4000, width), **settings)
                        for k in range(5)
                    ]
                truth = np.mean([float(one.estimate) for one in large])
            held = np.mean((low <= truth) & (truth <= high))
            numbers = f"truth {truth:7.3f}  held {held:.2f}  warned {warned / len(rows):.2f}"
            print(f"{name:28s} n={number:5d} p={width:3d} {numbers}", flush=True)


if __name__ == "__main__":
    main()
