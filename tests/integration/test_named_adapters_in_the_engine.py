"""A real engine serves several adapters at once, each as transformers computes it when merged."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from safetensors.torch import load_file
from slipstream.core.errors import WeightSyncError
from slipstream.rollout_server.engine_interface import GenerationFailed
from support.fakes.gloo_sender import GlooSender, layout_of
from support.fakes.small_configs import config_of_engine
from support.fakes.tiny_models import make_model_folder
from support.rigs.adapter_engine import (
    RANK,
    SAMPLING,
    SEQUENCE,
    Rig,
    Weights,
    adapters_for,
)
from support.rigs.started_engine import become_a_server, started_engine

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
NAMES = ("code", "math", "prose")


class NamedRig(Rig):
    """An engine with several adapters."""

    async def publish_all(self, weights: Weights, adapters: list[Weights]) -> None:
        """Publishes the adapters in the order of their names, behind `weights` if any."""
        await self.publish(weights, adapters[0], names=NAMES, more=adapters[1:])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NamedRig]:
    folder: Path = make_model_folder(
        tmp_path_factory.mktemp("model"),
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    lora = {"rank": RANK, "alpha": 7.0, "publish": "adapters", "adapters": list(NAMES)}
    config = config_of_engine(folder, lora=lora)
    become_a_server(config)
    base = load_file(folder / "model.safetensors")
    async with started_engine(config) as engine:
        yield NamedRig(engine, folder, base, has_plan=False)


async def test_each_request_is_computed_with_its_adapter_also_beside_others(
    rig: NamedRig,
) -> None:
    adapters = [adapters_for(rig.base, seed) for seed in (1, 2, 3)]
    await rig.publish_all(rig.base, adapters)

    async def reply(number: int, name: str) -> np.ndarray:
        """Gaps to each adapter in turn, and to none."""
        prompt = [(3 * n + number) % 20 + 4 for n in range(40)]
        sampling = dataclasses.replace(SAMPLING, adapter=name)
        generation = await rig.engine.requests.generate(
            f"{name}{number}", prompt, sampling, 60
        )
        tokens = prompt + generation.token_ids.tolist()
        expected = [
            rig.expected(rig.base, adapter, tokens)[-60:] for adapter in (*adapters, {})
        ]
        return np.array(
            [np.abs(logprobs - generation.logprobs).mean() for logprobs in expected]
        )

    gaps = await asyncio.gather(*(reply(n, name) for n in range(2) for name in NAMES))
    for gap, place in zip(gaps, [0, 1, 2] * 2, strict=True):
        assert gap[place] < 1e-4
        assert np.delete(gap, place).min() > 1e-2


async def test_a_probe_scores_each_sequence_with_its_adapter(rig: NamedRig) -> None:
    adapters = [adapters_for(rig.base, seed) for seed in (1, 2, 3)]
    await rig.publish_all(rig.base, adapters)
    scored = await rig.engine.teacher_forced_logprobs(
        [SEQUENCE] * 3, ["math", "code", "prose"]
    )
    parts = scored.reshape(3, -1)
    for part, adapter in zip(
        parts, (adapters[1], adapters[0], adapters[2]), strict=True
    ):
        assert np.abs(part - rig.expected(rig.base, adapter, SEQUENCE)).mean() < 1e-4


async def test_adapters_alone_replace_all_and_no_cached_prefix_crosses_them(
    rig: NamedRig,
) -> None:
    await rig.publish_all(
        rig.base, [adapters_for(rig.base, seed) for seed in (1, 2, 3)]
    )
    prompt = [(3 * n) % 20 + 4 for n in range(200)]
    code, math = (
        dataclasses.replace(SAMPLING, adapter=name) for name in ("code", "math")
    )
    first = await rig.engine.requests.generate("c1", prompt, code, 2)
    assert (
        await rig.engine.requests.generate("c2", prompt, math, 2)
    ).cached_tokens == 0
    assert (await rig.engine.requests.generate("c3", prompt, code, 2)).cached_tokens > 0
    await rig.publish_all({}, [adapters_for(rig.base, seed) for seed in (4, 5, 6)])
    again = await rig.engine.requests.generate("c4", prompt, code, 2)
    assert again.cached_tokens == first.cached_tokens == 0
    scored = await rig.engine.teacher_forced_logprobs([SEQUENCE], ["math"])
    new = rig.expected(rig.base, adapters_for(rig.base, 5), SEQUENCE)
    assert np.abs(scored - new).mean() < 1e-4


async def test_the_start_replies_beside_several_adapters(rig: NamedRig) -> None:
    await rig.publish_all(
        rig.base, [adapters_for(rig.base, seed) for seed in (1, 2, 3)]
    )
    math = dataclasses.replace(SAMPLING, adapter="math")
    generate = rig.engine.requests.generate
    by_start = dataclasses.replace(math, by_start=True)
    generation, _ = await asyncio.gather(
        generate("start", SEQUENCE, by_start, 40),
        generate("policy", SEQUENCE, math, 40),
    )
    tokens = SEQUENCE + generation.token_ids.tolist()
    assert (
        np.abs(rig.expected(rig.base, {}, tokens)[-40:] - generation.logprobs).mean()
        < 1e-4
    )


async def test_a_request_of_no_adapter_fails(rig: NamedRig) -> None:
    with pytest.raises(GenerationFailed, match="no adapter '', lora.adapters are code"):
        await rig.engine.requests.generate("x", SEQUENCE, SAMPLING, 2)


async def test_adapters_of_another_run_are_refused(rig: NamedRig) -> None:
    adapters = [adapters_for(rig.base, seed) for seed in (1, 2)]
    layout = layout_of({})
    layout.adapters.extend(layout_of(adapters[0]).tensors)
    layout.adapter_names.extend(["code", "math"])
    order = GlooSender("other", num_workers=1).order("other", 99)
    with pytest.raises(WeightSyncError, match="got code, math and code, math, prose"):
        await rig.engine.prepare_weights(order, layout, 1)
