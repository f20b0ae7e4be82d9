"""Import paths that the notebook of the paper uses."""
