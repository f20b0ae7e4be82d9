"""Choose the folder of compiled test programs, and limit its size."""

import hashlib
import platform
from importlib.metadata import version
from pathlib import Path

import platformdirs

MOST_BYTES = 2 * 2**30
"""Size to which old programs are removed."""


def processor():
    """Return a hash of the processor's flags, for which programs are compiled."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    flags = [line for line in lines if line.startswith(("flags", "Features"))]
    words = flags[0] if flags else platform.processor() + platform.machine()
    return hashlib.sha256(words.encode()).hexdigest()[:8]


def root():
    """Return the folder of the programs of all versions and processors."""
    return platformdirs.user_cache_path("dissociation") / "tests"


def folder():
    """Return the folder of the programs of this version of jaxlib and this processor."""
    return root() / f"{version('jaxlib')}-{processor()}"


def trim(path, most=MOST_BYTES):
    """Remove the oldest files until the folder has at most `most` bytes; another process may do the same."""
    files = []
    for file in path.rglob("*"):
        try:
            status = file.stat()
        except FileNotFoundError:
            continue
        if file.is_file():
            files.append((status.st_mtime, status.st_size, file))
    total = sum(size for _, size, _ in files)
    for _, size, file in sorted(files):
        if total <= most:
            break
        file.unlink(missing_ok=True)
        total -= size
