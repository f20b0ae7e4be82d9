"""Files of activations of two networks: their layers, the same samples, and positions."""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from dissociation._core.array_files import StoredArray, open_arrays
from dissociation._core.checks import fail
from dissociation._core.files import RefusedFile
from dissociation._core.splits import permutation

POSITIONS = ("samples", "neurons", "mean", "first", "last")
"""Meanings of a sample's positions: samples, neurons, or one row for the mean, first or last."""

CHANNELS = ("last", "first")

BLOCK_BYTES = 32 * 2**20
"""Memory of one block of rows of a file, in bytes."""


@dataclasses.dataclass
class Network:
    """File with the activations of a network.

    Attributes:
        name: Name of the argument, "a" or "b".
        path: Path of the file.
        layers: Layers by name, in order.
        rows: Rows of the compared samples.
        positions: One of `POSITIONS`, or None.
        channels: One of `CHANNELS`, or None.
        mask: True for positions that count, [n, positions]; or None.
        ids: Labels of samples, or None.
        leaves_mask: True if the file has a mask that its positions do not use.
        logits: Outputs, or None.
        features: Layers in memory, if they fit.
    """

    name: str
    path: str
    layers: dict[str, StoredArray]
    rows: Int[np.ndarray, " n"]
    positions: str | None
    channels: str | None
    mask: Bool[np.ndarray, "n positions"] | None = None
    ids: np.ndarray | None = None
    leaves_mask: bool = False
    logits: StoredArray | None = None
    features: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def has_positions(self, layer: StoredArray) -> bool:
        """Return True if the samples of a layer have positions."""
        return len(layer.shape) > 2

    def grid(self, layer: StoredArray) -> tuple[int, ...]:
        """Return the sizes of a layer's positions."""
        if self.channels == "first":
            return layer.shape[2:]
        return layer.shape[1:-1]

    def width(self, layer: StoredArray) -> int:
        """Return the number of features of a layer."""
        if not self.has_positions(layer) or self.positions == "neurons":
            return int(np.prod(layer.shape[1:]))
        return layer.shape[1] if self.channels == "first" else layer.shape[-1]

    def batches(
        self, layer: StoredArray, num_rows: int, *, flat: bool = False
    ) -> Iterator[np.ndarray]:
        """Yield the features of the compared samples, `num_rows` samples at a time.

        They are [n, p], or [n, positions, p] for positions as samples; with `flat` or a mask, these
        are [rows, p].

        Raises:
            WrongValue: If numbers are not finite.
        """
        start = 0
        for block in _selected(layer, self.rows, num_rows):
            rows = self.rows[start : start + len(block)]
            features = self._arranged(layer, block, rows)
            is_finite = np.isfinite(features).reshape(len(features), -1).all(1)
            if not is_finite.all():
                rows_of_features = rows
                if len(features) != len(rows):
                    rows_of_features = np.repeat(rows, self.mask[rows].sum(1))  # pyright: ignore
                row = rows_of_features[np.argmin(is_finite)]
                fail(
                    self.name, "hold finite numbers", f"NaN or infinity in {layer.name}, row {row}"
                )
            yield features.reshape(-1, features.shape[-1]) if flat else features
            start += len(block)

    def _arranged(self, layer: StoredArray, block: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the features of a block of samples as floating point numbers."""
        block = block.astype(np.result_type(block.dtype, np.float32), copy=False)
        number = len(block)
        if not self.has_positions(layer) or self.positions == "neurons":
            return block.reshape(number, -1)
        if self.channels == "first":
            block = np.moveaxis(block, 1, -1)
        block = block.reshape(number, -1, block.shape[-1])
        mask = None if self.mask is None else self.mask[rows]
        if self.positions == "samples":
            return block if mask is None else block[mask]
        if mask is None:
            mask = np.ones(block.shape[:2], bool)
        if self.positions == "mean":
            weights = mask[..., None].astype(block.dtype)
            # Padding may hold anything, NaN included.
            total = np.sum(np.where(mask[..., None], block, 0), axis=1)
            return total / weights.sum(1)
        index = np.argmax(mask, 1)
        if self.positions == "last":
            index = len(mask[0]) - 1 - np.argmax(mask[:, ::-1], 1)
        return block[np.arange(number), index]


def rows_per_block(layer: StoredArray) -> int:
    """Return the number of rows of a layer in a block."""
    row_bytes = layer.nbytes // max(layer.shape[0], 1)
    return max(1, BLOCK_BYTES // max(row_bytes, 1))


def _selected(layer: StoredArray, rows: np.ndarray, num_rows: int) -> Iterator[np.ndarray]:
    """Yield rows of a stored array in blocks of `num_rows`."""
    is_stream = layer.member is not None and bool((np.diff(rows) > 0).all())
    if not is_stream:
        for start in range(0, len(rows), num_rows):
            yield layer.rows(rows[start : start + num_rows])
        return
    # Rows in the order of the file are read in one pass.
    pieces = []
    num_waiting = 0
    first = 0
    for block in layer.batches(rows_per_block(layer)):
        low, high = np.searchsorted(rows, (first, first + len(block)))
        pieces.append(block[rows[low:high] - first])
        num_waiting += high - low
        first += len(block)
        if num_waiting >= num_rows or first == layer.shape[0]:
            joined = np.concatenate(pieces)
            last = len(joined) if first == layer.shape[0] else len(joined) // num_rows * num_rows
            for start in range(0, last, num_rows):
                yield joined[start : min(start + num_rows, last)]
            pieces = [joined[last:]]
            num_waiting = len(joined) - last


def read_network(
    name: str, path: str, positions: str | None, channels: str | None, command: str
) -> Network:
    """Return a network from the headers of its file, with ids and mask.

    Args:
        name: Name of the argument in errors.
        path: File.
        positions: One of `POSITIONS`, or None.
        channels: One of `CHANNELS`, or None.
        command: Command of this comparison, to which errors add options.

    Raises:
        RefusedFile: If the file is broken.
        OSError: If the file cannot be read.
        WrongValue: If its arrays are not layers of the same samples.
    """
    try:
        arrays = open_arrays(path)
    except ImportError as error:
        raise RefusedFile(str(error)) from error
    special = {entry: arrays.pop(entry, None) for entry in ("ids", "mask", "logits")}
    if not arrays:
        fail(name, "hold at least one layer", f"{path} without any")
    _check_layers(name, arrays)
    number = next(iter(arrays.values())).shape[0]
    for entry, array in special.items():
        if array is not None and array.shape[:1] != (number,):
            requirement = f"hold `{entry}` of {number} samples, as many as its layers"
            fail(name, requirement, f"shape {array.shape}")
    network = Network(
        name, path, arrays, np.arange(number), positions, channels, logits=special["logits"]
    )
    if special["ids"] is not None:
        network.ids = _read_ids(name, special["ids"])
    _check_positions(network, command)
    if special["mask"] is not None:
        network.mask = _read_mask(network, special["mask"])
        network.leaves_mask = positions in (None, "neurons")
    return network


def _check_layers(name: str, arrays: dict[str, StoredArray]) -> None:
    """Raise unless arrays are real numbers of the same samples, with distinct names."""
    lengths = {}
    lowered: dict[str, str] = {}
    for layer, array in arrays.items():
        if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
            fail(name, "hold real numbers", f"{array.dtype} in {layer}")
        if not array.shape:
            fail(name, "hold layers of shape [samples, ...]", f"a single number in {layer}")
        if 0 in array.shape:
            fail(name, "hold layers with numbers", f"shape {array.shape} in {layer}")
        lengths[array.shape[0]] = layer
        twin = lowered.setdefault(layer.lower(), layer)
        if twin != layer:
            fail(name, "have layers whose names differ beyond case", f"{twin} and {layer}")
    if len(lengths) > 1:
        sizes = ", ".join(f"{number} in {layer}" for number, layer in lengths.items())
        fail(name, "hold layers of the same samples", f"{sizes} rows")


def _read_ids(name: str, stored: StoredArray) -> np.ndarray:
    """Return the labels of samples."""
    if stored.dtype.kind not in "iuSU" or len(stored.shape) != 1:
        received = f"{stored.dtype} of shape {stored.shape}"
        fail(name, "hold `ids` of integers or text, one per sample", received)
    ids = stored.read()
    values, counts = np.unique(ids, return_counts=True)
    if counts.max() > 1:
        fail(name, "hold distinct `ids`", f"{values[np.argmax(counts)]} {counts.max()} times")
    return ids


def _check_positions(network: Network, command: str) -> None:
    """Raise unless the options say what each axis of the layers is."""
    positions = network.positions
    channels = network.channels
    grids = {}
    for layer, array in network.layers.items():
        num_axes = len(array.shape)
        has_positions = num_axes > 2
        if has_positions and (positions is None or (positions != "neurons" and channels is None)):
            height = array.shape[-2]
            is_image = num_axes == 4 and height == array.shape[-1]
            choice = channels or ("first" if is_image else "last")
            option = "channels" if positions else "positions"
            fail(
                option,
                f"be stated for layers of more than two axes ({' or '.join(POSITIONS)})"
                if option == "positions"
                else "be 'last' or 'first' for layers of more than two axes",
                f"none for {layer} of shape {array.shape} in {network.path}",
                f"For instance: {command} --positions {positions or 'mean'} --channels {choice}",
            )
        grids[network.grid(array) if has_positions else ()] = layer
    if positions == "samples" and len(grids) > 1:
        sizes = ", ".join(f"{grid} in {layer}" for grid, layer in grids.items())
        fail("positions", "not be 'samples' for layers of different positions", sizes)


def _read_mask(network: Network, stored: StoredArray) -> np.ndarray | None:
    """Return the mask of positions, [n, positions], or None if it leaves nothing out."""
    name = network.name
    if stored.dtype.kind not in "biu" or len(stored.shape) < 2:
        received = f"{stored.dtype} of shape {stored.shape}"
        fail(name, "hold a `mask` of booleans or integers, [samples, positions]", received)
    entries = stored.read().reshape(stored.shape[0], -1)
    mask = entries == 1
    is_other = ~mask & (entries != 0)
    if is_other.any():
        fail(name, "hold a `mask` of zeros and ones", f"{entries[is_other][0]}")
    if network.positions in (None, "neurons"):
        return None
    for layer, array in network.layers.items():
        num_positions = int(np.prod(network.grid(array)))
        if network.has_positions(array) and num_positions != mask.shape[1]:
            requirement = f"hold a `mask` of {num_positions} positions, as {layer} has"
            fail(name, requirement, mask.shape[1])
    is_empty = ~mask.any(1)
    if is_empty.any():
        requirement = "hold a `mask` that leaves a position to each sample"
        fail(name, requirement, f"none in row {np.argmax(is_empty)}")
    return None if mask.all() else mask


def align(first: Network, second: Network, max_samples: int | None) -> list[str]:
    """Choose the rows of the samples of both networks, and return sentences on the choice.

    Raises:
        WrongValue: If the files do not hold the same samples.
    """
    if (first.ids is None) != (second.ids is None):
        missing = first if first.ids is None else second
        advice = f"Store them in {missing.path} as well, or in neither file"
        fail(missing.name, "hold `ids`, as the other file does", "none", advice)
    if first.ids is None or second.ids is None:
        number = len(first.rows)
        if number != len(second.rows):
            advice = "Store `ids` in both files, which align the samples"
            requirement = f"hold the same samples as `a`, which has {number}"
            fail("b", requirement, len(second.rows), advice)
        sentences = [
            f"Without `ids`, row i of both files is taken as the same sample, of {number}."
        ]
    else:
        sentences = [_align_ids(first, second)]
    number = len(first.rows)
    if max_samples is not None and max_samples < number:
        subset = np.sort(permutation(number)[:max_samples])
        first.rows = first.rows[subset]
        second.rows = second.rows[subset]
        sentences.append(f"A fixed subset of {max_samples} of {number} samples is compared.")
    if first.positions == "samples":
        _share_mask(first, second)
    elif (first.mask is None) != (second.mask is None):
        masked = second if first.mask is None else first
        sentences.append(f"Only {masked.path} has a `mask` that leaves positions out.")
    for network in (first, second):
        if network.leaves_mask:
            sentences.append(f"The `mask` of {network.path} is not used.")
    return sentences


def _align_ids(first: Network, second: Network) -> str:
    """Choose the rows whose ids are in both files, and return a sentence on the others."""
    ids: Any = first.ids
    other_ids: Any = second.ids
    if (ids.dtype.kind in "SU") != (other_ids.dtype.kind in "SU"):
        fail("b", "hold `ids` of the same kind as `a`", f"{other_ids.dtype} and {ids.dtype}")
    if ids.dtype.kind != other_ids.dtype.kind:
        ids = _comparable_ids(ids)
        other_ids = _comparable_ids(other_ids)
    common, rows, other_rows = np.intersect1d(
        ids, other_ids, assume_unique=True, return_indices=True
    )
    if not len(common):
        fail("b", "hold some of the `ids` of `a`", f"none of {len(ids)}")
    in_order = np.argsort(rows)
    first.rows = rows[in_order]
    second.rows = other_rows[in_order]
    sentence = f"{len(common)} samples have the same `ids`."
    num_dropped = len(ids) - len(common)
    num_other_dropped = len(other_ids) - len(common)
    if num_dropped or num_other_dropped:
        sentence += f" Left out: {num_dropped} in A alone, {num_other_dropped} in B alone."
    return sentence


def _comparable_ids(ids: np.ndarray) -> np.ndarray:
    """Return text, or integers of Python, which NumPy does not round to compare their signs."""
    if ids.dtype.kind == "S":
        return np.char.decode(ids, "utf-8")
    return ids if ids.dtype.kind == "U" else ids.astype(object)


def _share_mask(first: Network, second: Network) -> None:
    """Let both networks have the mask of either, for positions that are samples."""
    grids = set()
    for network in (first, second):
        grids |= {int(np.prod(network.grid(layer))) for layer in network.layers.values()}
    if len(grids) > 1:
        fail("b", "have the positions of `a` for --positions samples", sorted(grids))
    masks = [network.mask for network in (first, second) if network.mask is not None]
    if not masks:
        return
    if len(masks) == 2:
        if (masks[0][first.rows] != masks[1][second.rows]).any():
            fail("b", "hold the `mask` of `a` for --positions samples", "another one")
        return
    masked, unmasked = (first, second) if first.mask is not None else (second, first)
    mask = np.ones((max(unmasked.rows) + 1, masks[0].shape[1]), bool)
    mask[unmasked.rows] = masks[0][masked.rows]
    unmasked.mask = mask


def groups_of(network: Network) -> Int[np.ndarray, " rows"] | None:
    """Return the sample of each row, if a mask leaves a varying number of positions."""
    if network.mask is None or network.positions != "samples":
        return None
    counts = network.mask[network.rows].sum(1)
    return np.repeat(np.arange(len(counts)), counts)


def num_rows_of(network: Network) -> int:
    """Return the number of rows of features, with positions that are samples."""
    groups = groups_of(network)
    if groups is not None:
        return len(groups)
    number = len(network.rows)
    layer = next(iter(network.layers.values()))
    if network.positions == "samples" and network.has_positions(layer):
        number *= int(np.prod(network.grid(layer)))
    return number


def feature_bytes(network: Network) -> int:
    """Return the bytes of all features of the compared samples."""
    number = num_rows_of(network)
    total = 0
    for layer in network.layers.values():
        itemsize = np.result_type(layer.dtype, np.float32).itemsize
        total += number * network.width(layer) * itemsize
    return total


def read_layers(networks: Sequence[Network], *, in_memory: bool) -> np.ndarray:
    """Check all layers, keep them in memory if they fit, and return a hash of their contents."""
    digest = hashlib.blake2b(digest_size=16)
    for network in networks:
        for name, layer in network.layers.items():
            blocks = []
            for block in network.batches(layer, rows_per_block(layer)):
                digest.update(f"{network.name} {name} {block.dtype} {block.shape}".encode())
                digest.update(np.ascontiguousarray(block).data)
                if in_memory:
                    blocks.append(block)
            if in_memory:
                network.features[name] = np.concatenate(blocks)
    return np.frombuffer(digest.digest(), np.uint8)
