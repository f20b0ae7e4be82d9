"""Compare linear CKA, shapes and RSA of all pairs of representations with NumPy and rsatoolbox, on the same arrays.

    python benchmarks/similarity.py                    # 64 members of 1000 x 512
    python benchmarks/similarity.py --members 16 --layers 1 --repeats 3

Features are 20 causes, mixed by a random map per member, and noise. The peers' numbers are compared
with ours. Loops over pairs that would take minutes are timed on some of the pairs and scaled up, as
the output says.
"""

import argparse
from functools import partial

import numpy as np
from rsatoolbox.data import Dataset
from rsatoolbox.rdm import calc_rdm, compare
from timing import add_row, in_turn, ratio, timed

from dissociation import similarity


def features(members, samples, width, seed):
    """Return features [members, samples, width] in float32."""
    rng = np.random.default_rng(seed)
    causes = rng.standard_normal((samples, 20))
    mixed = [causes @ rng.standard_normal((20, width)) + 3 * rng.standard_normal((samples, width))
             for _ in range(members)]  # fmt: skip
    return np.stack(mixed).astype(np.float32)


def centred(stack):
    return stack - stack.mean(1, keepdims=True)


def by_grams(stack):
    """Return linear CKA of all pairs, by one Gram matrix per member and one product of all."""
    grams = np.stack([x @ x.T for x in centred(stack)]).reshape(len(stack), -1)
    grams /= np.linalg.norm(grams, axis=1, keepdims=True)
    return grams @ grams.T


def cka(x, y):
    """Return linear CKA of one pair, from the features."""
    x, y = x - x.mean(0), y - y.mean(0)
    return np.sum((x.T @ y) ** 2) / np.linalg.norm(x.T @ x) / np.linalg.norm(y.T @ y)


def angular(x, y):
    """Return angular similarity of one pair."""
    x, y = x - x.mean(0), y - y.mean(0)
    return np.linalg.svd(x.T @ y, compute_uv=False).sum() / np.linalg.norm(x) / np.linalg.norm(y)


def pairs_of(count):
    return [(i, j) for i in range(count) for j in range(i)]


def looped(function, stack, pairs):
    return [function(stack[i], stack[j]) for i, j in pairs]


def report(work, ours, first, peers, note=""):
    for name, times in peers.items():
        found = ratio(ours, times)
        print(f"{work}: ours {np.median(ours):.3g} s (first call {first:.3g}), {name} "
              f"{np.median(times):.3g} s, "
              f"ratio {found[1]:.2f} ({found[0]:.2f} to {found[2]:.2f}) {note}")  # fmt: skip
    add_row(work, ours, peers, first=first, note=note)


def linear(options):
    stack = features(options.members, options.samples, options.width, 0)

    def ours():
        return np.asarray(
            similarity.pairwise(stack, "linear_cka", members=True, baseline=False).values
        )

    first = timed(ours)
    np.testing.assert_allclose(ours(), by_grams(stack), atol=1e-5)
    seconds = in_turn(
        {"ours": ours, "NumPy, one Gram matrix each": lambda: by_grams(stack)}, options.repeats
    )
    pairs = pairs_of(options.members)[:10]
    scale = options.members * (options.members - 1) / 2 / len(pairs)
    loop = [scale * timed(partial(looped, cka, stack, pairs)) for _ in range(options.repeats)]
    own = seconds.pop("ours")
    work = (
        f"linear CKA of all pairs of {options.members} representations, {options.samples} x "
        f"{options.width}"
    )
    report(work, own, first, {**seconds, "NumPy, loop over pairs (10 timed, scaled up)": loop})


def inference(options):
    stack = features(20 * options.layers, options.samples, 64, 1)
    layers = {f"layer {index}": part for index, part in enumerate(np.split(stack, options.layers))}

    def ours():
        return similarity.pairwise(
            layers, "angular_similarity", members=True, num_blocks=20, baseline=False
        )

    first = timed(ours)
    np.testing.assert_allclose(ours().values[1, 0], angular(stack[1], stack[0]), atol=1e-5)
    own = [timed(ours) for _ in range(options.repeats)]
    pairs = pairs_of(len(stack))
    part = pairs[:: max(1, len(pairs) // 100)]
    scale = 21 * len(pairs) / len(part)
    peer = [scale * timed(partial(looped, angular, stack, part)) for _ in range(options.repeats)]
    work = (
        f"angular shape of all pairs of {len(stack)} representations, {options.samples} x 64, "
        "with 20-block intervals"
    )
    report(work, own, first, {f"NumPy, loop over pairs ({len(part)} timed, scaled up)": peer})


def rsa(options):
    stack = features(20, options.samples, 64, 2)
    data = [Dataset(x) for x in stack]

    def peer():
        found = [calc_rdm(one, method="euclidean") for one in data]
        return np.block([[compare(one, other, method="corr") for other in found] for one in found])

    def ours():
        return np.asarray(
            similarity.pairwise(stack, "rsa", members=True, baseline=False, rdm="squared").values
        )

    first = timed(ours)
    np.testing.assert_allclose(ours(), peer(), atol=1e-4)
    seconds = in_turn({"ours": ours, "rsatoolbox": peer}, options.repeats)
    own = seconds.pop("ours")
    work = f"RSA, squared distances, of all pairs of 20 representations, {options.samples} x 64"
    report(work, own, first, seconds)


def stream(options):
    rng = np.random.default_rng(3)
    batches = [tuple(rng.standard_normal((2, 10_000, 256), np.float32)) for _ in range(4)]
    total = max(4, options.stream // 10_000)

    def ours():
        moments = similarity.stream_moments(batches[index % 4] for index in range(total))
        return float(similarity.similarity_from_moments(moments, "linear_cka")[0, 1])

    def peer():
        shift = [part[0] for part in batches[0]]
        number, sums, squares = 0, np.zeros(512), np.zeros((512, 512))
        for index in range(total):
            both = np.concatenate(
                [part - own for part, own in zip(batches[index % 4], shift, strict=True)], 1
            )
            number += len(both)
            sums += both.sum(0)
            squares += both.T @ both
        moments = squares - np.outer(sums, sums) / number
        x, y, cross = moments[:256, :256], moments[256:, 256:], moments[:256, 256:]
        return np.sum(cross**2) / np.linalg.norm(x) / np.linalg.norm(y)

    first = timed(ours)
    np.testing.assert_allclose(ours(), peer(), atol=1e-6)
    seconds = in_turn(
        {"ours": ours, "NumPy, sums of products, only for linear CKA": peer}, options.repeats
    )
    own = seconds.pop("ours")
    note = "ours also serves debiased CKA"
    report(
        f"moments of {total * 10_000} samples, 256 against 256 features", own, first, seconds, note
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--stream", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    for part in (linear, inference, rsa, stream):
        part(options)


if __name__ == "__main__":
    main()
