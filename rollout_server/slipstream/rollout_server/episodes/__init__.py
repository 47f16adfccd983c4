"""Episodes: environments and their workers, turns, and the trajectories that result."""
