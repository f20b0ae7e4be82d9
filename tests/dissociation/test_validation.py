"""The gate: what stands for an array is taken, and what does not is refused by name."""

import re
import warnings
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pandas as pd
import pytest
from jaxtyping import Array, Float, Int, Real
from words import refused

from dissociation._core import checks
from dissociation._core.conversion import as_classes, as_examples, as_one_hot
from dissociation._core.types import (
    Classes,
    Count,
    Natural,
    NonNegative,
    OneHot,
    Positive,
    PRNGKey,
    PRNGKeys,
    Scalar,
    Size,
)
from dissociation._core.validation import validated


class Foreign:
    """Stands for another library's tensor: nothing but `__array__`."""

    def __init__(self, values):
        self.values = np.asarray(values)

    def __array__(self, dtype=None, copy=None):
        return self.values


class Capsule:
    """Nothing but DLPack."""

    def __init__(self, values):
        self.values = np.asarray(values)

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


@validated(finite=("x",))
def take(
    x: Float[Array | np.ndarray, "n d"],
    y: Float[Array | np.ndarray, "n *rest"] | None = None,
    *,
    more: Float[Array | np.ndarray, "n *rest"] | None = None,
    scale: Scalar = 1.0,
    count: int = 1,
    steps: Count = 1,
    flag: bool = False,
    key: PRNGKey | None = None,
    keys: PRNGKeys | None = None,
    fractions: Sequence[float] = (0.5,),
    module: eqx.nn.MLP | None = None,
    indices: Int[Array | np.ndarray, " k"] | None = None,
    paths: Float[Array | np.ndarray, "..."]
    | Sequence[Float[Array | np.ndarray, "time ..."]]
    | None = None,
) -> dict[str, Any]:
    """Returns what came through."""
    return dict(locals())


ROWS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


@pytest.mark.parametrize(
    "rows",
    [
        [np.array([1.0, 2.0]), jnp.array([3.0, 4.0]), (5, 6)],
        jnp.array(ROWS, jnp.bfloat16),
        np.array(ROWS, ">f4"),
        pd.DataFrame(ROWS),
        Foreign(ROWS),
        Capsule(ROWS),
    ],
    ids=lambda rows: f"{type(rows).__name__}-{getattr(rows, 'dtype', '')}",
)
def test_whatever_stands_for_an_array_is_taken(rows):
    x = take(rows)["x"]
    assert take(x)["x"] is x
    assert isinstance(x, np.ndarray | jax.Array)
    assert x.dtype in (np.float32, np.float64)
    np.testing.assert_array_equal(np.asarray(x, float), ROWS)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": None}, TypeError, r"`x` must be an array of real numbers \[n, d\], got None\."),
        ({"x": [["a", "b"]]}, TypeError, "`x` must be .*got text.*return_inverse=True"),
        ({"x": [[1.0], [2.0, 3.0]]}, ValueError, "`x` must be .*rows differ in shape"),
        (
            {"x": pd.DataFrame(ROWS, [list("aab"), [0, 1, 0]])},
            ValueError,
            "`x` must be .*several index levels",
        ),
        (
            {"x": np.ones((2, 2), complex)},
            TypeError,
            "`x` must hold real numbers, got dtype complex128",
        ),
        ({"x": np.ma.array(ROWS, mask=np.eye(3, 2))}, ValueError, "`x` must be .*masked"),
        ({"x": np.array(ROWS).astype("m8[s]")}, TypeError, "`x` must be .*dtype timedelta64"),
        ({"x": jax.random.key(0)}, TypeError, r"`x` must be .*dtype key<fry> and shape \(\)"),
        (
            {"x": [1.0, 2.0]},
            ValueError,
            r"`x` must be an array of real numbers \[n, d\], got shape \(2,\)",
        ),
        ({"x": [[1.0, np.nan]]}, ValueError, r"`x` must be finite, got nan at index \(0, 1\)"),
        (
            {"y": np.ones((2, 2))},
            ValueError,
            r"`y` must be .* \[n, \.\.\.\], got shape \(2, 2\), and \(3, 2\) for `x` \[n, d\]",
        ),
        (
            {"y": np.ones((3, 2)), "more": np.ones((3, 1))},
            ValueError,
            r"`more` .* \(3, 1\), .* and \(3, 2\) for `y`",
        ),
        ({"y": 2.0}, ValueError, r"`y` must be .* \[n, \.\.\.\], got shape \(\)"),
        ({"scale": True}, TypeError, "`scale` must be a number, got True"),
        ({"scale": Fraction(1, 2)}, TypeError, r"`scale` must be a number, got .* Fraction\."),
        ({"count": 2.0}, TypeError, "`count` must hold integers, got dtype float"),
        (
            {"key": jax.random.split(jax.random.key(0), 3)},
            ValueError,
            r"`key` must .* of shape \(3,\)\..*vmap",
        ),
        (
            {"keys": jax.random.PRNGKey(0)},
            ValueError,
            r"`keys` must be random keys, one per member",
        ),
        (
            {"fractions": 0.5},
            ValueError,
            r"`fractions` must be a sequence of real numbers, got shape \(\)",
        ),
        ({"module": jax.nn.relu}, TypeError, "`module` must be of type MLP, got the function relu"),
        ({"paths": [np.ones(3), ["a"]]}, TypeError, r"`paths\[1\]` must be an array .*text"),
        (
            {"paths": [np.ones(3), [1.0, 2.0]]},
            ValueError,
            r"`paths\[1\]` must be .*lists of shape \(2,\)\. Pass",
        ),
        (
            {"paths": [[1.0, 2.0], [3.0]]},
            ValueError,
            "`paths` must be .* or a list of arrays, got a list whose rows",
        ),
        (
            {"paths": [np.ones(3), np.asarray(1.0)]},
            ValueError,
            r"`paths\[1\]` must be .*got shape \(\)",
        ),
    ],
)
def test_the_rest_is_refused_by_name(arguments, error, message):
    with pytest.raises(error, match="^" + message):
        take(**{"x": ROWS} | arguments)


def test_kinds_of_one_thing():
    took = take(
        ROWS,
        scale=np.float16(2),
        count=np.int64(3),
        steps=jnp.asarray(4),
        flag=np.True_,
        key=np.array([0, 1], np.uint32),
        keys=jax.random.split(jax.random.PRNGKey(0), 3),
        fractions=np.array([0.25, 1.0]),
        indices=[2, 0],
    )
    assert (took["scale"], took["count"], took["steps"]) == (2.0, 3, 4)
    assert type(took["count"]) is int
    assert took["flag"] is True
    assert took["fractions"] == (0.25, 1.0)
    assert isinstance(took["key"], jax.Array)
    assert took["keys"].shape == (3, 2)
    assert take(ROWS, key=jax.random.key(0))["key"].dtype == jax.random.key(0).dtype


@pytest.mark.parametrize("disabled", [False, True])
def test_the_gate_does_not_depend_on_its_caller(monkeypatch, disabled):
    monkeypatch.setattr(
        jaxtyping.config, "jaxtyping_disable", disabled
    )  # as JAXTYPING_DISABLE=1 sets it
    with jaxtyping.jaxtyped("context"):
        assert isinstance(
            np.ones((7, 8), np.float32), Float[np.ndarray, "n d"]
        )  # other n and d than the call's
        for rows in (ROWS, ROWS[:2]):
            assert len(take(rows, rows)["x"]) == len(rows)
        with pytest.raises(ValueError, match="`y` must be .* for `x`"):
            take(ROWS, ROWS[:2])
        assert isinstance(np.ones((7, 8), np.float32), Float[np.ndarray, "n d"])
        assert not isinstance(np.ones((3, 2), np.float32), Float[np.ndarray, "n d"])


def test_traced_values_pass_and_traced_shapes_do_not():
    def inner(x, scale, steps):
        took = take(x, scale=scale, steps=steps)
        return took["x"] * took["scale"] + took["steps"]

    out = jax.jit(inner)(jnp.full((3, 2), jnp.nan), 2.0, 3)  # values are not looked at
    assert out.shape == (3, 2)
    batched = jax.vmap(inner, in_axes=(0, 0, None))(jnp.ones((4, 3, 2)), jnp.arange(4.0), 1)
    np.testing.assert_allclose(batched[:, 0, 0], np.arange(4) + 1)
    with pytest.raises(ValueError, match="`x` must be an array of real numbers"):
        jax.jit(inner)(jnp.ones(3), 2.0, 3)
    with pytest.raises(TypeError, match="`count` must be an integer that is known"):
        jax.jit(lambda n: take(ROWS, count=n)["x"])(3)
    listed = jax.jit(lambda a: take([[a, 2.0], [3.0, a]])["x"])(1.0)
    np.testing.assert_array_equal(listed, [[1, 2], [3, 1]])


@validated(empty=("shape",))
def opened(shape: tuple[int, ...] = (1,), anything: Any = None, **options: Any) -> Any:
    """Returns what came through."""
    return shape, options


def test_options_for_others_pass_and_the_rest_is_still_checked():
    assert opened(shape=(), anything=object(), depth=3) == ((), {"depth": 3})
    with pytest.raises(ValueError, match="`shape` must be a sequence of integers"):
        opened([[1]], depth=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        take(ROWS, z=1)
    with pytest.raises(TypeError, match="multiple values for .*'x'"):
        take(ROWS, x=ROWS)


@pytest.mark.parametrize("kind", [jnp.asarray, Foreign, pd.Series])
def test_arrays_in_a_list_are_taken_one_by_one(kind):
    first, second = take(ROWS, paths=[kind([1, 2, 3]), kind([4.0])])["paths"]
    np.testing.assert_array_equal(first, [1, 2, 3])
    assert first.dtype.kind == second.dtype.kind == "f"
    assert take(ROWS, paths=kind([1.0, 2.0]))["paths"].shape == (2,)
    assert take(ROWS, paths=ROWS)["paths"].shape == (3, 2)  # one array


@validated
def score(labels: OneHot, logits: Float[Array | np.ndarray, "n classes"]) -> Any:
    """Labels as they came through, one-hot."""
    return labels


@validated
def count(labels: Classes, features: Float[Array | np.ndarray, "n d"] | None = None) -> Any:
    """Labels as they came through, integers."""
    return labels


LOGITS = np.zeros((3, 4), np.float32)


@pytest.mark.parametrize("kind", [list, jnp.asarray, Foreign, pd.Series])
def test_labels_are_integers_or_one_hot(kind):
    rows = np.eye(4)[[2, 0, 1]]
    np.testing.assert_array_equal(
        score(kind([2, 0, 1]), LOGITS), rows
    )  # four classes, as the logits say
    np.testing.assert_array_equal(count(kind([2, 0, 1])), [2, 0, 1])
    if kind is not pd.Series:
        np.testing.assert_array_equal(score(kind(rows), LOGITS), rows)
        np.testing.assert_array_equal(count(kind(rows)), [2, 0, 1])


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["cat", "dog", "cat"], "`labels` must be integers .*got text.*numpy.unique"),
        (
            [0.0, 1.0, 2.0],
            r"`labels` must be integers .*dtype float64. If they are integers, pass labels.astype",
        ),
        ([0, 1, -1], "`labels` must be integers from 0, got -1"),
        ([0, 1], r"`labels` must be integers .*, got shape \(2.*, and \(3, .\) for `"),
        ([[1], [0], [2]], r"`labels` must be .*one column.*labels\[:, 0\]"),
        (np.full((3, 4), 0.25), "`labels` must be .*in row 0"),
    ],
    ids=str,
)
def test_labels_of_other_kinds_are_refused(labels, message):
    for call, other in ((score, LOGITS), (count, np.zeros((3, 2)))):
        with pytest.raises((TypeError, ValueError), match="^" + message):
            call(labels, other)


def test_labels_under_a_transformation():
    rows = jax.jit(lambda k: score(k, jnp.asarray(LOGITS)))(jnp.array([2, 0, 1]))
    np.testing.assert_array_equal(rows, np.eye(4)[[2, 0, 1]])
    with pytest.raises(TypeError, match="`labels` must be one-hot under a transformation"):
        jax.jit(lambda k: as_one_hot("labels", k, None))(jnp.array([2, 0, 1]))
    with pytest.raises(ValueError, match="`labels` must lie between 0 and 3, got 0 to 4"):
        score([4, 0, 1], LOGITS)
    np.testing.assert_array_equal(jax.jit(lambda y: as_classes("labels", y))(jnp.eye(3)), [0, 1, 2])


@validated
def first_of(
    x: Int[Array, " n"],
    labels: Classes | None = None,
    host: Int[np.ndarray, " m"] | None = None,
    more: Sequence[Int[Array, " k"]] = (),
) -> Any:
    return x[0], host


def test_integers_that_would_wrap_are_refused():
    large = np.array([2**40])
    assert int(first_of(np.array([2**31 - 1]))[0]) == 2**31 - 1
    assert int(first_of([-(2**31)])[0]) == -(2**31)
    assert first_of([1], host=large)[1] == 2**40  # never goes to JAX
    refused(
        (
            lambda: first_of([0, 2**31]),
            "`x` must hold integers from -2147483648 to 2147483647, got 2147483648. Larger",
        ),
        (lambda: first_of([0], labels=large), "`labels` must hold integers .*, got 1099511627776"),
        (
            lambda: first_of([0], more=[np.array([1]), large]),
            r"`more\[1\]` must hold integers .*, got 1099511627776",
        ),
        (
            lambda: as_examples("x", {"tokens": large}),
            "`x` must hold integers .*, got 1099511627776",
        ),
    )


@validated
def draw(key: PRNGKey | PRNGKeys) -> Any:
    return key.shape


def test_keys_may_be_one_or_several_where_both_are_meant():
    typed, raw = jax.random.key(0), jax.random.PRNGKey(0)
    assert (draw(typed), draw(jax.random.split(typed, 3))) == ((), (3,))
    assert (draw(raw), draw(np.asarray(jax.random.split(raw, 3)))) == ((2,), (3, 2))
    with pytest.raises(TypeError, match="`key` must be a random key"):
        draw(jnp.ones(2))
    with pytest.raises(ValueError, match=r"got keys of shape \(2, 2\)"):
        draw(jax.random.split(typed, (2, 2)))


@validated
def narrow(
    x: Float[Array | np.ndarray, "n ..."],
    parts: Sequence[Float[Array, " n"]] = (),
    host: Float[np.ndarray, " m"] | None = None,
    counts: Real[Array | np.ndarray, " k"] | None = None,
) -> Any:
    return x if host is None else host


NOISE = np.random.default_rng(0).standard_normal((40, 3))
WHITE = np.ones((1000, 4))
WHITE[7] = 254 / 255


@pytest.mark.parametrize(
    "x",
    [
        (NOISE + [0, -1e9, 0]).tolist(),
        (NOISE * 1e-30 + [0, 1e-20, 0]),
        np.array([[0, 2**32 - 290 + i, 0] for i in range(40)], np.uint32),  # one of them is exact
        np.stack([NOISE + [0, 1e9, 0]] * 2),
        pd.DataFrame(NOISE + [0, 1e5, 0]),
    ],
    ids=["list", "small", "uint32", "stacked", "frame"],
)
def test_what_float32_drops_is_said_once_before_it_is_dropped(x):
    with pytest.warns(
        RuntimeWarning, match=r"^Column 1 of `x` varies by .* about .*: float32 keeps"
    ) as seen:
        narrow(x)
    assert (len(seen), seen[0].filename) == (1, __file__)
    with jax.enable_x64(True), warnings.catch_warnings(action="error"):
        np.testing.assert_array_equal(narrow(x), np.asarray(x))
    with pytest.warns(RuntimeWarning, match=r"^`parts\[1\]` varies by"):
        narrow([0.0], parts=[NOISE[:, 0], 1e9 + NOISE[:, 0]])


@pytest.mark.parametrize(
    "x",
    [
        NOISE * 1e9 + 1e11,
        np.full((40, 2), 2**24 + 1),
        0.1 + 1e-17 * NOISE,
        WHITE,
        np.array([2**31 - 40, 2**31 - 1] * 20) // 256 * 256,
        np.random.default_rng(0).integers(0, 256, (40, 5, 5, 3)).astype(np.uint8),
    ],
    ids=str,
)
def test_what_loses_nothing_passes_without_a_word(x):
    assert narrow(x) is not None
    ids = np.arange(2**24, 2**24 + 40)
    assert (
        narrow(x, host=2**26 + ids, counts=ids).tolist() == (2**26 + ids).tolist()
    )  # integers stay, or keep digits


def test_messages_have_no_holes():
    with pytest.raises(
        ValueError,
        match=r"^`name` must be left out, as there is nothing to choose from, got 'a'\.$",
    ):
        checks.check_choice("name", "a", ())
    with pytest.raises(ValueError, match=r"^`name` must be short, got nothing\.$"):
        checks.fail("name", "be short", "")

    with pytest.raises(TypeError, match="got an error: ") as seen:
        checks.check_model(
            "model", lambda x: jax.vmap(lambda a, b: a + b)(jnp.ones((4, 3)), x), np.zeros(5)
        )
    assert ":." not in str(seen.value)


def test_complex_numbers_are_refused_with_advice():
    from dissociation.similarity import linear_cka

    with pytest.raises(
        TypeError, match="dtype complex64. Take its real and imaginary parts as two features"
    ):
        linear_cka(np.ones((5, 2), np.complex64), np.ones((5, 2)))
    with pytest.raises(TypeError) as refused:
        linear_cka(np.array(list("abcde"), object)[:, None], np.ones((5, 2)))
    assert "imaginary" not in str(refused.value)


@pytest.mark.usefixtures("unchecked")
def test_ranges_of_annotations_are_checked_after_the_conversion():
    @validated
    def call(
        first: Natural,
        size: Size | None = None,
        rate: Positive = 1.0,
        share: NonNegative | None = None,
    ):
        return first, size, rate, share

    assert call(np.int64(0), np.array(3), 2, 0) == (0, 3, 2, 0)
    assert call(1, None, share=None) == (1, None, 1.0, None)
    assert jax.jit(lambda share: call(0, share=share)[3])(-1.0) == -1.0  # is not known
    for given, words in (
        ((-1,), "`first` must be at least 0, got -1"),
        ((0, 0), "`size` must be at least 1, got 0"),
        ((0, 1, 0.0), "`rate` must be positive and finite, got 0.0"),
        ((0, 1, np.inf), "`rate` must be positive and finite, got inf"),
        ((0, 1, 1, -0.1), "`share` must be non-negative and finite, got -0.1"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            call(*given)
    for given in ((2.5,), (True,), (0, "a"), (0, 1, None)):
        with pytest.raises(TypeError, match="` must "):
            call(*given)
