"""Weights that PyTorch's libraries write, in models of Equinox: outputs as NumPy computes them."""

import tracemalloc

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from safetensors.numpy import save_file
from words import refused

from dissociation._core.files import RefusedFile
from dissociation.data import load_state

RNG = np.random.default_rng(0)
KEY = jax.random.key(0)
IMAGE = RNG.normal(size=(3, 16, 16))


def drawn(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def resnet18(conv, norm, dense, x):
    """Return logits of an image; operations get the names of torchvision."""
    relu = x.__array_namespace__().maximum
    x = relu(norm("bn1", conv("conv1", x, 4, 7, 2)), 0)
    for stage in range(1, 5):
        for block in (0, 1):
            name = f"layer{stage}.{block}"
            width = 4 * stage
            stride = 2 if stage > 1 and block == 0 else 1
            y = relu(norm(f"{name}.bn1", conv(f"{name}.conv1", x, width, 3, stride)), 0)
            y = norm(f"{name}.bn2", conv(f"{name}.conv2", y, width, 3, 1))
            if stride == 2:
                x = norm(f"{name}.downsample.1", conv(f"{name}.downsample.0", x, width, 1, 2))
            x = relu(x + y, 0)
    return dense("fc", x.mean((1, 2)))


def torch_resnet18():
    """Return the state dictionary of a network of random weights, and its logits by NumPy."""
    arrays = {}

    def conv(name, x, outputs, size, stride):
        weight = arrays[f"{name}.weight"] = drawn(outputs, len(x), size, size) / size
        pad = size // 2
        x = np.pad(x, ((0, 0), (pad, pad), (pad, pad)))
        windows = sliding_window_view(x, (size, size), (1, 2))[:, ::stride, ::stride]
        return np.einsum("chwij,ocij->ohw", windows, weight)

    def norm(name, x):
        mean, variance, weight, bias = values = drawn(4, len(x))
        variance **= 2
        names = ("running_mean", "running_var", "weight", "bias")
        arrays.update(zip([f"{name}.{entry}" for entry in names], values, strict=True))
        arrays[f"{name}.num_batches_tracked"] = np.array(7)
        return ((x.T - mean) / np.sqrt(variance + 1e-5) * weight + bias).T

    def dense(name, x):
        arrays[f"{name}.weight"], arrays[f"{name}.bias"] = drawn(10, len(x)), drawn(10)
        return arrays[f"{name}.weight"] @ x + arrays[f"{name}.bias"]

    return arrays, resnet18(conv, norm, dense, IMAGE)


def equinox_resnet18(mode):
    modules = {}

    def conv(name, x, outputs, size, stride):
        modules[name] = eqx.nn.Conv2d(len(x), outputs, size, stride, size // 2, use_bias=False, key=KEY)  # fmt: skip
        return modules[name](x)

    def norm(name, x):
        modules[name] = eqx.nn.BatchNorm(len(x), "batch", mode=mode)
        return x

    def dense(name, x):
        modules[name] = eqx.nn.Linear(len(x), 10, key=KEY)

    resnet18(conv, norm, dense, jnp.asarray(IMAGE))
    return modules


def logits_of(modules, state):
    def norm(name, x):
        nonlocal state
        x, state = modules[name](x, state)
        return x

    def layer(name, x, *_):
        return modules[name](x)

    return resnet18(layer, norm, layer, jnp.asarray(IMAGE)), state


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_resnet18_of_torchvision(tmp_path, mode):
    arrays, logits = torch_resnet18()
    save_file(arrays, tmp_path / "a.safetensors")
    abstract = eqx.filter_eval_shape(eqx.nn.make_with_state(equinox_resnet18), mode)
    model, state = load_state(
        abstract, tmp_path / "a.safetensors", {"*.num_batches_tracked": None, "*": "*"}
    )
    loaded, _ = eqx.filter_jit(logits_of)(eqx.nn.inference_mode(model), state)
    np.testing.assert_allclose(loaded, logits, rtol=1e-6, atol=1e-6 * abs(logits).max())
    # One update of the running statistics keeps 99 % of them.
    norm = model["bn1"]
    update = jax.vmap(norm, (0, None), (0, None), axis_name="batch")
    state = update(jnp.zeros((2, 4, 3)), state)[1]
    mean = state.get(norm.ema_state_index or norm.batch_state_index)[0]
    np.testing.assert_allclose(mean, 0.99 * arrays["bn1.running_mean"], rtol=1e-6)


SHAPES = {"ln_1": (8,), "ln_2": (8,), "attn.c_attn": (8, 24), "attn.c_proj": (8, 8), "mlp.c_fc": (8, 32), "mlp.c_proj": (32, 8)}  # fmt: skip
"""Shapes of weights of a block, [in, out], by the names of Hugging Face."""


def blank(shape):
    return eqx.nn.Linear(*shape, key=KEY) if len(shape) > 1 else eqx.nn.LayerNorm(*shape)


def gpt2(layer, x):
    """Return the last hidden layer of positions; operations get the names of Hugging Face."""
    xp = x.__array_namespace__()
    for block in ("h.0.", "h.1."):
        q, k, v = xp.split(layer(f"{block}attn.c_attn", layer(f"{block}ln_1", x)), 3, -1)
        scores = xp.tril(xp.exp(q @ k.T))
        x = x + layer(f"{block}attn.c_proj", scores / scores.sum(1, keepdims=True) @ v)
        y = layer(f"{block}mlp.c_fc", layer(f"{block}ln_2", x))
        x = x + layer(f"{block}mlp.c_proj", xp.maximum(y, 0))
    return layer("ln_f", x)


@pytest.mark.usefixtures("x64")
def test_gpt2_of_hugging_face(tmp_path):
    shapes = {"ln_f": (8,)}
    for block in ("h.0.", "h.1."):
        shapes |= {block + name: shape for name, shape in SHAPES.items()}
    arrays = dict.fromkeys(("h.0.attn.bias", "h.1.attn.bias"), np.ones((1, 1, 5, 5), np.float32))
    arrays["wte.weight"] = drawn(5, 8)
    for name, shape in shapes.items():
        arrays |= {f"{name}.weight": drawn(*shape) / 3, f"{name}.bias": drawn(shape[-1])}
    np.savez(tmp_path / "a.npz", **arrays)

    def by_numpy(name, x):
        weight = arrays[f"{name}.weight"]
        if weight.ndim == 1:
            x = x - x.mean(1, keepdims=True)
            x = x / np.sqrt(x.var(1, keepdims=True) + 1e-5) * weight
        else:
            x = x @ weight
        return x + arrays[f"{name}.bias"]

    hidden = gpt2(by_numpy, arrays["wte.weight"].astype(float))
    blocks = [jax.tree.map(blank, SHAPES, is_leaf=lambda node: isinstance(node, tuple)) for _ in range(2)]  # fmt: skip
    model = {"tokens": eqx.nn.Embedding(5, 8, key=KEY), "blocks": blocks, "norm": blank((8,))}
    names = {"*.attn.bias": None, "wte.*": "tokens.*", "ln_f.*": "norm.*", "h.*": "blocks.*"}
    with pytest.raises(ValueError, match=r"blocks.0.attn.c_attn.weight of shape \(24, 8\), got \(8, 24\). A transpose would fit"):  # fmt: skip
        load_state(model, tmp_path / "a.npz", names)
    loaded = load_state(
        model, tmp_path / "a.npz", names, lambda name, array: array.T if "c_" in name else array
    )

    def by_modules(name, x):
        is_last = name == "ln_f"
        return jax.vmap(loaded["norm"] if is_last else loaded["blocks"][int(name[2])][name[4:]])(x)

    np.testing.assert_allclose(gpt2(by_modules, loaded["tokens"].weight), hidden, rtol=1e-6)


def test_names_shapes_and_kinds_must_fit(tmp_path):
    model = [eqx.nn.Conv1d(2, 3, 1, key=KEY), np.zeros(2, int), KEY]
    arrays = {"0.weight": drawn(3, 2), "0.bias": drawn(3)}
    path = tmp_path / "a.safetensors"

    def load(changes, rename=None, **options):
        save_file(arrays | changes, path)
        return load_state(model, path, rename, **options)

    loaded = load({"1": np.array([3, 4])})
    np.testing.assert_array_equal(loaded[0].weight[..., 0], arrays["0.weight"])
    np.testing.assert_array_equal(loaded[0].bias[:, 0], arrays["0.bias"])
    np.testing.assert_array_equal(loaded[1], [3, 4])
    assert load({})[1:] == model[1:]
    refused(
        (lambda: load({"bn.running_mean": drawn(3)}, {"*.bi*s": "*.b*"}), "none for 0.bias; 0.bias as 0.ba, bn.running_mean, which `model` lacks.*pair \\(model, state"),
        (lambda: load({"0.weight": drawn(2, 3)}), r"shape \(3, 2, 1\), got \(2, 3\). A transpose would fit"),
        (lambda: load({"0.weight": drawn(6)}), r"shape \(3, 2, 1\), got \(6,\).$"),
        (lambda: load({}, lambda name: "0.bias"), "`rename` must give each array a name of its own, got 0.bias twice"),
        (lambda: load({}, convert=lambda name, array: array[:2]), r"shape \(3, 2, 1\), got \(2, 2\)"),
    )  # fmt: skip
    with pytest.raises(TypeError, match="numbers of dtype int64 as 1, got dtype float32"):
        load({"1": drawn(2)})
    with pytest.raises(RefusedFile, match="36 bytes, more than the 35 of"):
        load({}, memory_budget=35)


def test_arrays_take_the_dtype_of_the_model(tmp_path):
    values = drawn(3)
    half = values.astype(ml_dtypes.bfloat16)
    save_file({"a": half, "b": half, "c": values}, tmp_path / "a.safetensors")
    model = {"a": jnp.zeros(3), "b": jnp.zeros(3, jnp.bfloat16), "c": jnp.zeros(3, jnp.bfloat16)}
    with pytest.warns(RuntimeWarning, match="lose digits .*: c from float32 to bfloat16.$"):
        loaded = load_state(model, tmp_path / "a.safetensors")
    for name in model:
        assert loaded[name].dtype == model[name].dtype
        np.testing.assert_array_equal(loaded[name], half.astype(loaded[name].dtype))


@pytest.mark.parametrize(("value", "dtype"), [(1e6, jnp.float16), (1e300, jnp.float32)])
def test_numbers_that_overflow_are_refused(tmp_path, value, dtype):
    np.savez(tmp_path / "a.npz", a=np.array([1.0, value, np.inf]))
    with pytest.raises(ValueError, match=r"hold numbers that fit float\d\d as a, got 1e\+\d+"):
        load_state({"a": jnp.zeros(3, dtype)}, tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", a=np.array([1.0, -np.inf]))  # infinite before
    with pytest.warns(RuntimeWarning, match="lose digits"):
        loaded = load_state({"a": jnp.zeros(2, dtype)}, tmp_path / "b.npz")
    np.testing.assert_array_equal(loaded["a"], [1, -np.inf])


def test_a_file_is_never_whole_in_memory(tmp_path):
    names = "abcdefghijklmnop"
    np.savez(tmp_path / "a.npz", **{name: np.zeros(2**19, np.float32) for name in names})
    abstract = dict.fromkeys(names, jax.ShapeDtypeStruct((8,), jnp.float32))
    tracemalloc.start()
    # JAX frees an array a little after it was copied, so the model takes a few entries of each.
    load_state(abstract, tmp_path / "a.npz", convert=lambda name, array: array[:8].copy())
    assert tracemalloc.get_traced_memory()[1] < 2**23  # an array has 2**21 bytes, the file 2**25
    tracemalloc.stop()
