"""Every public function, fed with what people feed by mistake: it is refused by name, or does the right thing.

A row of the registry is a valid call. Every argument of it is replaced in turn by bad values of
some twenty kinds, chosen by what its annotation says it is. What counts as a fault: an error that
does not begin with the name of an argument, a hang, and acceptance without a word. NaN may pass if
the result is NaN. Type checkers are not asked, as users do without them.
"""

import functools
import importlib
import inspect
import re
import warnings
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faces import FACES
from registry import CALLS, MAY_PASS, NAMES, ROWS

from dissociation._core import validation

pytestmark = pytest.mark.usefixtures("unchecked")

NO_ROW = {
    "dissociation._core.checks": "the checks themselves",
    "dissociation._core.datasets": "files of datasets: test_result_files.py",
    "dissociation.data._mnist": "takes a folder alone: test_mnist.py",
    "dissociation.data._weights": "takes a file: test_weights.py",
    "koopman._models": "reads trajectories in all their forms: koopman/models",
    "dissociation.figures": "what figures share: test_figures.py",
    "dissociation.plotting": "what figures and notebooks share",
    "dissociation.training._progress": "what long work shows",
    "dissociation.training._machine": "takes no data",
    "dissociation.training._members.take": "an index into arrays: test_members.py",
    "dissociation.training._members.per_batch": "takes a platform alone",
    "dissociation.models._representations.named": "what models of one's own call within",
    "dissociation.models._representations.representations_of_example": "registered types; its "
    "callers check",
    "dissociation.models._function": "takes a function and PyTrees: test_function_model.py",
    "dissociation.rewrites._freedom.approached": "of an interval that `cka_range` has found",
    "dissociation.rewrites._sizes.refitted": "is registered on: test_growth.py",
    "dissociation.rewrites._barriers.renormalised": "takes a state: test_network_matching.py",
    "dissociation.recipes._grokking.initial_models": "a part of `train_grokking`",
    "dissociation.recipes._grokking.squared_error": "a loss that `fit` calls",
    "dissociation.similarity._measures.custom_measure": "takes a function: "
    "test_similarity_pairs.py",
    "dissociation.similarity._streaming.stream_moments": "takes batches: "
    "test_similarity_streaming.py",
    "koopman.figures": "`Config` and `RunOptions` are checked whole: test_figures.py",
}
"""Public names without a valid call in the registry, and why that is so."""


def is_module(value):
    return inspect.isclass(value) and issubclass(value, eqx.Module)


def made_by_hand(module):
    """Whether the module has a constructor or checks of its own, as modules that users make have."""
    init = inspect.unwrap(vars(module)["__init__"])
    return (
        hasattr(module, "__check_init__") or init.__code__.co_filename != "<string>"
    )  # that of dataclasses


def gates_of(value):
    """Methods of a plain class that check what they get, by name; itself, as what makes it, by none."""
    if not inspect.isclass(value) or is_module(value):
        return {}
    own = {name: method for name, method in vars(value).items() if hasattr(method, "__validated__")}
    return {f".{name}": method for name, method in own.items() if not name.startswith("_")} | (
        {"": value} if "__init__" in own else {}
    )


def public_functions():
    """Public functions of both packages, and what they make by hand, by the dotted names of their definitions."""
    found = {}
    for face, names in FACES.items():
        for name in names:
            function = getattr(importlib.import_module(face), name)
            dotted = (
                f"{getattr(function, '__module__', face)}.{getattr(function, '__qualname__', name)}"
            )
            if any(dotted == one or dotted.startswith(one + ".") for one in NO_ROW):
                continue
            if inspect.isroutine(function) or (is_module(function) and made_by_hand(function)):
                found[dotted] = function
            found |= {f"{dotted}{end}": method for end, method in gates_of(function).items()}
    return found


PUBLIC = public_functions()
every_row = pytest.mark.parametrize(("function", "make_call"), ROWS)


def test_every_public_function_has_a_row():
    missing = sorted(name for name, function in PUBLIC.items() if function not in CALLS)
    assert not missing, f"tests/tools/registry lacks a valid call of: {', '.join(missing)}"
    assert all(settings_of(function) for function in CALLS)


def settings_of(function):
    """What the gate of a function was told: whose values must be finite, and what may be empty."""
    gate = body_of(function)
    if hasattr(function, "__check_init__"):  # a module that checks its fields when it has them
        return {"finite": (), "empty": ()}
    while not hasattr(gate, "__validated__"):
        assert hasattr(gate, "__wrapped__"), f"{NAMES[function]} is not decorated with `validated`"
        gate = gate.__wrapped__
    return gate.__validated__


def body_of(function):
    return function.__init__ if inspect.isclass(function) else function


def rule_of(function, name):
    """The rule of an argument, or None if any value is accepted."""
    rule = validation._rule(inspect.unwrap(body_of(function)).__annotations__.get(name, object))
    return None if object in rule.plain else rule


def has_fixed_axes(form):
    return not {"*", "."} & set(form.dims)


def arrays_of(function, call):
    """Names of the arguments that are arrays, and no keys."""
    given = {
        name: value
        for name, value in call.items()
        if isinstance(value, np.ndarray | jax.Array) and value.ndim
    }
    rules = {name: rule_of(function, name) for name in given}
    return [name for name, rule in rules.items() if rule is not None and not rule.keys]


def bad_arrays(rule, x):
    """Kinds of bad input for an array argument, where `x` is a good one."""
    bad = {
        "complex numbers": x + 1j,
        "words": np.full(x.shape, "a").tolist(),
        "objects": np.full(x.shape, None),
        "dates": np.full(x.shape, "2020-01-01", "M8[D]"),
        "ragged": [[1.0], [1.0, 2.0]],
        "masked": np.ma.array(x, mask=np.ones(x.shape, bool)),
        "empty": np.zeros((0, *x.shape[1:]), x.dtype),
        "empty list": [],
    }
    if any("complex" in form.kinds for form in rule.forms):
        del bad["complex numbers"]
    if rule.forms and all(map(has_fixed_axes, rule.forms)):
        most = max(len(form.dims.split()) for form in rule.forms)
        bad |= {"an axis more": x[(None,) * (most - x.ndim + 1)]}
    return bad


ANYTHING = {
    "an object": (object(), ()), "a complex number": (1 + 2j, ()), "a dict": ({"a": 1}, dict),
    "None": (None, type(None)), "text": ("three", str), "a function": (np.sum, Callable),
}  # fmt: skip
"""Bad input for arguments of all kinds, unless the annotation has the class."""


def bad_values(rule, value):
    """Kinds of bad input for an argument of this rule, where `value` is a good one."""
    bad = {kind: each for kind, (each, known) in ANYTHING.items() if known not in rule.plain}
    if rule.keys:
        return bad | {
            "an integer": 3,
            "a float": 0.5,
            "keys": jax.random.split(jax.random.key(0), (2, 2)),
        }
    if rule.labels is not None:
        floats = np.linspace(0, 1, len(np.asarray(value)))
        return bad | {
            "words": ["cat"] * len(np.asarray(value)),
            "floats": floats,
            "NaN": floats * np.nan,
        }
    if isinstance(value, np.ndarray | jax.Array) and value.ndim:
        return bad | bad_arrays(rule, np.asarray(value))
    if rule.exact and all(form.container is not tuple for form in rule.forms):
        scalars = {
            "True": True,
            "half": 1.5,
            "a list": [1.0, 2.0],
            "words": "1.0",
            "two numbers": np.ones(2),
        }
        return bad | {kind: each for kind, each in scalars.items() if type(each) not in rule.exact}
    if str in rule.plain:
        return bad | {"a number": 3, "bytes": b"qr"}
    return bad


HOLE = re.compile(
    r"\b(must|be|of|have|hold|take|than|with) ?[,.)]|\b(got|or|and) ?[,.]|[(\[] "
    r"?,|\s[,.](\s|$)|\b(got|or)\s*$| {2}"
)
"""A place of a message where words are missing."""


def check_refused(function, call, name, kind, value, reason):
    with warnings.catch_warnings(action="ignore"):
        try:
            out = function(**call | {name: value})
        except (TypeError, ValueError) as error:
            if re.match(rf"`({'|'.join(call)})(\[.*\])?` must", str(error)):
                if HOLE.search(
                    re.sub(r"\[[-\d. einaf]*\]", "[]", str(error))
                ):  # printed arrays have blanks
                    raise AssertionError(
                        f"{name} = {kind}: words are missing in: {error}"
                    ) from error
                return
            raise AssertionError(f"{name} = {kind}: obscure error: {error!r}") from error
        except Exception as error:
            raise AssertionError(f"{name} = {kind}: obscure error: {error!r}") from error
    if reason == "NaN":
        leaves = [
            np.asarray(x)
            for x in jax.tree.leaves(out)
            if hasattr(x, "dtype") and x.dtype.kind in "fc"
        ]
        shown = np.isnan if kind == "NaN" else lambda leaf: ~np.isfinite(leaf)
        assert any(shown(leaf).any() for leaf in leaves), (
            f"{name} = {kind}: accepted, and nothing in the result shows it"
        )
    else:
        raise AssertionError(f"{name} = {kind}: accepted without a word")


def passes(function, name, kind):
    if kind in ("empty", "empty list") and name in settings_of(function)["empty"]:
        return True
    return any(allowed in ((name, kind), (name, None)) for allowed in MAY_PASS.get(function, {}))


@every_row
def test_bad_kinds_are_refused_by_name(function, make_call):
    call = make_call()
    for name, value in call.items():
        rule = rule_of(function, name)
        if rule is None or name == "self":
            continue
        for kind, bad in bad_values(rule, value).items():
            if not passes(function, name, kind):
                check_refused(function, call, name, kind, bad, "refused")


@pytest.mark.slow
@every_row
def test_values_that_are_not_finite_show(function, make_call):
    call = make_call()
    for name in arrays_of(function, call):
        x = np.asarray(call[name])
        if x.dtype.kind == "f" and rule_of(function, name).labels is None:
            for kind, bad in (("NaN", np.nan), ("inf", np.inf)):
                spoilt = x.copy()
                spoilt.flat[spoilt.size // 2] = bad
                if not passes(function, name, kind):
                    check_refused(function, call, name, kind, spoilt, "NaN")
    for name, value in call.items():
        if isinstance(value, float) and not passes(function, name, "NaN"):
            check_refused(function, call, name, "NaN", float("nan"), "NaN")


@every_row
def test_lengths_that_disagree_are_refused(function, make_call):
    call = make_call()
    axes = {}
    for name in arrays_of(function, call):
        rule = rule_of(function, name)
        if rule.forms and has_fixed_axes(rule.forms[0]):
            for i, axis in enumerate(rule.forms[0].dims.split()):
                axes.setdefault(axis, []).append((name, i))
    for shared in axes.values():
        for name, i in shared if len(shared) > 1 else []:
            if (
                i < call[name].ndim
                and call[name].shape[i] > 1
                and not passes(function, name, "length")
            ):
                short = np.asarray(call[name]).take(range(call[name].shape[i] - 1), axis=i)
                check_refused(function, call, name, f"axis {i} one shorter", short, "refused")


def same(first, second, tolerance):
    leaves = [jax.tree.leaves(tree) for tree in (first, second)]
    assert len(leaves[0]) == len(leaves[1])
    for a, b in zip(*leaves, strict=True):
        if hasattr(a, "dtype") and not jnp.issubdtype(a.dtype, jax.dtypes.extended):
            assert a.shape == b.shape
            if a.dtype.kind in "fc":
                scale = max(1.0, float(np.nanmax(np.abs(np.asarray(a)), initial=0)))
                np.testing.assert_allclose(
                    np.asarray(a), np.asarray(b), atol=tolerance * scale, rtol=tolerance
                )


def wide_arrays(function, call):
    """Names of arguments whose numbers are taken as floats, and differ."""
    given = {
        name: x
        for name, x in call.items()
        if isinstance(x, np.ndarray | jax.Array) and x.dtype.kind == "f"
    }
    rules = {
        name: rule_of(function, name) for name, x in given.items() if np.ptp(np.asarray(x)) > 0
    }
    return [
        name for name, rule in rules.items() if rule is None or (rule.forms and rule.labels is None)
    ]


@every_row
def test_digits_that_float32_drops_are_said_or_kept(function, make_call):
    call = make_call()
    for name in wide_arrays(function, call):
        x = np.asarray(call[name], np.float64)
        bad = x + 1e9
        with warnings.catch_warnings(action="ignore"):
            warnings.filterwarnings("error", rf"(Column \d+ of )?`{name}\b.*float32 keeps")
            try:
                found = function(**call | {name: bad})
            except (
                RuntimeWarning,
                TypeError,
                ValueError,
            ):  # said, or out of the range that the function takes
                continue
            with jax.enable_x64(True):
                wanted = function(**make_call() | {name: bad})
            same(wanted, found, 1e-3)


MAY_DEPEND_ON_ORDER = {
    "dissociation.measures._collapse.class_moments": "`rest` is the rounding of the means",
    "dissociation.measures._nearest.information": "errors are of parts: "
    "test_nearest_information.py",
    "dissociation.similarity._dissimilarity.crossnobis_rsa": "rows run through the same conditions",
    "dissociation.similarity._dissimilarity.crossnobis_rdm": "rows run through the same conditions",
    "dissociation.similarity._dissimilarity.rdm": "pairs in one row",
    "dissociation.similarity._predictivity.linear_predictivity": "folds: test_similarity.py",
    "dissociation.similarity._predictivity.predictivity_path": "folds: test_similarity.py",
    "dissociation.similarity._embedding.classical_mds": "signs of axes",
    "dissociation.similarity._embedding.smacof": "starts at `classical_mds`",
    "koopman._operators._kernels.median_distance": "states evenly spaced along x",
    "koopman._operators._fit.fit": "signs of functions",
    "koopman._operators._pairs.moments": "`rest` is the rounding of the means",
}
"""Functions of samples without a key whose result depends on the order of these: name -> why."""
QUICK = re.compile(
    r"dissociation\.(measures\._(collapse|crossing|hsic|nearest|smoothed|coordinates)"
    r"|similarity\._(kernels|shapes))"
)
BY_ORDER = [
    pytest.param(*row.values, id=row.id, marks=() if QUICK.match(row.id) else pytest.mark.slow)
    for row in ROWS
]


def moved(array, order):
    """An array as it is, and with the samples of one axis or of all reordered."""
    axes = [axis for axis, size in enumerate(array.shape) if size == len(order)]
    chosen = [[], axes, *([axis] for axis in axes)]
    return [
        functools.reduce(lambda x, axis: np.take(x, order, axis), some, array) for some in chosen
    ]


@pytest.mark.parametrize(("function", "make_call"), BY_ORDER)
@pytest.mark.slow
def test_the_order_of_samples_does_not_matter(function, make_call):
    call = make_call()
    rules = {name: rule_of(function, name) for name in arrays_of(function, call)}
    names = [
        name
        for name, rule in rules.items()
        if rule.forms and rule.forms[0].dims.split()[:1] == ["n"]
    ]
    if not names or "key" in call or NAMES[function] in MAY_DEPEND_ON_ORDER:
        return
    order = np.random.default_rng(0).permutation(len(call[names[0]]))
    shuffled = {name: np.asarray(call[name])[order] for name in names}
    with warnings.catch_warnings(action="ignore"):
        results = [jax.tree.leaves(function(**call | rows)) for rows in ({}, shuffled)]
    for a, b in zip(*results, strict=True):
        if isinstance(a, np.ndarray | jax.Array | float):
            a, b = np.asarray(a), np.asarray(b)
            scale = max(1e-6, np.abs(np.nan_to_num(a, posinf=0, neginf=0)).max(initial=0))
            close = [
                np.allclose(each, b, rtol=2e-3, atol=2e-3 * scale, equal_nan=True)
                for each in moved(a, order)
            ]
            assert any(close), (a, b)
