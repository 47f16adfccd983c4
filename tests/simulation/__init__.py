"""Seeded simulation of whole runs: the product's own classes on a virtual clock, in one process."""
