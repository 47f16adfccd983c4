"""Held-out environments, measured at one version."""
