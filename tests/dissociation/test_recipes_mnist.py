import jax
import numpy as np
import pytest

from dissociation.data import load
from dissociation.recipes import fit_classifiers, fresh_networks


@pytest.fixture(scope="module")
def small():
    return load("glyphs", num_train=400, num_test=50, key=jax.random.key(0))


@pytest.mark.slow
def test_training_beats_chance_by_far_and_keeps_history(small):
    result = fit_classifiers(num_epochs=8, num_seeds=2, dataset=load("glyphs", num_train=2000, num_test=500), width=128,
                       progress=None)  # fmt: skip
    errors = result.history.observed["test_error"]
    assert errors.shape == (2, 9)
    assert (errors[:, 0] > 0.7).all()
    assert (errors[:, -1] < 0.6).all()  # chance is 0.9
    assert result.history.loss.shape == (2, 8 * 16)
    assert np.isclose(result.history.loss[:, 0], np.log(10), atol=0.2).all()


def test_sizes_and_keys_that_are_none_are_named(small):
    with pytest.raises(ValueError, match="`width` must be at least 1, got 0"):
        fit_classifiers(num_seeds=1, num_epochs=0, dataset=small, width=0, progress=None)
    with pytest.raises(ValueError, match="`num_classes` must be at least 1, got 0"):
        fresh_networks(2, key=jax.random.key(0), num_classes=0)
