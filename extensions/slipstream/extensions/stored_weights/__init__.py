"""Weights go through storage to servers that are far away."""
