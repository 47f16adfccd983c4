"""Tensor-parallel ranks that build real vLLM models on a CPU, without what an engine does to them.

Each rank loads checkpoint A by the model's own loader, records a copy plan, replays it over
checkpoint B and compares every parameter with a second model that loaded B.
"""

import multiprocessing
import os
import queue
import tempfile
import traceback
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from slipstream.protocol.weights.buckets import Bucket, TensorSpec, plan_buckets
from slipstream.rollout_server.weights.copy_plan import (
    CopyPlan,
    PlanCheck,
    PlannedCopies,
    cut,
    record,
)

LIMIT_S = 500.0
BUCKET_BYTES = 24_000
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    # No multiple of 64: vLLM pads it.
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

SIGMOID = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}


@dataclass(frozen=True)
class Shape:
    """A model's configuration in transformers."""

    config_class: str
    tied: bool = False
    extra: Mapping[str, int] | None = None


SHAPES = {
    "llama": Shape("LlamaConfig"),
    "llama_tied": Shape("LlamaConfig", tied=True),
    # vLLM reads no head_dim of this class.
    "qwen2_with_bias": Shape("Qwen2Config", extra={"head_dim": 16}),
    "qwen3_with_qk_norm": Shape("Qwen3Config"),
    "qwen3_moe": Shape("Qwen3MoeConfig", extra=EXPERTS),
    "gemma3": Shape("Gemma3TextConfig", tied=True, extra={"sliding_window": 16}),
    "glm": Shape("Glm4MoeConfig", extra=SIGMOID),
}


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of one shape."""

    num_copies: int
    # Parameters in which the replay differs from the loader.
    different: tuple[str, ...]
    # The number of parameters that the replay changed.
    changed: int
    # The verdict of the plan's check on the loader's work, and after one element was altered.
    proof: str | None
    proof_of_altered: str | None


def outcomes(
    folder: Path, tp_size: int, shapes: Mapping[str, Shape]
) -> list[dict[str, Outcome]]:
    """Outcomes by name of shape, one mapping for each rank."""
    return in_ranks(tp_size, _all_shapes, folder, tp_size, dict(shapes))


def in_ranks(num_ranks: int, work: Callable[..., Any], *arguments: object) -> list[Any]:
    """Results of `work(rank, *arguments)`, of processes of their own: no group stays in this one.

    They are forked by one that has imported vLLM and done nothing else: gRPC's threads of tests
    before these hold locks that nobody would give back in a copy of this process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm.model_executor.model_loader.utils", __name__])
    answers = context.Queue()
    meeting = uuid.uuid4().hex
    # vLLM's sockets, which nobody closes when a rank ends.
    sockets = tempfile.TemporaryDirectory(prefix="ranks-")
    children = [
        context.Process(
            target=_rank, args=(rank, meeting, sockets.name, work, arguments, answers)
        )
        for rank in range(num_ranks)
    ]
    for child in children:
        child.start()
    try:
        answers_by_rank = dict(answers.get(timeout=LIMIT_S) for _ in children)
    except queue.Empty:
        raise TimeoutError(
            f"no answer of {num_ranks} ranks within {LIMIT_S:g} s"
        ) from None
    finally:
        for child in children:
            child.join(LIMIT_S)
            child.kill()
        sockets.cleanup()
        # vLLM leaves the memory that the ranks shared.
        for path in Path("/dev/shm").glob(f"{meeting}-*"):
            path.unlink()
    wrong = [answer for answer in answers_by_rank.values() if isinstance(answer, str)]
    assert not wrong, wrong[0]
    return [answers_by_rank[rank] for rank in range(num_ranks)]


def _rank(
    rank: int,
    meeting: str,
    sockets: str,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
    answers: Any,
) -> None:
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # Names the ranks' shared memory; vLLM's executor sets it otherwise.
    os.environ["VLLM_DIST_IDENT"] = meeting
    os.environ["VLLM_RPC_BASE_PATH"] = sockets
    torch.set_num_threads(1)
    try:
        answers.put((rank, work(rank, *arguments)))
    except BaseException:
        answers.put((rank, traceback.format_exc()))
        raise


def _all_shapes(
    rank: int, folder: Path, tp_size: int, shapes: Mapping[str, Shape]
) -> dict[str, Outcome]:
    return {
        name: _one_shape(folder / name, shape, rank, tp_size)
        for name, shape in shapes.items()
    }


def _one_shape(folder: Path, shape: Shape, rank: int, tp_size: int) -> Outcome:
    _, model, fresh = two_models(folder, shape, rank, tp_size)
    return _compare(model, fresh, checkpoint(folder, 1), checkpoint(folder, 2))


def with_room_for_adapters(
    rank: int, folder: Path, shape: Shape, modules: list[str]
) -> Outcome:
    """A model some of whose layers are wrapped for an adapter, against one without."""
    from vllm.config import set_current_vllm_config
    from vllm.config.lora import LoRAConfig
    from vllm.lora.model_manager import LRUCacheLoRAModelManager, create_lora_manager

    config, model, fresh = two_models(folder, shape, rank, 1)
    config.lora_config = LoRAConfig(max_lora_rank=8, target_modules=modules)
    config.lora_config.verify_with_model_config(config.model_config)
    with set_current_vllm_config(config):
        create_lora_manager(
            model,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            vocab_size=SIZES["vocab_size"],
            lora_config=config.lora_config,
            vllm_config=config,
            device=torch.device("cpu"),
            lora_manager_cls=LRUCacheLoRAModelManager,
        )
    wrapped = [name for name, _ in model.named_parameters() if ".base_layer." in name]
    assert len(wrapped) == _num_matrices(modules), wrapped
    return _compare(model, fresh, checkpoint(folder, 1), checkpoint(folder, 2))


def _num_matrices(modules: list[str]) -> int:
    """Matrices of all layers that have one of these parts."""
    fused = [
        {"q_proj", "k_proj", "v_proj"},
        {"o_proj"},
        {"gate_proj", "up_proj"},
        {"down_proj"},
    ]
    return SIZES["num_hidden_layers"] * sum(
        bool(parts & set(modules)) for parts in fused
    )


def two_models(
    folder: Path, shape: Shape, rank: int, tp_size: int
) -> tuple[Any, Any, Any]:
    """vLLM's configuration, and this rank's part of two models whose memory holds anything."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = _engine_config(folder, shape, rank)
    with set_current_vllm_config(config):
        meeting = f"file://{folder.parent / os.environ['VLLM_DIST_IDENT']}"
        init_distributed_environment(tp_size, rank, meeting, rank, "gloo")
        # Only a mixture of experts gets a group for them.
        destroy_model_parallel()
        initialize_model_parallel(tp_size, 1)
        # Layers are registered under their names: a second model needs a second registry.
        with set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(config)
            config.compilation_config.static_forward_context.clear()
            fresh = initialize_model(config)
    return config, model, fresh


def _engine_config(folder: Path, shape: Shape, rank: int) -> Any:
    import transformers
    from vllm import EngineArgs

    if rank == 0 and not (folder / "ready").exists():
        config = getattr(transformers, shape.config_class)(
            **SIZES | dict(shape.extra or {}), tie_word_embeddings=shape.tied
        )
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16
        )
        model.save_pretrained(folder)
        (folder / "ready").touch()
    while not (folder / "ready").exists():
        os.sched_yield()
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=64,
    )
    return arguments.create_engine_config()


def checkpoint(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }


def _compare(
    model: Any,
    fresh: Any,
    first: Mapping[str, torch.Tensor],
    second: Mapping[str, torch.Tensor],
) -> Outcome:
    parameters = dict(model.named_parameters())
    # Padding is what the loader makes of it, not what happened to lie in memory.
    model.load_weights(iter(first.items()))
    before = {name: tensor.clone() for name, tensor in parameters.items()}
    tensors = [TensorSpec(n, "bfloat16", tuple(t.shape)) for n, t in second.items()]
    buckets = plan_buckets(tensors, BUCKET_BYTES)
    plan = record(model.load_weights, parameters, buckets, torch.device("cpu"))
    assert all(torch.equal(before[n], t) for n, t in parameters.items()), (
        "recording wrote"
    )

    replay = PlannedCopies(plan, parameters)
    room = [
        torch.zeros(max(b.num_bytes for b in buckets), dtype=torch.uint8)
        for _ in range(2)
    ]
    for place, bucket in enumerate(buckets):
        buffer = room[place % 2][: bucket.num_bytes]
        _fill(buffer, bucket, second)
        replay.run(place, buffer)

    proof = PlanCheck(plan, _as_in(fresh, plan))
    losses = []
    for place, bucket in enumerate(buckets):
        losses.append(torch.zeros(bucket.num_bytes, dtype=torch.uint8))
        _fill(losses[place], bucket, second)
        # The check is one bucket behind: the loader may finish a bucket later.
        if place:
            fresh.load_weights(cut(losses[place - 1], buckets[place - 1]))
        proof.add(place, losses[place])
    assert proof.failure() is not None, "it was proved before it was loaded"
    fresh.load_weights(cut(losses[-1], buckets[-1]))
    verdict = proof.failure()
    expected = {_bare(name): tensor for name, tensor in fresh.named_parameters()}
    different = tuple(
        n for n, t in parameters.items() if not torch.equal(t, expected[_bare(n)])
    )

    altered = PlanCheck(plan, _as_in(fresh, plan))
    expected[_bare(plan[-1][-1].parameter)].data.view(-1)[0] += 1
    altered.add(len(buckets) - 1, losses[-1])
    return Outcome(
        num_copies=sum(len(part) for part in plan),
        different=different,
        changed=sum(not torch.equal(before[n], t) for n, t in parameters.items()),
        proof=verdict,
        proof_of_altered=altered.failure(),
    )


def _bare(parameter: str) -> str:
    return parameter.replace(".base_layer.", ".")


def _as_in(model: Any, plan: CopyPlan) -> dict[str, torch.Tensor]:
    """The model's parameters by the names of the plan."""
    settings = {_bare(name): tensor for name, tensor in model.named_parameters()}
    return {
        copy.parameter: settings[_bare(copy.parameter)]
        for part in plan
        for copy in part
    }


def _fill(
    buffer: torch.Tensor, bucket: Bucket, weights: Mapping[str, torch.Tensor]
) -> None:
    for name, place in cut(buffer, bucket):
        place.copy_(weights[name])
