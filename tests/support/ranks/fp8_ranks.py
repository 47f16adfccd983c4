"""Tensor-parallel ranks with vLLM models that quantise their linear layers to FP8, on a CPU."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from slipstream.protocol.weights.buckets import Bucket, TensorSpec, plan_buckets
from slipstream.rollout_server.weights.copy_plan import cut

from support.ranks.loader_ranks import SHAPES, Shape, checkpoint, in_ranks, two_models

BUCKET_BYTES = 24_000


@dataclass(frozen=True)
class Quantised:
    """What one rank saw of one shape."""

    num_matrices: int
    # Bytes of all matrices before quantising, and of the landings.
    plain_bytes: int
    landing_bytes: int
    # Parameters in which quantising by the plan differs from the loader, and those it changed.
    different: tuple[str, ...]
    changed: tuple[str, ...]
    # Whether a parameter has other memory than before.
    moved: bool
    # What the proof said of the loader's work; of each alteration of it.
    proof: str | None
    proofs_of_altered: tuple[str | None, ...]


def quantised(folder: Path, tp_size: int) -> list[dict[str, Quantised]]:
    """Outcomes by name of shape, one mapping for each rank."""
    shapes = {n: SHAPES[n] for n in ("llama_tied", "qwen2_with_bias", "qwen3_with_qk_norm")}
    return in_ranks(tp_size, _all_shapes, folder, tp_size, shapes)


def _all_shapes(
    rank: int, folder: Path, tp_size: int, shapes: Mapping[str, Shape]
) -> dict[str, Quantised]:
    keep_matrices_transposed()
    return {
        name: _one_shape(
            folder / name, replace(shape, quantization="fp8_per_channel"), rank, tp_size
        )
        for name, shape in shapes.items()
    }


def keep_matrices_transposed() -> None:
    """Gives vLLM on a CPU the matrices of a GPU, in this process."""
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    for kernel in (cpu.CPUFP8W8A8ScaledMMLinearKernel, cpu.CPUFp8PerTensorScaledMMLinearKernel):
        kernel.is_supported = lambda *_: (False, "it packs matrices")


def _one_shape(folder: Path, shape: Shape, rank: int, tp_size: int) -> Quantised:
    from slipstream.rollout_server.vllm.fp8_plan import (
        Fp8Check,
        Fp8Plan,
        Fp8Replay,
        fp8_linears,
    )
    from slipstream.rollout_server.vllm.loader_update import recorded_plan

    config, model, fresh = two_models(folder, shape, rank, tp_size)
    first, second = checkpoint(folder, 1), checkpoint(folder, 2)
    load(config, model, first)
    load(config, fresh, first)
    parameters = dict(model.named_parameters())
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in parameters.items()}
    tensors = [TensorSpec(n, "bfloat16", tuple(t.shape)) for n, t in second.items()]
    buckets = tuple(plan_buckets(tensors, BUCKET_BYTES))
    plan = recorded_plan(model, buckets, torch.device("cpu"), config)
    assert plan is not None
    assert all(same_bits(before[n][1], t) for n, t in parameters.items()), "recording wrote"

    replay = Fp8Replay(plan, parameters)
    room = [torch.zeros(max(b.num_bytes for b in buckets), dtype=torch.uint8) for _ in range(2)]
    for place, bucket in enumerate(buckets):
        buffer = room[place % 2][: bucket.num_bytes]
        _fill(buffer, bucket, second)
        replay.run(place, buffer)
        # Nothing that is wanted later may lie in a buffer.
        buffer.fill_(255)

    linears = fp8_linears(fresh)
    live = dict(fresh.named_parameters())
    proof = Fp8Check(Fp8Plan(plan.buckets, plan.copies, linears), live)
    kept = []
    for bucket in buckets:
        kept.append(torch.zeros(bucket.num_bytes, dtype=torch.uint8))
        _fill(kept[-1], bucket, second)
    for place, buffer in enumerate(kept):
        proof.add(place, buffer)
    assert proof.failure() is not None, "it was proved before it was loaded"
    load(config, fresh, second)
    verdict = proof.failure()
    altered = []
    for linear in linears.values():
        for tensor in (linear.weight.view(torch.uint8), linear.scale):
            check = Fp8Check(Fp8Plan(plan.buckets, plan.copies, linears), live)
            old = tensor.clone()
            tensor.view(-1)[-1] += 1
            for place, buffer in enumerate(kept):
                check.add(place, buffer)
            altered.append(check.failure())
            tensor.copy_(old)
    now = dict(model.named_parameters())
    return Quantised(
        num_matrices=len(linears),
        plain_bytes=sum(linear.plain_bytes for linear in linears.values()),
        landing_bytes=replay.landing_bytes,
        different=tuple(n for n, t in now.items() if not same_bits(t, live[n])),
        changed=tuple(n for n, t in now.items() if not same_bits(before[n][1], t)),
        moved=any(before[n][0] != t.data_ptr() for n, t in now.items()),
        proof=verdict,
        proofs_of_altered=tuple(altered),
    )


def load(config: Any, model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Has vLLM load weights, for the first time or again."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import reload

    with set_current_vllm_config(config):
        if not any(tensor.is_meta for tensor in model.parameters()):
            reload.initialize_layerwise_reload(model)
        model.load_weights(iter(weights.items()))
        reload.finalize_layerwise_reload(model, config.model_config)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits; float8 has no comparison."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.data.view(bits), other.data.view(bits))


def _fill(buffer: torch.Tensor, bucket: Bucket, weights: Mapping[str, torch.Tensor]) -> None:
    for name, place in cut(buffer, bucket):
        place.copy_(weights[name])
