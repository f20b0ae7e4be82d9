"""Datasets: MNIST from its original files, and digits drawn by code."""
