"""Fixtures for tests that start real processes."""

from rank_pool import rank_pool
from run_processes import nothing_survives, tiny_model

__all__ = ["nothing_survives", "rank_pool", "tiny_model"]
