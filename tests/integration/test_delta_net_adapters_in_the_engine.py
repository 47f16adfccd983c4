"""A real engine computes adapters on delta nets as transformers does with them merged."""

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from support.fakes.field_models import make_delta_net_model
from support.fakes.small_configs import config_of_engine
from support.rigs.adapter_engine import RANK, SAMPLING, Rig, Weights, adapters_for
from support.rigs.started_engine import become_a_server, started_engine

pytestmark = [pytest.mark.long, pytest.mark.asyncio]
NAMES = ("math", "prose")
REPLY_TOKENS = 40
PROMPT = list(range(4, 30))


async def gaps(
    rig: Rig,
    name: str,
    number: int,
    choices: list[Weights],
) -> list[float]:
    """Mean gaps of a reply with adapter `name` to the log-probabilities with each choice."""
    prompt = PROMPT[number:]
    reply = await rig.engine.requests.generate(
        f"{name}{number}",
        prompt,
        dataclasses.replace(SAMPLING, adapter=name),
        REPLY_TOKENS,
    )
    tokens = prompt + reply.token_ids.tolist()
    mean_gaps = []
    for adapters in choices:
        expected = rig.expected(rig.base, adapters, tokens)[-REPLY_TOKENS:]
        differences = np.abs(expected - reply.logprobs)
        mean_gaps.append(float(differences.mean()))
    return mean_gaps


async def test_each_reply_is_computed_with_its_adapter(tmp_path: Path) -> None:
    folder = make_delta_net_model(tmp_path)
    base = load_file(folder / "model.safetensors")
    first = adapters_for(base, 1)
    second = adapters_for(base, 2)
    assert any(".linear_attn.in_proj_qkv." in name for name in first)
    lora = {"rank": RANK, "publish": "adapters", "adapters": list(NAMES)}
    config = config_of_engine(folder, model={"dtype": "bfloat16"}, lora=lora)
    become_a_server(config)
    async with started_engine(config) as engine:
        rig = Rig(engine, folder, base, has_plan=False)
        await rig.publish(base, first, names=NAMES, more=[second])
        replies = []
        for number in range(3):
            replies += await asyncio.gather(
                gaps(rig, NAMES[0], number, [first, second, {}]),
                gaps(rig, NAMES[1], number, [second, first, {}]),
            )
    # What bfloat16 costs is small beside what an adapter changes.
    for gap, *others in replies:
        assert gap < 0.05 * min(others)
