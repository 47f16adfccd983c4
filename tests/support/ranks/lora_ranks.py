"""The program of ranks that train low-rank adapters.

What a job saw lies in FOLDER/lora-JOB.pt afterwards, on rank 0; FOLDER/lora-JOB-merged and
FOLDER/lora-JOB-adapters are what it exported, and FOLDER/lora-JOB-run has the same beside training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from slipstream.core.errors import CheckpointError, RunFailed
from slipstream.core.settings.config import Config
from slipstream.core.types import PolicyVersion
from slipstream.protocol.checkpoints import PARTIAL_SUFFIX
from slipstream.protocol.weights.buckets import Bucket, layout_from_pb

from support.ranks.parity_layouts import batches, probe
from support.ranks.rank_program import (
    STEPS,
    kept,
    opened,
    score,
    settings_of,
    weights_of,
)

if TYPE_CHECKING:
    from slipstream.learner.trainer.model.policy import Policy
    from slipstream.learner.trainer.weights.weight_publisher import Published

RANK = 4
ALPHA = 8.0
SP = {"tp": 2}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
# name -> (ranks, model, settings of the learner)
JOBS: dict[str, tuple[int, str, dict]] = {
    "one": (1, "llama", {}),
    "one-tied": (1, "tied", {}),
    "one-qwen3": (1, "qwen3", {}),
    "tp2": (
        2,
        "llama",
        {"parallel": {"tp": 2}, "transformer": {"sequence_parallel": False}},
    ),
    "tp2-sp-qwen3": (2, "qwen3", {"parallel": SP}),
    "dp2-distributed": (2, "llama", {"ddp": {"use_distributed_optimizer": True}}),
    "pp2-tied": (2, "tied", {"parallel": {"pp": 2}}),
    # A delta net, and attention with an output gate.
    "one-qwen35": (1, "qwen35", {}),
    "tp2-sp-qwen35": (2, "qwen35", {"parallel": SP}),
    "cp2-qwen35": (2, "qwen35", {"parallel": {"cp": 2}}),
}


# Mixtures of experts: adapters on attention alone, and experts on ranks that send no adapters.
MIXTURES: dict[str, tuple[int, str, dict]] = {
    "ep2-moe": (2, "moe", {"parallel": {"ep": 2}})
}


# Mixtures of experts whose experts have adapters too: their weights travel merged.
EXPERTS: dict[str, tuple[int, str, dict]] = {
    "experts-one": (1, "moe", {}),
    "experts-recompute": (1, "moe", {"transformer": RECOMPUTE}),
    "experts-ep2": (2, "moe", {"parallel": {"ep": 2}}),
    "experts-etp2": (2, "moe", {"parallel": SP}),
    "experts-ep2-etp1": (2, "moe", {"parallel": SP | {"ep": 2, "etp": 1}}),
    # The first stage has no layer, and so no adapter.
    "experts-after-embedding": (
        2,
        "moe",
        {
            "parallel": {"pp": 2},
            "transformer": {"pipeline_model_parallel_layout": "E|ttL"},
        },
    ),
    "latent-one": (1, "deepseek", {}),
    "latent-pp2": (2, "deepseek", {"parallel": {"pp": 2}}),
    # The model's queries come from no latent vector.
    "lite-one": (1, "moonlight", {}),
    "next-one": (1, "qwen3-next", {}),
    "next-tp2": (2, "qwen3-next", {"parallel": SP}),
    "experts-tp2-ep2": (4, "moe", {"parallel": SP | {"ep": 2, "etp": 2}}),
}
ALL = JOBS | MIXTURES | EXPERTS
# Jobs that also load the checkpoint of another layout.
OTHERS_CHECKPOINT = {"tp2-sp-qwen35": "one-qwen35", "next-tp2": "next-one"}


def config_of(name: str, folder: Path) -> Config:
    world_size, model, learner = ALL[name]
    lora: dict = {"rank": RANK, "alpha": ALPHA}
    if name in MIXTURES:
        lora["target_modules"] = ["linear_qkv", "linear_proj"]
    learner = learner | {"world_size": world_size, "micro_batch_tokens": 400}
    settings = {"learner": learner, "lora": lora}
    return settings_of(folder / model, settings)


def run_rank(folder: Path, job: str) -> None:
    from slipstream.extensions.other_models.trainer import without_adapters
    from slipstream.learner.trainer import export_checkpoint
    from slipstream.learner.trainer.checkpoints.disk_work import DiskWork
    from slipstream.learner.trainer.checkpoints.distributed_files import load_models
    from slipstream.learner.trainer.checkpoints.stored_model import POLICY, StoredModel
    from slipstream.learner.trainer.model import model
    from slipstream.learner.trainer.model import policy as policy_module
    from slipstream.learner.trainer.step import TrainingStep
    from slipstream.learner.trainer.weights.export import save_adapters, save_hf_folder
    from slipstream.learner.trainer.weights.periodic_export import PeriodicExport
    from slipstream.learner.trainer.weights.run_chat import RunChat

    config = config_of(job, folder)
    policy = opened(config)
    step = TrainingStep(policy, config)
    metrics = []
    logprobs = []
    before = weights_of(policy)
    # Adapters of experts are not sent apart.
    published = None if job in EXPERTS else see_published(policy, config)
    first_identity = b"" if published is None else published.digests().identity
    base = score(policy, probe(config))
    save_adapters(policy, config, folder / f"lora-{job}-first", RunChat())
    disk = DiskWork(folder, policy.ranks)
    stored = [StoredModel(POLICY, policy.chunks, policy.optimizer)]
    for batch in batches(config):
        if batch.step == STEPS - 1:
            save(stored, folder / f"lora-{job}-checkpoint", disk)
        metrics.append(step.run(batch).metrics)
        logprobs.append(score(policy, probe(config)))
    save_hf_folder(policy, config.model.path, folder / f"lora-{job}-merged", RunChat())
    save_adapters(policy, config, folder / f"lora-{job}-adapters", RunChat())
    table = config.model_dump(mode="json", exclude_none=True)
    table["run"] |= {"name": f"lora-{job}-run", "dir": str(folder)}
    table["checkpoint"]["export_every"] = STEPS
    beside = PeriodicExport(Config.model_validate(table), policy, RunChat())
    beside.export(PolicyVersion(0, STEPS), b"")
    beside.finish()
    if job == "one":
        # A file is where the folder of the whole model would be written.
        cut = folder / f"lora-{job}-cut"
        cut.with_name(f"{cut.name}{PARTIAL_SUFFIX}").touch()
        with contextlib.suppress(CheckpointError):
            export_checkpoint.write_folders(policy, config, cut, RunChat())
    with without_adapters(policy.chunks):
        switched_off = score(policy, probe(config))
    weights = weights_of(policy)
    if published is not None:
        note_sent(published, policy, job, folder, first_identity)
    loaded_across = {}
    if job in OTHERS_CHECKPOINT:
        load_models(stored, folder / f"lora-{OTHERS_CHECKPOINT[job]}-checkpoint", disk)
        loaded_across = weights_of(policy)
    load_models(stored, folder / f"lora-{job}-checkpoint", disk)
    loaded = weights_of(policy)
    step.run(batches(config)[-1])
    retrained = weights_of(policy)
    state = policy_module.optimizer_state(policy.optimizer, policy.chunks)
    trained = [p for p in model.parameters(policy.chunks) if p.requires_grad]
    result = {
        "metrics": metrics,
        "logprobs": logprobs,
        "before": before,
        "base": base,
        "switched_off": switched_off,
        "weights": weights,
        "loaded": loaded,
        "loaded_across": loaded_across,
        "retrained": retrained,
        "state_elements": sum(t.numel() for t in state),
        "trained_elements": sum(p.numel() for p in trained),
    }
    kept(policy, result, folder / f"lora-{job}.pt")


def note_sent(
    published: Published, policy: Policy, job: str, folder: Path, first_identity: bytes
) -> None:
    """Saves what this rank sends."""
    published.fill_ahead()
    sent = {
        "first_identity": first_identity.hex(),
        "identity": published.digests().identity.hex(),
        "senders": list(published.weights.senders),
        "kinds": [
            type(s._filling).__name__
            for s in (published.weights, *published._adapters.values())
        ],
        "whole": sent_by(published, policy, adapters_alone=False),
        "alone": sent_by(published, policy, adapters_alone=True),
        "announced": [digest.hex() for digest in published.digests().buckets],
        "moved": moved_matrix(published, policy),
    }
    torch.save(sent, folder / f"lora-{job}-sent-{policy.ranks.rank}.pt")


def see_published(policy: Policy, config: Config) -> Published:
    """What a run with `lora.publish = "adapters"` sends."""
    from slipstream.learner.trainer.weights.weight_publisher import open_published

    lora = config.lora.model_copy(update={"publish": "adapters"})
    return open_published(policy, config.model_copy(update={"lora": lora}))


def sent_by(published: Published, policy: Policy, *, adapters_alone: bool) -> dict:
    """Names, sizes and digests of a pass, and what was in the buckets that this rank leads."""
    layout = published.layout(adapters_alone=adapters_alone)
    expected = layout_from_pb(layout)
    places = []
    tensors = {}

    def send(place: int, bucket: Bucket, data: torch.Tensor) -> Callable[[], None]:
        assert bucket == expected[place]
        places.append(place)
        if published.weights.senders[bucket.root] == policy.ranks.rank:
            tensors.update({name: tensor.clone() for name, tensor in cut(data, bucket)})
        return lambda: None

    digests = published.run(send, adapters_alone=adapters_alone)
    assert places == (
        list(range(len(expected))) if published.weights.sender is not None else []
    )
    assert len(digests.buckets) == len(expected)
    num_bytes = published.num_bytes(adapters_alone=adapters_alone)
    assert num_bytes == sum(bucket.num_bytes for bucket in expected)
    return {
        "tensors": tensors,
        "identity": digests.identity.hex(),
        "buckets": [digest.hex() for digest in digests.buckets],
        "scale": layout.adapter_scale,
        "adapters": [tensor.name for tensor in layout.adapters],
    }


def cut(data: torch.Tensor, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    for span in bucket.spans:
        raw = data[span.offset_bytes : span.offset_bytes + span.tensor.num_bytes]
        yield span.tensor.name, raw.view(torch.float32).view(span.tensor.shape)


def moved_matrix(published: Published, policy: Policy) -> str:
    """What is said when a frozen parameter is another one at the next whole pass."""
    frozen = next(p for p in policy.chunks[0].parameters() if not p.requires_grad)
    before = frozen.detach().clone()
    with torch.no_grad():
        frozen.add_(1.0)
    try:
        published.run()
    except RunFailed as error:
        return str(error)
    finally:
        frozen.data.copy_(before)
    return ""


def save(models: list, path: Path, disk) -> None:
    from slipstream.learner.trainer.checkpoints.distributed_files import begin_save
    from slipstream.learner.trainer.checkpoints.host_copies import HostCopies

    path.mkdir(exist_ok=True)
    host = HostCopies(torch.device("cpu"))
    pending = begin_save(models, path, host=host, disk=disk)
    pending.write()
    pending.finish()
