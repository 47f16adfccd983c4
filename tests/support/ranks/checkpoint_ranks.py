"""Ranks that save and load checkpoints: a program of `rank_pool`.

What a job does stands in FOLDER/JOB.json: the run and its settings, whether to load the newest
checkpoint, until which version to train, and which versions to save. What came of it lies in
FOLDER/JOB.pt afterwards.
"""

import json
import shutil
import threading
from pathlib import Path

import torch
from slipstream.core.settings.config import Config
from slipstream.core.types import PolicyVersion
from slipstream.protocol.checkpoints import checkpoint_path

from support.fakes import parity_models
from support.fakes.fake_controller import make_batch
from support.fakes.parity_models import VOCAB
from support.ranks.rank_program import kept, opened, settings_of, weights_of

STEPS = 4
BATCHES = [
    make_batch(step, num_groups=2, group_size=4, vocab_size=VOCAB, max_tokens=40)
    for step in range(STEPS)
]

# Many parts of each bucket, the last of which is a shorter one.
PART_ELEMENTS = 5000


def config_of(folder: Path, job: dict) -> Config:
    settings = {
        "run": {"name": job["run"], "steps": STEPS, "dir": str(folder / "runs")},
        # A resume goes on in the middle of the schedule.
        "algorithm": {"warmup_steps": 1, "decay": "cosine"},
        # A single micro batch: what is saved does not depend on their number.
        "learner": {"micro_batch_tokens": 400, "timeout_s": 100.0},
    }
    tables_of_job = {
        name: job.get(name, {}) for name in ("algorithm", "learner", "checkpoint")
    }
    model = folder / job.get("model", "llama")
    return settings_of(
        model, settings, tables_of_job, dtype=job.get("dtype", "float32")
    )


def make_models(folder: Path) -> None:
    from make_tiny_vision_model import make_model

    parity_models.make_models(folder)
    # Four layers for virtual stages and for patterns of layers; two are enough for the rest.
    shallow = folder / "shallow"
    parity_models.make_models(shallow, num_layers=2)
    for name in ("tied", "moe", "olmo2", "gpt-oss", "deepseek"):
        shutil.rmtree(folder / name)
        (shallow / name).rename(folder / name)
    shutil.rmtree(folder / "qwen35")
    make_model(folder / "qwen35", "qwen3_5", vocab_size=VOCAB, num_key_value_heads=2)


def optimizer_tensors(policy) -> dict[str, torch.Tensor]:
    """The optimizer's state by parameter, as whole tensors where no rank holds a part of one."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from slipstream.learner.trainer.model.model import unwrapped

    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    of_chunks = {
        f"model{place}": unwrapped(chunk).sharded_state_dict(metadata=dict(metadata))
        for place, chunk in enumerate(policy.chunks)
    }
    state = of_chunks if len(of_chunks) > 1 else of_chunks["model0"]
    state = policy.optimizer.sharded_state_dict(state, metadata=metadata)
    apply_factories(state)
    leaves = [leaf for leaf in nested_values(state) if isinstance(leaf, ShardedTensor)]
    return {
        f"{leaf.key.replace('.fp32_param.', '.param.')} {leaf.global_offset}": leaf.data.clone()
        for leaf in leaves
    }


def damage_written(path: Path) -> None:
    """Waits until the thread of a save is done with this rank's file, and changes a byte of it."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()
    (file,) = path.with_name(f"{path.name}.partial").glob("state/*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def run_rank(folder: Path, name: str) -> None:
    from slipstream.core.errors import SlipstreamError
    from slipstream.learner.trainer.checkpoints import distributed_files
    from slipstream.learner.trainer.checkpoints.checkpoint import Checkpointer
    from slipstream.learner.trainer.checkpoints.disk_work import DiskWork
    from slipstream.learner.trainer.checkpoints.distributed_files import (
        begin_save,
        load_models,
    )
    from slipstream.learner.trainer.checkpoints.host_copies import HostCopies
    from slipstream.learner.trainer.checkpoints.stored_model import POLICY, StoredModel
    from slipstream.learner.trainer.step import TrainingStep
    from slipstream.learner.trainer.weights.weight_stream import open_stream

    job = json.loads((folder / f"{name}.json").read_text())
    config = config_of(folder, job)
    policy = opened(config)
    training = TrainingStep(policy, config)
    models = [StoredModel(POLICY, policy.chunks, policy.optimizer)]
    distributed_files.PART_ELEMENTS = PART_ELEMENTS
    checkpointer = Checkpointer(config, policy.ranks, models)
    result: dict = {"metrics": [], "saved": [], "error": ""}
    step = 0
    try:
        loaded = checkpointer.load_newest() if job.get("resume") else None
    except SlipstreamError as error:
        result["error"] = str(error)
        loaded = None
    if loaded is not None:
        step = loaded.step
        result["loaded_digest"] = loaded.weight_digest
    result["loaded"] = step
    if loaded is not None:
        result["loaded_optimizer"] = optimizer_tensors(policy)
    stream = open_stream(policy, config)
    result["digest"] = stream.run().identity.hex()
    if job.get("late"):
        # Training changes the tensors after the copy and before the write.
        state = folder / f"{name}-late"
        if policy.ranks.is_main:
            state.mkdir()
        policy.ranks.broadcast_bytes(b"" if policy.ranks.is_main else None)
        disk = DiskWork(state, policy.ranks)
        host = HostCopies(policy.ranks.device)
        pending = begin_save(models, state, host=host, disk=disk)
        training.run(BATCHES[step])
        pending.write()
        policy.ranks.gather_bytes(b"")
        pending.finish()
        load_models(models, state, disk)
        result["late_digest"] = stream.run().identity.hex()
    while step < job["until"]:
        result["metrics"].append(training.run(BATCHES[step]).metrics)
        step += 1
        if step in job.get("save", []):
            digest = stream.run().identity
            result["saved"].append(checkpointer.save(PolicyVersion(0, step), digest))
            result["saved_optimizer"] = optimizer_tensors(policy)
            if job.get("damage"):
                damage_written(checkpoint_path(config.run_dir / "checkpoints", step))
    result["saved"].append(checkpointer.finish())
    if job.get("save"):
        # A client may ask for a version that is written already.
        result["saved"].append(
            checkpointer.save(PolicyVersion(0, job["save"][-1]), b"")
        )
    result["saved"] = [
        saved.manifest.step for saved in result["saved"] if saved is not None
    ]
    result["weights"] = weights_of(policy)
    result["groups"] = [
        {key: group.get(key, 0) for key in ("lr", "max_lr", "betas", "step")}
        for group in policy.optimizer.param_groups
    ]
    kept(policy, result, folder / f"{name}.pt")
