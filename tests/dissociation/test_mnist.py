import functools
import gzip
import hashlib
import http.server
import os
import threading

import numpy as np
import pytest

from dissociation.data import _mnist as mnist
from dissociation.data import mnist_data


def idx(array):
    array = np.asarray(array, np.uint8)
    return bytes([0, 0, 8, array.ndim]) + np.asarray(array.shape, ">u4").tobytes() + array.tobytes()


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The four files' contents in small, with their checksums in force and no other place to find data in."""
    rng = np.random.default_rng(0)
    contents = {
        "train-images-idx3-ubyte": idx(rng.integers(0, 256, (12, 28, 28))),
        "train-labels-idx1-ubyte": idx(np.arange(12) % 10),
        "t10k-images-idx3-ubyte": idx(rng.integers(0, 256, (5, 28, 28))),
        "t10k-labels-idx1-ubyte": idx(np.arange(5)),
    }
    checksums = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    monkeypatch.setattr(mnist, "CHECKSUMS", checksums)
    monkeypatch.setattr(mnist, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(mnist, "MIRRORS", ("http://127.0.0.1:9/",))
    monkeypatch.delenv(mnist.ENVIRONMENT_VARIABLE, raising=False)
    return contents


def write(folder, contents, compress=False):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        (folder / (name + ".gz" * compress)).write_bytes(gzip.compress(data) if compress else data)
    return folder


@pytest.mark.parametrize("subfolder", ["", "mnist"])
def test_values_survive_the_round_trip(small, tmp_path, monkeypatch, subfolder):
    write(tmp_path / "env" / subfolder, small, compress=bool(subfolder))
    monkeypatch.setenv(mnist.ENVIRONMENT_VARIABLE, str(tmp_path / "env"))
    images, labels, test_images, test_labels = mnist_data()
    raw = np.frombuffer(small["train-images-idx3-ubyte"], np.uint8, offset=16).reshape(12, 784)
    np.testing.assert_allclose(images, raw / 255, rtol=1e-6)
    np.testing.assert_array_equal(labels, np.eye(10)[np.arange(12) % 10])
    np.testing.assert_array_equal(test_labels.argmax(1), np.arange(5))
    assert images.dtype == labels.dtype == test_images.dtype == np.float32


def test_permutation_keeps_images_with_their_labels(small, tmp_path):
    folder = write(tmp_path / "d", small)
    images, labels, *_ = mnist_data(folder=folder)
    shuffled_images, shuffled_labels, *_ = mnist_data(permute_train=True, folder=folder)
    np.testing.assert_array_equal(shuffled_images, mnist_data(permute_train=True, folder=folder)[0])
    order = [int(np.flatnonzero((images == row).all(1))[0]) for row in shuffled_images]
    assert order != list(range(12))
    assert sorted(order) == list(range(12))
    np.testing.assert_array_equal(shuffled_labels, labels[order])


def test_an_environment_variable_that_names_nothing_is_an_error(small, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    write(tmp_path / "cache", small)  # not taken in its stead
    monkeypatch.chdir(tmp_path / "cache")  # which an empty name would be
    for place in (tmp_path / "empty", tmp_path / "file", ""):
        monkeypatch.setenv(mnist.ENVIRONMENT_VARIABLE, str(place))
        words = f"`DISSOCIATION_DATA` must be a folder that holds train-images.*, got '{place}'"
        with pytest.raises(FileNotFoundError, match=words):
            mnist_data()
    monkeypatch.setenv(mnist.ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    with pytest.raises(
        FileNotFoundError, match="`folder` must be a folder that holds train-images-idx3-ubyte"
    ):
        mnist_data(folder=tmp_path / "empty")  # the argument comes first
    monkeypatch.delenv(mnist.ENVIRONMENT_VARIABLE)
    assert mnist_data()[0].shape == (12, 784)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data + b"\x00", "corrupt: the SHA-256"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "corrupt: the SHA-256"),
        (lambda data: gzip.compress(data)[:-20], "corrupt: Compressed file ended"),
        (
            lambda data: gzip.compress(data)[:30] + b"\xff" * 40 + gzip.compress(data)[70:],
            "corrupt",
        ),
    ],
)
def test_every_fault_is_named(small, tmp_path, damage, message):
    name = "t10k-images-idx3-ubyte"
    small[name] = damage(small[name])
    with pytest.raises(ValueError, match=message) as caught:
        mnist_data(folder=write(tmp_path / "d", small))
    assert name in str(caught.value)


def test_offline_names_three_ways_out(small):
    with pytest.raises(ConnectionError, match=r"folder=.*DISSOCIATION_DATA.*--data glyphs"):
        mnist_data()


@pytest.fixture
def server(tmp_path):
    """A server on loopback with a folder of damaged files and a folder for good ones."""
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "www")
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_download_falls_back_to_the_second_mirror_and_caches(small, tmp_path, server, monkeypatch):
    damaged = {name: data[:-3] for name, data in small.items()}
    write(tmp_path / "www" / "bad", damaged, compress=True)
    write(tmp_path / "www" / "good", small, compress=True)
    monkeypatch.setattr(mnist, "MIRRORS", (f"{server}/bad/", f"{server}/none/"))
    with pytest.raises(ConnectionError, match="corrupt.*404"):
        mnist_data()
    assert not list((tmp_path / "cache").iterdir())
    monkeypatch.setattr(mnist, "MIRRORS", (f"{server}/bad/", f"{server}/good/"))
    first = mnist_data()
    cached = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert cached == sorted(f"{name}.gz" for name in small)
    (tmp_path / "other").touch()
    modes = {path.stat().st_mode for path in (*(tmp_path / "cache").iterdir(), tmp_path / "other")}
    assert len(modes) == 1
    monkeypatch.setattr(mnist, "MIRRORS", ())
    np.testing.assert_array_equal(mnist_data()[0], first[0])


@pytest.mark.parametrize("compress", [False, True], ids=["sent", "unpacked"])
def test_nothing_longer_than_the_files_is_loaded(small, tmp_path, server, monkeypatch, compress):
    """Neither what a mirror sends without end, nor what a few bytes of gzip become."""
    monkeypatch.setattr(mnist, "MAX_BYTES", 20_000)
    sent = gzip.compress(bytes(10**6)) if compress else bytes(10**6)
    write(tmp_path / "www" / "bad", {f"{name}.gz": sent for name in small})
    monkeypatch.setattr(mnist, "MIRRORS", (f"{server}/bad/",))
    with pytest.raises(
        ConnectionError, match="of at most 20000 bytes" if compress else "longer than 20000 bytes"
    ):
        mnist_data()
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.skipif(mnist.ENVIRONMENT_VARIABLE not in os.environ, reason="needs the MNIST files")
def test_real_files():
    images, labels, test_images, test_labels = mnist_data()
    assert images.shape == (60000, 784)
    assert test_images.shape == (10000, 784)
    # Counts of each digit as published with the data.
    assert labels.sum(0).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert test_labels.sum(0).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert images.mean() == pytest.approx(0.1307, abs=1e-4)
    assert images.std() == pytest.approx(0.3081, abs=1e-4)


def test_a_file_in_two_parts_is_as_long_as_both(tmp_path, monkeypatch):
    monkeypatch.setattr(mnist, "MAX_BYTES", 20)
    with mnist._Limited(tmp_path / "file", "w") as file:
        file.write(bytes(15))
        file.write(bytes(5))
        with pytest.raises(OSError, match="longer than 20 bytes"):
            file.write(bytes(1))
