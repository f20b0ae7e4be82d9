import jax
import numpy as np
import pytest

from dissociation.data.datasets import load
from koopman.datasets.ordered_mnist import ordered_mnist
from koopman.learn import (
    encode,
    member,
    pair_loss,
    train_autoencoders,
    train_classifiers,
    train_encoders,
    validation_loss,
)
from koopman.networks import FeatureMap


@pytest.fixture(scope="module")
def film():
    return ordered_mnist(5, data=load("glyphs", num_train=1300, num_test=20))


@pytest.mark.parametrize("kind", ["vamp", "contrastive", "dpnets"])
def test_encoders_learn_the_cycle(film, kind):
    train, validation = film.images[:460], film.images[460:560]
    epochs = 30 if kind == "contrastive" else 12
    options = {"key": jax.random.key(0), "num_seeds": 1, "num_epochs": epochs}
    result = train_encoders(kind, train, validation=validation, **options)
    curve = np.asarray(result.history.observed)[0]
    assert curve.shape == (epochs + 1,)
    assert curve[-1] < -1.2  # a constant feature has -1, five classes told apart have -5
    exact = validation_loss(kind, member(result.models, 0), validation)
    np.testing.assert_allclose(curve[-1], exact, rtol=2e-3)
    if kind == "contrastive":  # with features of norm 1, as published, it is still on the plateau
        short = train_encoders(kind, train, validation=validation, length=1.0, **options)
        assert np.asarray(short.history.observed)[0, -1] > -1.1


def test_members_do_not_depend_on_their_company(film):
    options = {"key": jax.random.key(1), "num_epochs": 1}
    several = train_encoders("vamp", film.images[:140], num_seeds=2, **options)
    again = train_encoders("vamp", film.images[:140], num_seeds=2, **options)
    weights = [np.asarray(r.models.encoder.head.weight) for r in (several, again)]
    np.testing.assert_array_equal(*weights)
    assert np.abs(weights[0][0] - weights[0][1]).max() > 0.01
    # A rate per seed: the first as before, the second another.
    rates = np.asarray([2e-3, 1e-3], np.float32)
    swept = train_encoders("vamp", film.images[:140], num_seeds=2, learning_rate=rates, **options)
    changed = np.asarray(swept.models.encoder.head.weight)
    np.testing.assert_array_equal(changed[0], weights[0][0])
    assert np.abs(changed[1] - weights[0][1]).max() > 1e-3


def test_batched_validation_is_the_mean_over_batches(film):
    model, images = FeatureMap(key=jax.random.key(0)), film.images[:141]
    x, y = images[:-1], images[1:]
    wanted = np.mean([pair_loss("contrastive", model, x[i : i + 64], y[i : i + 64]) for i in (0, 64, 128)])
    np.testing.assert_allclose(validation_loss("contrastive", model, images, batch_size=64), wanted, rtol=1e-5)
    assert abs(wanted - validation_loss("contrastive", model, images)) > 1e-6


def test_autoencoders_and_classifiers_learn(film):
    images, labels = film.images[:300], film.labels[:300]
    options = {"key": jax.random.key(0), "num_seeds": 1}
    for orthogonal in (False, True):
        result = train_autoencoders(
            images[:150], validation=images[150:200], num_epochs=3, orthogonal=orthogonal, **options
        )
        curve = np.asarray(result.history.observed)[0]
        assert curve[-1] < 0.8 * curve[0]
    oracle = member(train_classifiers(images, labels, num_epochs=6, **options).models, 0)
    right = np.mean(np.asarray(encode(oracle, film.images[300:500])).argmax(1) == film.labels[300:500])
    assert right > 0.6  # chance is 0.2


def test_bad_input_is_refused(film):
    with pytest.raises(ValueError, match="'vamp', 'contrastive', 'dpnets'"):
        train_encoders("simclr", film.images[:9], key=jax.random.key(0))
    with pytest.raises(ValueError, match="at least two pictures"):
        train_encoders("vamp", film.images[:1], key=jax.random.key(0))
    with pytest.raises(ValueError, match="a single pair for the last batch, got 4 for 9 pairs"):
        train_encoders("vamp", film.images[:10], key=jax.random.key(0), batch_size=4)
    with pytest.raises(ValueError, match="`learning_rate`"):
        train_autoencoders(film.images[:9], key=jax.random.key(0), learning_rate=0.0)
    with pytest.raises(
        ValueError, match=r"`learning_rate` must be one number, or one per seed \(2\), got shape \(3,\)"
    ):
        train_encoders("vamp", film.images[:10], key=jax.random.key(0), num_seeds=2, learning_rate=np.full(3, 1e-3))
    with pytest.raises((ValueError, TypeError)):
        train_classifiers(film.images[:9], film.labels[:8], key=jax.random.key(0))
