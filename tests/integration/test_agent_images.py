"""Images in the calls of agents, against vLLM's own application; the engine follows a script."""

import base64
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from slipstream.rollout_server.episodes.recording import Recording
from support.fakes.agent_rig import (
    SAMPLING,
    AgentRig,
    agent_config,
    agent_services,
    scripted_engine,
)
from support.fakes.tiny_models import make_seeing_model

from deploy.environments.colours import COLOURS, square_png

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

RED, BLUE = (square_png(COLOURS[name], 0, 0) for name in ("red", "blue"))
SEEING = dataclasses.replace(SAMPLING, max_images=2, max_image_bytes=4096)
SHOWN = [4, 5, 5, 5, 5, 7]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AgentRig:
    folder = tmp_path_factory.mktemp("model")
    make_seeing_model(folder, "qwen2_5_vl", max_position_embeddings=4096)
    config = agent_config(folder, tool_parser=None)
    engine = scripted_engine(config, lambda _: "red")
    return AgentRig(engine, await agent_services(engine, config.rollout_server).api())


@pytest_asyncio.fixture(loop_scope="module")
async def rig(shared: AgentRig) -> AsyncIterator[AgentRig]:
    shared.begin(SEEING)
    yield shared
    await shared.recorder.settled()
    await shared.closed()
    shared.check()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def user(*parts: str | bytes) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url(part)}}
        for part in parts
    ]
    return {"role": "user", "content": content}


async def ask(rig: AgentRig, path: str, **body: object):
    async with rig.http() as client:
        return await client.post(path, json={"model": "m", **body})


async def test_images_stay_in_the_conversation_that_continues(rig: AgentRig) -> None:
    messages = [user(RED, "colour")]
    answer = await ask(rig, "/v1/chat/completions", messages=messages)
    assert answer.status_code == 200, answer.text
    messages += [{"role": "assistant", "content": "red"}, user("colour", BLUE)]
    answer = await ask(rig, "/v1/chat/completions", messages=messages)
    assert answer.status_code == 200, answer.text
    assert rig.runs() == [2]
    first, second = rig.engine.samples
    assert second.prompt[: len(first.prompt) + 2] == [*first.prompt, *first.tokens]
    assert [image.data for image in second.images] == [RED, BLUE]
    for image in second.images:
        assert second.prompt[image.offset - 1 : image.offset + 5] == SHOWN
    recording = Recording()
    recording.take_branches(rig.recorder.conversations, {}, {})
    assert tuple(recording.images) == (RED, BLUE)
    assert [place.offset for place in recording.image_places] == [
        image.offset for image in second.images
    ]


async def test_the_template_of_the_settings_shows_images(tmp_path: Path) -> None:
    make_seeing_model(tmp_path, "qwen2_5_vl", max_position_embeddings=4096)
    template = (tmp_path / "chat_template.jinja").rename(tmp_path / "mine.jinja")
    config = agent_config(tmp_path, tool_parser=None, chat_template=str(template))
    engine = scripted_engine(config, lambda _: "red")
    rig = AgentRig(engine, await agent_services(engine, config.rollout_server).api())
    rig.begin(SEEING)
    answer = await ask(rig, "/v1/chat/completions", messages=[user(RED, "colour")])
    assert answer.status_code == 200, answer.text
    (sample,) = rig.engine.samples
    (image,) = sample.images
    assert sample.prompt[image.offset - 1 : image.offset + 5] == SHOWN
    await rig.recorder.settled()
    await rig.closed()


async def test_another_branch_keeps_the_images_that_it_has_read(rig: AgentRig) -> None:
    await ask(rig, "/v1/chat/completions", messages=[user(RED, "colour")])
    history = [user(RED, "colour"), {"role": "assistant", "content": "red"}]
    for part in ("colour", BLUE):
        answer = await ask(rig, "/v1/chat/completions", messages=[*history, user(part)])
        assert answer.status_code == 200, answer.text
    assert rig.runs() == [2, 1]
    recording = Recording()
    recording.take_branches(rig.recorder.conversations, {}, {})
    assert tuple(recording.images) == (RED, BLUE)
    assert [place.image for place in recording.image_places] == [0, 0, 1]
    for offset, _ in recording.image_places:
        assert recording.token_ids[offset - 1 : offset + 5] == SHOWN


async def test_the_other_apis_show_images_too(rig: AgentRig) -> None:
    source = {
        "type": "base64",
        "media_type": "image/png",
        "data": base64.b64encode(RED).decode(),
    }
    content = [{"type": "image", "source": source}, {"type": "text", "text": "colour"}]
    answer = await ask(
        rig,
        "/v1/messages",
        max_tokens=5,
        messages=[{"role": "user", "content": content}],
    )
    assert answer.status_code == 200, answer.text
    items = [
        {
            "role": "user",
            "content": [
                {"type": "input_image", "image_url": url(BLUE), "detail": "auto"},
                {"type": "input_text", "text": "colour"},
            ],
        }
    ]
    answer = await ask(rig, "/v1/responses", input=items)
    assert answer.status_code == 200, answer.text
    assert [
        [image.data for image in samples.images] for samples in rig.engine.samples
    ] == [
        [RED],
        [BLUE],
    ]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([user(RED, BLUE, square_png(COLOURS["green"], 0, 0))], "may have 2 images"),
        ([user(b"x" * 5000)], "an image cannot be read"),
        ([user(RED[: len(RED) // 2])], "an image cannot be read"),
        ([user(RED + b"x" * 5000)], "an image may have 4096 bytes"),
        ([user(RED, "<image>")], "once for each of the 1 images, it wrote 2"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://h/"}}]}],
         "as nothing is fetched"),
        ([{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:,"}}]}],
         "must be text or images"),
    ],
)  # fmt: skip
async def test_images_that_cannot_be_taken_are_400(
    rig: AgentRig, messages, said: str
) -> None:
    answer = await ask(rig, "/v1/chat/completions", messages=messages)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert rig.runs() == []
