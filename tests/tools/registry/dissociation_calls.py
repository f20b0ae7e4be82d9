"""Valid calls of the public functions of `dissociation`."""

import equinox as eqx
import jax
import numpy as np
import optax

from dissociation import bmap, checkpoint, linalg, members, schedule, sharding, sweeps
from dissociation.data import datasets, glyphs, tasks
from dissociation.data import mnist as mnist_files
from dissociation.metrics import collapse, crossing, margins, probes, robustness, transfer
from dissociation.metrics.information import coordinates, hsic, nearest, smoothed
from dissociation.metrics.similarity import (
    canonical,
    dissimilarity,
    embedding,
    functional,
    inference,
    kernels,
    matching,
    neighbourhoods,
    pairs,
    predictivity,
    shapes,
    streaming,
)
from dissociation.models import bilinear, cnn, initial, layers, representations, resnet, transformer
from dissociation.models import mlp as perceptron
from dissociation.recipes import bilinear as bilinear_recipe
from dissociation.recipes import compression, grokking, mnist
from dissociation.spectral import certificate as distances
from dissociation.spectral import forms, similarity
from dissociation.sweeps import Grid
from dissociation.symmetry import bounds, freedom
from dissociation.symmetry import canonical as canonical_form
from dissociation.symmetry import matching as neuron_matching
from dissociation.training import callbacks, fitting, grids, loop, samplers, state
from dissociation.weights import certificate, groups, growth, neurons, noise, rewrites, seen, symmetry

RANDOM = np.random.default_rng(0)
TALL = RANDOM.standard_normal((12, 3)).astype(np.float32)
POSITIVE = TALL.T @ TALL
SAMPLES = np.random.default_rng(1).standard_normal((100, 2)).astype(np.float32)

OTHER = np.random.default_rng(2).standard_normal((12, 2)).astype(np.float32)
DISTANCES = np.linalg.norm(TALL[:, None, :2] - TALL[None, :, :2], axis=2)
TWO_ARRAYS = (
    kernels.linear_cka,
    kernels.debiased_cka,
    kernels.distance_correlation,
    shapes.procrustes_distance,
    shapes.angular_similarity,
    shapes.angular_distance,
    canonical.cca,
    canonical.cca_squared,
    canonical.pwcca,
    matching.hard_matching,
    matching.soft_matching,
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
        return groups.neuron_groups(model, np.ones(3, np.float32))["layers[0]"]
    return groups.neuron_groups(network(), np.ones(3, np.float32))[name]


def two_networks():
    return {"a": network(), "b": network()}


def all_groups():
    return groups.neuron_groups(network(), np.ones(3, np.float32))


def first_weight(model):
    return model.layers[0].weight[0, 0] ** 2


def vectors_seen():
    """By the second hidden layer, of two inputs."""
    return seen.layer_inputs(network(), TALL[:2], ".layers[1].weight")


def layer():
    """Weights of a hidden layer of 4 neurons, between 3 inputs and 2 outputs."""
    generator = np.random.default_rng(1)
    return {"w_in": generator.standard_normal((4, 3)), "w_out": generator.standard_normal((2, 4))}


def bilinear_network(seed=0):
    """A bilinear network of 3 inputs, 4 hidden features and 2 outputs."""
    return bilinear.BilinearNetwork(3, 4, 2, key=jax.random.key(seed))


def spectrum(seed=0):
    """The spectrum of such a network."""
    return forms.decompose(bilinear_network(seed))


def moments():
    """Moments of 12 samples of 3 features in 3 classes."""
    return collapse.class_moments(TALL, np.arange(12) % 3, 3)


def joint():
    """Moments of two representations of 12 samples."""
    return streaming.joint_moments(TALL, OTHER)


def dataset():
    """Twenty images of 9 pixels in 2 classes."""
    generator = np.random.default_rng(2)
    images, labels = generator.random((20, 9)).astype(np.float32), np.eye(2, dtype=np.float32)[np.arange(20) % 2]
    return datasets.Dataset("small", images[:12], labels[:12], images[12:], labels[12:])


def noisy_call():
    """What the errors under noise share."""
    return {"model": network(), "images": TALL, "labels": np.arange(12) % 2, "scales": np.array([0.0, 0.5])}


def squared_error(model, batch, key):
    """A loss."""
    return ((jax.vmap(model)(batch[0]) - batch[1]) ** 2).mean()


def training_call():
    """Two members for two steps."""
    models = eqx.filter_vmap(lambda key: eqx.nn.MLP(3, 2, 5, 1, key=key))(jax.random.split(jax.random.key(0), 2))
    return {"models": models, "step": training_step(), "sampler": samplers.Epochs(PAIRS, 4), "num_steps": 2}


def training_step():
    """A step of stochastic gradient descent."""
    return state.make_step(squared_error, optax.sgd(0.1))


PAIRS = TALL, TALL[:, :2]
TIMES = np.array([3.0, 5.0, np.nan, 9.0, 4.0])
GRAMS = np.stack([TALL @ TALL.T, np.eye(12, dtype=np.float32)])
LABELS = np.arange(12) % 3
NUISANCE = {"neurons_per_group": 2, "key": KEY, "incoming_std": 0.5, "outgoing_std": 0.5}
PATTERN = {"inputs": TALL, "pattern": TALL[:, :2], "rtol": 1e-5}
PROBE = {"x": TALL, "y": LABELS, "num_splits": 2, "key": KEY}
SMALL = {"num_epochs": 1, "key": KEY}

CALLS = {
    datasets.Dataset: lambda: {
        "name": "mine",
        "train_images": TALL,
        "train_labels": np.arange(12) % 3,
        "test_images": TALL,
        "test_labels": np.arange(12) % 3,
    },
    layers.Affine: lambda: {"inputs": 3, "outputs": 2, "bias": True, "init": "lecun", "key": KEY},
    layers.Convolution: lambda: {"inputs": 1, "outputs": 2, "transposed": True, "init": "lecun", "key": KEY},
    perceptron.MLP: lambda: {"inputs": 3, "width": 4, "depth": 1, "activation": "tanh", "init": "lecun", "key": KEY},
    cnn.Encoder: lambda: {"features": 2, "init": "lecun", "key": KEY},
    cnn.Decoder: lambda: {"features": 2, "upsampling": "bilinear", "init": "lecun", "key": KEY},
    resnet.ResidualBlock: lambda: {"channels": 2, "init": "lecun", "key": KEY},
    resnet.ResNet: lambda: {"width": 3, "classes": 2, "channels": 2, "depth": 1, "init": "lecun", "key": KEY},
    transformer.TransformerBlock: lambda: {"size": 4, "heads": 2, "key": KEY},
    transformer.Transformer: lambda: (
        {"width": 3, "classes": 2, "init": "lecun", "key": KEY} | {"size": 4, "heads": 2, "depth": 1, "patch": 14}
    ),
    cnn.CNN: lambda: {"width": 3, "classes": 2, "last_activation": False, "init": "lecun", "key": KEY},
    bilinear.BilinearLayer: lambda: {"inputs": 3, "outputs": 2, "bias": True, "gate": "relu", "key": KEY},
    bilinear.BilinearNetwork: lambda: {"inputs": 3, "hidden": 4, "num_layers": 2, "residual": True, "key": KEY},
    glyphs.draw_glyph: lambda: {"templates": FONTS, "label": 3, "key": KEY, "border": 2},
    glyphs.draw_glyphs: lambda: {"templates": FONTS, "labels": DIGITS[:3], "key": KEY, "batch_size": 2},
    glyphs.glyph_labels: lambda: {"num": 12, "key": KEY},
    glyphs.glyph_data: lambda: {"num_train": 3, "num_test": 2, "key": KEY},
    tasks.least_prime_factor: lambda: {"number": 9},
    tasks.rotated_quarters: lambda: {"images": RANDOM.random((5, 16)), "key": KEY},
    tasks.coarse_labels: lambda: {"labels": DIGITS},
    tasks.coarse_grained: lambda: {"images": RANDOM.random((12, 16)), "labels": DIGITS, "key": KEY},
    linalg.centre: lambda: {"x": TALL},
    linalg.positive_inverse: lambda: {"matrix": POSITIVE},
    linalg.psd_power: lambda: {"matrix": POSITIVE, "power": 0.5, "rtol": 1e-6},
    linalg.nuclear_norm: lambda: {"matrix": TALL, "rtol": 1e-6},
    schedule.steps_per_epoch: lambda: {"num_samples": 10, "batch_size": 4, "drop_remainder": True},
    schedule.log_spaced_steps: lambda: {"num_steps": 10, "count": 4},
    initial.draw_weights: lambda: {"init": "lecun", "shape": (3, 4), "fan_in": 4, "key": KEY},
    layers.max_pool: lambda: {"x": RANDOM.random((4, 6, 2))},
    representations.representations: lambda: {"model": network(), "inputs": np.ones((4, 3))},
    representations.member_representations: lambda: {
        "models": jax.tree.map(lambda leaf: leaf[None] if eqx.is_array(leaf) else leaf, network()),
        "inputs": np.ones((4, 3)),
    },
    bilinear.wrap_bilinear: lambda: {"embed": np.eye(3), "layers": [(np.eye(3), np.eye(3))], "head": np.ones((2, 3))},
    neurons.scale_neurons: lambda: layer() | {"scale_factor": np.array([0.5, 1.0, 2.0, 3.0])},
    neurons.duplicate_neurons: lambda: layer() | {"duplicate_multiplier": 1.5},
    neurons.add_random_zero_neurons: lambda: layer() | {"num_zero_groups": 2} | NUISANCE,
    neurons.add_phantom_zero_neurons: lambda: layer() | PATTERN,
    symmetry.null_spectrum: lambda: {"dataset": TALL, "rtol": 1e-9},
    symmetry.null_basis: lambda: {"dataset": TALL, "rtol": 1e-9},
    symmetry.null_dimension: lambda: {"dataset": TALL, "rtol": 1e-9},
    symmetry.perturb_in_null_space: lambda: {"w_in": layer()["w_in"], "basis": np.eye(3)[:1], "scale": 0.1, "key": KEY},
    certificate.certify: lambda: {"original": network(), "rewritten": network(), "inputs": TALL, "batch_size": 5},
    noise.parameter_noise: lambda: {"model": network(), "key": KEY},
    noise.perturb_parameters: lambda: {
        "model": network(),
        "noise": noise.parameter_noise(network(), key=KEY),
        "scale": 0.1,
    },
    noise.add_parameter_noise: lambda: {"model": network(), "scale": 0.1, "key": KEY},
    groups.neuron_groups: lambda: {"model": network(), "example": np.ones(3, np.float32)},
    groups.group_report: lambda: {"model": network(), "example": np.ones(3, np.float32)},
    rewrites.permute: lambda: {"group": hidden(), "permutation": np.array([2, 0, 1, 3, 4])},
    rewrites.scale: lambda: {"group": hidden(), "factor": np.array([0.5, 1.0, 2.0, 3.0, 1.0]), "scaling": 0},
    growth.duplicate: lambda: {"group": hidden(), "multiplier": 1.5},
    growth.add_nuisance: lambda: {"group": hidden(), "num_groups": 2} | NUISANCE,
    rewrites.rotate: lambda: {"group": hidden("linear"), "matrix": np.diag(np.arange(1.0, 6.0))},
    growth.add_phantom: lambda: {"group": hidden(), "model": network()} | PATTERN,
    rewrites.null_space: lambda: {"seen": vectors_seen(), "rtol": 1e-9},
    rewrites.null_perturb: lambda: {"space": rewrites.null_space(vectors_seen()), "std": 0.1, "key": KEY},
    rewrites.compose: lambda: {"rewrites": [growth.duplicate(hidden(), 2.0)]},
    rewrites.check_groups: lambda: {"model": network(), "inputs": TALL, "key": KEY},
    seen.layer_inputs: lambda: {"model": network(), "inputs": TALL, "path": ".layers[1].weight"},
    neuron_matching.match_weights: lambda: two_networks() | {"groups": all_groups(), "num_starts": 3, "key": KEY},
    neuron_matching.match_activations: lambda: two_networks() | {"groups": all_groups(), "inputs": TALL},
    neuron_matching.interpolate: lambda: two_networks() | {"share": 0.5},
    neuron_matching.barrier: lambda: two_networks() | {"loss": first_weight, "num_points": 3},
    neuron_matching.barriers: lambda: {
        "loss": first_weight,
        "models": jax.tree.map(lambda leaf: np.stack([leaf] * 2) if eqx.is_array(leaf) else leaf, network()),
        "groups": all_groups(),
        "num_points": 3,
        "num_starts": 3,
        "key": KEY,
    },
    canonical_form.canonical: lambda: {"model": network(), "example": np.ones(3, np.float32), "tolerance": 1e-5},
    canonical_form.fingerprint: lambda: {"model": network(), "example": np.ones(3, np.float32), "tolerance": 1e-5},
    canonical_form.fingerprint_distance: lambda: {"a": TALL[:, 0], "b": TALL[:, 1]},
    freedom.cka_freedom: lambda: {"x": TALL, "reference": OTHER},
    freedom.linear_cka_freedom: lambda: {"x": TALL, "reference": OTHER},
    bounds.similarity_bounds: lambda: {"x": TALL, "y": OTHER, "num_steps": 2, "key": KEY},
    bmap.bmap: lambda: {"fun": np.sin, "batch_size": 2},
    members.member: lambda: {"models": {"weight": np.ones((3, 2))}, "index": 1},
    members.count: lambda: {"models": {"weight": np.ones((3, 2))}},
    members.stack: lambda: {"trees": [TALL, TALL], "axis": 1},
    members.concatenate: lambda: {"trees": [TALL, TALL], "axis": 1},
    members.map_members: lambda: {
        "function": lambda scale, x: scale * x,
        "shared": 2.0,
        "stacked": TALL,
        "member_map": "scan",
    },
    sharding.member_mesh: dict,
    sharding.pad_members: lambda: {"tree": TALL, "num_devices": 5},
    sharding.drop_padding: lambda: {"tree": TALL, "num_members": 5},
    sharding.place_members: lambda: {"tree": TALL, "mesh": sharding.member_mesh()},
    sharding.replicate: lambda: {"tree": TALL, "mesh": sharding.member_mesh()},
    checkpoint.fingerprint: lambda: {"tree": TALL},
    datasets.load: lambda: {"name": "glyphs", "num_train": 3, "num_test": 2, "key": KEY},
    mnist_files.parse_idx: lambda: {"contents": bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 6]), "source": "labels"},
    mnist.fresh_networks: lambda: {"num_seeds": 2, "key": KEY, "num_inputs": 3, "num_classes": 2, "width": 4},
    mnist.fit_mnist: lambda: SMALL | {"num_seeds": 2, "dataset": dataset(), "width": 4, "progress": None},
    mnist.train_mnist: lambda: SMALL | {"num_seeds": 2, "dataset": dataset(), "width": 4, "progress": None},
    mnist.cross_entropy: lambda: {"model": network(), "batch": (TALL, np.eye(2)[np.arange(12) % 2])},
    collapse.class_moments: lambda: {"features": TALL, "labels": LABELS, "num_classes": 3},
    collapse.merge_moments: lambda: {"a": moments(), "b": moments()},
    collapse.neural_collapse: lambda: {"moments": moments()},
    collapse.trace_ratio: lambda: {"moments": collapse.class_moments(TALL, np.arange(12) % 3, 3, scatter=True)},
    collapse.simplex_frame: lambda: {"moments": moments()},
    collapse.self_duality: lambda: {"moments": moments(), "classifier": np.eye(3)},
    collapse.nearest_centre_agreement: lambda: {"features": TALL, "logits": TALL, "moments": moments()},
    crossing.first_cross: lambda: {"x": np.arange(4.0), "y": np.arange(4.0), "threshold": 1.5, "direction": "above"},
    crossing.median_crossing: lambda: {"times": TIMES, "end": 10.0, "level": 0.9},
    crossing.log_slope: lambda: {"times": TIMES, "at": np.arange(1.0, 6.0), "end": 10.0, "level": 0.9},
    margins.linear_head: lambda: {"model": network()},
    margins.signed_distance: lambda: {
        "features": TALL,
        "weights": np.eye(3),
        "biases": np.zeros(3),
        "first": 0,
        "second": 1,
    },
    margins.class_plane: lambda: {"weights": np.eye(3), "biases": np.zeros(3), "first": 0, "second": 1, "rtol": 1e-5},
    robustness.error_rate: lambda: {"logits": TALL, "labels": LABELS},
    robustness.input_noise_error: lambda: noisy_call() | {"noise": TALL},
    robustness.parameter_noise_error: lambda: noisy_call() | {"noise": noise.parameter_noise(network(), key=KEY)},
    transfer.transfer_errors: lambda: {
        "features": TALL,
        "labels": LABELS,
        "key": KEY,
        "fractions": np.array([0.5, 1.0]),
        "num_splits": 2,
        "ridge": 1.0,
        "num_buckets": 1,
    },
    probes.crossval_softmax_predict: lambda: PROBE | {"ridge": 1.0},
    probes.crossval_softmax_fit: lambda: PROBE | {"ridge": 1.0},
    probes.crossval_gradient_predict: lambda: PROBE | {"num_steps": 3, "step_size": 0.1},
    probes.stable_step_size: lambda: {"x": TALL},
    hsic.gaussian_gram: lambda: {"x": TALL, "sigma": 5.0, "bandwidth": "dimension"},
    hsic.centred_gram: lambda: {"gram": GRAMS[0]},
    hsic.normalised_hsic: lambda: {"grams": GRAMS, "epsilon": 1e-3},
    hsic.shuffled_hsic: lambda: {"grams": GRAMS, "epsilon": 1e-3},
    hsic.information_plane: lambda: {
        "features": TALL,
        "inputs": TALL,
        "labels": LABELS,
        "key": KEY,
        "batch_size": 6,
        "num_passes": 1,
        "sigma": 5.0,
    },
    **{function: lambda: {"x": TALL, "y": OTHER} for function in TWO_ARRAYS},
    kernels.rbf_cka: lambda: {"x": TALL, "y": OTHER, "scale": 0.8},
    kernels.debiased_rbf_cka: lambda: {"x": TALL, "y": OTHER, "scale": 0.8},
    shapes.partial_whitening_distance: lambda: {"x": TALL, "y": OTHER, "a": 0.3},
    canonical.svcca: lambda: {"x": TALL, "y": OTHER, "variance": 0.9},
    canonical.gulp_distance: lambda: {"x": TALL, "y": OTHER, "lam": 0.1},
    dissimilarity.rsa: lambda: {"x": TALL, "y": OTHER, "rdm": "cosine", "comparison": "kendall"},
    dissimilarity.crossnobis_rsa: lambda: {"x": TALL, "y": OTHER, "comparison": "pearson"},
    dissimilarity.rdm: lambda: {"x": TALL, "kind": "squared"},
    dissimilarity.filled: lambda: {"pairs": np.arange(6.0)},
    dissimilarity.compare_rdms: lambda: {"a": TALL[:, 0], "b": TALL[:, 1], "comparison": "spearman"},
    dissimilarity.crossnobis_rdm: lambda: {"a": TALL, "b": TALL[::-1], "noise_covariance": POSITIVE},
    neighbourhoods.mutual_knn: lambda: {"x": TALL, "y": OTHER, "num_neighbours": 3},
    neighbourhoods.knn_jaccard: lambda: {"x": TALL, "y": OTHER, "num_neighbours": 3},
    predictivity.linear_predictivity: lambda: {"x": TALL, "y": OTHER, "alpha": 0.1, "num_folds": 3},
    predictivity.predictivity_path: lambda: {"x": TALL, "y": OTHER, "alphas": np.array([0.1, 1.0]), "num_folds": 3},
    functional.disagreement: lambda: {"x": TALL, "y": TALL[::-1]},
    functional.jensen_shannon: lambda: {"x": TALL, "y": TALL[::-1]},
    functional.min_max_disagreement: lambda: {"x": TALL, "y": TALL[::-1], "labels": np.arange(12) % 3},
    inference.jackknife_interval: lambda: {"values": TALL[0], "leave_outs": TALL, "level": 0.9},
    inference.permutation_test: (
        lambda: {"measure": "linear_cka", "x": TALL, "y": OTHER, "key": KEY, "num_draws": 5, "level": 0.9},
        lambda: {"measure": "debiased_cka", "x": TALL, "y": OTHER, "num_draws": None},
    ),
    inference.calibrate: lambda: {"value": TALL[0], "null_quantile": TALL[1], "best": 1.0},
    inference.adjust_p_values: lambda: {"p_values": np.array([0.1, 0.5]), "method": "bh"},
    inference.member_interval: lambda: {"values": np.corrcoef(TALL), "level": 0.9},
    pairs.flatten_positions: lambda: {"features": np.ones((3, 2, 2, 4)), "positions": "samples"},
    pairs.pairwise: lambda: {
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
    pairs.compare: lambda: {"x": TALL, "y": OTHER, "measure": "linear_cka", "num_blocks": 3, "p_values": False},
    streaming.merge_joint_moments: lambda: {"a": joint(), "b": joint()},
    streaming.baseline_from_moments: lambda: {"moments": joint(), "measure": "cca_squared"},
    streaming.similarity_from_moments: lambda: {"moments": joint(), "measure": "linear_cka"},
    streaming.predictivity_from_moments: lambda: {
        "folds": [joint(), joint()],
        "source": 1,
        "target": 0,
        "alpha": 0.1,
    },
    embedding.classical_mds: lambda: {"distances": DISTANCES, "num_dims": 2},
    embedding.smacof: lambda: {"distances": DISTANCES, "num_dims": 2, "key": KEY, "num_starts": 2, "max_steps": 9},
    nearest.entropy_weights: lambda: {"num_neighbours": 5, "dimension": 4},
    nearest.entropy: lambda: {"points": TALL, "num_neighbours": 2},
    nearest.information: (
        lambda: {"x": SAMPLES[:, :1], "z": SAMPLES[:, :1] + SAMPLES[:, 1:], "num_neighbours": 3},
        lambda: {"x": SAMPLES[:, :1], "z": SAMPLES[:, :1] + SAMPLES[:, 1:], "estimator": "kraskov"},
    ),
    nearest.label_information: lambda: {"z": SAMPLES, "labels": np.arange(100) % 3, "num_classes": 3},
    coordinates.whiten: lambda: {"points": TALL, "num_components": 2, "rtol": 1e-6},
    smoothed.smoothed_information: lambda: {"features": TALL, "labels": LABELS, "noise": 0.5, "key": KEY},
    bilinear_recipe.loss_and_accuracy: lambda: {
        "model": bilinear_network(),
        "images": TALL,
        "labels": np.eye(2)[np.arange(12) % 2],
    },
    bilinear_recipe.train_bilinear: lambda: (
        SMALL | {"dataset": dataset(), "hidden": 3, "num_seeds": 2, "batch_size": 6}
    ),
    compression.train_compression: lambda: SMALL | {"images": np.zeros((4, 784)), "code": 2, "batch_size": 2},
    grokking.standardised: lambda: {"images": TALL},
    grokking.train_grokking: lambda: {
        "dataset": dataset(),
        "weight_decays": (0.1,),
        "seeds": (0,),
        "num_steps": 2,
        "num_train": 8,
        "batch_size": 4,
        "options": {"width": 4},
    },
    grokking.observation_steps: lambda: {"num_steps": 10},
    distances.margins: lambda: {"source": spectrum()},
    distances.certified_radius: lambda: {"source": distances.margins(spectrum()), "x": TALL[0], "label": 1},
    distances.certified_accuracy: lambda: {"radii": TALL[:, 0], "levels": np.array([0.0, 0.1])},
    forms.activations: lambda: {"spectrum": spectrum(), "x": TALL},
    forms.contributions: lambda: {"spectrum": spectrum(), "x": TALL},
    forms.mean_contribution: lambda: {"spectrum": spectrum(), "x": TALL},
    forms.truncated_outputs: lambda: {"spectrum": spectrum(), "x": TALL},
    forms.adversarial_mask: lambda: {"spectrum": spectrum(), "output": 0, "component": 0, "against": 1, "norm": 1.0},
    forms.decompose: lambda: {
        "model": bilinear_network(),
        "directions": np.eye(4)[:2],
        "layer": 0,
        "space": "input",
        "by": "magnitude",
    },
    forms.interaction_tensor: lambda: {"model": bilinear_network(), "directions": np.eye(4)[:2], "layer": 0},
    forms.reorder: lambda: {"spectrum": spectrum(), "importance": np.ones(spectrum().values.shape)},
    forms.truncate: lambda: {"spectrum": spectrum(), "num_components": 2},
    similarity.overlaps: lambda: {"a": spectrum(), "b": spectrum(1)},
    similarity.rank_similarity: lambda: {"a": spectrum(), "b": spectrum(1)},
    similarity.matched_similarity: lambda: {"a": spectrum(), "b": spectrum(1), "num_components": 2},
    similarity.form_similarity: lambda: {"a": spectrum(), "b": spectrum(1)},
    similarity.member_pairs: lambda: {"num_members": 4, "other": 3},
    similarity.pair_mean: lambda: {
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
    grids.fit_grid: lambda: {
        "init": lambda key: eqx.nn.Linear(TALL.shape[1], 2, key=key),
        "step": state.make_step(squared_error, lambda values: optax.sgd(values["rate"])),
        "sampler": samplers.Epochs(PAIRS, 4),
        "grid": Grid(rate=[0.1, 0.2], seed=[0, 1]),
        "key": KEY,
        "num_steps": 2,
        "fresh": False,
        "memory_budget": 2**34,
        "progress": None,
    },
    fitting.fit: lambda: training_call() | {"key": KEY, "same_program": False},
    loop.train: lambda: {
        "state": training_step().init(network()),
        "step": training_step(),
        "sampler": samplers.Epochs(PAIRS, 4),
        "num_steps": 2,
        "key": KEY,
        "first_step": 1,
    },
    state.make_step: lambda: {"loss": squared_error, "optimizer": optax.sgd(0.1), "micro_batches": 2},
    samplers.FullBatch: lambda: {"data": PAIRS, "stacked": False},
    samplers.Epochs: lambda: {
        "data": PAIRS,
        "batch_size": 4,
        "shared": True,
        "shuffle": True,
        "drop_remainder": False,
        "stacked": False,
    },
    samplers.Online: lambda: {"draw": jax.random.normal, "shared": True, "stacked": False},
    samplers.HostBatches: lambda: {"start": lambda step: iter([PAIRS]), "epoch_steps": 2, "block": 4},
    callbacks.CsvLog: lambda: {"path": "log.csv", "columns": {"rate": [0.1, 0.2]}},
    callbacks.EarlyStop: lambda: {"name": "loss", "patience": 2, "least_change": 0.1, "rising": False},
    sweeps.Grid.keys: lambda: {"self": sweeps.Grid(seed=[0, 1]), "key": KEY, "name": "seed"},
}
