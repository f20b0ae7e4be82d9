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
    fields = dataclasses.fields(module)
    static = {field.name for field in fields if field.metadata.get("static")}
    known = inspect.signature(type(module).__init__).parameters
    # Fields that depend on sizes follow only if the module is constructed again from its options.
    options = {name: getattr(module, name) for name in known if name in static} | sizes
    for name, value in (
        ("key", jax.random.PRNGKey(0)),
        ("axis_name", getattr(module, "axis_name", None)),
    ):
        options |= {name: value} if name in known else {}
    # Shapes alone: no initial weights are drawn.
    new = eqx.filter_eval_shape(type(module), **options)
    own = [field.name for field in fields if field.name not in static]
    return eqx.tree_at(
        lambda m: [getattr(m, name) for name in own],
        new,
        [getattr(module, name) for name in own],
        is_leaf=lambda part: part is None or isinstance(part, eqx.nn.StateIndex),
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
    outputs = "scalar" if module.out_features == "scalar" else outputs
    return with_sizes(
        module,
        in_features="scalar" if module.in_features == "scalar" else inputs,
        out_features=outputs,
    )


@refitted.register(eqx.nn.Conv)
@refitted.register(eqx.nn.ConvTranspose)
def _(module: Any, *, more_groups: bool = False) -> Any:
    outputs, inputs = module.weight.shape[-2 - module.num_spatial_dims :][:2]
    each = module.out_channels // module.groups
    # Twice the outputs of two groups of two are two groups of four or four groups of two.
    more = outputs % each == 0 and (each == 1 or more_groups) and module.groups > 1
    groups = outputs // each if more else module.groups
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
    scans = getattr(module, "scan", False)
    return with_sizes(module, width_size=widths.pop()) if len(widths) == 1 and not scans else module


@refitted.register(eqx.nn.GRUCell)
@refitted.register(eqx.nn.LSTMCell)
def _(module: Any) -> Any:
    return with_sizes(
        module, input_size=module.weight_ih.shape[-1], hidden_size=module.weight_hh.shape[-1]
    )


@refitted.register
def _(module: eqx.nn.BatchNorm) -> Any:
    return (
        module if module.weight is None else with_sizes(module, input_size=module.weight.shape[-1])
    )


@refitted.register
def _(module: eqx.nn.Embedding) -> Any:
    return with_sizes(
        module, num_embeddings=module.weight.shape[-2], embedding_size=module.weight.shape[-1]
    )


@refitted.register
def _(module: eqx.nn.MultiheadAttention) -> Any:
    rows, values = module.query_proj.weight.shape[-2], module.value_proj.weight.shape[-2]
    # With more heads, queries and values widen by one factor; otherwise heads have become wider.
    more = rows * module.vo_size == values * module.qk_size and rows % module.qk_size == 0
    heads = rows // module.qk_size if more else module.num_heads
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
    inner = functools.partial(refit, more_groups=more_groups)
    if isinstance(model, eqx.nn.Shared):  # with shared parts in all their places
        whole = eqx.tree_at(model.where, inner(model()), model.where(model.pytree))
        return eqx.tree_at(lambda shared: shared.pytree, model, whole)
    children, tree = jax.tree.flatten(model, is_leaf=lambda x: x is not model)
    if len(children) == 1 and children[0] is model:
        return model
    new = jax.tree.unflatten(tree, map(inner, children))
    options = (
        {"more_groups": more_groups} if isinstance(new, (eqx.nn.Conv, eqx.nn.ConvTranspose)) else {}
    )
    return refitted(new, **options) if isinstance(new, eqx.Module) else new
