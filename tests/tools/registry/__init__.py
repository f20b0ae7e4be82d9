"""Valid calls of every public function of both packages: `CALLS` maps a function to one or several makers of arguments.

A new public function needs a row here (`test_inputs.py` names the missing ones). Arguments are
small, because the fuzz test runs every row dozens of times.
"""

import pytest

from dissociation import bilinear, measures, training
from registry.dissociation_calls import CALLS as DISSOCIATION
from registry.koopman_calls import CALLS as KOOPMAN

CALLS = DISSOCIATION | KOOPMAN
NAMES = {function: f"{function.__module__}.{function.__qualname__}" for function in CALLS}
ROWS = [
    pytest.param(function, call, id=NAMES[function] + index * f"-{index}")
    for function, calls in CALLS.items()
    for index, call in enumerate(calls if isinstance(calls, tuple) else (calls,))
]

MAY_PASS = {
    measures.first_cross: {
        ("y", "NaN"): "an undefined number is not beyond anything, as the docstring says",
        ("y", "inf"): "beyond every threshold",
    },
    measures.median_crossing: {("times", "NaN"): "NaN is a time that never came"},
    measures.log_slope: {("times", "NaN"): "NaN is a time that never came"},
    bilinear.certified_accuracy: {
        ("radii", "inf"): "no other class is anywhere",
        ("levels", "inf"): "nothing is certified there",
    },
    bilinear.pair_mean: {
        ("values", "NaN"): "returns a function",
        ("values", "inf"): "returns a function",
    },
    training.CsvLog: {
        ("columns", "a dict"): "names and values, whose number a run compares with its members"
    },
}
"""What looks like bad input and is none: function -> {(argument, kind or None for all): why}."""
