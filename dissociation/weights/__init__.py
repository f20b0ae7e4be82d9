"""Rewrites of weights: function-preserving ones, and noise that is not."""
