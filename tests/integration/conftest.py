"""Fixtures for tests that start real processes."""

import pytest
from support.ranks.rank_pool import rank_pool
from support.rigs.run_processes import nothing_survives, tiny_model

__all__ = ["nothing_survives", "one_thread", "rank_pool", "tiny_model"]


@pytest.fixture(scope="module")
def one_thread() -> None:
    """Several threads of such small models cost more than they bring, most so on a busy machine."""
    import torch

    torch.set_num_threads(1)
