"""Weights leave the trainer over NCCL, whole, and a receiver that is killed costs one deadline."""

import json
import os
from pathlib import Path

import pytest
import torch
from slipstream.learner.trainer.tiny_model import make_tokenizer
from support.fakes.parity_models import make_models
from support.ranks import stream_ranks
from support.ranks.parity_layouts import LAYOUTS
from support.ranks.rank_pool import RankPool
from support.rigs import publish_scenario
from support.rigs.publish_scenario import Scenario

pytestmark = pytest.mark.timeout(600)
STREAMED = [
    "one", "one-tied", "one-moe", "tp2", "tp2-odd", "tp2-sp-qwen3", "pp2-tied", "pp2-vpp2",
    "ep2-moe", "tp2-pp2-tied", "pp2-vpp2-ep2-moe",
]  # fmt: skip


def report(**facts: object) -> None:
    line = json.dumps(facts)
    print(line, flush=True)
    if "OUT" in os.environ:
        with Path(os.environ["OUT"], "weight_publish.jsonl").open("a") as file:
            file.write(line + "\n")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_buckets_on_the_gpu_are_the_export(
    world_size: int, dtype: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"fewer than {world_size} GPUs")
    make_models(tmp_path)
    names = [name for name in STREAMED if LAYOUTS[name].world_size == world_size]
    jobs = [name if dtype == "float32" else f"{name}@{dtype}" for name in names]
    program = Path(stream_ranks.__file__)
    rank_pool.run(program, jobs, world_size=world_size, folder=tmp_path)
    for job in jobs:
        ranks = [
            torch.load(tmp_path / f"{job}-stream-{rank}.pt", weights_only=True)
            for rank in range(world_size)
        ]
        for number in range(2):
            sent = {}
            for rank in ranks:
                sent |= rank["passes"][number]["tensors"]
            exported = ranks[0]["passes"][number]["exported"]
            assert set(sent) == set(exported)
            assert all(torch.equal(sent[name], tensor) for name, tensor in exported.items()), job


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape of Qwen3-0.6B, with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": 1_000_000.0, "rope_type": "default"},
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    with torch.device("cuda"):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).to(torch.bfloat16).cpu().save_pretrained(folder)
    torch.cuda.empty_cache()
    return folder


@pytest.mark.parametrize(
    ("transport", "pp", "num_receivers"),
    [("ipc", 1, 2), ("nccl", 1, 1), ("nccl", 2, 2), ("nccl", 1, 3)],
)
def test_publish_and_kill_of_a_receiver(
    transport: str, pp: int, num_receivers: int, tmp_path: Path, model: Path
) -> None:
    needed = 1 if transport == "ipc" else pp + num_receivers
    if torch.cuda.device_count() < needed:
        pytest.skip(f"fewer than {needed} GPUs")
    scenario = Scenario(
        tmp_path,
        model,
        transport,
        num_receivers,
        learner={"world_size": pp, "parallel": {"pp": pp}},
        bucket_mib=256,
        dtype="bfloat16",
        num_kept=4,
        gpus=True,
    )
    found = publish_scenario.run(scenario)
    for seconds, result, answers in zip(found.seconds, found.results, found.answers, strict=True):
        # Each side waits for the other in its first broadcast.
        times = [result.wire_s, *(float(answer.get("wire_s", 0.0)) for answer in answers)]
        wire_s = min((seconds for seconds in times if seconds), default=0.0)
        rate = result.wire_bytes / wire_s / 1e9 if wire_s else 0.0
        report(
            transport=transport,
            pp=pp,
            receivers=num_receivers,
            seconds=round(seconds, 4),
            send_s=round(result.send_s, 4),
            wire_s=round(wire_s, 5),
            wire_gb_per_s=round(rate, 1),
            bytes=result.bytes_sent,
            error=result.error,
            received=[{k: v for k, v in answer.items() if k != "digests"} for answer in answers],
        )
    report(
        transport=transport, pp=pp, receivers=num_receivers, recovered_s=round(found.recovered_s, 3)
    )
    publish_scenario.check(found, num_senders=pp, num_receivers=num_receivers, num_kept=4)
