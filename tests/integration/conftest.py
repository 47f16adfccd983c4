"""Fixtures for tests that start real processes; Megatron is importable without triton."""

from pathlib import Path

import pytest
from slipstream.learner.trainer.ranks.cpu import hide_triton_kernels
from support.ranks.rank_pool import rank_pool
from support.rigs.run_processes import nothing_survives, tiny_model

hide_triton_kernels()

__all__ = ["nothing_survives", "one_thread", "rank_pool", "tiny_model"]


@pytest.fixture(scope="module")
def one_thread() -> None:
    """Several threads of such small models cost more than they bring, most so on a busy machine."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder of all small models, with NUM_LAYERS layers if the module says so."""
    from support.fakes import parity_models

    folder = tmp_path_factory.mktemp("models")
    num_layers = getattr(request.module, "NUM_LAYERS", parity_models.NUM_LAYERS)
    parity_models.make_models(folder, num_layers=num_layers)
    return folder
