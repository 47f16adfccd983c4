"""A program whose engine samples behind images before and after a publish, two turns each.

OUTPUT gets the replies and their log-probabilities. From a mixture of experts it also gets the
experts of each conversation's tokens, and how many of them were computed before.
"""

import asyncio
from pathlib import Path

import numpy as np
from slipstream.core.models.images import PlacedImage
from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.rollout_server.engine_interface import Sampling

from support.ranks.vision_ranks import conversations, replied
from support.rigs.sent_engine import parse_folders, seen_twice

LENGTH = 64
REPLY = 8
SAMPLING = Sampling(
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    max_reply_tokens=REPLY,
    max_turns=1,
    max_episode_tokens=LENGTH,
    ignore_eos=True,
)


async def replies(engine, folder: Path, name: str) -> dict[str, np.ndarray]:
    """What each conversation gets, and then, without more, what goes on behind that reply."""
    asked = conversations(folder)
    found = []
    for turn in range(2):
        found += await asyncio.gather(
            *(
                engine.requests.generate(
                    f"{name}{turn}-{place}",
                    tokens.tolist(),
                    SAMPLING,
                    REPLY,
                    images=[PlacedImage(*image) for image in images],
                )
                for place, (tokens, images) in enumerate(asked)
            )
        )
        asked = replied(asked, [reply.token_ids for reply in found[-len(asked) :]])
    seen = {
        f"{name} tokens": np.stack([reply.token_ids for reply in found]),
        f"{name} logprobs": np.stack([reply.logprobs for reply in found]),
        f"{name} cached": np.array([reply.cached_tokens for reply in found]),
    }
    experts = {f"{name} experts {n}": reply.expert_ids for n, reply in enumerate(found)}
    return seen | {key: ids for key, ids in experts.items() if ids is not None}


async def main() -> None:
    options = parse_folders(__doc__)
    sizes = read_model_sizes(options.folder)
    has_delta_nets = bool(sizes.linear_heads)
    # Less than a conversation with two images and a reply, so that a second turn finds it. States
    # of delta nets take larger blocks.
    engine = {} if has_delta_nets else {"block_size": 32}
    first, second, loaded = await seen_twice(
        options,
        lambda engine, name: replies(engine, options.folder, name),
        # vLLM's delta nets on a CPU know no other type.
        model={"dtype": "bfloat16" if has_delta_nets else "float32"},
        algorithm={"router_replay": "rollout" if sizes.experts else "off"},
        sampling={
            "max_reply_tokens": REPLY,
            "max_episode_tokens": LENGTH,
            "max_images": 2,
        },
        rollout_server={"engine": engine},
    )
    print(f"by_plan={loaded.stages.copied}")
    np.savez(options.output, **first, **second)


if __name__ == "__main__":
    asyncio.run(main())
