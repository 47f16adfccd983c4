"""A real engine with the weights of a folder, which is then sent those of another.

Run as a program: it starts an engine, which forks, and ends with it. OUTPUT gets the
log-probabilities before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from slipstream.protocol.settings.config_file import check_model, parse_config
from slipstream.protocol.types import PolicyVersion
from slipstream.rollout_server import process

from support.fakes.gloo_sender import GlooSender, layout_of
from support.ranks.field_ranks import LENGTH, probe

BUCKET_BYTES = 1 << 20


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("sent", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # vLLM's delta nets on a CPU know no other type.
    dtype = "bfloat16" if "qwen3-next" in str(options.folder) else "float32"
    table: dict[str, dict[str, object]] = {
        "run": {"name": "test", "steps": 1},
        "model": {"path": str(options.folder), "dtype": dtype},
        "algorithm": {"group_size": 2, "groups_per_step": 1, "learning_rate": 1e-3},
        "sampling": {"max_reply_tokens": 8, "max_episode_tokens": LENGTH},
        "rollout_server": {"max_episodes": 8, "threads": 1},
    }
    if "deepseek" in str(options.folder):
        # vLLM's first choice for latent attention on a CPU has no float32.
        table["rollout_server"]["engine"] = {"attention_backend": "CPU_MLA"}
    config = parse_config(table, source="rig")
    check_model(config)
    os.environ |= process.engine_environment(config.rollout_server, on_cpu=True)
    from slipstream.rollout_server.inference.engine import VllmEngine

    # The last token has no room after it.
    sequences = [tokens[:-1].tolist() for tokens in probe()]
    engine = await VllmEngine.start(config, seed=1)
    try:
        await engine.resume(PolicyVersion(0, 0))
        found = [await engine.teacher_forced_logprobs(sequences)]
        read = load_file(options.sent / "model.safetensors")
        weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in read.items()}
        sender = GlooSender("communicator", deadline_s=60.0)
        layout = layout_of(weights, BUCKET_BYTES)
        order = sender.order("publish", 1)
        sending = asyncio.create_task(asyncio.to_thread(sender.send, layout, weights))
        await engine.prepare_weights(order, layout, 1)
        loaded = await engine.receive_weights(order.publish_id)
        assert list(loaded.bucket_digests) == await sending
        await engine.resume(PolicyVersion(0, 1))
        found.append(await engine.teacher_forced_logprobs(sequences))
    finally:
        await engine.aclose()
    np.save(options.output, np.stack(found))


if __name__ == "__main__":
    asyncio.run(main())
