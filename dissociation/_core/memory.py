"""Free memory of the host and of its control groups."""

from collections.abc import Iterator
from pathlib import Path

import psutil


def host_budget() -> int:
    """Return half of the host's free bytes, because other programs run on it."""
    free = min([psutil.virtual_memory().available, *_free_in_groups()])
    return max(0, free) // 2


def _free_in_groups(
    process: str | Path = "/proc/self/cgroup", root: str | Path = "/sys/fs/cgroup"
) -> Iterator[int]:
    """Yield the free bytes of this process' limited control groups, parents included."""
    for line in _lines(process):
        _, controllers, group = line.split(":", 2)
        root_folder = Path(root)
        limit_file = "memory.max"
        usage_file = "memory.current"
        if "memory" in controllers.split(","):  # version 1
            root_folder = root_folder / "memory"
            limit_file = "memory.limit_in_bytes"
            usage_file = "memory.usage_in_bytes"
        elif controllers:
            continue

        # In a container the path may be the host's; then only the top folder exists.
        folder = root_folder / group.strip("/")
        for parent in (folder, *folder.parents):
            if not parent.is_relative_to(root_folder):
                break
            limit = _lines(parent / limit_file)
            usage = _lines(parent / usage_file)
            if not limit or not usage or not limit[0].isdigit():  # "max" means no limit
                continue
            # The kernel counts cached files as used, and frees them when memory is short.
            stat = dict(line.split() for line in _lines(parent / "memory.stat"))
            cached = stat.get("total_inactive_file", stat.get("inactive_file", 0))
            yield int(limit[0]) - int(usage[0]) + int(cached)


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
