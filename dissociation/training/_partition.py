"""Partition of the member axis into shards, for worker threads or for the devices of a mesh."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from dissociation._core import checks
from dissociation._core.conversion import to_device
from dissociation.training._machine import compiled, number_of_threads, run_tasks
from dissociation.training._members import (
    DATA_AXIS,
    MEMBER_MAPS,
    check_mesh,
    gathered,
    member_devices,
    member_mesh,
    place_members,
)
from dissociation.training._members import per_batch as at_once
from dissociation.training._traced import Traced


class Threads(NamedTuple):
    """Number of shards that worker threads train on one device: what `mesh="auto"` becomes without a mesh."""

    shards: int


class Partition(NamedTuple):
    """Cut of the member axis into shards of equal size, each on a mesh.

    Copies of the last member fill the last shard.

    Attributes:
        total: Number of members.
        member_map: Mapping of the members of a shard, "auto" until `chosen`.
        members_per_batch: With "vmap", number of members batched at once, None for all, or "auto".
        mesh: Mesh of `member_mesh`, `Threads`, or until `chosen` None or "auto".
    """

    total: int
    member_map: str = "auto"
    members_per_batch: int | str | None = None
    mesh: Mesh | Threads | str | None = "auto"

    @property
    def devices(self) -> Mesh | None:
        """Return the mesh, or None for a single device."""
        return self.mesh if isinstance(self.mesh, Mesh) else None

    @property
    def shards(self) -> int:
        """Return the number of shards that worker threads train."""
        return self.mesh.shards if isinstance(self.mesh, Threads) else 1

    @property
    def data_mesh(self) -> Mesh | None:
        """Return the mesh if it splits the samples of a batch, else None."""
        return (
            self.devices
            if self.devices is not None and DATA_AXIS in self.devices.axis_names
            else None
        )

    @property
    def how(self) -> dict[str, Any]:
        """Return the arguments of `map_members`: all that a program of one shard depends on."""
        return {
            "member_map": self.member_map,
            "members_per_batch": self.members_per_batch,
            "mesh": self.devices,
        }

    @property
    def size(self) -> int:
        """Return the number of members in a shard."""
        devices = member_devices(self.devices)
        # With "unroll", a shard is one member of every device, so that one program serves all
        # shards.
        return (
            devices
            if self.member_map == "unroll"
            else devices * -(-self.total // (devices * self.shards))
        )

    def split(self, stacked: Any) -> list[Any]:
        """Cut members into shards; leaves that are not arrays go to every shard."""
        arrays, rest = eqx.partition(stacked, eqx.is_array)
        shards, size = [], self.size
        for start in range(0, self.total, size):
            rows = np.minimum(np.arange(start, start + size), self.total - 1)
            own = arrays if len(rows) == self.total else gathered(arrays, to_device(rows))
            shards.append(
                eqx.combine(own if self.devices is None else place_members(own, self.devices), rest)
            )
        return shards

    def joined(self, shards: Sequence[Any]) -> Any:
        """Undo `split`."""
        arrays, rest = eqx.partition(list(shards), eqx.is_array)
        if len(shards) == 1 and all(len(leaf) == self.total for leaf in jax.tree.leaves(arrays)):
            return shards[0]
        return eqx.combine(_concatenated(arrays, self.total), rest[0])

    def placed(self, tree: Any, own: bool) -> Any:
        """Split arrays of single members into shards, or place those of all members on every device of the mesh."""
        if own:
            return self.split(tree)
        return tree if self.devices is None else place_members(tree, self.devices, PartitionSpec())

    def chosen(self, arrays: Any, step: Traced, *others: Traced) -> tuple["Partition", int]:
        """Return the partition, with only `members_per_batch` perhaps "auto", and the number of worker threads."""
        member_map, per_batch, mesh = self.member_map, self.members_per_batch, self.devices
        checks.check_choice("member_map", member_map, ("auto", *MEMBER_MAPS))
        if mesh is not None:
            check_mesh(mesh)
        elif self.mesh not in (None, "auto") and not isinstance(self.mesh, Threads):
            checks.fail_kind("mesh", 'be a mesh of `member_mesh`, None or "auto"', repr(self.mesh))
        if member_map == "auto":
            platform = None if mesh is None else mesh.devices.flat[0].platform
            sequential = "unroll" if "conv_general_dilated" in step.code.primitives else "scan"
            member_map = sequential if at_once(platform) == 1 else "vmap"
        if per_batch not in (None, "auto"):
            checks.check_count("members_per_batch", per_batch, minimum=1)
            if member_map != "vmap":
                wanted = f"be None with sequential mapping (member_map={member_map!r})"
                checks.fail("members_per_batch", wanted, per_batch)
        chosen = self._replace(member_map=member_map, mesh=mesh or Threads(1))
        if member_map == "vmap":
            return chosen, 1
        chosen = chosen._replace(members_per_batch=None)
        if mesh is not None or self.mesh is None:
            return chosen, 1
        operations = frozenset().union(*(program.code.primitives for program in (step, *others)))
        threads = number_of_threads(self.total, operations, (arrays, step, *others))
        # Bits depend on the shards, so fewer cores compute the same shards with fewer threads.
        shards = min(self.mesh.shards, self.total) if isinstance(self.mesh, Threads) else threads
        return chosen._replace(mesh=Threads(shards)), threads

    def stored(self) -> dict[str, Any]:
        """Return how members are mapped, for JSON; a mesh becomes its numbers of devices for members and data."""
        mesh, members = self.devices, member_devices(self.devices)
        sizes = None if mesh is None else [members, mesh.size // members]
        return self.how | {"mesh": sizes, "threads": self.shards}

    def resumed(self, stored: dict[str, Any]) -> "Partition":
        """Return the partition with "auto" entries from a stored one."""
        if self.member_map not in ("auto", stored["member_map"]):
            return self
        per_batch, mesh, sizes = self.members_per_batch, self.mesh, stored["mesh"]
        if mesh == "auto" and sizes is None:
            mesh = Threads(stored["threads"])
        elif mesh == "auto" and math.prod(sizes) <= jax.local_device_count():
            mesh = member_mesh(jax.local_devices()[: math.prod(sizes)], data=sizes[1])
        per_batch = stored["members_per_batch"] if per_batch == "auto" else per_batch
        return self._replace(
            member_map=stored["member_map"], members_per_batch=per_batch, mesh=mesh
        )


@partial(jax.jit, static_argnums=1)
def _concatenated(shards: Sequence[Any], number: int) -> Any:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[:number], *shards)


def map_shards(function: Any, shared: Any, stacked: Any, num_members: int, threads: int) -> Any:
    """Return `function(shared, stacked)` of a `filter_jit`, with a shard per worker thread."""
    partition = Partition(num_members, "scan", None, Threads(threads))
    each = partition.split(stacked)
    program = compiled(function, threads, shared, each[0])
    return partition.joined(run_tasks([partial(program, shared, one) for one in each], threads))
