"""The figures: modules that provide what `dissociation.figures.protocol.Figure` asks for."""

from dissociation.figures.protocol import Figure


def figures() -> dict[str, Figure]:
    """The figures of this package by their commands' names, listed here alone; imported now, which takes seconds."""
    from koopman.figures import ordered_mnist, spectra

    return {"ordered-mnist": ordered_mnist, "spectra": spectra}
