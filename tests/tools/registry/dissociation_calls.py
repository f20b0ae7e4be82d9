"""Valid calls of the public functions of `dissociation`."""

import equinox as eqx
import jax
import numpy as np
import optax

import dissociation
from dissociation import bilinear as distances
from dissociation import data, measures, recipes, rewrites, training
from dissociation._core import linalg
from dissociation.bilinear import (
    _forms as forms,
)
from dissociation.bilinear import (
    _similarity as similarity,
)
from dissociation.bilinear import (
    adversarial_mask,
    decompose,
    form_similarity,
    interaction_tensor,
    matched_similarity,
    pair_mean,
    rank_similarity,
    truncate,
    truncated_outputs,
)
from dissociation.data import _glyphs as glyphs
from dissociation.data import _mnist as mnist_files
from dissociation.data import _tasks as tasks
from dissociation.measures import _collapse as collapse
from dissociation.measures import _margins as margins
from dissociation.measures import _probes as probes
from dissociation.models import (
    CNN,
    MLP,
    Affine,
    BilinearNetwork,
    Convolution,
    Encoder,
    ResNet,
    Transformer,
    member_representations,
    representations,
    wrap_bilinear,
)
from dissociation.models import (
    _bilinear as bilinear,
)
from dissociation.models import (
    _cnn as cnn,
)
from dissociation.models import (
    _initial as initial,
)
from dissociation.models import (
    _layers as layers,
)
from dissociation.models import (
    _resnet as resnet,
)
from dissociation.models import (
    _transformer as transformer,
)
from dissociation.recipes import _bilinear as bilinear_recipe
from dissociation.recipes import _grokking as grokking
from dissociation.rewrites import _neurons as neurons
from dissociation.rewrites import _noise as noise
from dissociation.rewrites import _null_spaces as symmetry
from dissociation.similarity import (
    _streaming as streaming,
)
from dissociation.similarity import (
    adjust_p_values,
    angular_distance,
    angular_similarity,
    baseline_from_moments,
    calibrate,
    cca,
    cca_squared,
    classical_mds,
    compare,
    compare_rdms,
    crossnobis_rdm,
    crossnobis_rsa,
    debiased_cka,
    debiased_rbf_cka,
    disagreement,
    distance_correlation,
    gulp_distance,
    hard_matching,
    jackknife_interval,
    jensen_shannon,
    knn_jaccard,
    linear_cka,
    linear_predictivity,
    member_interval,
    min_max_disagreement,
    mutual_knn,
    pairwise,
    partial_whitening_distance,
    permutation_test,
    predictivity_from_moments,
    predictivity_path,
    procrustes_distance,
    pwcca,
    rbf_cka,
    rdm,
    rsa,
    similarity_from_moments,
    smacof,
    soft_matching,
    svcca,
)
from dissociation.training import (
    Grid,
)
from dissociation.training import (
    _checkpoint as checkpoint,
)
from dissociation.training import (
    _members as members,
)
from dissociation.training import (
    _schedule as schedule,
)
from dissociation.training import (
    _sharding as sharding,
)

RANDOM = np.random.default_rng(0)
TALL = RANDOM.standard_normal((12, 3)).astype(np.float32)
POSITIVE = TALL.T @ TALL
SAMPLES = np.random.default_rng(1).standard_normal((100, 2)).astype(np.float32)

OTHER = np.random.default_rng(2).standard_normal((12, 2)).astype(np.float32)
DISTANCES = np.linalg.norm(TALL[:, None, :2] - TALL[None, :, :2], axis=2)
TWO_ARRAYS = (
    linear_cka,
    debiased_cka,
    distance_correlation,
    procrustes_distance,
    angular_similarity,
    angular_distance,
    cca,
    cca_squared,
    pwcca,
    hard_matching,
    soft_matching,
)
"""Measures without options."""

DIGITS = RANDOM.integers(0, 10, 12)
FONTS = RANDOM.standard_normal((2, 10, 57, 57)).astype(np.float32)
KEY = np.array([0, 1], np.uint32)  # raw: making a typed one would start a backend


def network():
    """A perceptron of 3 inputs, two hidden layers of 5 and 2 outputs."""
    return eqx.nn.MLP(3, 2, 5, 2, key=jax.random.key(1))


def hidden(name="layers[1]"):
    """A group of 5 neurons of it; or of a network without activation."""
    if name == "linear":
        model = eqx.nn.MLP(3, 2, 5, 1, activation=lambda x: x, key=jax.random.key(1))
        return rewrites.neuron_groups(model, np.ones(3, np.float32))["layers[0]"]
    return rewrites.neuron_groups(network(), np.ones(3, np.float32))[name]


def two_networks():
    return {"a": network(), "b": network()}


def all_groups():
    return rewrites.neuron_groups(network(), np.ones(3, np.float32))


def first_weight(model):
    return model.layers[0].weight[0, 0] ** 2


def vectors_seen():
    """By the second hidden layer, of two inputs."""
    return rewrites.layer_inputs(network(), TALL[:2], ".layers[1].weight")


def layer():
    """Weights of a hidden layer of 4 neurons, between 3 inputs and 2 outputs."""
    generator = np.random.default_rng(1)
    return {"w_in": generator.standard_normal((4, 3)), "w_out": generator.standard_normal((2, 4))}


def bilinear_network(seed=0):
    """A bilinear network of 3 inputs, 4 hidden features and 2 outputs."""
    return BilinearNetwork(3, 4, 2, key=jax.random.key(seed))


def spectrum(seed=0):
    """The spectrum of such a network."""
    return decompose(bilinear_network(seed))


def moments():
    """Moments of 12 samples of 3 features in 3 classes."""
    return measures.class_moments(TALL, np.arange(12) % 3, 3)


def joint():
    """Moments of two representations of 12 samples."""
    return streaming.joint_moments(TALL, OTHER)


def dataset():
    """Twenty images of 9 pixels in 2 classes."""
    generator = np.random.default_rng(2)
    images, labels = generator.random((20, 9)).astype(np.float32), np.eye(2, dtype=np.float32)[np.arange(20) % 2]
    return data.Dataset("small", images[:12], labels[:12], images[12:], labels[12:])


def noisy_call():
    """What the errors under noise share."""
    return {"model": network(), "images": TALL, "labels": np.arange(12) % 2, "scales": np.array([0.0, 0.5])}


def squared_error(model, batch, key):
    """A loss."""
    return ((jax.vmap(model)(batch[0]) - batch[1]) ** 2).mean()


def training_call():
    """Two members for two steps."""
    models = eqx.filter_vmap(lambda key: eqx.nn.MLP(3, 2, 5, 1, key=key))(jax.random.split(jax.random.key(0), 2))
    return {"models": models, "step": training_step(), "sampler": training.Epochs(PAIRS, 4), "num_steps": 2}


def training_step():
    """A step of stochastic gradient descent."""
    return training.make_step(squared_error, optax.sgd(0.1))


PAIRS = TALL, TALL[:, :2]
TIMES = np.array([3.0, 5.0, np.nan, 9.0, 4.0])
LABELS = np.arange(12) % 3
NUISANCE = {"neurons_per_group": 2, "key": KEY, "incoming_std": 0.5, "outgoing_std": 0.5}
PATTERN = {"inputs": TALL, "pattern": TALL[:, :2], "rtol": 1e-5}
PROBE = {"x": TALL, "y": LABELS, "num_splits": 2, "key": KEY}
SMALL = {"num_epochs": 1, "key": KEY}

CALLS = {
    data.Dataset: lambda: {
        "name": "mine",
        "train_images": TALL,
        "train_labels": np.arange(12) % 3,
        "test_images": TALL,
        "test_labels": np.arange(12) % 3,
    },
    Affine: lambda: {"inputs": 3, "outputs": 2, "bias": True, "init": "lecun", "key": KEY},
    Convolution: lambda: {"inputs": 1, "outputs": 2, "transposed": True, "init": "lecun", "key": KEY},
    MLP: lambda: {"inputs": 3, "width": 4, "depth": 1, "activation": "tanh", "init": "lecun", "key": KEY},
    Encoder: lambda: {"features": 2, "init": "lecun", "key": KEY},
    cnn.Decoder: lambda: {"features": 2, "upsampling": "bilinear", "init": "lecun", "key": KEY},
    resnet.ResidualBlock: lambda: {"channels": 2, "init": "lecun", "key": KEY},
    ResNet: lambda: {"width": 3, "classes": 2, "channels": 2, "depth": 1, "init": "lecun", "key": KEY},
    transformer.TransformerBlock: lambda: {"size": 4, "heads": 2, "key": KEY},
    Transformer: lambda: (
        {"width": 3, "classes": 2, "init": "lecun", "key": KEY} | {"size": 4, "heads": 2, "depth": 1, "patch": 14}
    ),
    CNN: lambda: {"width": 3, "classes": 2, "last_activation": False, "init": "lecun", "key": KEY},
    bilinear.BilinearLayer: lambda: {"inputs": 3, "outputs": 2, "bias": True, "gate": "relu", "key": KEY},
    BilinearNetwork: lambda: {"inputs": 3, "hidden": 4, "num_layers": 2, "residual": True, "key": KEY},
    glyphs.draw_glyph: lambda: {"templates": FONTS, "label": 3, "key": KEY, "border": 2},
    data.draw_glyphs: lambda: {"templates": FONTS, "labels": DIGITS[:3], "key": KEY, "batch_size": 2},
    data.glyph_data: lambda: {"num_train": 3, "num_test": 2, "key": KEY},
    tasks.least_prime_factor: lambda: {"number": 9},
    data.rotated_quarters: lambda: {"images": RANDOM.random((5, 16)), "key": KEY},
    tasks.coarse_labels: lambda: {"labels": DIGITS},
    data.coarse_grained: lambda: {"images": RANDOM.random((12, 16)), "labels": DIGITS, "key": KEY},
    linalg.centre: lambda: {"x": TALL},
    linalg.positive_inverse: lambda: {"matrix": POSITIVE},
    linalg.psd_power: lambda: {"matrix": POSITIVE, "power": 0.5, "rtol": 1e-6},
    linalg.nuclear_norm: lambda: {"matrix": TALL, "rtol": 1e-6},
    schedule.steps_per_epoch: lambda: {"num_samples": 10, "batch_size": 4, "drop_remainder": True},
    training.log_spaced_steps: lambda: {"num_steps": 10, "count": 4},
    initial.draw_weights: lambda: {"init": "lecun", "shape": (3, 4), "fan_in": 4, "key": KEY},
    layers.max_pool: lambda: {"x": RANDOM.random((4, 6, 2))},
    representations: lambda: {"model": network(), "inputs": np.ones((4, 3))},
    member_representations: lambda: {
        "models": jax.tree.map(lambda leaf: leaf[None] if eqx.is_array(leaf) else leaf, network()),
        "inputs": np.ones((4, 3)),
    },
    wrap_bilinear: lambda: {"embed": np.eye(3), "layers": [(np.eye(3), np.eye(3))], "head": np.ones((2, 3))},
    neurons.scale_neurons: lambda: layer() | {"scale_factor": np.array([0.5, 1.0, 2.0, 3.0])},
    neurons.duplicate_neurons: lambda: layer() | {"duplicate_multiplier": 1.5},
    neurons.add_random_zero_neurons: lambda: layer() | {"num_zero_groups": 2} | NUISANCE,
    neurons.add_phantom_zero_neurons: lambda: layer() | PATTERN,
    symmetry.null_spectrum: lambda: {"dataset": TALL, "rtol": 1e-9},
    symmetry.null_basis: lambda: {"dataset": TALL, "rtol": 1e-9},
    rewrites.null_dimension: lambda: {"dataset": TALL, "rtol": 1e-9},
    symmetry.perturb_in_null_space: lambda: {"w_in": layer()["w_in"], "basis": np.eye(3)[:1], "scale": 0.1, "key": KEY},
    rewrites.certify: lambda: {"original": network(), "rewritten": network(), "inputs": TALL, "batch_size": 5},
    rewrites.parameter_noise: lambda: {"model": network(), "key": KEY},
    noise.perturb_parameters: lambda: {
        "model": network(),
        "noise": rewrites.parameter_noise(network(), key=KEY),
        "scale": 0.1,
    },
    rewrites.add_parameter_noise: lambda: {"model": network(), "scale": 0.1, "key": KEY},
    rewrites.neuron_groups: lambda: {"model": network(), "example": np.ones(3, np.float32)},
    rewrites.group_report: lambda: {"model": network(), "example": np.ones(3, np.float32)},
    rewrites.permute: lambda: {"group": hidden(), "permutation": np.array([2, 0, 1, 3, 4])},
    rewrites.scale: lambda: {"group": hidden(), "factor": np.array([0.5, 1.0, 2.0, 3.0, 1.0]), "scaling": 0},
    rewrites.duplicate: lambda: {"group": hidden(), "multiplier": 1.5},
    rewrites.add_nuisance: lambda: {"group": hidden(), "num_groups": 2} | NUISANCE,
    rewrites.rotate: lambda: {"group": hidden("linear"), "matrix": np.diag(np.arange(1.0, 6.0))},
    rewrites.add_phantom: lambda: {"group": hidden(), "model": network()} | PATTERN,
    rewrites.null_space: lambda: {"seen": vectors_seen(), "rtol": 1e-9},
    rewrites.null_perturb: lambda: {"space": rewrites.null_space(vectors_seen()), "std": 0.1, "key": KEY},
    rewrites.compose: lambda: {"rewrites": [rewrites.duplicate(hidden(), 2.0)]},
    rewrites.check_groups: lambda: {"model": network(), "inputs": TALL, "key": KEY},
    rewrites.layer_inputs: lambda: {"model": network(), "inputs": TALL, "path": ".layers[1].weight"},
    rewrites.match_weights: lambda: two_networks() | {"groups": all_groups(), "num_starts": 3, "key": KEY},
    rewrites.match_activations: lambda: two_networks() | {"groups": all_groups(), "inputs": TALL},
    rewrites.interpolate: lambda: two_networks() | {"share": 0.5},
    rewrites.barrier: lambda: two_networks() | {"loss": first_weight, "num_points": 3},
    rewrites.barriers: lambda: {
        "loss": first_weight,
        "models": jax.tree.map(lambda leaf: np.stack([leaf] * 2) if eqx.is_array(leaf) else leaf, network()),
        "groups": all_groups(),
        "num_points": 3,
        "num_starts": 3,
        "key": KEY,
    },
    rewrites.canonical: lambda: {"model": network(), "example": np.ones(3, np.float32), "tolerance": 1e-5},
    rewrites.fingerprint: lambda: {"model": network(), "example": np.ones(3, np.float32), "tolerance": 1e-5},
    rewrites.fingerprint_distance: lambda: {"a": TALL[:, 0], "b": TALL[:, 1]},
    rewrites.cka_freedom: lambda: {"x": TALL, "reference": OTHER},
    rewrites.linear_cka_freedom: lambda: {"x": TALL, "reference": OTHER},
    rewrites.similarity_bounds: lambda: {"x": TALL, "y": OTHER, "num_steps": 2, "key": KEY},
    dissociation.bmap: lambda: {"fun": np.sin, "batch_size": 2},
    dissociation.member: lambda: {"models": {"weight": np.ones((3, 2))}, "index": 1},
    members.count: lambda: {"models": {"weight": np.ones((3, 2))}},
    members.stack: lambda: {"trees": [TALL, TALL], "axis": 1},
    members.concatenate: lambda: {"trees": [TALL, TALL], "axis": 1},
    dissociation.map_members: lambda: {
        "function": lambda scale, x: scale * x,
        "shared": 2.0,
        "stacked": TALL,
        "member_map": "scan",
    },
    dissociation.member_mesh: dict,
    sharding.pad_members: lambda: {"tree": TALL, "num_devices": 5},
    sharding.drop_padding: lambda: {"tree": TALL, "num_members": 5},
    sharding.place_members: lambda: {"tree": TALL, "mesh": dissociation.member_mesh()},
    sharding.replicate: lambda: {"tree": TALL, "mesh": dissociation.member_mesh()},
    checkpoint.fingerprint: lambda: {"tree": TALL},
    data.load: lambda: {"name": "glyphs", "num_train": 3, "num_test": 2, "key": KEY},
    mnist_files.parse_idx: lambda: {"contents": bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 6]), "source": "labels"},
    recipes.fresh_networks: lambda: {"num_seeds": 2, "key": KEY, "num_inputs": 3, "num_classes": 2, "width": 4},
    recipes.fit_mnist: lambda: SMALL | {"num_seeds": 2, "dataset": dataset(), "width": 4, "progress": None},
    recipes.train_mnist: lambda: SMALL | {"num_seeds": 2, "dataset": dataset(), "width": 4, "progress": None},
    recipes.cross_entropy: lambda: {"model": network(), "batch": (TALL, np.eye(2)[np.arange(12) % 2])},
    measures.class_moments: lambda: {"features": TALL, "labels": LABELS, "num_classes": 3},
    measures.merge_moments: lambda: {"a": moments(), "b": moments()},
    measures.neural_collapse: lambda: {"moments": moments()},
    collapse.trace_ratio: lambda: {"moments": measures.class_moments(TALL, np.arange(12) % 3, 3, scatter=True)},
    collapse.simplex_frame: lambda: {"moments": moments()},
    collapse.self_duality: lambda: {"moments": moments(), "classifier": np.eye(3)},
    collapse.nearest_centre_agreement: lambda: {"features": TALL, "logits": TALL, "moments": moments()},
    measures.first_cross: lambda: {"x": np.arange(4.0), "y": np.arange(4.0), "threshold": 1.5, "direction": "above"},
    measures.median_crossing: lambda: {"times": TIMES, "end": 10.0, "level": 0.9},
    measures.log_slope: lambda: {"times": TIMES, "at": np.arange(1.0, 6.0), "end": 10.0, "level": 0.9},
    measures.linear_head: lambda: {"model": network()},
    margins.signed_distance: lambda: {
        "features": TALL,
        "weights": np.eye(3),
        "biases": np.zeros(3),
        "first": 0,
        "second": 1,
    },
    margins.class_plane: lambda: {"weights": np.eye(3), "biases": np.zeros(3), "first": 0, "second": 1, "rtol": 1e-5},
    measures.error_rate: lambda: {"logits": TALL, "labels": LABELS},
    measures.input_noise_error: lambda: noisy_call() | {"noise": TALL},
    measures.parameter_noise_error: lambda: noisy_call() | {"noise": rewrites.parameter_noise(network(), key=KEY)},
    measures.transfer_errors: lambda: {
        "features": TALL,
        "labels": LABELS,
        "key": KEY,
        "fractions": np.array([0.5, 1.0]),
        "num_splits": 2,
        "ridge": 1.0,
        "num_buckets": 1,
    },
    measures.crossval_softmax_predict: lambda: PROBE | {"ridge": 1.0},
    measures.crossval_softmax_fit: lambda: PROBE | {"ridge": 1.0},
    measures.crossval_gradient_predict: lambda: PROBE | {"num_steps": 3, "step_size": 0.1},
    probes.stable_step_size: lambda: {"x": TALL},
    measures.information_plane: lambda: {
        "features": TALL,
        "inputs": TALL,
        "labels": LABELS,
        "key": KEY,
        "batch_size": 6,
        "num_passes": 1,
        "sigma": 5.0,
    },
    **{function: lambda: {"x": TALL, "y": OTHER} for function in TWO_ARRAYS},
    rbf_cka: lambda: {"x": TALL, "y": OTHER, "scale": 0.8},
    debiased_rbf_cka: lambda: {"x": TALL, "y": OTHER, "scale": 0.8},
    partial_whitening_distance: lambda: {"x": TALL, "y": OTHER, "a": 0.3},
    svcca: lambda: {"x": TALL, "y": OTHER, "variance": 0.9},
    gulp_distance: lambda: {"x": TALL, "y": OTHER, "lam": 0.1},
    rsa: lambda: {"x": TALL, "y": OTHER, "rdm": "cosine", "comparison": "kendall"},
    crossnobis_rsa: lambda: {"x": TALL, "y": OTHER, "comparison": "pearson"},
    rdm: lambda: {"x": TALL, "kind": "squared"},
    compare_rdms: lambda: {"a": TALL[:, 0], "b": TALL[:, 1], "comparison": "spearman"},
    crossnobis_rdm: lambda: {"a": TALL, "b": TALL[::-1], "noise_covariance": POSITIVE},
    mutual_knn: lambda: {"x": TALL, "y": OTHER, "num_neighbours": 3},
    knn_jaccard: lambda: {"x": TALL, "y": OTHER, "num_neighbours": 3},
    linear_predictivity: lambda: {"x": TALL, "y": OTHER, "alpha": 0.1, "num_folds": 3},
    predictivity_path: lambda: {"x": TALL, "y": OTHER, "alphas": np.array([0.1, 1.0]), "num_folds": 3},
    disagreement: lambda: {"x": TALL, "y": TALL[::-1]},
    jensen_shannon: lambda: {"x": TALL, "y": TALL[::-1]},
    min_max_disagreement: lambda: {"x": TALL, "y": TALL[::-1], "labels": np.arange(12) % 3},
    jackknife_interval: lambda: {"values": TALL[0], "leave_outs": TALL, "level": 0.9},
    permutation_test: (
        lambda: {"measure": "linear_cka", "x": TALL, "y": OTHER, "key": KEY, "num_draws": 5, "level": 0.9},
        lambda: {"measure": "debiased_cka", "x": TALL, "y": OTHER, "num_draws": None},
    ),
    calibrate: lambda: {"value": TALL[0], "null_quantile": TALL[1], "best": 1.0},
    adjust_p_values: lambda: {"p_values": np.array([0.1, 0.5]), "method": "bh"},
    member_interval: lambda: {"values": np.corrcoef(TALL), "level": 0.9},
    pairwise: lambda: {
        "measure": "linear_cka",
        "representations": {"a": TALL, "b": OTHER},
        "baseline": True,
        "p_values": True,
        "num_orders": 3,
        "key": KEY,
        "num_blocks": 3,
        "blocks": "contiguous",
        "level": 0.9,
        "memory_budget": 10**6,
    },
    compare: lambda: {"x": TALL, "y": OTHER, "measure": "linear_cka", "num_blocks": 3, "p_values": False},
    streaming.merge_joint_moments: lambda: {"a": joint(), "b": joint()},
    baseline_from_moments: lambda: {"moments": joint(), "measure": "cca_squared"},
    similarity_from_moments: lambda: {"moments": joint(), "measure": "linear_cka"},
    predictivity_from_moments: lambda: {
        "folds": [joint(), joint()],
        "source": 1,
        "target": 0,
        "alpha": 0.1,
    },
    classical_mds: lambda: {"distances": DISTANCES, "num_dims": 2},
    smacof: lambda: {"distances": DISTANCES, "num_dims": 2, "key": KEY, "num_starts": 2, "max_steps": 9},
    measures.entropy_weights: lambda: {"num_neighbours": 5, "dimension": 4},
    measures.entropy: lambda: {"points": TALL, "num_neighbours": 2},
    measures.information: (
        lambda: {"x": SAMPLES[:, :1], "z": SAMPLES[:, :1] + SAMPLES[:, 1:], "num_neighbours": 3},
        lambda: {"x": SAMPLES[:, :1], "z": SAMPLES[:, :1] + SAMPLES[:, 1:], "estimator": "kraskov"},
    ),
    measures.label_information: lambda: {"z": SAMPLES, "labels": np.arange(100) % 3, "num_classes": 3},
    measures.whiten: lambda: {"points": TALL, "num_components": 2, "rtol": 1e-6},
    measures.smoothed_information: lambda: {"features": TALL, "labels": LABELS, "noise": 0.5, "key": KEY},
    bilinear_recipe.loss_and_accuracy: lambda: {
        "model": bilinear_network(),
        "images": TALL,
        "labels": np.eye(2)[np.arange(12) % 2],
    },
    recipes.train_bilinear: lambda: SMALL | {"dataset": dataset(), "hidden": 3, "num_seeds": 2, "batch_size": 6},
    recipes.train_compression: lambda: SMALL | {"images": np.zeros((4, 784)), "code": 2, "batch_size": 2},
    grokking.standardised: lambda: {"images": TALL},
    recipes.train_grokking: lambda: {
        "dataset": dataset(),
        "weight_decays": (0.1,),
        "seeds": (0,),
        "num_steps": 2,
        "num_train": 8,
        "batch_size": 4,
        "options": {"width": 4},
    },
    recipes.observation_steps: lambda: {"num_steps": 10},
    distances.margins: lambda: {"source": spectrum()},
    distances.certified_radius: lambda: {"source": distances.margins(spectrum()), "x": TALL[0], "label": 1},
    distances.certified_accuracy: lambda: {"radii": TALL[:, 0], "levels": np.array([0.0, 0.1])},
    forms.activations: lambda: {"spectrum": spectrum(), "x": TALL},
    forms.contributions: lambda: {"spectrum": spectrum(), "x": TALL},
    forms.mean_contribution: lambda: {"spectrum": spectrum(), "x": TALL},
    truncated_outputs: lambda: {"spectrum": spectrum(), "x": TALL},
    adversarial_mask: lambda: {"spectrum": spectrum(), "output": 0, "component": 0, "against": 1, "norm": 1.0},
    decompose: lambda: {
        "model": bilinear_network(),
        "directions": np.eye(4)[:2],
        "layer": 0,
        "space": "input",
        "by": "magnitude",
    },
    interaction_tensor: lambda: {"model": bilinear_network(), "directions": np.eye(4)[:2], "layer": 0},
    forms.reorder: lambda: {"spectrum": spectrum(), "importance": np.ones(spectrum().values.shape)},
    truncate: lambda: {"spectrum": spectrum(), "num_components": 2},
    similarity.overlaps: lambda: {"a": spectrum(), "b": spectrum(1)},
    rank_similarity: lambda: {"a": spectrum(), "b": spectrum(1)},
    matched_similarity: lambda: {"a": spectrum(), "b": spectrum(1), "num_components": 2},
    form_similarity: lambda: {"a": spectrum(), "b": spectrum(1)},
    similarity.member_pairs: lambda: {"num_members": 4, "other": 3},
    pair_mean: lambda: {
        "values": np.arange(3.0),
        "first": np.array([0, 0, 1]),
        "second": np.array([1, 2, 2]),
    },
    similarity.student_interval: lambda: {"samples": TALL[:, 0], "level": 0.9},
    similarity.bootstrap_interval: lambda: {
        "statistic": lambda counts: counts.sum(),
        "num_members": 4,
        "key": KEY,
        "level": 0.9,
        "num_resamples": 10,
    },
    training.fit_grid: lambda: {
        "init": lambda key: eqx.nn.Linear(TALL.shape[1], 2, key=key),
        "step": training.make_step(squared_error, lambda values: optax.sgd(values["rate"])),
        "sampler": training.Epochs(PAIRS, 4),
        "grid": Grid(rate=[0.1, 0.2], seed=[0, 1]),
        "key": KEY,
        "num_steps": 2,
        "fresh": False,
        "memory_budget": 2**34,
        "progress": None,
    },
    training.fit: lambda: training_call() | {"key": KEY, "same_program": False},
    training.train: lambda: {
        "state": training_step().init(network()),
        "step": training_step(),
        "sampler": training.Epochs(PAIRS, 4),
        "num_steps": 2,
        "key": KEY,
        "first_step": 1,
    },
    training.make_step: lambda: {"loss": squared_error, "optimizer": optax.sgd(0.1), "micro_batches": 2},
    training.FullBatch: lambda: {"data": PAIRS, "stacked": False},
    training.Epochs: lambda: {
        "data": PAIRS,
        "batch_size": 4,
        "shared": True,
        "shuffle": True,
        "drop_remainder": False,
        "stacked": False,
    },
    training.Online: lambda: {"draw": jax.random.normal, "shared": True, "stacked": False},
    training.HostBatches: lambda: {"start": lambda step: iter([PAIRS]), "epoch_steps": 2, "block": 4},
    training.CsvLog: lambda: {"path": "log.csv", "columns": {"rate": [0.1, 0.2]}},
    training.EarlyStop: lambda: {"name": "loss", "patience": 2, "least_change": 0.1, "rising": False},
    training.Grid.keys: lambda: {"self": training.Grid(seed=[0, 1]), "key": KEY, "name": "seed"},
}
