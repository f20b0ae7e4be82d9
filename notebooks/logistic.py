"""`from logistic import crossval_softmax_predict`, as the paper's notebook imports it."""

from dissociation.metrics.probes import crossval_softmax_predict

__all__ = ["crossval_softmax_predict"]
