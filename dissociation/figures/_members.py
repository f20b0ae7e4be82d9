"""Training stacked members, rewriting them, and measuring what came of it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Bool

from dissociation._core.checks import check_choice, check_count, check_positive, fail
from dissociation.data._datasets import NAMES, SOURCES, Dataset, load
from dissociation.figures._artifacts import Parts
from dissociation.figures._seeds import check_some_left, named_diverged, stand_ins
from dissociation.measures._robustness import input_noise_error
from dissociation.recipes._mnist import NETWORKS, fit_mnist
from dissociation.rewrites._certificate import certify
from dissociation.rewrites._groups import NeuronGroup, neuron_groups
from dissociation.rewrites._growth import add_nuisance, duplicate
from dissociation.rewrites._rewrites import scale
from dissociation.training._bmap import bmap
from dissociation.training._distributed import LocalMembers
from dissociation.training._members import per_batch, take
from dissociation.training._progress import MeterFactory

if TYPE_CHECKING:
    DataName = str
else:
    _HELP = f"Data set: {', or '.join(shown for shown, _ in SOURCES.values())}."
    DataName = Annotated[Literal[NAMES], tyro.conf.arg(help=_HELP)]

FACTORS = (1e-15, 1e15)
"""Scale factors between which squares of what they scale stay within float32."""

if TYPE_CHECKING:
    ModelName = str
else:
    _HELP = "Architecture; see `recipes.fit_mnist`."
    ModelName = Annotated[Literal[NETWORKS], tyro.conf.arg(help=_HELP)]

MAX_WEIGHTS = 2**28
"""Incoming weights that a rewritten layer may have: a GiB of float32."""


def check_members(config: Any) -> None:
    """Raises unless what the configurations of trained and rewritten networks share can be met."""
    check_source(config)
    check_choice("model", config.model, NETWORKS)
    for name in ("num_seeds", "width"):
        check_count(name, getattr(config, name), minimum=1)
    check_count("num_epochs", config.num_epochs)
    check_positive("scale_factor", config.scale_factor)
    check_positive("duplicate_multiplier", config.duplicate_multiplier)
    least, most = FACTORS
    if not least <= config.scale_factor <= most:
        fail("scale_factor", f"lie from {least:g} to {most:g}", config.scale_factor)
    if config.duplicate_multiplier < 1:
        fail("duplicate_multiplier", "be at least 1", config.duplicate_multiplier)
    check_neurons(
        "duplicate_multiplier", config.duplicate_multiplier, config.width * config.duplicate_multiplier, config
    )


def check_neurons(name: str, value: float | int, neurons: float | int, config: Any) -> None:
    """Raises if so many neurons in the rewritten layer have more than `MAX_WEIGHTS` weights."""
    if neurons * config.width > MAX_WEIGHTS:
        fail(name, f"leave a layer of `width` {config.width} at most {MAX_WEIGHTS} weights", value)


def check_source(config: Any, sizes: Sequence[str] = ("num_train", "num_test")) -> None:
    """Raises unless `data` is known, and the fields that `sizes` names are counts or None."""
    check_choice("data", config.data, NAMES)
    for name in sizes:
        if getattr(config, name) is not None:
            check_count(name, getattr(config, name), minimum=1)


def check_samples(config: Any, data: Dataset) -> None:
    """Raises if there are fewer test images than `num_samples`."""
    if config.num_samples > len(data.test_images):
        fail("num_samples", f"be at most the number of test images ({len(data.test_images)})", config.num_samples)


def source(config: Any) -> Dataset:
    """The data set that a figure's configuration names: `data`, `num_train` and `num_test` of it."""
    return load(config.data, num_train=config.num_train, num_test=config.num_test)


def members_headline(config: Any, data: dict[str, Any], diverged_at: np.ndarray) -> str:
    """Return a line that names the data of a figure and the networks that diverged."""
    sizes = f"{data['num_train']} training and {data['num_test']} test images"
    gone = named_diverged([f"seed {i}" for i in range(config.num_seeds)], diverged_at)
    return f"{data['name']}: {sizes}, {config.num_seeds} seeds, {config.num_epochs} epochs{gone}"


def rewritten_group(models: Any, example: Array | np.ndarray) -> NeuronGroup:
    """The neurons that figures rewrite: the last group that may be scaled and grow, of stacked models of one shape."""
    groups = neuron_groups(take(models, 0), jnp.asarray(example))
    fit = [group for group in groups.values() if group.scaling is not None and group.sharing is not None]
    if not fit:
        fail("models", "have a group of neurons that may be scaled and grow", f"groups {list(groups.values())}")
    return fit[-1]


def neuron_rewrites(config: Any, num_zero: int, group: NeuronGroup) -> dict[str, Callable[[Any, Array], Any]]:
    """Functions of one network and a key: itself, with neurons scaled, duplicated, and some without effect added."""
    scaled, duplicated = scale(group, config.scale_factor), duplicate(group, config.duplicate_multiplier)
    return {
        "trained": lambda model, key: model,
        "scaled": lambda model, key: scaled(model),
        "duplicated": lambda model, key: duplicated(model),
        "zero": lambda model, key: add_nuisance(group, num_zero, key=key)(model),
    }


class Trained(NamedTuple):
    """Networks that figures measure.

    Attributes:
        models: Stacked; those that diverged replaced by others, see `_seeds.stand_ins`.
        alive: Which did not diverge, [seeds].
        diverged_at: The step at which a network did, or -1: [seeds].
        test_error: Along training, NaN from where a network diverged: [seeds, epochs + 1].
        seconds: Wall time.
        observed: All that was observed, [seeds, epochs + 1, ...] each.
    """

    models: Any
    alive: np.ndarray
    diverged_at: np.ndarray
    test_error: np.ndarray
    seconds: float
    observed: dict[str, np.ndarray]


def train_members(
    config: Any,
    *,
    key: Array,
    data: Dataset,
    parts: Parts,
    progress: str | MeterFactory | None,
    observe: Callable[..., dict[str, Array]] | None = None,
) -> Trained:
    """Train the networks with which every such figure begins."""
    settings = {name: getattr(config, name) for name in ("num_epochs", "num_seeds", "width")}
    settings["network"] = config.model
    trained = fit_mnist(
        key=key,
        dataset=data,
        progress=progress,
        checkpoint=parts.path("training.ckpt"),
        observe=observe,
        **settings,
    )
    alive = check_some_left(trained.diverged_at)
    observed = trained.history.observed
    error = np.where(np.isfinite(observed["test_loss"]), observed["test_error"], np.nan)
    return Trained(stand_ins(trained.models, alive), alive, trained.diverged_at, error, trained.seconds, observed)


def measure_members(
    rewrite: Callable[[Any, Any], Any],
    measure: Callable[[Any, Any, Array], Any],
    models: Any,
    rewrite_keys: Any,
    measure_keys: Array,
) -> Any:
    """Return `measure(model, rewrite(model, rewrite_key), measure_key)` of every member, compiled.

    Each of several processes measures its own members: sequentially on a CPU, in as many threads as it has devices, and
    all at once on an accelerator. The rewritten networks of all members are kept. Bind arrays to the two functions by
    `eqx.Partial`, which hands them to the program instead of baking them into it.
    """

    def measured(stacked: Any) -> Any:
        models, rewrite_keys, keys = stacked
        # Two programs, so that rewrites that keep a network's shapes share the one that measures, which takes longer.
        stacked = models, _rewritten(rewrite, models, rewrite_keys), keys
        return bmap(measure, batch_size=1, loop="scan")(*stacked) if per_batch() == 1 else _measured(measure, stacked)

    local = LocalMembers(len(measure_keys))
    return local.gather(measured(local.take((models, rewrite_keys, measure_keys))))


@eqx.filter_jit
def _rewritten(rewrite: Any, models: Any, keys: Any) -> Any:
    return bmap(rewrite, batch_size=per_batch())(models, keys)


@eqx.filter_jit
def _measured(measure: Any, stacked: Any) -> Any:
    return eqx.filter_vmap(measure)(*stacked)


def certify_members(images: Array, labels: Array, model: Any, rewritten: Any, key: Array) -> dict[str, Array]:
    """A measure: the certificate on `images`, and the rewritten network's error there as `clean_error`."""
    certificate = certify(model, rewritten, images)
    error = input_noise_error(rewritten, images, labels, jnp.zeros(1), noise=jnp.zeros_like(images))[0]
    return {**certificate._asdict(), "clean_error": error}


def worst(certificates: dict[str, np.ndarray], alive: Bool[np.ndarray, " seeds"]) -> dict[str, float]:
    """Certificates of all seeds in one: the largest changes, and changed predictions and inputs in all.

    Networks that diverged are left out. A change that is NaN, of a network that did not, is the largest.
    """
    known = {name: value[alive] for name, value in certificates.items()}
    return {name: float(value.max() if name.startswith("max") else value.sum()) for name, value in known.items()}
