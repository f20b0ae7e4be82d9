"""MNIST from its four original IDX files.

References:
    LeCun, Cortes and Burges (1998), The MNIST database of handwritten digits.
"""

import gzip
import hashlib
import io
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from jaxtyping import Float, UInt8

from dissociation._core.validation import validated

ENVIRONMENT_VARIABLE = "DISSOCIATION_DATA"
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
# SHA-256 of the contents, that is, after decompression.
CHECKSUMS = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
MAX_BYTES = 64 * 2**20
"""Largest size of a file, compressed or not, in bytes. The largest contents have 47 MB."""
NUM_CLASSES = 10
PERMUTATION_SEED = 37

MnistArrays = tuple[
    Float[np.ndarray, "train pixels"],
    Float[np.ndarray, "train classes"],
    Float[np.ndarray, "test pixels"],
    Float[np.ndarray, "test classes"],
]


@validated
def mnist_data(
    permute_train: bool = False, *, folder: str | os.PathLike[str] | None = None
) -> MnistArrays:
    """Load MNIST as flat images in [0, 1] and one-hot labels.

    Files (gzipped or not) are read from `folder`, by default the environment variable
    `DISSOCIATION_DATA`, or from its subfolder `mnist`. Without either, they are read from the
    platform's cache folder, to which missing files are downloaded. The SHA-256 of every file's
    contents is verified.

    Args:
        permute_train: If True, training images and labels are permuted together by a fixed seed.
        folder: Folder of the four files. If it or the variable is given, nothing is downloaded.

    Returns:
        `(train_images [60000, 784], train_labels [60000, 10], test_images [10000, 784], test_labels
        [10000, 10])`, float32 NumPy arrays.

    Raises:
        FileNotFoundError: If `folder`, or the folder that the variable names, lacks a file.
        ValueError: If the contents of a file are not the original.
        ConnectionError: If a file cannot be downloaded from any mirror.
    """
    arrays = []
    for name in CHECKSUMS:
        array = _read(_find(name, folder), name)
        if array.ndim == 3:
            array = array.reshape(len(array), -1).astype(np.float32) / np.float32(255)
        else:
            array = np.eye(NUM_CLASSES, dtype=np.float32)[array]
        arrays.append(array)
    train_images, train_labels, test_images, test_labels = arrays
    if permute_train:
        order = np.random.default_rng(PERMUTATION_SEED).permutation(len(train_images))
        train_images = train_images[order]
        train_labels = train_labels[order]
    return train_images, train_labels, test_images, test_labels


def cache_folder() -> Path:
    """Return the platform's cache folder for downloads."""
    return Path(platformdirs.user_cache_dir("dissociation")) / "mnist"


def _read(path: Path, name: str) -> UInt8[np.ndarray, "..."]:
    """Return the array of an IDX file, gzipped or not, with the contents of the file `name`."""
    with path.open("rb") as file:
        is_zipped = file.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path) if is_zipped else path.open("rb") as file:
            contents = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is corrupt: {error}.") from error
    if len(contents) > MAX_BYTES:
        raise ValueError(f"{path} is too long: its contents must be of at most {MAX_BYTES} bytes.")
    digest = hashlib.sha256(contents).hexdigest()
    if digest != CHECKSUMS[name]:
        raise ValueError(
            f"{path} is corrupt: the SHA-256 of its contents must be {CHECKSUMS[name]}, got "
            f"{digest}. "
            "Delete it to have it downloaded again."
        )
    # The header is two zero bytes, a type code (8: unsigned byte), the number of axes, and the
    # length of each axis as a big-endian 32-bit integer.
    shape = np.frombuffer(contents, ">u4", contents[3], offset=4)
    return np.frombuffer(contents, np.uint8, offset=4 + shape.nbytes).reshape(shape)


def _find(name: str, folder: str | os.PathLike[str] | None) -> Path:
    argument = "folder"
    if folder is None:
        argument = ENVIRONMENT_VARIABLE
        folder = os.environ.get(ENVIRONMENT_VARIABLE)
    folders = [cache_folder()]
    if folder == "":  # which would be the working directory
        folders = []
    elif folder is not None:
        folders = [Path(folder), Path(folder) / "mnist"]
    for candidate in folders:
        for path in (candidate / name, candidate / f"{name}.gz"):
            if path.is_file():
                return path
    if folder is None:
        return _download(name)
    raise FileNotFoundError(
        f"`{argument}` must be a folder that holds {name} or {name}.gz, got {str(folder)!r}."
    )


def _download(name: str) -> Path:
    import pooch  # Loaded only here: most runs never download.

    pooch.get_logger().setLevel("WARNING")
    loader: Any = pooch.HTTPDownloader(progressbar=True, timeout=30)

    def limited(url: Any, path: Any, caller: Any) -> None:
        with _Limited(path, "wb") as file:
            loader(url, file, caller)

    options: Any = {"downloader": limited}
    target = cache_folder() / f"{name}.gz"
    failures = []
    for mirror in MIRRORS:
        try:
            # Mirrors may compress differently, so the contents are verified, not the file.
            pooch.retrieve(mirror + target.name, None, target.name, target.parent, **options)
            _read(target, name)
            # pooch's files are readable by their owner alone.
            target.chmod(target.parent.stat().st_mode & 0o666)
            return target
        except (OSError, ValueError) as error:  # requests' errors are OSErrors
            target.unlink(missing_ok=True)
            failures.append(f"{mirror}: {error}")
    raise ConnectionError(
        f"MNIST could not be downloaded ({'; '.join(failures)}). Three ways out: pass `folder=` "
        "with the four IDX "
        f"files; set {ENVIRONMENT_VARIABLE} to such a folder; or use the built-in data, `--data "
        "glyphs`, which "
        "needs no download."
    )


class _Limited(io.FileIO):
    """File that raises before it becomes longer than `MAX_BYTES`."""

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > MAX_BYTES:
            raise OSError(f"longer than {MAX_BYTES} bytes")
        return super().write(data)
