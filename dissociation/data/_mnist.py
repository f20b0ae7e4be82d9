"""MNIST from its four original IDX files.

References:
    LeCun, Cortes and Burges (1998), The MNIST database of handwritten digits.
"""

import gzip
import hashlib
import io
import os
import shutil
import tempfile
import threading
import time
import zlib
from contextlib import suppress
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
DOWNLOAD_SECONDS = 300.0
"""Time limit of a mirror for one file, in seconds. The largest file has 10 MB."""
MAX_BYTES = 64 * 2**20
"""Largest size of a file, compressed or not, in bytes. The largest contents have 47 MB."""
_SCRATCH = ".download-"
NUM_CLASSES = 10
PERMUTATION_SEED = 37

MnistArrays = tuple[
    Float[np.ndarray, "train pixels"],
    Float[np.ndarray, "train classes"],
    Float[np.ndarray, "test pixels"],
    Float[np.ndarray, "test classes"],
]


@validated
def mnist_data(permute_train: bool = False, *, folder: str | os.PathLike[str] | None = None) -> MnistArrays:
    """Load MNIST as flat images in [0, 1] and one-hot labels.

    Files (gzipped or not) are read from `folder`, by default the environment variable `DISSOCIATION_DATA`, or from its
    subfolder `mnist`. Without either, they are read from the platform's cache folder, to which missing files are
    downloaded. The SHA-256 of every file's contents is verified.

    Args:
        permute_train: If True, training images and labels are permuted together by a fixed seed.
        folder: Folder of the four files. If it or the variable is given, nothing is downloaded.

    Returns:
        `(train_images [60000, 784], train_labels [60000, 10], test_images [10000, 784], test_labels [10000, 10])`,
        float32 NumPy arrays.

    Raises:
        FileNotFoundError: If `folder`, or the folder that the variable names, lacks a file.
        ValueError: If a file is corrupt, truncated, or not the original.
        ConnectionError: If a file cannot be downloaded from any mirror.
    """
    train_images, train_labels, test_images, test_labels = (
        array.reshape(len(array), -1).astype(np.float32) / np.float32(255)
        if array.ndim == 3
        else np.eye(NUM_CLASSES, dtype=np.float32)[array]
        for array in [_read(_find(name, folder), name) for name in CHECKSUMS]
    )
    if permute_train:
        order = np.random.default_rng(PERMUTATION_SEED).permutation(len(train_images))
        train_images, train_labels = train_images[order], train_labels[order]
    return train_images, train_labels, test_images, test_labels


@validated
def cache_folder() -> Path:
    """Return the platform's cache folder for downloads."""
    return Path(platformdirs.user_cache_dir("dissociation")) / "mnist"


@validated
def parse_idx(contents: bytes, *, source: str = "the file") -> UInt8[np.ndarray, "..."]:
    """Parse an IDX file of unsigned bytes."""
    if len(contents) < 4 or contents[:3] != b"\x00\x00\x08":
        wanted = "the magic number 00 00 08 (IDX, unsigned bytes)"
        raise ValueError(f"{source} must begin with {wanted}, got {contents[:4].hex(' ') or 'nothing'}.")
    # The header is two zero bytes, a type code (8: unsigned byte), the number of axes, and the length of each axis as
    # a big-endian 32-bit integer.
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
            contents = gzip.GzipFile(fileobj=io.BytesIO(contents)).read(MAX_BYTES + 1)
        except EOFError as error:
            raise ValueError(f"{path} is truncated: its gzip stream ends early.") from error
        except (OSError, zlib.error) as error:
            raise ValueError(f"{path} is corrupt: {error}.") from error
    if len(contents) > MAX_BYTES:
        raise ValueError(f"{path} is too long: it must have at most {MAX_BYTES} bytes.")
    array = parse_idx(contents, source=str(path))
    digest = hashlib.sha256(contents).hexdigest()
    if digest != CHECKSUMS[name]:
        raise ValueError(
            f"{path} is corrupt: the SHA-256 of its contents must be {CHECKSUMS[name]}, got {digest}. "
            "Delete it to have it downloaded again."
        )
    return array


def _find(name: str, folder: str | os.PathLike[str] | None) -> Path:
    argument, place = (
        ("folder", folder) if folder is not None else (ENVIRONMENT_VARIABLE, os.environ.get(ENVIRONMENT_VARIABLE))
    )
    if place is None:
        return _in_folders(name, [cache_folder()]) or _download(name)
    path = _in_folders(name, [Path(place), Path(place) / "mnist"]) if os.fspath(place) else None
    if path is None:
        got = f"{place} without either" if Path(place).is_dir() else f"{place}, which is no folder"
        got = got if os.fspath(place) else "an empty name"
        advice = "" if folder is not None else " Unset it to have MNIST downloaded."
        raise FileNotFoundError(f"`{argument}` must hold {name} or {name}.gz, got {got}.{advice}")
    return path


def _in_folders(name: str, folders: list[Path]) -> Path | None:
    candidates = (folder / file for folder in folders for file in (name, f"{name}.gz"))
    return next((path for path in candidates if path.is_file()), None)


def _download(name: str) -> Path:
    folder = cache_folder()
    target = folder / f"{name}.gz"
    failures = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        for mirror in MIRRORS:
            # Verified in a separate folder, then renamed, so that an interrupt leaves no half-written file.
            with tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH) as scratch:
                try:
                    fetched = _fetch(mirror + target.name, Path(scratch) / target.name)
                    _read(fetched, name)
                    os.replace(fetched, target)
                    return target
                except (OSError, ValueError) as error:  # requests' errors are OSErrors
                    failures.append(f"{mirror}: {error}")
    finally:
        with suppress(OSError):
            folder.rmdir()  # if it is empty
    raise ConnectionError(
        f"MNIST could not be downloaded ({'; '.join(failures)}). Three ways out: pass `folder=` with the four IDX "
        f"files; set {ENVIRONMENT_VARIABLE} to such a folder; or use the built-in data, `--data glyphs`, which "
        "needs no download."
    )


def _fetch(address: str, target: Path) -> Path:
    import pooch  # Loaded only here: most runs never download.

    pooch.get_logger().setLevel("WARNING")
    loader: Any = pooch.HTTPDownloader(progressbar=True, timeout=min(30, DOWNLOAD_SECONDS))
    failure: list[Exception] = []

    def limited(address: str, path: str, caller: Any) -> None:
        with _Limited(path, "wb") as file:
            loader(address, file, caller)

    def run() -> None:
        try:
            options: Any = {"fname": target.name, "path": target.parent, "downloader": limited}
            pooch.retrieve(address, None, **options)
            target.chmod(target.parent.parent.stat().st_mode & 0o666)  # pooch's are readable by their owner alone
        except Exception as error:
            failure.append(error)

    # In another thread, so that this one can stop waiting at the time limit or at an interrupt.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DOWNLOAD_SECONDS)
    if thread.is_alive():
        raise TimeoutError(f"not done after {DOWNLOAD_SECONDS:g} s")
    if failure:
        raise failure[0]
    return target


class _Limited(io.FileIO):
    """File that raises before it becomes longer than `MAX_BYTES`."""

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > MAX_BYTES:
            raise OSError(f"longer than {MAX_BYTES} bytes")
        return super().write(data)


def _sweep(folder: Path) -> None:
    """Remove scratch folders of killed downloads."""
    for path in folder.glob(f"{_SCRATCH}*"):
        with suppress(OSError):
            # Running downloads are younger.
            if time.time() - path.stat().st_mtime > 2 * DOWNLOAD_SECONDS:
                shutil.rmtree(path)
