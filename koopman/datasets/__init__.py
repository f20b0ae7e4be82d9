"""Dynamical systems: trajectories as pure functions of a key, and the exact spectra of their evolution operators."""
