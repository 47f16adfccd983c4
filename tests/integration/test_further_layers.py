"""The real vLLM engine drafts with a model's own layers that predict further tokens (MTP)."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from slipstream.learner.trainer.tiny_model import make_tokenizer
from slipstream.rollout_server.episodes.renderer import Renderer
from support.fakes.field_models import make_field_model
from support.fakes.small_configs import config_of_engine
from support.rigs.engine_rig import SAMPLING, Rig, Weights, random_weights
from support.rigs.started_engine import started_engine, until_generated

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
GREEDY = dataclasses.replace(SAMPLING, ignore_eos=True, temperature=0.0)
MTP = {"method": "mtp", "num_speculative_tokens": 1}
PROMPTS = [[1, 4 + n, 5 + n] for n in range(8)]
OF_DEEPSEEK = (
    {"moe_intermediate_size": 64, "num_nextn_predict_layers": 1},
    "model.layers.{}.",
    ("eh_proj.weight", 0),
    ("enorm", "hnorm", "shared_head.norm"),
)
# Case of field_models -> sizes that vLLM's kernels for a CPU take, prefix of the further layer,
# its matrix of embedding and hidden state, of which it takes one, and its norms.
CASES = {
    "mimo.default": (
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_nextn_predict_layers": 1,
        },
        "model.mtp_layers.0.",
        ("input_proj.weight", 1),
        ("token_layernorm", "hidden_layernorm", "final_layernorm"),
    ),
    "glm.glm": OF_DEEPSEEK,
    "deepseek.latent": OF_DEEPSEEK,
}


def make_folder(folder: Path, case: str) -> Weights:
    """A model whose next token depends on the last one alone; returns its own tensors.

    Its further layer computes the same from the token that was sampled. So it drafts what the
    model would sample, as long as both have the same embeddings and the same output layer.
    """
    sizes, prefix, (projection, place), norms = CASES[case]
    make_field_model(folder.parent, case, **sizes)
    (folder.parent / case).rename(folder)
    path = folder / "config.json"
    settings = path.read_text()
    make_tokenizer(folder)
    path.write_text(settings)
    values = json.loads(settings)
    weights = other_weights(load_file(folder / "model.safetensors"), seed=1)
    hidden = values["hidden_size"]
    layers = values["num_hidden_layers"]
    last = f"model.layers.{layers - 1}."
    further = {
        k.removeprefix(last): v.clone()
        for k, v in weights.items()
        if k.startswith(last)
    }
    further |= {f"{norm}.weight": torch.ones(hidden) for norm in norms}
    further[f"{norms[-1]}.weight"] = weights["model.norm.weight"].clone()
    halves = [torch.zeros(hidden, hidden)] * 2
    halves[place] = torch.eye(hidden)
    further[projection] = torch.cat(halves, dim=1)
    layer = {prefix.format(layers) + name: tensor for name, tensor in further.items()}
    save_file(weights | layer, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def other_weights(like: Weights, seed: int) -> Weights:
    """Random weights with which attention and MLP add nothing."""
    zeroed = ("o_proj.weight", "down_proj.weight")
    return {
        name: torch.zeros_like(tensor) if name.endswith(zeroed) else tensor
        for name, tensor in random_weights(like, seed).items()
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=CASES)
async def rig(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("models") / "model"
    old = make_folder(folder, request.param)
    # vLLM's first choice for latent attention knows no float32.
    backend = {"attention_backend": "CPU_MLA"} if "latent" in request.param else {}
    engine = {"speculative_config": MTP} | backend
    config = config_of_engine(folder, rollout_server={"engine": engine})
    async with started_engine(config) as started:
        new = other_weights(old, seed=2)
        nothing: Any = None
        yield Rig(started, nothing, old, new, Renderer(folder))


def next_token(weights: Weights, token: int) -> int:
    embedded = weights["model.embed_tokens.weight"][token]
    normed = torch.nn.functional.rms_norm(embedded, embedded.shape)
    output = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return int((output @ (normed * weights["model.norm.weight"])).argmax())


async def test_a_publish_reaches_the_embeddings_with_which_the_layers_draft(
    rig: Rig,
) -> None:
    for step, weights in enumerate((rig.old, rig.new)):
        await rig.publish(weights, step)
        before = rig.engine.requests.use()
        replies = await rig.replies(f"p{step}", PROMPTS, 40, GREEDY)
        for reply, prompt in zip(replies, PROMPTS, strict=True):
            expected = [next_token(weights, prompt[-1])]
            while len(expected) < 40:
                expected.append(next_token(weights, expected[-1]))
            assert reply.token_ids.tolist() == expected
        drafted, accepted = rig.drafted_since(before)
        assert 0 < drafted == accepted


async def test_tokens_after_a_publish_in_flight_are_those_of_the_new_weights(
    rig: Rig,
) -> None:
    await rig.publish(rig.old, 3)
    start = rig.engine.requests.use().generated_tokens
    replies = [
        asyncio.create_task(rig.generate(f"flight-{n}", prompt, 200, GREEDY))
        for n, prompt in enumerate(PROMPTS)
    ]
    await until_generated(rig.engine, start + 400, replies)
    await rig.publish(rig.new, 4)
    crossed = 0
    for reply, prompt in zip(await asyncio.gather(*replies), PROMPTS, strict=True):
        versions = [
            span.version.step
            for span in reply.version_spans
            for _ in range(span.length)
        ]
        tokens = [prompt[-1], *reply.token_ids.tolist()]
        for version, (last, sampled) in zip(versions, pairwise(tokens), strict=True):
            assert sampled == next_token(rig.old if version == 3 else rig.new, last)
        crossed += set(versions) == {3, 4}
    assert crossed
