"""What `draw` may not do."""

import jax


def assert_only_draws(figure, results):
    """Raises if drawing computes: traced, every operation of JAX leaves an equation, or a tracer that NumPy refuses."""
    drawn = []
    program = jax.make_jaxpr(lambda: drawn.append(figure.draw(results)))()
    assert not program.eqns, f"{figure.__name__}.draw computes {program.eqns}"
    drawn[0].canvas.draw()
