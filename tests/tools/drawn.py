"""Check that `draw` computes nothing."""

import jax


def assert_only_draws(figure, results):
    """Raise if drawing computes: traced, every operation of JAX is an equation, or a tracer that NumPy rejects."""
    drawn = []
    program = jax.make_jaxpr(lambda: drawn.append(figure.draw(results)))()
    assert not program.eqns, f"{figure.__name__}.draw computes {program.eqns}"
    drawn[0].canvas.draw()
