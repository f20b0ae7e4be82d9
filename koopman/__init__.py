"""Evolution operators (Koopman, transfer) learned from trajectories, in pure JAX."""
