"""Which failures of a trainer rank would come again."""

import pytest
import torch
import torch.distributed as dist
from slipstream.core.errors import ConfigError, RunFailed
from slipstream.core.exit_codes import FINAL_ERROR, NOT_STARTED
from slipstream.learner.trainer.__main__ import exit_code
from slipstream.learner.trainer.train import StartAgain


@pytest.mark.parametrize(
    ("error", "while_loading", "afterwards"),
    [
        (ConfigError("learner.master must be ..."), FINAL_ERROR, FINAL_ERROR),
        (RunFailed("the controller is gone"), FINAL_ERROR, FINAL_ERROR),
        (KeyError("model.layers.0.mlp.gate"), FINAL_ERROR, 1),
        (ModuleNotFoundError("transformer_engine"), FINAL_ERROR, 1),
        (FileNotFoundError("model.safetensors"), FINAL_ERROR, 1),
        (AssertionError("num_query_groups"), FINAL_ERROR, 1),
        (torch.OutOfMemoryError("CUDA out of memory"), NOT_STARTED, 1),
        (dist.DistBackendError("NCCL error"), NOT_STARTED, 1),
        (OSError(5, "Input/output error"), NOT_STARTED, 1),
        (TimeoutError("of 2 ranks 1 did not come"), 1, 1),
        (ConnectionResetError("by peer"), 1, 1),
        (StartAgain("step 2 changed weights before it failed"), NOT_STARTED, 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failure_is_final_when_it_would_come_again(error, while_loading, afterwards):
    assert exit_code(error, has_loaded=False) == while_loading
    assert exit_code(error, has_loaded=True) == afterwards
