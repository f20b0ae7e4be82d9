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
    per_batch,
    place_members,
)
from dissociation.training._traced import Traced


class Threads(NamedTuple):
    """Number of shards that worker threads train on one device.

    `mesh="auto"` becomes this if there is no mesh.
    """

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
        mesh = self.devices
        if mesh is None or DATA_AXIS not in mesh.axis_names:
            return None
        return mesh

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
        num_devices = member_devices(self.devices)
        # With "unroll", a shard is one member of every device, so that one program serves all
        # shards.
        if self.member_map == "unroll":
            return num_devices
        return num_devices * -(-self.total // (num_devices * self.shards))

    def split(self, stacked: Any) -> list[Any]:
        """Cut members into shards; leaves that are not arrays go to every shard."""
        arrays, static = eqx.partition(stacked, eqx.is_array)
        size = self.size
        shards = []
        for start in range(0, self.total, size):
            rows = np.minimum(np.arange(start, start + size), self.total - 1)
            shard = arrays
            if len(rows) != self.total:
                shard = gathered(arrays, to_device(rows))
            if self.devices is not None:
                shard = place_members(shard, self.devices)
            shards.append(eqx.combine(shard, static))
        return shards

    def joined(self, shards: Sequence[Any]) -> Any:
        """Undo `split`."""
        arrays, static = eqx.partition(list(shards), eqx.is_array)
        if len(shards) == 1 and all(len(leaf) == self.total for leaf in jax.tree.leaves(arrays)):
            return shards[0]
        return eqx.combine(_concatenated(arrays, self.total), static[0])

    def placed(self, tree: Any, of_members: bool) -> Any:
        """Split arrays of single members into shards; place arrays of all members everywhere."""
        if of_members:
            return self.split(tree)
        if self.devices is None:
            return tree
        return place_members(tree, self.devices, PartitionSpec())

    def chosen(self, arrays: Any, step: Traced, *observations: Traced) -> tuple["Partition", int]:
        """Return the partition and the number of worker threads.

        Only `members_per_batch` may stay "auto".
        """
        checks.check_choice("member_map", self.member_map, ("auto", *MEMBER_MAPS))
        mesh = self.devices
        if mesh is not None:
            check_mesh(mesh)
        elif self.mesh not in (None, "auto") and not isinstance(self.mesh, Threads):
            checks.fail_kind("mesh", 'be a mesh of `member_mesh`, None or "auto"', repr(self.mesh))
        member_map = self.member_map
        if member_map == "auto":
            member_map = _automatic_map(mesh, step)
        partition = self._replace(member_map=member_map, mesh=mesh or Threads(1))
        partition._check_members_per_batch()
        if member_map == "vmap":
            return partition, 1
        partition = partition._replace(members_per_batch=None)
        if mesh is not None or self.mesh is None:
            return partition, 1

        programs = (step, *observations)
        operations = frozenset().union(*(program.code.primitives for program in programs))
        threads = number_of_threads(self.total, operations, (arrays, *programs))
        # Bits depend on the shards, so fewer cores compute the same shards with fewer threads.
        shards = threads
        if isinstance(self.mesh, Threads):
            shards = min(self.mesh.shards, self.total)
        return partition._replace(mesh=Threads(shards)), threads

    def _check_members_per_batch(self) -> None:
        """Raise unless the number of members batched at once fits their mapping."""
        if self.members_per_batch in (None, "auto"):
            return
        checks.check_count("members_per_batch", self.members_per_batch, minimum=1)
        if self.member_map != "vmap":
            checks.fail(
                "members_per_batch",
                f"be None with sequential mapping (member_map={self.member_map!r})",
                self.members_per_batch,
            )

    def stored(self) -> dict[str, Any]:
        """Return the arguments of `map_members` for JSON, and the number of worker threads.

        A mesh becomes its numbers of devices for members and data.
        """
        mesh = self.devices
        sizes = None
        if mesh is not None:
            num_devices = member_devices(mesh)
            sizes = [num_devices, mesh.size // num_devices]
        return self.how | {"mesh": sizes, "threads": self.shards}

    def resumed(self, stored: dict[str, Any]) -> "Partition":
        """Return the partition with "auto" entries from a stored one."""
        if self.member_map not in ("auto", stored["member_map"]):
            return self
        mesh = self.mesh
        sizes = stored["mesh"]
        if mesh == "auto" and sizes is None:
            mesh = Threads(stored["threads"])
        elif mesh == "auto" and math.prod(sizes) <= jax.local_device_count():
            mesh = member_mesh(jax.local_devices()[: math.prod(sizes)], data=sizes[1])
        members_per_batch = self.members_per_batch
        if members_per_batch == "auto":
            members_per_batch = stored["members_per_batch"]
        return self._replace(
            member_map=stored["member_map"], members_per_batch=members_per_batch, mesh=mesh
        )


def _automatic_map(mesh: Mesh | None, step: Traced) -> str:
    """Return the mapping of members that `member_map="auto"` stands for."""
    platform = None if mesh is None else mesh.devices.flat[0].platform
    if per_batch(platform) != 1:
        return "vmap"
    if "conv_general_dilated" in step.code.primitives:
        return "unroll"
    return "scan"


@partial(jax.jit, static_argnums=1)
def _concatenated(shards: Sequence[Any], number: int) -> Any:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[:number], *shards)


def map_shards(function: Any, shared: Any, stacked: Any, num_members: int, threads: int) -> Any:
    """Return `function(shared, stacked)` of a `filter_jit`, with a shard per worker thread."""
    partition = Partition(num_members, "scan", None, Threads(threads))
    shards = partition.split(stacked)
    program = compiled(function, threads, shared, shards[0])
    tasks = [partial(program, shared, shard) for shard in shards]
    return partition.joined(run_tasks(tasks, threads))
