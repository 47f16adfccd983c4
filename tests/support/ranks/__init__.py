"""Programs of several ranks, and the pool that forks them."""
