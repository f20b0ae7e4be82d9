"""Pure functions of parameters as modules."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np

from dissociation._core.checks import check_call
from dissociation._core.conversion import to_device
from dissociation._core.types import PyTree, Statistics
from dissociation._core.validation import validated


class FunctionModel(eqx.Module):
    """Pure function of parameters and one example, as an Equinox module.

    Groups, rewrites, certificates, representations, matching and `training.fit` take it as any
    other model. Layers keep the names that they have in `parameters`, such as "Dense_0" of Flax or
    "mlp/~/linear_1" of Haiku. Optimisers do not change `state`.

    Attributes:
        function: `function(parameters, example)`, or `function(parameters, state, example)` if
            there is a `state`. It returns outputs alone, and must not depend on values that change.
        parameters: PyTree of arrays that are trained.
        statistics: Running statistics of a batch normalisation, see `state`, or None.

    Example:
        >>> def dense(parameters, x):
        ...     return parameters["head"]["kernel"].T @ x
        >>> model = FunctionModel(dense, {"head": {"kernel": np.ones((3, 2))}})
        >>> model(np.ones(3))
        Array([3., 3.], dtype=float32)
    """

    function: Callable[..., Any]
    parameters: PyTree
    statistics: Statistics | None

    @validated
    def __init__(self, function: Callable[..., Any], parameters: PyTree, state: PyTree = None):
        names = ["parameters", "example"]
        statistics = None
        if state is not None:
            names.insert(1, "state")
            statistics = Statistics(_on_device(state))
        check_call("function", function, names)
        self.function = function
        self.parameters = _on_device(parameters)
        self.statistics = statistics

    @property
    def state(self) -> PyTree:
        """Running statistics, which the function gets between parameters and example, or None."""
        return None if self.statistics is None else self.statistics.values

    def __call__(self, x: Any) -> Any:
        """Return the outputs for one example."""
        if self.statistics is None:
            return self.function(self.parameters, x)
        return self.function(self.parameters, self.statistics.values, x)


def _on_device(tree: PyTree) -> PyTree:
    """Return a tree whose NumPy arrays became arrays of JAX, which are parameters."""
    return jax.tree.map(
        lambda leaf: to_device(leaf) if isinstance(leaf, np.ndarray) else leaf, tree
    )
