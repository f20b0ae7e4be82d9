"""Module for the paper's notebook, `from logistic import crossval_softmax_predict`.

Put this file beside the notebook.

Its other imports, `bmap`, `expand` and `mnist`, are `dissociation.fig4.bmap`, `.expand` and
`.mnist`.
"""

from dissociation.measures import linear_probe as crossval_softmax_predict

__all__ = ["crossval_softmax_predict"]
