"""What of an optimizer's state is not converted, and how the kinds are told apart."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from slipstream.core.errors import CheckpointError  # noqa: E402
from slipstream.learner.trainer.checkpoints.distributed_files import (  # noqa: E402
    check_convertible,
    was_distributed,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata  # noqa: E402


def optimizer(**settings: bool) -> SimpleNamespace:
    both = {"use_precision_aware_optimizer": False, "optimizer_cpu_offload": False}
    return SimpleNamespace(config=SimpleNamespace(**both | settings))


def index(**dtypes: torch.dtype) -> Metadata:
    return Metadata(
        {
            key.replace("__", "."): TensorStorageMetadata(
                TensorProperties(dtype=dtype), torch.Size([2]), []
            )
            for key, dtype in dtypes.items()
        }
    )


def test_float32_state_is_convertible_whatever_the_weights_are() -> None:
    dtypes = {"w": torch.bfloat16, "optimizer__state__exp_avg__w": torch.float32}
    check_convertible(optimizer(), index(**dtypes), "")


@pytest.mark.parametrize("setting", ["use_precision_aware_optimizer", "optimizer_cpu_offload"])
def test_state_of_settings_that_one_kind_alone_has_is_refused_by_their_name(setting: str) -> None:
    with pytest.raises(CheckpointError, match=rf"use_distributed_optimizer .*\.{setting} is set"):
        check_convertible(optimizer(**{setting: True}), index(), "")


def test_state_of_less_precision_is_refused_by_its_name() -> None:
    state = index(critic__optimizer__state__exp_avg__w=torch.bfloat16)
    check_convertible(optimizer(), state, "")
    with pytest.raises(CheckpointError, match=r"critic.optimizer.state.exp_avg.w is torch.bfloat"):
        check_convertible(optimizer(), state, "critic.")


def test_the_kind_stands_beside_the_tensors_of_each_part() -> None:
    distributed = {"optimizer": {}, "param_state_sharding_type": "fully_reshardable"}
    assert was_distributed(distributed)
    assert was_distributed({0: distributed, 1: distributed})
    assert was_distributed([distributed])
    assert not was_distributed({0: {"param_groups": [{"step": 3}]}})
