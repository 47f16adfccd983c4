"""Fixtures for tests that start real processes."""

from run_processes import nothing_survives, tiny_model

__all__ = ["nothing_survives", "tiny_model"]
