"""Memory of programs, and limits of the machine, of control groups and of devices."""

from unittest.mock import Mock

import jax
import jax.numpy as jnp
import psutil
import pytest

from dissociation._core import memory as host
from dissociation._core.checks import WrongValue
from dissociation.training import _machine as memory


def test_a_program_takes_its_temporaries_and_results():
    def sums(x):
        return jax.lax.cumsum(jnp.tile(x, (1, 16)), axis=0)

    needed = memory.program_bytes(jax.jit(sums).lower(jnp.ones((100, 10))).compile())
    assert 4 * 100 * 160 <= needed <= 4 * (4 * 100 * 160)
    donated = memory.program_bytes(
        jax.jit(lambda x: x + 1, donate_argnums=0).lower(jnp.ones(5000)).compile()
    )
    assert donated < 4 * 5000


def test_a_backend_without_an_account_is_named():
    with pytest.raises(WrongValue, match="`batch_size` must be a number here"):
        memory.program_bytes(Mock(**{"memory_analysis.return_value": None}))


def group(folder, limit, used, stat, names):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{stat}\n")


V2, V1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
UNLIMITED = 2**63 - 4096


@pytest.mark.parametrize(
    ("names", "top", "line"), [(V2, "", "0::/a/b"), (V1, "memory", "4:cpu,memory:/a/b")]
)
def test_control_groups_and_their_parents_limit(tmp_path, names, top, line):
    process, root = tmp_path / "cgroup", tmp_path / "fs"
    process.write_text(f"9:name=systemd:/x\n{line}\n")
    group(root / top / "a/b", 1000, 400, "inactive_file 50", names)
    group(root / top / "a", 2000, 1900, "inactive_file 0", names)
    group(root / top, "max" if names is V2 else UNLIMITED, 3000, "inactive_file 0", names)
    found = sorted(host._free_in_groups(process, root))
    assert found[:2] == [100, 650]
    assert found[2:] == ([] if names is V2 else [UNLIMITED - 3000])
    # In a container the path of the host does not exist; the limit stands at the top.
    process.write_text(f"{line.removesuffix('/a/b')}/far/away\n")
    group(root / top, 5000, 3000, "inactive_file 10\ntotal_inactive_file 20", names)
    assert list(host._free_in_groups(process, root)) == [2020]


def test_free_memory_of_the_host(tmp_path, monkeypatch):
    assert list(host._free_in_groups(tmp_path / "none", tmp_path)) == []
    monkeypatch.setattr(host, "_free_in_groups", lambda: iter(()))
    whole = memory.free_memory([])
    assert whole == pytest.approx(psutil.virtual_memory().available / 2, rel=0.2)
    monkeypatch.setattr(host, "_free_in_groups", lambda: iter((2**30, 3000)))
    assert memory.free_memory([jnp.ones(3)]) == 1500
    monkeypatch.setattr(host, "_free_in_groups", lambda: iter((-5,)))
    assert memory.free_memory([]) == 0


def test_free_memory_of_an_accelerator(monkeypatch):
    device = Mock(**{"memory_stats.return_value": {"bytes_limit": 2000, "bytes_in_use": 500}})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert memory.free_memory([]) == 1350
