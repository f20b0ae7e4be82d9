"""Fit models to trajectories as users have them, and say how sure they are."""
