"""A program whose OUTPUT gets an engine's log-probabilities before and after two publishes."""

import asyncio

import numpy as np

from support.ranks.field_ranks import LENGTH, probe
from support.rigs.sent_engine import parse_folders, seen_each_time


async def main() -> None:
    options = parse_folders(__doc__)
    name = str(options.folder)
    # vLLM's delta nets on a CPU know no other type, and its first choice for latent attention no
    # float32.
    dtype = (
        "bfloat16"
        if any(family in name for family in ("qwen3-next", "qwen35"))
        else "float32"
    )
    is_latent = any(family in name for family in ("deepseek", "kimi", "glm-lite"))
    settings = {"engine": {"attention_backend": "CPU_MLA"}} if is_latent else {}
    # The last token has no room after it.
    sequences = [tokens[:-1].tolist() for tokens in probe()]
    replies, _ = await seen_each_time(
        options,
        lambda engine, _: engine.teacher_forced_logprobs(sequences),
        [options.sent, options.folder],
        model={"dtype": dtype},
        sampling={"max_reply_tokens": 8, "max_episode_tokens": LENGTH},
        rollout_server=settings,
    )
    np.save(options.output, np.stack(replies))


if __name__ == "__main__":
    asyncio.run(main())
