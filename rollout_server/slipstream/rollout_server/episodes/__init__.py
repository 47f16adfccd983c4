"""Episodes: environments and their workers, turns, and what became of them."""
