"""For the paper's own notebook, which has `from logistic import crossval_softmax_predict`: put beside it, this is ours.

Its other imports, `bmap`, `expand` and `mnist`, are `dissociation.fig4.bmap`, `.expand` and
`.mnist`.
"""

from dissociation.measures import linear_probe as crossval_softmax_predict

__all__ = ["crossval_softmax_predict"]
