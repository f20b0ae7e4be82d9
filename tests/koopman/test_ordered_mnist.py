import numpy as np
from words import refused

from dissociation.data import Dataset, load
from koopman.datasets import cycle_spectrum, ordered_mnist


def test_digits_come_in_turn_and_in_the_order_of_the_source():
    source = load("glyphs", num_train=200, num_test=50)
    sequence = ordered_mnist(3, data=source)
    images = np.concatenate([source.train_images, source.test_images]).reshape(-1, 28, 28)
    digits = np.concatenate([source.train_labels, source.test_labels]).argmax(1)
    smallest = min(np.sum(digits == k) for k in range(3))
    assert len(sequence.images) == 3 * smallest
    np.testing.assert_array_equal(sequence.labels, np.arange(3 * smallest) % 3)
    for digit in range(3):
        np.testing.assert_array_equal(sequence.images[digit::3], images[digits == digit][:smallest])
    assert sequence.name == "glyphs"


def test_cycle_spectrum():
    np.testing.assert_allclose(
        cycle_spectrum(5), np.exp(2j * np.pi * np.asarray([0, 1, -1, 2, -2]) / 5), atol=1e-15
    )
    shift = np.roll(np.eye(4), 1, 0)
    np.testing.assert_allclose(
        np.sort_complex(cycle_spectrum(4)), np.sort_complex(np.linalg.eigvals(shift)), atol=1e-12
    )


def test_bad_input_is_refused():
    one, zero, small = np.eye(10, dtype=np.float32)[[1, 1]], np.zeros((2, 784)), np.zeros((2, 9))
    refused(
        (lambda: ordered_mnist(11), "at most 10"),
        (lambda: ordered_mnist(data="cifar"), "`name`"),
        (
            lambda: ordered_mnist(2, data=Dataset("mine", zero, one, zero, one)),
            "every digit below 2",
        ),
        (lambda: ordered_mnist(2, data=Dataset("mine", small, one, small, one)), "28 x 28"),
    )
