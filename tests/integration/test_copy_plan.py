"""Copy plans of real vLLM models against their own loader, bit for bit, alone and sharded."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from slipstream.protocol.weights.buckets import TensorSpec, plan_buckets
from slipstream.rollout_server.vllm.loader_update import check_layers
from slipstream.rollout_server.weights.copy_plan import NotCopied, record
from support.fakes import receiver_worker
from support.ranks.loader_ranks import (
    SHAPES,
    Outcome,
    in_ranks,
    outcomes,
    with_room_for_adapters,
)
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionImplBase

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Outcome]:
    (outcome,) = outcomes(folder, 1, SHAPES)
    return outcome


@pytest.fixture(scope="module")
def sharded(folder: Path) -> list[dict[str, Outcome]]:
    return outcomes(folder, 2, SHAPES)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_replayed_plan_equals_the_loader(alone, shape: str) -> None:
    assert alone[shape].different == ()
    assert alone[shape].changed > 10


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_replayed_plan_equals_the_loader_on_each_tensor_parallel_rank(
    sharded, shape, rank
):
    assert sharded[rank][shape].different == ()
    assert sharded[rank][shape].changed > 10


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize(
    ("shape", "modules"),
    [
        ("llama_tied", [*ATTENTION, "gate_proj", "up_proj", "down_proj"]),
        ("qwen2_with_bias", ["gate_proj", "up_proj"]),
        # Only some of its layers have another name then.
        ("qwen3_moe", ATTENTION),
    ],
)
def test_a_replayed_plan_equals_the_loader_where_layers_have_room_for_adapters(
    folder: Path, alone, shape: str, modules: list[str]
) -> None:
    (outcome,) = in_ranks(
        1, with_room_for_adapters, folder / shape, SHAPES[shape], modules
    )
    assert outcome.different == ()
    assert outcome.changed == alone[shape].changed


def test_every_expert_has_copies_of_its_own(alone) -> None:
    # Two layers of four experts with three matrices, instead of two layers with three.
    assert alone["qwen3_moe"].num_copies == alone[
        "qwen3_with_qk_norm"
    ].num_copies + 2 * (4 * 3 - 3 + 1)


def test_the_proof_accepts_what_the_loader_did_and_nothing_else(alone) -> None:
    for outcome in alone.values():
        assert outcome.proof is None
        assert outcome.proof_of_altered is not None


@pytest.mark.parametrize("stage", [False, True])
def test_a_receiver_proves_a_plan_for_each_layout_and_copies_from_then_on(
    folder, stage
):
    (seen,) = in_ranks(1, receiver_worker.updates, folder, "llama_tied", stage)
    loader = (False, True)
    plan = (True, True)
    assert seen[:5] == [loader, plan, plan, loader, plan]
    assert "did not arrive" in seen[5]
    assert seen[6:] == [plan]


@pytest.mark.parametrize("stage", [False, True])
def test_a_receiver_loads_and_then_copies_what_its_server_fetched(
    folder: Path, stage: bool
):
    (seen,) = in_ranks(
        1, receiver_worker.updates_from_files, folder, "llama_tied", stage
    )
    assert seen == [(False, True, True), (True, True, True), (True, True, True)]


def test_layers_that_pack_their_weights_go_through_the_loader(folder: Path) -> None:
    (seen,) = in_ranks(1, receiver_worker.updates, folder, "qwen3_moe", False)
    assert not any(by_plan for by_plan, _ in [*seen[:5], *seen[6:]])


def test_layers_that_compute_scales_are_loaded_though_nobody_sends_them(
    folder: Path,
) -> None:
    (seen,) = in_ranks(
        1, receiver_worker.updates_of_layers_with_scales, folder, "llama_tied"
    )
    # Four in each of two blocks.
    assert seen == [8, (False, True), True, (False, True), True]


def test_a_number_that_the_loader_reads_from_a_checkpoint_is_no_constant() -> None:
    import torch

    parameters = {"scale": torch.nn.Parameter(torch.ones(1))}

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            parameters[name].data.fill_(2 * weight.float().item())

    buckets = plan_buckets([TensorSpec("scale", "bfloat16", (1,))], bucket_bytes=1024)
    with pytest.raises(NotCopied, match="reads the value of an element"):
        record(load_weights, parameters, buckets, torch.device("cpu"))
    assert parameters["scale"].item() == 1.0


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_sinks_that_attention_copies_go_through_the_loader(precision: str) -> None:
    import torch
    import vllm

    class Backend(AttentionImplBase):
        """Replaces FlashInfer's class, which cannot be imported without a GPU."""

    folder = Path(vllm.__file__).parent / "v1" / "attention" / "backends"
    assert "self._sinks_source = sinks" in (folder / "flashinfer.py").read_text()
    layer = Attention.__new__(Attention)
    torch.nn.Module.__init__(layer)
    layer.impl = object.__new__(Backend)
    layer.impl._sinks_source = torch.zeros(4, dtype=getattr(torch, precision))
    model = torch.nn.ModuleDict({"attention": layer})
    if precision == "float32":
        check_layers(model)
        return
    with pytest.raises(
        NotCopied, match="attention .* computes with a copy of its sinks"
    ):
        check_layers(model)


def test_a_plan_is_not_made_where_experts_change_their_places(folder: Path) -> None:
    (seen,) = in_ranks(
        1, receiver_worker.updates_while_experts_move, folder, "llama_tied"
    )
    assert seen == [(False, True), (False, True)]


def test_recording_a_plan_takes_nothing_of_the_time_of_a_bucket(folder: Path) -> None:
    (seen,) = in_ranks(
        1, receiver_worker.first_update_with_slow_recording, folder, "llama_tied"
    )
    assert seen == [(False, True)]
