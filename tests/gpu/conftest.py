"""Fixtures for tests that need GPUs."""

from support.ranks.rank_pool import rank_pool

__all__ = ["rank_pool"]
