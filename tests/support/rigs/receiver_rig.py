"""A real engine that is sent weights several times; one JSON line for each thing that was seen.

Run as a program, on a GPU or a CPU: it starts an engine, which forks, and ends with it.
"""

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.errors import WeightSyncError
from slipstream.core.types import PolicyVersion
from slipstream.learner.trainer.tiny_model import make_tokenizer
from slipstream.protocol.weights.nccl_group import set_nccl_environment
from slipstream.rollout_server import child_processes
from slipstream.rollout_server.engine_interface import Generation, Sampling

from support.fakes.gloo_sender import GlooSender, layout_of
from support.fakes.plain_matrices import keep_matrices_plain, multiply_float8_fast
from support.ranks.nccl_sender import NcclSender
from support.rigs.started_engine import end_engine, until_generated

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
}
WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3Config", TINY),
    "tied": ("LlamaConfig", TINY | {"tie_word_embeddings": True}),
    # vLLM's heads of this family are as wide as the hidden size divided by their number.
    "biased": ("Qwen2Config", TINY | {"head_dim": 32}),
    "moe": (
        "Qwen3MoeConfig",
        TINY
        | {"hidden_size": 128, "num_experts": 8, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 128},
    ),
    # The width of the next one.
    "qwen3-6-layers": ("Qwen3Config", WIDE | {"num_hidden_layers": 6}),
    "qwen3-0.6b": ("Qwen3Config", WIDE | {"num_hidden_layers": 28}),
}
SEQUENCES = [[1, 4, 9, 13, 22, 30, 5], [1, 7, 7, 8], [2 + n % 90 for n in range(80)]]


def say(what: str, **facts: object) -> None:
    """One line of the report; also into $OUT, as it goes."""
    line = json.dumps({"what": what, **facts})
    print(line, flush=True)
    if "OUT" in os.environ:
        with (Path(os.environ["OUT"]) / "weight_receiver.jsonl").open("a") as file:
            file.write(line + "\n")


class Rig:
    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        self.options = options
        self.publishes = 0
        self.sender: GlooSender | NcclSender | None = None
        self.weights: dict[str, dict[str, torch.Tensor]] = {}
        # The label of the weights of each version.
        self.sent: dict[PolicyVersion, str] = {}

    def make_model(self) -> None:
        """A random model on disk, and further weights for it."""
        import transformers
        from safetensors.torch import load_file, save_file

        name, sizes = SHAPES[self.options.shape]
        config = getattr(transformers, name)(**sizes, max_position_embeddings=4096)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16
        )
        model.save_pretrained(self.folder)
        make_tokenizer(self.folder)
        first = load_file(self.folder / "model.safetensors")
        self.file("").parent.mkdir(exist_ok=True)
        for label, seed in (("a", 1), ("b", 2), ("c", 3)):
            generator = torch.Generator().manual_seed(seed)
            self.weights[label] = {
                name: (
                    tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
                ).to(tensor.dtype)
                for name, tensor in first.items()
            }
            save_file(self.weights[label], self.file(label), metadata={"format": "pt"})

    def file(self, label: str) -> Path:
        # Apart: vLLM loads every such file of the model's folder.
        return self.folder / "sent" / f"{label}.safetensors"

    async def start(self) -> None:
        options = self.options
        table = {
            "run": {"name": "test", "steps": 1},
            "model": {"path": str(self.folder), "dtype": "bfloat16"},
            "algorithm": {"group_size": 4, "groups_per_step": 1, "learning_rate": 1e-3},
            "sampling": {"max_reply_tokens": 400, "max_episode_tokens": 1000},
            "rollout_server": {
                "max_episodes": 256,
                "threads": 1,
                "enforce_eager": not options.graphs,
                "gpu_memory_utilization": 0.4,
                "tensor_parallel_size": options.tensor_parallel_size,
                "quantization": options.quantization,
                "engine": {"kv_cache_dtype": options.kv_cache_dtype},
            },
        }
        config = parse_config(table, source="rig")
        os.environ |= child_processes.engine_environment(
            config, on_cpu=child_processes.is_cpu_build()
        )
        set_nccl_environment(os.environ)
        if options.plain:
            # The engine's processes are forked.
            keep_matrices_plain()
        if child_processes.is_cpu_build():
            multiply_float8_fast()
        from slipstream.rollout_server.vllm.engine import VllmEngine

        from support.fakes.hashing_worker import use_hashing_worker

        use_hashing_worker()
        started = time.monotonic()
        self.engine = await VllmEngine.start(config, seed=1)
        say("engine", start_s=round(time.monotonic() - started, 1), shape=options.shape)

    def connect(self) -> None:
        name = f"communicator-{self.publishes}"
        workers = self.options.tensor_parallel_size
        if self.options.transport == "gloo":
            self.sender = GlooSender(name, num_workers=workers)
        else:
            # A single sender at a time: the process before has the same GPU.
            if isinstance(self.sender, NcclSender):
                self.sender.kill()
            gpu = self.options.sender_gpu
            self.sender = NcclSender(
                name, gpu=gpu, num_workers=workers, deadline_s=10.0
            )

    async def publish(
        self, label: str, *, bucket_mib: float, max_buckets: int | None = None
    ) -> None:
        """A publish, with the time of each stage in milliseconds."""
        weights = self.weights[label]
        sender = self.sender
        assert sender is not None
        self.publishes += 1
        layout = layout_of(weights, int(bucket_mib * (1 << 20)))
        order = sender.order(f"p{self.publishes}", self.publishes)
        if isinstance(sender, NcclSender):
            await asyncio.to_thread(sender.load, self.file(label), layout.bucket_bytes)
        is_busy = self.engine.requests.use().open_requests > 0
        clock = [time.perf_counter()]
        sending = asyncio.create_task(
            asyncio.to_thread(sender.send, layout, weights, max_buckets=max_buckets)
        )
        try:
            await self.engine.prepare_weights(order, layout, 1)
            clock.append(time.perf_counter())
            loaded = await self.engine.receive_weights(order.publish_id)
        finally:
            sent = (await asyncio.gather(sending, return_exceptions=True))[0]
        clock.append(time.perf_counter())
        await self.engine.pauses.resume(PolicyVersion(0, self.publishes))
        clock.append(time.perf_counter())
        self.sent[PolicyVersion(0, self.publishes)] = label
        stages = zip(
            ("prepare", "receive_call", "resume"), clock, clock[1:], strict=False
        )
        say(
            "publish",
            weights=label,
            by_plan=loaded.stages.copied,
            staged=loaded.stages.staged,
            is_busy=is_busy,
            digests_agree=list(loaded.bucket_digests) == sent,
            buckets=len(loaded.bucket_digests),
            mbytes=round(sum(t.nbytes for t in weights.values()) / 1e6),
            pause_ms=round(1e3 * loaded.stages.pause_s, 2),
            receive_ms=round(1e3 * loaded.stages.receive_s, 2),
            load_ms=round(1e3 * loaded.stages.load_s, 2),
            still_ms=round(1e3 * (clock[-1] - clock[1]), 2),
            **{
                f"{name}_ms": round(1e3 * (end - begin), 2)
                for name, begin, end in stages
            },
        )

    async def score(self) -> np.ndarray:
        return await self.engine.teacher_forced_logprobs(SEQUENCES)

    async def bits(self) -> list[str]:
        """A digest of each worker's parameters."""
        return await self.engine.llm.collective_rpc("parameter_digest")

    async def gaps(
        self, replies: list[tuple[list[int], Generation]], *, bucket_mib: float
    ) -> tuple[float, float]:
        """Mean distance of tokens' log-probabilities from those of two sets of weights.

        First those that their version stands for, then all others that the reply was sampled from.
        """
        own: list[float] = []
        other: list[float] = []
        sequences = [[*prompt, *reply.token_ids.tolist()] for prompt, reply in replies]
        labels = {
            self.sent[span.version]
            for _, reply in replies
            for span in reply.version_spans
        }
        for label in sorted(labels):
            await self.publish(label, bucket_mib=bucket_mib)
            scores = await self.engine.teacher_forced_logprobs(sequences)
            ends = np.cumsum([len(sequence) - 1 for sequence in sequences])
            for (_, reply), end in zip(replies, ends, strict=True):
                gap = np.abs(scores[end - len(reply.token_ids) : end] - reply.logprobs)
                begin = 0
                for span in reply.version_spans:
                    kind = own if self.sent[span.version] == label else other
                    kind += gap[begin : begin + span.length].tolist()
                    begin += span.length
        return float(np.mean(own)), float(np.mean(other))


def parsed(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="dense")
    parser.add_argument("--transport", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--bucket-mib", type=float, default=0.05)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--sender-gpu", default="0", help="for CUDA_VISIBLE_DEVICES")
    parser.add_argument(
        "--graphs", action="store_true", help="compile and capture graphs"
    )
    parser.add_argument(
        "--quantization", default="off", help="rollout_server.quantization"
    )
    parser.add_argument("--kv-cache-dtype", default="auto", help="vLLM's argument")
    parser.add_argument(
        "--plain", action="store_true", help="no prepacked matrices on a CPU"
    )
    return parser.parse_args()


async def started(rig: Rig) -> None:
    torch.set_num_threads(1 if child_processes.is_cpu_build() else 8)
    rig.folder.mkdir(parents=True, exist_ok=True)
    rig.make_model()
    torch.set_num_threads(1)
    await rig.start()


async def main() -> None:
    """Loader, plan, plan, loader again, a failure, and a publish while requests run."""
    options = parsed(__doc__)
    rig = Rig(options.folder, options)
    await started(rig)
    try:
        await story(rig, options.bucket_mib)
    finally:
        await end_engine(rig.engine)
        if isinstance(rig.sender, NcclSender):
            rig.sender.kill()


async def story(rig: Rig, bucket_mib: float) -> None:
    rig.connect()
    # A full model first: vLLM compiles and allocates at the first request.
    await rig.publish("a", bucket_mib=bucket_mib)
    first = await rig.score()
    for label in ("b", "c", "b", "c", "b"):
        await rig.publish(label, bucket_mib=bucket_mib)
    planned = await rig.score()
    bits = await rig.bits()
    say("scored", weights="b", logprobs=[float(value) for value in planned])
    # Other buckets: the loader again, with the same weights.
    await rig.publish("b", bucket_mib=1.5 * bucket_mib)
    loaded = await rig.score()
    say(
        "scores",
        bits_equal=bits == await rig.bits(),
        equal=bool(np.array_equal(planned, loaded)),
        differ=float(np.abs(planned - loaded).max()),
        differ_from_first=float(np.abs(planned - first).mean()),
    )

    # The receiver copies by its plan for these buckets, but the sender stops too early. The update
    # after that takes a new communicator.
    if isinstance(rig.sender, GlooSender):
        rig.sender.deadline_s = 5.0
    started = time.monotonic()
    try:
        await rig.publish("c", bucket_mib=1.5 * bucket_mib, max_buckets=1)
        say("failure", error="")
    except WeightSyncError as error:
        say("failure", error=str(error), after_s=round(time.monotonic() - started, 2))
    rig.connect()
    await rig.publish("b", bucket_mib=1.5 * bucket_mib)
    again = await rig.score()
    say(
        "scores_after_failure",
        bits_equal=bits == await rig.bits(),
        equal=bool(np.array_equal(planned, again)),
        differ=float(np.abs(planned - again).max()),
    )

    sampling = Sampling(1.0, 1.0, 0, 400, 1, 1000, ignore_eos=True)
    count = 16 if child_processes.is_cpu_build() else 256
    prompts = [[(7 * n + k) % 90 + 2 for k in range(64)] for n in range(count)]
    running = [
        asyncio.create_task(
            rig.engine.requests.generate(f"r{n}", prompt, sampling, 300)
        )
        for n, prompt in enumerate(prompts)
    ]
    before = rig.engine.requests.use().generated_tokens
    await until_generated(rig.engine, before + 20 * count, running)
    for label in ("c", "b", "c"):
        await rig.publish(label, bucket_mib=1.5 * bucket_mib)
    replies = await asyncio.gather(*running)
    crossed = [
        (prompt, reply)
        for prompt, reply in zip(prompts, replies, strict=True)
        if len(reply.version_spans) > 1
    ]
    own_gap, other = await rig.gaps(crossed[:4], bucket_mib=1.5 * bucket_mib)
    say(
        "in_flight",
        tokens=sorted({len(reply.token_ids) for reply in replies}),
        most_versions=max(len(reply.version_spans) for reply in replies),
        gap=own_gap,
        gap_of_others=other,
    )
    warm = [(3 * n) % 90 + 2 for n in range(200)]
    for label, rests in (("b", False), ("c", True)):
        cached = [
            (
                await rig.engine.requests.generate(f"{label}{n}", warm, sampling, 2)
            ).cached_tokens
            for n in range(2)
        ]
        if rests:
            # The learner trains on the engine's device, and then publishes.
            await rig.engine.pauses.rest(give_back=False)
        await rig.publish(label, bucket_mib=1.5 * bucket_mib)
        after = await rig.engine.requests.generate(f"{label}2", warm, sampling, 2)
        say(
            "prefixes",
            rests=rests,
            cached_before=cached[1],
            cached_after=after.cached_tokens,
        )


if __name__ == "__main__":
    asyncio.run(main())
