"""The real vLLM engine with a tiny mixture of experts says where it sent each token."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from slipstream.rollout_server.engine_interface import Generation, Sampling
from support.fakes.gloo_sender import GlooSender, layout_of
from support.fakes.parity_models import NUM_EXPERTS, make_mixture
from support.fakes.small_configs import config_of_engine
from support.rigs.started_engine import publish, started_engine, until_generated

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

SAMPLING = Sampling(1.0, 1.0, 0, 200, 4, 400, ignore_eos=True)
PROMPT = [1, 4, 5, 6, 3]
NUM_LAYERS = 2


class Reference:
    """The experts that transformers' model chooses with some weights, [tokens, layers, k]."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._folder = folder
        self._load = AutoModelForCausalLM.from_pretrained
        self._models: dict[str, torch.nn.Module] = {}

    @torch.no_grad()
    def experts(self, name: str, token_ids: list[int]) -> np.ndarray:
        if name not in self._models:
            self._models[name] = self._load(
                self._folder / name, dtype=torch.float32
            ).eval()
        model = self._models[name]
        found = []
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda *a: found.append(a[2][2]))
            for layer in model.model.layers
        ]
        model(torch.tensor([token_ids]))
        for hook in hooks:
            hook.remove()
        return np.stack([indices.numpy() for indices in found], axis=1)


@dataclass
class Rig:
    engine: object
    reference: Reference
    folder: Path
    publishes: int = 0

    async def publish(self, name: str, step: int) -> None:
        weights = load_file(self.folder / name / "model.safetensors")
        self.publishes += 1
        sender = GlooSender(f"communicator-{self.publishes}")
        order = sender.order(f"p{self.publishes}", step)
        layout = layout_of(weights)
        await publish(self.engine, sender, order, layout, weights)

    async def generate(
        self, name: str, prompt: list[int], num_tokens: int, *, experts_from: int = 0
    ) -> Generation:
        return await self.engine.requests.generate(
            name, prompt, SAMPLING, num_tokens, experts_from=experts_from
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("old", "new")):
        make_mixture(folder / name, seed=seed, num_hidden_layers=NUM_LAYERS)
    sampling = {"max_episode_tokens": 400}
    algorithm = {"router_replay": "rollout"}
    config = config_of_engine(folder / "old", sampling=sampling, algorithm=algorithm)
    async with started_engine(config) as engine:
        yield Rig(engine, Reference(folder), folder)


def same_experts(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """One flag for each token: all its layers went to the same experts, in whatever order."""
    assert found.shape == expected.shape
    return (np.sort(found, axis=-1) == np.sort(expected, axis=-1)).all(axis=(1, 2))


async def test_every_token_but_the_last_has_the_experts_that_transformers_chooses(
    rig,
) -> None:
    assert rig.engine.num_experts == NUM_EXPERTS
    await rig.publish("old", 0)
    prompts = [[1, *(4 + (n * m) % 28 for m in range(3 + 9 * n)), 3] for n in range(12)]
    replies = await asyncio.gather(
        *(rig.generate(f"r{n}", prompt, 40 + n) for n, prompt in enumerate(prompts))
    )
    seen = []
    for prompt, reply in zip(prompts, replies, strict=True):
        tokens = prompt + reply.token_ids.tolist()
        assert reply.expert_ids.dtype == np.uint8
        assert len(reply.expert_ids) == len(tokens) - 1
        expected = rig.reference.experts("old", tokens)[:-1]
        assert same_experts(reply.expert_ids, expected).all()
        seen.append(expected)
    # The tokens go to more than two sets of experts.
    assert len(np.unique(np.sort(np.concatenate(seen)[:, 0], axis=-1), axis=0)) > 2


async def test_turns_add_up_over_cached_prefixes(rig) -> None:
    await rig.publish("old", 0)
    tokens = [1, *(4 + n % 28 for n in range(150)), 3]
    parts = []
    for turn in range(3):
        num_tokens = sum(map(len, parts))
        reply = await rig.generate("turns", tokens, 30, experts_from=num_tokens)
        assert (reply.cached_tokens >= 128) == (turn > 0)
        parts.append(reply.expert_ids)
        tokens = tokens + reply.token_ids.tolist() + [5 + turn, 3]
    recorded = np.concatenate(parts)
    tokens = tokens[:-2]
    assert len(recorded) == len(tokens) - 1
    assert same_experts(recorded, rig.reference.experts("old", tokens)[:-1]).all()


async def test_a_cached_prefix_has_the_experts_of_when_it_was_computed(rig) -> None:
    await rig.publish("old", 0)
    prompt = [1, *(4 + n % 27 for n in range(300)), 3]
    first = await rig.generate("first", prompt, 4)
    again = await rig.generate("again", prompt, 4)
    assert again.cached_tokens >= 256
    assert np.array_equal(
        first.expert_ids[: len(prompt)], again.expert_ids[: len(prompt)]
    )


async def test_tokens_keep_the_experts_of_the_version_that_sampled_behind_them(
    rig,
) -> None:
    """An update in flight computes everything again; what is recorded stays as it was."""
    await rig.publish("old", 3)
    start = rig.engine.requests.use().generated_tokens
    replies = [
        asyncio.create_task(rig.generate(f"flight{n}", [*PROMPT, 4 + n, 3], 150))
        for n in range(8)
    ]
    await until_generated(rig.engine, start + 100, replies)
    await rig.publish("new", 4)
    crossed = 0
    for n, reply in enumerate(await asyncio.gather(*replies)):
        prompt = [*PROMPT, 4 + n, 3]
        tokens = prompt + reply.token_ids.tolist()
        assert len(reply.expert_ids) == len(tokens) - 1
        old, new = (rig.reference.experts(name, tokens)[:-1] for name in ("old", "new"))
        spans = reply.version_spans
        if len(spans) < 2:
            continue
        crossed += 1
        # The last token of the old version is the first that the new one goes on from.
        cut = len(prompt) + spans[0].length - 1
        assert same_experts(reply.expert_ids[:cut], old[:cut]).all()
        assert same_experts(reply.expert_ids[cut:], new[cut:]).all()
        assert not same_experts(reply.expert_ids[:cut], new[:cut]).all()
    assert crossed >= 3


async def test_cancelled_and_probing_requests_disturb_nothing(rig) -> None:
    await rig.publish("old", 0)
    before = rig.engine.requests.use().generated_tokens
    replies = [
        asyncio.create_task(rig.generate(f"c{n}", PROMPT, 150)) for n in range(8)
    ]
    await until_generated(rig.engine, before + 50, replies)
    for number in range(0, 8, 2):
        await rig.engine.requests.cancel(f"c{number}")
    scores = await rig.engine.teacher_forced_logprobs([[1, 4, 5], [1, 6]])
    assert len(scores) == 3
    for reply in await asyncio.gather(*replies):
        tokens = PROMPT + reply.token_ids.tolist()
        recorded = len(reply.expert_ids) if reply.expert_ids is not None else 0
        assert recorded <= len(tokens) - 1
        if recorded:
            expected = rig.reference.experts("old", tokens)[:recorded]
            assert same_experts(reply.expert_ids, expected).all()
