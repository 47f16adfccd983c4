"""vLLM computes what transformers does behind images, as loaded and after a publish."""

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from make_tiny_vision_model import FAMILIES
from safetensors.torch import load_file
from slipstream.core.configuration.config_file import check_model
from slipstream.core.models.images import PlacedImage
from slipstream.rollout_server.engine_interface import Sampling
from support.fakes.gloo_sender import GlooSender, layout_of
from support.fakes.plain_matrices import keep_matrices_plain
from support.fakes.published_qwen35 import write_as_published
from support.fakes.small_configs import NGRAM, config_of_engine
from support.fakes.tiny_models import make_seeing_model
from support.ranks.vision_ranks import conversations, replied
from support.references.plain_vision import Conversation, plain_logprobs, plain_model
from support.rigs import vision_engine
from support.rigs.adapter_engine import RANK, SCALE, Rig, adapters_for
from support.rigs.receiver_story import run_program
from support.rigs.started_engine import publish, started_engine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
NAMES = ("first", "second")
GREEDY = Sampling(0.0, 1.0, 0, 24, 1, 96, ignore_eos=True)
DRAFTS = {"engine": {"speculative_config": NGRAM}}
FP8 = {"quantization": "fp8_per_channel"}
DELTA_NETS = [family for family in FAMILIES if family.startswith("qwen3_5")]


@pytest.fixture(
    scope="module", params=[family for family in FAMILIES if family not in DELTA_NETS]
)
def seen(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Path], dict[str, np.ndarray]]:
    """Two folders of a family, and what an engine replied with the weights of each."""
    return run_family(request.param, tmp_path_factory.mktemp(request.param))


def run_family(family: str, folder: Path) -> tuple[list[Path], dict[str, np.ndarray]]:
    folders = [folder / name for name in NAMES]
    for seed, each in enumerate(folders):
        make_seeing_model(each, family, seed=seed)
        if family in DELTA_NETS:
            write_as_published(each)
    files = map(str, (*folders, folder / "found.npz"))
    run_program(vision_engine.__file__, *files, limit_s=400)
    with np.load(folder / "found.npz", allow_pickle=False) as arrays:
        return folders, {name: arrays[name] for name in arrays.files}


def test_an_engine_sees_images_as_transformers_does(seen) -> None:
    folders, arrays = seen
    for folder in folders:
        expected = reply_logprobs(folder, arrays[f"{folder.name} tokens"])
        np.testing.assert_allclose(
            arrays[f"{folder.name} logprobs"], expected, rtol=0, atol=2e-4
        )


@pytest.mark.parametrize("family", DELTA_NETS)
def test_an_engine_in_bfloat16_sees_images_as_transformers_does(
    family: str, tmp_path: Path
):
    folders, arrays = run_family(family, tmp_path)
    for folder, other in zip(folders, folders[::-1], strict=True):
        tokens, logprobs = (
            arrays[f"{folder.name} {name}"] for name in ("tokens", "logprobs")
        )
        expected = reply_logprobs(folder, tokens)
        gaps = np.abs(logprobs - expected).mean(axis=1)
        apart = np.abs(reply_logprobs(other, tokens) - expected).mean(axis=1)
        turned = np.abs(
            reply_logprobs(folder, tokens, shown=upside_down) - expected
        ).mean(axis=1)
        print(
            f"mean gaps {gaps}, {apart} to the other model, {turned} with turned images"
        )
        assert gaps.mean() < 0.03 * apart.mean()
        # The last conversation has images that are not one colour.
        assert gaps[-1] < 0.2 * turned[-1]
        if f"{folder.name} experts 0" in arrays:
            # Rounding sends a token elsewhere now and then.
            assert min(found_experts(folder, arrays)) > 0.9


def upside_down(image: bytes) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.open(io.BytesIO(image)).transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(
        file, "PNG"
    )
    return file.getvalue()


def test_an_engine_says_to_which_experts_it_sent_tokens_of_images(seen) -> None:
    folders, arrays = seen
    if f"{NAMES[0]} experts 0" not in arrays:
        assert "moe" not in folders[0].parent.name
        return
    for folder in folders:
        # The second turn behind two images: their experts come from the cache.
        assert arrays[f"{folder.name} cached"][-1] == 32
        assert set(found_experts(folder, arrays)) == {1.0}


def found_experts(folder: Path, found: dict[str, np.ndarray]) -> list[float]:
    """The part of each conversation's recorded experts that transformers chooses too."""
    model = plain_model(folder)
    parts = []
    for place, conversation in enumerate(
        both_turns(folder, found[f"{folder.name} tokens"])
    ):
        with chosen_experts(model) as experts, torch.no_grad():
            plain_logprobs(model, folder, [conversation])
        recorded = found[f"{folder.name} experts {place}"]
        # The last token is sampled and not computed.
        expected = np.stack([ids.numpy() for ids in experts], axis=1)[:-1]
        assert recorded.shape == expected.shape
        parts.append(float((np.sort(recorded) == np.sort(expected)).mean()))
    return parts


@contextmanager
def chosen_experts(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """The experts of a pass, [tokens, 2] for each layer."""
    found: list[torch.Tensor] = []
    layers = model.model.language_model.layers
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda *args: found.append(args[2][2]))
        for layer in layers
    ]
    yield found
    for hook in hooks:
        hook.remove()


def both_turns(folder: Path, replies: np.ndarray) -> list[Conversation]:
    """The conversations with their first replies, and with both."""
    first, second = np.split(replies, 2)
    later_conversations = replied(conversations(folder), first)
    return [*later_conversations, *replied(later_conversations, second)]


def reply_logprobs(
    folder: Path,
    replies: np.ndarray,
    adapters: Mapping[str, torch.Tensor] = MappingProxyType({}),
    *,
    shown: Callable[[bytes], bytes] = bytes,
) -> np.ndarray:
    """Log-probabilities by transformers, with `adapters` merged and images as `shown`."""
    model = plain_model(folder)
    length = replies.shape[1]
    prefixed = {f"base_model.model.{n}": p for n, p in model.named_parameters()}
    for name in [name for name in adapters if "lora_A" in name]:
        a = adapters[name]
        b = adapters[name.replace("lora_A", "lora_B")]
        prefixed[name.replace("lora_A.", "")].data += SCALE * b @ a
    all_conversations = [
        (tokens, [(at, shown(image)) for at, image in images])
        for tokens, images in both_turns(folder, replies)
    ]
    with torch.no_grad():
        all_logprobs = plain_logprobs(model, folder, all_conversations)
    return np.stack([logprobs[-length:].numpy() for logprobs in all_logprobs])


@pytest.mark.asyncio
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
async def test_an_engine_computes_with_adapters_of_the_decoder_behind_images(
    family, tmp_path
):
    make_seeing_model(tmp_path, family)
    sampling = {"max_reply_tokens": 8, "max_episode_tokens": 64, "max_images": 2}
    lora = {"rank": RANK, "publish": "adapters"}
    is_rounded = family in DELTA_NETS
    model = {"dtype": "bfloat16" if is_rounded else "float32"}
    config = config_of_engine(tmp_path, model=model, sampling=sampling, lora=lora)
    check_model(config)
    base = load_file(tmp_path / "model.safetensors")
    decoder = {
        f"model.language_model.{name[name.index('layers.') :]}": tensor
        for name, tensor in base.items()
        if ".layers." in name and name.endswith(".weight")
    }
    async with started_engine(config) as engine:
        rig = Rig(engine, tmp_path, base, has_plan=False)
        for seed in (1, 2):
            adapters = adapters_for(decoder, seed)
            await rig.publish(base if seed == 1 else {}, adapters)
            replies = await vision_engine.replies(engine, tmp_path, f"adapters{seed}")
            tokens, logprobs = (
                replies[f"adapters{seed} {name}"] for name in ("tokens", "logprobs")
            )
            expected = reply_logprobs(tmp_path, tokens, adapters)
            without = reply_logprobs(tmp_path, tokens)
            changed = np.abs(logprobs - without).mean()
            assert changed > 1e-2
            if is_rounded:
                assert np.abs(logprobs - expected).mean() < 0.05 * changed
            else:
                np.testing.assert_allclose(logprobs, expected, rtol=0, atol=2e-4)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("family", "server", "most"),
    [
        *(
            (family, DRAFTS, 1e-4)
            for family in ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
        ),
        *((family, FP8, 0.25) for family in ("qwen2_5_vl", "qwen3_vl", "qwen3_5")),
    ],
)
async def test_an_engine_drafts_behind_images_and_computes_text_in_fp8(
    family: str, server: dict[str, object], most: float, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in NAMES]
    for seed, folder in enumerate(folders):
        make_seeing_model(folder, family, seed=seed)
        if family in DELTA_NETS:
            write_as_published(folder)
    dtype = "bfloat16" if server == FP8 else "float32"
    config = config_of_engine(
        folders[0],
        model={"dtype": dtype},
        algorithm={"weight": "token"},
        sampling={
            "max_reply_tokens": 24,
            "max_episode_tokens": 96,
            "max_images": 2 if server == DRAFTS else 0,
        },
        rollout_server=server,
    )
    check_model(config)
    all_conversations = [
        conversation
        for conversation in conversations(folders[0])
        if server == DRAFTS or not conversation[1]
    ]
    async with started_engine(config) as engine:
        rig = Rig(engine, folders[0], {}, has_plan=False)
        for folder, other in zip(folders, folders[::-1], strict=True):
            weights = load_file(folder / "model.safetensors")
            await rig.publish(
                {n: x.to(getattr(torch, dtype)) for n, x in weights.items()}, {}
            )
            models = [plain_model(folder), plain_model(other)]
            for place, (prompt, images) in enumerate(all_conversations):
                name = f"{folder.name}{place}"
                placed = [PlacedImage(*image) for image in images]
                reply = await engine.requests.generate(
                    name, prompt.tolist(), GREEDY, 24, images=placed
                )
                whole = [(np.array([*prompt, *reply.token_ids]), images)]
                with torch.no_grad():
                    all_logprobs = [
                        plain_logprobs(model, folder, whole)[0][-24:]
                        for model in models
                    ]
                gap, apart = (
                    np.abs(logprobs - reply.logprobs).mean()
                    for logprobs in all_logprobs
                )
                assert gap < most * apart
        assert (engine.requests.use().accepted_tokens > 0) == (server == DRAFTS)


@pytest.mark.asyncio
@pytest.mark.parametrize("rests", [False, True])
async def test_an_idle_engine_forgets_what_an_old_tower_saw(
    rests: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same images are shown after each publish, also to an engine that rests meanwhile."""
    folders = [tmp_path / name for name in NAMES]
    for seed, folder in enumerate(folders):
        make_seeing_model(folder, "qwen2_5_vl", seed=seed)
    sampling = {"max_reply_tokens": 8, "max_episode_tokens": 64, "max_images": 2}
    config = config_of_engine(folders[0], model={"dtype": "float32"}, sampling=sampling)
    check_model(config)
    # A plan copies plain matrices, and its updates need no pause of an idle engine.
    keep_matrices_plain(monkeypatch)
    sender = GlooSender("communicator")
    async with started_engine(config) as engine:
        for step, folder in enumerate((*folders, *folders), start=1):
            if rests and step > 1:
                await engine.pauses.rest(give_back=False)
            weights = load_file(folder / "model.safetensors")
            layout = layout_of(weights, 1 << 20)
            order = sender.order(f"publish-{step}", step)
            loaded = await publish(engine, sender, order, layout, weights)
            seen = await vision_engine.replies(engine, folder, f"step{step}")
            expected = reply_logprobs(folder, seen[f"step{step} tokens"])
            logprobs = seen[f"step{step} logprobs"]
            np.testing.assert_allclose(logprobs, expected, rtol=0, atol=2e-4)
    assert loaded.stages.copied
