"""Which groups may start, where, and what became of them."""
