"""Ranks, ties, `==` and folds by position: every use on arrays is listed, so that a new one is thought about.

Computed floats are made equal by `dissociation.ties` first; rows are dealt out by `dissociation.splits`.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
ORDERS = {"unique", "argsort", "searchsorted", "lexsort", "top_k", "rankdata"}
HELPERS = ("dissociation/ties.py", "dissociation/splits.py")
WHOLE = {  # modules in which all of them are of integers
    "dissociation/weights/": "places, owners, orders and labels of neurons",
    "dissociation/metrics/softmax_solver.py": "labels and folds, the paper's",
    "dissociation/metrics/information/": "rows by label and by draw, ranks of the data as given",
}
ALLOWED = {  # reason: path:function ..., in dissociation if not said; "~" for metrics/similarity/
    "snapped or rounded before":
        "~dissimilarity.py:kendall koopman/spectrum.py:eigenpairs ~neighbourhoods.py:memberships "
        "~inference.py:jackknife_interval",
    "given as they are":
        "linalg.py:_centre koopman/forecast.py:_r2_score metrics/crossing.py:_product_limit_median "
        "metrics/crossing.py:log_slope sweeps.py:hyperparams frames.py:_check_steps",
    "integers":
        "conversion.py:as_one_hot figures/collapse_measures.py:spread_observations "
        "figures/eigenvector_measures.py:intervals ~pairs.py:_invariants metrics/transfer.py:transfer_errors "
        "recipes/grokking.py:observation_steps schedule.py:check_steps schedule.py:log_spaced_steps "
        "symmetry/bounds.py:_single symmetry/canonical.py:_shrunk symmetry/matching.py:_moves training/grids.py:_run "
        "koopman/pairs.py:merge_moments frames.py:_runs",
    "lengths of rows of zeros, which are exactly 0": "distances.py:cosine_distances_with_size",
    "an order for show":
        "figures/eigenvector_measures.py:details figures/freedom.py:_intervals "
        "koopman/figures/ordered_mnist_drawing.py:_shown_seed",
    "classes":
        "figures/eigenvector_measures.py:masking figures/eigenvector_measures.py:truncations "
        "metrics/collapse.py:_agreement metrics/robustness.py:error_rate ~functional.py:min_max_disagreement "
        "metrics/transfer.py:_errors koopman/figures/ordered_mnist.py:_computed "
        "koopman/figures/ordered_mnist.py:accuracy",
    "equal p-values have equal corrections": "~inference.py:adjust_p_values",
    "cyclic shifts of series": "~inference.py:random_orders",
    "any choice gives the same sum": "~kernels.py:_longest",
    "ties keep their order, as is said": "spectral/forms.py:reorder",
    "a generic projection, which ties equal rows alone": "symmetry/canonical.py:canonical",
    "pairs are found by distance": "koopman/datasets/exact.py:conjugate_order",
    "a draw": "koopman/nystroem.py:_by_leverage",
    "bytes": "checkpoint.py:_read_meta",
}  # fmt: skip


def is_slice(node):
    """Whether a side is a part of an array, `a[1:]`, `a[:, None]`, or an argmax."""
    if isinstance(node, ast.Subscript):
        return "shape" not in ast.unparse(node.value) and any(
            isinstance(part, ast.Slice) or (isinstance(part, ast.Constant) and part.value is None)
            for part in ast.walk(node.slice)
        )
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func
    return bool(called) and called.attr in ("argmax", "argmin", "sort", "arange", "diff")


def decides(node):
    """What a node decides by equality or order of arrays, or by the place of rows."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ORDERS:
        return node.func.attr
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
        sides = [node.left, *node.comparators]
        known = any(isinstance(side, ast.Constant) and isinstance(side.value, (str, bytes)) for side in sides)
        return "==" if any(map(is_slice, sides)) and not known else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        inner = [part.func for part in ast.walk(node.left) if isinstance(part, ast.Call)]
        return "arange %" if any(getattr(function, "attr", "") == "arange" for function in inner) else None
    return None


def uses(path):
    """The functions of a file that decide by equality, order or place."""
    for outer in ast.parse(path.read_text()).body:
        for function in outer.body if isinstance(outer, ast.ClassDef) else [outer]:
            for node in ast.walk(function):
                if what := decides(node):
                    place = (
                        str(path.relative_to(ROOT)).removeprefix("dissociation/").replace("metrics/similarity/", "~")
                    )
                    yield f"{place}:{getattr(function, 'name', '')}", f"line {node.lineno}: {what}"


def test_what_decides_by_equality_order_or_place_is_listed():
    found = {}
    for package in ("dissociation", "koopman"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if not str(path.relative_to(ROOT)).startswith((*HELPERS, *WHOLE)):
                for place, what in uses(path):
                    found.setdefault(place, []).append(what)
    listed = set(" ".join(ALLOWED.values()).split())
    new = {place: what for place, what in found.items() if place not in listed}
    assert not new, f"snap computed floats first (`dissociation.ties`), draw folds (`dissociation.splits`): {new}"
    assert not listed - found.keys(), f"no longer there: {listed - found.keys()}"


def test_the_finder_finds():
    lines = ["a[1:] == a[:-1]", "np.unique(x)", "x.argsort()", "jnp.arange(n) % k", "lax.top_k(x, 3)"]
    assert all(decides(ast.parse(line, mode="eval").body) for line in lines)
    assert not any(decides(ast.parse(line, mode="eval").body) for line in ["names[i] == 'a'", "x.shape == y.shape"])
