"""Fit operators to pairs of states, and read their spectra and forecasts."""
