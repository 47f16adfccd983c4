"""A real engine that samples behind images, with the weights of a folder and then of another.

Run as a program: it starts an engine, which forks, and ends with it. OUTPUT gets the replies and
their log-probabilities before and after.
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
from slipstream.protocol.vision.placed import PlacedImage
from slipstream.rollout_server import process
from slipstream.rollout_server.engine_interface import Sampling

from support.fakes.gloo_sender import GlooSender, layout_of
from support.ranks.vision_ranks import conversations

BUCKET_BYTES = 1 << 20
LENGTH, REPLY = 64, 8
SAMPLING = Sampling(
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    max_reply_tokens=REPLY,
    max_turns=1,
    max_episode_tokens=LENGTH,
    ignore_eos=True,
)


async def replies(engine, folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    found = await asyncio.gather(
        *(
            engine.generate(
                f"{name}{place}",
                tokens.tolist(),
                SAMPLING,
                REPLY,
                images=[PlacedImage(*image) for image in images],
            )
            for place, (tokens, images) in enumerate(conversations(folder))
        )
    )
    return np.stack([one.token_ids for one in found]), np.stack([one.logprobs for one in found])


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("sent", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = {
        "run": {"name": "test", "steps": 1},
        "model": {"path": str(options.folder), "dtype": "float32"},
        "algorithm": {"group_size": 2, "groups_per_step": 1, "learning_rate": 1e-3},
        "sampling": {"max_reply_tokens": REPLY, "max_episode_tokens": LENGTH, "max_images": 2},
        "rollout_server": {"max_episodes": 8, "threads": 1},
    }
    config = parse_config(table, source="rig")
    check_model(config)
    os.environ |= process.engine_environment(config.rollout_server, on_cpu=True)
    from slipstream.rollout_server.inference.engine import VllmEngine

    engine = await VllmEngine.start(config, seed=1)
    try:
        await engine.resume(PolicyVersion(0, 0))
        first = await replies(engine, options.folder, "first")
        weights = load_file(options.sent / "model.safetensors")
        sender = GlooSender("communicator", deadline_s=60.0)
        layout = layout_of(weights, BUCKET_BYTES)
        order = sender.order("publish", 1)
        sending = asyncio.create_task(asyncio.to_thread(sender.send, layout, weights))
        await engine.prepare_weights(order, layout, 1)
        loaded = await engine.receive_weights(order.publish_id)
        assert list(loaded.bucket_digests) == await sending
        await engine.resume(PolicyVersion(0, 1))
        second = await replies(engine, options.folder, "second")
    finally:
        await engine.aclose()
    print(f"by_plan={loaded.by_plan}")
    np.savez(options.output, *first, *second)


if __name__ == "__main__":
    asyncio.run(main())
