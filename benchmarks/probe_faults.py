r"""Shows which faults of delivered weights a probe notices in bfloat16, and right weights' gap.

A real engine is sent the learner's weights, right and with one fault each: those of the starting
model, and those after some updates. Its log-probabilities of some tokens are compared with the
learner's. Both are kept, so that a test can check the statistic against them.

    python benchmarks/probe_faults.py --model models/smollm2 --record tests/data/probe_logprobs.npz

Needs a model that knows English. Prints one table and writes benchmarks/results/probe_faults.json.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from measure import RESULTS, progress, table, write_result
from rig import HERE
from slipstream.client.launch.preflight import free_port
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.settings.config import Config
from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.publishing.publish_totals import logit_gap

if TYPE_CHECKING:
    import torch

    Weights = dict[str, torch.Tensor]

sys.path.insert(0, str(HERE.parent / "tests"))

BUCKET_BYTES = 64 << 20
NUM_UPDATES = 20
# The files that the roles make, each in a process of its own; a file that exists is not made again.
RESULTS_OF = {"prepare": "sequences.safetensors", "start": "start.npy", "updated": "updated.npy"}
TEXTS = (
    "The lighthouse was built in 1782, when the fishermen of the village decided that the rocks "
    "north of the harbour had claimed enough lives. They carried stones from the beach and built "
    "a tower of ten metres, on top of which a fire of wood was kept burning through the night.",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n"
    "    return a\n\nprint([fibonacci(i) for i in range(10)])\n# [0, 1, 1, 2, 3, 5, 8, 13, 21]\n",
    "Question: What is the capital of France? Answer: The capital of France is Paris. Question: "
    "What is the capital of Italy? Answer: The capital of Italy is Rome.",
    "Plants use sunlight to make food from carbon dioxide and water. During this process oxygen "
    "is released into the air, and the energy of the light is stored in sugar.",
    "A prime number is a natural number greater than 1 that is not a product of two smaller "
    "natural numbers: 5 is prime, because 1 times 5 is the only way of writing it as a product.",
    "My grandmother used to bake bread every Saturday. She would wake up before the sun and knead "
    "the dough by the light of a small lamp, humming the songs of her youth.",
)


def config_of(model: Path, dtype: str) -> Config:
    """Returns the settings of learner and engine."""
    settings = {
        "run": {"name": "probe", "steps": 1},
        "model": {"path": str(model), "dtype": dtype},
        "algorithm": {"group_size": 4, "groups_per_step": 4, "learning_rate": 1e-6},
        "sampling": {"max_reply_tokens": 16, "max_episode_tokens": 300},
        "learner": {"micro_batch_tokens": 1024},
        "rollout_server": {"max_episodes": 16, "enforce_eager": True},
    }
    return parse_config(settings, source="the benchmark")


def prepare(arguments: argparse.Namespace, folder: Path) -> None:
    """Makes the model after some updates, and the sequences: texts, and sums with answers."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0)
    draw = random.Random(1)

    def sum_ids() -> tuple[list[int], list[int]]:
        first, second = draw.randrange(10), draw.randrange(10)
        question = [{"role": "user", "content": f"{first} + {second} = ?"}]
        asked = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_dict=False
        )
        answer = f"{first} + {second} = {first + second}.<|im_end|>"
        return list(asked), tokenizer(answer)["input_ids"]

    for update in range(NUM_UPDATES):
        optimizer.zero_grad()
        for _ in range(8):
            asked, answer = sum_ids()
            labels = torch.tensor([[-100] * len(asked) + answer])
            (model(torch.tensor([asked + answer]), labels=labels).loss / 8).backward()
        optimizer.step()
        progress(f"update {update + 1}")
    model.save_pretrained(folder / "updated")
    tokenizer.save_pretrained(folder / "updated")
    sums = [asked + answer for asked, answer in (sum_ids() for _ in range(8))]
    sequences = [tokenizer(text)["input_ids"] for text in TEXTS] + sums
    flat = torch.tensor([token for sequence in sequences for token in sequence])
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    save_file({"token_ids": flat, "lengths": lengths}, folder / "sequences.safetensors")


def score(arguments: argparse.Namespace, folder: Path, version: str) -> None:
    """Writes the learner's weights as on the wire, and its log-probabilities, to files."""
    import torch
    from safetensors.torch import save_file
    from slipstream.learner.trainer.model.schedule import sequence_logprobs
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.ranks.parallel import Launch
    from slipstream.learner.trainer.weights.export import hf_tensors

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    model = arguments.model if version == "start" else folder / "updated"
    policy = open_policy(
        config_of(model, arguments.dtype), Launch(rank=0, world_size=1, local_rank=0)
    )
    sequences = [np.asarray(part, dtype=np.uint32) for part in read_sequences(folder)]
    logprobs = np.concatenate(sequence_logprobs(policy, sequences, max_tokens=1024))
    weights = {
        name: tensor.cpu().clone()
        for name, tensor in hf_tensors(policy, getattr(torch, arguments.dtype))
    }
    save_file(weights, folder / f"{version}.safetensors")
    np.save(folder / f"{version}.npy", logprobs)
    policy.ranks.close()


def read_sequences(folder: Path) -> list[list[int]]:
    """Returns the token ids of all sequences."""
    from safetensors.torch import load_file

    found = load_file(folder / "sequences.safetensors")
    return [part.tolist() for part in found["token_ids"].split(found["lengths"].tolist())]


def faults(new: Weights, old: Weights) -> Iterator[tuple[str, Weights]]:
    """Yields the right weights, and copies with one fault; stale tensors come from `old`."""
    import torch

    middle = max(int(name.split(".")[2]) for name in new if ".layers." in name) // 2
    last = 2 * middle + 1 if f"model.layers.{2 * middle + 1}.mlp.up_proj.weight" in new else middle
    here, there = f"model.layers.{middle}.", f"model.layers.{middle - 1}."

    def permuted(name: str) -> Weights:
        order = torch.randperm(new[name].shape[0], generator=torch.Generator().manual_seed(0))
        return {**new, name: new[name][order].clone()}

    def swapped(first: str, second: str) -> Weights:
        return {**new, first: new[second], second: new[first]}

    yield "right", new
    if new is not old:
        yield "all stale", old
        yield "one layer stale", {**new, **{n: old[n] for n in new if n.startswith(here)}}
        embedding = "model.embed_tokens.weight"
        yield "embedding and head stale", {**new, embedding: old[embedding]}
    yield "up_proj permuted", permuted(here + "mlp.up_proj.weight")
    yield "o_proj permuted", permuted(here + "self_attn.o_proj.weight")
    yield "last v_proj permuted", permuted(f"model.layers.{last}.self_attn.v_proj.weight")
    yield (
        "k and v swapped",
        swapped(here + "self_attn.k_proj.weight", here + "self_attn.v_proj.weight"),
    )
    yield "gate and up swapped", swapped(here + "mlp.gate_proj.weight", here + "mlp.up_proj.weight")
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    yield "two norms swapped", swapped(here + norms[0], here + norms[1])
    layers = {n: new[n.replace(here, there)] for n in new if n.startswith(here)}
    layers |= {n: new[n.replace(there, here)] for n in new if n.startswith(there)}
    yield "two layers swapped", {**new, **layers}


async def deliver(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns a real engine's log-probabilities after each delivery, by version and fault."""
    from safetensors.torch import load_file
    from slipstream.rollout_server.vllm.engine import VllmEngine
    from support.fakes.gloo_sender import GlooSender, layout_of

    engine = await VllmEngine.start(config_of(arguments.model, arguments.dtype), seed=1)
    sender = GlooSender("probe", deadline_s=300.0)
    sequences, old = read_sequences(folder), load_file(folder / "start.safetensors")
    found: dict[str, Any] = {}
    try:
        for version in ("start", "updated"):
            new = load_file(folder / f"{version}.safetensors") if version == "updated" else old
            found[f"{version}/learner"] = np.load(folder / f"{version}.npy", allow_pickle=False)
            for name, weights in faults(new, old):
                layout = layout_of(weights, BUCKET_BYTES)
                order = sender.order(f"p{len(found)}", len(found))
                sending = asyncio.create_task(asyncio.to_thread(sender.send, layout, weights))
                await engine.prepare_weights(order, layout, 1)
                await engine.receive_weights(order.publish_id)
                await sending
                await engine.resume(PolicyVersion(0, len(found)))
                found[f"{version}/{name}"] = await engine.teacher_forced_logprobs(sequences)
                progress(f"{version}: {name}")
    finally:
        await engine.aclose()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, default=HERE.parent / "models" / "smollm2")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--record", type=Path, help="a file for the log-probabilities")
    parser.add_argument("--out", type=Path, default=RESULTS / "probe_faults.json")
    parser.add_argument("--role", choices=tuple(RESULTS_OF), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="of what is made first; default: a new one")
    arguments = parser.parse_args()
    if arguments.role == "prepare":
        return prepare(arguments, arguments.folder)
    if arguments.role is not None:
        return score(arguments, arguments.folder, arguments.role)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for role, result in RESULTS_OF.items():
            if (folder / result).exists():
                continue
            # Each role has a process of its own: vLLM forks, and needs the memory of the others.
            command = [sys.executable, __file__, "--role", role, "--folder", str(folder)]
            options = ["--model", str(arguments.model), "--dtype", arguments.dtype]
            subprocess.run([*command, *options], check=True, stdin=subprocess.DEVNULL)
            progress(f"{role} done")
        from slipstream.rollout_server import process

        settings = config_of(arguments.model, arguments.dtype).rollout_server
        os.environ |= process.engine_environment(settings, on_cpu=process.is_cpu_build())
        found = asyncio.run(deliver(arguments, folder))
    if arguments.record is not None:
        arguments.record.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(arguments.record, **found)
    rows = []
    gaps = {}
    for name, logprobs in found.items():
        version, _, fault = name.partition("/")
        if fault != "learner":
            expected = found[f"{version}/learner"]
            gaps[name] = logit_gap(expected, logprobs)
            mean = float(np.abs(expected - logprobs).mean())
            rows.append([version, fault, f"{gaps[name]:.4f}", f"{mean:.4f}"])
    lines = table(["weights", "fault", "gap", "mean difference"], rows)
    write_result("probe_faults", {"gaps": gaps, "table": lines}, arguments.out)
    print("\n".join(lines), flush=True)
    return None


if __name__ == "__main__":
    main()
