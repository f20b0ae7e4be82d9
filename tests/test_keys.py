"""No key is used for two purposes: the keys that samplers consume are recorded in every figure of both packages.

Whoever asks `jax.random` for a draw, a split or a fold is told by the place in the project that
asks. The key itself is seen when the compiled program runs.
"""

import dataclasses
import inspect
import itertools
import sys
from collections import Counter, defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dissociation.figures
import koopman.figures
from dissociation.data import load
from dissociation.figures import (
    collapse,
    compare,
    eigenvectors,
    freedom,
    manifold,
    planted,
    robustness,
    similarity,
    transfer,
)
from dissociation.training import Epochs, Online, Save, fit, make_step
from koopman.figures import coverage, ordered_mnist, spectra
from koopman.figures import fit as fit_figure

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PACKAGES = tuple(str(ROOT / package) + "/" for package in ("dissociation", "koopman"))

SHARED = {
    # A seed's networks under several weight decays begin alike, see the same batches, and are
    # measured alike.
    "dissociation/models/_layers.py draw_weights: uniform",
    "dissociation/training/_samplers.py Epochs.plan: permutation",
    "dissociation/figures/_collapse_measures.py Information.__call__: normal",
    "dissociation/figures/_collapse_measures.py Information.__call__: permutation",
    "dissociation/measures/_smoothed.py _smoothed: normal",
    "dissociation/measures/_hsic.py _plane.one_pass: permutation",
    # Whatever is measured on a rewritten network, it is the same network.
    "dissociation/rewrites/_null_spaces.py _perturb: normal",
    "dissociation/rewrites/_growth.py _drawn: normal",
    # Samples of a Gaussian that ranks choose from.
    "dissociation/measures/_coordinates.py normal_scores: normal",
    # Members resampled alike for every measure and size.
    "dissociation/bilinear/_similarity.py bootstrap_interval.resample: randint",
    # One direction of noise for all scales and variants of a seed.
    "dissociation/rewrites/_noise.py parameter_noise: normal",
}
"""Places that draw from one key several times, on purpose."""


class Ledger:
    """What became of every key that a running program used."""

    def __init__(self):
        self.draws: dict[bytes, Counter] = defaultdict(Counter)  # how often each place drew from it
        self.splits: dict[bytes, set[int]] = defaultdict(set)
        self.folds: set[bytes] = set()

    def note(self, keys, kind, place, count):
        for key in np.asarray(keys).reshape(-1, np.shape(keys)[-1]):
            if kind == "split":
                self.splits[key.tobytes()].add(count)
            elif kind == "fold_in":
                self.folds.add(key.tobytes())
            else:
                self.draws[key.tobytes()][f"{place}: {kind}"] += 1

    def faults(self):
        """A sentence for every key with two purposes."""
        found = set()
        for key, places in self.draws.items():
            if len(places) > 1:
                found.add(f"one key for {' and '.join(sorted(places))}")
            if key in self.splits or key in self.folds:
                found.add(f"{', '.join(places)} draws from a key that is also split or folded")
        for key, counts in self.splits.items():
            if key in self.folds:
                found.add(f"a key is split into {sorted(counts)} and folded")
            if len(counts) > 1:
                found.add(f"a key is split into {sorted(counts)}")
        return sorted(found)

    def repeated(self):
        """Places that drew from one key more than once."""
        return {
            place for places in self.draws.values() for place, times in places.items() if times > 1
        }


LEDGER = Ledger()


def _place():
    """The innermost function of the project on the stack."""
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGES):
        frame = frame.f_back
    if frame is None:
        return "outside"
    name = frame.f_code.co_qualname.replace("<locals>.", "").removesuffix(".<listcomp>")
    return f"{Path(frame.f_code.co_filename).relative_to(ROOT)} {name}"


def _told(function, kind, key_data=jax.random.key_data, key_impl=jax.random.key_impl):
    def wrapper(key, *args, **kwargs):
        typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        count = kwargs.get("num", args[0] if args else 2) if kind == "split" else 0
        words, place = key_data(key) if typed else jnp.asarray(key), _place()

        def tell(words):  # when the program runs
            LEDGER.note(words, kind, place, int(np.prod(count)))
            return np.asarray(words)

        form = jax.ShapeDtypeStruct(words.shape, words.dtype)
        words = jax.pure_callback(tell, form, words, vmap_method="expand_dims")
        key = jax.random.wrap_key_data(words, impl=key_impl(key)) if typed else words
        return function(key, *args, **kwargs)

    return wrapper


def _takes_a_key(name, function):
    if (
        name in ("clone", "key_data", "key_impl")
        or not callable(function)
        or inspect.isclass(function)
    ):
        return False
    return next(iter(inspect.signature(function).parameters), "") == "key"


@pytest.fixture
def ledger(monkeypatch):
    """Records all uses of keys; programs that were compiled without are forgotten, and so are those with."""
    monkeypatch.setattr(sys.modules[__name__], "LEDGER", Ledger())
    for name, function in list(vars(jax.random).items()):
        if _takes_a_key(name, function):
            monkeypatch.setattr(jax.random, name, _told(function, name))
    jax.clear_caches()
    yield LEDGER
    jax.clear_caches()


def drawn_and_split(key):
    return jax.random.normal(key), jax.random.split(key)


def as_it_should_be(key):
    first, second = jax.random.split(key)
    steps = jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(second, i), (3,)))(
        jnp.arange(4)
    )
    return jax.random.permutation(first, 5), steps


@pytest.mark.parametrize("function", [drawn_and_split, as_it_should_be])
def test_the_ledger_sees_through_transformations(ledger, monkeypatch, function):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGES", (str(Path(__file__)),))
    keys = jax.random.wrap_key_data(jnp.asarray([[[0, 1], [0, 2]]], jnp.uint32))
    jax.block_until_ready(jax.lax.map(jax.vmap(function), keys))
    assert bool(ledger.faults()) == (function is drawn_and_split)
    assert sum(map(len, ledger.draws.values())) == (2 if function is drawn_and_split else 10)


REPRESENTATIVE = {"eigenvectors", "freedom", "robustness"}
"""Figures that `.ci/run` computes with recorded keys."""
SMALL = {"num_seeds": 2, "num_epochs": 1, "num_train": 200, "num_test": 40, "width": 8}


def collapse_in_small():
    sizes = {
        "num_steps": 3,
        "num_images": 40,
        "num_test": 40,
        "num_train": 40,
        "batch_size": 20,
        "seeds": (42, 43),
    }
    config = dataclasses.replace(collapse.Config().quick(), **sizes, weight_decays=(0.1, 0.3))
    collapse.compute(config, key=jax.random.PRNGKey(42))  # one of the networks' own seeds


def ordered_digits_in_small(monkeypatch):
    models = ("classifier", "vamp", "contrastive", "dpnets", "autoencoder", "orthogonal")
    sizes = {
        "num_seeds": 2,
        "num_epochs": 1,
        "oracle_epochs": 1,
        "num_train": 33,
        "num_validation": 20,
        "num_test": 20,
    }
    config = dataclasses.replace(
        ordered_mnist.Config().quick(), **sizes, batch_size=16, models=models
    )

    def nothing(config, name, networks, train, test, norm):
        return {
            kind: np.stack([value] * 2)
            for kind, value in ordered_mnist._nothing(config, test).items()
        }

    # Forecasts draw nothing, and take most of the time.
    monkeypatch.setattr(ordered_mnist, "_evaluated", nothing)
    data = ordered_mnist.ordered_mnist(5, data=load("glyphs", num_train=300, num_test=20))
    ordered_mnist.compute(config, key=jax.random.PRNGKey(0), data=data)


IN_SMALL = {
    "eigenvectors": (
        eigenvectors.Config().quick(),
        {"num_epochs": 1, "num_train": 100, "num_test": 30, "batch_size": 50},
    ),
    "freedom": (freedom.Config(), SMALL | {"num_samples": 30, "num_zero": 4}),
    "manifold": (
        manifold.Config().quick(),
        {"num_tasks": 2, "num_steps": 3, "pair_steps": 2, "num_scales": 2},
    ),
    "planted": (
        planted.Config().quick(),
        {
            "num_epochs": 1,
            "num_train": 200,
            "width": 16,
            "num_shown": 10,
            "num_more": 20,
            "num_passes": 1,
        },
    ),
    "robustness": (
        robustness.Config(),
        SMALL | {"num_scales": 2, "num_zero": 4, "published_null": True},
    ),
    "similarity": (
        similarity.Config(),
        SMALL
        | {"num_seeds": 3, "num_samples": 30, "num_blocks": 2, "num_zero": 4}
        | {"measures": ("rsa",), "rewrite_measures": ("svcca",)},
    ),
    "fit": (fit_figure.Config().quick(), {"num_times": 200, "num_delays": 4, "steps": 3}),
    "coverage": (coverage.Config().quick(), {"lengths": (300, 400), "num_seeds": 2}),
    "spectra": (spectra.Config().quick(), {"lengths": (200, 300), "num_trajectories": 2}),
    "transfer": (
        transfer.Config(),
        SMALL | {"num_budgets": 1, "num_splits": 2, "num_zero": 4, "gradient_steps": 2},
    ),
}


def compare_in_small(folder):
    paths = [str(folder / f"{name}.npz") for name in "ab"]
    for path in paths:
        np.savez(path, layer=np.random.default_rng(0).normal(size=(30, 3)))
    config = compare.Config(*paths, "mutual_knn", num_blocks=2, num_orders=5)
    return compare.compute(config, key=jax.random.PRNGKey(0))


def run_in_small(figure, monkeypatch, folder):
    if figure == "compare":
        return compare_in_small(folder)
    if figure == "collapse":
        return collapse_in_small()
    if figure == "ordered-mnist":
        return ordered_digits_in_small(monkeypatch)
    config, sizes = IN_SMALL[figure]
    module = sys.modules[type(config).__module__]
    return module.compute(dataclasses.replace(config, **sizes), key=jax.random.PRNGKey(0))


FIGURES = [
    pytest.param(name, marks=() if name in REPRESENTATIVE else pytest.mark.full)
    for name in dissociation.figures.figures() | koopman.figures.figures()
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("figure", FIGURES)
def test_no_key_of_a_figure_serves_two_purposes(ledger, monkeypatch, figure, tmp_path):
    run_in_small(figure, monkeypatch, tmp_path)
    # The example of "fit" is drawn by NumPy, from one generator.
    least_draws = {"compare": 1, "fit": 0}
    assert len(ledger.draws) >= least_draws.get(figure, 4)
    assert ledger.faults() == []
    assert ledger.repeated() <= SHARED


def test_members_with_their_own_batches_draw_from_keys_of_their_own(ledger):
    def loss(model, batch, key):
        return jnp.mean((batch @ model + jax.random.normal(key)) ** 2)

    def observe(model, step, key):
        return jax.random.normal(key)

    for seed, (own_draws, count) in enumerate(itertools.product((False, True), (1, 2))):
        drawn = Online(lambda key: jax.random.normal(key, (4, 2)))
        sampler = drawn if own_draws else Epochs(jnp.ones((10, 2)), 4, shared=False)
        step, keys = (
            make_step(loss, optax.sgd(0.1), micro_batches=count),
            jax.random.split(jax.random.key(seed), 3),
        )
        # Over several devices the last member is repeated where they do not divide the members, and
        # so are its keys.
        fit(jnp.ones((3, 2)), step, sampler, num_steps=7, key=keys, save=Save(observe), mesh=None)
        assert ledger.faults() == []
        assert ledger.repeated() == set()
