"""MNIST from its four original IDX files: found, verified by SHA-256 of their contents, parsed, or downloaded.

References:
    LeCun, Cortes and Burges (1998), The MNIST database of handwritten digits.
"""

import gzip
import hashlib
import os
import tempfile
import zlib
from pathlib import Path

import numpy as np
import platformdirs
from jaxtyping import Float, UInt8

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
NUM_CLASSES = 10
PERMUTATION_SEED = 37

MnistArrays = tuple[
    Float[np.ndarray, "train pixels"],
    Float[np.ndarray, "train classes"],
    Float[np.ndarray, "test pixels"],
    Float[np.ndarray, "test classes"],
]


def mnist_data(permute_train: bool = False, *, folder: str | os.PathLike[str] | None = None) -> MnistArrays:
    """Loads MNIST as flat images in [0, 1] and one-hot labels.

    The files (gzipped or not) are looked for in `folder`; else in the folder that the environment variable
    `DISSOCIATION_DATA` names and in its `mnist` subfolder; else in the platform's cache folder; else they are
    downloaded there. Their contents are verified wherever they come from.

    Args:
        permute_train: Whether to permute training images and labels together, by a fixed seed.
        folder: Where the four files are; nothing else is searched if it is given.

    Returns:
        `(train_images [60000, 784], train_labels [60000, 10], test_images [10000, 784], test_labels [10000, 10])`,
        float32 NumPy arrays.

    Raises:
        FileNotFoundError: If `folder` lacks a file.
        ValueError: If a file is corrupt, truncated, or not the original.
        ConnectionError: If no file is found and no mirror answers.
    """
    files = {name: _read(_find(name, folder), name) for name in CHECKSUMS}
    train_images, train_labels, test_images, test_labels = (
        _images(array) if array.ndim == 3 else _one_hot(array) for array in files.values()
    )
    if permute_train:
        order = np.random.default_rng(PERMUTATION_SEED).permutation(len(train_images))
        train_images, train_labels = train_images[order], train_labels[order]
    return train_images, train_labels, test_images, test_labels


def cache_folder() -> Path:
    """The folder of the platform's cache that downloads go to."""
    return Path(platformdirs.user_cache_dir("dissociation")) / "mnist"


def parse_idx(contents: bytes, *, source: str = "the file") -> UInt8[np.ndarray, "..."]:
    """Parses an IDX file of unsigned bytes.

    The header is two zero bytes, a type code (8: unsigned byte), the number of axes, and each axis' length as a
    big-endian 32-bit integer.

    Args:
        contents: The whole file, decompressed.
        source: What to call the file in errors.

    Returns:
        The array, uint8, of the shape that the header gives; read-only, since it views `contents`.

    Raises:
        ValueError: If the header is not one of an IDX file of bytes, or the size does not fit it.
    """
    if len(contents) < 4 or contents[:3] != b"\x00\x00\x08":
        wanted = "the magic number 00 00 08 (IDX, unsigned bytes)"
        raise ValueError(f"{source} must begin with {wanted}, got {contents[:4].hex(' ') or 'nothing'}.")
    num_axes = contents[3]
    offset = 4 + 4 * num_axes
    if len(contents) < offset:
        raise ValueError(f"{source} is truncated: {len(contents)} bytes, its header alone takes {offset}.")
    shape = tuple(int(n) for n in np.frombuffer(contents, ">u4", num_axes, offset=4))
    wanted_size = offset + int(np.prod(shape, dtype=np.int64))
    if len(contents) != wanted_size:
        fault = "is truncated" if len(contents) < wanted_size else "is too long"
        raise ValueError(
            f"{source} {fault}: its header promises shape {shape}, {wanted_size} bytes; got {len(contents)}."
        )
    return np.frombuffer(contents, np.uint8, offset=offset).reshape(shape)


def _read(path: Path, name: str) -> UInt8[np.ndarray, "..."]:
    contents = path.read_bytes()
    if contents[:2] == b"\x1f\x8b":
        try:
            contents = gzip.decompress(contents)
        except EOFError as error:
            raise ValueError(f"{path} is truncated: its gzip stream ends early.") from error
        except (OSError, zlib.error) as error:
            raise ValueError(f"{path} is corrupt: {error}.") from error
    array = parse_idx(contents, source=str(path))
    found = hashlib.sha256(contents).hexdigest()
    if found != CHECKSUMS[name]:
        raise ValueError(
            f"{path} is corrupt: the SHA-256 of its contents must be {CHECKSUMS[name]}, got {found}. "
            "Delete it to have it downloaded again."
        )
    return array


def _find(name: str, folder: str | os.PathLike[str] | None) -> Path:
    if folder is not None:
        found = _in_folders(name, [Path(folder), Path(folder) / "mnist"])
        if found is None:
            raise FileNotFoundError(f"`folder` must hold {name} or {name}.gz, got {folder} without either.")
        return found
    folders = [cache_folder()]
    if variable := os.environ.get(ENVIRONMENT_VARIABLE):
        folders = [Path(variable), Path(variable) / "mnist", *folders]
    return _in_folders(name, folders) or _download(name)


def _in_folders(name: str, folders: list[Path]) -> Path | None:
    candidates = (folder / file for folder in folders for file in (name, f"{name}.gz"))
    return next((path for path in candidates if path.is_file()), None)


def _download(name: str) -> Path:
    import pooch  # Loaded only here: most runs never download.

    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}.gz"
    failures = []
    for mirror in MIRRORS:
        # Verified in a folder of its own, then renamed: an interruption leaves no half-written file behind.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            try:
                pooch.get_logger().setLevel("WARNING")
                fetched = pooch.retrieve(
                    mirror + target.name,
                    known_hash=None,
                    fname=target.name,
                    path=scratch,
                    downloader=pooch.HTTPDownloader(progressbar=True, timeout=30),  # pyright: ignore[reportArgumentType]
                )
                _read(Path(fetched), name)
                os.replace(fetched, target)
                return target
            except (OSError, ValueError) as error:  # requests' errors are OSErrors
                failures.append(f"{mirror}: {error}")
    raise ConnectionError(
        f"MNIST could not be downloaded ({'; '.join(failures)}). Three ways out: pass `folder=` with the four IDX "
        f"files; set {ENVIRONMENT_VARIABLE} to such a folder; or use the built-in data, `--data glyphs`, which "
        "needs no download."
    )


def _images(array: UInt8[np.ndarray, "n height width"]) -> Float[np.ndarray, "n pixels"]:
    return array.reshape(len(array), -1).astype(np.float32) / np.float32(255)


def _one_hot(labels: UInt8[np.ndarray, " n"]) -> Float[np.ndarray, "n classes"]:
    return np.eye(NUM_CLASSES, dtype=np.float32)[labels]
