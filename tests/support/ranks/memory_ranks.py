"""The program of ranks that train with their memory on the host, in half precision, and so on.

What a job saw lies in FOLDER/memory-JOB.pt afterwards, on rank 0; `parity_ranks` has the settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from slipstream.core.settings.config import Config

from support.ranks.parity_layouts import batches, probe
from support.ranks.rank_program import kept, opened, score, settings_of

if TYPE_CHECKING:
    from slipstream.learner.trainer.model.policy import Policy

DISTRIBUTED = {"ddp": {"use_distributed_optimizer": True}}
OFFLOAD = {"offload": {"parameters": True, "gradients": True, "optimizer": True}}
CPU_OPTIMIZER = {
    "optimizer": {
        "adam_eps": 1e-3,
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 1.0,
    }
}
BF16 = {"model": {"dtype": "bfloat16"}}
# Megatron itself refuses fusions that are not installed.
NO_FUSIONS = {"apply_rope_fusion": False, "gradient_accumulation_fusion": False}
FP8 = {"transformer": {"fp8": "hybrid", "fp8_recipe": "tensorwise"} | NO_FUSIONS}
DETERMINISTIC = {"transformer": {"deterministic_mode": True}}
# Jobs that run only on a machine with a GPU.
GPU_JOBS = {"bf16-cpu-optimizer": (1, BF16 | {"learner": DISTRIBUTED | CPU_OPTIMIZER})}
# In a process of their own: they choose kernels for all that it does.
DETERMINISTIC_JOBS = {
    "exact": (1, BF16 | {"learner": DETERMINISTIC}),
    "exact-again": (1, BF16 | {"learner": DETERMINISTIC}),
    "exact-offload": (1, BF16 | {"learner": DETERMINISTIC | OFFLOAD}),
}
# name -> (ranks, changes of the settings)
JOBS: dict[str, tuple[int, dict]] = {
    "plain": (1, {}),
    "plain-offload": (1, {"learner": OFFLOAD}),
    "bf16": (1, BF16),
    "bf16-offload": (1, BF16 | {"learner": OFFLOAD}),
    "fp8": (1, BF16 | {"learner": FP8}),
    "distributed": (2, {"learner": DISTRIBUTED}),
    "distributed-offload": (2, {"learner": DISTRIBUTED | OFFLOAD}),
    "replicated": (2, {}),
    "bf16-distributed": (2, BF16 | {"learner": DISTRIBUTED}),
    "bf16-distributed-offload": (2, BF16 | {"learner": DISTRIBUTED | OFFLOAD}),
}


def config_of(name: str, folder: Path) -> Config:
    world_size, changes = (JOBS | GPU_JOBS | DETERMINISTIC_JOBS)[name]
    return settings_of(
        folder / "llama", changes, {"learner": {"world_size": world_size}}
    )


def run_rank(folder: Path, job: str) -> None:
    if job == "fp8" and not torch.cuda.is_available():
        torch.save(see_fp8(config_of(job, folder)), folder / f"memory-{job}.pt")
        return
    from slipstream.learner.trainer.model.model import MemoryPart
    from slipstream.learner.trainer.step import TrainingStep
    from slipstream.learner.trainer.weights.weight_stream import open_stream

    config = config_of(job, folder)
    policy = opened(config)
    step = TrainingStep(policy, config)
    stream = open_stream(policy, config)
    metrics = []
    digests = []
    between = []
    for batch in batches(config):
        metrics.append(step.run(batch).metrics)
        between.append(num_bytes(policy))
        digests.append(stream.run().identity)
        assert num_bytes(policy) == between[-1]
    logprobs = score(policy, probe(config))
    with policy.memory.resident(*MemoryPart):
        inside = num_bytes(policy)
        dtypes = {part.value: dtypes_of(policy, part) for part in MemoryPart}
    result = {
        "metrics": metrics,
        "digests": digests,
        "logprobs": logprobs,
        "between": between,
        "inside": inside,
        "dtypes": dtypes,
    }
    kept(policy, result, folder / f"memory-{job}.pt")


def see_fp8(config: Config) -> dict:
    """What the model is built from, were TransformerEngine there; and what is said without it."""
    from slipstream.core.errors import ConfigError
    from slipstream.learner.trainer.model.recipe import provider_of
    from slipstream.learner.trainer.ranks import compat

    bridge = compat.install().from_hf_pretrained(str(config.model.path))
    error = ""
    try:
        provider_of(bridge, bridge.hf_pretrained.config, config, load_weights=True)
    except ConfigError as refusal:
        error = str(refusal)
    compat.has_transformer_engine = lambda: True
    provider = provider_of(
        bridge, bridge.hf_pretrained.config, config, load_weights=True
    )
    return {"error": error, "fp8": provider.fp8, "fp8_recipe": str(provider.fp8_recipe)}


def num_bytes(policy: Policy) -> dict[str, int]:
    """What each part occupies now, in bytes of storage; where there is a GPU, of that alone."""
    from slipstream.learner.trainer.model.model import MemoryPart

    found = {}
    for part in MemoryPart:
        storages = map(torch.Tensor.untyped_storage, tensors(policy, part))
        here = [s for s in storages if s.is_cuda or not torch.cuda.is_available()]
        unique = {s.data_ptr(): s.nbytes() for s in here}
        found[part.value] = sum(unique.values())
    return found


def dtypes_of(policy: Policy, part: object) -> list[str]:
    return sorted({str(tensor.dtype) for tensor in tensors(policy, part)})


def tensors(policy: Policy, part: object) -> list[torch.Tensor]:
    from slipstream.learner.trainer.model import model
    from slipstream.learner.trainer.model import policy as policy_module

    if part is model.MemoryPart.PARAMETERS:
        return list(model.parameters(policy.chunks))
    if part is model.MemoryPart.GRADIENTS:
        return list(model.gradient_buffers(policy.chunks))
    return list(policy_module.optimizer_state(policy.optimizer, policy.chunks))
