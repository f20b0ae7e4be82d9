"""Figures: one module each, with Config, compute and draw."""
