"""Train, rewrite and measure stacked members."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import tyro
import xarray
from jaxtyping import Array, Bool

from dissociation.data._datasets import NAMES, SOURCES, Dataset, load
from dissociation.figures._cache import Cache
from dissociation.figures._harness import Settings, config_of
from dissociation.figures._seeds import check_some_left, named_diverged, stand_ins, without_diverged
from dissociation.measures._robustness import error_rate
from dissociation.models._program import function_of
from dissociation.models._representations import representations
from dissociation.recipes._mnist import NETWORKS, fit_classifiers
from dissociation.rewrites._certificate import Certificate, certify
from dissociation.rewrites._groups import NeuronGroup, neuron_groups
from dissociation.rewrites._growth import add_nuisance, duplicate
from dissociation.rewrites._rewrites import scale
from dissociation.training._bmap import bmap
from dissociation.training._members import per_batch, take

if TYPE_CHECKING:
    DataName = str
    ModelName = str
else:
    _HELP = f"Data set: {', or '.join(title for title, _ in SOURCES.values())}."
    DataName = Annotated[Literal[NAMES], tyro.conf.arg(help=_HELP)]
    ModelName = Annotated[
        Literal[NETWORKS], tyro.conf.arg(help="Architecture; see `recipes.fit_classifiers`.")
    ]

FACTORS = (1e-15, 1e15)
"""Range of scale factors at which squares of scaled values stay within float32."""

MAX_WEIGHTS = 2**28
"""Largest number of incoming weights of a rewritten layer: a GiB of float32."""


@dataclasses.dataclass(frozen=True)
class DataConfig(Settings):
    """Base of settings with a dataset.

    Subclasses add `num_test` and the field named by `LOADED`.
    """

    LOADED: ClassVar[str] = "num_train"
    """Name of the field with the number of training images to load."""

    data: DataName = "glyphs"
    """Data set, by its name in `_datasets.SOURCES`."""

    def __post_init__(self):
        self.check(data=NAMES)
        for name in (self.LOADED, "num_test"):
            if getattr(self, name) is not None:
                self.check(**{name: 1})

    def check_data(self, data: Dataset) -> None:
        """Raise if a setting does not fit the dataset."""


@dataclasses.dataclass(frozen=True)
class Config(DataConfig):
    """Base of settings of networks from several seeds, whose last hidden layer is rewritten.

    Subclasses add `width`, `scale_factor`, `duplicate_multiplier` and `num_zero`.
    """

    model: ModelName = "mlp"
    """Architecture; the neurons of its last hidden layer are rewritten."""
    num_seeds: int = 4
    """Networks trained from scratch."""
    num_epochs: int = 10
    """Passes over the training images."""
    num_train: int | None = None
    """Training images; None takes the data set's default."""
    num_test: int | None = None
    """Test images; None takes the data set's default."""

    def __post_init__(self: Any):
        super().__post_init__()
        self.check(model=NETWORKS, num_seeds=1, width=2, num_epochs=0, scale_factor=FACTORS)
        max_neurons = MAX_WEIGHTS // self.width
        max_multiplier = max(1.0, max_neurons / self.width)
        self.check(num_zero=(0, max_neurons), duplicate_multiplier=(1.0, max_multiplier))

    def check_data(self, data: Dataset) -> None:
        """Raise if there are fewer test images than `num_samples`."""
        if hasattr(self, "num_samples"):
            self.check(num_samples=(1, len(data.test_images)))

    def train(
        self: Any,
        key: Array,
        data: Dataset,
        cache: Cache,
        observe: Callable[..., dict[str, Array]] | None = None,
    ) -> "Trained":
        """Train the networks."""
        trained = fit_classifiers(
            key=key,
            dataset=data,
            network=self.model,
            num_epochs=self.num_epochs,
            num_seeds=self.num_seeds,
            width=self.width,
            progress=cache.progress,
            checkpoint=cache.path("training.ckpt"),
            observe=observe,
        )
        cache.seconds["training"] = trained.seconds
        alive = check_some_left(trained.diverged_at)
        observed = trained.history.observed
        error = np.where(np.isfinite(observed["test_loss"]), observed["test_error"], np.nan)
        models = stand_ins(trained.models, alive)
        cache.network = take(models, 0)
        return Trained(models, alive, trained.diverged_at, error, observed)

    def rewrites(self: Any, group: NeuronGroup) -> dict[str, Callable[[Any, Array], Any]]:
        """Return functions of a network and a key by the name of the variant."""
        scaled = scale(group, self.scale_factor)
        duplicated = duplicate(group, self.duplicate_multiplier)
        return {
            "trained": lambda model, key: model,
            "scaled": lambda model, key: scaled(model),
            "duplicated": lambda model, key: duplicated(model),
            "nuisance": lambda model, key: add_nuisance(group, self.num_zero, key=key)(model),
        }


def source(config: Any, data: Dataset | None = None) -> Dataset:
    """Return the dataset of a configuration, or `data`, after checks."""
    if data is None:
        num_train = getattr(config, config.LOADED)
        data = load(config.data, num_train=num_train, num_test=config.num_test)
    config.check_data(data)
    return data


def described(data: Dataset) -> dict[str, Any]:
    """Return name and sizes of a dataset."""
    return {
        "name": data.name,
        "num_train": len(data.train_images),
        "num_test": len(data.test_images),
    }


def data_line(dataset: xarray.Dataset) -> str:
    """Return name and sizes of the data of a figure."""
    data = json.loads(dataset.attrs["data"])
    return f"{data['name']}: {data['num_train']} training and {data['num_test']} test images"


def headline(dataset: xarray.Dataset) -> str:
    """Return a line with the data of a figure and the networks that diverged."""
    config = config_of(dataset)
    names = [f"seed {i}" for i in range(config.num_seeds)]
    diverged = named_diverged(names, dataset.diverged_at.values)
    return f"{data_line(dataset)}, {config.num_seeds} seeds, {config.num_epochs} epochs{diverged}"


def rewritten_group(models: Any, example: Array | np.ndarray) -> NeuronGroup:
    """Return the last group of neurons of stacked models that can be scaled and widened."""
    candidates = []
    for group in neuron_groups(take(models, 0), jnp.asarray(example)).values():
        if group.scaling is not None and group.sharing is not None:
            candidates.append(group)
    return candidates[-1]


class Trained(NamedTuple):
    """Trained networks."""

    models: Any  # stacked; diverged ones are replaced, see `_seeds.stand_ins`
    alive: np.ndarray  # True for networks that did not diverge, [seeds]
    diverged_at: np.ndarray  # step at which a network diverged, or -1: [seeds]
    test_error: np.ndarray  # along training, NaN after a network diverged: [seeds, epochs + 1]
    observed: dict[str, np.ndarray]  # all observations, [seeds, epochs + 1, ...] each

    def dataset(
        self,
        data: Dataset,
        variables: Mapping[str, Any],
        coords: Mapping[str, Any],
        **alive: np.ndarray,
    ) -> xarray.Dataset:
        """Return a dataset of variables, test errors along training, and `diverged_at`.

        Variables are NaN for diverged seeds. `alive` is True for the members that did not diverge
        along other axes than those of seeds.
        """
        masked = without_diverged(variables, seeds=self.alive, other_seeds=self.alive, **alive)
        masked["test_error"] = (("seeds", "epochs"), self.test_error)
        masked["diverged_at"] = ("seeds", self.diverged_at)
        num_seeds, num_epochs = self.test_error.shape
        counts = {"seeds": np.arange(num_seeds), "epochs": np.arange(num_epochs)}
        attributes = {"data": json.dumps(described(data))}
        return xarray.Dataset(masked, {**coords, **counts}, attributes)


def measure_members(
    rewrite: Callable[[Any, Any], Any],
    measure: Callable[[Any, Any, Array], Any],
    models: Any,
    rewrite_keys: Any,
    measure_keys: Array,
) -> Any:
    """Return `measure(model, rewrite(model, rewrite_key), measure_key)` of every member, compiled.

    Members are measured sequentially on a CPU, in a thread per device, and all at once on an
    accelerator. All rewritten networks stay in memory. Arrays bound by `eqx.Partial` are arguments
    of the program, not constants.
    """
    # Two programs, so that rewrites that keep shapes share the second one, which takes longer to
    # compile.
    rewritten = _rewritten(rewrite, models, rewrite_keys)
    if per_batch() == 1:
        return bmap(measure, batch_size=1, loop="scan")(models, rewritten, measure_keys)
    return _measured(measure, models, rewritten, measure_keys)


@eqx.filter_jit
def _rewritten(rewrite: Any, models: Any, keys: Any) -> Any:
    return bmap(rewrite, batch_size=per_batch())(models, keys)


@eqx.filter_jit
def _measured(measure: Any, *stacked: Any) -> Any:
    return eqx.filter_vmap(measure)(*stacked)


def certify_members(
    images: Array, labels: Array, model: Any, rewritten: Any, key: Array
) -> dict[str, Array]:
    """Return the certificate on `images`, and the rewritten network's error `clean_error`."""
    with jax.default_matmul_precision("highest"):
        outputs = jax.vmap(function_of("rewritten", rewritten))(images)
    certificate = certify(model, rewritten, images)
    return {**certificate._asdict(), "clean_error": error_rate(outputs, labels)}


def certified(
    arrays: Mapping[str, dict[str, np.ndarray]],
    variants: Iterable[str],
    alive: Bool[np.ndarray, " seeds"],
) -> dict[str, Any]:
    """Return variables by variant: `clean_error` of each seed, and one `Certificate`.

    The certificate is of all seeds that did not diverge. Its changes are the largest, NaN if one is
    NaN; its numbers of predictions and inputs are sums.
    """
    certificates = [arrays[f"{name}_certificate"] for name in variants]
    errors = np.stack([certificate["clean_error"] for certificate in certificates])
    variables: dict[str, Any] = {"clean_error": (("variants", "seeds"), errors)}
    for name in Certificate._fields:
        pool = np.max if name.startswith("max") else np.sum
        pooled = [float(pool(certificate[name][alive])) for certificate in certificates]
        variables[name] = ("variants", pooled)
    return variables


def represent(images: Array, model: Any, rewritten: Any, key: Array) -> Array:
    """Return the rewritten network's last hidden layer on `images`."""
    return representations(rewritten, images)["features"]
