"""A rollout engine with two sets of weights for it, who sends them, and transformers beside it."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from slipstream.core.types import PolicyVersion
from slipstream.rollout_server.engine_interface import (
    EngineUse,
    Generation,
    LoadedWeights,
    Sampling,
)
from slipstream.rollout_server.episodes.renderer import Renderer

from support.fakes.gloo_sender import GlooSender, layout_of
from support.fakes.small_configs import config_of_engine
from support.fakes.tiny_models import make_model_folder
from support.rigs.started_engine import publish, started_engine, until_generated

Weights = dict[str, torch.Tensor]
SAMPLING = Sampling(1.0, 1.0, 0, 200, 1, 250)
PROMPT = [1, 4, 5, 6, 3]
# An engine that drafts is often right at this temperature; replies are as long as they may be.
TEMPERATURE = 0.15
ENDLESS = dataclasses.replace(SAMPLING, ignore_eos=True, temperature=TEMPERATURE)
GREEDY = dataclasses.replace(ENDLESS, temperature=0.0)
PROMPTS = [[1, 4 + n, 5 + n % 7, 6, 3] for n in range(8)]


class Reference:
    """The same model in transformers, in float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()

    @torch.no_grad()
    def logprobs(
        self, weights: Weights, token_ids: list[int], *, temperature: float = 1.0
    ):
        """Log-probability of every token but the first."""
        self.model.load_state_dict(weights, strict=False)
        self.model.tie_weights()
        logits = self.model(torch.tensor([token_ids])).logits[0, :-1] / temperature
        targets = torch.tensor(token_ids[1:])[:, None]
        return logits.log_softmax(-1).gather(1, targets)[:, 0].numpy()

    @torch.no_grad()
    def surprise(
        self, token_ids: list[int], start: int, temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of a token's surprise in nats, for each from `start` on.

        The weights are those of the newest `logprobs`.
        """
        logits = self.model(torch.tensor([token_ids])).logits[0, start - 1 : -1]
        logprobs = (logits / temperature).log_softmax(-1)
        mean = -(logprobs.exp() * logprobs).sum(-1)
        spread = (logprobs.exp() * logprobs**2).sum(-1) - mean**2
        return mean.numpy(), spread.numpy()


@dataclass
class Rig:
    engine: Any
    reference: Reference
    old: Weights
    new: Weights
    renderer: Renderer
    sender: GlooSender | None = None
    publishes: int = 0

    async def publish(self, weights: Weights, step: int) -> LoadedWeights:
        """A whole publish; the engine serves version `step` afterwards."""
        layout = layout_of(weights)
        self.publishes += 1
        if self.sender is None:
            self.sender = GlooSender(
                f"communicator-{self.publishes}", num_workers=self.engine.num_workers
            )
        order = self.sender.order(f"p{self.publishes}", step)
        return await publish(self.engine, self.sender, order, layout, weights)

    async def receive(self, order, layout) -> LoadedWeights:
        """Into the engine, which is paused."""
        await self.engine.prepare_weights(order, layout, 1)
        return await self.engine.receive_weights(order.publish_id)

    async def generate(
        self,
        name: str,
        prompt: list[int] = PROMPT,
        num_tokens: int = 40,
        sampling=SAMPLING,
    ) -> Generation:
        return await self.engine.requests.generate(name, prompt, sampling, num_tokens)

    async def replies(
        self,
        name: str,
        prompts: Sequence[list[int]],
        num_tokens: int,
        sampling: Sampling,
    ) -> list[Generation]:
        """One reply to each prompt, all at once."""
        return await asyncio.gather(
            *(
                self.generate(f"{name}-{n}", prompt, num_tokens, sampling)
                for n, prompt in enumerate(prompts)
            )
        )

    def drafted_since(self, before: EngineUse) -> tuple[int, int]:
        """How many tokens were drafted, and how many of these accepted."""
        use = self.engine.requests.use()
        drafted = use.drafted_tokens - before.drafted_tokens
        return drafted, use.accepted_tokens - before.accepted_tokens

    async def begun(
        self, name: str, count: int, num_tokens: int, sampling: Sampling
    ) -> list[asyncio.Task[Generation]]:
        """So many replies of up to 200 tokens that go on, with `num_tokens` tokens in all."""
        start = self.engine.requests.use().generated_tokens
        replies = [
            asyncio.create_task(
                self.generate(f"{name}{n}", num_tokens=200, sampling=sampling)
            )
            for n in range(count)
        ]
        await until_generated(self.engine, start + num_tokens, replies)
        return replies

    def gap(
        self,
        weights: Weights,
        prompt: list[int],
        generation: Generation,
        temperature: float = 1.0,
    ) -> np.ndarray:
        """Absolute differences between the engine's log-probabilities and the reference's."""
        tokens = prompt + generation.token_ids.tolist()
        expected = self.reference.logprobs(weights, tokens, temperature=temperature)
        return np.abs(expected[len(prompt) - 1 :] - generation.logprobs)

    async def check_crossings(self, sampling: Sampling, num_tokens: int) -> None:
        """Some of 16 long replies cross a publish: each token is of the version that is told."""
        await self.publish(self.old, 3)
        replies = await self.begun("flight", 16, num_tokens, sampling)
        await self.publish(self.new, 4)
        crossed = 0
        for reply in await asyncio.gather(*replies):
            spans = reply.version_spans
            assert sum(span.length for span in spans) == len(reply.token_ids)
            old, new = (
                self.gap(weights, PROMPT, reply, sampling.temperature)
                for weights in (self.old, self.new)
            )
            cut = spans[0].length
            assert spans[0].version == PolicyVersion(0, 3)
            assert old[:cut].max() <= 1e-3
            if len(spans) == 2:
                crossed += 1
                assert spans[1].version == PolicyVersion(0, 4)
                # The context was computed anew, too: these tokens agree with the new weights alone.
                assert new[cut:].max() <= 1e-3
                assert old[cut:].mean() > 0.1
        assert crossed >= 3

    async def check_drafted_distribution(self) -> None:
        """How surprising tokens are, beside the mean and variance that the model expects of that.

        For an engine that drafts and serves the old weights.
        """
        before = self.engine.requests.use()
        difference = variance = 0.0
        for turn in range(4):
            for reply in await self.replies(f"d{turn}", [PROMPT] * 16, 60, ENDLESS):
                assert self.gap(self.old, PROMPT, reply, TEMPERATURE).max() <= 1e-3
                tokens = PROMPT + reply.token_ids.tolist()
                mean, spread = self.reference.surprise(tokens, len(PROMPT), TEMPERATURE)
                difference += float((-reply.logprobs - mean).sum())
                variance += float(spread.sum())
        drafted, accepted = self.drafted_since(before)
        assert accepted > 60
        assert drafted - accepted > 60
        assert abs(difference) <= 4 * variance**0.5


def random_weights(like: Weights, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=generator) * 0.25
        if tensor.ndim > 1
        else tensor
        for name, tensor in like.items()
    }


@asynccontextmanager
async def engine_rig(folder: Path, **rollout_server: Any) -> AsyncIterator[Rig]:
    """An engine of a tiny model with a tied head, which has the old weights; `folder` is empty."""
    make_model_folder(folder, tie_word_embeddings=True)
    old = random_weights(load_file(folder / "model.safetensors"), seed=1)
    save_file(old, folder / "model.safetensors", metadata={"format": "pt"})
    async with started_engine(
        config_of_engine(folder, rollout_server=rollout_server)
    ) as engine:
        new = random_weights(old, seed=2)
        yield Rig(engine, Reference(folder), old, new, Renderer(folder))
