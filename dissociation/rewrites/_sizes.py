"""Sizes in module fields, updated after a rewrite changed the arrays."""

import dataclasses
import functools
import inspect
from typing import Any

import equinox as eqx
import jax


def with_sizes(module: eqx.Module, **sizes: Any) -> Any:
    """Return a module with static fields `sizes` and the same arrays."""
    if all(getattr(module, name) == value for name, value in sizes.items()):
        return module
    static = set()
    dynamic = []
    for field in dataclasses.fields(module):
        if field.metadata.get("static"):
            static.add(field.name)
        else:
            dynamic.append(field.name)

    # Fields that depend on sizes follow only if the module is constructed again from its options.
    parameters = inspect.signature(type(module).__init__).parameters
    options = {name: getattr(module, name) for name in parameters if name in static} | sizes
    if "key" in parameters:
        options["key"] = jax.random.PRNGKey(0)
    if "axis_name" in parameters:
        options["axis_name"] = getattr(module, "axis_name", None)
    # Shapes alone: no initial weights are drawn.
    new = eqx.filter_eval_shape(type(module), **options)
    return eqx.tree_at(
        lambda m: [getattr(m, name) for name in dynamic],
        new,
        [getattr(module, name) for name in dynamic],
        is_leaf=lambda node: node is None or isinstance(node, eqx.nn.StateIndex),
    )


@functools.singledispatch
def refitted(module: Any) -> Any:
    """Return a module whose static sizes fit its arrays, which a rewrite changed.

    For modules of your own, `refitted.register(type)` a function that returns `with_sizes(module,
    ...)` or a new module. Inner modules are refitted first.
    """
    return module


@refitted.register
def _(module: eqx.nn.Linear) -> Any:
    outputs, inputs = module.weight.shape[-2:]  # of one layer, also if several are stacked
    if module.out_features == "scalar":
        outputs = "scalar"
    if module.in_features == "scalar":
        inputs = "scalar"
    return with_sizes(module, in_features=inputs, out_features=outputs)


@refitted.register(eqx.nn.Conv)
@refitted.register(eqx.nn.ConvTranspose)
def _(module: Any, *, more_groups: bool = False) -> Any:
    first_axis = -2 - module.num_spatial_dims
    outputs, inputs = module.weight.shape[first_axis:][:2]
    size = module.out_channels // module.groups
    groups = module.groups
    # Twice the outputs of two groups of two are two groups of four or four groups of two.
    if groups > 1 and outputs % size == 0 and (size == 1 or more_groups):
        groups = outputs // size
    return with_sizes(module, in_channels=inputs * groups, out_channels=outputs, groups=groups)


@refitted.register
def _(module: eqx.nn.GroupNorm) -> Any:
    if module.weight is None or module.channels is None:
        return module
    channels = module.weight.shape[-1]  # more groups, as each has its statistics
    return with_sizes(module, channels=channels, groups=channels * module.groups // module.channels)


@refitted.register
def _(module: eqx.nn.MLP) -> Any:
    widths = {layer.weight.shape[-2] for layer in module.layers[:-1]}
    if len(widths) != 1 or getattr(module, "scan", False):
        return module
    return with_sizes(module, width_size=widths.pop())


@refitted.register(eqx.nn.GRUCell)
@refitted.register(eqx.nn.LSTMCell)
def _(module: Any) -> Any:
    inputs = module.weight_ih.shape[-1]
    return with_sizes(module, input_size=inputs, hidden_size=module.weight_hh.shape[-1])


@refitted.register
def _(module: eqx.nn.BatchNorm) -> Any:
    if module.weight is None:
        return module
    return with_sizes(module, input_size=module.weight.shape[-1])


@refitted.register
def _(module: eqx.nn.Embedding) -> Any:
    embeddings, size = module.weight.shape[-2:]
    return with_sizes(module, num_embeddings=embeddings, embedding_size=size)


@refitted.register
def _(module: eqx.nn.MultiheadAttention) -> Any:
    rows = module.query_proj.weight.shape[-2]
    values = module.value_proj.weight.shape[-2]
    heads = module.num_heads
    # With more heads, queries and values widen by one factor; otherwise heads have become wider.
    widens_equally = rows * module.vo_size == values * module.qk_size
    if widens_equally and rows % module.qk_size == 0:
        heads = rows // module.qk_size
    return with_sizes(
        module,
        num_heads=heads,
        qk_size=rows // heads,
        vo_size=values // heads,
        query_size=module.query_proj.weight.shape[-1],
        key_size=module.key_proj.weight.shape[-1],
        value_size=module.value_proj.weight.shape[-1],
        output_size=module.output_proj.weight.shape[-2],
    )


def refit(model: Any, *, more_groups: bool = False) -> Any:
    """Return a model with every module in it `refitted`, the innermost first."""
    refit_inner = functools.partial(refit, more_groups=more_groups)
    if isinstance(model, eqx.nn.Shared):  # with shared nodes in all their places
        pytree = eqx.tree_at(model.where, refit_inner(model()), model.where(model.pytree))
        return eqx.tree_at(lambda shared: shared.pytree, model, pytree)
    children, tree = jax.tree.flatten(model, is_leaf=lambda x: x is not model)
    if len(children) == 1 and children[0] is model:
        return model
    new = jax.tree.unflatten(tree, map(refit_inner, children))
    if isinstance(new, eqx.nn.Conv | eqx.nn.ConvTranspose):
        return refitted(new, more_groups=more_groups)
    return refitted(new) if isinstance(new, eqx.Module) else new
