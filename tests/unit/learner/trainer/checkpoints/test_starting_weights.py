"""Files that a run cannot start from."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from slipstream.learner.trainer.checkpoints.starting_weights import (  # noqa: E402
    check_no_adapters,
)
from slipstream.protocol.errors import ConfigError  # noqa: E402
from torch.distributed.checkpoint import FileSystemWriter, save  # noqa: E402

MATRIX = "decoder.layers.self_attention.linear_qkv.weight"
# As Megatron-Bridge names what it puts beside that matrix.
ADAPTER = "decoder.layers.self_attention.linear_qkv.adapter.linear_in.weight"


def write(folder: Path, *names: str) -> None:
    state = {name: torch.ones(2, 2) for name in names}
    with pytest.warns(UserWarning, match="save in a single process"):
        save(state, storage_writer=FileSystemWriter(folder), no_dist=True)


@pytest.mark.parametrize("folder", ["", "state"])
def test_adapters_that_would_be_left_out_are_refused(tmp_path: Path, folder: str) -> None:
    write(tmp_path / "without" / folder, MATRIX)
    check_no_adapters(tmp_path / "without")
    write(tmp_path / "with" / folder, MATRIX, ADAPTER)
    with pytest.raises(
        ConfigError, match=f"checkpoint.load must hold no adapters, .* {tmp_path}/with "
    ):
        check_no_adapters(tmp_path / "with")
