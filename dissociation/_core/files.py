"""Write files atomically: to a scratch file beside the target, then renamed."""

import errno
import glob
import json
import os
import re
import secrets
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO


class RefusedFile(ValueError):
    """Error of a file that is broken, missing, or has another format."""


def reason_of(error: Exception) -> str:
    """Return the reason why a file could not be read, for the end of a sentence."""
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    if isinstance(error, json.JSONDecodeError):
        return f"what it says of its arrays is no JSON ({error})"
    if str(error).startswith(
        ("Object arrays cannot be loaded", "Cannot load file containing pickled")
    ):
        # NumPy advises to trust it.
        return "it holds Python objects, which are not read, or no arrays at all"
    return str(error).rstrip(".") or type(error).__name__


@contextmanager
def reading(path: str | os.PathLike[str], advice: str, what: str = "is broken") -> Iterator[None]:
    """Turn errors into a `RefusedFile` with the path, the reason and advice.

    Errors of the operating system stay.
    """
    try:
        yield
    except (RefusedFile, OSError):
        raise
    except Exception as error:
        raise RefusedFile(f"{path} {what}: {reason_of(error)}. {advice}".rstrip()) from error


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise an `OSError` unless `path` is a readable file, and no folder, pipe or device."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise OSError(
            errno.EINVAL, "It must be a regular file, got a device or a pipe", os.fspath(path)
        )
    Path(path).open("rb").close()


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends without an error."""
    target = followed(path)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "It must be a file, got a folder", str(path))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "It must be a regular file, got a device or a pipe", str(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    with naming(target):
        # Files of `tempfile` can be read by their owner alone, even after a rename.
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with os.fdopen(descriptor, "wb") as file:
                _lock(descriptor)  # another write removes scratch files without a lock
                _remove_scratches(target)
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(scratch, target)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise
    with suppress(OSError):  # write the rename to disk, on systems that open folders
        descriptor = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def followed(path: str | os.PathLike[str]) -> Path:
    """Return the target of a symbolic link, or any other path unchanged."""
    target = Path(path)
    if os.path.islink(path):
        target = Path(os.path.realpath(path))
        if os.path.islink(target):  # `realpath` returns a link only if links form a loop
            raise OSError(
                errno.ELOOP, "Path must lead to a file, got a loop of symbolic links", str(path)
            )
    return target


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the path to operating-system errors that lack one."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
"""Errors of file systems that have no locks, as some mounts of Lustre and NFS."""


def _lock(descriptor: int) -> bool:
    """Lock a file; return False where the file system has no locks."""
    import fcntl  # here, because systems without it can still read files

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        return False
    return True


def _remove_scratches(target: Path) -> None:
    """Remove the scratch files of killed writes, which have no lock."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        suffix = path.name.removeprefix(f".{target.name}")
        if re.fullmatch(r"\.[0-9a-f]{8}\.tmp", suffix):
            with suppress(OSError), open(path, "ab", opener=_without_links) as file:
                if _lock(file.fileno()):
                    path.unlink()


def write_bytes(path: str | os.PathLike[str], contents: bytes) -> None:
    """Write a whole file atomically."""
    with replacing(path) as file:
        file.write(contents)


@contextmanager
def locked(lock: str | os.PathLike[str], subject: object) -> Iterator[None]:
    """Hold the lock file `lock` until the block or the process ends.

    Where the file system has no locks, nothing is held, and a warning says so.

    Raises:
        OSError: If another process holds it; the message names `subject`.
    """
    path = Path(lock)
    start = time.strftime("%Y-%m-%d %H:%M:%S")
    holder = f"process {os.getpid()} on {socket.gethostname()} since {start}"
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _lock_file(path, subject)
    with file:
        try:
            with naming(path):
                file.truncate(0)
                file.write(holder.encode())
            yield
        finally:
            path.unlink(missing_ok=True)


def _lock_file(path: Path, subject: object) -> FileIO:
    while True:
        # Without a buffer, which closing would write again to a full disk.
        file = open(path, "ab+", buffering=0, opener=_without_links)  # noqa: SIM115
        try:
            if not _lock(file.fileno()):
                message = (
                    f"The file system of {path} has no locks: nothing keeps another "
                    f"process from using {subject}."
                )
                warnings.warn(message, RuntimeWarning, stacklevel=2)
                return file
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    return file
        except BlockingIOError:
            file.seek(0)
            holder = file.read().decode(errors="replace").strip() or "another process"
            file.close()
            raise BlockingIOError(
                f"{subject} is in use by {holder}. Wait for it to end, or stop it."
            ) from None
        except OSError:
            file.close()
            raise
        file.close()  # its last holder has removed it


def _without_links(path: str, flags: int) -> int:
    # Through a symbolic link, another file would be written or emptied.
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
