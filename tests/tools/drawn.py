"""Check that `draw` computes nothing, and that figures resume, are restored from files, and describe themselves."""

import jax
from saved import assert_saved


def assert_only_draws(figure, results):
    """Raise if drawing computes: traced, every operation of JAX is an equation, or a tracer that NumPy rejects."""
    drawn = []
    program = jax.make_jaxpr(lambda: drawn.append(figure.draw(results)))()
    assert not program.eqns, f"{figure.__name__}.draw computes {program.eqns}"
    drawn[0].canvas.draw()


def assert_figure(figure, config, key, results, folder, *, dims, rows, parts):
    """Raise unless a figure resumes, saves axes `dims`, tabulates `rows`, captions `parts`, and only draws."""
    assert figure.compute(config, key=key, cache=folder).identical(results)
    assert_saved(results, folder.parent, dims)
    assert len(figure.table(results)) == rows
    assert [part for part in parts if part not in figure.caption(results)] == []
    assert_only_draws(figure, results)
