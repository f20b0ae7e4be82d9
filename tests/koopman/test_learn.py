from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from words import refused

import koopman
from dissociation import member
from dissociation.data import load
from dissociation.models import Affine
from koopman import (
    Autoencoder,
    FeatureMap,
    Ridge,
    autoencoder_loss,
    eigenvalues,
    encode,
    lagged_pairs,
    train_encoders,
    validation_loss,
)
from koopman._encoders._learn import pair_loss, reconstruction_loss
from koopman.datasets import linear_system, ordered_mnist


@pytest.fixture(scope="module")
def digits():
    return ordered_mnist(5, data=load("glyphs", num_train=1300, num_test=20, key=jax.random.key(0)))


def adamw(rate):
    return optax.adamw(rate, weight_decay=0.01)


@pytest.mark.slow
def test_features_of_norm_one_wait_on_a_plateau_that_others_leave(digits):
    """A constant feature has the loss -1, five classes told apart -5."""
    train, held_out = lagged_pairs([digits.images[:460]]), lagged_pairs([digits.images[460:560]])
    options = {"validation": held_out, "key": jax.random.key(0), "num_seeds": 1, "num_epochs": 30}
    for norm, leaves in ((5**0.5, True), (1.0, False)):  # 1 as published
        network = partial(FeatureMap, feature_norm=norm)
        result = train_encoders(
            lambda key, make=network: make(key=key), "contrastive", train, **options
        )
        assert (result.history.observed[0, -1] < -1.15) == leaves


@pytest.mark.slow
def test_members_do_not_depend_on_their_company(digits):
    options = {"key": jax.random.key(1), "num_seeds": 2, "num_epochs": 1}
    make = lambda key: FeatureMap(feature_norm=5**0.5, key=key)  # noqa: E731
    train = partial(train_encoders, make, "vamp", lagged_pairs([digits.images[:140]]), **options)
    weights = [np.asarray(train().models.encoder.head.weight) for _ in range(2)]
    np.testing.assert_array_equal(*weights)
    assert np.abs(weights[0][0] - weights[0][1]).max() > 0.01
    # A rate per seed: the first as before, the second another.
    swept = train(optimizer=adamw, hyperparams=np.asarray([2e-3, 1e-3], np.float32))
    changed = np.asarray(swept.models.encoder.head.weight)
    np.testing.assert_array_equal(changed[0], weights[0][0])
    assert np.abs(changed[1] - weights[0][1]).max() > 1e-3
    # A schedule: the same where it is constant, and step by step where it is not (139 pairs, three
    # batches).
    for schedule, same in (
        (lambda step: 2e-3, True),
        (optax.piecewise_constant_schedule(2e-3, {2: 0.0}), False),
    ):
        swept = train(optimizer=adamw(schedule))
        assert np.array_equal(swept.models.encoder.head.weight, weights[0]) == same


@pytest.mark.slow
def test_the_loss_of_autoencoders_does_not_see_the_size_of_features(trajectories):
    networks = {"encoder": linear(5, 2), "decoder": linear(2, 5)}
    model = Autoencoder(2, **networks, key=jax.random.key(0))
    x, y = trajectories[0, :-1], trajectories[0, 1:]
    parts = model.encoder.weight, model.dynamics, model.decoder.weight
    into, latent, out = (np.asarray(part, float) for part in (parts[0].T, parts[1], parts[2].T))
    now, later = x @ into, y @ into
    step = np.mean((later - now @ latent) ** 2) * y.var(0).mean() / later.var(0).mean()
    wanted = np.mean((x - now @ out) ** 2) + step + np.mean((y - now @ latent @ out) ** 2)
    np.testing.assert_allclose(reconstruction_loss(model, x, y), wanted, rtol=1e-5)
    weights = lambda m: (m.encoder.weight, m.decoder.weight)  # noqa: E731
    small = eqx.tree_at(weights, model, (model.encoder.weight / 100, model.decoder.weight * 100))
    np.testing.assert_allclose(reconstruction_loss(small, x, y), wanted, rtol=1e-4)

    def published(model):  # with the latent step's error in units of the features
        now, later = (jax.vmap(model.encoder)(states) for states in (x, y))
        drawn, ahead = jax.vmap(model.decoder)(now), jax.vmap(model.decoder)(now @ model.matrix())
        return autoencoder_loss(x, y, drawn, later, now @ model.matrix(), ahead)

    assert published(small) < published(model)
    # Features that do not vary, and batches of one pair, have a finite loss and slope.
    dead = eqx.tree_at(weights, model, replace_fn=jnp.zeros_like)
    for one, pairs in ((dead, (x, y)), (model, (x[:1], y[:1]))):
        loss, slope = eqx.filter_value_and_grad(reconstruction_loss)(one, *pairs)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((loss, slope)))


# Two slow directions, of eigenvalues 0.8 +- 0.4i, under a mixture with three fast ones.
SLOW = np.asarray([[0.8, 0.4], [-0.4, 0.8]])
MIXING = np.linalg.qr(np.random.default_rng(0).normal(size=(5, 5)))[0]
SYSTEM = (
    MIXING
    @ np.block([[SLOW, np.zeros((2, 3))], [np.zeros((3, 2)), np.diag([0.2, 0.1, -0.1])]])
    @ MIXING.T
)


@pytest.fixture(scope="module")
def trajectories():
    return np.asarray(
        linear_system(SYSTEM, 299, key=jax.random.key(0), num_trajectories=8, noise=1.0)
    )  # [8, 300, 5]


def linear(inputs, outputs):
    # Without a bias: the constant function is the slowest of all.
    return lambda key: Affine(inputs, outputs, bias=False, key=key)


def feature_map(key, encoder=None):
    return FeatureMap(2, encoder=encoder or linear(5, 2), feature_norm=None, key=key)


def autoencoder(key, width=5):
    return Autoencoder(2, encoder=linear(5, 2), decoder=linear(2, width), init="lecun", key=key)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "lag"), [("vamp", 2), ("contrastive", 1)])
def test_encoders_find_the_slow_directions_of_a_linear_system(trajectories, kind, lag):
    options = {"num_seeds": 1, "num_epochs": 25, "optimizer": adamw(1e-2)}
    pairs = lagged_pairs(trajectories, lag, trajectory_axis=0)
    result = train_encoders(feature_map, kind, pairs, key=jax.random.key(1), **options)
    features = [encode(member(result.models, 0), states) for states in trajectories]
    found = eigenvalues(koopman.fit(Ridge(1e-6), *lagged_pairs(features, lag)))
    np.testing.assert_allclose(found[0], (0.8 + 0.4j) ** lag, atol=0.05)
    np.testing.assert_allclose(found[1], (0.8 - 0.4j) ** lag, atol=0.05)


@pytest.mark.slow
def test_autoencoders_learn_a_linear_system_of_states_of_any_shape():
    # Without noise the latent map is the system's own: rotations by other angles, of states [2, 2].
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(4, 4)))[0]
    states = np.stack([turn @ state for state in np.random.default_rng(2).normal(size=(400, 4, 1))])
    pairs = (
        np.stack([states[..., 0], (turn @ states)[..., 0]], 1)
        .reshape(400, 2, 2, 2)
        .astype(np.float32)
    )

    def encoder(key):
        return eqx.nn.Sequential([eqx.nn.Lambda(jnp.ravel), eqx.nn.Linear(4, 4, key=key)])

    def decoder(key):
        return eqx.nn.Sequential(
            [eqx.nn.Linear(4, 4, key=key), eqx.nn.Lambda(lambda x: x.reshape(2, 2))]
        )

    def both(key):
        return Autoencoder(4, encoder=encoder, decoder=decoder, init="lecun", key=key)

    data = lagged_pairs(pairs, trajectory_axis=0)
    options = {"num_seeds": 1, "num_epochs": 60, "optimizer": adamw(1e-2), "key": jax.random.key(0)}
    result = train_encoders(both, "reconstruction", data, validation=data, **options)
    model = member(result.models, 0)
    found, truth = np.linalg.eigvals(model.matrix()), np.linalg.eigvals(turn)
    assert np.abs(found[:, None] - truth[None]).min(0).max() < 0.05
    np.testing.assert_allclose(jax.vmap(model)(pairs[:, 0]), pairs[:, 0], atol=0.1)
    # A trajectory of two states has one pair: what was observed is the loss of these 400.
    exact = reconstruction_loss(model, pairs[:, 0], pairs[:, 1])
    np.testing.assert_allclose(np.asarray(result.history.observed)[0, -1], exact, rtol=1e-3)


@pytest.mark.slow
def test_the_validation_loss_is_that_of_the_pairs_or_the_mean_over_batches(trajectories):
    model, uneven = (
        FeatureMap(2, encoder=linear(5, 2), key=jax.random.key(0)),
        [trajectories[0], trajectories[1, :50]],
    )
    x, y = lagged_pairs(uneven, 3)
    assert len(x) == 297 + 47
    whole, batched = (
        validation_loss("vamp", model, uneven, lag=3, batch_size=size) for size in (None, 150)
    )
    np.testing.assert_allclose(whole, pair_loss("vamp", model, x, y), rtol=1e-6)
    wanted = np.mean(
        [pair_loss("vamp", model, x[i : i + 150], y[i : i + 150]) for i in (0, 150, 300)]
    )
    np.testing.assert_allclose(batched, wanted, rtol=1e-5)


@pytest.mark.slow
def test_a_module_is_where_all_seeds_begin(trajectories):
    start = Affine(5, 2, key=jax.random.key(3))
    options = {"key": jax.random.key(0), "num_seeds": 2, "num_epochs": 0}
    pairs = lagged_pairs(trajectories, trajectory_axis=0)
    models = train_encoders(partial(feature_map, encoder=start), "vamp", pairs, **options).models
    np.testing.assert_array_equal(models.encoder.weight, np.stack([start.weight] * 2))
    assert np.abs(models.lagged_head.weight[0] - models.lagged_head.weight[1]).max() > 0.01
    whole = train_encoders(feature_map(jax.random.key(4)), "vamp", pairs, **options).models
    np.testing.assert_array_equal(whole.lagged_head.weight[0], whole.lagged_head.weight[1])
    made = train_encoders(feature_map, "vamp", pairs, **options).models
    assert np.abs(made.encoder.weight[0] - made.encoder.weight[1]).max() > 0.01


@pytest.mark.slow
def test_losses_of_your_own_are_those_of_the_same_name(trajectories):
    pairs, options = (
        lagged_pairs([trajectories[0]]),
        {"key": jax.random.key(0), "num_seeds": 2, "num_epochs": 2},
    )
    named = train_encoders(feature_map, "contrastive", pairs, **options).models
    mine = train_encoders(
        feature_map, lambda m, batch, key: pair_loss("contrastive", m, *batch), pairs, **options
    )
    np.testing.assert_array_equal(mine.models.encoder.weight, named.encoder.weight)


def test_options_that_do_not_fit_are_named(trajectories):
    states, key = trajectories[0], jax.random.key(0)
    pairs, labels = lagged_pairs([states]), np.arange(len(states)) % 2
    encoders = partial(train_encoders, feature_map, "vamp", num_epochs=0, num_seeds=2, key=key)
    autoencoders = partial(train_encoders, loss="reconstruction", data=pairs, key=key)
    classes = partial(train_encoders, linear(5, 2), "classes", key=key)
    for train in (
        partial(encoders, pairs),
        partial(autoencoders, autoencoder),
        partial(classes, (states, labels)),
    ):
        with pytest.raises(ValueError, match="`batch_size` must be at least 1"):
            train(batch_size=0)
        with pytest.raises(
            TypeError, match="encoder"
        ):  # an option that `training.fit` does not have
            train(encoder=1)
    encoders(pairs, batch_size=len(states) - 4)
    narrow = tuple(part[:, :4] for part in pairs)
    refused(
        (
            lambda: train_encoders(feature_map, "simclr", pairs, key=key),
            "'vamp', 'contrastive', 'dpnets'",
        ),
        (lambda: encoders(pairs, num_seeds=0), "`num_seeds` must be at least 1"),
        (lambda: autoencoders(partial(autoencoder, width=4)), "`model` must fit `data` and `loss`"),
        (
            lambda: encoders(narrow),
            r"`model` must fit `data` and `loss`, got for a batch of shapes \(299, 4\)",
        ),
        (
            lambda: encoders(pairs, batch_size=2),
            r"`batch_size` must leave enough .*\(1, 5\).*hold at least 3 samples",
        ),
        (
            lambda: encoders(pairs, batch_size=len(states) - 3),
            r"`batch_size` must leave enough .*\(2, 5\)",
        ),
        (lambda: encoders((states[:2], states[1:3])), "`model` must fit .*hold at least 3 samples"),
        (lambda: encoders(pairs, validation=narrow), "`validation` must be like `data`"),
        (
            lambda: encoders(pairs, validation=(states[:2], states[1:3])),
            "`validation` must .*at least 3 samples",
        ),
        (lambda: encoders((states, np.where(states > 0, states, np.nan))), "`data` must be finite"),
        (lambda: classes((states, labels + 1)), "`data` must lie between 0 and 1, got 1 to 2"),
    )


def test_stacked_models_are_told_from_one(trajectories):
    states = trajectories[0]
    options = {"key": jax.random.key(0), "num_seeds": 2, "num_epochs": 0}
    result = train_encoders(feature_map, "vamp", lagged_pairs([states]), **options)
    coders = train_encoders(autoencoder, "reconstruction", lagged_pairs([states]), **options).models
    for call in (
        lambda: encode(result.models, states),
        lambda: validation_loss("vamp", result.models, states),
        lambda: encode(coders, states),
    ):
        with pytest.raises(
            ValueError, match=r"`model` must be one model, got 2 stacked ones.*member\(models, 0\)"
        ):
            call()
    with pytest.raises(
        TypeError, match=r"`models` must be stacked models, as in `result.models`, got a FitResult"
    ):
        member(result, 0)
    assert encode(member(result.models, 0), states).shape == (len(states), 2)
    assert eqx.filter_vmap(lambda model: encode(model, states))(result.models).shape == (
        2,
        len(states),
        2,
    )
    assert jnp.isnan(encode(member(result.models, 0), states * np.nan)).all()
