"""How much representations say about inputs and labels, by several estimators."""
