"""The figures: modules that provide what `protocol.Figure` asks for."""

from dissociation.figures.protocol import Figure


def figures() -> dict[str, Figure]:
    """The figures of this package by their commands' names, listed here alone; imported now, which takes seconds."""
    from dissociation.figures import collapse, eigenvectors, freedom, robustness, similarity, transfer

    return {
        "robustness": robustness,
        "transfer": transfer,
        "eigenvectors": eigenvectors,
        "collapse": collapse,
        "similarity": similarity,
        "freedom": freedom,
    }
