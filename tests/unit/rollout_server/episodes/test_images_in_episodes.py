"""Images of an episode: from messages to tokens, places and the record."""

from pathlib import Path

import pytest
from slipstream.client.environment import Environment, Message, ResetResult, StepResult
from slipstream.core.models.images import PlacedImage, image_tokens
from slipstream.core.types import FailureKind, ImagePlace
from slipstream.rollout_server.chat import NO_INPUTS, ChatMessage
from slipstream.rollout_server.episodes.environment_talk import History
from slipstream.rollout_server.episodes.recording import Recording
from slipstream.rollout_server.episodes.renderer import Renderer, RenderingFailed
from slipstream.v1 import environment_pb2, fleet_pb2
from support.fakes.fake_fleet import SAMPLING
from support.fakes.tiny_models import make_seeing_model

from deploy.environments.colours import COLOURS, square_png

RED, BLUE = (square_png(COLOURS[name], 0, 0) for name in ("red", "blue"))
BEGIN = 4
IMAGE = 5
END = 7
REPLY = 3
COLOUR = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing_model(tmp_path_factory.mktemp("vision"), "qwen2_5_vl")


@pytest.fixture
def seeing(folder: Path) -> Renderer:
    return Renderer(folder, images=image_tokens(folder))


@pytest.fixture
def renderer(seeing: Renderer) -> Renderer:
    """The servers of this module see images."""
    return seeing


def shown(*parts: str | bytes) -> ChatMessage:
    return ChatMessage("user", "", parts=parts)


def test_a_message_of_an_environment_keeps_the_order_of_its_parts() -> None:
    part = environment_pb2.ContentPart
    message = environment_pb2.ChatMessage(
        role="user", parts=[part(image=RED), part(text="a")]
    )
    chat_message = ChatMessage.from_pb(message)
    assert chat_message == shown(RED, "a")
    assert (chat_message.images, chat_message.num_characters) == ((RED,), 1)


def test_images_of_all_turns_stay_where_the_model_saw_them(seeing: Renderer) -> None:
    history = History(seeing, [shown(RED, "colour")], NO_INPUTS)
    recording = Recording()
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
        assert recording.token_ids[offset - 1 : offset + 5] == [
            BEGIN,
            *[IMAGE] * 4,
            END,
        ]
    assert recording.conversation_images[1] == PlacedImage(offsets[1], RED)


def test_a_text_cannot_name_an_image(seeing: Renderer) -> None:
    history = History(seeing, [shown("<image>", RED)], NO_INPUTS)
    with pytest.raises(
        RenderingFailed, match="once for each of the 1 images, it wrote 2"
    ):
        history.prompt()


def test_a_model_of_text_is_shown_no_image(folder: Path) -> None:
    history = History(Renderer(folder), [shown(RED)], NO_INPUTS)
    with pytest.raises(
        RenderingFailed, match="the model sees none: .* sampling.max_images is 0"
    ):
        history.prompt()


class Shown(Environment[str]):
    """Shows an image whose header is good and whose pixels are cut, at one of three places."""

    def __init__(self, place: str) -> None:
        self._place = place
        cut = {"type": "image", "data": RED[: len(RED) // 2]}
        self._cut = [{"type": "text", "text": "colour"}, cut]

    def tasks(self) -> range:
        return range(1)

    def reset(self, task: int) -> ResetResult:
        content = "colour" if self._place == "later" else self._cut
        reply = "red" if self._place == "given" else None
        return ResetResult([Message("user", content)], reply=reply)

    def step(self, reply: str) -> StepResult:
        return StepResult(done=False, messages=[Message("user", self._cut)])


@pytest.mark.parametrize("place", ["first", "given", "later"])
async def test_an_image_with_cut_pixels_fails_its_episode_alone(
    server, place: str
) -> None:
    server.fleet.serve(Shown(place))
    connection = await server.join()
    sampling = fleet_pb2.SamplingSettings()
    sampling.CopyFrom(SAMPLING)
    sampling.max_images = 1
    sampling.max_image_bytes = 4096
    connection.lease("g1", members=[0], max_attempts=1, sampling=sampling)
    (trajectory,) = await server.fleet.wait_trajectories(1)
    assert trajectory.failure.kind is FailureKind.ENVIRONMENT
    assert trajectory.failure.message.startswith("an image cannot be read: ")
    assert trajectory.images == ()
    assert trajectory.num_sampled_tokens == (4 if place == "later" else 0)
