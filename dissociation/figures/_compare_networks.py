"""Files of activations of two networks: their layers, the same samples, and positions."""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dissociation._core.array_files import StoredArray, open_arrays
from dissociation._core.checks import fail
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
        rows: Rows of the compared samples, [n].
        positions: One of `POSITIONS`, or None.
        channels: One of `CHANNELS`, or None.
        mask: True for positions that count, of the compared samples, [n, positions]; or None.
        ids: Labels of samples, or None.
        logits: Outputs, or None.
        leaves_mask: True if the file has a mask that its positions do not use.
    """

    name: str
    path: str
    layers: dict[str, StoredArray]
    rows: np.ndarray
    positions: str | None
    channels: str | None
    mask: np.ndarray | None = None
    ids: list[Any] | None = None
    logits: StoredArray | None = None
    leaves_mask: bool = False

    def grid(self, layer: StoredArray) -> tuple[int, ...]:
        """Return the sizes of a layer's positions, of which neurons have none."""
        if len(layer.shape) < 3 or self.positions == "neurons":
            return ()
        return layer.shape[2:] if self.channels == "first" else layer.shape[1:-1]

    def width(self, layer: StoredArray) -> int:
        """Return the number of features of a layer."""
        return int(np.prod(layer.shape[1:])) // int(np.prod(self.grid(layer)))

    def batches(
        self, layer: StoredArray, num_rows: int | None = None, *, flat: bool = False
    ) -> Iterator[np.ndarray]:
        """Yield the features of the compared samples, `num_rows` samples at a time.

        By default these are those of a block of the file. Features are [n, p], or [n, positions, p]
        for positions as samples; with `flat` or a mask, these are [rows, p].

        Raises:
            WrongValue: If numbers are not finite.
        """
        start = 0
        for block in _selected(layer, self.rows, num_rows or _rows_per_block(layer)):
            rows = self.rows[start : start + len(block)]
            mask = None if self.mask is None else self.mask[start : start + len(block)]
            features = self._arranged(layer, block, mask)
            is_finite = np.isfinite(features).reshape(len(features), -1).all(1)
            if not is_finite.all():
                if mask is not None and len(features) != len(rows):
                    rows = np.repeat(rows, mask.sum(1))
                received = f"NaN or infinity in {layer.name}, row {rows[np.argmin(is_finite)]}"
                fail(self.name, "hold finite numbers", received)
            yield features.reshape(-1, features.shape[-1]) if flat else features
            start += len(block)

    def _arranged(self, layer: StoredArray, block: Any, mask: Any) -> np.ndarray:
        """Return the features of a block of samples as floating point numbers."""
        block = block.astype(np.result_type(block.dtype, np.float32), copy=False)
        if not self.grid(layer):
            return block.reshape(len(block), -1)
        if self.channels == "first":
            block = np.moveaxis(block, 1, -1)
        block = block.reshape(len(block), -1, block.shape[-1])
        if self.positions == "samples":
            return block if mask is None else block[mask]
        if mask is None:
            mask = np.ones(block.shape[:2], bool)
        if self.positions == "mean":
            # Padding may hold anything, NaN included.
            return np.mean(block, 1, where=mask[..., None])
        if self.positions == "last":
            block = block[:, ::-1]
            mask = mask[:, ::-1]
        return block[np.arange(len(block)), np.argmax(mask, 1)]


def _rows_per_block(layer: StoredArray) -> int:
    """Return the number of rows of a layer in a block."""
    return max(1, BLOCK_BYTES * layer.shape[0] // layer.nbytes)


def _selected(layer: StoredArray, rows: np.ndarray, num_rows: int) -> Iterator[np.ndarray]:
    """Yield rows of a stored array in blocks of `num_rows`."""
    if layer.member is None or (np.diff(rows) < 0).any():
        for start in range(0, len(rows), num_rows):
            yield layer.rows(rows[start : start + num_rows])
        return
    # Rows in the order of the file are read in one pass.
    first = 0
    waiting = None
    for block in layer.batches(_rows_per_block(layer)):
        end = first + len(block)
        chosen = block[np.isin(np.arange(first, end), rows)]
        waiting = chosen if waiting is None else np.concatenate([waiting, chosen])
        while len(waiting) >= num_rows or (len(waiting) and end == layer.shape[0]):
            yield waiting[:num_rows]
            waiting = waiting[num_rows:]
        first = end


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
    arrays = open_arrays(path)
    special = {entry: arrays.pop(entry, None) for entry in ("ids", "mask", "logits")}
    if not arrays:
        fail(name, "hold at least one layer", f"{path} without any")
    _check_layers(name, arrays)
    number = next(iter(arrays.values())).shape[0]
    for entry, array in special.items():
        if array is not None and array.shape[:1] != (number,):
            requirement = f"hold `{entry}` of {number} samples, as many as its layers"
            fail(name, requirement, f"shape {array.shape}")
    network = Network(name, path, arrays, np.arange(number), positions, channels)
    network.logits = special["logits"]
    if special["ids"] is not None:
        network.ids = _read_ids(name, special["ids"])
    _check_positions(network, command)
    if special["mask"] is not None:
        network.leaves_mask = positions in (None, "neurons")
        if not network.leaves_mask:
            network.mask = _read_mask(name, special["mask"])
    return network


def _check_layers(name: str, arrays: dict[str, StoredArray]) -> None:
    """Raise unless arrays are real numbers of the same samples, with distinct names."""
    lengths = {}
    twins: dict[str, str] = {}
    for layer, array in arrays.items():
        if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
            fail(name, "hold real numbers", f"{array.dtype} in {layer}")
        if 0 in (array.shape or (0,)):
            fail(name, "hold layers of shape [samples, ...]", f"shape {array.shape} in {layer}")
        lengths[array.shape[0]] = layer
        twin = twins.setdefault(layer.lower(), layer)
        if twin != layer:
            fail(name, "have layers whose names differ beyond case", f"{twin} and {layer}")
    if len(lengths) > 1:
        sizes = ", ".join(f"{number} in {layer}" for number, layer in lengths.items())
        fail(name, "hold layers of the same samples", f"{sizes} rows")


def _read_ids(name: str, stored: StoredArray) -> list[Any]:
    """Return the labels of samples, text or integers of Python, which compare exactly."""
    if stored.dtype.kind not in "iuSU" or len(stored.shape) != 1:
        received = f"{stored.dtype} of shape {stored.shape}"
        fail(name, "hold `ids` of integers or text, one per sample", received)
    array = stored.read()
    if stored.dtype.kind == "S":
        array = np.char.decode(array, "utf-8", "surrogateescape")
    ids = array.tolist()
    num_repeated = len(ids) - len(set(ids))
    if num_repeated:
        fail(name, "hold distinct `ids`", f"{num_repeated} repeated ones")
    return ids


def _check_positions(network: Network, command: str) -> None:
    """Raise unless the options say what each axis of the layers is."""
    positions = network.positions
    channels = network.channels
    if positions == "neurons":
        return
    for layer, array in network.layers.items():
        if len(array.shape) < 3 or (positions and channels):
            continue
        option = "channels" if positions else "positions"
        choices = " or ".join(CHANNELS if positions else POSITIONS)
        is_image = len(array.shape) == 4 and array.shape[2] == array.shape[3]
        choice = channels or ("first" if is_image else "last")
        fail(
            option,
            f"be {choices} for layers of more than two axes",
            f"none for {layer} of shape {array.shape} in {network.path}",
            f"For instance: {command} --positions {positions or 'mean'} --channels {choice}",
        )


def _read_mask(name: str, stored: StoredArray) -> np.ndarray | None:
    """Return the mask of positions, [n, positions], or None if it leaves nothing out."""
    entries = stored.read().reshape(stored.shape[0], -1)
    mask = entries == 1
    wrong_entries = entries[~mask & (entries != 0)]
    if wrong_entries.size:
        fail(name, "hold a `mask` of zeros and ones", wrong_entries[0])
    is_empty = ~mask.any(1)
    if is_empty.any():
        requirement = "hold a `mask` that leaves a position to each sample"
        fail(name, requirement, f"none in row {np.argmax(is_empty)}")
    return None if mask.all() else mask


def align(networks: Sequence[Network], max_samples: int | None) -> list[str]:
    """Choose the rows of the samples of both networks, and return sentences on the choice.

    Raises:
        WrongValue: If the files do not hold the same samples.
    """
    first, second = networks
    if (first.ids is None) != (second.ids is None):
        missing = first if first.ids is None else second
        advice = f"Store them in {missing.path} as well, or in neither file"
        fail(missing.name, "hold `ids`, as the other file does", "none", advice)
    number = len(first.rows)
    if first.ids is not None and second.ids is not None:
        sentences = [_align_ids(networks, first.ids, second.ids)]
    elif number == len(second.rows):
        sentences = [
            f"Without `ids`, row i of both files is taken as the same sample, of {number}."
        ]
    else:
        advice = "Store `ids` in both files, which align the samples"
        requirement = f"hold the same samples as `a`, which has {number}"
        fail("b", requirement, len(second.rows), advice)
    number = len(first.rows)
    if number < 2:
        fail("a", "have at least 2 samples that `b` has", number)
    if max_samples is not None and max_samples < number:
        subset = np.sort(permutation(number)[:max_samples])
        for network in networks:
            network.rows = network.rows[subset]
        sentences.append(f"A fixed subset of {max_samples} of {number} samples is compared.")
    _align_positions(networks)
    for network in networks:
        if network.leaves_mask:
            sentences.append(f"The `mask` of {network.path} is not used.")
    if first.positions != "samples" and (first.mask is None) != (second.mask is None):
        masked = second if first.mask is None else first
        sentences.append(f"Only {masked.path} has a `mask` that leaves positions out.")
    return sentences


def _align_ids(networks: Sequence[Network], ids: list[Any], other_ids: list[Any]) -> str:
    """Choose the rows whose ids are in both files, and return a sentence on the others."""
    row_of_id = {label: row for row, label in enumerate(other_ids)}
    rows = [row for row, label in enumerate(ids) if label in row_of_id]
    if not rows:
        received = f"none of {len(ids)}; the first are {ids[0]!r} in `a` and {other_ids[0]!r}"
        fail("b", "hold some of the `ids` of `a`", received)
    networks[0].rows = np.asarray(rows)
    networks[1].rows = np.asarray([row_of_id[ids[row]] for row in rows])
    num_dropped = len(ids) - len(rows)
    num_other_dropped = len(other_ids) - len(rows)
    sentence = f"{len(rows)} samples have the same `ids`."
    if num_dropped or num_other_dropped:
        sentence += f" Left out: {num_dropped} in A alone, {num_other_dropped} in B alone."
    return sentence


def _align_positions(networks: Sequence[Network]) -> None:
    """Give masks the order of the compared samples, and share one if positions are samples."""
    masks = []
    sizes: dict[int, str] = {}
    for network in networks:
        for name, layer in network.layers.items():
            sizes[int(np.prod(network.grid(layer)))] = name
        if network.mask is not None:
            network.mask = network.mask[network.rows]
            masks.append(network.mask)
    if networks[0].positions == "samples":
        if len(sizes) > 1:
            received = ", ".join(f"{size} in {name}" for size, name in sizes.items())
            fail("positions", "not be 'samples' if numbers of positions differ", received)
        for network in networks:
            network.mask = masks[0] if masks else None
        if masks and not np.array_equal(masks[0], masks[-1]):
            fail("b", "hold the `mask` of `a` for --positions samples", "another one")
    for network in networks:
        if network.mask is not None:
            _check_mask(network, network.mask)


def _check_mask(network: Network, mask: Any) -> None:
    """Raise unless layers with positions have those of the mask."""
    for name, layer in network.layers.items():
        size = int(np.prod(network.grid(layer)))
        if network.grid(layer) and size != mask.shape[1]:
            requirement = f"hold a `mask` of {size} positions, as {name} has"
            fail(network.name, requirement, mask.shape[1])


def groups_of(network: Network) -> np.ndarray | None:
    """Return the sample of each row, if a mask leaves some positions of samples."""
    if network.mask is None or network.positions != "samples":
        return None
    counts = network.mask.sum(1)
    return np.repeat(np.arange(len(counts)), counts)


def num_positions_of(network: Network) -> int:
    """Return the number of positions that are samples."""
    if network.positions != "samples":
        return 1
    return int(np.prod(network.grid(next(iter(network.layers.values())))))


def feature_bytes(network: Network) -> int:
    """Return the bytes of all features of the compared samples."""
    row_bytes = 0
    for layer in network.layers.values():
        row_bytes += network.width(layer) * np.result_type(layer.dtype, np.float32).itemsize
    groups = groups_of(network)
    if groups is not None:
        return len(groups) * row_bytes
    return len(network.rows) * num_positions_of(network) * row_bytes


def read_layers(network: Network) -> dict[str, np.ndarray]:
    """Return all layers, in memory."""
    features = {}
    for name, layer in network.layers.items():
        features[name] = np.concatenate(list(network.batches(layer)))
    return features


def digest_of(networks: Sequence[Network]) -> np.ndarray:
    """Return a hash of the contents of all layers, after checks of all numbers."""
    digest = hashlib.blake2b(digest_size=16)
    for network in networks:
        for name, layer in network.layers.items():
            digest.update(f"{network.name} {name} {layer.shape}".encode())
            for block in network.batches(layer):
                digest.update(np.ascontiguousarray(block).data)
    return np.frombuffer(digest.digest(), np.uint8)
