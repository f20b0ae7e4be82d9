"""Entries of JAX that may change without notice, imported by no other module."""

import importlib
from typing import TYPE_CHECKING, Any

import jax

ENTRIES = {
    "jex": (
        "jax.extend.core",
        None,
        "reading programs, for `neuron_groups`, rewrites and checkpoints",
    ),
    "threefry2x32_p": ("jax.extend.random", "threefry2x32_p", "`keys.normal`"),
    "ad": ("jax.interpreters.ad", None, "values that modules return"),
    "batching": ("jax.interpreters.batching", None, "values that modules return"),
    "mlir": ("jax.interpreters.mlir", None, "values that modules return"),
}
"""Module, attribute (None: the module itself) and dependent feature, by name."""

PARAMETERS = {
    "axes": "argmax argmin reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or",
    "axis": "cumsum cumprod cummax cummin cumlogsumexp split stack top_k unstack",
    "batch_group_count feature_group_count padding": "conv_general_dilated",
    "body_jaxpr body_nconsts cond_jaxpr cond_nconsts": "while",
    "branches": "cond",
    "broadcast_dimensions": "broadcast_in_dim",
    "dimension": "concatenate iota sort",
    "dimension_numbers": "conv_general_dilated dot_general gather scatter scatter-add",
    "dimensions": "reshape rev squeeze",
    "fft_lengths": "fft",
    "fill_value slice_sizes": "gather",
    "jaxpr length num_carry num_consts": "scan",
    "lhs_dilation rhs_dilation window_strides": "conv_general_dilated",
    "limit_indices start_indices strides": "slice",
    "mode": "gather scatter",
    "new_dtype": "convert_element_type",
    "padding_config": "pad",
    "permutation": "transpose",
    "reps": "tile",
    "sizes": "split",
    "update_jaxpr": "scatter",
    "window_dimensions window_strides": "reduce_window_sum reduce_window_max reduce_window_min",
    "y": "integer_pow",
}
"""Parameters of JAX's primitives that `neuron_groups` reads, and the primitives."""


def parameters(equation: Any) -> dict[str, Any]:
    """Return the parameters of an operation, or raise if this JAX lacks one."""
    name = equation.primitive.name
    params = equation.params
    if name == "scan" and "ft_in" in params:  # as JAX 0.12 groups a loop's operands
        consts, carry, _ = params["ft_in"].unpack()
        params = params | {"num_consts": len(consts), "num_carry": len(carry)}
    required = set()
    for names, primitives in PARAMETERS.items():
        if name in primitives.split():
            required.update(names.split())
    missing = sorted(required - params.keys())
    if missing:
        raise ImportError(
            f"JAX {jax.__version__} lacks {missing} of {name}, needed for `neuron_groups`. "
            "Install an older JAX."
        )
    return params


if TYPE_CHECKING:
    from jax.extend import core as jex
    from jax.extend.random import threefry2x32_p
    from jax.interpreters import ad, batching, mlir

    __all__ = ["ad", "batching", "jex", "mlir", "threefry2x32_p"]


def __getattr__(name: str) -> Any:
    if name not in ENTRIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute, feature = ENTRIES[name]
    try:
        # An entry is imported at its first use, so that without it everything else works.
        imported = importlib.import_module(module)
        if attribute is None:
            return imported
        return getattr(imported, attribute)
    except (ImportError, AttributeError) as error:
        missing = module if attribute is None else f"{module}.{attribute}"
        raise ImportError(
            f"JAX {jax.__version__} lacks {missing}, needed for {feature}. Install an older JAX."
        ) from error
