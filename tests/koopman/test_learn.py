from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

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
    train_autoencoders,
    train_classifiers,
    train_encoders,
    validation_loss,
)
from koopman._encoders._learn import pair_loss, reconstruction_loss
from koopman.datasets import linear_system, ordered_mnist


@pytest.fixture(scope="module")
def digits():
    return ordered_mnist(5, data=load("glyphs", num_train=1300, num_test=20, key=jax.random.key(0)))


@pytest.mark.slow
def test_features_of_norm_one_wait_on_a_plateau_that_others_leave(digits):
    """A constant feature has the loss -1, five classes told apart -5."""
    options = {"validation": digits.images[460:560], "key": jax.random.key(0), "num_seeds": 1, "num_epochs": 30}
    for norm, leaves in (({}, True), ({"feature_norm": 1.0}, False)):  # 1 as published
        result = train_encoders("contrastive", digits.images[:460], **norm, **options)
        assert (result.history.observed[0, -1] < -1.15) == leaves


@pytest.mark.slow
def test_members_do_not_depend_on_their_company(digits):
    options = {"key": jax.random.key(1), "num_epochs": 1}
    several = train_encoders("vamp", digits.images[:140], num_seeds=2, **options)
    again = train_encoders("vamp", digits.images[:140], num_seeds=2, **options)
    weights = [np.asarray(r.models.encoder.head.weight) for r in (several, again)]
    np.testing.assert_array_equal(*weights)
    assert np.abs(weights[0][0] - weights[0][1]).max() > 0.01
    # A rate per seed: the first as before, the second another.
    rates = np.asarray([2e-3, 1e-3], np.float32)
    swept = train_encoders("vamp", digits.images[:140], num_seeds=2, learning_rate=rates, **options)
    changed = np.asarray(swept.models.encoder.head.weight)
    np.testing.assert_array_equal(changed[0], weights[0][0])
    assert np.abs(changed[1] - weights[0][1]).max() > 1e-3
    # A schedule: the same where it is constant, and step by step where it is not (139 pairs, three batches).
    for schedule, same in ((lambda step: 2e-3, True), (optax.piecewise_constant_schedule(2e-3, {2: 0.0}), False)):
        swept = train_encoders("vamp", digits.images[:140], num_seeds=2, learning_rate=schedule, **options)
        assert np.array_equal(swept.models.encoder.head.weight, weights[0]) == same


@pytest.mark.slow
def test_batched_validation_is_the_mean_over_batches(digits):
    model, images = FeatureMap(key=jax.random.key(0)), digits.images[:141]
    x, y = images[:-1], images[1:]
    wanted = np.mean([pair_loss("contrastive", model, x[i : i + 64], y[i : i + 64]) for i in (0, 64, 128)])
    np.testing.assert_allclose(validation_loss("contrastive", model, images, batch_size=64), wanted, rtol=1e-5)
    assert abs(wanted - validation_loss("contrastive", model, images)) > 1e-6


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
SYSTEM = MIXING @ np.block([[SLOW, np.zeros((2, 3))], [np.zeros((3, 2)), np.diag([0.2, 0.1, -0.1])]]) @ MIXING.T


@pytest.fixture(scope="module")
def trajectories():
    return np.asarray(linear_system(SYSTEM, 299, key=jax.random.key(0), num_trajectories=8, noise=1.0))  # [8, 300, 5]


def linear(inputs, outputs):
    # Without a bias: the constant function is the slowest of all.
    return lambda key: Affine(inputs, outputs, bias=False, key=key)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "lag"), [("vamp", 2), ("contrastive", 1)])
def test_encoders_find_the_slow_directions_of_a_linear_system(trajectories, kind, lag):
    options = {"num_seeds": 1, "num_epochs": 25, "learning_rate": 1e-2, "lag": lag, "trajectory_axis": 0}
    result = train_encoders(kind, trajectories, key=jax.random.key(1), encoder=linear(5, 2), **options)
    features = [encode(member(result.models, 0), states) for states in trajectories]
    found = eigenvalues(koopman.fit(Ridge(1e-6), *lagged_pairs(features, lag)))
    np.testing.assert_allclose(found[0], (0.8 + 0.4j) ** lag, atol=0.05)
    np.testing.assert_allclose(found[1], (0.8 - 0.4j) ** lag, atol=0.05)


@pytest.mark.slow
def test_autoencoders_learn_a_linear_system_of_states_of_any_shape():
    # Without noise the latent map is the system's own: rotations by other angles, of states [2, 2].
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(4, 4)))[0]
    states = np.stack([turn @ state for state in np.random.default_rng(2).normal(size=(400, 4, 1))])
    pairs = np.stack([states[..., 0], (turn @ states)[..., 0]], 1).reshape(400, 2, 2, 2).astype(np.float32)

    def encoder(key):
        return eqx.nn.Sequential([eqx.nn.Lambda(jnp.ravel), eqx.nn.Linear(4, 4, key=key)])

    def decoder(key):
        return eqx.nn.Sequential([eqx.nn.Linear(4, 4, key=key), eqx.nn.Lambda(lambda x: x.reshape(2, 2))])

    options = {"num_seeds": 1, "num_epochs": 60, "learning_rate": 1e-2, "trajectory_axis": 0}
    networks = {"encoder": encoder, "decoder": decoder}
    result = train_autoencoders(pairs, validation=pairs, key=jax.random.key(0), **networks, **options)
    model = member(result.models, 0)
    found, truth = np.linalg.eigvals(model.matrix()), np.linalg.eigvals(turn)
    assert np.abs(found[:, None] - truth[None]).min(0).max() < 0.05
    np.testing.assert_allclose(jax.vmap(model)(pairs[:, 0]), pairs[:, 0], atol=0.1)
    # A trajectory of two states has one pair: what was observed is the loss of these 400.
    exact = reconstruction_loss(model, pairs[:, 0], pairs[:, 1])
    np.testing.assert_allclose(np.asarray(result.history.observed)[0, -1], exact, rtol=1e-3)


@pytest.mark.slow
def test_the_loss_is_that_of_the_pairs_of_trajectories(trajectories):
    model, uneven = FeatureMap(2, encoder=linear(5, 2), key=jax.random.key(0)), [trajectories[0], trajectories[1, :50]]
    x, y = lagged_pairs(uneven, 3)
    assert len(x) == 297 + 47
    np.testing.assert_allclose(validation_loss("vamp", model, uneven, lag=3), pair_loss("vamp", model, x, y), rtol=1e-6)


@pytest.mark.slow
def test_a_module_is_where_all_seeds_begin(trajectories):
    start = Affine(5, 2, key=jax.random.key(3))
    options = {"key": jax.random.key(0), "num_seeds": 2, "num_epochs": 0, "trajectory_axis": 0}
    models = train_encoders("vamp", trajectories, encoder=start, **options).models
    np.testing.assert_array_equal(models.encoder.weight, np.stack([start.weight] * 2))
    made = train_encoders("vamp", trajectories, encoder=linear(5, 2), **options).models
    assert np.abs(made.encoder.weight[0] - made.encoder.weight[1]).max() > 0.01


def test_options_that_do_not_fit_are_named(trajectories):
    states, networks = trajectories[0], {"key": jax.random.key(0), "encoder": linear(5, 2)}
    encoders = partial(train_encoders, "vamp", states, num_epochs=0, num_seeds=2, **networks)
    autoencoders = partial(train_autoencoders, states, **networks)
    classes = partial(train_classifiers, states, np.zeros(len(states), int), num_classes=2, **networks)
    for train in (encoders, partial(autoencoders, decoder=linear(2, 5)), classes):
        with pytest.raises(ValueError, match="`batch_size` must be at least 1"):
            train(batch_size=0)
        with pytest.raises(TypeError, match="`foo` must be left out, or be one of callbacks, .*, got an unknown"):
            train(foo=1)
    for schedule in (lambda step: np.ones(2), optax.adam, lambda step: 1.0 if step else 0.0):
        with pytest.raises(TypeError, match="`learning_rate` must be a number, one per seed, or make a number of"):
            encoders(learning_rate=schedule)
    encoders(batch_size=len(states) - 4)
    for call, words in (
        (lambda: train_encoders("simclr", states, **networks), "'vamp', 'contrastive', 'dpnets'"),
        (lambda: encoders(learning_rate=0.0), "`learning_rate`"),
        (lambda: encoders(learning_rate=np.ones(3)), r"`learning_rate` must .* one per seed \(2\), got shape \(3,\)"),
        (lambda: encoders(encoder=None), r"`encoder` must be given for states other than images .*, got shape \(5,\)"),
        (lambda: autoencoders(), r"`decoder` must be given .*, got shape \(5,\)"),
        (lambda: autoencoders(decoder=linear(2, 4)), r"`decoder` must make a state \(shape \(5,\)\) of 2"),
        (lambda: encoders(encoder=linear(4, 2)), r"`encoder` must take one example of shape \(5,\), got"),
        (
            lambda: train_encoders("vamp", trajectories, **networks | {"encoder": eqx.nn.Lambda(jnp.tanh)}),
            r"got an output of .*trajectory_axis=0",
        ),
        (lambda: encoders(features=3), r"the width of the encoder's output \(2\), got 3"),
        (lambda: encoders(batch_size=2), r"`batch_size` must leave at least 3 pairs .*got a batch of 1 \("),
        (lambda: encoders(batch_size=len(states) - 3), r"`batch_size` must leave at least 3 pairs .*a batch of 2 \("),
        (lambda: train_encoders("vamp", states[:3], **networks), "`trajectories` must hold at least 3 pairs"),
        (lambda: encoders(validation=states[:, :4]), "`validation` must have the states"),
        (lambda: encoders(validation=states[:3]), "`validation` must hold at least 3 pairs"),
        (lambda: encoders(validation=np.where(states > 0, states, np.nan)), r"`validation\[0\]` must be finite"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_stacked_models_are_told_from_one(trajectories):
    states = trajectories[0]
    options = {"key": jax.random.key(0), "num_seeds": 2, "num_epochs": 0}
    result = train_encoders("vamp", states, encoder=linear(5, 2), **options)
    coders = train_autoencoders(states, encoder=linear(5, 2), decoder=linear(2, 5), **options).models
    for call in (
        lambda: encode(result.models, states),
        lambda: validation_loss("vamp", result.models, states),
        lambda: encode(coders, states),
    ):
        with pytest.raises(ValueError, match=r"`model` must be one model, got 2 stacked ones.*member\(models, 0\)"):
            call()
    with pytest.raises(TypeError, match=r"`models` must be stacked models, as in `result.models`, got a FitResult"):
        member(result, 0)
    assert encode(member(result.models, 0), states).shape == (len(states), 2)
    assert eqx.filter_vmap(lambda model: encode(model, states))(result.models).shape == (2, len(states), 2)
    assert jnp.isnan(encode(member(result.models, 0), states * np.nan)).all()
