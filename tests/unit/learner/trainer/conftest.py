"""A warning in these tests is an error, and Megatron is importable without triton."""

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("torch"):
    importlib.import_module(
        "slipstream.learner.trainer.ranks.cpu"
    ).hide_triton_kernels()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            # What Megatron warns of depends on which test in this process was the first to load it.
            item.add_marker(
                pytest.mark.filterwarnings("error", "ignore::UserWarning:megatron")
            )
