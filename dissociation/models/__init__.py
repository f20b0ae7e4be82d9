"""Networks whose insides the other modules know: one example in, hidden representations by name."""
