"""The figure of two files: alignment, positions, best matches, batches, wrong inputs, and what it writes."""

import json
from functools import partial

import jax
import numpy as np
import pytest
from drawn import assert_figure

from dissociation.figures import _compare_files as files
from dissociation.figures import compare, main
from dissociation.similarity import compare as compare_arrays
from dissociation.similarity._pairs import Comparison

KEY = jax.random.key(0)
NUM_SAMPLES = 60
COLUMN = np.ones((NUM_SAMPLES, 1), np.float32)


def layers_of(seed, num_layers, width, shift=0):
    """Return layers of a network that all networks share, from layer `shift` on, in other coordinates."""
    hidden = np.random.default_rng(0).normal(size=(NUM_SAMPLES, 12))
    rng = np.random.default_rng(seed)
    layers = {}
    for index in range(num_layers + shift):
        shared = np.random.default_rng(100 + index)
        hidden = np.tanh(hidden @ shared.normal(size=(12, 12)) / 3)
        hidden = hidden + 0.5 * shared.normal(size=hidden.shape)
        if index >= shift:
            features = hidden @ rng.normal(size=(12, width)) + 0.2 * rng.normal(
                size=(NUM_SAMPLES, width)
            )
            layers[f"layers.{index - shift}"] = features.astype(np.float32)
    return layers


A = layers_of(1, 4, 16)
B = layers_of(2, 3, 16, shift=1)


def written(folder, name="x", **arrays):
    path = folder / f"{name}.npz"
    np.savez(path, **arrays)
    return str(path)


def computed(folder, a=A, b=B, **options):
    config = compare.Config(written(folder, "a", **a), written(folder, "b", **b), **options)
    return compare.compute(config, key=KEY)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return computed(tmp_path_factory.mktemp("planted"))


def test_best_matches_off_the_diagonal_are_found(planted):
    assert planted.best.values.tolist()[1:] == [0, 1, 2]
    assert planted.best_other.values.tolist() == [1, 2, 3]
    rows = compare.table(planted)
    assert rows[2][:2] == ["a: layers.1", "b: layers.0"]
    assert rows[6][:2] == ["b: layers.1", "a: layers.2"]
    assert len(rows) == 1 + 4 + 3


def test_tables_are_those_of_compare_and_corrected(planted):
    found = compare_arrays(A, B, num_blocks=20, p_values=True, progress=None)
    for name in ("values", "estimate", "low", "high", "baseline"):
        np.testing.assert_allclose(planted[name].values, getattr(found, name), atol=1e-6)
    np.testing.assert_allclose(planted.corrected.values, found.corrected("holm"), rtol=1e-6)
    assert "same order" not in compare.headline(planted)


def test_ids_align_samples_and_count_the_others(planted, tmp_path):
    order = np.random.default_rng(3).permutation(NUM_SAMPLES)
    ids = np.arange(NUM_SAMPLES)
    shuffled = {name: array[order] for name, array in B.items()}
    extra = {name: np.concatenate([array, array[:2]]) for name, array in A.items()}
    found = computed(
        tmp_path,
        a={**extra, "ids": np.append(ids, [1000, 1001])},
        b={**shuffled, "ids": ids[order]},
    )
    np.testing.assert_allclose(found["values"], planted["values"], atol=1e-6)
    assert "2 in A alone, 0 in B alone" in compare.headline(found)


LARGE = 2**62 + np.arange(NUM_SAMPLES)


@pytest.mark.parametrize(
    ("ids", "other_ids"),
    [
        (LARGE, LARGE.astype(np.uint64)),  # a float of 53 bits would join neighbours
        (
            np.char.add("é", np.arange(NUM_SAMPLES).astype(str)),
            np.char.encode(np.char.add("é", np.arange(NUM_SAMPLES).astype(str)), "utf-8"),
        ),
    ],
)
def test_ids_of_other_types_are_the_same(tmp_path, ids, other_ids):
    order = np.random.default_rng(3).permutation(NUM_SAMPLES)
    a = files.read_network("a", written(tmp_path, "a", x=COLUMN, ids=ids), None, None, "")
    path = written(tmp_path, "b", x=COLUMN, ids=other_ids[order])
    b = files.read_network("b", path, None, None, "")
    assert files.align(a, b, None) == ["60 samples have the same `ids`."]
    np.testing.assert_array_equal(b.rows, np.argsort(order))


def test_a_bias_is_shown_beside_chance(tmp_path):
    rng = np.random.default_rng(0)
    arrays = [{"x": rng.normal(size=(100, 30)), "y": rng.normal(size=(100, 20))} for _ in range(2)]
    found = computed(tmp_path, *arrays, measure="linear_cka")
    assert found.estimate.values.max() < 0.1 < found.baseline.values.min()
    header, first, *_ = compare.table(found)
    row = dict(zip(header, first, strict=True))
    best = found.best.values[0]
    assert row["linear CKA"] == f"{found['values'].values[0, best]:.3f}"
    assert row["linear CKA without bias"] == f"{found.estimate.values[0, best]:.3f}"
    assert "circles and dashes have it" in compare.caption(found)


def test_shuffled_rows_are_at_chance_and_ask_for_their_order(tmp_path):
    order = np.random.default_rng(4).permutation(NUM_SAMPLES)
    found = computed(tmp_path, b={name: array[order] for name, array in B.items()})
    assert np.abs(found["values"]).max() < 0.25
    assert "are the rows of both files in the same order?" in compare.headline(found)


def test_a_copy_with_permuted_neurons_has_cka_1_and_a_distance_takes_the_smallest(tmp_path):
    order = np.random.default_rng(5).permutation(16)
    permuted = {name: array[:, order] for name, array in reversed(A.items())}
    found = computed(tmp_path, b=permuted, measure="procrustes_distance", num_orders=19)
    assert found.best.values.tolist() == [3, 2, 1, 0]
    np.testing.assert_allclose(found["values"].values[range(4), [3, 2, 1, 0]], 0, atol=5e-2)
    assert np.nanmin(found.corrected) == 1 / 20
    similar = computed(tmp_path, b=permuted)
    np.testing.assert_allclose(similar.estimate.values[range(4), [3, 2, 1, 0]], 1, atol=1e-5)


def test_masks_that_are_not_used_are_told(tmp_path):
    networks = []
    for name, arrays in (("a", {"mask": MASK}), ("b", {})):
        path = written(tmp_path, name, x=IMAGES, **arrays)
        networks.append(partial(files.read_network, name, path, channels="first", command=""))
    sentences = files.align(*(read(positions="mean") for read in networks), None)
    assert sentences[-1].endswith("a.npz has a `mask` that leaves positions out.")
    sentences = files.align(*(read(positions="neurons") for read in networks), None)
    assert sentences[-1].endswith("a.npz is not used.")


IMAGES = np.random.default_rng(6).normal(size=(NUM_SAMPLES, 3, 2, 2)).astype(np.float32)
MASK = np.ones((NUM_SAMPLES, 4), bool)
MASK[::2, 2:] = False
REDUCED = {
    "neurons": lambda x: x.reshape(NUM_SAMPLES, -1),
    "mean": lambda x: np.stack([row[:, keep].mean(1) for row, keep in zip(x, MASK, strict=True)]),
    "first": lambda x: x[:, :, 0],
    "last": lambda x: np.stack([row[:, keep][:, -1] for row, keep in zip(x, MASK, strict=True)]),
}


@pytest.mark.parametrize("positions", REDUCED)
def test_positions_are_reduced_without_padding(tmp_path, positions):
    padded = IMAGES.copy().reshape(NUM_SAMPLES, 3, 4)
    if positions != "neurons":
        padded.transpose(0, 2, 1)[~MASK] = np.nan
    path = written(tmp_path, x=padded, mask=MASK)
    network = files.read_network("a", path, positions, "first", "command")
    features = np.concatenate(list(network.batches(network.layers["x"], 7)))
    expected = REDUCED[positions](IMAGES.reshape(NUM_SAMPLES, 3, 4))
    np.testing.assert_allclose(features, expected, rtol=1e-6)


@pytest.mark.parametrize("has_mask", [False, True])
def test_positions_of_a_sample_stay_together(tmp_path, has_mask):
    rows = IMAGES.transpose(0, 2, 3, 1).reshape(NUM_SAMPLES, 4, 3)
    other = np.tanh(rows @ np.ones((3, 5), np.float32))
    networks = {
        "a": {"image": IMAGES},
        "b": {"image": np.moveaxis(other.reshape(NUM_SAMPLES, 2, 2, 5), -1, 1)},
    }
    options = {"positions": "samples", "channels": "first", "num_blocks": 5, "num_orders": 9}
    if has_mask:
        networks["a"]["mask"] = MASK
    found = computed(tmp_path, **networks, **options)
    chosen = MASK if has_mask else np.ones_like(MASK)
    groups = np.repeat(np.arange(NUM_SAMPLES), chosen.sum(1))
    if has_mask:
        expected = compare_arrays(
            rows[chosen], other[chosen], groups=groups, num_blocks=5, key=KEY, num_orders=9
        )
    else:
        expected = compare_arrays(
            rows,
            other,
            members=False,
            positions="samples",
            channels="last",
            num_blocks=5,
            key=KEY,
            num_orders=9,
        )
    for name in ("values", "low", "p_values"):
        np.testing.assert_allclose(
            found[name].item(), np.ravel(getattr(expected, name))[0], atol=1e-5
        )


@pytest.mark.parametrize("measure", ["debiased_cka", "linear_cka"])
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_batches_give_what_memory_gives(tmp_path, monkeypatch, measure, suffix):
    a = written(tmp_path, "a", **A)
    b = written(tmp_path, "b", ids=np.arange(NUM_SAMPLES), **B)
    order = np.random.default_rng(7).permutation(NUM_SAMPLES)
    a = written(tmp_path, "a", ids=order, **{name: array[order] for name, array in A.items()})
    if suffix == ".safetensors":
        numpy = pytest.importorskip("safetensors.numpy")
        for name in "ab":
            numpy.save_file(dict(np.load(tmp_path / f"{name}.npz")), tmp_path / f"{name}{suffix}")
        a, b = (str(tmp_path / f"{name}{suffix}") for name in "ab")
    config = compare.Config(a, b, measure, num_blocks=7)
    whole = compare.compute(config, key=KEY)
    monkeypatch.setattr("dissociation.figures._compare_measures._num_rows", lambda *_: 13)
    small = compare.Config(a, b, measure, num_blocks=7, memory_budget=1000)
    batches = compare.compute(small, key=KEY)
    for name in ("values", "estimate", "low", "high", "baseline"):
        np.testing.assert_allclose(batches[name], whole[name], atol=1e-5)
    assert np.isnan(batches.corrected).all()
    assert "same order" not in compare.headline(batches)
    assert "not computed" in compare.table(batches)[1]


def test_the_files_and_the_figure(tmp_path):
    config = compare.Config(written(tmp_path, "a", **A), written(tmp_path, "b", **B))
    folder = tmp_path / "parts"
    results = compare.compute(config, key=KEY, cache=folder)
    dims = {
        "values": ("layers", "other_layers"),
        "best": ("layers",),
        "best_other": ("other_layers",),
    }
    parts = ("4 layers of a", "60 samples", "90 % intervals", "(c)")
    assert_figure(compare, config, KEY, results, folder, dims=dims, rows=8, parts=parts)


def with_layer(**arrays):
    return lambda folder: [written(folder, "a", **A), written(folder, "b", **arrays)]


def with_bytes(name, contents):
    def write(folder):
        (folder / name).write_bytes(contents)
        return [written(folder, "a", **A), str(folder / name)]

    return write


def with_ids(ids, **others):
    return with_layer(**B, ids=np.asarray(ids), **others)


NAN = B["layers.0"].copy()
NAN[7, 3] = np.nan
IDS = np.arange(NUM_SAMPLES)
WRONG = {
    "one file": (2, "`b` must name a file", lambda folder: [written(folder, "a", **A)]),
    "no layer": (2, "at least one layer", with_layer(ids=IDS)),
    "empty": (1, "b.npz", with_bytes("b.npz", b"")),
    "text file": (1, "b.npz", with_bytes("b.npz", b"layers")),
    "missing": (1, "none.npz", lambda folder: [written(folder, "a", **A), str(folder / "none.npz")]),
    "suffix": (2, "b.csv", with_bytes("b.csv", b"1,2")),
    "pickle": (1, "torch.load", with_bytes("b.pt", b"PK")),
    "folder": (1, "directory", lambda folder: [written(folder, "a", **A), str(folder)]),
    "text": (2, "real numbers", with_layer(x=np.full((NUM_SAMPLES, 2), "a"))),
    "complex": (2, "real numbers", with_layer(x=1j * COLUMN)),
    "NaN": (2, "layers.0, row 7", with_layer(**{"layers.0": NAN})),
    "one sample": (2, "at least", lambda folder: [written(folder, n, x=np.ones((1, 2))) for n in "ab"]),
    "case": (2, "Layer and layer", with_layer(Layer=COLUMN, layer=COLUMN)),
    "lengths": (2, "which has 60", with_layer(x=COLUMN[:50])),
    "lengths within": (2, "of the same samples", with_layer(x=COLUMN, y=COLUMN[:50])),
    "ids of one": (2, "`ids`, as the other", with_ids(IDS)),
    "repeated ids": (2, "distinct `ids`", with_ids(IDS // 2)),
    "real ids": (2, "integers or text", with_ids(0.5 * IDS)),
    "few ids": (2, "`ids` of 60 samples", with_ids(IDS[:50])),
    "no common ids": (
        2,
        "some of the `ids`",
        lambda folder: [written(folder, "a", ids=IDS, **A), written(folder, "b", ids=IDS + 100, **B)],
    ),
    "axes": (2, "--positions mean --channels first", with_layer(x=IMAGES)),
    "scalar": (2, "single number", with_layer(x=np.float32(1))),
    "mask": (
        2,
        "`mask` of 4 positions",
        lambda folder: [
            written(folder, "a", **A),
            written(folder, "b", x=IMAGES, mask=MASK[:, :3]),
            *("--positions", "mean", "--channels", "first"),
        ],
    ),
    "signed mask": (
        2,
        "zeros and ones, got -1",
        lambda folder: [
            written(folder, "a", x=IMAGES),
            written(folder, "b", x=IMAGES, mask=MASK * 2 - 1),
            *("--positions", "mean", "--channels", "first"),
        ],
    ),
    "wide": (
        2,
        "bytes of sums of products of the widest layer",
        lambda folder: [*with_layer(x=np.ones((60, 9000)))(folder), "--memory-budget", "9000"],
    ),
    "narrow": (2, "fewer features than samples", lambda folder: [*with_layer(x=np.ones((60, 59)))(folder), "--measure", "cca"]),
    "budget": (2, "--max-samples", lambda folder: [*with_layer(**B)(folder), "--measure", "rsa", "--memory-budget", "9000"]),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_inputs_end_with_a_sentence(case, tmp_path, capsys):
    status, words, write = WRONG[case]
    paths = write(tmp_path)
    capsys.readouterr()
    assert main(["compare", *paths, "--out", str(tmp_path / "out"), "--silent"]) == status
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_command_that_an_error_holds_works(tmp_path, capsys):
    a = written(tmp_path, "a", **A)
    b = written(tmp_path, "b", image=IMAGES)
    out = ["--out", str(tmp_path / "out"), "--silent"]
    assert main(["compare", a, b, "--num-blocks", "3", *out]) == 2
    command = capsys.readouterr().err.split("For instance: ")[1].rstrip(".\n")
    words = command.split()[3:]
    assert "--num-blocks" in words
    assert main([*words, *out]) == 0
    (folder,) = (tmp_path / "out").iterdir()
    assert "| b: image |" in (folder / "compare.md").read_text()
    assert json.loads((folder / "compare.json").read_text())["config"]["positions"] == "mean"


def test_a_run_that_stopped_computes_only_what_is_missing(tmp_path, monkeypatch):
    tables = Comparison.tables
    computed_steps = []

    def counted(comparison, steps):
        computed_steps.append(steps[0][0])
        if len(computed_steps) == 3:
            raise KeyboardInterrupt
        return tables(comparison, steps)

    monkeypatch.setattr(Comparison, "tables", counted)
    paths = written(tmp_path, "a", **A), written(tmp_path, "b", **B)
    config = compare.Config(*paths, "mutual_knn", num_orders=60)
    with pytest.raises(KeyboardInterrupt):
        compare.compute(config, key=KEY, cache=tmp_path / "parts")
    results = compare.compute(config, key=KEY, cache=tmp_path / "parts")
    assert computed_steps == ["all", "orders", "orders", "orders", "orders", "blocks"]
    assert results.equals(compare.compute(config, key=KEY))
    monkeypatch.undo()
    whole = compare_arrays(A, B, "mutual_knn", p_values=True, num_orders=60, key=KEY)
    np.testing.assert_allclose(results.corrected.values, whole.corrected("largest"))
