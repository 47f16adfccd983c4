"""Images of an episode: from messages to tokens, places and the record."""

from __future__ import annotations

from pathlib import Path

import pytest
from make_tiny_vision_model import make_model, make_tokenizer
from slipstream.core.models.vision.placed import PlacedImage, image_tokens
from slipstream.core.types import ImagePlace
from slipstream.environments.colours import COLOURS, square_png
from slipstream.rollout_server.chat import NO_INPUTS, ChatMessage
from slipstream.rollout_server.episodes.history import History
from slipstream.rollout_server.episodes.recording import Recording
from slipstream.rollout_server.episodes.renderer import Renderer, RenderingFailed
from slipstream.v1 import environment_pb2

RED, BLUE = (square_png(COLOURS[name], 0, 0) for name in ("red", "blue"))
BEGIN, IMAGE, END, REPLY, COLOUR = 4, 5, 7, 3, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    make_tokenizer(folder)
    make_model(folder, "qwen2_5_vl")
    return folder


@pytest.fixture
def seeing(folder: Path) -> Renderer:
    return Renderer(folder, images=image_tokens(folder, max_images=1))


def shown(*parts: str | bytes) -> ChatMessage:
    return ChatMessage("user", "", parts=parts)


def test_a_message_of_an_environment_keeps_the_order_of_its_parts() -> None:
    part = environment_pb2.ContentPart
    message = environment_pb2.ChatMessage(role="user", parts=[part(image=RED), part(text="a")])
    found = ChatMessage.from_pb(message)
    assert found == shown(RED, "a")
    assert (found.images, found.num_characters) == ((RED,), 1)


def test_images_of_all_turns_stay_where_the_model_saw_them(seeing: Renderer) -> None:
    history, recording = History(seeing, [shown(RED, "colour")], NO_INPUTS), Recording()
    context = history.prompt()
    assert context == [1, BEGIN, *[IMAGE] * 4, END, COLOUR, REPLY]
    recording.add_context(context, history.images)
    recording.token_ids += [8, 2]
    recording.run_lengths.append(2)
    history.add(ChatMessage("assistant", "red"), [shown("colour", RED, BLUE)])
    context = history.continuation(2)
    # Nothing was tokenized again; the same image is kept once.
    recording.add_context(context, history.images)
    assert tuple(recording.images) == (RED, BLUE)
    offsets = [place.offset for place in recording.image_places]
    assert recording.image_places == [
        ImagePlace(offsets[0], 0),
        ImagePlace(offsets[1], 0),
        ImagePlace(offsets[2], 1),
    ]
    for offset in offsets:
        assert recording.token_ids[offset - 1 : offset + 5] == [BEGIN, *[IMAGE] * 4, END]
    assert recording.conversation_images[1] == PlacedImage(offsets[1], RED)


def test_a_text_cannot_name_an_image(seeing: Renderer) -> None:
    history = History(seeing, [shown("<image>", RED)], NO_INPUTS)
    with pytest.raises(RenderingFailed, match="once for each of the 1 images, it wrote 2"):
        history.prompt()


def test_a_model_of_text_is_shown_no_image(folder: Path) -> None:
    history = History(Renderer(folder), [shown(RED)], NO_INPUTS)
    with pytest.raises(RenderingFailed, match="the model sees none: .* sampling.max_images is 0"):
        history.prompt()
