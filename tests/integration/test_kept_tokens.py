"""What the real engine says of the tokens that it drew from, against transformers; one engine."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from slipstream.rollout_server.engine_interface import Generation, Sampling
from slipstream.rollout_server.episodes.renderer import Renderer
from support.fakes.small_configs import config_of_engine
from support.fakes.tiny_models import make_model_folder
from support.rigs.engine_rig import (
    PROMPTS,
    SAMPLING,
    Reference,
    Rig,
    random_weights,
)
from support.rigs.started_engine import started_engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

CUTS = {
    "top_p": 0.8,
    "top_k": 6,
    "min_p": 0.05,
}
CUT = dataclasses.replace(
    SAMPLING,
    temperature=0.7,
    **CUTS,
)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[1, pytest.param(2, marks=pytest.mark.slow)],
    ids=["one stage", "two stages"],
)
async def rig(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("model")
    make_model_folder(folder, tie_word_embeddings=True)
    stored_weights = load_file(folder / "model.safetensors")
    weights = random_weights(stored_weights, seed=1)
    server = {"pipeline_parallel_size": request.param}
    config = config_of_engine(folder, sampling=CUTS, rollout_server=server)
    async with started_engine(config) as engine:
        engine_rig = Rig(
            engine=engine,
            reference=Reference(folder),
            old=weights,
            new=weights,
            renderer=Renderer(folder),
        )
        await engine_rig.publish(weights, 0)
        yield engine_rig


def kept_by_hand(logits: torch.Tensor, sampling: Sampling) -> list[int]:
    """The tokens of one place that `min_p`, then `top_k`, then `top_p` leave."""
    scaled = logits.double() / sampling.temperature
    chances = scaled.softmax(-1)
    is_unlikely = chances < sampling.min_p * chances.max()
    chances = chances.masked_fill(is_unlikely, 0.0)
    num_ranked = sampling.top_k or len(chances)
    ranked = chances.topk(num_ranked)
    shares = ranked.values / ranked.values.sum()
    shares_above = shares.cumsum(0) - shares
    is_kept = (shares > 0.0) & (shares_above < sampling.top_p)
    ids = ranked.indices[is_kept]
    return sorted(ids.tolist())


@torch.no_grad()
def check_sets(
    rig: Rig,
    prompt: list[int],
    reply: Generation,
    sampling: Sampling,
) -> None:
    tokens = prompt + reply.token_ids.tolist()
    # Loads the weights.
    rig.reference.logprobs(rig.old, tokens)
    logits = rig.reference.model(torch.tensor([tokens])).logits[0]
    rows = logits[len(prompt) - 1 : -1]
    kept_tokens = reply.kept_tokens
    assert kept_tokens is not None
    ends = np.cumsum(kept_tokens.counts)
    sets = np.split(kept_tokens.ids, ends)
    for place, row in enumerate(rows):
        ids = sets[place].tolist()
        assert ids == kept_by_hand(row, sampling)
        scaled = row.double() / sampling.temperature
        token = reply.token_ids[place]
        expected = scaled[int(token)] - scaled[ids].logsumexp(0)
        logprob = reply.logprobs[place]
        assert logprob == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"top_k": 0},
        {"top_p": 1.0},
        {"min_p": 0.0, "top_p": 1.0},
    ],
)
async def test_the_engine_names_the_tokens_that_each_token_was_drawn_from(
    rig: Rig,
    changes: dict[str, float],
) -> None:
    sampling = dataclasses.replace(CUT, **changes)
    name = f"cut {changes}"
    replies = await rig.replies(name, PROMPTS, 40, sampling)
    assert max(reply.kept_tokens.width for reply in replies) > 2
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        check_sets(rig, prompt, reply, sampling)


@pytest.mark.parametrize(
    "sampling",
    [
        SAMPLING,
        dataclasses.replace(CUT, temperature=0.0),
    ],
)
async def test_replies_that_nothing_cuts_have_no_sets(
    rig: Rig,
    sampling: Sampling,
) -> None:
    name = f"whole {sampling.temperature}"
    for reply in await rig.replies(name, PROMPTS, 20, sampling):
        assert reply.kept_tokens is None


async def test_requests_of_one_step_have_their_own_sets(rig: Rig) -> None:
    """Some requests of a batch are cut, others are not."""
    cut_replies, uncut_replies = await asyncio.gather(
        rig.replies("cut", PROMPTS, 40, CUT),
        rig.replies("uncut", PROMPTS, 40, SAMPLING),
    )
    for prompt, reply in zip(PROMPTS, cut_replies, strict=True):
        check_sets(rig, prompt, reply, CUT)
    for reply in uncut_replies:
        assert reply.kept_tokens is None
