"""Provide argument checks, keys, linear algebra, files and labelled results."""
