import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation import checkpoint


def tree(key):
    return {
        "weights": [jnp.arange(6.0).reshape(2, 3), jnp.array([1, 2], jnp.int8)],
        "half": jnp.array([0.1, jnp.inf], jnp.bfloat16),
        "numpy": np.arange(3, dtype=np.float64),
        "key": jax.random.split(key, 2),
        "numbers": (3, 2.5, True),
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
        return type(leaf)(0) if isinstance(leaf, int | float) else leaf

    return jax.tree.map(other, tree)


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert type(a) is type(b)
        if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            assert (a == b).all()
        elif isinstance(a, jax.Array | np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b


def test_round_trip(key, tmp_path):
    original = tree(key)
    checkpoint.save(tmp_path / "deep" / "file", original, {"step": 3})
    assert_same(checkpoint.restore(tmp_path / "deep" / "file", blank(original)), original)
    assert checkpoint.read_header(tmp_path / "deep" / "file") == {"step": 3}


def test_restored_keys_draw_the_same(key, tmp_path):
    for k in (key, jax.random.key(1, impl="rbg")):
        checkpoint.save(tmp_path / "file", {"key": k})
        restored = checkpoint.restore(tmp_path / "file", {"key": k})["key"]
        assert jax.random.uniform(restored) == jax.random.uniform(k)


def test_a_failed_write_leaves_the_old_file(key, tmp_path, monkeypatch):
    path = tmp_path / "file"
    checkpoint.save(path, jnp.ones(3), {"step": 1})

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint.os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(path, jnp.zeros(3), {"step": 2})
    assert checkpoint.read_header(path) == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_all_bytes_are_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    # Otherwise a loss of power may leave the new name with nothing, or half, behind it.
    done, fsync, replace = [], os.fsync, os.replace

    def synced(descriptor):
        fsync(descriptor)
        done.append(("on the disk", os.fstat(descriptor).st_size))

    def named(source, target, **options):
        done.append(("named", os.path.getsize(source)))
        replace(source, target, **options)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named)
    checkpoint.save(tmp_path / "file", jnp.ones(1000), {"step": 1})
    size = (tmp_path / "file").stat().st_size
    assert size > 4000
    assert ("on the disk", size) in done[: done.index(("named", size))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {"more": jnp.ones(2)}, r"lacks the leaf \['more'\]"),
        (lambda t: {"numpy": t["numpy"]}, r"holds the leaf \['empty'\], which `like` lacks"),
        (lambda t: t | {"half": t["half"][:1]}, r"the leaf \['half'\] has shape \(2,\).*wanted \(1,\)"),
        (lambda t: t | {"numpy": t["numpy"].astype(np.float32)}, r"\['numpy'\].*float64, wanted \(3,\) and float32"),
        (lambda t: t | {"key": jax.random.key(0)}, r"the leaf \['key'\] is a key"),
        (lambda t: t | {"numbers": (3.0, 2.5, True)}, r"the leaf \['numbers'\]\[0\] is 3, wanted a float"),
    ],
)
def test_misfits_name_the_leaf(key, tmp_path, change, message):
    checkpoint.save(tmp_path / "file", tree(key))
    with pytest.raises(ValueError, match=message):
        checkpoint.restore(tmp_path / "file", change(tree(key)))


def test_damage_is_noticed(key, tmp_path):
    path = tmp_path / "file"
    checkpoint.save(path, {"a": jnp.arange(100.0)})
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"damaged at the leaf \['a'\]"):
        checkpoint.restore(path, {"a": jnp.zeros(100)})
    path.write_bytes(whole + b"more")
    with pytest.raises(ValueError, match="damaged: 4 bytes follow its last leaf. Delete it"):
        checkpoint.restore(path, {"a": jnp.zeros(100)})
    path.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match="damaged at the leaf"):
        checkpoint.restore(path, {"a": jnp.zeros(100)})
    path.write_bytes(whole[:60])
    with pytest.raises(ValueError, match="its header cannot be read"):
        checkpoint.read_header(path)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="must be a checkpoint"):
        checkpoint.read_header(path)


def test_a_changed_header_is_noticed(tmp_path):
    path = tmp_path / "file"
    checkpoint.save(path, {"a": jnp.arange(3.0)}, {"step": 10})
    whole = path.read_bytes()
    assert whole.count(b'"step": 10') == 1
    path.write_bytes(whole.replace(b'"step": 10', b'"step": 90'))  # still JSON, and the leaves are whole
    with pytest.raises(ValueError, match=r"is damaged: its header cannot be read\. Delete it"):
        checkpoint.read_header(path)
    with pytest.raises(ValueError, match="is damaged"):
        checkpoint.restore(path, {"a": jnp.zeros(3)})
    path.write_bytes(whole)
    assert checkpoint.read_header(path) == {"step": 10}


def test_a_checkpoint_has_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "other").touch()
    checkpoint.save(tmp_path / "file", jnp.ones(3))
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_fingerprint_sees_every_value(key):
    prints = {checkpoint.fingerprint(tree(key)), checkpoint.fingerprint(tree(jax.random.key(1)))}
    changed = tree(key)
    changed["weights"][0] = changed["weights"][0].at[1, 2].add(1e-6)
    prints |= {checkpoint.fingerprint(changed), checkpoint.fingerprint(tree(key) | {"numbers": (3, 2.5, False)})}
    assert len(prints) == 4
    assert checkpoint.fingerprint(tree(key)) in prints
