"""Numbers of programs that first calls compile; see `tests/tools/first_calls.py`."""

import first_calls
import jax
import pytest
from compiled import compilations

JAX = "0.10.2"
"""Version of JAX for which the numbers hold."""

PROGRAMS = {
    "trajectories": {
        "koopman.fit": 2,
        "koopman.modes": 2,
        "koopman.predict": 2,
        "koopman.score": 3,
    },
    "delays": {
        "koopman.fit of delays": 3,  # and the slices that are its arguments
        "koopman.decompose": 1,
        "koopman.modes of delays": 1,
    },
    "transformer": {
        "neuron_groups": 0,
        # the random order, and the arrays; the second is shared by all groups of one shape
        "permute": 2,
        "duplicate": 1,
        # keys of the slots, the weights, and a run, as the model takes reciprocal roots
        "add_nuisance": 3,
        "scale": 2,  # the arrays, and what vanishes or overflows
        "rotate": 2,  # the random rotation, and the arrays
        "layer_inputs": 1,
        "null_perturb": 1,
        "certify": 1,
        "compose": 3,
    },
    "layers": {"representations": 1},
    "checks": {"check_groups": 2},
    "perceptrons": {
        "canonical": 0,
        "fingerprint": 0,
        "match_weights": 0,
        "Matching.apply": 2,
        "match_activations": 4,  # activities and a permutation for each of two groups
    },
    "similarities": {
        "linear_cka": 1,
        "linear_cka, another shape": 1,
        "compare": 4,
        "compare, another shape": 4,
        "pairwise": 1,
        "pairwise, another shape": 1,
    },
    "sweep": {
        "fit_grid": 14,  # for two shapes of model; with one device 10
        "GridResult.models_of": 0,
    },
}
"""Most programs of each call, by job. A number rises only with a reason beside it."""


SLOW = ("transformer", "layers", "checks", "similarities", "sweep")
"""Jobs that compile for more than two seconds: nothing compiled before may be reused."""
JOBS = [
    pytest.param(job.__name__, marks=pytest.mark.slow if job.__name__ in SLOW else ())
    for job in first_calls.JOBS
]


@pytest.mark.skipif(jax.__version__ != JAX, reason=f"numbers of programs are those of JAX {JAX}")
@pytest.mark.parametrize("job", JOBS)
def test_first_calls_compile_few_programs(job):
    jax.clear_caches()
    calls = PROGRAMS[job]
    for name, call in getattr(first_calls, job)():
        compiled = compilations(call)
        assert name not in calls or len(compiled) <= calls[name], (name, compiled)
