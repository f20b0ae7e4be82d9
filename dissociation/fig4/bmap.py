"""`bmap`, under the name that the notebook of the paper imports it by."""

from dissociation.training._bmap import bmap

__all__ = ["bmap"]
