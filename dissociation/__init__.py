"""What a network's function says about its representation, and what it leaves open.

Train many seeds of a network, rewrite its weights without changing its function, and measure what changes.
Nothing is imported here: import the modules, for example `from dissociation.weights import neurons`.
"""
