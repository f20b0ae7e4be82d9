import json
import zlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation._core.files import RefusedFile
from dissociation.training import _checkpoint_file as checkpoint


def tree(key):
    return {
        "weights": [jnp.arange(6.0).reshape(2, 3), jnp.array([1, 2], jnp.int8)],
        "half": jnp.array([0.1, jnp.inf], jnp.bfloat16),
        "numpy": np.arange(3, dtype=np.float64),
        "long": np.array([2**40]),
        "key": jax.random.split(key, 2),
        "numbers": (3, 2.5, True, 10**30, complex("inf"), float("-inf")),
        "function": jnp.sin,
        "empty": jnp.zeros((0, 4)),
    }


def blank(tree):
    """The same structure with other values."""

    def other(leaf):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(99), leaf.shape)
        if isinstance(leaf, jax.Array | np.ndarray):
            return leaf * 0 + 7 if leaf.dtype != jnp.bool_ else leaf
        return type(leaf)(0) if isinstance(leaf, int | float | complex) else leaf

    return jax.tree.map(other, tree)


def test_round_trip(key, tmp_path):
    original = tree(key)
    checkpoint.save(tmp_path / "deep" / "file", original, {"step": 3})
    assert eqx.tree_equal(
        checkpoint.restore(tmp_path / "deep" / "file", blank(original)), original, typematch=True
    )
    assert checkpoint.read_header(tmp_path / "deep" / "file") == {"step": 3}


KINDS = [*"?bHqQegFG", ">f4", ">c16", ">M8[ns]", "m8[s]", jnp.bfloat16, jnp.float8_e4m3fn, jnp.int4]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_every_kind_of_numbers_comes_back(tmp_path, dtype):
    x = np.array([[0, 1, 2], [2, 3, 5]]).astype(dtype)
    given = {
        "rows": x,
        "columns": np.asfortranarray(x),
        "strided": x[::-1, ::2],
        "scalar": x[0, 0],
        "empty": x[:, :0],
    }
    given["no axis"] = x[1, 1:2].reshape(())
    checkpoint.save(tmp_path / "file", given)
    zeros = {name: np.zeros_like(one) for name, one in given.items()}
    zeros["scalar"] = zeros["scalar"][()]
    assert eqx.tree_equal(checkpoint.restore(tmp_path / "file", zeros), given, typematch=True)


def test_what_could_not_be_read_is_refused_by_name(tmp_path):
    masked, struct = (
        np.ma.array([1.0, 2.0], mask=[True, False]),
        jax.ShapeDtypeStruct((2,), jnp.float32),
    )
    for leaf in (
        np.array(["a", "bc"]),
        np.array([None, 1]),
        np.zeros(2, [("a", "f4"), ("b", "i4")]),
        masked,
        struct,
    ):
        with pytest.raises(
            TypeError,
            match=r"`tree` must hold arrays of numbers or dates, got a .* at \['x'\]\[1\]",
        ):
            checkpoint.save(tmp_path / "file", {"x": (1, leaf)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {"more": jnp.ones(2)}, r"the leaf \['more'\] is lacking"),
        (lambda t: {"numpy": t["numpy"]}, r"the leaf \['empty'\] is unknown"),
        (
            lambda t: t | {"half": t["half"][:1]},
            r"the leaf \['half'\] has shape \(2,\).*wanted \(1,\)",
        ),
        (
            lambda t: t | {"numpy": t["numpy"].astype(np.float32)},
            r"\['numpy'\].*float64, wanted \(3,\) and float32",
        ),
        (
            lambda t: t | {"key": jax.random.key(0)},
            r"the leaf \['key'\] has shape \(2,\) .*, wanted \(\)",
        ),
        (
            lambda t: t | {"numbers": (3.0, *t["numbers"][1:])},
            r"the leaf \['numbers'\]\[0\] is 3, wanted a float",
        ),
        (
            lambda t: t | {"long": jax.ShapeDtypeStruct((1,), np.int64)},
            r"\['long'\] is int64\. Enable JAX's 64 bits",
        ),
    ],
)
def test_misfits_name_the_leaf(key, tmp_path, change, message):
    checkpoint.save(tmp_path / "file", tree(key))
    with pytest.raises(ValueError, match=message):
        checkpoint.restore(tmp_path / "file", change(tree(key)))


def test_damage_is_noticed(tmp_path):
    path = tmp_path / "file"
    checkpoint.save(path, {"a": jnp.arange(100.0)}, {"step": 10})
    whole = path.read_bytes()
    for changed, message in (
        (whole[:-1] + bytes([whole[-1] ^ 1]), r"damaged at the leaf \['a'\]"),
        (whole + b"more", "damaged: 4 bytes follow its last leaf. Delete it"),
        (whole[:-10], "damaged at the leaf"),
        (whole[:60], "its header cannot be read"),
        (
            whole.replace(b'"step": 10', b'"step": 90'),
            r"is damaged: its header cannot be read\. Delete it",
        ),
        (b"something else", "must be a checkpoint"),
    ):
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=message):
            checkpoint.restore(path, {"a": jnp.zeros(100)})
    path.write_bytes(whole)
    assert checkpoint.read_header(path) == {"step": 10}


def test_fingerprint_sees_every_value(key):
    prints = {checkpoint.fingerprint(tree(key)), checkpoint.fingerprint(tree(jax.random.key(1)))}
    changed = tree(key)
    changed["weights"][0] = changed["weights"][0].at[1, 2].add(1e-6)
    prints |= {
        checkpoint.fingerprint(changed),
        checkpoint.fingerprint(tree(key) | {"numbers": (3, 2.5, False)}),
    }
    assert len(prints) == 4
    assert checkpoint.fingerprint(tree(key)) in prints


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "object"},
        {"shape": [7]},
        {"shape": "text"},
        {"kind": "key", "implementation": "unknown", "dtype": "uint32"},
        {"bytes": None},
        {"dtype": "no dtype"},
    ],
)
def test_a_header_that_is_well_formed_and_wrong_is_of_its_file(tmp_path, change):
    path = tmp_path / "file"
    checkpoint.save(path, {"x": jnp.arange(4.0)})
    contents = path.read_bytes()
    start = len(checkpoint.MAGIC) + 12
    end = start + int.from_bytes(contents[start - 12 : start - 4], "little")
    meta = json.loads(contents[start:end])
    meta["leaves"][0].update(change)
    header = json.dumps(meta).encode()
    sizes = len(header).to_bytes(8, "little") + zlib.crc32(header).to_bytes(4, "little")
    path.write_bytes(checkpoint.MAGIC + sizes + header + contents[end:])
    with pytest.raises(RefusedFile, match=f"^{path}") as refused:
        checkpoint.restore(path, {"x": jnp.zeros(4)})
    assert "Delete" in str(refused.value) or "wanted" in str(refused.value)
