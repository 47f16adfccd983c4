"""What a save says that a rank could not write."""

from traceback import StackSummary
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from slipstream.core.errors import CheckpointError  # noqa: E402
from slipstream.learner.trainer.checkpoints import distributed_files  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ({1: (FULL, StackSummary())}, "OSError on rank 1: [Errno 28] No space left on device"),
        ({}, "another rank failed"),
    ],
)
def test_a_save_that_torch_finds_failed_is_a_failed_checkpoint(failures, cause, monkeypatch):
    def gather() -> None:
        # torch's own error is no Exception.
        raise CheckpointException("write", failures)

    saver = distributed_files.state_dict_saver
    monkeypatch.setattr(saver, "save_state_dict_async_finalize", gather)
    save = distributed_files.ThreadedSave(host=None, disk=SimpleNamespace(moved=None))
    save._plan = ()
    with pytest.raises(CheckpointError) as caught:
        save.finish()
    assert str(caught.value) == f"the checkpoint could not be written: {cause}"


def test_a_save_that_cannot_be_planned_is_a_failed_checkpoint(tmp_path, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        # Each rank makes its folder while all plan together.
        raise CheckpointException("plan", {1: (OSError(5, "Input/output error"), StackSummary())})

    monkeypatch.setattr(distributed_files.dist_checkpointing, "save", refuse)
    with pytest.raises(CheckpointError) as caught:
        distributed_files.begin_save([], tmp_path, host=None, disk=SimpleNamespace(moved=None))
    assert str(caught.value) == (
        "the checkpoint could not be written: OSError on rank 1: [Errno 5] Input/output error"
    )
