"""Fixtures and marks of tests that need GPUs."""

from pathlib import Path

import pytest
import torch
from support.ranks.rank_pool import rank_pool

__all__ = ["rank_pool"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU tests are skipped, but those that say themselves what they need."""
    for item in items:
        is_here = item.path.parent == Path(__file__).parent
        if (
            is_here
            and not torch.cuda.is_available()
            and not item.get_closest_marker("skipif")
        ):
            item.add_marker(pytest.mark.skip("no GPU"))
