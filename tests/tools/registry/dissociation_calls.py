"""Valid calls of the public functions of `dissociation`."""

import equinox as eqx
import jax
import numpy as np
import optax

import dissociation
from dissociation import (
    bilinear,
    data,
    linear,
    measures,
    models,
    recipes,
    rewrites,
    similarity,
    training,
)
from dissociation.fig4 import expand

RANDOM = np.random.default_rng(0)
TALL = RANDOM.standard_normal((12, 3)).astype(np.float32)
POSITIVE = TALL.T @ TALL
SAMPLES = np.random.default_rng(1).standard_normal((100, 2)).astype(np.float32)

OTHER = np.random.default_rng(2).standard_normal((12, 2)).astype(np.float32)
DISTANCES = np.linalg.norm(TALL[:, None, :2] - TALL[None, :, :2], axis=2)

DIGITS = RANDOM.integers(0, 10, 12)
FONTS = RANDOM.standard_normal((2, 10, 57, 57)).astype(np.float32)
KEY = np.array([0, 1], np.uint32)  # raw: making a typed one would start a backend


def network(**options):
    """Return a perceptron of 3 inputs, two hidden layers of 5 and 2 outputs."""
    return eqx.nn.MLP(3, 2, 5, 2, key=jax.random.key(1), **options)


def all_groups(**options):
    return rewrites.neuron_groups(network(**options), np.ones(3, np.float32))


def hidden(**options):
    """Return a group of 5 neurons of `network()`."""
    return all_groups(**options)["layers[1]"]


def two_networks():
    return {"a": network(), "b": network()}


def first_weight(model):
    return model.layers[0].weight[0, 0] ** 2


def vectors_seen():
    """Return the inputs of the second hidden layer for two examples."""
    return rewrites.layer_inputs(network(), TALL[:2], ".layers[1].weight")


def layer():
    """Return the weights of a hidden layer of 4 neurons, between 3 inputs and 2 outputs."""
    generator = np.random.default_rng(1)
    return {"w_in": generator.standard_normal((4, 3)), "w_out": generator.standard_normal((2, 4))}


def bilinear_network(seed=0):
    """Return a bilinear network of 3 inputs, 4 hidden features and 2 outputs."""
    return models.BilinearNetwork(3, 4, 2, key=jax.random.key(seed))


def spectrum(seed=0):
    """Return the spectrum of `bilinear_network()`."""
    return bilinear.decompose(bilinear_network(seed))


def moments():
    """Return the moments of 12 samples of 3 features in 3 classes."""
    return measures.class_moments(TALL, np.arange(12) % 3, 3)


def joint():
    """Return the moments of two representations of 12 samples."""
    return similarity.stream_moments([(TALL, OTHER)])


def dataset():
    """Return twenty images of 9 pixels in 2 classes."""
    generator = np.random.default_rng(2)
    images, labels = (
        generator.random((20, 9)).astype(np.float32),
        np.eye(2, dtype=np.float32)[np.arange(20) % 2],
    )
    return data.Dataset("small", images[:12], labels[:12], images[12:], labels[12:])


def noisy_call():
    """Return the common arguments of errors under noise."""
    return {
        "model": network(),
        "images": TALL,
        "labels": np.arange(12) % 2,
        "scales": np.array([0.0, 0.5]),
    }


def squared_error(model, batch, key):
    """Return a squared error."""
    return ((jax.vmap(model)(batch[0]) - batch[1]) ** 2).mean()


def training_call():
    """Return arguments that train two members for two steps."""
    models = eqx.filter_vmap(lambda key: eqx.nn.MLP(3, 2, 5, 1, key=key))(
        jax.random.split(jax.random.key(0), 2)
    )
    return {
        "models": models,
        "step": training_step(),
        "sampler": training.Epochs(PAIRS, 4),
        "num_steps": 2,
    }


def training_step():
    """Return a step of stochastic gradient descent."""
    return training.make_step(squared_error, optax.sgd(0.1))


def linear_call():
    """Return a task of 12 samples, 3 inputs and 2 outputs, and a solution of 4 hidden units."""
    task = linear.make_task(TALL, OTHER)
    return {"task": task, "network": linear.LSS.sample(task, 4, key=KEY)}


def white_call():
    """Return a task of white inputs, and a balanced network."""
    task = linear.make_task(np.linalg.qr(TALL)[0], OTHER)
    return {"task": task, "network": linear.balanced_network(task, 4, 0.1, key=KEY)}


PAIRS = TALL, TALL[:, :2]
TIMES = np.array([3.0, 5.0, np.nan, 9.0, 4.0])
LABELS = np.arange(12) % 3
NUISANCE = {"neurons_per_group": 2, "key": KEY, "incoming_std": 0.5, "outgoing_std": 0.5}
PATTERN = {"inputs": TALL, "pattern": TALL[:, :2], "rtol": 1e-5}
PROBE = {"x": TALL, "y": LABELS, "num_splits": 2, "key": KEY}
SMALL = {"num_epochs": 1, "key": KEY}

CALLS = {
    data.Dataset: lambda: dict(
        name="mine",
        train_images=TALL,
        train_labels=np.arange(12) % 3,
        test_images=TALL,
        test_labels=np.arange(12) % 3,
    ),
    models.Affine: lambda: dict(inputs=3, outputs=2, bias=True, init="lecun", key=KEY),
    models.Convolution: lambda: dict(inputs=1, outputs=2, transposed=True, init="lecun", key=KEY),
    models.MLP: lambda: dict(inputs=3, width=4, depth=1, activation="tanh", init="lecun", key=KEY),
    models.Encoder: lambda: dict(features=2, init="lecun", key=KEY),
    models.ResNet: lambda: dict(width=3, classes=2, channels=2, depth=1, init="lecun", key=KEY),
    models.Transformer: lambda: (
        dict(width=3, classes=2, init="lecun", key=KEY) | dict(size=4, heads=2, depth=1, patch=14)
    ),
    models.CNN: lambda: dict(width=3, classes=2, last_activation=False, init="lecun", key=KEY),
    models.BilinearNetwork: lambda: dict(inputs=3, hidden=4, num_layers=2, residual=True, key=KEY),
    data.draw_glyphs: lambda: dict(templates=FONTS, labels=DIGITS[:3], key=KEY, batch_size=2),
    data.glyph_data: lambda: dict(num_train=3, num_test=2, key=KEY),
    data.rotated_quarters: lambda: dict(images=RANDOM.random((5, 16)), key=KEY),
    data.coarse_grained: lambda: dict(images=RANDOM.random((12, 16)), labels=DIGITS, key=KEY),
    training.log_spaced_steps: lambda: dict(num_steps=10, count=4),
    models.representations: lambda: dict(model=network(), inputs=np.ones((4, 3))),
    models.layer_shapes: lambda: dict(model=network(), example=np.ones(3, np.float32)),
    models.intervene: lambda: dict(model=network(), functions={"layers[0]()": np.abs}),
    models.member_representations: lambda: dict(
        models=jax.tree.map(lambda leaf: leaf[None] if eqx.is_array(leaf) else leaf, network()),
        inputs=np.ones((4, 3)),
    ),
    models.wrap_bilinear: lambda: dict(
        embed=np.eye(3), layers=[(np.eye(3), np.eye(3))], head=np.ones((2, 3))
    ),
    expand.scale_neurons: lambda: layer() | dict(scale_factor=np.array([0.5, 1.0, 2.0, 3.0])),
    expand.duplicate_neurons: lambda: layer() | dict(duplicate_multiplier=1.5),
    expand.add_random_zero_neurons: lambda: layer() | dict(num_zero_groups=2) | NUISANCE,
    expand.add_phantom_zero_neurons: lambda: layer() | PATTERN,
    rewrites.null_dimension: lambda: dict(dataset=TALL, rtol=1e-9),
    rewrites.certify: lambda: dict(
        original=network(), rewritten=network(), inputs=TALL, batch_size=5
    ),
    rewrites.parameter_noise: lambda: dict(model=network(), key=KEY),
    rewrites.add_parameter_noise: lambda: dict(model=network(), scale=0.1, key=KEY),
    rewrites.neuron_groups: lambda: dict(model=network(), example=np.ones(3, np.float32)),
    rewrites.group_report: lambda: dict(model=network(), example=np.ones(3, np.float32)),
    rewrites.permute: lambda: dict(group=hidden(), permutation=np.array([2, 0, 1, 3, 4])),
    rewrites.scale: lambda: dict(
        group=hidden(), factor=np.array([0.5, 1.0, 2.0, 3.0, 1.0]), scaling=0
    ),
    rewrites.duplicate: lambda: dict(group=hidden(), multiplier=1.5),
    rewrites.add_nuisance: lambda: dict(group=hidden(), num_groups=2) | NUISANCE,
    rewrites.rotate: lambda: dict(
        group=hidden(activation=lambda x: x), matrix=np.diag(np.arange(1.0, 6.0))
    ),
    rewrites.plant_rsm: lambda: dict(
        group=hidden(),
        model=network(),
        inputs=TALL,
        rsm=DISTANCES,
        num_neurons=3,
        largest=10.0,
        key=KEY,
    ),
    rewrites.plant_activity: lambda: dict(
        group=hidden(),
        model=network(),
        inputs=TALL,
        pattern=TALL @ TALL[:5].T,
        num_passes=1,
        batch_size=3,
        key=KEY,
    ),
    rewrites.add_phantom: lambda: dict(group=hidden(), model=network()) | PATTERN,
    rewrites.null_space: lambda: dict(seen=vectors_seen(), rtol=1e-9),
    rewrites.null_perturb: lambda: dict(
        space=rewrites.null_space(vectors_seen()), std=0.1, key=KEY
    ),
    rewrites.compose: lambda: dict(rewrites=[rewrites.duplicate(hidden(), 2.0)]),
    rewrites.check_groups: lambda: dict(model=network(), inputs=TALL, key=KEY),
    rewrites.layer_inputs: lambda: dict(model=network(), inputs=TALL, path=".layers[1].weight"),
    rewrites.match_weights: lambda: (
        two_networks() | dict(groups=all_groups(), num_starts=3, key=KEY)
    ),
    rewrites.match_activations: lambda: two_networks() | dict(groups=all_groups(), inputs=TALL),
    rewrites.interpolate: lambda: two_networks() | dict(share=0.5),
    rewrites.barrier: lambda: two_networks() | dict(loss=first_weight, num_points=3),
    rewrites.barriers: lambda: dict(
        loss=first_weight,
        models=jax.tree.map(
            lambda leaf: np.stack([leaf] * 2) if eqx.is_array(leaf) else leaf, network()
        ),
        groups=all_groups(),
        num_points=3,
        num_starts=3,
        key=KEY,
    ),
    rewrites.canonical: lambda: dict(
        model=network(), example=np.ones(3, np.float32), tolerance=1e-5
    ),
    rewrites.fingerprint: lambda: dict(
        model=network(), example=np.ones(3, np.float32), tolerance=1e-5
    ),
    rewrites.fingerprint_distance: lambda: dict(a=TALL[:, 0], b=TALL[:, 1]),
    rewrites.cka_range: lambda: dict(x=TALL, reference=OTHER),
    rewrites.linear_cka_range: lambda: dict(x=TALL, reference=OTHER),
    rewrites.similarity_bounds: lambda: dict(x=TALL, y=OTHER, num_steps=2, key=KEY),
    dissociation.bmap: lambda: dict(fun=np.sin, batch_size=2),
    dissociation.member: lambda: dict(models=dict(weight=np.ones((3, 2))), index=1),
    dissociation.map_members: lambda: dict(
        function=lambda scale, x: scale * x, shared=2.0, stacked=TALL, member_map="scan"
    ),
    dissociation.member_mesh: dict,
    data.load: lambda: dict(name="glyphs", num_train=3, num_test=2, key=KEY),
    recipes.fresh_networks: lambda: dict(
        num_seeds=2, key=KEY, num_inputs=3, num_classes=2, width=4
    ),
    recipes.fit_classifiers: lambda: (
        SMALL | dict(num_seeds=2, dataset=dataset(), width=4, progress=None)
    ),
    recipes.train_mnist: lambda: (
        SMALL | dict(num_seeds=2, dataset=dataset(), width=4, progress=None)
    ),
    recipes.cross_entropy: lambda: dict(
        model=network(), batch=(TALL, np.eye(2)[np.arange(12) % 2])
    ),
    measures.class_moments: lambda: dict(features=TALL, labels=LABELS, num_classes=3),
    measures.merge_moments: lambda: dict(a=moments(), b=moments()),
    measures.neural_collapse: lambda: dict(moments=moments()),
    measures.first_cross: lambda: dict(
        x=np.arange(4.0), y=np.arange(4.0), threshold=1.5, direction="above"
    ),
    measures.median_crossing: lambda: dict(times=TIMES, end=10.0, level=0.9),
    measures.log_slope: lambda: dict(times=TIMES, at=np.arange(1.0, 6.0), end=10.0, level=0.9),
    measures.linear_head: lambda: dict(model=network()),
    measures.error_rate: lambda: dict(logits=TALL, labels=LABELS),
    measures.input_noise_error: lambda: noisy_call() | dict(noise=TALL),
    measures.parameter_noise_error: lambda: (
        noisy_call() | dict(noise=rewrites.parameter_noise(network(), key=KEY))
    ),
    measures.transfer_errors: lambda: dict(
        features=TALL,
        labels=LABELS,
        key=KEY,
        fractions=np.array([0.5, 1.0]),
        num_splits=2,
        ridge=1.0,
        num_buckets=1,
    ),
    measures.linear_probe: lambda: PROBE | dict(ridge=1.0),
    measures.linear_probe_fit: lambda: PROBE | dict(ridge=1.0),
    measures.gradient_probe: lambda: PROBE | dict(num_steps=3, step_size=0.1),
    measures.information_plane: lambda: dict(
        features=TALL, inputs=TALL, labels=LABELS, key=KEY, batch_size=6, num_passes=1, sigma=5.0
    ),
    **{getattr(similarity, name): lambda: dict(x=TALL, y=OTHER) for name in similarity.MEASURES},
    similarity.rbf_cka: lambda: dict(x=TALL, y=OTHER, scale=0.8),
    similarity.debiased_rbf_cka: lambda: dict(x=TALL, y=OTHER, scale=0.8),
    similarity.partial_whitening_distance: lambda: dict(x=TALL, y=OTHER, a=0.3),
    similarity.svcca: lambda: dict(x=TALL, y=OTHER, variance=0.9),
    similarity.gulp_distance: lambda: dict(x=TALL, y=OTHER, lam=0.1),
    similarity.rsa: lambda: dict(x=TALL, y=OTHER, rdm="cosine", comparison="kendall"),
    similarity.crossnobis_rsa: lambda: dict(x=TALL, y=OTHER, comparison="pearson"),
    similarity.rdm: lambda: dict(x=TALL, kind="squared"),
    similarity.compare_rdms: lambda: dict(a=TALL[:, 0], b=TALL[:, 1], comparison="spearman"),
    similarity.crossnobis_rdm: lambda: dict(a=TALL, b=TALL[::-1], noise_covariance=POSITIVE),
    similarity.mutual_knn: lambda: dict(x=TALL, y=OTHER, num_neighbours=3),
    similarity.knn_jaccard: lambda: dict(x=TALL, y=OTHER, num_neighbours=3),
    similarity.linear_predictivity: lambda: dict(x=TALL, y=OTHER, alpha=0.1, num_folds=3),
    similarity.predictivity_path: lambda: dict(
        x=TALL, y=OTHER, alphas=np.array([0.1, 1.0]), num_folds=3
    ),
    similarity.disagreement: lambda: dict(x=TALL, y=TALL[::-1]),
    similarity.jensen_shannon: lambda: dict(x=TALL, y=TALL[::-1]),
    similarity.min_max_disagreement: lambda: dict(x=TALL, y=TALL[::-1], labels=np.arange(12) % 3),
    similarity.jackknife_interval: lambda: dict(values=TALL[0], leave_outs=TALL, level=0.9),
    similarity.permutation_test: (
        lambda: dict(measure="linear_cka", x=TALL, y=OTHER, key=KEY, num_draws=5, level=0.9)
    ),
    similarity.calibrate: lambda: dict(value=TALL[0], null_quantile=TALL[1], best=1.0),
    similarity.adjust_p_values: lambda: dict(p_values=np.array([0.1, 0.5]), method="bh"),
    similarity.member_interval: lambda: dict(values=np.corrcoef(TALL), level=0.9),
    similarity.pairwise: lambda: dict(
        measure="linear_cka",
        representations=dict(a=TALL, b=OTHER),
        baseline=True,
        p_values=True,
        num_orders=3,
        key=KEY,
        num_blocks=3,
        blocks="contiguous",
        level=0.9,
        memory_budget=10**6,
    ),
    similarity.compare: lambda: dict(
        x=TALL, y=OTHER, measure="linear_cka", num_blocks=3, p_values=False
    ),
    similarity.baseline_from_moments: lambda: dict(moments=joint(), measure="debiased_cka"),
    similarity.similarity_from_moments: lambda: dict(moments=joint(), measure="linear_cka"),
    similarity.classical_mds: lambda: dict(distances=DISTANCES, num_dims=2),
    similarity.smacof: lambda: dict(
        distances=DISTANCES, num_dims=2, key=KEY, num_starts=2, max_steps=9
    ),
    measures.entropy_weights: lambda: dict(num_neighbours=5, dimension=4),
    measures.entropy: lambda: dict(points=TALL, num_neighbours=2),
    measures.information: (
        lambda: dict(x=SAMPLES[:, :1], z=SAMPLES[:, :1] + SAMPLES[:, 1:], num_neighbours=3),
        lambda: dict(x=SAMPLES[:, :1], z=SAMPLES[:, :1] + SAMPLES[:, 1:], estimator="kraskov"),
    ),
    measures.label_information: lambda: dict(z=SAMPLES, labels=np.arange(100) % 3, num_classes=3),
    measures.whiten: lambda: dict(points=TALL, num_components=2, rtol=1e-6),
    measures.smoothed_information: lambda: dict(features=TALL, labels=LABELS, noise=0.5, key=KEY),
    recipes.train_bilinear: lambda: (
        SMALL | dict(dataset=dataset(), hidden=3, num_seeds=2, batch_size=6)
    ),
    recipes.train_compression: lambda: (
        SMALL | dict(images=np.zeros((4, 784)), code=2, batch_size=2)
    ),
    recipes.train_grokking: lambda: dict(
        dataset=dataset(),
        weight_decays=(0.1,),
        seeds=(0,),
        num_steps=2,
        num_train=8,
        batch_size=4,
        options=dict(width=4),
    ),
    recipes.observation_steps: lambda: dict(num_steps=10),
    bilinear.margins: lambda: dict(source=spectrum()),
    linear.make_task: lambda: dict(x=TALL, y=OTHER, rtol=1e-6),
    linear.random_task: lambda: dict(
        num_samples=12,
        num_inputs=4,
        num_outputs=3,
        rank=2,
        input_rank=3,
        condition=2.0,
        noise=0.1,
        key=KEY,
    ),
    linear.teacher_task: lambda: dict(
        x=TALL, weights=[TALL[:4], TALL[:2, :1] * np.ones(4)], noise=0.1, key=KEY
    ),
    linear.hierarchy_task: lambda: dict(parents=np.array([-1, 0, 0, 1, 1]), x=TALL[:3]),
    linear.complete_tree: lambda: dict(depth=2, branching=3),
    linear.Family: lambda: dict(name="GLS"),
    linear.placement: linear_call,
    linear.expected_loss: lambda: linear_call() | dict(noise=linear.Noise(0.1, 0.1, 0.1)),
    linear.simulated_loss: lambda: (
        linear_call() | dict(noise=linear.Noise(0.1, 0.1, 0.1), num_draws=4, key=KEY)
    ),
    linear.noise_minimiser: lambda: dict(
        task=linear_call()["task"], hidden=4, noise=linear.Noise(0, 0.1, 0.1), key=KEY
    ),
    linear.least_loss: lambda: dict(
        task=linear_call()["task"], hidden=4, noise=linear.Noise(0, 0.1, 0.1)
    ),
    linear.fresh_loss: lambda: dict(
        network=linear_call()["network"], teacher=TALL[:2], covariance=POSITIVE
    ),
    linear.second_readout_loss: lambda: dict(network=linear_call()["network"], x=TALL, y=OTHER),
    linear.least_norm: lambda: dict(task=linear_call()["task"], depth=3),
    linear.least_norm_network: lambda: dict(task=linear_call()["task"], widths=[3, 4], key=KEY),
    linear.deep_residual: linear_call,
    linear.balanced_network: lambda: dict(task=linear_call()["task"], hidden=4, scale=0.1, key=KEY),
    linear.gradient_flow: lambda: white_call() | dict(times=np.array([0.1, 0.5])),
    linear.plurality: lambda: dict(
        task=linear_call()["task"],
        family=linear.GLS,
        hidden=4,
        measures=["linear_cka"],
        num_pairs=2,
        key=KEY,
    ),
    linear.plant: lambda: dict(task=linear_call()["task"], pattern=np.tile(OTHER, 2), least=0.1),
    linear.plant_rsm: lambda: dict(
        task=linear_call()["task"], rsm=TALL @ TALL.T, hidden=4, least=0.1
    ),
    bilinear.certified_radius: lambda: dict(
        source=bilinear.margins(spectrum()), x=TALL[0], label=1
    ),
    bilinear.certified_accuracy: lambda: dict(radii=TALL[:, 0], levels=np.array([0.0, 0.1])),
    bilinear.truncated_outputs: lambda: dict(spectrum=spectrum(), x=TALL),
    bilinear.adversarial_mask: lambda: dict(
        spectrum=spectrum(), output=0, component=0, against=1, norm=1.0
    ),
    bilinear.decompose: lambda: dict(
        model=bilinear_network(), directions=np.eye(4)[:2], layer=0, space="input", by="magnitude"
    ),
    bilinear.interaction_tensor: lambda: dict(
        model=bilinear_network(), directions=np.eye(4)[:2], layer=0
    ),
    bilinear.truncate: lambda: dict(spectrum=spectrum(), num_components=2),
    bilinear.rank_similarity: lambda: dict(a=spectrum(), b=spectrum(1)),
    bilinear.matched_similarity: lambda: dict(a=spectrum(), b=spectrum(1), num_components=2),
    bilinear.form_similarity: lambda: dict(a=spectrum(), b=spectrum(1)),
    bilinear.pair_mean: lambda: dict(
        values=np.arange(3.0), first=np.array([0, 0, 1]), second=np.array([1, 2, 2])
    ),
    training.fit_grid: lambda: dict(
        init=lambda key: eqx.nn.Linear(TALL.shape[1], 2, key=key),
        step=training.make_step(squared_error, lambda values: optax.sgd(values["rate"])),
        sampler=training.Epochs(PAIRS, 4),
        grid=training.Grid(rate=[0.1, 0.2], seed=[0, 1]),
        key=KEY,
        num_steps=2,
        fresh=False,
        memory_budget=2**34,
        progress=None,
    ),
    training.fit: lambda: training_call() | dict(key=KEY, same_program=False),
    training.train: lambda: dict(
        state=training_step().init(network()),
        step=training_step(),
        sampler=training.Epochs(PAIRS, 4),
        num_steps=2,
        key=KEY,
        first_step=1,
    ),
    training.make_step: lambda: dict(loss=squared_error, optimizer=optax.sgd(0.1), micro_batches=2),
    training.FullBatch: lambda: dict(data=PAIRS, stacked=False),
    training.Epochs: lambda: dict(
        data=PAIRS, batch_size=4, shared=True, shuffle=True, drop_remainder=False, stacked=False
    ),
    training.Online: lambda: dict(draw=jax.random.normal, shared=True, stacked=False),
    training.HostBatches: lambda: dict(start=lambda step: iter([PAIRS]), epoch_steps=2, block=4),
    training.CsvLog: lambda: dict(path="log.csv", columns=dict(rate=[0.1, 0.2])),
    training.EarlyStop: lambda: dict(name="loss", patience=2, least_change=0.1, rising=False),
    training.Grid.keys: lambda: dict(self=training.Grid(seed=[0, 1]), key=KEY, name="seed"),
}
