"""One module per figure: a frozen `Config`, `compute` and `draw`."""
