"""A program whose engine samples behind images before and after a publish.

OUTPUT gets the replies and their log-probabilities.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
from slipstream.protocol.vision.placed import PlacedImage
from slipstream.rollout_server.engine_interface import Sampling

from support.ranks.vision_ranks import conversations
from support.rigs.sent_engine import parse_folders, seen_twice

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
    options = parse_folders(__doc__)
    first, second, loaded = await seen_twice(
        options,
        lambda engine, name: replies(engine, options.folder, name),
        sampling={"max_reply_tokens": REPLY, "max_episode_tokens": LENGTH, "max_images": 2},
    )
    print(f"by_plan={loaded.by_plan}")
    np.savez(options.output, *first, *second)


if __name__ == "__main__":
    asyncio.run(main())
