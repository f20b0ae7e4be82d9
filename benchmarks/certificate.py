"""Compare certified distances of trained bilinear networks with attacks, on real images.

    python benchmarks/certificate.py [--data mnist] [--hidden 300] [--epochs 20] [--images 100]
        [--restarts 50]

For every image that the network classifies correctly, the certificate's example must have another
class at 1.001 times the distance, and projected gradient ascent must find none at 0.999 times. Its
success at 1.01 times shows its strength.
"""

import argparse
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from attack import projected_attack

from dissociation.bilinear import certified_radius, margins
from dissociation.data import load
from dissociation.recipes import train_bilinear


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=["glyphs", "mnist"], default="glyphs")
    parser.add_argument("--hidden", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--restarts", type=int, default=50)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    data = load(options.data)
    trained = train_bilinear(
        data, options.hidden, key=jax.random.key(0), num_seeds=1, num_epochs=options.epochs
    )
    model = jax.tree.map(lambda leaf: leaf[0], trained.models)
    images, labels = jnp.asarray(data.test_images), jnp.asarray(data.test_labels.argmax(1))
    right = np.flatnonzero(jax.vmap(model)(images).argmax(1) == labels)
    print(
        f"{data.name}, size {options.hidden}, {options.epochs} epochs: accuracy "
        f"{len(right) / len(images):.4f}"
    )
    chosen = right[: options.images]
    images, labels = images[chosen], labels[chosen]
    forms = margins(model)
    certify = eqx.filter_jit(
        lambda f, x, y: jax.lax.map(lambda pair: certified_radius(f, *pair), (x, y))
    )
    jax.block_until_ready(certify(forms, images, labels))
    began = time.perf_counter()
    found = jax.block_until_ready(certify(forms, images, labels))
    spent = time.perf_counter() - began
    print(
        f"{len(chosen)} images certified against 9 rivals in {spent:.2f} s; "
        f"median distance {np.median(found.radius):.3f}"
    )
    beyond = jax.vmap(model)(images + 1.001 * found.step).argmax(1) != labels
    print(f"found example beyond 1.001 r has another class: {int(beyond.sum())} of {len(chosen)}")
    keys = jax.random.split(jax.random.key(1), len(chosen))
    counts = {"num_restarts": options.restarts, "num_steps": options.steps}

    @eqx.filter_jit
    def attack(model, images, labels, radii, keys):
        one = lambda part: projected_attack(model, *part[:3], key=part[3], **counts)[1] < 0  # noqa: E731
        return jax.lax.map(one, (images, labels, radii, keys))

    for factor in (0.999, 1.01, 1.1):
        beaten = int(attack(model, images, labels, factor * found.radius, keys).sum())
        print(
            f"attacks within {factor} r, {options.restarts} starts of {options.steps} steps: "
            f"{beaten} succeed"
        )


if __name__ == "__main__":
    main()
