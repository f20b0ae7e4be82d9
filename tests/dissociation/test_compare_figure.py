"""The figure of two files: alignment, positions, best matches, batches, wrong inputs, and what it writes."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from drawn import assert_figure

from dissociation.figures import _compare_networks as files
from dissociation.figures import compare, main
from dissociation.similarity import compare as compare_arrays
from dissociation.similarity._pairs import Comparison

KEY = jax.random.key(0)
NUM_SAMPLES = 60
COLUMN = np.ones((NUM_SAMPLES, 1), np.float32)
ORDER = np.random.default_rng(3).permutation(NUM_SAMPLES)


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
B = layers_of(2, 4, 16, shift=1)  # of the shapes of A, which compiles once


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
    assert planted.best_other.values.tolist()[:3] == [1, 2, 3]
    rows = compare.table(planted)
    assert rows[2][:2] == ["a: layers.1", "b: layers.0"]
    assert rows[6][:2] == ["b: layers.1", "a: layers.2"]
    assert len(rows) == 1 + 4 + 4


def test_tables_are_those_of_compare_and_corrected(planted):
    found = compare_arrays(A, B, num_blocks=20, p_values=True, progress=None)
    for name in ("values", "estimate", "low", "high", "baseline"):
        np.testing.assert_allclose(planted[name], getattr(found, name), atol=1e-6)
    np.testing.assert_allclose(planted.corrected, found.corrected("holm"), rtol=1e-6)
    assert "same order" not in compare.headline(planted)


def test_ids_align_samples_and_count_the_others(planted, tmp_path):
    ids = np.arange(NUM_SAMPLES)
    extra = {name: np.concatenate([array, array[:2]]) for name, array in A.items()}
    found = computed(
        tmp_path,
        a={**extra, "ids": np.append(ids, [1000, 1001])},
        b={name: array[ORDER] for name, array in B.items()} | {"ids": ids[ORDER]},
    )
    np.testing.assert_allclose(found["values"], planted["values"], atol=1e-6)
    assert "2 in A alone, 0 in B alone" in compare.headline(found)


def test_ids_of_other_types_are_the_same(tmp_path):
    ids = 2**62 + np.arange(NUM_SAMPLES)  # a float of 53 bits would join neighbours
    text = np.char.add("é", ids.astype(str))
    for pair in ((ids, ids.astype(np.uint64)), (text, np.char.encode(text, "utf-8"))):
        networks = []
        for labels in (pair[0], pair[1][ORDER]):
            path = written(tmp_path, x=COLUMN, ids=labels)
            networks.append(files.read_network("a", path, None, None, ""))
        assert files.align(networks, None) == ["60 samples have the same `ids`."]
        np.testing.assert_array_equal(networks[1].rows, np.argsort(ORDER))


def test_few_samples_have_no_interval(tmp_path):
    few = [{name: array[:4] for name, array in layers.items()} for layers in (A, B)]
    found = computed(tmp_path, *few)
    assert np.isfinite(found["values"]).all()
    assert np.isnan(found.low).all()


def test_what_is_not_used_is_said(tmp_path):
    extra = {"logits": COLUMN.astype(str).repeat(2, 1), "mask": MASK}
    config = compare.Config(written(tmp_path, "a", **A, **extra), written(tmp_path, "b", **B))
    sentences = compare.source(config).sentences
    assert "Logits are left out" in sentences
    assert "a.npz is not used" in sentences
    config = dataclasses.replace(
        config, a=written(tmp_path, "a", x=IMAGES, mask=MASK), positions="mean", channels="first"
    )
    assert "a.npz has a `mask` that leaves positions out" in compare.source(config).sentences


def test_padding_counts_for_no_memory(tmp_path):
    arrays = {"x": IMAGES, "mask": np.arange(4) < np.ones((NUM_SAMPLES, 1))}
    config = compare.Config(
        written(tmp_path, "a", **arrays),
        written(tmp_path, "b", **arrays),
        positions="samples",
        channels="first",
        memory_budget=compare.COPIES * 2 * IMAGES.nbytes // 4,
    )
    assert compare.source(config).comparison is not None


def test_a_bias_is_shown_beside_chance(tmp_path):
    rng = np.random.default_rng(0)
    a, b = ({name: rng.normal(size=(NUM_SAMPLES, 16)) for name in A} for _ in range(2))
    found = computed(tmp_path, a, b, measure="linear_cka", num_blocks=7)
    assert found.estimate.mean() < 0.1 < found.baseline.min()
    row = dict(zip(*compare.table(found)[:2], strict=True))
    best = found.best.values[0]
    assert row["linear CKA"] == f"{found['values'].values[0, best]:.3f}"
    assert row["linear CKA without bias"] == f"{found.estimate.values[0, best]:.3f}"
    assert "circles and dashes have it" in compare.caption(found)


def test_shuffled_rows_are_at_chance_and_ask_for_their_order(tmp_path):
    found = computed(tmp_path, b={name: array[ORDER] for name, array in B.items()})
    assert np.abs(found["values"]).max() < 0.25
    assert "are the rows of both files in the same order?" in compare.headline(found)


def test_a_copy_with_permuted_neurons_has_cka_1_and_a_distance_takes_the_smallest(tmp_path):
    permuted = {name: array[:, ::-1] for name, array in reversed(A.items())}
    for measure, value in (("procrustes_distance", 0), ("debiased_cka", 1)):
        found = computed(tmp_path, b=permuted, measure=measure, num_orders=19)
        assert found.best.values.tolist() == [3, 2, 1, 0]
        best = found["values"].values[range(4), found.best]
        np.testing.assert_allclose(best, value, atol=5e-2 if value == 0 else 1e-5)


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


@pytest.mark.parametrize("has_mask", [pytest.param(False, marks=pytest.mark.slow), True])
def test_positions_of_a_sample_stay_together(tmp_path, has_mask):
    rows = IMAGES.transpose(0, 2, 3, 1).reshape(NUM_SAMPLES, 4, 3)
    other = np.tanh(rows @ np.ones((3, 5), np.float32))
    networks = {"a": {"image": rows}, "b": {"image": other}}
    options = {"num_blocks": 5, "num_orders": 9}
    arrays = {"members": False, "positions": "samples", "channels": "last"}
    if has_mask:
        networks["a"]["mask"] = MASK
        arrays = {"groups": np.repeat(np.arange(NUM_SAMPLES), MASK.sum(1))}
        rows, other = rows[MASK], other[MASK]
    found = computed(tmp_path, **networks, **options, positions="samples", channels="last")
    expected = compare_arrays(rows, other, **options, **arrays, key=KEY)
    for name in ("values", "low", "p_values"):
        value = np.ravel(getattr(expected, name))
        np.testing.assert_allclose(np.ravel(found[name]), value, atol=1e-5)


@pytest.mark.parametrize("measure", ["debiased_cka", "linear_cka"])
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_batches_give_what_memory_gives(tmp_path, monkeypatch, measure, suffix):
    monkeypatch.setattr("dissociation.figures._compare_measures.BATCH_NUMBERS", 13 * 16)
    save = pytest.importorskip("safetensors.numpy").save_file
    paths = []
    for name, layers, order in (("a", A, ORDER), ("b", B, np.arange(NUM_SAMPLES))):
        arrays = {layer: array[order] for layer, array in layers.items()} | {"ids": order}
        path = written(tmp_path, name, **arrays)
        if suffix == ".safetensors":
            path = str(tmp_path / f"{name}{suffix}")
            save(arrays, path)
        paths.append(path)
    found = [
        compare.compute(compare.Config(*paths, measure, num_blocks=7, memory_budget=size), key=KEY)
        for size in (None, 1000)
    ]
    for name in ("values", "estimate", "low", "high", "baseline"):
        np.testing.assert_allclose(found[1][name], found[0][name], atol=1e-5)
    assert "same order" not in compare.headline(found[1])
    assert "not computed" in compare.table(found[1])[1]


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
    assert_figure(compare, config, KEY, results, folder, dims=dims, rows=9, parts=parts)


def with_files(a=A, b=B, *options):
    return lambda folder: [written(folder, "a", **a), written(folder, "b", **b), *options]


def with_bytes(name, contents):
    def write(folder):
        (folder / name).write_bytes(contents)
        return [written(folder, "a", **A), str(folder / name)]

    return write


NAN = B["layers.0"].copy()
NAN[7, 3] = np.nan
IDS = np.arange(NUM_SAMPLES)
WIDE = np.ones((NUM_SAMPLES, 9000))
MEAN = ("--positions", "mean", "--channels", "first")
BUDGET = ("--memory-budget", "9000")
WRONG = {
    "one file": (2, "`b` must name a file", lambda folder: [written(folder, "a", **A)]),
    "no layer": (2, "at least one layer", with_files(b={"ids": IDS})),
    "empty": (1, "b.npz", with_bytes("b.npz", b"")),
    "missing": (1, "none.npz", lambda folder: [written(folder, "a", **A), str(folder / "none.npz")]),
    "suffix": (2, "b.csv", with_bytes("b.csv", b"1,2")),
    "pickle": (1, "torch.load", with_bytes("b.pt", b"PK")),
    "folder": (1, "directory", lambda folder: [written(folder, "a", **A), str(folder)]),
    "text": (2, "real numbers", with_files(b={"x": COLUMN.astype(str)})),
    "NaN": (2, "layers.0, row 7", with_files(b={"layers.0": NAN})),
    "one sample": (2, "at least 2 samples", with_files({"x": COLUMN[:1]}, {"x": COLUMN[:1]})),
    "case": (2, "Layer and layer", with_files(b={"Layer": COLUMN, "layer": COLUMN})),
    "lengths": (2, "which has 60", with_files(b={"x": COLUMN[:50]})),
    "ids of one": (2, "`ids`, as the other", with_files(b=B | {"ids": IDS})),
    "repeated ids": (2, "distinct `ids`", with_files(b=B | {"ids": IDS // 2})),
    "ids of numbers and text": (2, "are 0 in `a` and '0'", with_files(A | {"ids": IDS}, B | {"ids": IDS.astype(str)})),
    "no common ids": (2, "some of the `ids`", with_files(A | {"ids": IDS}, B | {"ids": IDS + 100})),
    "axes": (2, "--positions mean --channels first", with_files(b={"x": IMAGES})),
    "mask": (2, "`mask` of 4 positions", with_files(A, {"x": IMAGES, "mask": MASK[:, :3]}, *MEAN)),
    "signed mask": (2, "zeros and ones, got -1", with_files(A, {"x": IMAGES, "mask": MASK * 2 - 1}, *MEAN)),
    "tiny": (2, "b.npz['x']` must have an entry of at least", with_files(b={"x": 1e-300 * COLUMN.astype(float)})),
    "wide": (2, "bytes of sums of products of the widest layer", with_files(A, {"x": WIDE}, *BUDGET)),
    "narrow": (2, "fewer features than samples", with_files(A, {"x": WIDE[:, :59]}, "--measure", "cca")),
    "budget": (2, "--max-samples", with_files(A, B, "--measure", "rsa", *BUDGET)),
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
    a = written(tmp_path, "a", x=A["layers.0"][:, :3])
    b = written(tmp_path, "b", **{"im\nage|": IMAGES})
    out = ["--out", str(tmp_path / "out"), "--silent"]
    assert main(["compare", a, b, "--num-blocks", "3", *out]) == 2
    command = capsys.readouterr().err.split("For instance: ")[1].rstrip(".\n")
    words = command.split()[3:]
    assert "--num-blocks" in words
    assert main([*words, *out]) == 0
    (folder,) = (tmp_path / "out").iterdir()
    assert "| b: im age\\| | a: x |" in (folder / "compare.md").read_text()
    assert json.loads((folder / "compare.json").read_text())["config"]["positions"] == "mean"


@pytest.mark.slow
def test_a_run_that_stopped_computes_only_what_is_missing(tmp_path, monkeypatch):
    tables = Comparison.tables
    computed_steps = []

    def counted(comparison, steps, **options):
        computed_steps.append(steps[0][0])
        if len(computed_steps) == 3:
            raise KeyboardInterrupt
        return tables(comparison, steps, **options)

    monkeypatch.setattr(Comparison, "tables", counted)
    paths = written(tmp_path, "a", **A), written(tmp_path, "b", **B)
    config = compare.Config(*paths, "mutual_knn", num_orders=60)
    with pytest.raises(KeyboardInterrupt):
        compare.compute(config, key=KEY, cache=tmp_path / "parts")
    results = compare.compute(config, key=KEY, cache=tmp_path / "parts")
    # All samples are computed twice for the estimate of the time.
    steps = ["all", "all", "orders", "all", "orders", "orders", "orders", "blocks"]
    assert computed_steps == steps
    assert results.equals(compare.compute(config, key=KEY))
    monkeypatch.undo()
    whole = compare_arrays(A, B, "mutual_knn", p_values=True, num_orders=60, key=KEY)
    np.testing.assert_allclose(results.corrected.values, whole.corrected("largest"))


def test_similarities_draw_both_networks(planted):
    found = compare_arrays(A, B, num_blocks=20, progress=None)
    matrix, _, *panels = found.plot().axes
    np.testing.assert_allclose(matrix.images[0].get_array(), found.estimate)
    np.testing.assert_array_equal(matrix.lines[0].get_xdata(), planted.best)
    np.testing.assert_array_equal(matrix.lines[1].get_ydata(), planted.best_other)
    assert [axes.get_title() for axes in panels] == ["layers of A in B", "layers of B in A"]
    for axis, axes in zip((1, 0), panels, strict=True):
        np.testing.assert_allclose(axes.lines[0].get_ydata(), found.estimate.max(axis))
    within = dataclasses.replace(found, counts_once=True).plot().axes[0].images[0]
    assert within.get_array().mask.diagonal().all()


def test_p_values_at_their_floor_are_bounds(planted):
    p_values = planted.p_values.copy(data=np.full((4, 4), 1e-16))
    floored = planted.assign(p_values=p_values, corrected=16 * p_values)
    assert compare.table(floored)[1][-1] == "< 1.6e-15"
    assert "for all pairs, are < 1.6e-15." in compare.caption(floored)
