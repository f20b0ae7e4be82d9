"""A valid call of every public function of both packages: `CALLS` maps functions to makers of keyword arguments, or to
several where a function has several ways to be called.

A new public function needs a row here (`test_inputs.py` says which is missing). Arguments are small: the fuzz test
runs every row some dozens of times.
"""

from dissociation import linalg
from dissociation.metrics import crossing
from dissociation.spectral import certificate, similarity
from dissociation.training import callbacks
from registry.dissociation_calls import CALLS as DISSOCIATION
from registry.koopman_calls import CALLS as KOOPMAN
from registry.koopman_calls import MAY_PASS as KOOPMAN_MAY_PASS

CALLS = DISSOCIATION | KOOPMAN

MAY_PASS = {
    crossing.first_cross: {
        ("y", "NaN"): "an undefined number is not beyond anything, as the docstring says",
        ("y", "inf"): "beyond every threshold",
    },
    crossing.median_crossing: {("times", "NaN"): "NaN is a time that never came"},
    crossing.log_slope: {("times", "NaN"): "NaN is a time that never came"},
    certificate.certified_accuracy: {
        ("radii", "inf"): "no other class is anywhere",
        ("levels", "inf"): "nothing is certified there",
    },
    similarity.pair_mean: {("values", "NaN"): "returns a function", ("values", "inf"): "returns a function"},
    callbacks.CsvLog: {("columns", "a dict"): "names and values, whose number a run compares with its members"},
    linalg.positive_inverse: {("matrix", "inf"): "the limit: what has no bound has inverse zero"},
} | KOOPMAN_MAY_PASS
"""What looks like bad input and is none: function -> {(argument, kind or None for all): why}."""
