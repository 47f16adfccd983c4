"""The real vLLM engine drafts with a layer whose values come with the weights."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.extensions.drafts import switch
from slipstream.extensions.drafts.extension import PREFIX
from slipstream.extensions.drafts.shape import DraftShape
from slipstream.rollout_server.episodes.renderer import Renderer
from support.fakes.small_configs import config_of_engine
from support.fakes.tiny_models import make_model_folder
from support.references.plain_drafts import kept_counts
from support.rigs.engine_rig import (
    ENDLESS,
    GREEDY,
    PROMPTS,
    Reference,
    Rig,
    Weights,
    random_weights,
)
from support.rigs.started_engine import started_engine

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
TOKENS = 3


@dataclass
class DraftingRig(Rig):
    shape: DraftShape = field(kw_only=True)


def layer_of(shape: DraftShape, seed: int) -> Weights:
    """A random layer that is often right: it begins with what follows the last token alone."""
    random = torch.Generator().manual_seed(seed)
    layer = {
        name: torch.randn(size, generator=random) * 0.03
        for name, size in shape.tensors()
    }
    layer["layers.0.post_attention_layernorm.weight"] = torch.ones(shape.hidden_size)
    layer["fc.weight"][:, : shape.hidden_size] += torch.eye(shape.hidden_size)
    return {f"{PREFIX}{name}": tensor for name, tensor in layer.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DraftingRig]:
    """An engine, with weights old and new, each with its layer; it always drafts."""
    folder = tmp_path_factory.mktemp("model")
    make_model_folder(folder, tie_word_embeddings=True)
    policy = load_file(folder / "model.safetensors")
    save_file(
        random_weights(policy, 1),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    shape = DraftShape.of(read_model_sizes(folder))
    config = config_of_engine(folder, drafts={"tokens": TOKENS})
    patch = pytest.MonkeyPatch()
    # The engine's processes are forked.
    patch.setattr(switch, "TRIAL_STEPS", 1 << 40)
    old, new = (
        dull(random_weights(policy, seed)) | layer_of(shape, seed) for seed in (1, 2)
    )
    async with started_engine(config) as engine:
        reference = Reference(folder)
        renderer = Renderer(folder)
        yield DraftingRig(engine, reference, old, new, renderer, shape=shape)
    patch.undo()


def dull(weights: Weights) -> Weights:
    """Weights whose next token depends mostly, not only, on the last one."""
    weak = ("o_proj.weight", "down_proj.weight")
    return {name: w * 0.2 if name.endswith(weak) else w for name, w in weights.items()}


async def test_the_engine_drafts_what_the_learners_layer_computes(
    rig: DraftingRig,
) -> None:
    for step, weights in enumerate((rig.old, rig.new)):
        await rig.publish(weights, step)
        before = rig.engine.requests.use()
        replies = await rig.replies(f"g{step}", PROMPTS, 48, GREEDY)
        drafted, accepted = rig.drafted_since(before)
        layer = {
            n.removeprefix(PREFIX): w
            for n, w in weights.items()
            if n.startswith(PREFIX)
        }
        counts: list[int] = []
        for prompt, reply in zip(PROMPTS, replies, strict=True):
            assert rig.gap(weights, prompt, reply).max() <= 1e-3
            tokens = [*prompt, *reply.token_ids.tolist()]
            model = rig.reference.model
            counts += kept_counts(
                model, rig.shape, layer, tokens, first=len(prompt), num_tokens=TOKENS
            )
        # Drafts at a reply's end may reach beyond it.
        at_the_end = (TOKENS + 1) * len(PROMPTS)
        assert 0 <= accepted - sum(counts) <= at_the_end
        assert 0 <= drafted - TOKENS * len(counts) <= 2 * at_the_end
        assert 0.1 * drafted < accepted < 0.9 * drafted


async def test_a_published_layer_replaces_the_one_before_and_replies_stay(
    rig: DraftingRig,
) -> None:
    await rig.publish(rig.old, 5)
    before = await rig.replies("right", PROMPTS, 48, GREEDY)
    wrong = {n: -w if n == f"{PREFIX}fc.weight" else w for n, w in rig.old.items()}
    await rig.publish(wrong, 6)
    start = rig.engine.requests.use()
    after = await rig.replies("wrong", PROMPTS, 48, GREEDY)
    drafted, accepted = rig.drafted_since(start)
    assert accepted < 0.1 * drafted
    for state, other in zip(before, after, strict=True):
        assert state.token_ids.tolist() == other.token_ids.tolist()


async def test_replies_are_distributed_as_the_model_says(rig: DraftingRig) -> None:
    await rig.publish(rig.old, 7)
    await rig.check_drafted_distribution()


async def test_an_update_in_flight_is_stamped_where_the_weights_changed(
    rig: DraftingRig,
) -> None:
    before = rig.engine.requests.use()
    await rig.check_crossings(ENDLESS, 400)
    assert rig.engine.requests.use().accepted_tokens > before.accepted_tokens
