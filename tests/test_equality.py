"""Ranks, ties, `==` and folds by position: every use on arrays is listed, so that a new one is thought about.

Computed floats are made equal by `dissociation._core.rounding_ties` first; rows are dealt out by
`dissociation._core.splits`.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
ORDERS = {"unique", "argsort", "searchsorted", "lexsort", "top_k", "rankdata"}
HELPERS = ("dissociation/_core/rounding_ties.py", "dissociation/_core/splits.py")
WHOLE = {  # modules in which all of them are of integers or of rows, in dissociation
    "places, owners, orders and labels of neurons":
        "rewrites/_axes.py rewrites/_comparison.py rewrites/_copies.py rewrites/_flow.py "
        "rewrites/_groups.py "
        "rewrites/_growth.py rewrites/_indexing.py "
        "rewrites/_control_flow.py rewrites/_rewrites.py rewrites/_seen.py",
    "labels and folds, the paper's": "measures/_softmax_solver.py",
    "ranks of the data as given": "measures/_coordinates.py measures/_neighbours.py",
    "rows by label and by draw": "measures/_nearest.py measures/_smoothed.py",
    "labels, clocks and repeated rows of data as given": "_core/columns.py _core/frames.py "
                                                         "_core/groups.py",
}  # fmt: skip
ALLOWED = {  # reason: path:function ..., in dissociation if not said
    "snapped or rounded before":
        "similarity/_dissimilarity.py:_kendall koopman/_operators/_spectrum.py:eigenpairs "
        "koopman/datasets/_spectrum_type.py:conjugate_order "
        "similarity/_dissimilarity.py:memberships similarity/_inference.py:interval "
        "koopman/_models/_rates.py:falling_order",
    "given as they are":
        "_core/linalg.py:centre koopman/_operators/_forecast.py:_r2_score "
        "measures/_crossing.py:log_slope training/_sweeps.py:hyperparams",
    "integers":
        "_core/conversion.py:as_one_hot figures/_collapse_measures.py:spread_observations "
        "figures/_eigenvector_measures.py:intervals similarity/_inference.py:orders_of "
        "similarity/_leave_outs.py:_without_blocks "
        "similarity/_orders.py:all_orders "
        "measures/_probes.py:_check_groups measures/_probes.py:_shuffled "
        "models/_program.py:layers_of_arrays "
        "models/_program.py:path_name models/_recorder.py:_in_loop "
        "similarity/_dissimilarity.py:_apart similarity/_kernels.py:_gram_apart "
        "measures/_probes.py:transfer_errors recipes/_grokking.py:observation_steps "
        "training/_records.py:record_steps training/_records.py:log_spaced_steps "
        "rewrites/_bounds.py:_single "
        "rewrites/_network_matching.py:_moves training/_grids.py:_run "
        "koopman/_operators/_pairs.py:_merged linear/_families.py:_walk "
        "koopman/_models/_exponentials.py:_reasons koopman/_models/_lifting.py:_kernel_map "
        "koopman/_models/_model.py:_checked_steps "
        "koopman/_models/_exponential_start.py:start_and_fit",
    "lengths of rows of zeros, which are exactly 0":
        "_core/distances.py:cosine_distances_with_size",
    "an order for show":
        "figures/_eigenvector_measures.py:details "
        "koopman/figures/_ordered_mnist_drawing.py:_shown_seed "
        "koopman/_models/_drawing.py:_leading_columns koopman/figures/coverage.py:_reason_of_miss",
    "classes":
        "figures/_eigenvector_measures.py:masking figures/_eigenvector_measures.py:truncations "
        "measures/_collapse.py:nearest_centre_agreement measures/_robustness.py:error_rate "
        "similarity/_functional.py:_within_bounds measures/_probes.py:_errors "
        "figures/planted.py:_rsms rewrites/_plant_activity.py:_margins",
    "any of equal ones will do":
        "rewrites/_plant_activity.py:lagrangian",
    "equal p-values have equal corrections":
        "similarity/_inference.py:adjust_p_values",
    "cyclic shifts of series":
        "similarity/_orders.py:_drawn",
    "any choice gives the same sum":
        "similarity/_kernels.py:_longest",
    "ties keep their order, as is said":
        "bilinear/_forms.py:reorder figures/planted.py:_marks",
    "noise scales, which are distinct":
        "figures/robustness.py:_curves",
    "a generic projection, which ties equal rows alone":
        "rewrites/_canonical.py:canonical",
    "a draw":
        "koopman/_operators/_kernels.py:_by_leverage",
    "bytes":
        "similarity/_orders.py:kinds_of training/_checkpoint_file.py:_read_meta",
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
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ORDERS
    ):
        return node.func.attr
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
        sides = [node.left, *node.comparators]
        known = any(
            isinstance(side, ast.Constant) and isinstance(side.value, (str, bytes))
            for side in sides
        )
        return "==" if any(map(is_slice, sides)) and not known else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        inner = [part.func for part in ast.walk(node.left) if isinstance(part, ast.Call)]
        return (
            "arange %"
            if any(getattr(function, "attr", "") == "arange" for function in inner)
            else None
        )
    return None


def uses(path):
    """The functions of a file that decide by equality, order or place."""
    for outer in ast.parse(path.read_text()).body:
        for function in outer.body if isinstance(outer, ast.ClassDef) else [outer]:
            for node in ast.walk(function):
                if what := decides(node):
                    place = str(path.relative_to(ROOT)).removeprefix("dissociation/")
                    yield f"{place}:{getattr(function, 'name', '')}", f"line {node.lineno}: {what}"


def test_what_decides_by_equality_order_or_place_is_listed():
    found, whole = {}, tuple(f"dissociation/{path}" for path in " ".join(WHOLE.values()).split())
    for package in ("dissociation", "koopman"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if not str(path.relative_to(ROOT)).startswith(HELPERS + whole):
                for place, what in uses(path):
                    found.setdefault(place, []).append(what)
    listed = set(" ".join(ALLOWED.values()).split())
    new = {place: what for place, what in found.items() if place not in listed}
    assert not new, (
        "snap computed floats first (`dissociation._core.rounding_ties`), draw folds "
        f"(`dissociation._core.splits`): {new}"
    )
    assert not listed - found.keys(), f"no longer there: {listed - found.keys()}"


def test_the_finder_finds():
    lines = [
        "a[1:] == a[:-1]",
        "np.unique(x)",
        "x.argsort()",
        "jnp.arange(n) % k",
        "lax.top_k(x, 3)",
    ]
    assert all(decides(ast.parse(line, mode="eval").body) for line in lines)
    assert not any(
        decides(ast.parse(line, mode="eval").body)
        for line in ["names[i] == 'a'", "x.shape == y.shape"]
    )
