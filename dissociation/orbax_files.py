"""PyTrees with arrays on several devices, written by Orbax: a folder, into which each device's rows go as they are.

As `checkpoint.save` and `checkpoint.restore`, but that nothing is put together on one device or host. Beside Orbax'
arrays, the folder holds a plain checkpoint of the rest: the header, the checksum of every array's rows, NumPy arrays,
keys, numbers, and arrays without axes or elements. Several processes write a folder each, alone: none waits for others.
"""

import importlib
import os
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dissociation import checkpoint, checks
from dissociation.files import RefusedFile, replacing_folder
from dissociation.validation import validated

ARRAYS, REST = "arrays", "rest"
_TREE = "tree"  # what Orbax' names begin with: no name may be empty
_ADVICE = "Delete it to begin again without it."


@validated
def save(path: str | os.PathLike[str], tree: Any, header: dict[str, Any] | None = None) -> None:
    """Writes `tree` and a header into a new folder, which has its name only when it is whole.

    Args:
        path: The folder. An older one is removed when the new one is written, right before that takes its name.
        tree: A PyTree, as for `checkpoint.save`. Its JAX arrays lie on any devices of this process, and have few rows,
            as stacked members: each has a checksum.
        header: Anything that JSON can hold.

    Raises:
        ImportError: If Orbax is not installed.
        OSError: If the folder cannot be written.
        ValueError: If an array lies on devices of other processes, too.
    """
    orbax = load()
    arrays = {name: leaf for name, leaf in _named(tree).items() if _is_large(leaf)}
    for name, leaf in arrays.items():
        if not leaf.is_fully_addressable:
            checks.fail("tree", "hold arrays of this process", f"one of several at {name}")
    described = {
        name: {"dtype": leaf.dtype.name, "shape": leaf.shape, "rows": _sums(leaf).tobytes().hex()}
        for name, leaf in arrays.items()
    }
    rest = jax.tree.map(lambda leaf: None if _is_large(leaf) else leaf, tree)
    with replacing_folder(path) as folder:
        checkpoint.save(folder / REST, rest, {"user": header or {}, "arrays": described})
        if arrays:
            named = {_TREE + name: _shared(leaf) for name, leaf in arrays.items()}
            try:
                with _checkpointer(orbax) as writer:
                    writer.save(folder.absolute() / ARRAYS, args=orbax.args.PyTreeSave(named))
            except ValueError as error:  # TensorStore's, of a full disk too
                raise OSError(f"{path} cannot be written: {' '.join(str(error).split())[-200:]}") from error


@validated
def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The header that `save` was given; needs no Orbax.

    Raises:
        FileNotFoundError: If there is no such folder.
        RefusedFile: If it is of something else, or is damaged.
    """
    return _described(path)["user"]


@validated
def restore(path: str | os.PathLike[str], like: Any) -> Any:
    """Reads a tree of the structure of `like`, on any number of devices and processes.

    Args:
        path: A folder that `save` wrote.
        like: As for `checkpoint.restore`. Where an array, or a `jax.ShapeDtypeStruct`, has a sharding over several
            devices, each of these reads its own part of it.

    Returns:
        `like` with its arrays, keys and numbers replaced.

    Raises:
        ImportError: If Orbax is not installed.
        FileNotFoundError: If there is no such folder.
        RefusedFile: If it is damaged or does not fit `like`; the error names the leaf's path.
    """
    described, wanted = _described(path)["arrays"], _named(like)
    if extra := sorted(described.keys() - wanted.keys()):
        raise RefusedFile(f"{path} holds the leaf {extra[0]}, which `like` lacks ({len(extra)} in all).")
    for name, entry in described.items():
        leaf, shape, dtype = wanted[name], tuple(entry["shape"]), jnp.dtype(entry["dtype"])
        if np.shape(leaf) != shape or getattr(leaf, "dtype", type(leaf)) != dtype:
            other = f"{np.shape(leaf)} and {getattr(leaf, 'dtype', type(leaf).__name__)}"
            raise RefusedFile(f"{path}: the leaf {name} has shape {shape} and dtype {dtype}, wanted {other}.")
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise RefusedFile(f"{path}: the leaf {name} is {dtype}. Enable JAX's 64 bits to read it.")
    rest = jax.tree_util.tree_map_with_path(
        lambda place, leaf: None if jax.tree_util.keystr(place) in described else leaf, like
    )
    found = _named(checkpoint.restore(Path(path) / REST, rest))
    arrays = _read(path, {name: wanted[name] for name in described}) if described else {}
    for name, leaf in arrays.items():
        sums = np.frombuffer(bytes.fromhex(described[name]["rows"]), np.uint32)
        if (bad := np.flatnonzero(_sums(leaf) != sums)).size:
            where = f"the leaf {name}, row {bad[0]}"
            raise RefusedFile(f"{path} is damaged at {where}: its checksum does not fit. {_ADVICE}")
        found[name] = _as_wanted(leaf, wanted[name])
    return jax.tree_util.tree_map_with_path(lambda place, leaf: found.get(jax.tree_util.keystr(place), leaf), like)


def load() -> Any:
    """Orbax, which is imported when it is asked for.

    Raises:
        ImportError: If it is not installed.
    """
    try:
        return importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        raise ImportError("Orbax must be installed for this: pip install 'dissociation[orbax]'.") from error


def _checkpointer(orbax: Any) -> Any:
    """Orbax' writer and reader, of this process alone."""
    own, handlers = jax.process_index(), orbax.type_handlers
    alone = orbax.options.MultiprocessingOptions(own, {own}, f"process_{own}")
    # Orbax' own description of the arrays is refused where it is not of all processes.
    arrays = handlers.ArrayHandler(primary_host=own, array_metadata_store=None, enable_write_sharding_file=False)
    registry = handlers.create_type_handler_registry((jax.Array, arrays))
    options = {"use_compression": False, "multiprocessing_options": alone, "type_handler_registry": registry}
    return orbax.Checkpointer(orbax.PyTreeCheckpointHandler(**options), multiprocessing_options=alone)


def _read(path: Any, wanted: dict[str, Any]) -> dict[str, jax.Array]:
    orbax, default = load(), jnp.empty(()).sharding
    args = {
        # Not strict: of several processes, each has written rows that are nobody's, see `_shared`.
        _TREE + name: orbax.ArrayRestoreArgs(
            sharding=_spread(leaf) or default, global_shape=leaf.shape, restore_type=jax.Array, strict=False
        )
        for name, leaf in wanted.items()
    }
    try:
        with _checkpointer(orbax) as reader:
            how = orbax.args.PyTreeRestore(dict.fromkeys(args, 0), args)
            found = reader.restore(Path(path).absolute() / ARRAYS, args=how)
    except Exception as error:  # of many kinds: Orbax' and TensorStore's
        said = " ".join(str(error).replace("\\'", "'").split())
        named = next((f" at the leaf {name}" for name in wanted if f"{_TREE}{name}/" in said), "")
        raise RefusedFile(f"{path} is damaged{named}: Orbax cannot read it ({said[:120]} ...). {_ADVICE}") from error
    return {name: found[_TREE + name] for name in wanted}


def _described(path: Any) -> dict[str, Any]:
    if Path(path).is_dir() and not (Path(path) / REST).exists():
        raise RefusedFile(f"{path} must be a folder of Orbax' arrays and of {REST}, which is missing. {_ADVICE}")
    return checkpoint.read_header(Path(path) / REST)


def _named(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(place): leaf for place, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _is_large(leaf: Any) -> bool:
    """Whether Orbax gets a leaf."""
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return isinstance(leaf, jax.Array) and not is_key and leaf.ndim > 0 and leaf.size > 0


def _spread(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    return None if sharding is None or len(sharding.device_set) == 1 else sharding


def _as_wanted(leaf: jax.Array, like: Any) -> Any:
    if isinstance(like, np.ndarray):
        return np.array(leaf)
    return leaf if _spread(like) else jnp.asarray(np.asarray(leaf))  # bound to no device, as `checkpoint` has it


def _blocks(array: jax.Array) -> list[tuple[int, jax.Array]]:
    """An array's rows, each block on one device, and the first row of each; all on one if the rows are cut as well."""
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    if any(shard.data.shape[1:] != array.shape[1:] for shard in shards):
        return [(0, jax.device_put(array, shards[0].device))]
    return sorted(((shard.index[0].start or 0, shard.data) for shard in shards), key=lambda block: block[0])


def _sums(array: jax.Array) -> np.ndarray:
    """A checksum of every row, whatever devices they lie on."""
    sums = np.zeros(len(array), np.uint32)
    for start, block in _blocks(array):
        rows = np.ascontiguousarray(block).reshape(len(block), -1).view(np.uint8)
        sums[start : start + len(block)] = [zlib.crc32(row.data) for row in rows]
    return sums


def _shared(array: jax.Array) -> jax.Array:
    """An array as Orbax takes it: where there are several processes, one that belongs to more of them than this one.

    It has a block of rows more, on a device of another process, which nobody writes or reads.
    """
    if jax.process_count() == 1:
        return array
    blocks = [block for _, block in _blocks(array)]
    other = next(device for device in jax.devices() if device.process_index != jax.process_index())
    mesh = Mesh(np.array([*(block.device for block in blocks), other]), ("rows",))
    shape = len(blocks[0]) * mesh.size, *array.shape[1:]
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, PartitionSpec("rows")), blocks)
